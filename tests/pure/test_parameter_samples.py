"""Parameters that change although no registered optimizer steps: seen, and told in the step that did it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import UsageError  # noqa: E402
from resilient_train.frameworks.torch.checks.parameter_samples import Sample, Samples  # noqa: E402
from resilient_train.session.bodies_without_update import PATIENCE, BodiesWithoutUpdate  # noqa: E402

pytestmark = pytest.mark.torch


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.Linear(3, 1).to(torch.bfloat16))


def name_of(found: Sample | None) -> str:
    return "" if found is None else found.name


def test_what_stands_still_is_never_taken_for_changed() -> None:
    samples = Samples([net(), nn.Linear(2, 2)])
    assert not samples.changed(), "nothing was taken yet"
    for _ in range(1000):
        samples.take()
        assert not samples.changed()


def test_a_write_past_autograd_is_seen_at_once() -> None:
    model = net()
    samples = Samples([model])
    for _ in range(50):
        samples.take()
        for parameter in model.parameters():
            parameter.data.add_(0.5)  # no version counter sees it
        assert name_of(samples.changed()) in dict(model.named_parameters())


def test_a_single_word_is_found_in_the_end() -> None:
    """Other words each time: all of a parameter's are looked at, one day."""
    model = nn.Linear(9, 5)
    samples = Samples([model])
    seen = []
    for _ in range(9 * 5):
        samples.take()
        model.weight.data[3, 4] += 1
        seen.append(name_of(samples.changed()))
    assert seen.count("weight") == 1


def test_what_can_not_be_looked_at_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(requires_grad=False)
    model[1].weight = nn.Parameter(torch.ones(4, 4).t()[:, :2])
    model[1].bias = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)
    samples = Samples([model])
    for _ in range(20):
        samples.take()
        model[0].weight.data.add_(1)
        model[1].weight.data.add_(1)
        assert not samples.changed()


def test_memory_that_was_given_back_is_not_read() -> None:
    model = nn.Linear(4, 4)
    samples = Samples([model])
    samples.take()
    model.weight.data = torch.empty(0)
    model.bias.data = torch.empty(0)
    assert name_of(samples.changed()) in ("weight", "bias")


class Told:
    def __init__(self, changed: str = "", untrained: tuple[str, ...] = (), *, tells: bool = True) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        engine: Any = SimpleNamespace(changed_unasked=lambda: changed, without_optimizer=lambda: list(untrained))
        self.bodies = BodiesWithoutUpdate(engine, engine, lambda *event: self.events.append(event), tells=tells)


def test_a_body_that_updates_by_hand_is_refused_with_its_number() -> None:
    with pytest.raises(UsageError, match=r"step 7 has changed parameter '0.weight' without a step\(\)"):
        Told("0.weight").bodies.body_ended(7, 5)


@pytest.mark.parametrize("tells", [True, False])
def test_a_long_time_without_an_update_is_told_once(capsys: pytest.CaptureFixture[str], *, tells: bool) -> None:
    told = Told(tells=tells)
    for step in range(3, 3 + 3 * PATIENCE):
        told.bodies.body_ended(step, 3)
    assert told.events == [("no_update", {"steps": PATIENCE, "begun": 3})] * tells
    assert capsys.readouterr().err.count("no registered optimizer has stepped in 100 steps, since step 3") == tells


@pytest.mark.parametrize(("names", "shown"), [(("a",), "1 ('a')"), (tuple("abcd"), "4 ('a', 'b', 'c', ...)")])
def test_parameters_that_nobody_trains_are_told(
    capsys: pytest.CaptureFixture[str], names: tuple[str, ...], shown: str
) -> None:
    Told(untrained=names, tells=False).bodies.tell_untrained()
    Told(untrained=()).bodies.tell_untrained()
    assert capsys.readouterr().err == ""
    Told(untrained=names).bodies.tell_untrained()
    assert f"in no registered optimizer: {shown}; " in capsys.readouterr().err
