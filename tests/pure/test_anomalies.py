"""TRE: what is an anomaly, what is done about it, and what is kept of it; whole jobs are in ``tests/process``."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from resilient_train import config
from resilient_train.errors import ConfigError, UsageError
from resilient_train.faults import Injection, parse_plan
from resilient_train.frameworks.roles import Objects
from resilient_train.frameworks.torch.gradients import TorchGradients
from resilient_train.launch.agent.console_text import told
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.commands import Command, KeepAnomalies, Note, RaiseStop, Send
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.protocol.messages import Anomaly, Joined, Plan, Resume, Started
from resilient_train.protocol.rank import Ask, At, Barrier, Body, Rank, Tail, Update
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session.comparisons.anomalies import Anomalies, AnomalyLimits, AppliedValues, FoundAnomaly
from resilient_train.session.explain import asks_for_redo
from resilient_train.state import abnormal
from resilient_train.tft_switches import Switches

NAN, INF = math.nan, math.inf


# -- what is one


def test_the_norm_on_request_is_that_of_clipping() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    gradients = TorchGradients(Objects((model,), ()))
    with pytest.raises(UsageError, match="behind backward"):
        gradients.norm()
    model(torch.ones(5, 3)).sum().backward()
    assert torch.equal(gradients.norm(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9))


def looking(*, scaled: bool = False, spikes: bool = True, **limits: float) -> tuple[Anomalies, list[str]]:
    said: list[str] = []
    return Anomalies(AnomalyLimits(**limits), said.append, scaled=scaled, spikes=spikes), said


@pytest.mark.parametrize(("value", "bad"), [(43.99, False), (44, True), (44.01, True), (NAN, True), (INF, True)])
def test_a_threshold_is_met_by_what_is_at_it(value: float, bad: bool) -> None:
    found, _ = looking(norm=44)
    found.add("norm", value)
    assert found.look() is bad
    assert not bad or repr(found.found) == repr(FoundAnomaly("norm", float(value), 44))


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("what", ["norm", "loss"])
def test_without_a_threshold_what_is_not_finite(what: Any, value: float) -> None:
    found, _ = looking()
    found.add(what, 1e300)
    assert not found.look()
    found.add(what, value)
    assert found.look()


def test_a_scaler_looks_at_the_gradients_itself() -> None:
    found, _ = looking(scaled=True, norm=44)
    found.add("norm", INF)
    assert not found.look(), "an overflow is how a scale is found"
    found.add("norm", 44.0)
    assert found.look()
    assert found.found.value == 44
    found.begin()
    found.add("loss", NAN)
    assert found.look(), "the loss is not scaled"


def test_of_a_window_the_worst_is_told_and_the_norm_first() -> None:
    found, _ = looking(norm=1, loss=1)
    for value in (2.0, 5.0, 3.0):
        found.add("loss", value)
    assert found.look()
    assert found.found == FoundAnomaly("loss", 5.0, 1)
    found.add("norm", 4.0)
    assert found.look()
    assert found.found == FoundAnomaly("norm", 4.0, 1)
    found.add("norm", NAN)
    assert found.look()
    assert math.isnan(found.found.value)


def test_a_window_begins_with_nothing() -> None:
    found, _ = looking()
    found.add("loss", NAN)
    found.begin()
    found.add("loss", 1.0)
    assert not found.look()


def test_a_fault_on_request_is_all_that_is_seen() -> None:
    found, _ = looking(norm=44)
    found.add("norm", NAN)
    found.inject("norm", 3.0)
    assert not found.look()


def test_what_is_not_looked_at_is_told_once() -> None:
    found, said = looking()
    for _ in range(3):
        found.look()
        found.late()
    assert len(said) == 2
    assert "undo=True" in said[0]
    assert "neither a gradient norm nor a loss" in said[1]


def test_a_value_behind_the_update_is_looked_at_too() -> None:
    found, said = looking(loss=9)
    for _ in range(3):
        found.begin()
        assert not found.look()
        assert found.behind("loss", 8.9, 1) is None
    assert not said, "so this loop has not forgotten to"
    assert found.behind("loss", 9, 1) == FoundAnomaly("loss", 9.0, 9)
    assert found.behind("norm", INF, 1) == FoundAnomaly("norm", INF, INF)
    assert looking(scaled=True)[0].behind("norm", INF, 1) is None


@pytest.mark.parametrize(
    ("second", "same", "told"),
    [
        (NAN, True, "is nan again: that is the data's doing"),
        (2.5, False, "is 2.5, and was nan: a device has computed wrongly"),
    ],
)
def test_what_a_second_run_says_of_the_first(second: float, same: bool, told: str) -> None:
    found, _ = looking()
    assert seen(found, NAN)
    found.runs_again(7)
    assert found.redone(6) is None, "a step before that"
    assert seen(found, NAN)
    found.runs_again(7)
    assert seen(found, second) is same
    again = found.redone(7)
    assert again is not None
    assert (again.same, told in again.told(7)) == (same, True)
    assert found.redone(7) is None, "told once"


def test_nobody_waits_for_a_value_before_it_is_looked_at() -> None:
    class Pending:
        asked = 0

        def __float__(self) -> float:
            self.asked += 1
            return 1.0

    found, value = looking()[0], Pending()
    found.add("loss", value)
    assert value.asked == 0
    found.look()
    assert value.asked == 1


# -- what is far above the usual


def after(losses: list[float], **settings: Any) -> Anomalies:
    """Each of its own window, whose update was applied."""
    found, _ = looking(**settings)
    for update, loss in enumerate(losses, 1):
        seen(found, loss)
        found.applied(update)
    return found


def seen(found: Anomalies, loss: float) -> bool:
    found.begin()
    found.add("loss", loss)
    return found.look()


USUAL = [2.0, 2.1, 2.2, 2.3] * 8


def test_a_spike_behind_the_update() -> None:
    found, _ = looking()
    assert [found.behind("loss", loss, update) for update, loss in enumerate(USUAL)] == [None] * len(USUAL)
    limit = pytest.approx(2.2 + 10 * 1.4826 * 0.1)
    assert found.behind("loss", 6.0, 100) == FoundAnomaly("loss", 6.0, limit, 2.2)
    taken = found.take(1)
    assert taken is not None
    assert (taken.first, taken.losses[: len(USUAL)], taken.losses[100]) == (0, USUAL, 6.0), "it is applied"
    assert [found.behind("loss", 6.0, 101) is None for _ in range(3)] == [False, False, True], (
        "the third is a new level"
    )


def test_a_spike_is_seen_without_a_threshold() -> None:
    found = after(USUAL)
    assert not seen(found, 3.0)
    assert seen(found, 6.0)
    assert found.found == FoundAnomaly("loss", 6.0, pytest.approx(2.2 + 10 * 1.4826 * 0.1), 2.2)
    assert seen(found, 6.0), "what was not applied is not usual"
    assert not seen(found, -50.0), "falling is what it is there for"


def test_a_threshold_is_told_before_a_spike() -> None:
    found = after(USUAL, loss=5.0)
    assert seen(found, 6.0)
    assert found.found == FoundAnomaly("loss", 6.0, 5.0)


def test_nothing_is_usual_at_first_and_nothing_where_a_new_process_may_not_say_so() -> None:
    assert not seen(after(USUAL[:15]), 1e30)
    assert seen(after(USUAL[:16]), 1e30)
    assert not seen(after(USUAL, spikes=False), 1e30)


def test_values_that_do_not_move_may_move_a_little() -> None:
    found = after([2.0] * 40)
    assert not seen(found, 2.39)
    assert seen(found, 2.41)
    assert not seen(after([0.0] * 40), 0.0)


def test_a_new_level_is_three_spikes() -> None:
    found, told_at = after(USUAL), []
    for number in range(40):
        if seen(found, 8.0 + number % 4):
            told_at.append(number)
        found.applied(100 + number)
    assert told_at == [0, 1, 2]


@pytest.mark.parametrize("updates", [20, 100, 500, 2000])
def test_a_warm_up_rises_without_a_spike_and_hides_none(updates: int) -> None:
    """A learning rate that begins near 0, and norms that follow it; with one that is wrong, in the middle."""
    drawn, found, told_at = random.Random(updates), looking()[0], []
    for update in range(updates + 64):
        value = min(1.0, (update + 1) / updates) * drawn.lognormvariate(0, 0.2)
        if update == max(17, updates // 2):
            assert seen(found, 100 * value), "it is not applied"
        if seen(found, value):
            told_at.append(update)
        found.applied(update)
    assert told_at == []


def test_some_spikes_do_not_hide_the_next() -> None:
    found = after([*USUAL, 50.0, *USUAL[:5], 60.0, 2.0, 70.0, 80.0, *USUAL[:4]])
    assert seen(found, 6.0)


def test_an_update_without_a_look_adds_nothing() -> None:
    found = after(USUAL)
    seen(found, 9.0)
    for update in range(64):
        found.applied(100 + update)  # rolled forward, as a replica has it
    assert seen(found, 6.0)


def test_what_was_applied_has_its_place() -> None:
    """By which the values of ranks are put together. What is not finite has one too."""
    found = after([2.0, NAN, 2.2], spikes=False)
    assert found.take(3) is None, "two of them are numbers"
    assert found.take(2) == AppliedValues(1, [None, None, None], [2.0, None, 2.2])
    assert found.take(1) is None
    assert found.behind("norm", 3.0, 3) is None
    assert found.behind("norm", 4.0, 3) is None
    seen(found, 2.5)
    found.applied(4)
    assert found.take(2) == AppliedValues(3, [4.0, None], [None, 2.5]), "of an update the largest"


# -- where the norm comes from


def test_clipping_is_seen_under_any_name() -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.utils import clip_grad_norm_  # imported by name before anything is watched

    from resilient_train.frameworks.roles import Objects
    from resilient_train.frameworks.torch.gradients import TorchGradients

    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for each in (model, other):
        each(torch.ones(1, 3)).sum().backward()
    seen: list[Any] = []
    watched = TorchGradients(Objects((model,), ()))
    watched.watch(seen.append)
    norm = clip_grad_norm_(model.parameters(), 0.1)
    assert [value.item() for value in seen] == [norm.item()]
    norm.zero_()
    assert seen[0].item() > 0.1, "what was seen is what it was then"
    clip_grad_norm_(other.parameters(), 0.1)
    assert len(seen) == 1, "another model's is none of ours"
    clipped = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    assert clipped.item() == pytest.approx(0.1, rel=1e-3)
    watched.close()
    watched.close()
    clip_grad_norm_(model.parameters(), 0.1)
    assert len(seen) == 1


def test_clipping_is_what_is_replaced() -> None:
    """A private function of torch's: a new one that does without it must fail here."""
    import inspect

    clip_grad = pytest.importorskip("torch.nn.utils.clip_grad")
    source = inspect.getsource(clip_grad.clip_grad_norm_)
    assert "_clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)" in source


