"""``sys.exit(0)`` in the loop: an end like any other if all ranks do it at one step, and else what it always was."""

from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

ALONE = "left with exit code 0 while the others were still training"


def some_of(*daily: str, long: tuple[str, ...]) -> list[object]:
    """Places in the step; those that differ little from their neighbours are not for every day."""
    return [*daily, *(pytest.param(each, marks=pytest.mark.long) for each in long)]


def leave(run_dir: Path, how: str, where: str, ranks: str = "01", **environ: str) -> Run:
    return launch(run_dir, "exits.py", how, where, ranks, ranks=2, **environ)


@pytest.mark.parametrize("where", ["body", "tail", "between"])
def test_all_ranks_exit_at_one_step(tmp_path: Path, undisturbed_of: Undisturbed, where: str) -> None:
    """As by a ``break``. It was exit code 1, and "rank 0 left"."""
    # Behind a body it is all the same, for what was trained, where the loop is left.
    reference = undisturbed_of("exits.py", "break", "body" if where == "body" else "tail", "01", ranks=2)
    run = leave(tmp_path / "run", "exit", where)
    assert run.code == 0, run.explain()
    assert [len(run.of(kind)) for kind in ("session_end", "finished", "fault", "leaving")] == [2, 1, 0, 0]
    assert run.digests() == reference.digests(), run.explain()


@pytest.mark.parametrize("where", some_of("barrier", "call", long=("last",)))
def test_all_ranks_exit_where_no_break_can(tmp_path: Path, where: str) -> None:
    run = leave(tmp_path / "run", "exit", where)
    assert run.code == 0, run.explain()
    commits = {"barrier": 4, "call": 5, "last": 8}[where]
    assert [event["detail"]["commits"] for event in run.of("session_end")] == [commits] * 2, run.explain()


def test_all_ranks_leave_the_generator_that_the_loop_is_in(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Who reads it breaks, and Python leaves the loop by GeneratorExit."""
    reference = undisturbed_of("exits.py", "break", "tail", "01", ranks=2)
    run = leave(tmp_path / "run", "handed", "between")
    assert run.code == 0, run.explain()
    assert [len(run.of(kind)) for kind in ("session_end", "finished", "fault", "leaving")] == [2, 1, 0, 0]
    assert run.digests() == reference.digests(), run.explain()


BREAKS = "left its loop after 5 updates while the others were still training"
FAILS = "failed: ValueError: of the script's"


@pytest.mark.parametrize(
    ("how", "words"),
    [("handed", BREAKS), *((how, FAILS) for how in ("handed fails", "handed on fails", "handed reraises"))],
)
def test_a_rank_that_leaves_such_a_generator_alone_ends_the_job(tmp_path: Path, how: str, words: str) -> None:
    """Of an error there Python says nothing in the generator: it must not wait for the others, who come to no end."""
    run = leave(tmp_path / "run", how, "between", "1")
    assert run.code == 1, run.explain()
    assert f"rank 1 {words}" in run.err, run.explain()
    assert "its state from after 5 updates is saved" in run.err, run.explain()


def test_one_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    run = leave(tmp_path / "run", "exit late", "tail")
    assert run.code == 0, run.explain()
    assert len(run.of("session_end")) == 2, run.explain()


@pytest.mark.parametrize("where", some_of("barrier", "between", "call", long=("body", "tail", "last")))
def test_a_rank_that_exits_alone_ends_the_job(tmp_path: Path, where: str) -> None:
    """At once, wherever the other waits for it: nobody is taken for hung. Its state is saved."""
    run = leave(tmp_path / "run", "exit", where, "1")
    assert run.code == 1, run.explain()
    assert f"rank 1 {ALONE}" in run.err, run.explain()
    assert [len(run.of(kind)) for kind in ("fault", "hung", "fenced", "session_end")] == [0] * 4, run.explain()
    assert "is saved: " in run.err, run.explain()


def test_a_rank_that_dies_where_others_have_left(tmp_path: Path) -> None:
    """It is replaced, and the new process hears that the loops are over. Nobody knows whether it would have left."""
    run = leave(tmp_path / "run", "dies", "tail")
    assert run.code == 1, run.explain()
    assert f"rank 0 {ALONE}" in run.err, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert "its state from after 5 updates is saved" in run.err, run.explain()


@pytest.mark.parametrize("where", some_of("body", "tail", long=("between",)))
def test_a_rank_that_breaks_alone_ends_the_job(tmp_path: Path, where: str) -> None:
    """The others were taken for hung, one after the other, and their new processes heard that the loops were over: exit
    code 0, after half of the steps.
    """
    run = leave(tmp_path / "run", "break", where, "1")
    assert run.code == 1, run.explain()
    commits = 4 if where == "body" else 5
    assert f"rank 1 left its loop after {commits} updates while the others were still training" in run.err
    assert [len(run.of(kind)) for kind in ("fault", "hung", "fenced", "session_end")] == [0] * 4, run.explain()
    assert f"its state from after {commits} updates is saved" in run.err, run.explain()


@pytest.mark.parametrize("where", some_of("body", long=("between",)))
def test_what_waits_unseen_for_a_rank_that_breaks_alone(tmp_path: Path, where: str) -> None:
    """No collective, no update: it is taken for hung in the end, and its new process would go home with exit code 0."""
    run = leave(tmp_path / "run", "break waits", where, "1", RESILIENT_HANG_TIMEOUT_S="5")
    assert run.code == 1, run.explain()
    commits = 4 if where == "body" else 5
    assert f"rank 1 left its loop after {commits} updates while the others were still training" in run.err
    assert "; rank 0 hung for " in run.err, run.explain()
    assert len(run.of("hung")) == 1, run.explain()
    assert [len(run.of(kind)) for kind in ("fault", "session_end")] == [0, 0], run.explain()
    assert f"its state from after {commits} updates is saved" in run.err, run.explain()


def test_a_rank_that_dies_where_all_break(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """What was trained is the same: its new process hears that the loops are over."""
    plain = undisturbed_of("exits.py", "break", "tail", "01", ranks=2)
    run = leave(tmp_path / "run", "break dies", "tail")
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert run.digests() == plain.digests(), run.explain()


def test_one_that_breaks_at_the_beginning_of_the_next_body(tmp_path: Path) -> None:
    """Both have made the same updates, and nobody waits for the other."""
    run = leave(tmp_path / "run", "apart", "between")
    assert run.code == 0, run.explain()
    assert [event["detail"]["commits"] for event in run.of("session_end")] == [5, 5], run.explain()


def test_ranks_that_ask_for_another_number_of_steps_do_not_begin(tmp_path: Path) -> None:
    """Uneven data: it was said by nobody, and in the end the ranks with more steps were taken for hung."""
    run = leave(tmp_path / "run", "uneven", "")
    assert run.code == 2, run.explain()
    assert "rank 0 is to make steps 0 to 7 and rank 1 steps 0 to 5: all ranks make the same steps" in run.err


def test_a_collective_of_the_last_tail_that_another_rank_does_not_call(tmp_path: Path) -> None:
    """It waited for ten minutes, and then the job ended with exit code 0."""
    run = leave(tmp_path / "run", "more", "")
    assert run.code == 1, run.explain()
    assert "rank 1 has made all its steps, 8 updates, and another one goes on" in run.err, run.explain()
    assert [len(run.of(kind)) for kind in ("fault", "hung", "fenced", "session_end")] == [0] * 4, run.explain()
    assert "its state from after 8 updates is saved" in run.err, run.explain()
