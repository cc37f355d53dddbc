"""A script finds out later that a step was wrong: all go back to what was saved before it."""

from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

STEPS = 30
ON = {"MS_ENABLE_TFT": "{TRE:1,ARF:1}"}


def late(run_dir: Path, *arguments: str, ranks: int = 2, **environ: str) -> Run:
    return launch(run_dir, "late.py", str(STEPS), *arguments, ranks=ranks, **(environ or ON))


@pytest.mark.parametrize("kept", [("--save", "4"), ("--save", "1000", "--memory", "4")], ids=["storage", "memory"])
def test_what_a_machine_has_made_wrong_is_trained_anew(
    tmp_path: Path, undisturbed_of: Undisturbed, kept: tuple[str, ...]
) -> None:
    look = "6" if kept[1] == "4" else "2"  # memory holds two snapshots
    plain = undisturbed_of("late.py", str(STEPS), *kept, ranks=2, **ON)
    run = late(tmp_path / "run", *kept, "--at", "13", "--once", "--look", look)
    assert run.code == 0, run.explain()
    assert {rank: digest for rank, (digest, _) in run.digests().items()} == {
        rank: digest for rank, (digest, _) in plain.digests().items()
    }
    assert len(run.of("restart_all")) == 1, run.explain()
    (again,) = run.of("restart_all")
    assert "since step 13 can't be right: the validation has become worse" in again["detail"]["reason"]
    (commits,) = {event["detail"]["commits"] for event in run.of("restored")}
    assert commits in (4, 8, 12), "what storage is too busy for is left out"
    assert next(event["detail"]["goes_back"] for event in run.of("late_anomaly"))
    aside = sorted(path.name for path in (run.run_dir / "checkpoints").glob("wrong_*"))
    assert bool(aside) == (kept[1] == "4")
    assert {int(name.removeprefix("wrong_step_")) for name in aside} <= {16, 20, 24, 28}
    assert run.err.count("All ranks start again") == 1


def test_memory_has_an_older_one_too(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Two steps before it would be overwritten."""
    kept = ("--save", "1000", "--memory", "4")
    plain = undisturbed_of("late.py", str(STEPS), *kept, ranks=2, **ON)
    run = late(tmp_path / "run", *kept, "--at", "13", "--once", "--look", "5", "--waits")
    assert run.code == 0, run.explain()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}
    assert [event["detail"]["goes_back"] for event in run.of("late_anomaly")] == [True], run.explain()
    assert {event["detail"]["commits"] for event in run.of("restored")} == {12}


def test_snapshots_by_the_switch(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """As MindSpore has them: in memory alone, and not with ``TRE:1``."""
    plain = undisturbed_of("late.py", str(STEPS), ranks=2, **ON)
    arguments = ("--at", "13", "--once", "--look", "5", "--memory", "4")
    run = late(tmp_path / "run", *arguments, "--waits", MS_ENABLE_TFT="{ARF:1,TRE:2,TRE_SNAPSHOT_STEPS:4}")
    assert run.code == 0, run.explain()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}
    restored = {(event["detail"]["source"], event["detail"]["commits"]) for event in run.of("restored")}
    assert restored == {("memory", 12)}
    assert not run.of("saved")
    run = late(tmp_path / "one", *arguments, MS_ENABLE_TFT="{ARF:1,TRE:1,TRE_SNAPSHOT_STEPS:4}")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")


def test_without_arf_too(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """As a MindSpore job's switch has it. Nobody is lost; who is, even then, ends the job."""
    plain = undisturbed_of("late.py", str(STEPS), "--save", "4", ranks=2, **ON)
    arguments = ("--save", "4", "--at", "13", "--once", "--look", "6")
    run = late(tmp_path / "run", *arguments, MS_ENABLE_TFT="{TRE:1}")
    assert run.code == 0, run.explain()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}
    assert [event["detail"]["goes_back"] for event in run.of("late_anomaly")] == [True], run.explain()
    killed = late(tmp_path / "killed", *arguments, "--killed", MS_ENABLE_TFT="{TRE:1}")
    assert killed.code == 137, killed.explain()
    assert "replacing lost ranks is switched off (MS_ENABLE_TFT has no ARF:1)" in killed.err


