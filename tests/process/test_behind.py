"""What a script does with a cut: it may swallow it, or use behind the body what that had not bound yet."""

from pathlib import Path

from running import launch

STEPS = "8"


def test_a_name_that_the_cut_body_had_not_bound(tmp_path: Path) -> None:
    """The new process is cut in its first body. It is lost once more; the survivor has all of the state."""
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=5 phase=COMPUTE at=backward generation=1"
    reference = launch(tmp_path / "reference", "behind.py", "unbound", STEPS, ranks=3)
    run = launch(tmp_path / "run", "behind.py", "unbound", STEPS, ranks=3, flags=("--faults", plan))
    assert reference.code == run.code == 0, run.explain()
    assert [event["rank"] for event in run.of("unbound_name")] == [1], run.explain()
    assert "write `if step.done:`" in run.err
    assert run.digests() == reference.digests(), run.explain()


def test_a_cut_that_is_swallowed_makes_no_update(tmp_path: Path) -> None:
    """Rank 1 has said that it is ready, and dies; rank 0 is cut while it halves its gradients, and goes on."""
    reference = launch(tmp_path / "reference", "behind.py", "swallows", STEPS, ranks=2)
    for place in ("barrier", "before"):
        plan = f"kill rank=1 step=3 phase=READY at={place}"
        run = launch(tmp_path / place, "behind.py", "swallows", STEPS, ranks=2, flags=("--faults", plan))
        assert reference.code == run.code == 0, run.explain()
        assert run.recoveries() == 1, run.explain()
        assert run.digests() == reference.digests(), run.explain()
