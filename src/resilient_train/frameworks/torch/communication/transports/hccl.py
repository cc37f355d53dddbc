"""A process group over HCCL that outlives its members: see ``frameworks/torch/communication/process_group.py``.

HCCL has no sockets of ours to shut: what waits in it ends when the device is stopped (``NpuDevice.cut``). Where all
members live, the communicators are kept and resumed, by torch_npu's own ``reinit_process_group``, which finds them in
this group. Where one is a new process, all make new ones, which find each other in torch's store, below a prefix of the
generation: nothing that the dead had written there is read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _DistributedBackendOptions

from resilient_train.frameworks.roles import Addresses
from resilient_train.frameworks.torch.communication.process_group import BuiltGroup, ResilientGroup, drop, place_of
from resilient_train.frameworks.torch_npu.errors import kind_of

BACKEND = "hccl"


class HcclGroup(ResilientGroup):
    """Its works are torch_npu's own, unguarded: to wait for one is to have the device's stream wait."""

    backend_shown = BACKEND
    adds_up_as_gloo = False

    @property
    def device(self) -> torch.device:
        return torch.device("npu")

    def build(self, generation: int, addresses: Addresses, *, replaced: bool) -> BuiltGroup:  # noqa: ARG002 - gloo's
        """Makes no connection yet: HCCL does with the first collective."""
        if self.inner is not None and not replaced:
            return BuiltGroup(generation, self.inner, [])
        return BuiltGroup(generation, self._create(PrefixStore(place_of(generation), self._store)), [])

    def _create(self, store: Store) -> dist.ProcessGroup:
        """As torch makes a group with a backend that was registered."""
        options = _DistributedBackendOptions()
        options.store, options.group_rank, options.group_size = store, self._rank, self._size
        options.timeout, options.group_id = self._timeout, self._name
        options.global_ranks_in_group = list(self.global_ranks)
        plugin = dist.Backend._plugins[BACKEND.upper()]
        backend = plugin.creator_fn(options, None)
        if isinstance(backend, dist.ProcessGroup):
            return backend
        group = dist.ProcessGroup(store, self._rank, self._size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, backend)
        return group

    def adopt(self, built: BuiltGroup) -> None:
        if built.inner is not self.inner:
            self.close_inner("it was replaced")  # torch_npu has aborted its communicators
        self._take_in(built)

    def suspend(self, why: str) -> None:
        """It stays: torch_npu's verbs look for it between stop and restart."""
        self._closed_why = why

    def broken(self) -> bool:
        """Only an error of the device's can tell."""
        return False

    def cut(self, error: RuntimeError) -> bool:
        return bool(kind_of(str(error)))

    def close_inner(self, why: str) -> None:
        held = [self.inner] if self.inner is not None else []
        self.inner, self._closed_why = None, why
        drop(held)

    def begin(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        return cast("dist.Work", getattr(self.inner, verb)(*args))

    def communicator(self, device: int) -> int:
        """HCCL's handle, for the probes; 0: no collective has made one yet."""
        if self.inner is None or self._closed_why:
            return 0
        backend: Any = self.inner._get_backend(self.device)
        return int(backend.get_hccl_comm(device)) if backend.get_hccl_comm_name(device, init_comm=False) else 0