def test_what_a_script_does_for_good_at_some_step(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """A process that was behind that step can't be brought back before it; a new one can (decision 50)."""
    stage = ("--save", "4", "--stage", "16")
    plain = undisturbed_of("late.py", str(STEPS), *stage, ranks=2, **ON)
    faults = ("--faults", "kill rank=1 step=17 phase=COMPUTE at=forward")
    run = launch(
        tmp_path / "run",
        "late.py",
        str(STEPS),
        *stage,
        "--at",
        "13",
        "--once",
        "--look",
        "6",
        ranks=2,
        flags=faults,
        **ON,
    )
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == run.recoveries() == 1, run.explain()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}


def test_a_rank_that_dies_before_all_have_gone_back(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """What lies in memory from behind the wrong step is nobody's source then either."""
    plain = undisturbed_of("late.py", str(STEPS), "--save", "4", ranks=2, **ON)
    run = late(tmp_path / "run", "--save", "4", "--at", "13", "--once", "--look", "6", "--killed")
    assert run.code == 0, run.explain()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}
    assert {event["detail"]["commits"] for event in run.of("restored")} <= {4, 8, 12}
    assert len(run.of("restart_all")) == 2


def test_a_step_whose_states_are_gone(tmp_path: Path) -> None:
    """They were saved once, and overwritten."""
    run = late(tmp_path / "run", "--save", "1000", "--memory", "2", "--at", "5", "--look", "7")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    assert "nothing of before is saved: it is written down, and training goes on" in run.err


def test_what_comes_again_is_written_down(tmp_path: Path) -> None:
    plain = late(tmp_path / "plain", "--save", "4", "--at", "13", "--look", "1000")
    run = late(tmp_path / "run", "--save", "4", "--at", "13", "--look", "6")
    assert (plain.code, run.code) == (0, 0), run.explain()
    assert run.digests().keys() == plain.digests().keys()
    assert {digest for digest, _ in run.digests().values()} == {digest for digest, _ in plain.digests().values()}
    assert len(run.of("restart_all")) == 1
    assert "all have gone back for that already: it is written down, and training goes on" in run.err


def test_where_nothing_is_saved_training_goes_on(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "13", "--look", "2")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    assert "since step 13 can't be right: the validation has become worse; nothing of before is saved: it is" in run.err


