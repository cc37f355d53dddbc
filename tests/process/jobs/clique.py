"""Runs each collective twice: by processes over gloo, and from logs (``tail_collectives.py``).

``clique.py RANKS[,RANKS...] FOLDER [long]`` prints [{"cases": how many, "different": their names}, ...].
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from resilient_train.frameworks.roles import LoggedCall
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup, wait_for_droppers
from resilient_train.frameworks.torch.communication.tail_collectives import LoggedTail
from resilient_train.frameworks.torch.communication.transports.gloo import stock_group
from resilient_train.protocol.rank_effects import Mode

TIMEOUT = timedelta(seconds=120)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 7, 1000, 65537)
MORE_SIZES = (2, 64, 4096, 300_001)
MANY = 8
"""So many members have the largest of ``SIZES`` in the long comparison only: others lie below and above them."""
Tensors = list[torch.Tensor]


class Case(NamedTuple):
    """``make(member)`` gives the arguments of a member's call, and which tensors of them it fills."""

    name: str
    verb: str
    make: Callable[[int], tuple[tuple[Any, ...], Tensors]]


def options(kind: str, **fields: Any) -> Any:
    made = getattr(c10d, kind)()
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Of many magnitudes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, shape, generator=generator, dtype=torch.int64).to(dtype)
    wide = 2.0 if dtype is torch.float16 else 8.0
    magnitudes = torch.exp(wide * (torch.rand(shape, generator=generator) - 0.5))
    return (torch.randn(shape, generator=generator) * magnitudes).to(dtype)


