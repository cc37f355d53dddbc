"""``work.wait(timeout)`` whose time runs out: seen as gloo shows it, and no update is made on what has not come."""

from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

TOLD = {"reduce": "told: Operation timed out!", "message": "for recv operation to complete"}


def run_late(run_dir: Path, verb: str, how: str) -> Run:
    return launch(run_dir, "late_waits.py", verb, how, "3", ranks=2)


def in_time(undisturbed_of: Undisturbed, verb: str, how: str = "polls") -> Run:
    """The job in which nobody is late. A rank that polls takes no harm from a machine that is; the numbers are the
    same.
    """
    return undisturbed_of("late_waits.py", verb, how, "-1", ranks=2)


def test_who_waits_again_gets_the_result(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """As with gloo's own: no step runs again for it."""
    run = run_late(tmp_path / "run", "reduce", "polls")
    assert run.code == 0, run.explain()
    assert TOLD["reduce"] in run.out
    assert run.recoveries() == 0, run.explain()
    assert run.digests() == in_time(undisturbed_of, "reduce").digests(), run.explain()


def test_who_waits_again_for_a_rank_that_dies_is_cut(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    run = run_late(tmp_path / "run", "reduce", "dies")
    assert run.code == 0, run.explain()
    assert TOLD["reduce"] in run.out
    assert run.recoveries() == 1, run.explain()
    assert run.digests() == in_time(undisturbed_of, "reduce").digests(), run.explain()


@pytest.mark.parametrize("how", ["raises", "goes on"])
@pytest.mark.parametrize("verb", ["reduce", "message"])
def test_the_step_runs_again(tmp_path: Path, undisturbed_of: Undisturbed, verb: str, how: str) -> None:
    """Also where the script swallows it: it would go on with what it had put in itself."""
    run = run_late(tmp_path / "run", verb, how)
    assert run.code == 0, run.explain()
    assert (TOLD[verb] in run.out) == (how == "goes on"), run.explain()
    assert run.recoveries() == 1, run.explain()
    assert [each["detail"]["strategy"] for each in run.of("fault")] == ["HCCE"], run.explain()
    assert run.digests() == in_time(undisturbed_of, verb).digests(), run.explain()


def test_a_rank_that_is_always_late_ends_the_job(tmp_path: Path) -> None:
    run = run_late(tmp_path / "run", "reduce", "always late")
    assert run.code == 75, run.explain()
    assert "collectives keep failing: rank 0: " in run.err, run.explain()


def test_a_message_of_a_tail_is_brought_by_a_recovery(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    run = run_late(tmp_path / "run", "message", "in the tail")
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert run.out.count("given: [2.0, 2.0, 2.0]") == 6, run.explain()
    assert run.digests() == in_time(undisturbed_of, "message", "in the tail").digests(), run.explain()