def test_a_loss_is_kept_without_its_graph() -> None:
    torch = pytest.importorskip("torch")
    from resilient_train.errors import UsageError
    from resilient_train.frameworks.roles import Objects
    from resilient_train.frameworks.torch.gradients import TorchGradients

    kept = TorchGradients(Objects((), ())).kept
    loss = (torch.ones(2, requires_grad=True) * 3).sum()
    value = kept(loss)
    assert (value.item(), value.requires_grad, kept(2)) == (6.0, False, 2.0)
    for wrong in (torch.ones(2), torch.ones(1) * 1j, "much", None):
        with pytest.raises(UsageError, match="takes one real number"):
            kept(wrong)


def test_gradients_that_are_dropped_change_nothing_not_even_by_a_closure() -> None:
    torch = pytest.importorskip("torch")
    from resilient_train.frameworks.roles import Objects
    from resilient_train.frameworks.torch.engine import engine_for

    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
    ):
        model = torch.nn.Linear(3, 2)
        optimizer = make(model.parameters())
        engine = engine_for(Objects((model,), (optimizer,)))
        step, gradients = engine.window, engine.gradients

        class Updates:
            def before_update(self, _: Any, gradients: Any = gradients) -> None:
                gradients.drop()

            def after_update(self, _: Any) -> None:
                pass

            def given(self) -> None:
                pass

        def closure(model: Any = model) -> Any:
            loss = model(torch.ones(1, 3)).sum()
            loss.backward()
            return loss

        for _ in range(2):  # the optimizer has a state by then
            closure()
            optimizer.step()
            optimizer.zero_grad()
        before = [parameter.clone() for parameter in model.parameters()]
        step.attach(Updates())
        step.begin()
        closure()
        optimizer.step()
        optimizer.step(closure)
        assert all(map(torch.equal, before, model.parameters()))
        step.detach()