def test_without_tre_it_has_no_effect(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--save", "4", "--at", "13", "--look", "2", MS_ENABLE_TFT="{ARF:1}")
    assert run.code == 0, run.explain()
    assert not run.of("late_anomaly")
    assert run.err.count("session.anomaly() has no effect: MS_ENABLE_TFT has no TRE:1") == 1


def test_a_step_that_has_not_begun(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "13", "--look", "-3")
    assert run.code == 1, run.explain()
    assert "UsageError: session.anomaly(13): the newest step that has begun is" in run.err


# -- a loss that is looked at behind the update

SAVES = ("--save", "1000", "--memory", "4")


def digests(run: Run) -> set[str]:
    return {digest for digest, _ in run.digests().values()}


def abnormal(run: Run) -> str:
    return (run.run_dir / "abnormal_loss.json").read_text()


@pytest.mark.parametrize("where", ["body", "between"])
def test_a_loss_behind_its_update(tmp_path: Path, where: str) -> None:
    plain = late(tmp_path / "plain", *SAVES, "--nan", where)
    run = late(tmp_path / "run", *SAVES, "--at", "13", "--once", "--nan", where)
    assert (plain.code, run.code) == (0, 0), run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert again["detail"]["reason"] == "the loss of step 13 is nan on rank 1, behind its update"
    assert {event["detail"]["commits"] for event in run.of("restored")} <= {8, 12}
    assert abnormal(run) == '{"13": [NaN]}\n'
    assert "neither a gradient norm nor a loss" not in run.err


def test_a_loss_behind_its_update_that_comes_again(tmp_path: Path) -> None:
    """In the same job, and in one that is started again in its directory."""
    plain = late(tmp_path / "plain", *SAVES, "--nan", "body")
    run = late(tmp_path / "run", *SAVES, "--at", "13", "--nan", "body")
    assert (plain.code, run.code) == (0, 0), run.explain()
    assert digests(run) == digests(plain)
    assert len(run.of("restart_all")) == 1
    told = "the loss of step 13 is nan on rank 1, behind its update; {}: it is written down, and training goes on"
    assert run.err.count(told.format("all have gone back for that already")) == 1, run.err
    assert abnormal(run) == '{"13": [NaN, NaN]}\n'
    later = late(tmp_path / "run", "--at", "13", "--nan", "body")
    assert later.code == 0, later.explain()
    assert later.err.count(told.format("the step has been run again for that already")) == 1, later.err
    assert not later.of("restart_all")
    assert abnormal(later) == '{"13": [NaN, NaN, NaN]}\n'


def test_a_loss_behind_its_update_where_nothing_is_saved(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "13", "--nan", "body")
    assert run.code == 0, run.explain()
    assert not run.of("restart_all")
    assert run.err.count("; nothing of before is saved: it is written down, and training goes on") == 1, run.err
    assert not (run.run_dir / "abnormal_loss.json").exists(), "a later run has not run it again"


def test_an_update_is_left_out_when_all_have_gone_back(tmp_path: Path) -> None:
    left_out = late(tmp_path / "left-out", *SAVES, "--leave-out", "13", "--nan", "body")
    run = late(tmp_path / "run", *SAVES, "--at", "13", "--nan", "body", "--on-anomaly", "skip")
    assert (left_out.code, run.code) == (0, 0), run.explain()
    assert digests(run) == digests(left_out)
    assert [event["step"] for event in run.of("update_left_out")] == [13, 13]
    assert len(run.of("late_anomaly")) == 1, "of an update that is left out there is nothing to go back for"


# -- MindSpore's way to ask for a step once more

RAISED = "rank 1 asks for step 13 once more (RuntimeError: TREError: the global norm is 46.1)"
TOLD_OWN = "this is the script's own error"


def test_an_error_that_asks_for_its_step_once_more(tmp_path: Path) -> None:
    plain = late(tmp_path / "plain")
    run = late(tmp_path / "run", "--at", "13", "--once", "--raises", "before")
    assert (plain.code, run.code) == (0, 0), run.explain()
    assert digests(run) == digests(plain)
    assert run.err.count(f"{RAISED}: all run the step again, its update was not applied") == 1, run.err
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE"]
    # A rank that had not come to the step yet, on a machine that is busy, has nothing to do again.
    assert max(event["detail"]["redone"] for event in run.of("session_end")) == 1
    assert not list(run.run_dir.glob("abnormal_*")), "there is no value"
    assert not run.of("restart_all")


def test_an_error_that_asks_twice_is_the_script_s(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--save", "4", "--at", "13", "--raises", "before")
    assert run.code == 1, run.explain()
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["TRE"]
    assert run.err.count(f"{RAISED}, and it has been run again already: {TOLD_OWN}") == 1, run.err
    assert "its state from after 13 updates is saved" in run.err
    assert not run.of("restart_all")


def test_without_tre_no_error_asks_for_anything(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "13", "--raises", "before", MS_ENABLE_TFT="{ARF:1}")
    assert run.code == 1, run.explain()
    assert not run.of("anomaly")
    assert "once more" not in run.err


@pytest.mark.parametrize("where", ["behind", "between"])
def test_an_error_that_asks_behind_the_update(tmp_path: Path, where: str) -> None:
    plain = late(tmp_path / "plain", *SAVES)
    run = late(tmp_path / "run", *SAVES, "--at", "13", "--once", "--raises", where)
    assert (plain.code, run.code) == (0, 0), run.explain()
    assert digests(run) == digests(plain)
    (again,) = run.of("restart_all")
    assert again["detail"]["reason"] == f"{RAISED}, behind its update"


def test_an_error_that_asks_behind_the_update_twice(tmp_path: Path) -> None:
    run = late(tmp_path / "run", *SAVES, "--at", "13", "--raises", "behind")
    assert run.code == 1, run.explain()
    assert len(run.of("restart_all")) == 1
    told = f"{RAISED}, behind its update; all have gone back for that already: {TOLD_OWN}"
    assert run.err.count(told) == 1, run.err


def test_an_error_that_asks_where_nothing_is_saved(tmp_path: Path) -> None:
    run = late(tmp_path / "run", "--at", "13", "--raises", "behind")
    assert run.code == 1, run.explain()
    assert run.err.count(f"{RAISED}, behind its update; nothing of before is saved: {TOLD_OWN}") == 1, run.err


def test_an_update_is_left_out_behind_an_error_that_asks(tmp_path: Path) -> None:
    """In front of the update or behind it: when the step comes again it has none."""
    left_out = late(tmp_path / "left-out", "--leave-out", "13")
    for where in ("before", "behind"):
        asks = (*SAVES, "--at", "13", "--once", "--raises", where, "--on-anomaly", "skip")
        run = late(tmp_path / where, *asks)
        assert (left_out.code, run.code) == (0, 0), run.explain()
        assert digests(run) == digests(left_out)
        assert [event["step"] for event in run.of("update_left_out")] == [13, 13]
