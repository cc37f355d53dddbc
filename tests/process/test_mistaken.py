"""Mistakes in a loop that ended with exit code 0 and something wrong, or with nothing that a fault could go back to."""

import socket
from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

from resilient_train.observe.report import lines
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import read_run


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("wrong-optimizer", "AdamW is about to update 'module.0.weight' of the registered model"),
        ("by-hand", "step 0 has changed parameter 'module."),
    ],
)
def test_an_update_that_the_session_does_not_see_is_refused(tmp_path: Path, mode: str, words: str) -> None:
    run = launch(tmp_path / "run", "mistaken.py", mode, "25", ranks=2)
    assert run.code == 1, run.explain()
    assert f"UsageError: {words}" in run.err


def test_gradients_that_are_never_zeroed_are_refused(tmp_path: Path) -> None:
    """A step that is redone would begin without them."""
    run = launch(tmp_path / "run", "mistaken.py", "never-zeroed", "25", ranks=2)
    assert run.code == 1, run.explain()
    words = "UsageError: AdamW is about to update 'module.0.weight', and there is something from an update before in"
    assert words in run.err, run.explain()
    assert [each["detail"]["commits"] for each in run.of("saved")] == [1], "of the update before"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("ahead", "gradients are computed from what the step before has written, and is not registered: inputs. "),
        ("iterator", "an iterator of a DataLoader (Tensor) goes on in each step, and is not registered"),
    ],
)
@pytest.mark.parametrize(
    ("plan", "commits"), [((), {6}), (("--faults", "kill rank=1 step=3"), {6, 9})], ids=["", "killed"]
)
def test_what_flows_unregistered_is_refused(
    tmp_path: Path, mode: str, words: str, plan: tuple[str, ...], commits: set[int]
) -> None:
    """Also behind a fault: a rank whose body was cut looks anew, one that was behind it goes on."""
    run = launch(tmp_path / "run", "mistaken.py", mode, "25", ranks=2, flags=plan)
    assert run.code == 1, run.explain()
    assert f"UsageError: {words}" in run.err, run.explain()
    (saved,) = run.of("saved")
    assert saved["detail"]["commits"] in commits, "of the update before"


def test_a_loss_that_is_checked_in_front_of_a_body_is_refused(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "early", "5", ranks=2, MS_ENABLE_TFT="{ARF:1,TRE:1}")
    assert run.code == 1, run.explain()
    assert "UsageError: session.check() was called outside the body of a step and not behind its update" in run.err


def test_a_loop_that_never_updates_is_told_once(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "never", "250", ranks=2)
    assert run.code == 0, run.explain()
    (told,) = run.of("no_update")
    assert (told["rank"], told["step"], told["detail"]) == (0, 99, {"steps": 100, "begun": 0})
    assert run.err.count("no registered optimizer has stepped in 100 steps, since step 0") == 1


def test_a_parameter_that_nobody_trains_is_told_once(tmp_path: Path) -> None:
    """Also where rank 0 is replaced."""
    plan = ("--faults", "kill rank=0 step=2")
    run = launch(tmp_path / "run", "mistaken.py", "forgotten", "5", ranks=2, flags=plan)
    assert run.code == 0, run.explain()
    assert run.err.count("in no registered optimizer: 1 ('module.0.weight'); ") == 1


def test_a_mean_of_each_ranks_own_that_is_said_to_be_alike_is_told_once(tmp_path: Path) -> None:
    """Also where a rank is replaced, which then has another one's. What is alike is not told."""
    plan = ("--faults", "kill rank=1 step=6")
    run = launch(tmp_path / "run", "mistaken.py", "own-mean", "12", ranks=3, flags=plan)
    assert run.code == 0, run.explain()
    (told,) = run.of("state_differs")
    assert told["detail"] == {"name": "state['own']", "commits": 1, "ranks": [[0], [1], [2]]}
    assert run.err.count("state['own'] is not the same on ranks [0] and [1] and [2], but a replaced rank gets") == 1
    assert "results may differ from an undisturbed run's (state_differs: see above)" in run.err


