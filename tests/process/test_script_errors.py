"""A script that fails by itself, on all ranks alike or on one: the job ends with its error, and loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import Reference, Run, launch, start
from saved_jobs import RANKS, STEPS, command
from test_leaving import ended, last
from watched_jobs import end_holder

from resilient_train.state.checkpoint.verify import newest_complete

LINES = (Path(__file__).parent / "jobs/failing.py").read_text().splitlines()
STEP = 5


def fail(run_dir: Path, place: str, *more: str, ranks: int = RANKS, variant: str = "base", **environ: str) -> Run:
    arguments = ("--steps", str(STEPS), "--variant", variant, "--fail", place, *more)
    return launch(run_dir, "failing.py", *arguments, ranks=ranks, **environ)


def goes_on(run_dir: Path, variant: str = "base") -> Run:
    end_holder(run_dir)
    with start(command(run_dir, "--variant", variant)) as process:
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()
    return run


@pytest.mark.parametrize(
    ("place", "variant", "updates"),
    [
        pytest.param("loader", "base", 5, marks=pytest.mark.long),
        ("body", "accumulate+two", 2),
        pytest.param("update", "undo", 5, marks=pytest.mark.long),
        pytest.param("end", "undo", 5, marks=pytest.mark.long),
        *(
            pytest.param("body", variant, updates, marks=pytest.mark.long)
            for variant, updates in (("base", 5), ("accumulate", 2), ("two", 5))
        ),
    ],
)
def test_all_fail_alike_and_nothing_is_lost(
    run_dir: Path, undisturbed: Reference, place: str, variant: str, updates: int
) -> None:
    run = fail(run_dir, place, variant=variant)
    assert run.code == 1, run.explain()
    assert 1 <= run.err.count("Traceback") <= RANKS, "each rank's own, once; a stop may come before a rank has failed"
    (leaving,) = run.of("leaving")
    assert "failed: " in leaving["detail"]["reason"], run.explain()
    (choice,) = run.of("save_last")
    assert (choice["detail"]["commits"], choice["detail"]["exact"]) == (updates, True), run.explain()
    assert str(last(run_dir)) in run.err
    going_on = goes_on(run_dir, variant)
    assert going_on.digests() == undisturbed(ranks=RANKS, steps=STEPS, variant=variant).digests(), going_on.explain()


def test_the_first_that_fails_is_named_with_its_line(run_dir: Path) -> None:
    run = fail(run_dir, "body", "--only", "1")
    line = 1 + next(n for n, text in enumerate(LINES) if "raise ValueError" in text and "self.fails" in LINES[n - 1])
    log = run_dir / "logs/rank_1/0.err"
    assert f"rank 1 failed: ValueError: the script's own (failing.py:{line}); its traceback: {log}" in run.err
    assert run.err.count("Traceback") == 1, "only the culprit speaks"
    assert run.code == 1
    (choice,) = run.of("save_last")
    (savers,) = choice["detail"]["savers"]  # others may still be in the tail of the step before
    assert 1 in savers, "its state is as whole as the others'"


@pytest.mark.parametrize(
    ("place", "more"),
    [("tail", ()), ("between", ("--unusual",)), pytest.param("between", (), marks=pytest.mark.long)],
)
def test_all_fail_behind_the_update(run_dir: Path, place: str, more: tuple[str, ...]) -> None:
    """Nobody knows how much of the tail was still to come: the update is kept, and that is told. So it is for what is
    no Exception, as what torch's checkpoints raise.
    """
    run = fail(run_dir, place, *more)
    assert run.code == 1, run.explain()
    (choice,) = run.of("save_last")
    assert (choice["detail"]["commits"], choice["detail"]["exact"]) == (STEP + 1, False)
    assert "what stands behind the update" in run.err, run.explain()
    assert len(run.of("tail_failed")) == 1
    last(run_dir)
    assert goes_on(run_dir).of("restored")[0]["detail"]["commits"] == STEP + 1


def test_one_fails_behind_the_update_and_the_others_have_its_end(run_dir: Path, undisturbed: Reference) -> None:
    run = fail(run_dir, "between", "--only", "2")
    (choice,) = run.of("save_last")
    assert choice["detail"]["exact"], run.explain()
    assert goes_on(run_dir).digests() == undisturbed(ranks=RANKS, steps=STEPS).digests()


def test_all_exit_with_a_code(run_dir: Path, undisturbed: Reference) -> None:
    run = fail(run_dir, "exit")
    assert run.code == 3, run.explain()
    assert "failed with exit code 3; its log: " in run.err
    last(run_dir)
    assert goes_on(run_dir).digests() == undisturbed(ranks=RANKS, steps=STEPS).digests()


def test_the_only_rank_fails(run_dir: Path) -> None:
    run = fail(run_dir, "body", ranks=1)
    assert run.code == 1, run.explain()
    last(run_dir)


def test_an_optimizer_that_fails_on_all_ranks_leaves_nothing_whole(run_dir: Path) -> None:
    run = fail(run_dir, "update", ranks=2)
    assert run.code == 1, run.explain()
    assert "no living rank holds a whole state" in run.err, run.explain()
    assert newest_complete(run_dir / "checkpoints").report is None


def test_without_ttp_the_error_just_ends_the_job(run_dir: Path) -> None:
    run = fail(run_dir, "body", ranks=1, MS_ENABLE_TFT="{HCCE:1}")
    assert run.code == 1, run.explain()
    assert "ValueError: the script's own" in run.err
    assert run.of("leaving") == []
    assert newest_complete(run_dir / "checkpoints").report is None


def test_an_error_that_is_caught_around_the_session_ends_the_job_all_the_same(run_dir: Path) -> None:
    """What stands behind runs to its end; but the loop was not over, and nobody is to think that it was.

    On whom the error has reached: the stop may come to others before.
    """
    run = fail(run_dir, "caught", ranks=2)
    assert run.code == 1, run.explain()
    assert "failed: ValueError: the script's own" in run.err
    (leaving,) = run.of("leaving")
    assert (run_dir / f"behind_rank{leaving['rank']}.txt").exists(), run.explain()
    last(run_dir)
