"""The pieces of the demonstration that need no second process."""

from pathlib import Path

import pytest

from pure.stories import at, beginning, normal_end, one_kill, whole_run
from resilient_train.demo.plot import draw
from resilient_train.demo.run import DemoOptions, EndedRun, RunComparison, _problems, as_dict, as_lines, read_losses
from resilient_train.errors import ConfigError
from resilient_train.observe.timeline import read_run

LOSSES = {rank: {step: 5.0 - step / 10 for step in range(20)} for rank in range(3)}


@pytest.fixture
def options(tmp_path):
    return DemoOptions(run_dir=tmp_path, steps=20, ranks=3, faults="kill rank=2 step=7 phase=COMPUTE at=backward")


def ended(events, name="disturbed", exit_code=0, losses=LOSSES):
    return EndedRun(name, Path("/nowhere"), exit_code, 1.0, read_run(events), losses)


def compared(options, disturbed):
    expected = ended([*beginning(), *normal_end()], "undisturbed")
    return RunComparison(options, expected, disturbed, _problems(options, expected, disturbed))


def test_equal_digests_and_a_recovery_for_each_fault_are_a_success(options):
    result = compared(options, ended(whole_run()))
    assert result.good
    told = as_dict(result)
    assert (told["identical"], told["ok"], told["digest"], told["recovery_ms"]) == (True, True, "abc", [351.0])
    assert (told["steps"], told["steps_redone"], told["committed_steps_lost"]) == (20, 1, 0)
    text = [line.text for line in as_lines(result)]
    assert text[-1] == "parameters identical: yes (digest abc)"
    assert any("●" in line for line in text)


def test_other_parameters_are_a_failure(options):
    result = compared(options, ended([*beginning(), *one_kill(), *normal_end(digest="other")]))
    assert not result.good
    assert not result.identical
    assert as_lines(result)[-1].text == "parameters identical: NO"


def test_other_random_numbers_are_a_failure(options):
    events = [*beginning(), *one_kill(), *normal_end()]
    other = {"params_digest": "abc", "rank_digest": "another"}
    result = compared(options, ended([*events, at(6000, "session_end", 1, detail=other)]))
    assert (result.identical, result.rank_state_identical, result.good) == (True, False, False)
    assert "random numbers" in result.problems[0]


def test_a_fault_that_never_happened_is_a_failure(options):
    result = compared(options, ended([*beginning(), *normal_end()]))
    assert result.identical
    assert not result.good
    assert "only 0 of them" in result.problems[0]


def test_other_losses_are_a_failure_and_missing_ones_are_not(options):
    gap = {**LOSSES, 0: {step: loss for step, loss in LOSSES[0].items() if step != 9}}
    assert compared(options, ended(whole_run(), losses=gap)).good
    other = {**LOSSES, 1: {**LOSSES[1], 5: 0.25}}
    assert compared(options, ended(whole_run(), losses=other)).problems == ["rank 1 saw other losses than undisturbed"]


def test_a_run_that_ended_badly_says_how(options):
    failed = [*beginning(), at(900, "job_end", code=75, reason="no replica")]
    result = compared(options, ended(failed, exit_code=75))
    assert "the disturbed run ended with exit code 75: no replica" in result.problems[0]
    assert (
        compared(options, ended(whole_run(), exit_code=None)).problems[0].startswith("the disturbed run took too long")
    )


@pytest.mark.parametrize("wrong", [{"steps": 5}, {"ranks": 1}, {"faults": "kill rank=4 step=1"}, {"faults": "kill"}])
def test_options_that_can_not_work_are_refused(wrong, tmp_path):
    with pytest.raises(ConfigError):
        DemoOptions(run_dir=tmp_path, **wrong)


def test_default_faults_are_inside_the_run(tmp_path):
    for steps in (6, 7, 60):
        for ranks in (2, 3, 4):
            assert len(DemoOptions(run_dir=tmp_path, steps=steps, ranks=ranks).plan()) == 2


def test_the_last_loss_of_a_step_counts_and_torn_lines_are_left_out(tmp_path):
    path = tmp_path / "loss_rank0.jsonl"
    path.write_bytes(b'{"step":1,"loss":2.5}\n{"step":2,"loss":9.0}\nrubbish\n{"step":2,"loss":1.5}\n{"step":3,"lo')
    assert read_losses(path) == {1: 2.5, 2: 1.5}
    assert read_losses(tmp_path / "missing") == {}


def test_the_plot_shows_where_runs_differ():
    expected = {step: 10.0 - step for step in range(10)}
    same = draw(expected, expected, [3], width=60, height=5)
    assert "▲" in "".join(same)
    assert "o" not in "".join(same)
    other = draw(expected, {**expected, 4: 2.0}, width=60, height=5)
    assert "o" in "".join(other)
    assert draw({}, {}, width=60, height=5) == []
    assert draw({0: 1.0}, {0: 1.0}, width=60, height=5)


@pytest.mark.torch
def test_text_is_deterministic_and_windows_are_moved_on_by_one():
    from resilient_train.demo.text import VOCABULARY, Windows, corpus

    assert corpus() == corpus()
    assert max(corpus()) < VOCABULARY
    data = Windows(64)
    inputs, targets = data[len(data) - 1]
    assert inputs.shape == targets.shape == (64,)
    assert inputs[1:].equal(targets[:-1])
    assert len(data) > 1000
    with pytest.raises(IndexError):
        data[len(data)]


@pytest.mark.torch
def test_the_model_has_about_a_million_parameters_and_depends_on_random_numbers():
    import torch

    from resilient_train.demo.gpt import GPT
    from resilient_train.demo.text import VOCABULARY

    model = GPT(VOCABULARY, 64)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6
    tokens = torch.zeros(2, 64, dtype=torch.long)
    assert model(tokens).shape == (2, 64, VOCABULARY)
    assert not model(tokens).equal(model(tokens))
