"""kill -9 at every phase of a step, every rank in turn, at 2, 3 and 4 ranks: the run ends as if nothing had happened.

One run takes many kills, because a start of four interpreters costs more than a recovery; each kill is a case of its
own in the events.
"""

import itertools
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from saved_jobs import kill_together

PLACES = (
    "phase=COMPUTE at=start",
    "phase=COMPUTE at=forward",
    "phase=COMPUTE at=backward",
    "phase=READY at=before",
    "phase=READY at=barrier",
    "phase=UPDATING at=start",
    "phase=UPDATING at=end",
    "phase=APPLIED at=start",
    "phase=APPLIED at=end",
    "phase=BETWEEN",
)


EVERY_DAY = ((2, 0), (3, 2))
WORLDS = [
    pytest.param(ranks, first, marks=() if (ranks, first) in EVERY_DAY else pytest.mark.long)
    for ranks in (2, 3, 4)
    for first in range(ranks)
]
"""Every place with every rank."""


def kills(ranks: int, places: tuple[str, ...], first_rank: int, start: int = 2, every: int = 2) -> tuple[str, int]:
    """A plan that hits one place after the other, going round the ranks, and the number of steps that it needs."""
    incarnation = dict.fromkeys(range(ranks), 0)
    clauses = []
    step = start
    for place, rank in zip(places, itertools.cycle(range(ranks)), strict=False):
        hit = (rank + first_rank) % ranks
        clauses.append(f"kill rank={hit} step={step} {place} incarnation={incarnation[hit]}")
        incarnation[hit] += 1
        step += every
    return "; ".join(clauses), step + 1


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "first_rank"), WORLDS)
@pytest.mark.shows("DDP", "killed", "in place")
def test_kill_at_every_phase(tmp_path: Path, undisturbed: Reference, ranks: int, first_rank: int) -> None:
    plan, steps = kills(ranks, PLACES, first_rank)
    reference = undisturbed(ranks=ranks, steps=steps)
    run = launch(tmp_path / "run", "train.py", "--steps", str(steps), ranks=ranks, flags=("--faults", plan))
    assert len(run.of("injected")) == len(PLACES), run.explain()
    assert {each["detail"]["start"] for each in run.of("spawned")[ranks:]} == {"forked"}
    assert_identical(run, reference, ranks=ranks, recoveries=len(PLACES))


def test_kill_while_a_batch_is_loaded(tmp_path: Path, undisturbed: Reference) -> None:
    """In the middle of it: the loader's order was drawn, and the random numbers of some samples."""
    run = launch(tmp_path / "run", "train.py", "--steps", "9", "--variant", "unread", ranks=3)
    assert [event["rank"] for event in run.of("death_seen")] == [1], run.explain()
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=1)


def test_kill_in_the_first_and_second_step(tmp_path: Path, undisturbed: Reference) -> None:
    """DDP lays its buckets out anew between these two: the replacement must end with the same layout."""
    plan = (
        "kill rank=1 step=0 phase=COMPUTE at=backward; kill rank=2 step=0 phase=UPDATING; "
        "kill rank=0 step=1 phase=COMPUTE at=forward; kill rank=1 step=1 phase=COMPUTE at=backward incarnation=1"
    )
    run = launch(tmp_path / "run", "train.py", "--steps", "6", ranks=3, flags=("--faults", plan))
    assert len(run.of("injected")) == 4, run.explain()
    # The first two may fall together, or the second into the recovery from the first.
    assert_identical(run, undisturbed(ranks=3, steps=6), ranks=3, recoveries=run.recoveries())


def test_kill_during_a_recovery(tmp_path: Path, undisturbed: Reference) -> None:
    """The replacement dies; then a survivor dies while it takes part; then a source dies with its copy under way."""
    plan = (
        "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=1 phase=REBUILD at=end incarnation=1; "
        "kill rank=1 phase=RESTORE at=start incarnation=2; "
        "kill rank=2 step=5 phase=UPDATING; kill rank=0 phase=STOP generation=4; "
        "kill rank=3 step=8 phase=READY; kill rank=3 phase=RESTORE at=end incarnation=1"
    )
    run = launch(tmp_path / "run", "train.py", "--steps", "12", ranks=4, flags=("--faults", plan))
    assert len(run.of("injected")) == 7, run.explain()
    superseded = len(run.of("fault")) - run.recoveries()
    assert superseded >= 3, "the later kills were to hit in the middle of a recovery"
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=4, steps=12).digests(), run.explain()


