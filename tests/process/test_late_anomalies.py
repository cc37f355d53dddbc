"""A script finds out later that a step was wrong: all go back to what was saved before it."""

import os
import signal
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, Run, finish, launch, start
from saved_jobs import wait_for
from shared import Undisturbed

STEPS, AT = 26, 9
"""Between two updates of whose states one is kept, where every fourth one is."""
ON = {"MS_ENABLE_TFT": "{TRE:1,ARF:1}"}
WRONG = ("--at", str(AT))
SAVES = ("--save", "1000", "--memory", "4", "--waits")


def late(run_dir: Path, *arguments: str, ranks: int = 2, **environ: str) -> Run:
    return launch(run_dir, "late.py", str(STEPS), *arguments, ranks=ranks, **(environ or ON))


def digests(run: Run) -> set[str]:
    return {digest for digest, _ in run.digests().values()}


@pytest.fixture
def plain(undisturbed_of: Undisturbed) -> Run:
    """Nothing goes wrong. What is saved, and where a loss is looked at, makes no difference."""
    return undisturbed_of("late.py", str(STEPS), ranks=2, **ON)


@pytest.fixture
def left_out(undisturbed_of: Undisturbed) -> Run:
    """The script leaves the update out by itself."""
    return undisturbed_of("late.py", str(STEPS), "--leave-out", str(AT), ranks=2, **ON)


@pytest.mark.parametrize("kept", [("--save", "4"), SAVES], ids=["storage", "memory"])
def test_what_a_machine_has_made_wrong_is_trained_anew(tmp_path: Path, plain: Run, kept: tuple[str, ...]) -> None:
    look = "6" if kept[1] == "4" else "2"  # memory holds two snapshots
    run = late(tmp_path / "run", *kept, *WRONG, "--once", "--look", look)
    assert run.code == 0, run.explain()
    assert {rank: digest for rank, (digest, _) in run.digests().items()} == {
        rank: digest for rank, (digest, _) in plain.digests().items()
    }
    assert len(run.of("restart_all")) == 1, run.explain()
    (again,) = run.of("restart_all")
    assert f"since step {AT} can't be right: the validation has become worse" in again["detail"]["reason"]
    (commits,) = {event["detail"]["commits"] for event in run.of("restored")}
    assert commits in (4, 8), "what storage is too busy for is left out"
    assert next(event["detail"]["goes_back"] for event in run.of("late_anomaly"))
    aside = sorted(path.name for path in (run.run_dir / "checkpoints").glob("wrong_*"))
    assert bool(aside) == (kept[1] == "4")
    assert {int(name.removeprefix("wrong_step_")) for name in aside} <= {12, 16, 20, 24}
    assert run.err.count("All ranks start again") == 1


def test_memory_has_an_older_one_too(tmp_path: Path, plain: Run) -> None:
    """Two steps before it would be overwritten."""
    run = late(tmp_path / "run", *SAVES, *WRONG, "--once", "--look", "5")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    assert [event["detail"]["goes_back"] for event in run.of("late_anomaly")] == [True], run.explain()
    assert {event["detail"]["commits"] for event in run.of("restored")} == {8}


def test_snapshots_by_the_switch(tmp_path: Path, plain: Run) -> None:
    """As MindSpore has them: in memory alone, and not with ``TRE:1``."""
    arguments = (*WRONG, "--once", "--look", "5", "--memory", "4")
    run = late(tmp_path / "run", *arguments, "--waits", MS_ENABLE_TFT="{ARF:1,TRE:2,TRE_SNAPSHOT_STEPS:4}")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    restored = {(event["detail"]["source"], event["detail"]["commits"]) for event in run.of("restored")}
    assert restored == {("memory", 8)}
    assert not run.of("saved")
    run = late(tmp_path / "one", *arguments, MS_ENABLE_TFT="{ARF:1,TRE:1,TRE_SNAPSHOT_STEPS:4}")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")


