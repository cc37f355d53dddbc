"""kill -9 at every phase of a step, every rank in turn, at 2, 3 and 4 ranks: the run ends as if nothing had happened.

One run takes many kills, because a start of four interpreters costs more than a recovery; each kill is a case of its
own in the events.
"""

import itertools
import os
import signal
import time
from pathlib import Path

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start

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


WORLDS = [(ranks, first) for ranks in (2, 3, 4) for first in range(ranks)]
"""Every place with every rank."""
VICTIMS = [(0, 1, 3), (1, 2)]


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


@pytest.mark.parametrize("variant", ["base", "accumulate"])
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


def kill_at_once(run_dir: Path, victims: tuple[int, ...], ranks: int, after_step: int) -> Run:
    """Runs the job and, when rank 0 has committed ``after_step``, kills the victims from outside in one go."""
    script = str(JOBS / "train.py")
    command = [*LAUNCHER, "--nproc-per-node", str(ranks), "--run-dir", str(run_dir), script, "--steps", "60"]
    with start(command) as process:
        deadline = time.monotonic() + 60
        progress = run_dir / "samples_rank0.jsonl"
        while not (progress.exists() and len(progress.read_bytes().splitlines()) > after_step):
            assert time.monotonic() < deadline, "the job made no progress"
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        pids = {e["rank"]: e["detail"]["pid"] for e in read_events(run_dir) if e["kind"] == "spawned"}
        for rank in victims:
            os.kill(pids[rank], signal.SIGKILL)
        out, err = process.communicate(timeout=100)
        return Run(run_dir, process.returncode, out, err, read_events(run_dir))


@pytest.mark.parametrize("victims", VICTIMS, ids=str)
def test_several_at_once(tmp_path: Path, undisturbed: Reference, victims: tuple[int, ...]) -> None:
    run = kill_at_once(tmp_path / "run", victims, ranks=4, after_step=4)
    assert run.code == 0, run.explain()
    assert len(run.of("fault")) == len(victims)
    assert run.digests() == undisturbed(ranks=4, steps=60).digests(), run.explain()


def test_all_at_once_is_a_clear_end(tmp_path: Path) -> None:
    run = kill_at_once(tmp_path / "run", (0, 1, 2), ranks=3, after_step=3)
    assert run.code == 75, run.explain()
    assert "no living rank holds a replica" in run.err
    assert run.of("job_end")[0]["detail"]["code"] == 75