def reductions(size: int, dtype: torch.dtype, count: int) -> Iterator[Case]:
    names = ["SUM", "PRODUCT", "MIN", "MAX"]
    names += ["AVG"] if dtype.is_floating_point else ["BAND", "BOR", "BXOR"]

    def case(verb: str, operation: str, make: Callable[[int, Any], tuple[tuple[Any, ...], Tensors]]) -> Case:
        chosen = getattr(dist.ReduceOp, operation)
        return Case(f"{verb} {operation} {dtype} {count}", verb, lambda member: make(member, chosen))

    def of(member: int, factor: int = 1, salt: int = 0) -> torch.Tensor:
        return values(dtype, (count * factor,), 1000 * member + salt)

    def all_reduce(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        tensors = [of(member)]
        return (tensors, options("AllreduceOptions", reduceOp=op)), tensors

    def coalesced(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        tensors = [of(member), of(member, 2, 1), of(member, 1, 2)]
        return (tensors, options("AllreduceCoalescedOptions", reduceOp=op)), tensors

    def transposed(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        tensors = [of(member, 6).view(2, 3 * count).t()]
        return (tensors, options("AllreduceOptions", reduceOp=op)), tensors

    def layouts(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        """Transposed on some members only: gloo adds up what lies at the same place."""
        tensors = [of(member, 6).view(2, 3 * count).t() if member % 2 else of(member, 6).view(3 * count, 2)]
        return (tensors, options("AllreduceOptions", reduceOp=op)), tensors

    def to_root(root: int) -> Callable[[int, Any], tuple[tuple[Any, ...], Tensors]]:
        def reduce(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
            tensors = [of(member)]
            return (tensors, options("ReduceOptions", reduceOp=op, rootRank=root)), tensors if member == root else []

        return reduce

    def scattered(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        output = torch.zeros(count, dtype=dtype)
        return (output, of(member, size), options("ReduceScatterOptions", reduceOp=op)), [output]

    def scattered_lists(member: int, op: Any) -> tuple[tuple[Any, ...], Tensors]:
        output = torch.zeros(count, dtype=dtype)
        parts = list(of(member, size).chunk(size))
        return ([output], [parts], options("ReduceScatterOptions", reduceOp=op)), [output]

    for name in names:
        yield case("allreduce", name, all_reduce)
    yield case("allreduce_coalesced", "SUM", coalesced)
    yield case("allreduce", "SUM", transposed)._replace(name=f"allreduce transposed {dtype} {count}")
    yield case("allreduce", "SUM", layouts)._replace(name=f"allreduce layouts {dtype} {count}")
    for root in {0, size - 1, size // 2}:
        yield case("reduce", "SUM", to_root(root))
    yield case("reduce", "MAX", to_root(size - 1))
    for verb in ("reduce_scatter_single", "_reduce_scatter_base"):
        yield case(verb, "SUM", scattered)
    yield case("reduce_scatter", "SUM", scattered_lists)
    for verb in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
        yield case(verb, "SUM", in_lists(scattered))


def in_lists(single: Callable[..., tuple[tuple[Any, ...], Tensors]]) -> Callable[..., Any]:
    """The coalesced form of a verb that takes (output, input, options)."""

    def make(*asked: Any) -> tuple[tuple[Any, ...], Tensors]:
        (output, given, *rest), filled = single(*asked)
        return ([output], [given], *rest), filled

    return make


def movements(size: int, dtype: torch.dtype, count: int) -> Iterator[Case]:
    def of(member: int, length: int = count) -> torch.Tensor:
        return values(dtype, (length,), 77 * member)

    def empty(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype)

    def broadcast(root: int) -> Callable[[int], tuple[tuple[Any, ...], Tensors]]:
        def make(member: int) -> tuple[tuple[Any, ...], Tensors]:
            tensors = [of(member)]
            return (tensors, options("BroadcastOptions", rootRank=root)), tensors

        return make

    def gather(root: int) -> Callable[[int], tuple[tuple[Any, ...], Tensors]]:
        def make(member: int) -> tuple[tuple[Any, ...], Tensors]:
            outputs = [[empty(count) for _ in range(size)]] if member == root else []
            filled = outputs[0] if outputs else []
            return (outputs, [of(member)], options("GatherOptions", rootRank=root)), filled

        return make

    def scatter(root: int) -> Callable[[int], tuple[tuple[Any, ...], Tensors]]:
        def make(member: int) -> tuple[tuple[Any, ...], Tensors]:
            output = empty(count)
            parts = [[of(each) for each in range(size)]] if member == root else []
            return ([output], parts, options("ScatterOptions", rootRank=root)), [output]

        return make

    def all_gather(member: int) -> tuple[tuple[Any, ...], Tensors]:
        outputs = [empty(count) for _ in range(size)]
        return ([outputs], [of(member)]), outputs

    def all_gather_lists(member: int) -> tuple[tuple[Any, ...], Tensors]:
        outputs = [[empty(count)] for _ in range(size)]
        return (outputs, [of(member)]), [each for (each,) in outputs]

    def all_gather_single(member: int) -> tuple[tuple[Any, ...], Tensors]:
        output = empty(count * size)
        return (output, of(member)), [output]

    def all_to_all(member: int) -> tuple[tuple[Any, ...], Tensors]:
        outputs = [empty(count) for _ in range(size)]
        return (outputs, list(of(member, count * size).chunk(size))), outputs

    def even(member: int) -> tuple[tuple[Any, ...], Tensors]:
        output = empty(count * size)
        return (output, of(member, count * size), [], []), [output]

    def uneven(member: int) -> tuple[tuple[Any, ...], Tensors]:
        sends = [count + (member + other) % 3 for other in range(size)]
        output = empty(sum(sends))
        return (output, of(member, sum(sends)), list(sends), list(sends)), [output]

    def none_for_some(member: int) -> tuple[tuple[Any, ...], Tensors]:
        """Each sends to the first member only."""
        output = empty(count * size if member == 0 else 0)
        takes = [count] * size if member == 0 else [0] * size
        return (output, of(member), takes, [count, *[0] * (size - 1)]), [output]

    def case(verb: str, make: Callable[[int], tuple[tuple[Any, ...], Tensors]], what: str = "") -> Case:
        return Case(f"{verb} {what} {dtype} {count}", verb, make)

    def layouts(member: int) -> torch.Tensor:
        """The same shape on all; transposed in memory on the members with odd numbers."""
        wide = of(member, 6 * count)
        return wide.view(2, 3 * count).t() if member % 2 else wide.view(3 * count, 2)

    def broadcast_layouts(member: int) -> tuple[tuple[Any, ...], Tensors]:
        tensors = [layouts(member)]
        return (tensors, options("BroadcastOptions", rootRank=1)), tensors

    def scatter_layouts(member: int) -> tuple[tuple[Any, ...], Tensors]:
        output = layouts(member).clone()
        parts = [[layouts(each) for each in range(size)]] if member == 1 else []
        return ([output], parts, options("ScatterOptions", rootRank=1)), [output]

    def gather_layouts(member: int) -> tuple[tuple[Any, ...], Tensors]:
        outputs = [layouts(member).clone() for _ in range(size)]
        return ([outputs], [layouts(member)]), outputs

    yield case("broadcast", broadcast_layouts, "layouts")
    yield case("scatter", scatter_layouts, "layouts")
    yield case("allgather", gather_layouts, "layouts")
    for root in {0, size - 1, size // 2}:
        yield case("broadcast", broadcast(root), f"of {root}")
        yield case("gather", gather(root), f"to {root}")
        yield case("scatter", scatter(root), f"of {root}")
    yield case("allgather", all_gather)
    yield case("allgather_coalesced", all_gather_lists)
    for verb in ("_allgather_base", "all_gather_single"):
        yield case(verb, all_gather_single)
    for verb in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
        yield case(verb, in_lists(all_gather_single))
    yield case("alltoall", all_to_all)
    for verb in ("alltoall_base", "all_to_all_single"):
        yield case(verb, even)
        yield case(verb, uneven, "uneven")
        yield case(verb, none_for_some, "to one")


def cases(size: int, *, everything: bool) -> Iterator[Case]:
    few = SIZES if size < MANY else SIZES[:-1]
    for count in (*SIZES, *MORE_SIZES) if everything else few:
        for dtype in (*FLOATS, torch.int64):
            yield from reductions(size, dtype, count)
        for dtype in (*FLOATS, torch.int64, torch.uint8) if everything else (torch.float32, torch.uint8):
            yield from movements(size, dtype, count)
    yield Case("barrier", "barrier", lambda _: ((), []))


def digest(tensors: Tensors) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def run_over_gloo(member: int, size: int, folder: Path, everything: bool) -> None:
    """One of the real processes."""
    group = stock_group(dist.FileStore(str(folder / "store"), size), member, size, TIMEOUT)
    found = {}
    for case in cases(size, everything=everything):
        args, filled = case.make(member)
        getattr(group, case.verb)(*args).wait()
        found[case.name] = digest(filled)
    (folder / f"{member}.json").write_text(json.dumps(found))


class Logs:
    """The logs of all members' tails, in memory."""

    def __init__(self) -> None:
        self.calls: dict[tuple[int, tuple[str, int]], LoggedCall] = {}

    def of(self, rank: int) -> Any:
        def log(key: tuple[str, int], header: bytes, inputs: bytes) -> bool:
            self.calls[rank, key] = LoggedCall(header, inputs)
            return True

        def log_result(key: tuple[str, int], result: bytes) -> None:
            self.calls[rank, key] = self.calls[rank, key]._replace(result=result)

        def call(whose: int, key: tuple[str, int], _commits: int) -> LoggedCall | None:
            return self.calls.get((whose, key))

        return SimpleNamespace(
            rank=rank, log=log, log_result=log_result, call=call, completed=lambda _: None, completed_of=lambda _: 0
        )


def run_from_logs(size: int, *, everything: bool) -> list[dict[str, str]]:
    """All members as threads of this process, each finishing the same tail."""
    logs = Logs()
    found: list[dict[str, str]] = [{} for _ in range(size)]
    errors: list[BaseException] = []
    conductor: Any = SimpleNamespace(stopped=lambda: bool(errors), survive=lambda _: False, note=print)

    def finish(member: int) -> None:
        group = ResilientGroup(dist.HashStore(), member, size, "world", list(range(size)), TIMEOUT)
        tail = LoggedTail(conductor, logs.of(member), lambda call: call())
        tail.begin_exchange(range(size))
        tail.mode = Mode.EXCHANGE
        try:
            for case in cases(size, everything=everything):
                args, filled = case.make(member)
                tail.call(group, case.verb, args).wait()
                found[member][case.name] = digest(filled)
        except BaseException as error:
            errors.append(error)
        tail.close()

    threads = [threading.Thread(target=finish, args=(member,)) for member in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def compare(size: int, folder: Path, *, everything: bool) -> dict[str, Any]:
    finished = run_from_logs(size, everything=everything)
    wait_for_droppers(30)
    different = []
    for member in range(size):
        real = json.loads((folder / f"{member}.json").read_text())
        assert real.keys() == finished[member].keys()
        different += [f"{name} on member {member}" for name in real if real[name] != finished[member][name]]
    return {"cases": len(finished[0]), "different": different}


def main() -> None:
    sizes, folder, everything = sys.argv[1].split(","), Path(sys.argv[2]), "long" in sys.argv[3:]
    torch.set_num_threads(1)
    for size in sizes:  # all of them ahead: what comes from logs has threads, and a fork is to have none
        (folder / size).mkdir()
        children = []
        for member in range(int(size)):
            child = os.fork()
            if not child:
                run_over_gloo(member, int(size), folder / size, everything)
                os._exit(0)
            children.append(child)
        assert all(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children)
    print(json.dumps([compare(int(size), folder / size, everything=everything) for size in sizes]))


if __name__ == "__main__":
    main()
