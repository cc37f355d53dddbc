"""A process group over NCCL: what of it is made anew, what is aborted, and who is told before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch._C._distributed_c10d import ProcessGroupGloo  # noqa: E402

from resilient_train.errors import ConfigError, UsageError  # noqa: E402
from resilient_train.frameworks.torch.communication import process_group as group_module  # noqa: E402
from resilient_train.frameworks.torch.communication.address_store import FirstAddresses  # noqa: E402
from resilient_train.frameworks.torch.communication.transports import nccl  # noqa: E402
from resilient_train.frameworks.torch.communication.transports.nccl import GlooAndNcclGroup, NcclGroup  # noqa: E402

CPU = torch.device("cpu")
NOWHERE: Any = None
"""Addresses that nobody asks: NCCL's store is torch's."""


class Backend(ProcessGroupGloo):
    """Has what torch's own has, and carries tensors of the CPU."""

    class Options:
        _timeout = timedelta(0)

    made: list[Backend]
    done: list[str]

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        super().__init__(store, rank, size, timeout=options._timeout)
        self.own_store, self.given_timeout = store, options._timeout
        self.made.append(self)

    @property
    def options(self) -> Any:
        return SimpleNamespace(_timeout=self.given_timeout)

    def eager_connect_single_device(self, device: Any) -> None:
        self.done.append(f"connect {device}")

    def abort(self) -> None:
        self.done.append("abort")

    def _comm_ptr(self) -> int:
        return 7


class OnCpu(NcclGroup):
    """The tensors here lie there."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu", 0)  # an index is what a bound device needs


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> type[Backend]:
    """Stands for torch's, registered for tensors of the CPU."""
    Backend.made, Backend.done = [], []
    real = torch.device
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", Backend, raising=False)
    monkeypatch.setattr(
        nccl, "torch", SimpleNamespace(device=lambda *_: real("cpu"), cuda=torch.cuda, Tensor=torch.Tensor)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: Backend.done.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: Backend.done.append("synchronize"))
    for name in list(os.environ):
        if name.startswith("TORCH_NCCL_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    return Backend


@pytest.fixture
def group() -> Iterator[NcclGroup]:
    one = OnCpu(dist.HashStore(), 0, 1, "world", [0], timedelta(seconds=9))
    one.adopt(one.build(0, NOWHERE, replaced=False))
    yield one
    one.close_inner("over")
    group_module.wait_for_droppers(1.0)


def call(group: NcclGroup, *, later: bool = True) -> Any:
    options = dist.AllreduceOptions()
    options.asyncOp = later
    return group.run_inner("allreduce", ([torch.ones(2)], options))


def aborted() -> int:
    group_module.wait_for_droppers(1.0)
    return Backend.done.count("abort")


def test_each_generation_has_its_own(group: NcclGroup) -> None:
    """Its members find each other below the generation, by a connection that no wait of an older one blocks."""
    call(group).wait()
    group.suspend("a recovery is under way")
    with pytest.raises(UsageError, match="a recovery is under way"):
        call(group)
    group.adopt(group.build(1, NOWHERE, replaced=False))
    call(group).wait()
    first, second = Backend.made
    first.own_store.set("id", "of the dead")
    assert not second.own_store.check(["id"])
    assert second.given_timeout == timedelta(seconds=9)
    assert aborted() == 1


def test_it_connects_at_once_where_the_loop_has_a_device(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may choose it behind init_process_group."""
    assert Backend.done == []
    monkeypatch.setattr(NcclGroup, "index", 3)
    group.build(1, NOWHERE, replaced=False)
    assert Backend.done == ["set 3", "connect cpu:0"]


def test_who_is_cut_hears_it_from_the_next_call(group: NcclGroup) -> None:
    group.abort_communicators()
    group.abort_communicators()
    assert aborted() == 1
    assert group.broken()
    with pytest.raises(RuntimeError, match="its communicators were aborted: a recovery is under way") as caught:
        call(group)
    assert group.cut(caught.value)
    group.suspend("a recovery is under way")
    group.adopt(group.build(1, NOWHERE, replaced=True))
    assert not group.broken()
    call(group).wait()


def test_an_error_of_the_scripts_is_none_of_a_fault(group: NcclGroup) -> None:
    assert not group.cut(RuntimeError("the tensors differ in their shapes"))
    assert group.cut(dist.DistBackendError("NCCL error"))


def test_a_call_that_waits_has_a_work_too(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is given to the caller's own stream torch returns none."""
    monkeypatch.setattr(
        group, "inner", SimpleNamespace(allreduce=lambda *_: None, _get_backend=lambda _: Backend.made[0])
    )
    assert call(group, later=False).wait()


def test_nobody_asks_a_communicator_that_is_freed(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Backend.done
    probes = SimpleNamespace(
        add_comm=lambda library, comm: told.append(f"ask {library} {comm}"),
        remove_comm=lambda library, comm: told.append(f"leave {library} {comm}") or True,
    )
    monkeypatch.setattr(NcclGroup, "probes", probes)
    group.hand_in()
    group.hand_in()
    group.abort_communicators()
    assert aborted() == 1
    group.hand_in()
    assert told == ["ask nccl 7", "leave nccl 7", "abort"]


def test_what_the_probe_does_not_leave_is_not_freed(group: NcclGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = SimpleNamespace(add_comm=lambda *_: None, remove_comm=lambda *_: False)
    monkeypatch.setattr(NcclGroup, "probes", probes)
    group.hand_in()
    group.abort_communicators()
    assert aborted() == 0
    assert group.broken()


def test_who_destroys_it_has_its_work_done_first(group: NcclGroup) -> None:
    group.shutdown()
    assert aborted() == 1
    assert Backend.done == ["synchronize", "abort"]


def test_torch_may_ask_for_a_backend_before_there_is_one() -> None:
    """As it does where ``init_process_group`` is told the device."""
    one = OnCpu(dist.HashStore(), 0, 2, "world", [0, 1], timedelta(seconds=9))
    assert not one._get_backend(CPU).supports_splitting
    with pytest.raises(UsageError, match="it has not joined the others yet"):
        one._get_backend(CPU).options  # noqa: B018 - asked for


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ENABLE_MONITORING"])
def test_what_torch_would_do_by_itself_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(os.environ, name, "1")
    one = OnCpu(dist.HashStore(), 0, 1, "world", [0], timedelta(seconds=9))
    with pytest.raises(ConfigError, match=f"{name}=1: torch would act"):
        one.build(0, NOWHERE, replaced=False)


def test_what_launchers_set_for_everybody_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    one = OnCpu(dist.HashStore(), 0, 1, "world", [0], timedelta(seconds=9))
    one.build(0, NOWHERE, replaced=False)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_of_both_each_carries_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host go by gloo, with its sockets watched; a barrier is NCCL's."""
    store = dist.HashStore()
    one = GlooAndNcclGroup(store, 0, 1, "world", [0], timedelta(seconds=9))
    added: list[Any] = []
    monkeypatch.setattr(one, "_add_nccl", lambda *given: added.append(given))
    one.adopt(one.build(0, FirstAddresses(store, 0), replaced=False))
    assert len(added) == 1
    assert next(iter(one._device_types)).type == "cpu"
    host = torch.ones(2)
    one.run_inner("allreduce", ([host], dist.AllreduceOptions())).wait()
    given: list[str] = []
    monkeypatch.setattr(one, "inner", SimpleNamespace(barrier=lambda *_: given.append("barrier")))
    one.run_inner("barrier", (dist.BarrierOptions(),)).wait()
    assert given == ["barrier"]
    one.inner = None
