"""Runs a job of ``jobs/`` and says what came of it."""

from pathlib import Path

from running import Run, launch

JOBS = Path(__file__).parent / "jobs"

EVERYWHERE = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=7 phase=UPDATING; "
    "hcce rank=1 step=12 incarnation=1; kill rank=1 step=19 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=24 phase=READY at=barrier incarnation=1"
)
"""Of 30 steps in three epochs; step 19 is the last of an epoch."""


def train(run_dir: Path, script: str, *arguments: str, plan: str = "") -> Run:
    """Two ranks. New processes import for long, which is not what is tested."""
    flags = ("--faults", plan) if plan else ()
    run = launch(run_dir, JOBS / script, *arguments, ranks=2, flags=flags, timeout_s=500)
    assert run.code == 0, run.explain()
    return run


def assert_recovered(run: Run, quiet: Run, *, faults: int, words: str) -> None:
    """Both ranks have come to the same parameters, optimizer states, buffers and random numbers, and say so."""
    assert len(run.of("injected")) == run.recoveries() == faults, run.explain()
    assert run.of("other_data") == [], run.explain()
    assert run.digests() == quiet.digests(), run.explain()
    assert ends(run, words) == ends(quiet, words)


def ends(run: Run, words: str) -> list[str]:
    """What the ranks say at their ends."""
    found = sorted(line for line in run.out.splitlines() if words in line)
    assert len(found) == 2, run.explain()
    return found
