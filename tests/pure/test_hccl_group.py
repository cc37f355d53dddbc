"""A process group over HCCL: what of it stays in a recovery, and what is made anew."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch._C._distributed_c10d import ProcessGroupGloo  # noqa: E402

from resilient_train import _register  # noqa: E402
from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.torch import groups as groups_module  # noqa: E402
from resilient_train.frameworks.torch.communication import process_group as group_module  # noqa: E402
from resilient_train.frameworks.torch.communication.transports.hccl import HcclGroup  # noqa: E402
from resilient_train.frameworks.torch.groups import TorchGroups  # noqa: E402

NOWHERE: Any = None
"""Addresses that nobody asks: HCCL's store is torch's."""


class OnCpu(HcclGroup):
    """The tensors here lie there."""

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Backend(ProcessGroupGloo):
    """Has the methods that torch_npu's backend has."""

    comm = 0

    def get_hccl_comm_name(self, _rank: int, init_comm: bool = True) -> str:
        assert not init_comm, "a communicator would be made, which blocks until all members have come"
        return "made" if self.comm else ""

    def get_hccl_comm(self, _rank: int) -> int:
        return self.comm


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Backend]]:
    """(options, backend) of each that was made."""
    found: list[tuple[Any, Backend]] = []

    def create(options: Any, _: Any) -> Backend:
        backend = Backend(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        found.append((options, backend))
        return backend

    monkeypatch.setitem(dist.Backend._plugins, "HCCL", SimpleNamespace(creator_fn=create))
    return found


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch, made: list[tuple[Any, Backend]]) -> Iterator[HcclGroup]:
    one = OnCpu(dist.HashStore(), 0, 1, "world", [0], timedelta(seconds=9))
    one.adopt(one.build(0, NOWHERE, replaced=False))
    monkeypatch.setattr(groups_module, "groups", {"world": one})
    yield one
    one.close_inner("over")
    group_module.wait_for_droppers(1.0)


def test_where_all_live_it_stays(group: HcclGroup, made: list[tuple[Any, Backend]]) -> None:
    """torch_npu looks for its backend between stop and restart; the script finds it closed."""
    ones = torch.ones(2)
    group.run_inner("allreduce", ([ones], dist.AllreduceOptions())).wait()
    inner = group.inner
    group.suspend("a recovery is under way")
    assert group._get_backend(group.device) is made[0][1]
    assert group.closed
    with pytest.raises(UsageError, match="a recovery is under way"):
        group.run_inner("allreduce", ([ones], dist.AllreduceOptions()))
    group.adopt(group.build(1, NOWHERE, replaced=False))
    assert group.inner is inner
    assert not group.closed
    assert len(made) == 1


def test_with_a_new_process_it_is_new(group: HcclGroup, made: list[tuple[Any, Backend]]) -> None:
    """Its members find each other below the generation: what the dead one had written is not read."""
    group.suspend("a recovery is under way")
    built = group.build(1, NOWHERE, replaced=True)
    assert group._get_backend(group.device) is made[0][1], "until it is adopted: torch_npu aborts the old one"
    group.adopt(built)
    assert group._get_backend(group.device) is made[1][1]
    first, second = (options for options, _ in made)
    first.store.set("id", "of the dead")
    assert not second.store.check(["id"])
    assert (second.group_rank, second.group_size, second.group_id) == (0, 1, "world")
    assert second.global_ranks_in_group == [0]
    assert second.timeout == timedelta(seconds=9)


def test_communicators_that_there_are(group: HcclGroup, made: list[tuple[Any, Backend]]) -> None:
    groups = TorchGroups(SimpleNamespace())  # type: ignore[arg-type] # it is not asked
    assert groups.communicators(3) == []
    made[0][1].comm = 77
    assert groups.communicators(3) == [77]
    group.suspend("a recovery is under way")
    assert groups.communicators(3) == []


def test_only_an_error_of_the_devices_is_a_faults(group: HcclGroup) -> None:
    assert group.cut(RuntimeError("HCCL function error: HcclAllReduce, error code is 4"))
    assert not group.cut(RuntimeError("the tensors differ in their shapes"))


def test_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has run on a device: without the setting a job over HCCL is a plain loop, as ever."""
    asked_for = ("hccl", "HCCL", "npu:hccl", "cpu:gloo,npu:hccl", "nccl")
    c10d = dist.distributed_c10d
    assert {each: _register._stands_for(each, c10d) for each in asked_for} == dict.fromkeys(asked_for)
    monkeypatch.setenv("RESILIENT_HCCL", "1")
    ours = dict.fromkeys(asked_for[:3], "resilient_hccl")
    assert {each: _register._stands_for(each, c10d) for each in asked_for} == dict.fromkeys(asked_for) | ours
