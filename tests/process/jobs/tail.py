"""A loop whose body and tail use collectives of every kind, over groups of every kind: one kind of tail in each step.

``--kill STEP:RANK:WHERE ...``: in that step's tail the rank dies in its first collective (``first``), or in the barrier
that ends the tail (``last``), having published what it gives to it; the others come there when it is dead. What each
rank gets is in ``tail_rank<r>.jsonl``. ``--until FILE``: the bodies of the last steps wait for it.
"""

import argparse
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
assert WORLD == 4
CHAIN = [dist.new_group([low, low + 1]) for low in range(3)]
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
THREE = dist.new_group([3, 1, 2], backend="gloo")
LAST = 10
MINE = [CHAIN[low] for low in range(3) if RANK in (low, low + 1)]
Results = list[torch.Tensor]


def given(step: int, count: int = 1000, salt: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * salt + RANK)
    return torch.randn(count, generator=generator) * 10 ** torch.randint(-3, 3, (count,), generator=generator)


def reductions(step: int) -> Results:
    world, product, late = given(step), given(step, 7, 1), given(step, 333, 2)
    dist.all_reduce(world)
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
    work = dist.all_reduce(late, op=dist.ReduceOp.AVG, async_op=True)
    largest = torch.tensor([RANK * 7 % 4, step], dtype=torch.int64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    work.wait()
    transposed = given(step, 600, 3).view(20, 30).t()
    dist.all_reduce(transposed)
    return [world, product, late, largest, transposed]


def chain(step: int) -> Results:
    results = []
    for group in MINE:
        tensor = given(step, 50, len(results))
        dist.all_reduce(tensor, group=group)
        results.append(tensor)
    return results


def mesh(step: int) -> Results:
    tensors = [given(step, 1000, 1), given(step, 1000, 2)]
    dist.all_reduce(tensors[0], group=MESH["inner"].get_group())
    dist.all_reduce(tensors[1], group=MESH["outer"].get_group())
    total = functional.all_reduce(given(step, 99, 3), "sum", MESH["inner"].get_group()).wait()
    return [*tensors, total]


def three(step: int) -> Results:
    if RANK == 0:
        return []
    tensor, part = given(step), torch.zeros(10)
    dist.all_reduce(tensor, group=THREE)
    dist.reduce_scatter_tensor(part, given(step, 30, 1), group=THREE)
    return [tensor, part]


def to_roots(step: int) -> Results:
    results = []
    for root in (0, 2):
        tensor = given(step, 100, root)
        dist.reduce(tensor, dst=root)
        outputs = [torch.zeros(10) for _ in range(WORLD)] if root == RANK else None
        dist.gather(given(step, 10, 5 + root), outputs, dst=root)
        results += [tensor, *outputs] if outputs else []
    return results


def broadcasts(step: int) -> Results:
    results = []
    for root in range(WORLD):
        results.append(given(step, 40, root))
        dist.broadcast(results[-1], src=root)
    return results


def direct(step: int) -> Results:
    """The group's own methods, with arguments as only they take them."""
    world, tensor = dist.group.WORLD, given(step, 20)
    world.broadcast(tensor, 3).wait()
    largest = given(step, 20, 1)
    world.allreduce(largest, dist.ReduceOp.MAX).wait()
    output = torch.zeros(5)
    parts = [given(step, 5, each) for each in range(WORLD)] if RANK == 2 else []
    world.scatter(output_tensor=output, input_tensors=parts, root=2).wait()
    return [tensor, largest, output]


def scatters(step: int) -> Results:
    results = []
    for root in (0, 3):
        output = torch.zeros(9)
        parts = [given(step, 9, 10 * root + each) for each in range(WORLD)] if root == RANK else None
        dist.scatter(output, parts, src=root)
        results.append(output)
    return results


def gathers(step: int) -> Results:
    lists = [torch.zeros(12) for _ in range(WORLD)]
    dist.all_gather(lists, given(step, 12))
    whole, part = torch.zeros(4 * 12), torch.zeros(6)
    dist.all_gather_into_tensor(whole, given(step, 12, 1))
    dist.reduce_scatter_tensor(part, given(step, 24, 2))
    outputs = [torch.zeros(6), torch.zeros(3)]
    dist.monitored_barrier()
    with dist._coalescing_manager():
        dist.all_reduce(outputs[0].copy_(given(step, 6, 3)))
        dist.all_reduce(outputs[1].copy_(given(step, 3, 4)))
    return [*lists, whole, part, *outputs]


def exchanges(step: int) -> Results:
    even = torch.zeros(8)
    dist.all_to_all_single(even, given(step, 8))
    takes = [(RANK + other) % 3 for other in range(WORLD)]
    uneven = torch.zeros(sum(takes))
    dist.all_to_all_single(uneven, given(step, sum(takes), 1), takes, takes)
    return [even, uneven]


def objects(step: int) -> Results:
    everybody: list = [None] * WORLD
    dist.all_gather_object(everybody, {"rank": RANK, "text": "x" * (RANK + step)})
    first: list = [None] * WORLD if RANK == 1 else []
    dist.gather_object(("step", step, RANK), first if RANK == 1 else None, dst=1)
    told = [{"of": 2, "step": step}, "more"] if RANK == 2 else [None, None]
    dist.broadcast_object_list(told, src=2)
    return [torch.frombuffer(bytearray(json.dumps([everybody, first, told]).encode()), dtype=torch.uint8)]


def messages(step: int) -> Results:
    """A ring, with all ranks sending before they receive; then two in a row with a tag; then a batch."""
    left, right = (RANK - 1) % WORLD, (RANK + 1) % WORLD
    ring, first, second, batch = torch.zeros(30), torch.zeros(5), torch.zeros(5), torch.zeros(11)
    works = [dist.isend(given(step, 30), right), dist.irecv(ring, left)]
    for work in works:
        work.wait()
    if RANK % 2 == 0:
        dist.send(given(step, 5, 1), right, tag=3)
        dist.send(given(step, 5, 2), right, tag=3)
    else:
        dist.recv(first, left, tag=3)
        dist.recv(second, left, tag=3)
    ops = [dist.P2POp(dist.irecv, batch, right), dist.P2POp(dist.isend, given(step, 11, 3), left)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [ring, first, second, batch]


KINDS: dict[str, Callable[[int], Results]] = {
    each.__name__: each
    for each in (
        *(reductions, chain, mesh, three, to_roots, gathers, exchanges),
        *(broadcasts, direct, scatters, objects, messages),
    )
}


def digest(results: Results) -> str:
    found = hashlib.sha256()
    for tensor in results:
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


class Deaths:
    """The kills that this process takes part in. The dying tell their pids in a file."""

    def __init__(self, plan: list[str], session: rt.Session, run_dir: Path) -> None:
        link = read_link()
        assert link is not None
        self._planned = {(int(step), where): int(rank) for step, rank, where in (each.split(":") for each in plan)}
        self._peers = session._driver._peers
        self._run_dir = run_dir

    def come(self, step: int, where: str) -> None:
        victim = self._planned.get((step, where))
        told = self._run_dir / f"dies_{step}_{where}"
        if victim is None:
            return
        if victim == RANK:
            entered = self._peers._board.tail(RANK)[0]
            told.with_suffix(".new").write_text(str(os.getpid()))
            told.with_suffix(".new").rename(told)
            threading.Thread(target=self._die_behind, args=(entered,), daemon=True).start()
            return
        while not told.exists() or alive(int(told.read_text())):
            time.sleep(0.001)

    def _die_behind(self, entered: int) -> None:
        while self._peers._board.tail(RANK)[0] == entered:
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=len(KINDS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--kill", nargs="*", default=[])
    parser.add_argument("--until", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(RANK)
    link = read_link()
    assert link is not None
    run_dir = Path(link.run_dir)
    with rt.Session(model=model, optimizer=optimizer) as session:
        deaths = Deaths(asked.kill, session, run_dir)
        for step in session.steps(asked.steps):
            with step:
                while asked.until and step.number >= asked.steps - LAST and not asked.until.exists():
                    time.sleep(0.001)
                loss = model(torch.randn(4, 8)).square().mean()
                share = loss.detach().clone()
                for group in MINE:
                    dist.all_reduce(share, group=group)
                dist.monitored_barrier()
                dist.all_reduce(share, group=MESH["outer"].get_group())
                (loss / share).backward()
                optimizer.step()
                optimizer.zero_grad()
                deaths.come(step.number, "first")
                kind = asked.kinds[step.number % len(asked.kinds)]
                found = digest(KINDS[kind](step.number))
                deaths.come(step.number, "last")
                dist.barrier()
            if step.done:
                with (run_dir / f"tail_rank{RANK}.jsonl").open("a") as file:
                    file.write(json.dumps({"step": step.number, "kind": kind, "found": found}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