def test_a_module_that_stands_in_anothers_place_is_told_when_a_new_process_has_it_not(tmp_path: Path) -> None:
    """It trained on with the first one: other bits on all ranks, with exit code 0, and without a word."""
    plan = ("--faults", "kill rank=1 step=6")
    run = launch(tmp_path / "run", "mistaken.py", "other-module", "9", "--at", "3", ranks=2, flags=plan)
    assert run.code == 0, run.explain()
    told = [event["detail"] for event in run.of("state_differs")]
    where = {"commits": 7, "ranks": [[0], [1]]}
    assert told == [{"name": "model.0.module.1 (the module)", **where}, {"name": "model.hooks", **where}], run.explain()
    assert run.err.count("but a new process has what the script builds there") == 1, run.explain()
    assert run.err.count("but a new process has the hooks alone that the script hangs on") == 1, run.explain()


def test_a_hook_that_is_hung_on_once_in_a_step_that_is_computed_twice_is_told(tmp_path: Path) -> None:
    """It is taken off for the second time, and never hung on again: other bits without a fault, and nobody said so."""
    environ = {"RESILIENT_VERIFY_EVERY": "2"}
    run = launch(tmp_path / "run", "mistaken.py", "hook-once", "9", "--at", "5", ranks=2, **environ)
    assert run.code == 0, run.explain()
    assert run.err.count("step 5 came to other bits on every rank when it was computed again") == 1, run.explain()
    assert [event["detail"] for event in run.of("hooks_lost")] == [{"names": ["<lambda>"]}] * 2, run.explain()


def test_a_process_group_that_is_made_in_the_loop_is_told_once(tmp_path: Path) -> None:
    """After a fault the others would wait for a new process there."""
    run = launch(tmp_path / "run", "mistaken.py", "group", "9", ranks=2)
    assert run.code == 0, run.explain()
    assert run.err.count("makes a process group in the Session's loop") == 1, run.explain()


def test_a_child_of_the_loop_that_ends_is_not_the_rank(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "forks", "9", ranks=2, flags=("--faults", "kill rank=1 step=6"))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
    assert len(run.of("session_end")) == 2, run.explain()


@pytest.mark.parametrize("loops", ["epochs", "phases"])
def test_a_process_that_begins_in_another_of_the_scripts_loops_says_so(tmp_path: Path, loops: str) -> None:
    """It is through with its own when the others are: the job ends well all the same."""
    plan = ("--faults", "kill rank=1 step=6; kill rank=1 step=10 incarnation=1")
    run = launch(tmp_path / "run", "mistaken.py", loops, "12", ranks=2, flags=plan)
    assert run.code == 0, run.explain()
    told = [event["detail"] for event in run.of("other_loop")]
    assert told == [{"next": 6, "loops": 2, "missed": 1}, {"next": 10, "loops": 3, "missed": 2}], run.explain()
    assert "step 6 belongs to loop 2 of the script over session.steps(), and this process is in its loop 1" in run.err


def test_messages_that_are_received_in_another_step_end_the_job_at_a_fault(tmp_path: Path) -> None:
    """It is told long before. Else the next one would be taken for one that is lost: other bits, and nobody told."""
    kill = "kill rank=2 step=9 phase=COMPUTE at=backward"
    run = launch(tmp_path / "run", "mistaken.py", "carries", "14", ranks=3, flags=("--faults", kill))
    assert run.code == 2, run.explain()
    (told,) = run.of("message_carried")
    assert (told["detail"]["source"], told["detail"]["target"]) == (0, 1)
    assert run.err.count("messages from rank 0 to rank 1 (0, tag 0) are sent in the body of one step and received") == 1
    assert "what was on its way is lost, and nothing could bring it back" in run.err
    assert "updates is saved" in run.err, run.err