def test_without_arf_too(tmp_path: Path, plain: Run) -> None:
    """As a MindSpore job's switch has it. Nobody is lost; who is, even then, ends the job."""
    arguments = ("--save", "4", *WRONG, "--once", "--look", "6")
    run = late(tmp_path / "run", *arguments, MS_ENABLE_TFT="{TRE:1}")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    assert [event["detail"]["goes_back"] for event in run.of("late_anomaly")] == [True], run.explain()
    killed = late(tmp_path / "killed", *arguments, "--killed", "early", MS_ENABLE_TFT="{TRE:1}")
    assert killed.code == 137, killed.explain()
    assert "replacing lost ranks is switched off (MS_ENABLE_TFT has no ARF:1)" in killed.err


@pytest.mark.parametrize("kept", [("--save", "4"), SAVES], ids=["storage", "memory"])
def test_a_launcher_lost_before_all_have_gone_back(tmp_path: Path, plain: Run, kept: tuple[str, ...]) -> None:
    """What is wrong is the newest that lies there, and the next one knows that."""
    run_dir = tmp_path / "run"
    job = [str(JOBS / "late.py"), str(STEPS), *kept, *WRONG, "--once", "--look", "5"]
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *job]
    with start(command, **ON) as process:
        wait_for(run_dir, process, "restart_all")
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)
    run = finish(command, run_dir, **ON)
    assert run.code == 0, run.explain()
    assert run.of("restored")[0]["detail"]["commits"] <= AT, run.explain()
    assert digests(run) == digests(plain)
    assert not (run_dir / "distrusted.json").exists()


