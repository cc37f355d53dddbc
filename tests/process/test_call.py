"""``session.call``: loops that own their step are repaired as those are whose step is a ``with``, to the same bits."""

import json
from pathlib import Path

import pytest
from identity import no_commit_lost
from running import Run, launch
from shared import Undisturbed

EVERYWHERE = (
    "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=7 phase=UPDATING; "
    "hcce rank=1 step=9 incarnation=1; kill rank=1 step=11 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=13 phase=BETWEEN incarnation=1; kill rank=0 step=15 phase=READY at=barrier incarnation=2"
)
IN_WINDOWS = (
    "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=7 phase=COMPUTE at=end; "
    "hcce rank=1 step=10 incarnation=1; kill rank=0 step=14 phase=UPDATING incarnation=1; "
    "kill rank=1 step=17 phase=APPLIED incarnation=1"
)
"""With three steps to an update: in the last of a window, in its second, in the second of all, at an update."""


def run_of(folder: Path, *arguments: str, plan: str = "", ranks: int = 2, **environ: str) -> Run:
    flags = ("--faults", plan) if plan else ()
    return launch(folder, "called.py", *arguments, ranks=ranks, flags=flags, timeout_s=100, **environ)


def assert_same(run: Run, *others: Run, recoveries: int) -> None:
    """Parameters, optimizer states, and what each rank has of its own: buffers and random numbers."""
    assert run.code == 0, run.explain()
    assert run.recoveries() == recoveries, run.explain()
    assert no_commit_lost(run), run.explain()
    for other in others:
        assert other.code == 0, other.explain()
        assert run.digests() == other.digests(), run.explain()


