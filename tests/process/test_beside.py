"""What is not registered is not brought back: where the result depends on it, nothing goes on without a word."""

from pathlib import Path

import pytest
from running import Run, launch
from shared import Undisturbed

SCRIPT = "beside.py"
KILL = "kill rank=1 step=6 phase=COMPUTE at=backward"
CHANGED = "parameter 'held.0.weight' of Beside, which is not registered, has changed in training"


def run_of(run_dir: Path, *arguments: str, plan: str = KILL) -> Run:
    return launch(run_dir, SCRIPT, *arguments, ranks=2, flags=("--faults", plan))


def why(run: Run) -> str:
    """The words with which the job ended."""
    return next(line for line in run.err.splitlines() if "resilient-run: the job ends" in line)


SCHEDULED = "scheduler CosineAnnealingLR, which is not registered, has changed in training"


@pytest.mark.parametrize("what", ["average", "written", "scheduled", "average --called", "scheduled --called"])
def test_one_that_changes_is_told_and_a_lost_rank_ends_the_job(tmp_path: Path, what: str) -> None:
    """The state is saved. Who starts the job again is told that the average begins anew."""
    changed = SCHEDULED if "scheduled" in what else CHANGED
    run = run_of(tmp_path / "run", *what.split())
    assert run.code == 2, run.explain()
    assert {each["rank"] for each in run.of("unregistered")} == {0, 1}, run.explain()
    assert run.err.count(f"{changed} on rank") == 1
    assert f"rank 1 can't be replaced, since {changed}, and a new process has it as it was" in why(run)
    assert "its state from after 6 updates is saved" in why(run)
    again = run_of(tmp_path / "run", *what.split(), plan="")
    assert again.code == 0, again.explain()
    assert again.err.count(f"where the state was saved, {changed}; here it begins anew") == 1


def test_one_that_one_rank_has_is_lost_with_that_rank_only(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """And nobody else could tell that it had changed."""
    arguments = ("average", "--on-rank", "0")
    reference = undisturbed_of(SCRIPT, *arguments, ranks=2)
    run = run_of(tmp_path / "other", *arguments)
    assert run.code == 0, run.explain()
    assert run.digests() == reference.digests(), run.explain()
    run = run_of(tmp_path / "run", *arguments, plan=KILL.replace("rank=1", "rank=0"))
    assert run.code == 2, run.explain()
    assert f"rank 0 can't be replaced, since {CHANGED}" in why(run)


@pytest.mark.parametrize("what", ["average", "scheduled"])
def test_all_ranks_are_not_started_again_without_it(tmp_path: Path, what: str) -> None:
    """Nobody is left that could tell; the saved state does."""
    changed = SCHEDULED if what == "scheduled" else CHANGED
    both = "; ".join(f"kill rank={rank} step=8 phase=COMPUTE at=start" for rank in (0, 1))
    run = run_of(tmp_path / "run", what, "--save", "2", plan=both)
    assert run.code == 2, run.explain()
    told = why(run)
    assert f"all ranks have been started again, and {changed}" in told or f"since {changed}" in told, run.explain()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("average", "--registered", "model"), marks=pytest.mark.long),
        ("average", "--registered", "state"),
        ("taught",),
        ("taught", "--seeds"),  # a copy of what the rank was handed, which is small: it is given again
        pytest.param(("taught", "--seeds", "--registered", "model"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_one_that_is_registered_or_always_the_same_is_no_matter(
    tmp_path: Path, undisturbed_of: Undisturbed, arguments: tuple[str, ...]
) -> None:
    reference = undisturbed_of(SCRIPT, *arguments, ranks=2)
    run = run_of(tmp_path / "run", *arguments)
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1
    assert run.digests() == reference.digests(), run.explain()
    assert run.of("unregistered") == []


def test_one_that_is_another_in_a_new_process_keeps_it_out(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "drawn")
    assert run.code == 2, run.explain()
    assert "rank 1 can't be replaced, since parameter 'held.0.bias' of Beside, which is not registered, has " in why(
        run
    )
    assert "other values than in the process whose place it takes" in why(run)
    assert "its state from after 6 updates is saved" in why(run)
    assert run.of("unregistered") == []