# -- the files


def test_the_file_is_that_of_mindspore(tmp_path: Path) -> None:
    abnormal.write(tmp_path, "norm", {2: (45.70, 45.706)})
    text = (tmp_path / "abnormal_global_norm.json").read_text()
    assert json.loads(text) == {"2": [45.70, 45.706]}
    assert abnormal.read(tmp_path) == {("norm", 2): (45.70, 45.706)}


def test_what_is_not_finite_is_kept(tmp_path: Path) -> None:
    abnormal.write(tmp_path, "loss", {0: (NAN,), 7: (INF, -INF)})
    found = abnormal.read(tmp_path)
    assert math.isnan(found["loss", 0][0])
    assert found["loss", 7] == (INF, -INF)
    assert json.loads((tmp_path / "abnormal_loss.json").read_text())["7"] == [INF, -INF]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    abnormal.write(tmp_path, "norm", {2: (45.70,)})

    def full(_: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(abnormal.os, "fsync", full)
    with pytest.raises(OSError, match="the disk is full"):
        abnormal.write(tmp_path, "norm", {2: (45.70, 45.706)})
    assert abnormal.read(tmp_path) == {("norm", 2): (45.70,)}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"two": [1]}', '{"-1": [1]}', '{"2": 1}', '{"2": ["x"]}', '{"2": [{}]}']
)
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "abnormal_loss.json").write_text(text)
    with pytest.raises(ConfigError, match=r"abnormal_loss\.json does not map steps to lists of numbers"):
        abnormal.read(tmp_path)