def test_without_a_fault_such_messages_are_the_scripts_own_business(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "mistaken.py", "carries", "14", ranks=3)
    assert run.code == 0, run.explain()
    assert len(run.of("message_carried")) == 1


def sentence_of(run: Run) -> str:
    """What the console is told of the end: one line, once."""
    assert run.code == 2, run.explain()
    (told,) = [line for line in run.err.splitlines() if "resilient-run: the job ends: " in line]
    assert len(run.of("replicas_differ")) == 1, run.explain()
    assert run.of("session_end") == []
    assert "Traceback" not in run.err
    return told


def test_gradients_that_nobody_averages_are_found_at_the_first_update(tmp_path: Path) -> None:
    told = sentence_of(launch(tmp_path / "run", "mistaken.py", "no-ddp", "25", ranks=2))
    assert "ranks [0, 1] are to hold the same bits, but after update 1 'model.0.0.weight' differs between" in told
    assert "each rank applies gradients of its own: wrap the model in DistributedDataParallel" in told


def drift(run_dir: Path, *arguments: str, ranks: int = 3, at: int = 18, faults: str = "") -> Run:
    """Rank 1 goes wrong in that step: behind a power of two, and long before the next."""
    flags = ("--max-restarts", "1", "--faults", faults) if faults else ()
    return launch(run_dir, "mistaken.py", "drift", *arguments, "--at", str(at), ranks=ranks, flags=flags)


def test_a_replica_that_drifts_is_found_before_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = drift(tmp_path / "run", "40", "--save", "24")
    assert "after update 25 'model.0.module.2.bias' differs on rank 1: something has changed it" in sentence_of(run)
    assert run.of("saved") == []
    assert not (run.run_dir / "checkpoints").exists()


def parameters(run: Run) -> dict[int, str]:
    return {rank: parameters for rank, (parameters, _) in run.digests().items()}


@pytest.mark.parametrize("memory", [(), pytest.param(("--memory", "1"), marks=pytest.mark.long)])
def test_a_replica_that_a_machine_has_spoilt_costs_the_steps_since_it_was_right(
    tmp_path: Path, undisturbed_of: Undisturbed, memory: tuple[str, ...]
) -> None:
    """Once, between two checkpoints: all go back to the first one, and end as any other run. With snapshots of each
    step memory holds nothing but parts of replicas that differ.
    """
    arguments = ("40", "--save", "8", *memory)
    plain = undisturbed_of("mistaken.py", "drift", "40", ranks=3)
    run = drift(tmp_path / "run", *arguments, "--once", str(tmp_path / "spoilt"))
    assert run.code == 0, run.explain()
    assert parameters(run) == parameters(plain)
    (told,) = run.of("replicas_differ")
    assert "'model.0.module.2.bias' differs on rank 1: something has" in told["detail"]["reason"]
    digests, devices = told["detail"]["digests"], told["detail"]["devices"]
    assert digests["0"] == digests["2"] != digests["1"]
    assert devices == {str(rank): f"{socket.gethostname()} cpu" for rank in range(3)}
    story = [line.text for line in lines(read_run(read_events(run.run_dir / "events.jsonl")))]
    held = f"rank 1 ({socket.gethostname()} cpu) had other bits than it should once: held after"
    assert any(text.startswith(held) for text in story)
    (again,) = run.of("restart_all")
    assert (again["detail"]["state_lost"], again["detail"]["attempt"]) == (True, 1)
    (commits,) = {event["detail"]["commits"] for event in run.of("restored")}
    assert 8 <= commits <= 18, "what storage, or a slot that is being read, is too busy for is left out"
    assert run.err.count("All ranks start again") == 1


