"""Each part of a rank's state has a digest of its own, under a name."""

from __future__ import annotations

import random

import torch

from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.engine import engine_for


def test_every_part_shows_alone() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    generator, ema = torch.Generator(), torch.nn.Linear(2, 2)
    drill = engine_for(Objects((model,), (optimizer,), extra={"ema": ema}, rank_extra={"own": generator})).drill
    batch = [torch.zeros(2), "text"]

    def changed_by(change: object) -> set[str]:
        before = drill.parts({"batch": batch})
        change()  # type: ignore[operator]
        after = drill.parts({"batch": batch})
        return {name for name in before | after if before.get(name) != after.get(name)}

    def settings() -> None:
        optimizer.param_groups[0]["lr"] = 0.5

    assert changed_by(lambda: model[0].weight.data.add_(1)) == {"model.0.0.weight"}
    assert changed_by(lambda: model[1].running_mean.add_(1)) == {"buffers.0.1.running_mean"}
    assert changed_by(settings) == {"settings.groups"}
    assert changed_by(random.random) == {"generator.python"}
    assert changed_by(lambda: torch.rand(1)) == {"generator.torch"}
    assert changed_by(lambda: generator.manual_seed(1)) == {"rank_state.own.tensor"}
    assert changed_by(lambda: ema.weight.data.add_(1)) == {"state.ema.weight"}
    assert changed_by(lambda: batch[0].add_(1)) == {"batch.0"}
    model(torch.rand(4, 2)).sum().backward()
    assert "optimizer.0.0.exp_avg" in changed_by(optimizer.step)


def test_a_batch_of_things_that_nobody_knows_is_left_out() -> None:
    model = torch.nn.Linear(2, 2)
    drill = engine_for(Objects((model,), (torch.optim.SGD(model.parameters()),))).drill
    assert not any(name.startswith("batch") for name in drill.parts({"batch": object()}))
    assert "batch.tensor" in drill.parts({"batch": torch.zeros(0)})


def test_what_lives_on_is_left_out() -> None:
    """A new process writes its first record before the loop has taken its place up."""
    model, place = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    objects = Objects((model,), (torch.optim.SGD(model.parameters()),), extra={"place": place})
    drill = engine_for(objects).drill
    assert any(name.startswith("state.place") for name in drill.parts({}))
    place.resilient_lives_on = True
    assert not any(name.startswith("state.place") for name in drill.parts({}))