@pytest.mark.parametrize("variant", [pytest.param("base", marks=pytest.mark.long), "accumulate"])
def test_kill_in_a_redone_step(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    """A survivor that redoes a step dies in it: its replacement must be given the same batch, not the next one."""
    plan = (
        "kill rank=1 step=5 phase=COMPUTE at=backward; "
        "kill rank=0 step=5 phase=READY at=before generation=1; "
        "kill rank=2 step=5 phase=READY at=before generation=2"
    )
    arguments = ("train.py", "--steps", "9", "--variant", variant)
    run = launch(tmp_path / "run", *arguments, ranks=3, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=3, steps=9, variant=variant), ranks=3, recoveries=3)


def test_kill_after_a_break(tmp_path: Path, undisturbed: Reference) -> None:
    """All ranks leave their loops early, and one is lost before it has told: the new one must not train on alone."""
    extra = ("--leave-at", "5")
    arguments = ("train.py", "--steps", "20", *extra)
    run = launch(tmp_path / "run", *arguments, ranks=2, flags=("--faults", "kill rank=1 step=6 phase=BETWEEN"))
    assert_identical(run, undisturbed(ranks=2, steps=20, extra=extra), ranks=2, recoveries=1)


def test_state_over_the_process_group(tmp_path: Path, undisturbed: Reference) -> None:
    """Where one process may not read another's memory, the bytes come over the rebuilt group."""
    plan = "kill rank=0 step=3 phase=COMPUTE at=forward"
    run = launch(
        tmp_path / "run", "train.py", "--steps", "6", ranks=3, flags=("--faults", plan), RESILIENT_TRANSFER="group"
    )
    assert [event["detail"]["way"] for event in run.of("fetched")] == ["group"]
    assert_identical(run, undisturbed(ranks=3, steps=6), ranks=3, recoveries=1)


class Outside:
    """Kills ranks of a running job from outside, several in one go. The job goes slowly until ``enough`` lies there."""

    def __init__(self, process: subprocess.Popen[str], run_dir: Path) -> None:
        self._process = process
        self._run_dir = run_dir
        self._enough = run_dir / "enough"

    @staticmethod
    def command(run_dir: Path, ranks: int, steps: int) -> list[str]:
        flags = ["--nproc-per-node", str(ranks), "--run-dir", str(run_dir)]
        return [*LAUNCHER, *flags, str(JOBS / "train.py"), "--steps", str(steps), "--pace", str(run_dir / "enough")]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self._run_dir, torn=True) if event["kind"] == kind]

    def committed(self) -> int:
        """So many steps has rank 0 recorded."""
        progress = self._run_dir / "samples_rank0.jsonl"
        return progress.read_bytes().count(b"\n") if progress.exists() else 0

    def kill(self, victims: tuple[int, ...], after: int) -> None:
        """When rank 0 has committed so many steps more. The agent sees them all at once."""
        before = self.committed()
        self._wait_until(lambda: self.committed() >= before + after)
        pids = {event["rank"]: event["detail"]["pid"] for event in self.events("spawned")}
        kill_together(self._process, [pids[rank] for rank in victims])

    def await_recovery(self, faults: int) -> None:
        self._wait_until(lambda: len(self.events("fault")) == faults and self.events("resumed"))

    def _wait_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "the job made no progress"
            assert self._process.poll() is None, self._process.communicate()
            time.sleep(0.005)

    def end(self) -> Run:
        self._enough.touch()
        out, err = self._process.communicate(timeout=100)
        return Run(self._run_dir, self._process.returncode, out, err, read_events(self._run_dir, torn=True))


def test_several_at_once(tmp_path: Path, undisturbed: Reference) -> None:
    """Three of four, of which one lives on; when all have gone on, two."""
    run_dir, steps = tmp_path / "run", 40
    with start(Outside.command(run_dir, ranks=4, steps=steps)) as process:
        outside = Outside(process, run_dir)
        outside.kill((0, 1, 3), after=3)
        outside.await_recovery(faults=3)
        outside.kill((1, 2), after=2)
        run = outside.end()
    assert run.code == 0, run.explain()
    assert len(run.of("fault")) == 3 + 2, run.explain()
    assert run.digests() == undisturbed(ranks=4, steps=steps).digests(), run.explain()


def test_all_at_once_is_a_clear_end(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with start(Outside.command(run_dir, ranks=3, steps=60)) as process:
        outside = Outside(process, run_dir)
        outside.kill((0, 1, 2), after=4)
        run = outside.end()
    assert run.code == 75, run.explain()
    assert "no living rank holds a replica" in run.err
    assert run.of("job_end")[0]["detail"]["code"] == 75