def test_there_need_be_none(tmp_path: Path) -> None:
    assert abnormal.read(tmp_path) == {}


# -- what is done about it


def running(size: int = 2) -> Controller:
    controller = Controller(size)
    controller.launch()
    for rank in range(size):
        controller.greeted(rank, 0)
        controller.started(rank, 0, Started("all", ("world",)))
    assert controller.job.stage is Stage.RUNNING
    return controller


def sees(
    controller: Controller, value: float, *, rank: int = 0, step: int = 2, generation: int = -1, **more: Any
) -> Any:
    generation = controller.job.generation if generation < 0 else generation
    what = more.pop("what", "norm")
    message = Anomaly(generation, step, what, value, 44.0, **more)
    return controller.anomaly(rank, controller.job.incarnations[rank], message)


def recover(controller: Controller, commits: int = 2, step: int = 0) -> list[Resume]:
    job = controller.job
    for rank in range(job.world_size):
        standing = Joined(job.generation, commits, int(Phase.COMPUTE), True, 0, ("world",))
        controller.joined(rank, job.incarnations[rank], standing)
    commands: list[Command] = []
    for rank in range(job.world_size):
        commands = controller.done(rank, job.incarnations[rank], job.generation, step=step)
    return [each.message for each in commands if isinstance(each, Send) and isinstance(each.message, Resume)]


def of(commands: list[Command], kind: type) -> list[Any]:
    return [each for each in commands if isinstance(each, kind)]


def test_the_first_time_all_run_the_step_again() -> None:
    controller = running()
    commands = sees(controller, 45.70)
    assert of(commands, KeepAnomalies) == [KeepAnomalies("norm", 2, (45.70,))]
    assert of(commands, RaiseStop) == [RaiseStop(1)]
    fault = next(note for note in of(commands, Note) if note.kind == "fault")
    assert (fault.detail["strategy"], fault.detail["lost"]) == ("TRE", [])
    assert {resume.tolerated for resume in recover(controller)} == {frozenset({2})}


