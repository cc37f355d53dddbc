"""All process groups of this process: see ``frameworks/roles.Groups``. One of them: ``process_group.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined] # its stub lacks it

from resilient_train.config import recorder_entries
from resilient_train.errors import UsageError
from resilient_train.frameworks.accelerator import Accelerator
from resilient_train.frameworks.roles import Addresses, Problem
from resilient_train.frameworks.supported import torch_problem
from resilient_train.frameworks.torch.communication.gloo_at_rest import AtRest, gloos_threads
from resilient_train.frameworks.torch.communication.process_group import BuiltGroup, ResilientGroup, groups, works
from resilient_train.frameworks.torch.communication.transports.hccl import HcclGroup
from resilient_train.frameworks.torch.communication.transports.nccl import GlooAndNcclGroup, NcclGroup
from resilient_train.frameworks.torch.sharding import pipelines
from resilient_train.state.transfer import Span, chunks, view

_CHUNK_BYTES = 16 << 20
_RECORDED_MAX = 20_000


class TorchGroups:
    """``accelerator``: the device computes and communicates again together, so both are stopped and begun here."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.renewed = False
        """The connections are new ones, and the tail before them may not be over yet: see ``go_on``."""
        self._left: Mapping[str, str] = {}
        self._rest = self._to_come_to_rest()
        """For another thread than that which closes."""

    def _to_come_to_rest(self) -> AtRest:
        """Where all are of before, the groups' threads are not made with them: then none is left out."""
        return AtRest(_unread, self._left if gloos_threads().keys() - self._left else {})

    def names(self) -> tuple[str, ...]:
        return tuple(groups)

    def problem(self) -> Problem | None:
        if problem := torch_problem(torch.__version__):
            return Problem(problem)
        if not dist.is_initialized():
            return Problem("this process has no process group: call torch.distributed.init_process_group first")
        if not isinstance(world := dist.group.WORLD, ResilientGroup):
            return _not_ours(world)
        strange = _strange_backend()
        if strange:
            return Problem(
                f"a process group of this process has the backend {strange!r}, which can't be rebuilt after a fault: "
                "make it with gloo, after resilient_train is imported"
            )
        if problem := pipelines.problem():
            return Problem(problem)
        return None

    def sockets(self) -> list[tuple[int, int]]:
        return [pair for group in groups.values() for pair in group.sockets]

    def waiters(self) -> Callable[[bool], int]:
        live, rest = works.live, self._rest

        def let_go(forgotten: bool) -> int:
            if forgotten:
                return works.release(rest, live)
            return works.release(live=live) + (self._accelerator.cut() if works.live is live else 0)

        return let_go

    def finish(self, call: Callable[[], dist.Work]) -> dist.Work:
        """Makes a call behind the update, and waits until it is over, on the device too. A stop frees who waits."""
        self._accelerator.synchronize()  # what was given to the device before must not be cut
        self._accelerator.lend()
        work = call()
        work.wait()
        self._accelerator.synchronize()
        return work

    def recorded(self) -> bytes:
        # In JSON, which leaves the stack traces out: to resolve those can deadlock on the GIL. Even so it holds the GIL
        # for some 20 us an entry.
        if (kept := recorder_entries()) > _RECORDED_MAX:
            raise UsageError(
                f"torch's flight recorder keeps {kept} collectives (TORCH_FR_BUFFER_SIZE): to ask it would stop this "
                f"process for seconds; set at most {_RECORDED_MAX}"
            )
        return cast("bytes", _dump_fr_trace_json())

    def broken(self) -> bool:
        return works.ran_out() or self.cut()

    def cut(self) -> bool:
        left = [each for each in groups.values() if not each.destroyed]
        return works.refused() or any(each.closed or each.broken() for each in left)

    def close(self) -> None:
        if not any(group.solo for group in groups.values()):  # a process that joins has had no peer to wait for
            self._accelerator.stop()
        for group in groups.values():
            group.shut()
        works.drain(self._to_come_to_rest())
        self._rest = self._to_come_to_rest()
        works.since_update.clear()
        for group in groups.values():
            group.suspend("a recovery is under way")

    def build(self, generation: int, addresses: Addresses, *, replaced: bool) -> list[BuiltGroup]:
        self._left = gloos_threads()
        return [group.build(generation, addresses, replaced=replaced) for group in groups.values()]

    def adopt(self, built: list[BuiltGroup], *, replaced: bool) -> None:
        if self._accelerator.stopped:
            self._accelerator.restart(hccl_groups(), replaced=replaced)
        for group, each in zip(groups.values(), built, strict=True):
            group.adopt(each)
        self._rest = self._to_come_to_rest()
        self.renewed = True

    def go_on(self) -> None:
        """All ranks go on from here: what a cut body had begun is lost, and what was on its way to another rank."""
        self.renewed = False
        works.since_update.clear()
        for group in groups.values():
            group.forget_messages()
        pipelines.begin_anew()

    def communicators(self, device: int) -> list[int]:
        """HCCL's handles that there are by now, for the probes."""
        found = [each.communicator(device) for each in groups.values() if isinstance(each, HcclGroup)]
        return [each for each in found if each]

    def send(self, spans: list[Span], target: int) -> None:
        world, device = _world(), _carried_on()
        for piece in chunks(spans, _CHUNK_BYTES):
            world.run("send", ([_as_tensor(piece).to(device)], target, 0)).wait()

    def receive(self, spans: list[Span], source: int) -> None:
        world, device = _world(), _carried_on()
        for piece in chunks(spans, _CHUNK_BYTES):
            here = _as_tensor(piece)
            there = here.to(device)
            world.run("recv", ([there], source, 0)).wait()
            if there is not here:
                here.copy_(there)


