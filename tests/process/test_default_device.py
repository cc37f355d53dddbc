"""A default device is the script's business: what the library makes for itself lies where it says."""

from pathlib import Path

from running import launch
from shared import Undisturbed

STEPS = "14"


def test_what_is_made_for_a_recovery_lies_in_the_hosts_memory(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    reference = undisturbed_of("default_device.py", "cpu", STEPS, ranks=2)
    plan = (
        "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=0 step=6 phase=UPDATING; "
        "hcce rank=1 step=9 phase=COMPUTE at=backward incarnation=1"
    )
    run = launch(tmp_path / "run", "default_device.py", "meta", STEPS, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == 3, run.explain()
    assert run.digests() == reference.digests(), run.explain()