def test_snapshots_in_memory_find_out_soon(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Nothing goes to storage, and the next comparison would be at update 32: memory then holds no snapshot of before.
    But the snapshots at 24 differ, so replicas are compared at once.
    """
    plain = undisturbed_of("mistaken.py", "drift", "40", ranks=3)
    arguments = ("40", "--save", "1000", "--memory", "8")
    run = drift(tmp_path / "run", *arguments, "--once", str(tmp_path / "spoilt"), "--pace")
    assert run.code == 0, run.explain()
    assert parameters(run) == parameters(plain)
    (told,) = run.of("replicas_differ")
    assert "after update 25 " in told["detail"]["reason"]
    assert {(each["detail"]["source"], each["detail"]["commits"]) for each in run.of("restored")} == {("memory", 16)}


def test_a_script_that_makes_replicas_differ_is_started_again_once(tmp_path: Path) -> None:
    run = drift(tmp_path / "run", "40", "--save", "8")
    assert run.code == 2, run.explain()
    assert len(run.of("restart_all")) == 1
    assert len(run.of("replicas_differ")) == 2
    assert "They had differed before, and all had gone back for that: no machine does so twice" in run.err
    assert {saved["detail"]["commits"] for saved in run.of("saved")} <= {8, 16}


def test_a_replica_that_drifts_is_found_before_anybody_trains_on_what_it_gives(tmp_path: Path) -> None:
    run = drift(tmp_path / "run", "40", faults="kill rank=2 step=22 phase=COMPUTE")
    assert "after update 22 'model.0.module.2.bias' differs" in sentence_of(run)
    assert len(run.of("fault")) == len(run.of("resumed")) == 1


@pytest.mark.parametrize(("steps", "at"), [(70, 66), pytest.param(1040, 1030, marks=pytest.mark.long)])
def test_a_replica_that_drifts_is_found_at_the_end(tmp_path: Path, steps: int, at: int) -> None:
    """However far the next comparison would be."""
    told = sentence_of(drift(tmp_path / "run", str(steps), ranks=2, at=at))
    assert f"after update {steps} 'model.0.module.2.bias' differs between ranks [0] and [1]" in told


@pytest.mark.parametrize("victims", ["", "kill rank=2 step=22 phase=COMPUTE; kill rank=2 step=22 incarnation=1"])
def test_a_replica_that_drifts_is_found_when_the_job_is_told_to_end(tmp_path: Path, victims: str) -> None:
    """By ranks that have come to one head, and by survivors that save what they hold, each a part of it."""
    leave_at = "-1" if victims else "22"
    run = drift(tmp_path / "run", "40", "--leave-at", leave_at, faults=victims)
    assert run.code == 2, run.explain()
    assert run.of("saved") == []
    assert "are to hold the same bits" in run.err


def test_snapshots_of_replicas_that_differ_are_not_put_together(tmp_path: Path) -> None:
    """They are parts of one state only if the replicas were equal. All ranks are lost before anybody has compared: the
    first snapshot that differs is that of update 21, so they would compare before update 22.
    """
    run = drift(tmp_path / "run", "40", "--save", "100", "--memory", "1", "--all-die-at", "21", at=20)
    assert run.code == 2, run.explain()
    lost, again, *_ = [each["detail"]["reason"] for each in run.of("restart_all")]
    assert "no living rank holds a replica" in lost, run.explain()
    assert "are parts of replicas that differed" in again, run.explain()
    assert all(each["detail"]["commits"] <= 20 for each in run.of("restored")), run.explain()


SELDOM = ("base", "scaler", "undo", "accumulate+static", "two+unused")


@pytest.mark.parametrize("variant", ["gan", *(pytest.param(name, marks=pytest.mark.long) for name in SELDOM)])
def test_no_loop_that_is_right_is_suspected(tmp_path: Path, variant: str) -> None:
    """With comparisons behind 1, 2, 4 and 8 updates, at checkpoints, after a recovery and at the end."""
    arguments = ("train.py", "--steps", "18", "--variant", variant, "--save-mode", '{"steps": 3, "memory_steps": 1}')
    run = launch(tmp_path / "run", *arguments, ranks=3, flags=("--faults", "kill rank=1 step=10 phase=COMPUTE"))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
    assert run.of("saved"), run.explain()
    assert "same bits" not in (run.run_dir / "events.jsonl").read_text(), run.explain()
