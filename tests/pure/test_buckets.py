"""DDP's buckets after a recovery: a fresh wrapper, or one whose backward was cut, must be laid out as the job's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from resilient_train.errors import TransferError  # noqa: E402
from resilient_train.frameworks.roles import Objects  # noqa: E402
from resilient_train.frameworks.torch.communication import buckets as buckets_module  # noqa: E402
from resilient_train.frameworks.torch.communication import process_group as group_module  # noqa: E402
from resilient_train.frameworks.torch.communication.buckets import Buckets  # noqa: E402
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup  # noqa: E402
from resilient_train.frameworks.torch.kept.kept_state import KeptState  # noqa: E402


class CutError(Exception):
    pass


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reversed(nn.Module):
    """Runs its layers in another order than it lists them, so that the layout changes after the first pass.

    ``twice`` goes through the last layer two times, each in a re-entrant backward; ``unused`` has one nobody calls.
    """

    def __init__(self, *, twice: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.twice = twice
        if unused:
            self.idle = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[::-1]:
            x = layer(x)
        if self.twice:
            for _ in range(2):
                x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


def wrap(kind: str, group: dist.ProcessGroup | None = None) -> DistributedDataParallel:
    torch.manual_seed(1)
    flags: dict[str, Any] = {"bucket_cap_mb": 0.0004, "process_group": group}
    if kind.startswith("static"):
        flags["static_graph"] = True
    if kind == "dynamic":
        flags["find_unused_parameters"] = True
    if kind == "view":
        flags["gradient_as_bucket_view"] = True
    if kind == "lazy":
        flags["lazy_bucket_allocation"] = True
    model = Reversed(twice=kind == "static-twice", unused=kind in ("static-unused", "dynamic"))
    wrapper: Any = DistributedDataParallel(model, **flags)
    if kind == "manual":
        wrapper.require_manual_backward_finalization = True
    return wrapper


def run_pass(wrapper: Any, *, cut: bool = False) -> None:
    def raise_interrupted(_gradient: torch.Tensor) -> None:
        raise CutError

    hook = wrapper.module.layers[3].weight.register_hook(raise_interrupted) if cut else None
    try:
        wrapper(torch.ones(2, 8)).sum().backward()
        if getattr(wrapper, "require_manual_backward_finalization", False):
            wrapper.finalize_backward()
    except CutError:
        assert cut
    finally:
        if hook is not None:
            hook.remove()
    if cut:
        wrapper.zero_grad(set_to_none=True)


def layout(wrapper: DistributedDataParallel) -> list[list[str]]:
    """The names of the parameters in each bucket."""
    names = {id(parameter): name for name, parameter in wrapper.module.named_parameters()}
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    return [[names[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


def train(wrapper: DistributedDataParallel, buckets: Buckets, updates: range) -> None:
    for update in updates:
        buckets.record()
        run_pass(wrapper)
        buckets.recorded(update)
        wrapper.zero_grad(set_to_none=True)


@pytest.mark.parametrize("early", [False, True], ids=["none before", "one before"])
def test_a_buffer_that_comes_behind_the_wrapper_is_made_equal_as_before(*, early: bool) -> None:
    """torch does so only if there was one before."""
    model = Reversed()
    if early:
        model.register_buffer("early", torch.zeros(1))
    wrapper: Any = DistributedDataParallel(model)
    model.register_buffer("late", torch.zeros(1))
    before = len(wrapper.modules_buffers)
    buckets = Buckets((wrapper,))
    train(wrapper, buckets, range(2))
    assert wrapper.modules_buffers == wrapper.modules_buffers[:before] or early
    is_listed = [len(wrapper.modules_buffers)]
    buckets_module._renew(wrapper)
    buckets_module._sparse(wrapper)
    assert [len(wrapper.modules_buffers)] == is_listed
    assert wrapper.will_sync_module_buffers() == early


KINDS = ["plain", "view", "dynamic", "static", "static-twice", "static-unused"]
NEWER = hasattr(DistributedDataParallel, "finalize_backward")
"""torch 2.15, or later."""
if NEWER:
    KINDS += ["lazy", "manual"]


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("commits", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_layout_is_the_undisturbed_one(kind: str, commits: int, cut: bool) -> None:
    job, survivor = wrap(kind), wrap(kind)
    recorded, own = Buckets((job,)), Buckets((survivor,))
    train(job, recorded, range(commits))
    train(survivor, own, range(commits))
    if cut:
        own.record()
        run_pass(survivor, cut=True)
    replacement = wrap(kind)
    joined = Buckets((replacement,))
    own.restore(None, commits)
    joined.restore(recorded.layout(), commits)
    for update in range(commits, commits + 3):
        for wrapper, buckets in ((job, recorded), (survivor, own), (replacement, joined)):
            train(wrapper, buckets, range(update, update + 1))
            assert layout(wrapper) == layout(job), update
    assert own.passes == recorded.passes == joined.passes


def test_layout_does_change_after_the_deciding_pass() -> None:
    """Or the test above could not fail."""
    for kind, passes in (("plain", 1), ("static", 2)):
        wrapper = wrap(kind)
        before = layout(wrapper)
        for _ in range(passes):
            run_pass(wrapper)
            assert layout(wrapper) == before
        wrapper(torch.ones(2, 8))
        assert layout(wrapper) != before


def test_passes_of_an_update_that_is_redone_do_not_count() -> None:
    wrapper = wrap("plain")
    buckets = Buckets((wrapper,))
    train(wrapper, buckets, range(1))
    assert len(buckets.passes[0]) == 1
    buckets.restore(None, 0)
    assert buckets.passes == [[]]


def test_the_update_that_laid_out_anew_begins_with_the_first_layout_when_it_is_redone() -> None:
    """Accumulation that reduces each time: its second forward pass lays out, in the same update."""
    wrapper = wrap("plain")
    first = layout(wrapper)
    buckets = Buckets((wrapper,))
    buckets.record()
    for _ in range(2):
        run_pass(wrapper)
    assert layout(wrapper) != first
    buckets.restore(None, 0)
    assert layout(wrapper) == first
    train(wrapper, buckets, range(1))
    assert layout(wrapper) == first
    train(wrapper, buckets, range(1, 2))
    assert layout(wrapper) != first


def test_a_rehearsal_needs_memory_for_one_gradient_only() -> None:
    wrapper = wrap("plain")
    buckets = Buckets((wrapper,))
    train(wrapper, buckets, range(2))
    fresh = wrap("plain")
    places: set[int] = set()
    shared = buckets_module._share_gradients

    def share(parameters: Sequence[torch.nn.Parameter]) -> None:
        shared(parameters)
        places.update(parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets_module, "_share_gradients", share)
        Buckets((fresh,)).restore(buckets.layout(), 2)
    assert len(places) == 1
    assert layout(fresh) == layout(wrapper)


def test_accumulation_without_reduction_does_not_decide() -> None:
    wrapper = wrap("plain")
    buckets = Buckets((wrapper,))
    buckets.record()
    with wrapper.no_sync():
        run_pass(wrapper)
    run_pass(wrapper)
    buckets.recorded(0)
    (only,) = buckets.passes[0]
    assert sorted(only.written) == list(range(12))


def test_gradients_are_left_as_they_were() -> None:
    wrapper = wrap("static")
    buckets = Buckets((wrapper,))
    train(wrapper, buckets, range(2))
    fresh = wrap("static")
    kept = torch.ones(8, 8)
    fresh.module.layers[0].weight.grad = kept
    Buckets((fresh,)).restore(buckets.layout(), 2)
    assert fresh.module.layers[0].weight.grad is kept
    assert torch.equal(kept, torch.ones(8, 8))
    assert fresh.module.layers[1].weight.grad is None


def test_hooks_of_the_users_hear_nothing() -> None:
    """An optimizer that runs in the backward pass would change what was just restored."""
    wrapper = wrap("plain")
    buckets = Buckets((wrapper,))
    train(wrapper, buckets, range(2))
    fresh = wrap("plain")
    heard: list[str] = []
    for name, parameter in fresh.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
        parameter.register_hook(lambda _, name=name: heard.append(name))
    Buckets((fresh,)).restore(buckets.layout(), 2)
    assert heard == []
    run_pass(fresh)
    assert len(heard) == 2 * len(list(fresh.parameters()))
    assert layout(fresh) == layout(wrapper)


def test_no_collective_of_a_restoration_leaves_the_rank() -> None:
    """The reducer broadcasts the new layout, when others may not be there to hear it."""
    heard: list[str] = []

    class Others:
        def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
            heard.append(verb)
            return group.run(verb, args)

        def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
            pass

        def take_back(self, group: ResilientGroup) -> None:
            pass

    group = dist.new_group([0], backend="resilient")
    wrapper, fresh = wrap("plain", group), wrap("plain", group)
    buckets = Buckets((wrapper,))
    group_module.watch(Others())
    try:
        train(wrapper, buckets, range(2))
        assert "broadcast" in heard, "laying out does broadcast"
        heard.clear()
        Buckets((fresh,)).restore(buckets.layout(), 2)
        assert heard == []
        assert layout(fresh) == layout(wrapper)
        dist.all_reduce(torch.ones(1), group=group)
        assert heard == ["allreduce"], "and then the others are there again"
    finally:
        group_module.watch(None)


@pytest.mark.skipif(not NEWER, reason="torch 2.15, or later")
def test_who_ends_its_passes_by_itself_goes_on_so() -> None:
    """The loop switches; its body is cut between a backward pass and its end, where torch refuses to switch."""
    survivor: Any = wrap("plain")
    buckets, kept = Buckets((survivor,)), KeptState(Objects((survivor,), ()))
    train(survivor, buckets, range(2))
    kept.begin({})
    survivor.require_manual_backward_finalization = True
    survivor(torch.ones(2, 8)).sum().backward()
    kept.put_back()
    buckets.restore(None, 2)
    assert not survivor.require_manual_backward_finalization
    survivor.require_manual_backward_finalization = True
    train(survivor, buckets, range(2, 3))
    kept.begin({})
    survivor(torch.ones(2, 8)).sum().backward()
    kept.put_back()
    buckets.restore(None, 3)
    replacement: Any = wrap("plain")
    Buckets((replacement,)).restore(buckets.layout(), 3)
    KeptState(Objects((replacement,), ())).take_modes(kept.modes(within=True))
    for wrapper in (survivor, replacement):
        assert wrapper.require_manual_backward_finalization
        wrapper(torch.ones(2, 8)).sum().backward()
        with pytest.raises(RuntimeError, match="finalized the prior backward pass"):
            wrapper(torch.ones(2, 8))
        wrapper.finalize_backward()
        assert layout(wrapper) == layout(survivor)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_reduced_of_a_wrapper_that_ignores_some_is_as_torch_has_it(*, frozen: bool) -> None:
    """It ignores no parameter of the outermost module, by whatever name it is told of it: it looks for ``.scale``."""
    model: Any = Reversed()
    model.scale = nn.Parameter(torch.ones(8))
    wrapped: Any = DistributedDataParallel
    wrapped._set_params_and_buffers_to_ignore_for_model(model, ["scale", "layers.0.weight"])
    wrapper = DistributedDataParallel(model)
    model.scale.requires_grad_(not frozen)
    found = buckets_module._reduced(wrapper)
    assert [id(each) for each in found] == [
        id(each) for name, each in model.named_parameters() if name != "layers.0.weight"
    ]


def test_a_job_with_other_wrappers_is_refused() -> None:
    with pytest.raises(TransferError, match="2 DDP wrappers, this rank 1"):
        Buckets((wrap("plain"),)).restore(Buckets((wrap("plain"), wrap("plain"))).layout(), 1)