def nccl_groups() -> list[NcclGroup]:
    """The groups of this process that NCCL serves."""
    return [each for each in groups.values() if isinstance(each, NcclGroup)]


def _unread() -> tuple[int, ...] | None:
    found = [group.unread() for group in [*groups.values()]]
    return None if None in found else tuple(count for each in found for count in each or ())


def _world() -> ResilientGroup:
    return next(iter(groups.values()))


def _carried_on() -> torch.device:
    """Where tensors have to lie that all ranks' group carries. gloo takes those of the host."""
    world = _world()
    return torch.device("cpu") if isinstance(world, GlooAndNcclGroup) else world.device


def _as_tensor(span: Span) -> torch.Tensor:
    return torch.frombuffer(view(span), dtype=torch.uint8)


def hccl_groups() -> list[dist.ProcessGroup]:
    """The groups of this process, but for the default one, that torch_npu's HCCL serves."""
    backends = dist.distributed_c10d._world.pg_map
    return [each for each, (backend, _) in backends.items() if "hccl" in backend and each is not dist.group.WORLD]


def _not_ours(world: dist.ProcessGroup | None) -> Problem:
    """The default group is torch's own."""
    uses = dist.distributed_c10d._world.pg_backend_config[cast("dist.ProcessGroup", world)]
    if any(not part.endswith(":gloo") for part in uses.split(",")):
        asked_for = "without RESILIENT_NCCL=1" if "nccl" in uses else "yet"
        return Problem(f"the process group uses {uses}, which can't take a replacement in {asked_for}", plain=True)
    refused = f"the process group's backend is {dist.get_backend()!r}, which cannot take a replacement in"
    return Problem(f'{refused}: import resilient_train before init_process_group, or pass it backend="resilient"')


def _strange_backend() -> str:
    """That of a group beside the default one which nobody could rebuild; empty if there is none."""
    backends = dist.distributed_c10d._world.pg_map
    others = (each for each in backends if each is not dist.group.WORLD and not isinstance(each, ResilientGroup))
    return next((backends[each][0] for each in others if not _is_taken(backends[each][0])), "")


def _is_taken(backend: str) -> bool:
    """HCCL's groups are rebuilt by torch_npu. Those of ``fake``, which sends nothing, have nothing to be rebuilt: with
    these torchtitan makes the dimensions of its meshes that nothing is divided over.
    """
    return "hccl" in backend or backend == "fake"
