"""Ranks that hang without dying: the culprit is named, killed and replaced; the run ends as if nothing had happened."""

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, Run, launch

STOPS = (
    *("phase=COMPUTE at=backward", "phase=READY at=barrier", "phase=BETWEEN", "phase=UPDATING at=start"),
    *("phase=COMPUTE at=start", "phase=READY at=before", "phase=UPDATING at=end", "phase=APPLIED at=end"),
)
KNOWN = 100
"""In this step it is known what is usual, though the job had a recovery in its third: three looks at the least."""
LOOPS = [
    ("phase=COMPUTE at=forward", "phase=APPLIED at=start", "phase=UPDATING at=end"),
    pytest.param(("phase=COMPUTE at=backward", "phase=APPLIED at=end", "phase=BETWEEN"), marks=pytest.mark.long),
]
"""A processor is busy with each until it is found."""
WORLDS = [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))]
FAST = {"RESILIENT_HANG_TIMEOUT_S": "1.5"}
SOON = {"RESILIENT_HANG_TIMEOUT_S": "6"}
"""The ranks have half of it, and are given two seconds, to say in which collective they are."""


def plan_of(kind: str, places: tuple[str, ...], ranks: int, steps: Sequence[int]) -> str:
    """One fault in each of these steps, going round the ranks."""
    hits = zip(places, steps, itertools.cycle(range(ranks)), strict=False)
    # Each has hit the ranks in turn: the process that is hit is its rank's first, second, ...
    found = [
        f"{kind} rank={rank} step={step} {place} incarnation={number // ranks}"
        for number, (place, step, rank) in enumerate(hits)
    ]
    assert len(found) == len(places)
    return "; ".join(found)


def assert_named(run: Run, faults: int) -> None:
    """Each rank that was hit by the first so many faults, and no other, was found hung."""
    injected = [event["rank"] for event in run.of("injected")][:faults]
    assert len(injected) == faults, run.explain()
    assert [rank for event in run.of("hung") for rank in event["detail"]["ranks"]] == injected, run.explain()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.shows("DDP", "hangs", "in place")
def test_stopped_process(tmp_path: Path, undisturbed: Reference, ranks: int) -> None:
    """One in a job that does not know its steps yet, which takes seconds; the others in one that does. With three ranks
    or more one more, in a recovery.
    """
    count = len(STOPS)
    plan = plan_of("stop", STOPS, ranks, (2, *range(KNOWN, KNOWN + 2 * count, 2)))
    last = KNOWN + 2 * count
    if ranks > 2:
        plan += f"; kill rank=1 step={last} phase=COMPUTE at=backward incarnation={(count + ranks - 2) // ranks}"
        plan += f"; stop rank=2 phase=STOP generation={count + 1} incarnation={(count + ranks - 3) // ranks}"
    run = launch(tmp_path / "run", "train.py", "--steps", str(last + 3), ranks=ranks, flags=("--faults", plan))
    reference = undisturbed(ranks=ranks, steps=last + 3)
    assert_identical(run, reference, ranks=ranks, recoveries=count + (ranks > 2))
    assert_named(run, count)
    if ranks > 2:
        assert_stopped_in_a_recovery(run)


def assert_stopped_in_a_recovery(run: Run) -> None:
    """Rank 2, in the last one. What a usual step takes is waited for (how many looks: ``pure/test_hang_watch.py``), and
    that was known.
    """
    assert run.err.count("in the middle of a recovery") == 1, run.explain()
    stopped, killed = run.of("injected")[-1], run.of("fenced")[-1]
    assert stopped["rank"] == killed["rank"] == 2, run.explain()
    assert killed["time_ns"] - stopped["time_ns"] >= 100_000_000, run.explain()
    first, *others = [each["detail"]["limit_ms"] for each in run.of("hung")]
    assert first == 2000, "of a job that has timed no steps"
    assert {*others} != {2000}, run.explain()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("places", LOOPS, ids=["0", "1"])
def test_endless_loop_that_holds_the_gil(tmp_path: Path, undisturbed: Reference, places: tuple[str, ...]) -> None:
    plan = plan_of("loop", places, 3, (2, 4, 6))
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=3, flags=("--faults", plan), **FAST)
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=len(places))
    assert_named(run, len(places))
    stacks = (run.run_dir / "stacks" / "rank_0.0.txt").read_text()
    assert "in _loop_for_ever" in stacks


@pytest.mark.timeout(120)
def test_a_loader_that_does_not_come_back(tmp_path: Path, undisturbed: Reference) -> None:
    run = launch(tmp_path / "run", "train.py", "--steps", "9", "--variant", "stuck", ranks=3, **FAST)
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=1)
    assert_culprit(run, "waits for its batch")


def assert_culprit(run: Run, words: str) -> None:
    (hung,) = run.of("hung")
    assert hung["detail"]["ranks"] == [1]
    assert words in hung["detail"]["why"]
    assert "rank 1 hung" in run.err


@pytest.mark.timeout(120)
def test_each_rank_says_in_which_collective_it_is(tmp_path: Path, undisturbed: Reference) -> None:
    """Rank 1 leaves a collective out: the others are in it, and it has left the one before."""
    run = launch(tmp_path / "run", "train.py", "--steps", "9", "--variant", "skip", ranks=3, **SOON)
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=1)
    assert_culprit(run, "has entered")
    (told,) = run.of("collectives")
    assert told["detail"]["silent"] == []
    newest = told["detail"]["newest"]
    assert newest["0"] == newest["2"]
    assert newest["0"].startswith("in all_reduce")
    assert newest["1"].startswith("past ")
    reached: list[int] = []
    for rank in range(3):
        path = run.run_dir / "stacks" / f"rank_{rank}.0.collectives.jsonl"
        heading, *entries = map(json.loads, path.read_text().splitlines())
        assert heading["newest"] == newest[str(rank)]
        reached.append(max(each["collective_seq_id"] for each in entries if each["process_group"][0] == "0"))
    assert reached[0] == reached[2] > reached[1], "how many of the world's collectives each has entered"
    assert f"newest collectives: ranks 0, 2 {newest['0']}; rank 1 {newest['1']}" in run.err


