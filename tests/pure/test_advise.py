"""The command ``resilient-train advise``: what it reads, says, and refuses."""

import json
from pathlib import Path

import pytest

from pure.stories import at, beginning, normal_end, one_kill, write
from resilient_train.launch.cli import advise as module
from resilient_train.launch.cli.advise import AdviseOptions, advise, as_dict, as_lines
from resilient_train.launch.cli.tool import main
from resilient_train.protocol.messages import Reply
from resilient_train.state.failures import guess
from resilient_train.state.interval import Tier, best_steps, overhead
from resilient_train.state.nested import Nested, nested_overhead

PLAIN = ["advise", "--stall-s", "20", "--step-s", "6", "--devices", "1024"]


@pytest.fixture(autouse=True)
def no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MS_ENABLE_TFT", raising=False)


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def text(options: AdviseOptions) -> str:
    return "\n".join(line.text for line in as_lines(advise(options)))


def test_by_flags_alone(capsys) -> None:
    result = told([*PLAIN, "--present-steps", "1000", "--restart-s", "300", "--latency-s", "120"], capsys)
    job = Tier(stall_s=20, mtbf_s=guess(1024).mtbf_s, restart_s=300, latency_s=120)
    assert result["steps"] == best_steps(job, 6)
    assert result["seconds"] == 6 * result["steps"]
    assert result["cost"] == overhead(result["seconds"], job)
    assert result["present_cost"] == overhead(6000, job)
    assert result["history"] is None


def test_what_was_seen_outweighs_what_is_supposed(capsys) -> None:
    few = told([*PLAIN, "--failures", "3", "--hours", "30"], capsys)
    assert few["mtbf_s"] == guess(1024).seen(3, 30 * 3600).mtbf_s
    many = told([*PLAIN, "--failures", "12", "--hours", "120"], capsys)
    assert many["mtbf_s"] == 10 * 3600
    assert "what was seen alone" in str(many["notes"])
    assert many["steps"] < few["steps"] < told(PLAIN, capsys)["steps"]


def test_it_explains_itself_to_people(capsys) -> None:
    assert main([*PLAIN, "--present-steps", "20", "--mtbf-hours", "20000", "--share", "0.1"]) == 0
    out = capsys.readouterr().out
    for words in (
        "one failure in 195 h: 1,024 devices, each fails once in 20,000 h (--mtbf-hours), 0.1 of which need",
        "counts like 0.5 failures seen",
        "a save costs 20 s of training, a step takes 6 s",
        "left out of the costs (--restart-s)",
        "best      every ",
        "present   every 20 steps (2 min 0 s): ",
        "more for each day of training",
    ):
        assert words in out, out
    assert "no reason to change it" in text(AdviseOptions(stall_s=20, step_s=6, devices=1024, present_steps=440))
    assert "every step (6 s)" in text(AdviseOptions(stall_s=0, step_s=6, devices=1024))
    assert "is ever finished" in text(
        AdviseOptions(stall_s=1, step_s=60, devices=4, mtbf_hours=0.01, present_steps=9000)
    )