def test_the_second_time_it_is_written_down() -> None:
    controller = running()
    sees(controller, 45.70)
    recover(controller)
    commands = sees(controller, 45.706, again=True)
    assert of(commands, KeepAnomalies) == [KeepAnomalies("norm", 2, (45.70, 45.706))]
    assert not of(commands, RaiseStop)
    assert controller.job.stage is Stage.RUNNING
    (note,) = of(commands, Note)
    (line,) = told(note.kind, 1, 0.0, note.detail)
    assert line.startswith("the gradient norm of step 2 is 45.706 on rank 0 (threshold 44), and the step has been run")


def test_a_spike_says_what_was_usual() -> None:
    commands = sees(running(), 45.70, usual=2.5)
    fault = next(note for note in of(commands, Note) if note.kind == "fault")
    assert "is 45.7 on rank 0 (usual before it: 2.5; from 44 on it is a spike): all run the" in fault.detail["reason"]


def test_an_error_that_asks_for_its_step_has_no_value() -> None:
    """So the file is left alone, and the step is known all the same."""
    controller, text = running(), "RuntimeError: TREError"
    commands = sees(controller, NAN, what="raised", text=text)
    assert of(commands, RaiseStop)
    assert not of(commands, KeepAnomalies)
    first, fault = of(commands, Note)
    assert (first.kind, first.detail["values"], fault.kind) == ("anomaly", [], "fault")
    asks = "rank 0 asks for step 2 once more (RuntimeError: TREError)"
    assert fault.detail["reason"] == f"{asks}: all run the step again, its update was not applied"
    assert {resume.tolerated for resume in recover(controller)} == {frozenset({2})}
    (again,) = of(sees(controller, NAN, what="raised", text=text, again=True), Note)
    assert again.detail["reason"] == f"{asks}, and it has been run again already: this is the script's own error"


@pytest.mark.parametrize(
    ("error", "asks"),
    [
        (RuntimeError("TREError: norm"), True),
        (NotImplementedError("[TREError]"), True),
        (RuntimeError("norm"), False),
        (ValueError("TREError"), False),
    ],
)
def test_which_error_asks_for_its_step_once_more(error: Exception, asks: bool) -> None:
    assert asks_for_redo(error) is asks


def test_of_ranks_that_see_the_same_one_is_heard() -> None:
    controller = running()
    sees(controller, 45.70)
    assert sees(controller, 45.70, rank=1, generation=0) == []
    recover(controller)
    sees(controller, 45.706, again=True)
    assert sees(controller, 45.706, rank=1, again=True) == []
    assert controller.job.anomalies == {("norm", 2): (45.70, 45.706)}


def test_another_recovery_came_first() -> None:
    """The step is run again for that already; once is enough."""
    controller = running()
    controller.failed_collective(0, "broken")
    assert controller.job.generation == 1
    commands = sees(controller, 45.70, generation=0)
    assert of(commands, KeepAnomalies)
    assert not of(commands, RaiseStop)
    assert {resume.tolerated for resume in recover(controller)} == {frozenset({2})}


def test_a_dead_process_is_not_heard() -> None:
    controller = running()
    message = Anomaly(0, 2, "norm", 45.0, 44.0)
    controller.lost(1, 0, "died", [Standing(2, Phase.COMPUTE)] * 2)
    assert controller.anomaly(1, 0, message) == []


def test_norms_and_losses_are_kept_apart_and_tolerated_together() -> None:
    controller = running()
    controller.job.know_anomalies({("norm", 40): (50.0,)})
    sees(controller, NAN, step=3, what="loss")
    assert {resume.tolerated for resume in recover(controller)} == {frozenset({3, 40})}
    commands = sees(controller, 46.0, step=4)
    assert of(commands, KeepAnomalies) == [KeepAnomalies("norm", 4, (46.0,))]


def test_a_training_that_has_diverged_tells_of_what_may_still_come() -> None:
    """Each step is anomalous. Of the one before the update may be looked at once more, from behind."""
    controller = running()
    controller.job.know_anomalies({("norm", step): (NAN,) for step in (70, 71, 900, 2)})
    for step in range(80):
        known, again = step in (2, 70, 71), []
        if not known:
            again = of(sees(controller, NAN, step=step), RaiseStop)
            resume = recover(controller, commits=step, step=step)[0]
            assert sorted(resume.tolerated)[:2] == ([step - 1, step] if step else [0, 2])
            assert len(resume.tolerated) <= 6
        assert bool(again) is not known
        sees(controller, NAN, step=step, again=True)
    assert resume.tolerated == {78, 79, 900}


