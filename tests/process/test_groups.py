"""Groups that the user holds stay the same objects and keep working: DeviceMesh, new_group, functional collectives."""

import json
import sys
from pathlib import Path

from running import JOBS, free_port, launch, start
from shared import Undisturbed


def test_groups_of_the_users_survive(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    undisturbed = undisturbed_of("groups.py", ranks=4)
    plan = "kill rank=3 step=2 phase=COMPUTE at=start"
    plan += "; hcce rank=1 step=4 phase=COMPUTE at=start"  # rank 3 has destroyed its group, and rank 0 not
    plan += "; kill rank=0 step=6 phase=READY at=barrier"  # both have, and rank 0 makes it anew
    run = launch(tmp_path / "run", "groups.py", ranks=4, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 3
    assert {rank: params for rank, (params, _) in run.digests().items()} == {
        rank: params for rank, (params, _) in undisturbed.digests().items()
    }


def test_what_counts_as_a_failed_collective() -> None:
    """Told by the state of the group's connections, never by the error's text."""
    with free_port() as port, start([sys.executable, str(JOBS / "gloo_failures.py"), str(port)]) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out) == {"healthy": "intact", "timeout": "broken", "shut": "broken", "death": "broken"}
