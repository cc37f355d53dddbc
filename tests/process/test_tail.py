"""Ranks killed in the tail of an update, in collectives of every kind over groups of every kind."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from inspect import getsource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from running import JOBS, LAUNCHER, Run, launch, read_events, start
from shared import Undisturbed

WHOLE = ("reductions", "chain", "mesh", "three", "to_roots", "gathers", "exchanges")
"""What can go on without a rank that died before it came to it."""
SOURCED = ("broadcasts", "direct", "scatters", "objects", "messages")
"""What can't, if that rank was to send something."""
KINDS = (*WHOLE, *SOURCED)
RANKS = 4
Values = dict[tuple[int, int], str]
"""(rank, step) -> a digest of what the step's tail has given."""


def values(run: Run) -> Values:
    found: Values = {}
    for rank in range(RANKS):
        for line in (run.run_dir / f"tail_rank{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert (rank, record["step"]) not in found, f"rank {rank} ran the tail of step {record['step']} twice"
            found[rank, record["step"]] = record["found"]
    return found


def parameters(run: Run) -> dict[int, str]:
    return {rank: digest for rank, (digest, _) in run.digests().items()}


@pytest.fixture(scope="session")
def calm(undisturbed_of: Undisturbed) -> Callable[..., Run]:
    """The run without faults, made once for each choice of kinds."""
    return lambda *arguments: undisturbed_of("tail.py", *arguments, ranks=RANKS)


def shifts(every_day: int) -> list[Any]:
    """Who dies in the first step, and the ranks behind it in those that follow."""
    return [
        pytest.param(shift, marks=() if shift == every_day else pytest.mark.long, id=str(shift))
        for shift in range(RANKS)
    ]


def assert_exact(run: Run, reference: Run, *, faults: int, gone: set[tuple[int, int]]) -> None:
    """``gone``: (rank, step) of the tails that a dead rank has not come to the end of."""
    assert run.code == 0, run.explain()
    assert run.recoveries() == faults, run.explain()
    assert parameters(run) == parameters(reference)
    expected = {key: value for key, value in values(reference).items() if key not in gone}
    assert values(run) == expected, run.explain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shift", shifts(0))
def test_a_rank_dies_behind_what_it_gave(tmp_path: Path, calm: Callable[..., Run], shift: int) -> None:
    """All that it gave was published: every survivor gets the bits of the undisturbed run."""
    victims = {step: (step + shift) % RANKS for step in range(len(KINDS))}
    plan = [f"{step}:{rank}:last" for step, rank in victims.items()]
    run = launch(tmp_path / "run", "tail.py", "--kinds", *KINDS, "--kill", *plan, ranks=RANKS, timeout_s=220)
    gone = {(rank, step) for step, rank in victims.items()}
    assert_exact(run, calm("--kinds", *KINDS), faults=len(plan), gone=gone)
    assert not run.of("tail_input_missing")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shift", shifts(1))
def test_a_rank_dies_in_the_first(tmp_path: Path, calm: Callable[..., Run], shift: int) -> None:
    """Each tail goes on without it behind that one, the same on all ranks; training has not noticed."""
    victims = {step: (step + shift) % RANKS for step in range(len(WHOLE))}
    plan = [f"{step}:{rank}:first" for step, rank in victims.items()]
    run = launch(tmp_path / "run", "tail.py", "--kinds", *KINDS, "--kill", *plan, ranks=RANKS)
    reference = calm("--kinds", *KINDS)
    assert run.code == 0, run.explain()
    assert run.recoveries() == len(plan), run.explain()
    assert parameters(run) == parameters(reference)
    found = values(run)
    missing = {event["step"] for event in run.of("tail_input_missing")}
    for step, kind in enumerate(WHOLE):
        told = {rank: found[rank, step] for rank in range(RANKS) if rank != victims[step]}
        if step not in missing:
            assert all(value == values(reference)[rank, step] for rank, value in told.items())
        if kind == "reductions":
            assert len(set(told.values())) == 1, (kind, told)
    assert missing, "no tail was longer than one collective"


OF_OBJECTS = "all_gather_single" if "all_gather_single(" in getsource(dist.all_gather_object) else "allgather"
"""Which verb carries objects; another one from torch 2.15 on."""
REFUSED = [
    ("broadcasts", 1, {}, "rank 1 died in the tail of update 0 before it came to the broadcast at {job}:"),
    pytest.param(
        *("scatters", 3, {}, "rank 3 died in the tail of update 0 before it came to the scatter at {job}:"),
        marks=pytest.mark.long,
    ),
    ("objects", 0, {}, f"rank 0 died in the tail of update 0 before it came to the {OF_OBJECTS} at {{job}}:"),
    ("messages", 2, {}, "rank 2 died in the tail of update 0 before it sent what rank"),
    ("gathers", 2, {"RESILIENT_TAIL_LOG_BYTES": "100"}, "RESILIENT_TAIL_LOG_BYTES takes, or larger ones"),
    pytest.param(
        *("gathers", 2, {"RESILIENT_TAIL_LOG_BYTES": "0"}, "RESILIENT_TAIL_LOG_BYTES takes, or larger ones"),
        marks=pytest.mark.long,
    ),
]


@pytest.mark.parametrize(("kind", "victim", "environ", "told"), REFUSED)
def test_what_only_the_dead_knew_ends_the_job_with_its_state_saved(
    tmp_path: Path, kind: str, victim: int, environ: dict[str, str], told: str
) -> None:
    arguments = ("tail.py", "--kinds", kind, "--steps", "3", "--kill", f"0:{victim}:first")
    run = launch(tmp_path / "run", *arguments, ranks=RANKS, **environ)
    assert run.code == 75, run.explain()
    assert told.format(job=JOBS / "tail.py") in run.err, run.explain()
    assert len(run.of("leaving")) == 1, run.explain()
    assert [event["detail"]["commits"] for event in run.of("save_last")] == [1], run.explain()
    if environ:
        large = run.of("tail_too_large")
        assert large, run.explain()
        assert all(event["detail"]["call"].startswith(f"{JOBS / 'tail.py'}:") for event in large)


OVER_SUB_GROUPS = ("--kinds", "chain", "reductions", "chain", "mesh", "reductions", "mesh", "--steps", "8")


def test_several_faults_in_one_tail(tmp_path: Path, calm: Callable[..., Run]) -> None:
    """Two ranks die behind what they gave, one after the other; then one while the tail is worked out."""
    plan = ["2:1:first", "2:3:last", "5:0:first", "5:2:last"]
    run = launch(tmp_path / "run", "tail.py", *OVER_SUB_GROUPS, "--kill", *plan, ranks=RANKS)
    reference = calm(*OVER_SUB_GROUPS)
    assert run.code == 0, run.explain()
    assert len(run.of("fault")) == 4, run.explain()
    assert parameters(run) == parameters(reference)
    for (rank, step), value in values(run).items():
        assert value == values(reference)[rank, step] or step in (2, 5), (rank, step)


BODY_PLACES = ("phase=COMPUTE at=start", "phase=COMPUTE at=backward", "phase=READY at=barrier", "phase=UPDATING at=end")


def test_sub_groups_in_the_body(tmp_path: Path, calm: Callable[..., Run]) -> None:
    """The loss is scaled over pairs and over a mesh before the update."""
    faults = "; ".join(f"kill rank={step % RANKS} step={step} {place}" for step, place in enumerate(BODY_PLACES, 1))
    run = launch(tmp_path / "run", "tail.py", *OVER_SUB_GROUPS, ranks=RANKS, flags=("--faults", faults))
    reference = calm(*OVER_SUB_GROUPS)
    assert run.code == 0, run.explain()
    assert run.recoveries() == len(BODY_PLACES), run.explain()
    assert parameters(run) == parameters(reference)
    missing = {event["step"] for event in run.of("tail_input_missing")}
    for (rank, step), value in values(run).items():
        assert value == values(reference)[rank, step] or step in missing, (rank, step)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("seed", "steps", "most"),
    [(0, 70, 6), *(pytest.param(seed, 140, 15, marks=pytest.mark.long) for seed in range(8))],
)
def test_kills_at_random(tmp_path: Path, calm: Callable[..., Run], seed: int, steps: int, most: int) -> None:
    """The job does not come to its end before the last of them."""
    arguments = ("--kinds", *WHOLE, "--steps", str(steps))
    run_dir, enough = tmp_path / "run", tmp_path / "enough"
    chance = random.Random(seed)
    flags = ["--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), "--max-restarts", "1000"]
    hits = 0
    with start([*LAUNCHER, *flags, str(JOBS / "tail.py"), *arguments, "--until", str(enough)]) as process:
        while process.poll() is None and hits < most:
            time.sleep(chance.uniform(0.05, 0.6) * steps / 140)
            made = {rank: steps_of(run_dir, rank) for rank in range(RANKS)}
            events = read_events(run_dir, torn=True)
            recovered = sum(event["kind"] == "resumed" for event in events)
            if min(made.values()) < 2 or recovered < hits:
                continue
            pids = {event["rank"]: event["detail"]["pid"] for event in events if event["kind"] == "spawned"}
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[chance.randrange(RANKS)], signal.SIGKILL)
                hits += 1
        enough.touch()
        out, err = process.communicate(timeout=200)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir, torn=True))
    reference = calm(*arguments)
    assert run.code == 0, run.explain()
    assert hits == most
    assert parameters(run) == parameters(reference), run.explain()
    missing = {event["step"] for event in run.of("tail_input_missing")}
    for (rank, step), value in values(run).items():
        assert value == values(reference)[rank, step] or step in missing, (rank, step, run.explain())