def test_what_a_script_does_for_good_at_some_step(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """A process that was behind that step can't be brought back before it; a new one can (decision 50)."""
    stage = ("--save", "4", "--stage", str(AT + 3))
    plain = undisturbed_of("late.py", str(STEPS), *stage, ranks=2, **ON)
    arguments = (str(STEPS), *stage, *WRONG, "--once", "--look", "6")
    faults = ("--faults", f"kill rank=1 step={AT + 4} phase=COMPUTE at=forward")
    run = launch(tmp_path / "run", "late.py", *arguments, ranks=2, flags=faults, **ON)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == run.recoveries() == 1, run.explain()
    assert digests(run) == digests(plain)


@pytest.mark.parametrize("killed", [pytest.param("early", marks=pytest.mark.long), "late"])
def test_a_rank_that_dies_before_all_have_gone_back(tmp_path: Path, plain: Run, killed: str) -> None:
    """What lies in memory from behind the wrong step is nobody's source then either. Early: before its Session, and so
    no more ranks are forked.
    """
    run = late(tmp_path / "run", "--save", "4", *WRONG, "--once", "--look", "6", "--killed", killed)
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    assert {event["detail"]["commits"] for event in run.of("restored")} <= {4, 8}
    assert len(run.of("restart_all")) == 2


def test_a_step_whose_states_are_gone(tmp_path: Path) -> None:
    """They were saved once, and overwritten."""
    run = late(tmp_path / "run", "--save", "1000", "--memory", "2", "--at", "5", "--look", "7")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    assert "nothing of before is saved: it is written down, and training goes on" in run.err


def test_what_comes_again_is_written_down(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    unseen = undisturbed_of("late.py", str(STEPS), *WRONG, "--look", "1000", ranks=2, **ON)
    run = late(tmp_path / "run", "--save", "4", *WRONG, "--look", "6")
    assert run.code == 0, run.explain()
    assert run.digests().keys() == unseen.digests().keys()
    assert digests(run) == digests(unseen)
    assert len(run.of("restart_all")) == 1
    assert "all have gone back for that already: it is written down, and training goes on" in run.err


def test_where_nothing_is_saved_training_goes_on(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *WRONG, "--look", "2")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    told = f"since step {AT} can't be right: the validation has become worse; nothing of before is saved: it is"
    assert told in run.err


def test_without_tre_it_has_no_effect(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--save", "4", *WRONG, "--look", "2", MS_ENABLE_TFT="{ARF:1}")
    assert run.code == 0, run.explain()
    assert not run.of("late_anomaly")
    assert run.err.count("session.anomaly() has no effect: MS_ENABLE_TFT has no TRE:1") == 1


def test_a_step_that_has_not_begun(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "4", "--look", "-3")
    assert run.code == 1, run.explain()
    assert "UsageError: session.anomaly(4): the newest step that has begun is" in run.err


# -- a loss that is looked at behind the update


def abnormal(run: Run) -> str:
    return (run.run_dir / "abnormal_loss.json").read_text()


@pytest.mark.parametrize("where", [pytest.param("body", marks=pytest.mark.long), "between"])
def test_a_loss_behind_its_update(tmp_path: Path, plain: Run, where: str) -> None:
    run = late(tmp_path / "run", *SAVES, *WRONG, "--once", "--nan", where)
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert again["detail"]["reason"] == f"the loss of step {AT} is nan on rank 1, behind its update"
    assert {event["detail"]["commits"] for event in run.of("restored")} <= {4, 8}
    assert abnormal(run) == f'{{"{AT}": [NaN]}}\n'
    assert "neither a gradient norm nor a loss" not in run.err


def test_a_loss_behind_its_update_that_comes_again(tmp_path: Path, plain: Run) -> None:
    """In the same job, and in one that is started again in its directory."""
    run = late(tmp_path / "run", *SAVES, *WRONG, "--nan", "body")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    assert len(run.of("restart_all")) == 1
    told = f"the loss of step {AT} is nan on rank 1, behind its update; "
    goes_on = ": it is written down, and training goes on"
    assert run.err.count(f"{told}all have gone back for that already{goes_on}") == 1, run.err
    assert abnormal(run) == f'{{"{AT}": [NaN, NaN]}}\n'
    later = late(tmp_path / "run", *WRONG, "--nan", "body")
    assert later.code == 0, later.explain()
    assert later.err.count(f"{told}the step has been run again for that already{goes_on}") == 1, later.err
    assert not later.of("restart_all")
    assert abnormal(later) == f'{{"{AT}": [NaN, NaN, NaN]}}\n'


def test_a_loss_behind_its_update_where_nothing_is_saved(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *WRONG, "--nan", "body")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    assert run.err.count("; nothing of before is saved: it is written down, and training goes on") == 1, run.err
    assert not (run.run_dir / "abnormal_loss.json").exists(), "a later run has not run it again"


def test_an_update_is_left_out_when_all_have_gone_back(tmp_path: Path, left_out: Run) -> None:
    run = late(tmp_path / "run", *SAVES, *WRONG, "--nan", "body", "--on-anomaly", "skip")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(left_out)
    assert [event["step"] for event in run.of("update_left_out")] == [AT, AT]
    assert len(run.of("late_anomaly")) == 1, "of an update that is left out there is nothing to go back for"


# -- MindSpore's way to ask for a step once more

RAISED = f"rank 1 asks for step {AT} once more (RuntimeError: TREError: the global norm is 46.1)"
TOLD_OWN = "this is the script's own error"


def test_an_error_that_asks_for_its_step_once_more(tmp_path: Path, plain: Run) -> None:
    run = late(tmp_path / "run", *WRONG, "--once", "--raises", "before")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    assert run.err.count(f"{RAISED}: all run the step again, its update was not applied") == 1, run.err
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE"]
    # A rank that had not come to the step yet, on a machine that is busy, has nothing to do again.
    assert max(event["detail"]["redone"] for event in run.of("session_end")) == 1
    assert not list(run.run_dir.glob("abnormal_*")), "there is no value"
    assert not run.of("restart_all")


def test_an_error_that_asks_twice_is_the_script_s(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--save", "4", *WRONG, "--raises", "before")
    assert run.code == 1, run.explain()
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE"]
    assert run.err.count(f"{RAISED}, and it has been run again already: {TOLD_OWN}") == 1, run.err
    assert f"its state from after {AT} updates is saved" in run.err
    assert not run.of("restart_all")


def test_without_tre_no_error_asks_for_anything(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *WRONG, "--raises", "before", MS_ENABLE_TFT="{ARF:1}")
    assert run.code == 1, run.explain()
    assert not run.of("anomaly")
    assert "once more" not in run.err


@pytest.mark.parametrize("where", [pytest.param("behind", marks=pytest.mark.long), "between"])
def test_an_error_that_asks_behind_the_update(tmp_path: Path, plain: Run, where: str) -> None:
    run = late(tmp_path / "run", *SAVES, *WRONG, "--once", "--raises", where)
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert again["detail"]["reason"] == f"{RAISED}, behind its update"


def test_an_error_that_asks_behind_the_update_twice(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *SAVES, *WRONG, "--raises", "behind")
    assert run.code == 1, run.explain()
    assert len(run.of("restart_all")) == 1
    told = f"{RAISED}, behind its update; all have gone back for that already: {TOLD_OWN}"
    assert run.err.count(told) == 1, run.err


def test_an_error_that_asks_where_nothing_is_saved(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *WRONG, "--raises", "behind")
    assert run.code == 1, run.explain()
    assert run.err.count(f"{RAISED}, behind its update; nothing of before is saved: {TOLD_OWN}") == 1, run.err


@pytest.mark.parametrize("where", [pytest.param("before", marks=pytest.mark.long), "behind"])
def test_an_update_is_left_out_behind_an_error_that_asks(tmp_path: Path, left_out: Run, where: str) -> None:
    """In front of the update or behind it: when the step comes again it has none."""
    run = late(tmp_path / "run", *SAVES, *WRONG, "--once", "--raises", where, "--on-anomaly", "skip")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(left_out)
    assert [event["step"] for event in run.of("update_left_out")] == [AT, AT]


NAN = (*WRONG, "--factor", "nan", "--look", "1000")
"""Nobody looks: there is no norm, and the script says nothing."""


def test_a_state_that_becomes_nan_is_told(tmp_path: Path) -> None:
    """Without a switch, by ranks that hold the same. No checkpoint of it takes the last good one's place."""
    run = late(tmp_path / "run", "--save", "4", *NAN, RESILIENT_KEEP_CHECKPOINTS="1")
    assert run.code == 0, run.explain()
    (told,) = [line for line in run.err.splitlines() if "holds NaN" in line and "rank" in line]
    assert "holds NaN in 12 of 16 tensors ('model.0.module.0.weight' for one) after update 16" in told
    assert "there was none after update 8. " in told
    assert {event["rank"] for event in run.of("holds_nan")} == {0, 1}
    assert "the state at the end holds NaN" in run.err
    assert run.err.count("written, with values that are not numbers: NaN in") == 1
    spoilt, sound = (
        [event["detail"]["step"] for event in run.of("saved") if bool(event["detail"].get("nan_tensors")) == nan]
        for nan in (True, False)
    )
    kept = {path.name for path in (run.run_dir / "checkpoints").iterdir()}
    assert kept == {f"step_{max(spoilt)}", f"step_{max(sound)}"}
    assert max(sound) <= AT < min(spoilt)


def test_for_nan_all_go_back(tmp_path: Path, plain: Run) -> None:
    """With the switch; no process has looked at a norm or a loss."""
    run = late(tmp_path / "run", "--save", "4", *NAN, "--once")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert "since step 8 can't be right: it holds NaN in 12 of 16 tensors" in again["detail"]["reason"]
    assert "the state at the end" not in run.err


@pytest.mark.long
def test_for_nan_at_the_end_all_go_back_to_the_newest_without(tmp_path: Path, plain: Run) -> None:
    """What ranks had looked at last is saved no more."""
    run = late(tmp_path / "run", "--save", "4", "--at", "24", "--factor", "nan", "--look", "1000", "--once")
    assert run.code == 0, run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert "since step 24 can't be right: it holds NaN in 12 of 16 tensors" in again["detail"]["reason"]
    assert {event["detail"]["commits"] for event in run.of("restored")} == {24}


@pytest.mark.long
def test_nan_that_the_script_makes_is_told_the_second_time(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--save", "4", *NAN)
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert "all have gone back for that already: it is written down, and training goes on" in run.err
    assert "the state at the end holds NaN" in run.err
