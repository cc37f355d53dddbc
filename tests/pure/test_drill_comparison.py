"""The first difference between two runs, found in the digests that their ranks wrote."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from resilient_train.faults import parse_plan
from resilient_train.session.drill_records import DrillRecord, Names, path_of
from resilient_train.testing.drill import explain
from resilient_train.testing.drill_comparison import Difference, DrillComparison

RANKS = 2
NAMES = ["model", "model.0.weight", "generator.python", "batch.0"]
Changes = dict[tuple[int, int, int], list[list[str]]]
"""(rank, incarnation, update): what is written instead of the undisturbed digests; more than one: it ran again."""


def write(run_dir: Path, changes: Changes, *, updates: int = 5) -> Path:
    """A run of two ranks."""
    for rank in range(RANKS):
        processes = {0, *(incarnation for which, incarnation, _ in changes if which == rank)}
        for incarnation in processes:
            own = [update for which, number, update in changes if (which, number) == (rank, incarnation)]
            first = min(own) if incarnation else 0
            last = min((u for w, i, u in changes if w == rank and i > incarnation), default=updates + 1)
            lines = [msgspec.json.encode(Names(NAMES))]
            for update in range(first, max(last, first + 1)):
                written = changes.get((rank, incarnation, update), [usual(rank, update)])
                lines += [msgspec.json.encode(DrillRecord(2 * update, digests)) for digests in written]
            path = path_of(run_dir, rank, incarnation)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"\n".join(lines) + b'\n{"type":"rec')
    return run_dir


def usual(rank: int, update: int) -> list[str]:
    return ["m", f"w{update}", f"p{rank}", f"b{rank}{update}"]


@pytest.fixture
def comparison(tmp_path: Path) -> DrillComparison:
    return DrillComparison(write(tmp_path / "undisturbed", {}), RANKS)


def weight(rank: int, update: int) -> list[str]:
    return ["m", "another", *usual(rank, update)[2:]]


def python(rank: int, update: int) -> list[str]:
    return [*usual(rank, update)[:2], "another", f"b{rank}{update}"]


def batch(rank: int, update: int) -> list[str]:
    return [*usual(rank, update)[:3], "another"]


def test_the_same_run_has_none(tmp_path: Path, comparison: DrillComparison) -> None:
    again = write(tmp_path / "run", {(1, 1, 3): [usual(1, 3)], (0, 0, 3): [usual(0, 3)] * 2})
    assert comparison.first_difference(again) is None
    assert comparison.missing(again) == []


def test_the_step_that_ended_otherwise_is_named(tmp_path: Path, comparison: DrillComparison) -> None:
    """Update 3 was trained in the step that began after two: all was well when it began."""
    run = write(tmp_path / "run", {(0, 0, 3): [weight(0, 3)], (1, 1, 2): [usual(1, 2)], (1, 1, 3): [weight(1, 3)]})
    found = comparison.first_difference(run)
    assert found == Difference(rank=0, step=4, pieces=("model.0.weight",), began=False)
    told = explain(found, parse_plan("kill rank=1 step=4; kill rank=0 step=8"))
    assert told.startswith("step 4 is the first that differs: it began as undisturbed, and ended with another model.0.")
    assert "of rank 0 (the last fault before: kill rank=1 step=4" in told


def test_a_step_that_began_otherwise(tmp_path: Path, comparison: DrillComparison) -> None:
    run = write(tmp_path / "run", {(1, 1, 2): [batch(1, 2)], (0, 0, 3): [weight(0, 3)]})
    found = comparison.first_difference(run)
    assert found == Difference(rank=1, step=4, pieces=("batch.0",), began=True)
    told = explain(found, parse_plan("kill rank=1 step=4"))
    assert told.startswith("step 4 is the first that differs: it began with another batch.0 of rank 1")


def test_a_step_that_began_otherwise_when_it_ran_again(tmp_path: Path, comparison: DrillComparison) -> None:
    run = write(tmp_path / "run", {(0, 0, 2): [usual(0, 2), batch(0, 2)]})
    found = comparison.first_difference(run)
    assert found == Difference(rank=0, step=4, pieces=("batch.0",), began=True, again=True)
    told = explain(found, parse_plan("hcce rank=0 step=4"))
    assert "step 4 did not begin again as it had begun: batch.0 of rank 0" in told


def test_what_a_new_process_makes_in_its_first_step_is_no_difference(
    tmp_path: Path, comparison: DrillComparison
) -> None:
    """Its predecessor had made it behind the update, ahead of that step: the same, from the same random numbers."""
    once = {(1, 1, 2): [python(1, 2), python(1, 2)], (1, 1, 3): [usual(1, 3)]}
    assert comparison.first_difference(write(tmp_path / "once", once)) is None
    twice = {(1, 1, 2): [python(1, 2)], (1, 2, 3): [python(1, 3)], (1, 2, 4): [usual(1, 4)]}
    assert comparison.first_difference(write(tmp_path / "twice", twice)) is None
    lasting = {(1, 1, 2): [python(1, 2)], (1, 1, 3): [python(1, 3)]}
    found = comparison.first_difference(write(tmp_path / "lasting", lasting))
    assert found == Difference(rank=1, step=4, pieces=("generator.python",), began=True)


def test_what_differs_before_the_first_fault_is_not_compared(tmp_path: Path, comparison: DrillComparison) -> None:
    run = write(tmp_path / "run", {(0, 0, update): [python(0, update)] for update in range(6)})
    assert comparison.first_difference(run) == Difference(0, 0, ("generator.python",), began=True)
    comparison.leave_out(run, before_step=4)
    assert [list(names) for names in comparison.left_out] == [["generator.python"], []]
    assert comparison.undetermined() is None
    assert comparison.first_difference(run) is None


def test_a_script_that_trains_otherwise_each_time(tmp_path: Path, comparison: DrillComparison) -> None:
    late = write(tmp_path / "run", {(1, 0, 4): [weight(1, 4)]})
    comparison.leave_out(late, before_step=8)
    assert comparison.undetermined() is None
    comparison.leave_out(late)
    assert comparison.undetermined() == (1, "model.0.weight")


def test_a_rank_that_did_not_come_to_the_end(tmp_path: Path, comparison: DrillComparison) -> None:
    assert comparison.missing(write(tmp_path / "run", {}, updates=4)) == [0, 1]
    assert DrillComparison(tmp_path / "nothing", RANKS).missing(tmp_path / "run") == [0, 1]


def test_names_that_come_and_go(tmp_path: Path, comparison: DrillComparison) -> None:
    run = write(tmp_path / "run", {})
    path = path_of(run, 0, 0)
    path.write_bytes(path.read_bytes().replace(b'"batch.0"', b'"batch.1"'))
    found = comparison.first_difference(run)
    assert found is not None
    assert found.pieces == ("batch.0", "batch.1")