def steps_of(run_dir: Path, rank: int) -> int:
    path = run_dir / f"tail_rank{rank}.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("ways", [(), ("--sent",)], ids=["DDP's", "by hand"])
def test_buffers_that_a_lost_evaluation_makes_equal_are_rank_0s(
    tmp_path: Path, undisturbed_of: Undisturbed, ways: tuple[str, ...]
) -> None:
    """DistributedDataParallel begins an evaluation with rank 0's buffers, and not the step behind it. Rank 0's own stay
    as they were, so nothing there says that others were written. It may be lost itself, before it has given them.
    """
    places = ["rank=1 step=2 phase=UPDATING", "rank=1 step=5 phase=APPLIED at=end"]
    if not ways:  # what a script would have sent, nobody knows
        places += ["rank=0 step=8 phase=UPDATING", "rank=0 step=11 phase=APPLIED at=end"]
    plan = "; ".join(f"kill {place} incarnation={index % 2}" for index, place in enumerate(places))
    reference = undisturbed_of("evaluating.py", *ways, ranks=2)
    run = launch(tmp_path / "run", "evaluating.py", *ways, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == len(places), run.explain()
    assert run.digests() == reference.digests(), run.explain()
    assert [each["detail"]["names"] for each in run.of("tail_lost")] == [[]] * len(places), run.explain()
    given = [[name.rpartition(".")[2] for name in each["detail"].get("given", ())] for each in run.of("tail_lost")]
    kept = ["center", "num_batches_tracked", "running_mean", "running_var"]
    assert given == [kept, kept, [], []][: len(places)], "each is named: who writes them again behind that is told"
    assert len(run.of("tail_buffers_stand")) == len(places) - 2, run.explain()
