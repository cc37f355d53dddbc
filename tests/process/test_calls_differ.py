"""Ranks that call different collectives at one place: told at once, and carried where it can be."""

from pathlib import Path

import pytest
from running import Run, launch


def end(run: Run, words: str) -> None:
    """The job ends with its state saved, long before a time-out, and says who calls what."""
    assert run.code == 75, run.explain()
    (saved,) = run.of("saved")
    assert saved["detail"]["commits"] == 5
    assert words in run.err, run.explain()


def parameters(run: Run) -> set[str]:
    return {state for state, _ in run.digests().values()}


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("always", "calls broadcast of 4 bytes, root 0 where rank 0 calls allreduce (SUM) of 1 x float32"),
        ("sizes", "calls allreduce (SUM) of 2 x float32 where rank 0 calls allreduce (SUM) of 1 x float32"),
        ("backward", "calls broadcast of 4 bytes, root 0 where rank 0 calls allreduce (SUM) of 1 x float32"),
    ],
)
def test_it_is_told_who_calls_what(tmp_path: Path, mode: str, words: str) -> None:
    """By the one of two that comes later."""
    run = launch(tmp_path / "run", "disagreeing.py", mode, "9", ranks=2)
    told = [event["detail"] for event in run.of("calls_differ")]
    assert told, run.explain()
    assert {"disagreeing.py"} == {Path(each["call"].rpartition(":")[0]).name for each in told}
    mine, others = words.removeprefix("calls ").split(" where rank 0 calls ")
    assert all({each["calls"], each["others"]} == {mine, others} for each in told)
    end(run, "all members of process group '0' must call the same collectives in the same order")


def test_what_the_clock_decides_may_come_out_alike_the_second_time(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "disagreeing.py", "once", "9", ranks=3)
    other = launch(tmp_path / "other", "disagreeing.py", "never", "9", ranks=3)
    assert run.code == other.code == 0, run.explain()
    assert run.recoveries() == 1
    assert run.of("calls_differ")
    assert parameters(run) == parameters(other)


def test_in_a_group_of_some_ranks(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "disagreeing.py", "part", "9", ranks=3)
    told = [event["detail"] for event in run.of("calls_differ")]
    assert {each["other"] for each in told} <= {0, 2}
    assert {each["group"] for each in told} != {"0"}
    end(run, "must call the same collectives in the same order")


def test_behind_the_update(tmp_path: Path) -> None:
    """There the collective is worked out from what both have published, which is not the same."""
    run = launch(tmp_path / "run", "disagreeing.py", "tail", "9", ranks=2)
    assert run.code == 1, run.explain()
    assert run.of("calls_differ")
    assert "UsageError: after the update rank" in run.err, run.explain()


@pytest.mark.long
def test_one_more_than_the_others_at_the_end_of_a_body(tmp_path: Path) -> None:
    """Nobody calls another one: the others wait to update meanwhile. No limit for a hang is waited for."""
    run = launch(tmp_path / "run", "disagreeing.py", "extra", "9", ranks=3, timeout_s=60)
    end(run, "these never meet")
    hung = run.of("hung")
    assert {tuple(each["detail"]["ranks"]) for each in hung} == {(2,)}, "the one that is alone with it"
    assert all(each["detail"]["stalled_ms"] < 30_000 for each in hung)


def test_a_new_process_that_goes_by_a_counter_of_its_own(tmp_path: Path) -> None:
    """Where one is at its eighth call the other waits to update, now and then; a step that runs again counts twice."""
    plan = "kill rank=1 step=4"
    run = launch(tmp_path / "run", "disagreeing.py", "counter", "20", ranks=2, flags=("--faults", plan), timeout_s=60)
    assert run.code == 0, run.explain()
    assert "these never meet" in run.err, run.explain()
    assert "keeps calls from step to step" in run.err, "why"
    other = launch(tmp_path / "other", "disagreeing.py", "never", "20", ranks=2)
    assert parameters(run) == parameters(other)


def test_what_the_library_refuses_no_member_has_called(tmp_path: Path) -> None:
    """Where another one is there already it is seen before it is refused: so here it comes first."""
    run = launch(tmp_path / "run", "disagreeing.py", "refused", "9", ranks=2)
    other = launch(tmp_path / "other", "disagreeing.py", "never", "9", ranks=2)
    assert run.code == other.code == 0, run.explain()
    assert not run.of("calls_differ") + run.of("hung") + run.of("fault"), run.explain()
    assert parameters(run) == parameters(other)


def test_what_may_differ_between_members_is_no_disagreement(tmp_path: Path) -> None:
    plan = "kill rank=1 step=4; hcce rank=0 step=6"
    run = launch(tmp_path / "run", "disagreeing.py", "uneven", "9", ranks=3, flags=("--faults", plan))
    other = launch(tmp_path / "other", "disagreeing.py", "uneven", "9", ranks=3)
    assert run.code == other.code == 0, run.explain()
    assert not run.of("calls_differ")
    assert parameters(run) == parameters(other)
