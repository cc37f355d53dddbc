"""What a script hangs on the end of a collective runs on gloo's thread, for as long as it likes."""

from pathlib import Path

from running import launch
from shared import Undisturbed

PLAN = "hcce rank=1 step=5 phase=COMPUTE at=backward; kill rank=1 step=8 phase=APPLIED at=end"


def test_a_step_that_is_redone_begins_when_it_is_over(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """It would add to what the redone step has set to zero."""
    reference = undisturbed_of("callbacks.py", ranks=2)
    run = launch(tmp_path / "run", "callbacks.py", ranks=2, flags=("--faults", PLAN))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2, run.explain()
    assert {rank: digest for rank, (digest, _) in run.digests().items()} == {
        rank: digest for rank, (digest, _) in reference.digests().items()
    }, run.explain()
    (lost,) = run.of("tail_lost")
    assert (lost["rank"], lost["detail"]) == (1, {"next": 9, "names": ["rank_state['mean']", "random numbers"]}), (
        run.explain()
    )
    assert "rank 1 was lost in or behind the update before step 9" in run.err
    (carried,) = run.of("loop_carried")
    assert carried["detail"]["names"] == ["self.seen in Trainer.train"], run.explain()
