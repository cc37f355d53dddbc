"""Whose damaged memory was, and what is fetched again."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import TransferError  # noqa: E402
from resilient_train.frameworks.roles import Damage, Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch.state import TorchState  # noqa: E402
from resilient_train.frameworks.torch.tensors.damage import InjectedErrors, assess, extent, move  # noqa: E402
from resilient_train.state.transfer import Span, view  # noqa: E402


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, TorchState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    state = engine_for(Objects((model,), (optimizer,))).state
    assert isinstance(state, TorchState)
    return model, optimizer, state


def copying(source: TorchState, fetched: list[int]):
    """A ``fetch`` from another copy of the state in this process; notes how many bytes were asked for."""
    remote = source.sources()

    def fetch(local: list[Span]) -> None:
        for there, here in zip(remote.spans, local, strict=True):
            if here.size:
                view(here)[:] = view(there)
                fetched.append(here.size)

    return remote, fetch


PATHS = [("model", 0, "0.weight"), ("optimizer", 0, 2, "exp_avg"), ("buffers", 0, "1.running_var")]


@pytest.mark.parametrize("path", PATHS)
def test_a_range_is_told_by_its_owner(path: tuple) -> None:
    _, _, state = trained()
    tensor = state.tensors()[path]
    whole = extent(tensor)
    for hit in (Span(whole.address, 1), Span(whole.address + whole.size - 1, 1), Span(whole.address - 8, 9)):
        assert path in assess([hit], state.tensors(), {}).replicated
    assert assess([Span(whole.address, whole.size)], state.tensors(), {}).replicated == {path}


def test_neighbours_are_not_hit() -> None:
    tensor = torch.zeros(64)
    whole = extent(tensor)
    for hit in (Span(whole.address - 16, 16), Span(whole.address + whole.size, 16)):
        damage = assess([hit], {("x",): tensor}, {})
        assert (damage.lost, damage.elsewhere) == (False, 1)


def test_a_range_over_two_tensors_hits_both() -> None:
    base = torch.zeros(64)
    tensors = {("a",): base[:32], ("b",): base[32:]}
    assert assess([Span(base.data_ptr() + 100, 56)], tensors, {}).replicated == {("a",), ("b",)}


def test_a_buffer_of_the_ranks_own_is_not_fetched() -> None:
    _, _, state = trained()
    buffer = state.tensors()["buffers", 0, "1.running_mean"]
    damage = assess([extent(buffer)], state.tensors(), {"0.1.running_mean": buffer})
    assert (damage.replicated, damage.own) == (frozenset(), ("0.1.running_mean",))
    assert damage.lost


@pytest.mark.parametrize("path", PATHS)
def test_only_what_was_hit_is_fetched_into_new_memory(path: tuple) -> None:
    model, _, state = trained()
    _, _, replica = trained()
    victim = state.tensors()[path]
    before, good = victim.data_ptr(), victim.detach().clone()
    keep = victim.detach()  # so that the old memory is not handed out again
    errors = InjectedErrors()
    errors.poison(keep)
    assert not torch.equal(state.tensors()[path], good)
    damage = assess(errors.take(), state.tensors(), {})
    fetched: list[int] = []
    remote, fetch = copying(replica, fetched)
    size = state.mend(remote.manifest, fetch, remote.digest, damage)
    mended = state.tensors()[path]
    assert torch.equal(mended, good)
    assert mended.data_ptr() != before
    own = {("buffers", 0, f"1.{name}") for name in ("running_mean", "running_var", "num_batches_tracked")}
    with_own = [state.tensors()[each] for each in {path} | own]  # the digest is of the source's
    assert sum(fetched) == size == sum(each.numel() * each.element_size() for each in with_own)
    assert dict(model.named_parameters())["0.weight"].requires_grad
    assert errors.take() == []


def test_a_repair_of_the_wrong_tensor_is_refused() -> None:
    _, _, state = trained()
    _, _, replica = trained()
    InjectedErrors().poison(state.tensors()[PATHS[0]].detach())
    remote, fetch = copying(replica, [])
    with pytest.raises(TransferError, match="differs from the replica"):
        state.mend(remote.manifest, fetch, remote.digest, Damage(frozenset({PATHS[1]}), (), 0))


def test_memory_moves_under_whoever_holds_the_tensor() -> None:
    layer = nn.Linear(4, 4)
    weight, before = layer.weight, layer.weight.data_ptr()
    move(layer.weight)
    assert layer.weight is weight
    assert weight.data_ptr() != before or not weight.any()
    layer(torch.ones(1, 4)).sum().backward()
    assert weight.grad is not None


def test_an_undamaged_list_is_empty() -> None:
    assert not assess([], trained()[2].tensors(), {}).lost


def test_a_conjugate_lies_where_its_other_does() -> None:
    numbers = torch.zeros(4, dtype=torch.complex64)
    assert extent(numbers.conj()) == extent(numbers)
