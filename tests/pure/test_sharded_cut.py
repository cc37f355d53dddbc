"""A fault at each line of FSDP's own Python that a pass comes to: behind ``reset`` the next step has the right bits.

A signal raises between two lines of torch's as soon as between two of the user's. Rows of what a pass is then halfway
through (a parameter that is whole, in a group that says it is not) can't be thought of one by one; so all are tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx  # noqa: E402

from resilient_train.frameworks.torch.sharding.sharded import Sharding  # noqa: E402
from resilient_train.interrupt import _whole_calls  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(1200)]
Place = tuple[str, int, int]
"""A function, a line of its file, and how often the pass was there before."""
NEWER = hasattr(FSDPModule, "finalize_backward")
"""torch 2.15, or later."""
VARIANTS = ("base", "kept", "mixed", "ahead", *(["manual", "storage"] if NEWER else []))
LONG = [pytest.param(each, marks=pytest.mark.long) for each in VARIANTS]
OF_EACH = pytest.mark.parametrize("variant", ["base", *LONG])


class Done(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Mirrored(dist.ProcessGroup):
    """Ranks that all have what this one has."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.ranks = size

    def _set_group_name(self, name: str) -> None:
        self.name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self.name

    group_name = property(getGroupName)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "mirrored"

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, _options: Any = None) -> Done:
        for part in output.chunk(self.ranks):
            part.copy_(given)
        return Done()

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, _options: Any = None) -> Done:
        output.copy_(given.chunk(self.ranks)[self.rank()])
        return Done()

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allreduce(self, _tensors: Any, _options: Any = None) -> Done:
        return Done()

    def allgather(self, outputs: Any, given: Any, _options: Any = None) -> Done:
        for parts, own in zip(outputs, given, strict=True):
            for part in parts:
                part.copy_(own)
        return Done()


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    # From torch 2.15 on its recorder would be hooked into these groups, which have no place for it.
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("mirrored")
    made: Callable[..., Any] = lambda _store, rank, size, _timeout: Mirrored(rank, size)
    dist.Backend.register_backend("mirrored", made, devices=["cpu"])
    dist.init_process_group("mirrored", store=dist.HashStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


class CutError(Exception):
    pass


class Lines:
    """Listens to FSDP's lines; raises at one of them, once."""

    def __init__(self, at: Place | None) -> None:
        self.at = at
        self.seen: dict[Place, None] = {}
        self._times: dict[tuple[str, int], int] = {}

    def of_call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        return self.of_line if "/_fully_shard/" in frame.f_code.co_filename and not _whole_calls(frame) else None

    def of_line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            line = frame.f_code.co_qualname, frame.f_lineno
            self._times[line] = self._times.get(line, -1) + 1
            place = (*line, self._times[line])
            self.seen[place] = None
            if place == self.at:
                raise CutError
        return self.of_line


class Job:
    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        flags: dict[str, Any] = {"mesh": mesh}
        if variant == "kept":
            flags["reshard_after_forward"] = False
        if variant == "mixed":
            flags["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2))
        fully_shard(model[1], **flags)
        self.model: Any = fully_shard(model, **flags)
        if variant == "ahead":
            self.model._set_unshard_async_op(True)
        if variant == "storage":
            self.model.set_keep_unsharded_storage(True)
        self.manual = variant == "manual"
        if self.manual:
            self.model.set_manual_backward_finalization(True)
        self.sharding = Sharding((self.model,))

    def passes(self) -> None:
        self.model(torch.ones(4, 3)).square().sum().backward()
        if self.manual:
            self.model.finalize_backward(async_op=True).wait()

    def gradients(self) -> list[torch.Tensor]:
        """Of a step that nothing cuts."""
        self.passes()
        found = [parameter.grad._local_tensor for parameter in self.model.parameters()]
        self.model.zero_grad()
        return found

    def cut(self, lines: Lines) -> None:
        sys.settrace(lines.of_call)
        try:
            self.passes()
        except CutError:
            pass
        finally:
            sys.settrace(None)
        assert lines.at is None or lines.at in lines.seen
        self.model.zero_grad()  # as ``Step.rollback``
        self.sharding.reset()


def lines_of(variant: str) -> tuple[list[Place], list[Place]]:
    """Of a job's first passes, and of later ones."""
    job, found = Job(variant), (Lines(None), Lines(None))
    for lines in found:
        job.cut(lines)
    assert min(len(lines.seen) for lines in found) > 500
    return [*found[0].seen], [*found[1].seen]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.usefixtures("four_ranks")
@OF_EACH
def test_in_later_passes(variant: str, request: pytest.FixtureRequest) -> None:
    """One job has them all, one behind the other. Every day the first time at each line."""
    every = any(request.node.iter_markers("long"))
    job = Job(variant)
    expected = job.gradients()
    for place in lines_of(variant)[1]:
        if every or not place[2]:
            job.cut(Lines(place))
            assert same(job.gradients(), expected), place


@pytest.mark.usefixtures("four_ranks")
@OF_EACH
def test_in_the_first_passes(variant: str, request: pytest.FixtureRequest) -> None:
    """Each has a job of its own. Every day those lines to which later passes do not come, and those in front of what
    is made at the first use.
    """
    every = any(request.node.iter_markers("long"))
    expected = Job(variant).gradients()
    first, later = lines_of(variant)
    for number, place in enumerate(first):
        if every or number < 20 or place not in later:
            job = Job(variant)
            job.cut(Lines(place))
            assert same(job.gradients(), expected), place


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.skipif(not NEWER, reason="torch 2.15, or later")
def test_a_reduction_of_a_model_that_shares_its_streams() -> None:
    """It is cut before it was waited for; the other model's turn to be reset comes first."""
    first, second = Job("base"), Job("manual")
    expected = first.gradients(), second.gradients()
    share_comm_ctx([first.model, second.model])
    second.model(torch.ones(4, 3)).square().sum().backward()
    second.model.finalize_backward(async_op=True)
    Sharding((first.model, second.model)).reset()
    for job, right in zip((first, second), expected, strict=True):
        assert same(job.gradients(), right)