def runs(run: Run, rank: int) -> list[tuple[int, str]]:
    lines = (run.run_dir / f"runs_rank{rank}.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def test_what_hangs_in_front_of_the_first_call_stays(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """It stands where no call comes by again, and is nothing that a body has left on."""
    quiet = undisturbed_of("called.py", "--steps", "12", "--hangs", ranks=2)
    plan = "hcce rank=1 step=0; kill rank=1 step=5 phase=COMPUTE at=backward; hcce rank=0 step=8"
    run = run_of(tmp_path / "run", "--steps", "12", "--hangs", plan=plan)
    assert_same(run, quiet, recoveries=3)
    assert quiet.digests() != undisturbed_of("called.py", "--steps", "12", ranks=2).digests()


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_WINDOWS)])
def test_a_loop_that_calls_its_bodies(tmp_path: Path, undisturbed_of: Undisturbed, accumulate: int, plan: str) -> None:
    arguments = ("--steps", "18", "--accumulate", str(accumulate))
    steps = undisturbed_of("called.py", "--way", "steps", *arguments, ranks=2)
    quiet = undisturbed_of("called.py", *arguments, ranks=2)
    assert_same(quiet, steps, recoveries=0)
    run = run_of(tmp_path / "run", *arguments, plan=plan)
    assert len(run.of("injected")) == plan.count("rank="), run.explain()
    assert_same(run, quiet, recoveries=plan.count("rank="))
    for rank in range(2):  # behind the update nothing ran twice
        ended = [number for number, what in runs(run, rank) if what == "ends"]
        assert len(ended) == len(set(ended)), ended
    # Of three to an update, the third is cut: its rank calls all three again, in this one call, and goes on.
    first = 5 // accumulate * accumulate
    begun = [number for number, what in runs(run, 0) if what == "begins"]
    assert begun[: 12 - first] == [*range(6), *range(first, 6)], begun
    assert f"rank 1 begins at Position(step={first}, over=False)" in run.out


BETWEEN = (
    "kill rank=1 step=3 phase=COMPUTE at=backward; kill rank=1 step=4 phase=BETWEEN incarnation=1; "
    "kill rank=0 step=6 phase=COMPUTE at=start; kill rank=0 step=7 phase=APPLIED at=end incarnation=1; "
    "kill rank=1 step=9 incarnation=2"
)


@pytest.mark.timeout(300)
def test_what_the_loop_does_between_does_not_move_the_bodies(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """It draws, and a rank is lost where only it knew what the loop had drawn; and it evaluates: DDP leaves out the
    broadcast of a forward pass if the one before it had no gradients: a new process had none."""
    quiet = undisturbed_of("called.py", "--draws", "--evaluates", ranks=2)
    assert_same(run_of(tmp_path / "run", "--draws", "--evaluates", plan=BETWEEN), quiet, recoveries=5)


@pytest.mark.timeout(300)
def test_undo(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    quiet = undisturbed_of("called.py", "--undo", "--steps", "6", ranks=2)
    plan = "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=0 step=4 phase=READY at=barrier"
    assert_same(run_of(tmp_path / "run", "--undo", "--steps", "6", plan=plan), quiet, recoveries=2)


@pytest.mark.timeout(300)
def test_a_rank_whose_update_was_torn_is_replaced(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Memory that is lost before the update is fetched again, and the body is called again; in the update, the body can
    neither end nor run again."""
    plan = (
        "uce rank=1 step=3 phase=COMPUTE at=backward target=param; uce rank=1 step=6 phase=UPDATING at=start "
        "target=optimizer"
    )
    run = run_of(tmp_path / "run", plan=plan)
    (lost,) = run.of("body_lost")
    assert lost["rank"] == 1
    assert len(run.of("spawned")) == 3, run.explain()
    assert "rank 1 begins at Position(step=7, over=False)" in run.out
    assert_same(run, undisturbed_of("called.py", ranks=2), recoveries=2)


@pytest.mark.timeout(300)
def test_a_rank_that_is_lost_behind_the_last_call(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    plan = "kill rank=1 step=3 phase=APPLIED at=end; kill rank=0 step=3 phase=APPLIED at=end"
    quiet = undisturbed_of("called.py", "--steps", "4", ranks=3)
    run = run_of(tmp_path / "run", "--steps", "4", plan=plan, ranks=3)
    assert len(run.of("injected")) == 2
    # A second one, where the death of the first has cut the other's tail: it comes to its end behind the recovery.
    assert_same(run, quiet, recoveries=min(run.recoveries(), 2))


@pytest.mark.timeout(300)
def test_all_lost_and_started_again(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """All ranks lost: all begin at the newest checkpoint. Started again, a job begins there too. What the loop changes
    in front of a call is in a checkpoint, and counts once.
    """
    quiet = undisturbed_of("called.py", "--changes", "--steps", "14", ranks=2)
    plan = "kill rank=0 step=9; kill rank=1 step=9"
    run = run_of(tmp_path / "run", "--changes", "--save", "4", plan=plan)
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == 2
    assert "rank 0 begins at Position(step=0, over=False)" in run.out
    again = [line for line in run.out.splitlines() if "begins at Position(step=" in line][2:]
    assert len(again) == 2, run.out
    assert all("step=0" not in line for line in again), run.out
    longer = run_of(tmp_path / "run", "--changes", "--save", "4", "--steps", "14")
    assert longer.code == 0, longer.explain()
    begun = [line for line in longer.out.splitlines() if "begins at Position(step=" in line][-2:]
    assert {line.split("step=")[1].split(",")[0] for line in begun} <= {"4", "8"}, longer.out  # as storage keeps up
    assert longer.digests() == quiet.digests(), longer.explain()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["steps", pytest.param("call", marks=pytest.mark.long)])
def test_behind_an_evaluation_no_buffers_are_shared(tmp_path: Path, undisturbed_of: Undisturbed, way: str) -> None:
    """DDP leaves out the broadcast of a forward pass if the one before it had no gradients: a new process had none."""
    arguments = ("--way", way, "--evaluates", "--steps", "8")
    plan = "kill rank=1 step=3 phase=COMPUTE at=backward; kill rank=0 step=6 phase=COMPUTE at=start"
    run = run_of(tmp_path / "run", *arguments, plan=plan)
    assert_same(run, undisturbed_of("called.py", *arguments, ranks=2), recoveries=2)


@pytest.mark.timeout(300)
def test_a_loop_that_finds_another_place_in_its_data_is_told(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", "--strays", plan="kill rank=1 step=5 phase=COMPUTE at=backward")
    assert run.code == 0, run.explain()
    (told,) = run.of("other_data")
    assert (told["rank"], told["incarnation"], told["step"]) == (1, 1, 5)
    assert run.err.count("rank 1: step 5 gets other data than in the process whose place this one takes") == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nested", "session.call() was called within a body of session.call(): one call is one step"),
        ("mixed", "a Session has one loop: either session.steps(), or session.call() and session.position"),
        ("between", "barrier was called between two session.call() of one accumulation window"),
        ("again", "the body of step 1 was left by an exception before its update, and session.call() was called again"),
    ],
)
def test_what_is_refused(tmp_path: Path, what: str, words: str) -> None:
    run = run_of(tmp_path / "run", "--accumulate", "3", "--wrong", what, ranks=1)
    assert run.code == 1, run.explain()
    assert f"UsageError: {words}" in run.err


@pytest.mark.timeout(300)
def test_what_bodies_change_is_theirs_in_a_redo_too(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """A second fault, in a body that runs again behind another one of its window: that one's end is not its begin."""
    again = "phase=COMPUTE at=backward"
    plan = f"kill rank=1 step=14 {again}; kill rank=1 step=13 {again} incarnation=1"
    changes = ("--accumulate", "3", "--steps", "18", "--counts-in-bodies")
    run = run_of(tmp_path / "run", *changes, plan=plan)
    assert_same(run, undisturbed_of("called.py", *changes, ranks=2), recoveries=2)
    assert not run.of("state_lost")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("places", "inside"),
    [
        (1, True),
        (1 << 18, False),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(1 << 18, True, marks=pytest.mark.long),
    ],
)
def test_state_that_changes_between_two_calls(
    tmp_path: Path, undisturbed_of: Undisturbed, places: int, *, inside: bool
) -> None:
    """Only from the fourth window on. A rank that has heard of the fault between two calls has changed it as well."""
    changes = ("--accumulate", "3", "--steps", "18", "--counts-from", "9", "--places", str(places))
    quiet = undisturbed_of("called.py", *changes, ranks=2)
    plan = "kill rank=0 step=5 phase=COMPUTE at=backward"
    if inside:  # a body, behind the change
        run = run_of(tmp_path / "run", *changes, plan=f"{plan}; kill rank=1 step=13 phase=COMPUTE at=backward")
    else:
        run = run_of(tmp_path / "run", *changes, "--dies-between", "12", plan=plan)
    assert_same(run, quiet, recoveries=2)


def test_bodies_that_get_all_by_variables(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Of a decorated body, and of a function in it. The second fault of a window is seen between two calls: the bodies
    that it brought back ran on the newest variables.
    """
    quiet = undisturbed_of("called.py", "--accumulate", "3", "--steps", "18", ranks=2)
    names = ("--accumulate", "3", "--steps", "18", "--names", "--dies-between", "13")
    run = run_of(tmp_path / "run", *names, plan="hcce rank=0 step=8; hcce rank=1 step=12 phase=COMPUTE at=backward")
    assert_same(run, quiet, recoveries=3)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_changes_in_front_of_calls(tmp_path: Path, undisturbed_of: Undisturbed, accumulate: int) -> None:
    """A redo sets it again; a new process, whose loop has changed it once more before its first call, takes it back.

    In the first window of all, whose begin is in front of all this, and in others, at each place.
    """
    back = "phase=COMPUTE at=backward"
    plan = (
        f"kill rank=0 step=1 {back}; hcce rank=1 step=5 {back}; kill rank=1 step=7 {back}; "
        f"hcce rank=0 step=11 {back} incarnation=1; kill rank=0 step=13 phase=COMPUTE at=forward incarnation=1"
    )
    changes = ("--changes", "--steps", "18", "--accumulate", str(accumulate))
    quiet = undisturbed_of("called.py", *changes, ranks=2)
    assert_same(quiet, undisturbed_of("called.py", "--way", "steps", *changes, ranks=2), recoveries=0)
    assert_same(run_of(tmp_path / "run", *changes, plan=plan), quiet, recoveries=plan.count("rank="))


@pytest.mark.timeout(300)
def test_an_exception_behind_the_update_is_the_users(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """It passes, and the loop may go on: the update counts."""
    plan = "kill rank=1 step=3 phase=COMPUTE at=backward"
    arguments = ("--wrong", "tail", "--steps", "5")
    quiet = undisturbed_of("called.py", *arguments, ranks=2)
    assert_same(run_of(tmp_path / "run", *arguments, plan=plan), quiet, recoveries=1)
    assert quiet.out.count("passed") == 2


@pytest.mark.timeout(300)
def test_a_rank_takes_its_time_to_leave(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """All have left the loop behind a collective of the tail, and one is long about it: it is not one that goes on."""
    run = run_of(tmp_path / "run", "--one-leaves-late")
    assert_same(run, undisturbed_of("called.py", ranks=2), recoveries=0)
