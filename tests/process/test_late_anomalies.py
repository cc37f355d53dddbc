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