@pytest.mark.timeout(120)
def test_recorders_that_fail_end_no_rank_and_delay_nothing(tmp_path: Path, undisturbed: Reference) -> None:
    """Rank 0's raises, rank 2's does not come back, and nobody's trace is worth a living rank."""
    run = launch(tmp_path / "run", "train.py", "--steps", "9", "--variant", "skip+mute", ranks=3, **SOON)
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=1)
    assert [event["rank"] for event in run.of("spawned")] == [0, 1, 2, 1], "only the one that hung was replaced"
    (told,) = run.of("collectives")
    assert told["detail"]["silent"] == [2]
    assert told["detail"]["newest"]["0"] == "RuntimeError: the recorder is broken"
    assert told["detail"]["newest"]["1"].startswith("past ")
    (hung,) = run.of("hung")
    assert hung["detail"]["stalled_ms"] < hung["detail"]["limit_ms"] + 1000


@pytest.mark.timeout(120)
def test_a_recorder_that_is_switched_off(tmp_path: Path) -> None:
    variables = {**SOON, "TORCH_FR_BUFFER_SIZE": "0"}
    run = launch(tmp_path / "run", "train.py", "--steps", "9", "--variant", "skip", ranks=3, **variables)
    assert run.code == 0, run.explain()
    (told,) = run.of("collectives")
    assert told["detail"] == {"newest": dict.fromkeys("012", "nothing was recorded"), "silent": []}


def test_declared_slow_work_is_no_hang(tmp_path: Path) -> None:
    run = launch(
        tmp_path / "run", "train.py", "--steps", "9", "--variant", "slow", ranks=2, RESILIENT_HANG_TIMEOUT_S="2"
    )
    assert run.code == 0, run.explain()
    assert run.recoveries() == 0
    (slow,) = run.of("slow")
    assert (slow["rank"], slow["detail"]["what"]) == (1, "evaluation")
    # A step may take a second by itself on a busy machine.
    begun_ns = slow["time_ns"] - slow["detail"]["duration_ns"]
    assert not [each for each in run.of("suspect") if begun_ns < each["time_ns"] < slow["time_ns"]], run.explain()


@pytest.mark.timeout(120)
def test_stopped_in_the_middle_of_a_recovery(tmp_path: Path, undisturbed: Reference) -> None:
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; stop rank=2 phase=STOP generation=1"
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=3, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=3, steps=9).digests(), run.explain()
    assert "in the middle of a recovery" in run.err


HCCE_PLACES = (
    "phase=COMPUTE at=start",
    "phase=COMPUTE at=forward",
    "phase=COMPUTE at=backward",
    "phase=READY at=before",
    "phase=READY at=barrier",
    "phase=UPDATING at=start",
    "phase=APPLIED at=start",
    "phase=APPLIED at=end",
    "phase=BETWEEN",
)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.shows("DDP", "connections cut", "in place")
def test_broken_collectives_are_rebuilt_in_process(tmp_path: Path, undisturbed: Reference, ranks: int) -> None:
    """HCCE: nobody is replaced, nothing is copied."""
    clauses = [f"hcce rank={i % ranks} step={2 + 2 * i} {place}" for i, place in enumerate(HCCE_PLACES)]
    steps = 2 * len(HCCE_PLACES) + 3
    plan = "; ".join(clauses)
    run = launch(tmp_path / "run", "train.py", "--steps", str(steps), ranks=ranks, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=ranks, steps=steps), ranks=ranks, recoveries=len(HCCE_PLACES))
    assert len(run.of("spawned")) == ranks
    assert run.of("fetched") == []


def test_hcce_switched_off(tmp_path: Path) -> None:
    plan = "hcce rank=0 step=4 phase=COMPUTE at=forward"
    run = launch(
        tmp_path / "run", "train.py", "--steps", "9", ranks=2, flags=("--faults", plan), MS_ENABLE_TFT="{ARF:1}"
    )
    assert run.code == 75, run.explain()
    assert "MS_ENABLE_TFT has no HCCE:1" in run.err


def test_collectives_that_keep_failing_end_the_job(tmp_path: Path) -> None:
    plan = "; ".join(["hcce rank=0 step=4 phase=COMPUTE at=forward"] * 5)
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=2, flags=("--faults", plan))
    assert run.code == 75, run.explain()
    assert "collectives keep failing" in run.err


@pytest.mark.timeout(120)
def test_a_recovery_that_does_not_end_is_begun_anew_before_anybody_is_killed(
    tmp_path: Path, undisturbed: Reference
) -> None:
    """One rank never comes out of it: it alone is killed, since it does not come when all are asked again."""
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; loop rank=2 phase=RESTORE at=end generation=1"
    limits = {"RESILIENT_JOIN_TIMEOUT_S": "3", "RESILIENT_HANG_TIMEOUT_S": "2"}
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=3, flags=("--faults", plan), **limits)
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=3, steps=9).digests(), run.explain()
    assert [event["rank"] for event in run.of("spawned")] == [0, 1, 2, 1, 2], run.explain()
    assert [event["rank"] for event in run.of("fenced")] == [2]
    assert "ranks [2] did not come to the start of update 5 within 3 s" in run.err
    assert [2] in [event["detail"]["ranks"] for event in run.of("suspect")], run.explain()
    assert "in _loop_for_ever" in (run.run_dir / "stacks" / "rank_2.0.txt").read_text()
