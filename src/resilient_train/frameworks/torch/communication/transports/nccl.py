"""A process group over NCCL that outlives its members: see ``frameworks/torch/communication/process_group.py``.

What waits in NCCL ends when its communicators are aborted, and only then: no signal reaches a kernel that spins, and
one whose peer has died spins for ever. Aborted communicators are not used again, so each generation has new ones, which
find each other in torch's store, below a prefix of the generation: nothing that the dead had written there is read. In
a recovery they are made when the group is, on the device of the loop. Those that a job begins with are made as torch
makes them, with the first collective: a script may choose its device behind ``init_process_group``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from resilient_train import config
from resilient_train._native import Probes
from resilient_train.frameworks.roles import Addresses
from resilient_train.frameworks.torch.communication.collective_results import completed, flat
from resilient_train.frameworks.torch.communication.process_group import (
    BuiltGroup,
    NoBackend,
    ResilientGroup,
    drop_by,
    place_of,
)

BACKEND = "nccl"
CUT = "its communicators were aborted: a recovery is under way"


class NcclGroup(ResilientGroup):
    """Its works are torch's own, unguarded: to wait for one is to have the device's stream wait."""

    backend_shown = BACKEND
    adds_up_as_gloo = False
    frees_in_s = 2.0
    index: ClassVar[int | None] = None
    """The device of the loop; None: no Session has begun."""
    probes: ClassVar[Probes | None] = None
    """Those of the Session."""

    def __init__(
        self, store: Store, rank: int, size: int, name: str, global_ranks: list[int], timeout: timedelta
    ) -> None:
        super().__init__(store, rank, size, name, global_ranks, timeout)
        self.was_cut = False
        """The communicators of the present generation were aborted: what waited in them looks complete, and is not."""
        self._watched = 0
        """NCCL's handle of the one that the probe asks; 0: none."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda") if self.index is None else torch.device("cuda", self.index)

    def build(self, generation: int, addresses: Addresses, *, replaced: bool) -> BuiltGroup:
        """Raises RuntimeError if a member dies before it has said where it is to be found; one that dies behind that,
        and before it has connected, is waited for until a newer recovery gives this one up.
        """
        built = self._stock(generation, addresses, replaced=replaced)
        # A connection of its own: a wait for the dead must not keep the next generation from the store.
        own: Any = self._store
        self._add_nccl(built.inner, PrefixStore(place_of(generation), own.clone()))
        return built

    def _stock(self, generation: int, addresses: Addresses, *, replaced: bool) -> BuiltGroup:  # noqa: ARG002 - see below
        """A group of torch's own for NCCL to be put into."""
        group = dist.ProcessGroup(self._store, self._rank, self._size)
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        return BuiltGroup(generation, group, [])

    def _add_nccl(self, inner: Any, store: Store) -> None:
        config.set_nccl_environment()
        kind: Any = dist.distributed_c10d.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = self._timeout
        backend = kind(store, self._rank, self._size, options)
        backend._set_sequence_number_for_group()
        inner._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
        if self.index is not None:
            torch.cuda.set_device(self.index)  # the current device is a thread's own
            inner.bound_device_id = self.device
            backend.eager_connect_single_device(self.device)

    def adopt(self, built: BuiltGroup) -> None:
        super().adopt(built)
        self.was_cut = False

    def abort_communicators(self) -> None:
        """Has all that waits in them end, on other threads: what is left of it takes NCCL some half a second, for which
        nobody waits. A kernel may wait in its stream for one of another group's: so all groups are to be aborted.
        """
        if self.inner is None or self.was_cut:
            return
        self.was_cut = True
        if self._take_out():  # else the device does not come to rest, and the process is replaced
            drop_by(self.inner._get_backend(self.device).abort)

    def break_off(self) -> None:
        super().break_off()
        self.abort_communicators()

    def suspend(self, why: str) -> None:
        self.abort_communicators()
        super().suspend(why)

    def close_inner(self, why: str) -> None:
        self.abort_communicators()
        super().close_inner(why)

    def shutdown(self) -> None:
        if self.inner is not None and not self.was_cut:
            torch.cuda.synchronize()  # what is under way is the user's
        super().shutdown()

    def broken(self) -> bool:
        return super().broken() or self.was_cut

    def cut(self, error: RuntimeError) -> bool:
        return self.was_cut or super().broken() or isinstance(error, dist.DistBackendError)

    def begin(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        if self.was_cut:
            raise RuntimeError(f"process group {self._name!r} can't be used: {CUT}")
        work: dist.Work | None = getattr(self.inner, verb)(*args)
        # A call that is not asynchronous is given to the caller's own stream, and torch returns nothing to wait for.
        return completed(args) if work is None else work

    def _get_backend(self, device: torch.device) -> Any:
        """As ``init_process_group(device_id=)`` asks, also in a process that has not joined."""
        if self.inner is None:
            return NoBackend(self._why_not("_get_backend"))
        return self.inner._get_backend(device)

    get_backend = _get_backend

    def hand_in(self) -> None:
        """Has the probe ask NCCL how the communicator is, if a collective has made it by now."""
        if self.probes is None or self._watched or self.inner is None or self.was_cut:
            return
        backend: Any = self.inner._get_backend(self.device)
        self._watched = int(backend._comm_ptr())
        if self._watched:
            self.probes.add_comm(BACKEND, self._watched)

    def _take_out(self) -> bool:
        """What is aborted is freed: nobody may ask it any more. False: the call that is under way does not return."""
        watched, self._watched = self._watched, 0
        return not watched or self.probes is None or self.probes.remove_comm(BACKEND, watched)


class GlooAndNcclGroup(NcclGroup):
    """Of tensors on the host as well, by gloo: ``"cpu:gloo,cuda:nccl"``."""

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), self.device]

    def _stock(self, generation: int, addresses: Addresses, *, replaced: bool) -> BuiltGroup:
        built = ResilientGroup.build(self, generation, addresses, replaced=replaced)
        built.inner._set_default_backend(dist.ProcessGroup.BackendType.NCCL)  # as torch does: a barrier is NCCL's
        return built

    def begin(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        tensors = [each for each in flat(args[0]) if isinstance(each, torch.Tensor)] if args else []
        if verb == "monitored_barrier" or any(each.is_cpu for each in tensors):
            return ResilientGroup.begin(self, verb, args)
        return super().begin(verb, args)