def test_two_kinds_of_saves(capsys) -> None:
    arguments = [*PLAIN, "--memory-stall-s", "0.4", "--restart-s", "300", "--present-steps", "1000"]
    result = told(arguments, capsys)
    mtbf_s = guess(1024).mtbf_s
    memory = Tier(stall_s=0.4, mtbf_s=mtbf_s / 0.9, restart_s=300)
    storage = Tier(stall_s=20, mtbf_s=mtbf_s / (1 - 0.9), restart_s=300)
    often, seldom = result["memory_steps"], result["steps"]
    assert seldom % often == 0
    assert result["cost"] == pytest.approx(nested_overhead(Nested(6 * often, seldom // often), memory, storage))
    assert result["cost"] < result["present_cost"] / 2
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"in memory every {often} steps" in out
    assert "present   to storage alone, every 1,000 steps" in out


def test_of_a_run(tmp_path: Path, capsys) -> None:
    faults = [event for event in one_kill() if event.kind != "injected"]
    write(tmp_path, [*beginning(), at(9000, "job_end", code=75, reason="")]).joinpath("events.jsonl").rename(
        tmp_path / "events-1.jsonl"
    )
    write(tmp_path, [*beginning(), *faults, at(5351, "session_end", 0, step=45), *normal_end(5400)])
    result = told(["advise", "--run-dir", str(tmp_path), "--stall-s", "0.01"], capsys)
    assert result["step_s"] == pytest.approx(0.1)
    assert result["restart_s"] == pytest.approx(0.5)
    history = result["history"]
    assert (history["world_size"], history["repaired"], history["ended"]) == (3, 1, 1)
    assert history["trained_s"] == pytest.approx(8.5 + 4.9)
    assert result["mtbf_s"] == guess(3).seen(1, history["trained_s"]).mtbf_s
    notes = "\n".join(result["notes"])
    assert "2 faults in 13.4 s of training: 1 repaired without a checkpoint, 1 ended the run" in notes
    assert "0.5 s, as the run took from its launch" in notes
    flags = ["--step-s", "2", "--restart-s", "7", "--devices", "9", "--failures", "0", "--hours", "5"]
    better = told(["advise", "--run-dir", str(tmp_path), "--stall-s", "0.01", *flags], capsys)
    assert (better["step_s"], better["restart_s"]) == (2, 7)
    assert better["mtbf_s"] == guess(9).seen(0, 5 * 3600).mtbf_s


def cost(t: float, stall_s: float, memory_stall_s: float | None = None):
    return at(t, "save_cost", 0, stall_s=stall_s, memory_stall_s=memory_stall_s, latency_s=1.0)


def test_a_run_that_has_saved_knows_what_a_save_costs(tmp_path: Path, capsys) -> None:
    costs = [cost(600, 0.2, 0.02), cost(700, 9.0), cost(800, 0.3, 0.04)]
    write(tmp_path, [*beginning(), *costs, at(5500, "session_end", 0, step=50), *normal_end(5500)])
    arguments = ["advise", "--run-dir", str(tmp_path), "--mtbf-hours", "1"]
    result = told(arguments, capsys)
    assert result["stall_s"] == pytest.approx(0.3)
    assert result["latency_s"] == pytest.approx(0.7), "of the second until it is on storage, 0.3 s are its stall"
    assert result["memory_steps"] is not None
    by_flags = [*arguments, "--stall-s", "0.3", "--memory-stall-s", "0.03", "--latency-s", "0.7"]
    assert result == told(by_flags, capsys) | {"notes": result["notes"]}
    words = "a save costs 0.3 s of training, one in memory 0.03 s; it is on storage 0.7 s later (medians of the run's"
    assert words in "\n".join(result["notes"])
    assert told([*arguments, "--memory-stall-s", "0.01"], capsys)["memory_steps"] < result["memory_steps"]
    assert told([*arguments, "--stall-s", "0.3"], capsys)["memory_steps"] is None, (
        "a flag: it alone says what saves cost"
    )


def test_no_interval_that_storage_can_not_carry(tmp_path: Path, capsys) -> None:
    """Steps take 0.1 s, saves cost little and failures come often, but it takes 60 s until one is on storage."""
    costs = [at(600, "save_cost", 0, stall_s=0.01, memory_stall_s=None, latency_s=60.01)]
    write(tmp_path, [*beginning(), *costs, at(5500, "session_end", 0, step=50), *normal_end(5500)])
    arguments = ["advise", "--run-dir", str(tmp_path), "--mtbf-hours", "1", "--step-s", "0.1"]
    slow = told([*arguments, "--present-steps", "250"], capsys)
    fast = told([*arguments, "--latency-s", "0"], capsys)
    assert slow["steps"] == 600 > fast["steps"]
    assert slow["cost"] > fast["cost"] + 60 / slow["mtbf_s"], "a failure loses what the checkpoint is late, too"
    assert slow["kept_steps"] == 750, "of three, two are due while storage is busy"
    job = Tier(stall_s=0.01, mtbf_s=slow["mtbf_s"], restart_s=slow["restart_s"], latency_s=60.0)
    assert slow["present_cost"] == pytest.approx(overhead(75.0, job))
    assert main([*arguments, "--present-steps", "250"]) == 0
    assert "every 250 steps (25 s), of which storage carries one in 3 only: " in capsys.readouterr().out
    two = told([*arguments, "--memory-stall-s", "0.001"], capsys)
    assert two["memory_steps"] < 600 <= two["steps"]
    assert told([*arguments, "--present-steps", "600"], capsys)["kept_steps"] == 600


def test_going_back_is_a_failure(tmp_path: Path) -> None:
    back = [at(2000, "restart_all", reason="all ranks are lost", attempt=1), at(2600, "started", step=0)]
    write(tmp_path, [*beginning(), *back, at(5500, "session_end", 0, step=50), *normal_end(5500)])
    advice = advise(AdviseOptions(run_dir=tmp_path, stall_s=0.1))
    assert advice.basis.rate == guess(3).seen(1, 5.0)
    assert "1 fault in 5 s of training: 0 repaired without a checkpoint, 0 ended the run, after 1 all" in text(
        AdviseOptions(run_dir=tmp_path, stall_s=0.1)
    )


def test_older_runs_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name, step in (("events-2", 10), ("events-10", 20)):
        write(tmp_path, [*beginning(), at(2500, "session_end", 0, step=step), at(2500, "finished")])
        (tmp_path / "events.jsonl").rename(tmp_path / f"{name}.jsonl")
    write(tmp_path, beginning())
    assert advise(AdviseOptions(run_dir=tmp_path, stall_s=0.1)).basis.step_s == pytest.approx(0.1)


def test_a_running_job_is_asked_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = at(500, "started").time_ns
    monkeypatch.setattr(module.time, "time_ns", lambda: begun + 3600 * 10**9)
    status = {"ranks": [{"rank": 0, "step": 7200}, {"rank": 1, "step": 7199}, {"rank": 2, "step": None}]}
    monkeypatch.setattr(module.asking, "ask", lambda _run, _question: Reply(status=status))
    basis = advise(AdviseOptions(run_dir=write(tmp_path, beginning()), stall_s=0.1)).basis
    assert basis.step_s == pytest.approx(0.5)
    assert basis.history is not None
    assert basis.history.trained_s == pytest.approx(3600)


def test_the_file_of_ato(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ato.json"
    path.write_text('{"failure_count": 4, "total_steps": 6000}')
    options = AdviseOptions(stall_s=20, step_s=6, devices=1024)
    by_flag = advise(AdviseOptions(stall_s=20, step_s=6, devices=1024, ato_path=path)).basis.rate
    assert by_flag == guess(1024).seen(4, 36_000)
    monkeypatch.setenv("MS_ENABLE_TFT", f"{{ATO:1,ATO_PATH:{path},ATO_THRESHOLD:4}}")
    assert advise(options).basis.rate.mtbf_s == 9000, "the threshold is reached: only what was seen"
    path.unlink()
    assert advise(options).basis.rate == guess(1024), "MindSpore writes it at the first failure"
    path.write_text("{}")
    assert main(PLAIN) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["advise"], "give --stall-s"),
        (["advise", "--stall-s", "1"], "give --step-s"),
        (["advise", "--stall-s", "1", "--step-s", "1"], "give --devices"),
        (["advise", "--stall", "1"], "No such option"),
        (["advise", "--stall-s", "long"], "Invalid value for '--stall-s'"),
        ([*PLAIN, "--failures", "3"], "both of --failures and --hours"),
        ([*PLAIN, "--hours", "3"], "both of --failures and --hours"),
        ([*PLAIN, "--failures", "-3", "--hours", "3"], "must be numbers from 0"),
        ([*PLAIN, "--present-steps", "0"], "--present-steps must be 1 or more"),
        ([*PLAIN, "--memory-stall-s", "1", "--memory-share", "1"], "--memory-share must be above 0 and below 1"),
        ([*PLAIN, "--memory-stall-s", "-1"], "stall_s must be"),
        ([*PLAIN, "--mtbf-hours", "0"], "must be above 0"),
        ([*PLAIN, "--mtbf-hours", "nan"], "must be above 0"),
        ([*PLAIN, "--share", "2"], "a share must be"),
        ([*PLAIN, "--devices", "0"], "must be 1 device or more"),
        ([*PLAIN, "--latency-s", "-1"], "latency_s must be"),
        ([*PLAIN, "--in-flight", "0"], "in_flight must be"),
        ([*PLAIN, "--detection-s", "inf"], "detection_s must be"),
        ([*PLAIN, "--stall-s", "nan"], "stall_s must be"),
        ([*PLAIN, "--step-s", "0"], "a step must take"),
        ([*PLAIN, "--run-dir", "nowhere"], "nowhere has no events.jsonl"),
        (["advise", "--run-dir", ".", "--stall-s", "1"], ". has no events.jsonl"),
        ([*PLAIN, "--ato-path", "nowhere.json"], "nowhere.json can't be read: No such file"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, words, refused) -> None:
    refused(arguments, words)


def test_a_run_that_does_not_tell(tmp_path: Path, capsys) -> None:
    write(tmp_path, beginning())
    assert main(["advise", "--run-dir", str(tmp_path), "--stall-s", "1"]) == 2
    assert "does not say how long a step takes: give --step-s" in capsys.readouterr().err


def test_an_infinite_cost_is_null_in_json() -> None:
    result = as_dict(advise(AdviseOptions(stall_s=1, step_s=60, devices=1, mtbf_hours=0.001, present_steps=10_000)))
    assert module.msgspec.json.decode(module.msgspec.json.encode(result))["present_cost"] is None
