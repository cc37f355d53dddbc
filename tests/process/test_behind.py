"""What a script does with a cut: it may swallow it, or use behind the body what that had not bound yet. And what
modules hold that is written behind the update, which a lost rank has not come to.
"""

from pathlib import Path

from running import launch
from shared import Undisturbed

STEPS = "8"


def test_a_name_that_the_cut_body_had_not_bound(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """The new process is cut in its first body. It is lost once more; the survivor has all of the state."""
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=5 phase=COMPUTE at=backward generation=1"
    run = launch(tmp_path / "run", "behind.py", "unbound", STEPS, ranks=3, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert [event["rank"] for event in run.of("unbound_name")] == [1], run.explain()
    assert "write `if step.done:`" in run.err
    reference = undisturbed_of("behind.py", "unbound", STEPS, ranks=3)
    assert run.digests() == reference.digests(), run.explain()


def test_a_rank_that_alone_draws_behind_its_updates_is_told_of(tmp_path: Path) -> None:
    """No replica's tail says so. That it draws now and then it has said itself, before it was lost."""
    plan = "kill rank=0 step=1 phase=APPLIED at=end; kill rank=0 step=5 phase=COMPUTE at=start incarnation=1; "
    plan += "kill rank=0 step=7 phase=APPLIED at=start incarnation=2"
    run = launch(tmp_path / "run", "behind.py", "evaluates", "10", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 3, run.explain()
    told = [event["detail"] for event in run.of("tail_lost")]
    assert told == [{"next": 2, "names": []}, {"next": 8, "names": ["random numbers"]}], run.explain()
    assert run.err.count("if the script does something there on that rank alone (it writes a file, say), look") == 1


def test_a_cut_that_is_swallowed_makes_no_update(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Rank 1 has said that it is ready, or is about to, and dies; rank 0 is cut while it halves its gradients, and goes
    on.
    """
    plan = "kill rank=1 step=3 phase=READY at=barrier; kill rank=1 step=5 phase=READY at=before incarnation=1"
    run = launch(tmp_path / "run", "behind.py", "swallows", STEPS, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert [(event["rank"], event["step"]) for event in run.of("injected")] == [(1, 3), (1, 5)], run.explain()
    assert run.recoveries() == 2, run.explain()
    reference = undisturbed_of("behind.py", "swallows", STEPS, ranks=2)
    assert run.digests() == reference.digests(), run.explain()


def test_what_the_tail_writes_into_modules(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Where all had the same before it, a new process has what a replica has behind it: also where its source is a new
    process itself, and where the lost rank had begun the next step. BatchNorm's statistics are each rank's own.
    """
    plan = (
        "kill rank=1 step=2 phase=UPDATING at=start; "
        "kill rank=2 step=3 phase=APPLIED at=start; kill rank=0 step=3 phase=APPLIED at=start; "
        "kill rank=1 step=5 phase=UPDATING at=end incarnation=1; "
        "kill rank=2 step=6 phase=COMPUTE at=forward incarnation=1; "
        "kill rank=0 step=8 phase=APPLIED at=end incarnation=1"
    )
    run = launch(tmp_path / "run", "behind.py", "written", "11", ranks=3, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == 6, run.explain()
    assert run.digests() == undisturbed_of("behind.py", "written", "11", ranks=3).digests(), run.explain()
    told = {(each["rank"], *each["detail"]["names"]) for each in run.of("tail_lost") if each["detail"]["names"]}
    assert told == {(0, "0.module.1.late"), (2, "0.module.1.late")}, (
        "for the first time, and perhaps not the same on all"
    )


def test_what_tails_are_seen_to_write_apart_is_named(tmp_path: Path) -> None:
    """Rank 0 and what it alone writes, or has otherwise behind its tails: the same in front of this one, it was taken
    from the replica, and all ranks trained on with that. Also where the source is a new process, and right behind the
    step that has made one of them equal. Not where the lost rank's tail has written nothing, and it had begun the next
    step.
    """
    plan = (
        "kill rank=0 step=4 phase=APPLIED at=end; kill rank=1 step=6 phase=COMPUTE at=backward; "
        "kill rank=0 step=8 phase=UPDATING at=end incarnation=1; "
        "kill rank=0 step=12 phase=COMPUTE at=forward incarnation=2"
    )
    run = launch(tmp_path / "run", "behind.py", "apart", "14", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 4, run.explain()
    apart = [f"0.module.1.{name}" for name in ("last", "mean", "peak")]
    told = [(event["rank"], event["detail"]["names"]) for event in run.of("tail_lost")]
    assert told == [(0, apart), (0, apart)], run.explain()
    assert "results may differ from an undisturbed run's (tail_lost: see above)" in run.err