def test_what_an_earlier_run_has_seen_is_known_from_the_start() -> None:
    controller = Controller(1)
    controller.job.know_anomalies({("norm", 2): (45.70,)})
    commands = controller.started(0, 0, Started("all", ("world",)))
    assert of(commands, Send)[0].message == Resume(0, tolerated=frozenset({2}))
    assert of(sees(controller, 45.706, again=True), KeepAnomalies) == [KeepAnomalies("norm", 2, (45.70, 45.706))]


def test_it_is_kept_where_all_start_again() -> None:
    controller = running()
    sees(controller, 45.70)
    recover(controller)
    controller.job.can_go_back = lambda: True
    for rank in (0, 1):
        controller.lost(rank, 0, "died", [Standing(3, Phase.COMPUTE)] * 2)
    assert controller.job.stage is Stage.STARTING
    for rank in (0, 1):
        commands = controller.started(rank, controller.job.incarnations[rank], Started("all", ("world",)))
    assert of(commands, Send)[0].message.tolerated == {2}
    sees(controller, 45.706, again=True)
    assert controller.job.anomalies == {("norm", 2): (45.70, 45.706)}


# -- a rank


def names(effects: tuple[do.Effect, ...]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def rank_after(*events: Any, **options: Any) -> Rank:
    rank = Rank(1, **options)
    for event in events:
        rank.on(event)
    return rank


STARTED = (on.Begin(9, 0), Resume(0))
KNOWING = (on.Begin(9, 0), Resume(0, tolerated=frozenset({0})))
VERIFYING = (on.Enter(), on.UpdateBegins())
RECOVERED = (on.Ok(), on.Quieted(1), Plan(1, 0, {}), on.Ok(), on.Exit("interrupted"), on.Next(9))


def test_who_sees_an_anomaly_does_not_come_to_the_barrier() -> None:
    rank = rank_after(*STARTED, *VERIFYING)
    assert names(rank.on(on.Anomalous())) == ["SendAnomaly", "AwaitStop"]
    assert rank.state == Ask(At.HOOK)
    assert rank.standing == Standing(0, Phase.COMPUTE)
    for event in RECOVERED:
        rank.on(event)
    rank.on(Resume(1, tolerated=frozenset({0})))
    assert (rank.number, rank.attempt) == (0, 1)
    for event in VERIFYING:
        rank.on(event)
    did = rank.on(on.Anomalous())
    assert did[0] == do.SendAnomaly(again=True)
    assert names(did)[1:] == ["SnapshotFence", "LearnLayout", "Publish", "Arrive", "Cross"]
    assert rank.state == Barrier(At.HOOK)


def test_only_the_steps_that_are_named_are_tolerated() -> None:
    rank = rank_after(*KNOWING, *VERIFYING, on.Ok(), on.Ok(), on.UpdateEnds(), on.Exit(), on.Next(9))
    assert rank.number == 1
    for event in VERIFYING:
        rank.on(event)
    assert names(rank.on(on.Anomalous())) == ["SendAnomaly", "AwaitStop"]


def test_with_undo_the_end_of_the_body_is_where_it_is_seen() -> None:
    rank = rank_after(*STARTED, *VERIFYING, on.UpdateEnds(), on.Exit(), undo=True)
    assert names(rank.on(on.Anomalous())) == ["SendAnomaly", "AwaitStop"]
    assert rank.state == Ask(At.EXIT)


def test_the_key_is_the_step_of_the_update() -> None:
    rank = rank_after(
        on.Begin(9, 0), Resume(0, tolerated=frozenset({1})), on.Enter(), on.Exit(), on.Next(9), *VERIFYING
    )
    assert rank.number == 1
    assert do.SendAnomaly(again=True) in rank.on(on.Anomalous())


def test_an_update_that_is_left_out_has_no_gradients() -> None:
    rank = rank_after(*KNOWING, *VERIFYING, on.Ok(), skips=True, optimizers=2)
    assert names(rank.on(on.Ok())) == ["Compare", "SetMode", "DropGradients", "Return"]
    assert isinstance(rank.state, Update)
    rank.on(on.UpdateEnds(0))
    assert names(rank.on(on.UpdateBegins(1))) == ["DropGradients", "Return"]
    rank.on(on.UpdateEnds(1))
    assert isinstance(rank.state, Tail)
    assert rank.standing == Standing(1, Phase.APPLIED), "the step counts"
    rank.on(on.Exit())
    rank.on(on.Next(9))
    for event in (*VERIFYING, on.Ok()):
        rank.on(event)
    assert "DropGradients" not in names(rank.on(on.Ok()))


def test_who_is_ready_leaves_it_out_under_a_plan_too() -> None:
    rank = rank_after(*KNOWING, *VERIFYING, on.Ok(), on.Stopped(), on.Quieted(1), Plan(1, 1, {}), skips=True)
    assert names(rank.on(on.Ok()))[-2:] == ["DropGradients", "Return"]


def test_with_undo_each_optimizer_leaves_it_out() -> None:
    rank = rank_after(*KNOWING, on.Enter(), undo=True, skips=True)
    assert names(rank.on(on.UpdateBegins())) == ["Disarm", "SnapshotFence", "SaveUndo", "DropGradients", "Return"]
    assert rank.state == Body(held=True)


# -- what the user says


def test_a_plan_has_norms_and_losses() -> None:
    plan = parse_plan("norm rank=0 step=2 value=45.70; loss rank=1 step=3 value=nan generation=1")
    assert plan[0] == Injection("norm", 0, "READY", "before", step=2, value=45.70)
    assert math.isnan(plan[1].value)
    assert parse_plan(plan[0].describe()) == plan[:1]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("norm rank=0 step=2", "has no value"),
        ("norm rank=0 step=2 value=much", "value='much' .*must be a number"),
        ("norm rank=0 step=2 value=45 phase=COMPUTE", "looked at in phase=READY at=before, and nowhere else"),
        ("kill rank=0 step=2 value=45", "only norm, loss, slow have a value"),
        ("norm rank=0 step=2 value=45 target=param", "only uce and flip have a target"),
        ("nrom rank=0 step=2 value=45", "did you mean 'norm'"),
    ],
)
def test_a_wrong_plan(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_plan(text)


def test_a_plan_that_nobody_would_see() -> None:
    settings = config.Settings(faults="norm rank=0 step=2 value=45")
    config.check_plan(settings, Switches(tre=1))
    with pytest.raises(ConfigError, match="MS_ENABLE_TFT has no TRE:1"):
        config.check_plan(settings, config.DEFAULT_SWITCHES)


@pytest.mark.parametrize("wrong", [{"norm_threshold": 0}, {"norm_threshold": NAN}, {"loss_threshold": NAN}])
def test_thresholds_that_can_not_be(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"RESILIENT_(NORM|LOSS)_THRESHOLD must be"):
        config.Settings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"norm_threshold": -1.0}, "norm_threshold must be above 0"),
        ({"loss_threshold": NAN}, "loss_threshold must be a number"),
        ({"norm_threshold": "44"}, "norm_threshold must be a number, not '44'"),
        ({"on_anomaly": "ignore"}, "on_anomaly='ignore': one of the two, 'redo' or 'skip'"),
        ({"on_anomaly": ("redo", "skip")}, "one of the two"),
    ],
)
def test_a_session_says_what_is_wrong(wrong: dict[str, Any], named: str) -> None:
    torch = pytest.importorskip("torch")
    import resilient_train as rt

    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=named):
        rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **wrong)


def test_without_an_agent_nothing_is_checked() -> None:
    torch = pytest.importorskip("torch")
    import resilient_train as rt

    model = torch.nn.Linear(2, 2)
    with rt.Session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), norm_threshold=1.0) as session:
        for step in session.steps(1):
            with step:
                session.check(torch.tensor(NAN), norm=NAN)
