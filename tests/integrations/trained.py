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

IN_WINDOWS = (
    "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=0 step=5 phase=UPDATING; "
    "hcce rank=1 step=7 incarnation=1; kill rank=1 step=8 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=10 phase=READY at=barrier incarnation=1"
)
"""Of 12 steps, each a window of three batches or, at an epoch's end, of one; four to an epoch."""


WRONGLY = (
    "flip rank=1 step=4 target=gradient index=3 mask=0x400000; norm rank=0 step=8 value=nan; "
    "kill rank=1 step=9 phase=COMPUTE at=backward incarnation=1"
)
"""A device that computes wrongly, and is found; a value that can't be right; and a kill. The first and the last come in
an update that is computed twice, if every fifth one is, or every second where three steps are an update.
"""


def train(
    run_dir: Path,
    script: str,
    *arguments: str,
    plan: str = "",
    code: int = 0,
    flags: tuple[str, ...] = (),
    **environ: str,
) -> Run:
    """Two ranks. New processes import for long, which is not what is tested."""
    faults = ("--faults", plan) if plan else ()
    run = launch(run_dir, JOBS / script, *arguments, ranks=2, flags=(*flags, *faults), timeout_s=500, **environ)
    assert run.code == code, run.explain()
    return run


def assert_repaired(folder: Path, script: str, *arguments: str, plan: str) -> None:
    """Both ranks come to the parameters, optimizer states, buffers and random numbers of the undisturbed run."""
    quiet = train(folder / "quiet", script, *arguments)
    run = train(folder / "run", script, *arguments, plan=plan)
    assert len(run.of("injected")) == run.recoveries() == plan.count("rank="), run.explain()
    assert_same(run, quiet)
    assert "keeps trainer." not in run.err, "nobody is to register what the trainer's own code counts"


def assert_mended(folder: Path, script: str, *arguments: str, every: int = 5) -> None:
    """Bodies that the library's own loop calls are computed twice."""
    quiet = train(folder / "quiet", script, *arguments)
    looks = {"MS_ENABLE_TFT": "{TTP:1,UCE:1,HCCE:1,ARF:1,TRE:1}", "RESILIENT_VERIFY_EVERY": str(every)}
    run = train(folder / "run", script, *arguments, plan=WRONGLY, **looks)
    assert [each["rank"] for each in run.of("injected")] == [1, 0, 1], run.explain()
    assert [each["detail"]["ranks"] for each in run.of("deviates")] == [[1]], run.explain()
    assert [each["step"] for each in run.of("redone")] == [8], run.explain()
    assert_same(run, quiet)


def assert_started_again(folder: Path, script: str) -> None:
    """All ranks are lost, and begin in the middle of an epoch, where the newest checkpoint is."""
    quiet = train(folder / "quiet", script, "--save", "4")
    run = train(folder / "run", script, "--save", "4", plan="kill rank=0 step=17; kill rank=1 step=17")
    assert len(run.of("injected")) == 2
    assert_same(run, quiet)


def assert_resumed(folder: Path, script: str) -> None:
    """A job that ended is started again in its run directory, by another launcher, from its newest checkpoint."""
    quiet = train(folder / "quiet", script, "--save", "4")
    lost = "kill rank=0 step=17; kill rank=1 step=17"
    train(folder / "run", script, "--save", "4", plan=lost, flags=("--max-restarts", "0"), code=75)
    run = train(folder / "run", script, "--save", "4")
    assert run.of("started")[-1]["detail"]["step"] > 0, run.explain()
    assert_same(run, quiet)


def assert_same(run: Run, quiet: Run) -> None:
    """The same bits, of the same data."""
    assert run.of("other_data") == [], run.explain()
    assert run.digests() == quiet.digests(), run.explain()
    assert ends(run) == ends(quiet)


def ends(run: Run) -> list[str]:
    """What the ranks say at their ends."""
    found = sorted(line for line in run.out.splitlines() if " ends: " in line)
    assert len(found) == 2, run.explain()
    return found
