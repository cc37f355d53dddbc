"""Every way to write a loop that the Session promises to repair, each with kills in its awkward places."""

import json
from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, launch
from torch.nn.parallel import DistributedDataParallel

EVERYWHERE = (
    "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=7 phase=UPDATING; "
    "kill rank=2 step=9 phase=APPLIED at=end"
)
IN_BODY_ONLY = (
    "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=7 phase=COMPUTE at=forward; "
    "kill rank=2 step=9 phase=READY at=barrier"
)


FROM_THE_START = (
    "kill rank=1 step=0 phase=COMPUTE at=backward; kill rank=0 step=1 phase=COMPUTE at=backward; "
    "kill rank=2 step=2 phase=COMPUTE at=backward; kill rank=1 step=5 phase=UPDATING incarnation=1"
)
"""Where DDP's layout is decided: after the first pass, and after the second of a static graph."""
BOTH = (
    "kill rank=1 step=0 phase=COMPUTE at=backward; kill rank=0 step=1 phase=COMPUTE at=backward; "
    "kill rank=2 step=2 phase=COMPUTE at=backward; kill rank=1 step=5 phase=COMPUTE at=backward incarnation=1; "
    "kill rank=0 step=7 phase=UPDATING incarnation=1; kill rank=2 step=9 phase=APPLIED at=end incarnation=1"
)

LOOPS = [
    ("accumulate+view+stateful+two", BOTH),
    ("before+shuffle+unused+workers", EVERYWHERE),
    ("gan", IN_BODY_ONLY),
]
ALONE = [
    ("accumulate+static", FROM_THE_START),
    *((each, EVERYWHERE) for each in ("accumulate", "view", "two", "stateful", "before", "shuffle", "unused")),
    *((each, EVERYWHERE) for each in ("workers", "static", "two+workers")),
    *((each, IN_BODY_ONLY) for each in ("scaler", "undo")),
    *((each, FROM_THE_START) for each in ("base", "view", "static")),
]
"""Each difference alone, to tell which one is to blame."""
if hasattr(DistributedDataParallel, "finalize_backward"):  # torch 2.15, or later
    LOOPS.append(("lazy+manual", BOTH))
    ALONE += [("lazy", FROM_THE_START), ("manual", FROM_THE_START)]
LOOPS += [pytest.param(*each, marks=pytest.mark.long) for each in ALONE]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("variant", "plan"), LOOPS)
def test_loop(tmp_path: Path, undisturbed: Reference, variant: str, plan: str) -> None:
    arguments = ("--steps", "12", "--variant", variant)
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=3, flags=("--faults", plan), timeout_s=170)
    reference = undisturbed(ranks=3, variant=variant, steps=12)
    faults = plan.count("kill ")
    assert len(run.of("injected")) == faults, run.explain()
    # With undo the update is committed at the end of the body, after the job has written its record.
    assert_identical(run, reference, ranks=3, recoveries=faults, once=variant not in ("gan", "undo"))


@pytest.mark.timeout(180)
def test_tail_and_between_steps(tmp_path: Path, undisturbed: Reference) -> None:
    """Scheduler, EMA and two collectives after the update, a barrier between steps, kills right there."""
    plan = (
        "kill rank=0 step=3 phase=APPLIED; kill rank=1 step=5 phase=APPLIED at=end; kill rank=2 step=8 phase=BETWEEN; "
        "kill rank=0 step=10 phase=UPDATING at=end incarnation=1"
    )
    run = launch(
        tmp_path / "run", "train.py", "--steps", "12", "--between", ranks=3, flags=("--faults", plan), timeout_s=170
    )
    assert_identical(run, undisturbed(ranks=3, steps=12, extra=("--between",)), ranks=3, recoveries=4)
    # A collective behind the update that a fault cuts gives every rank the same result, and the exact one if the dead
    # rank had come to it.
    means: dict[int, set[float]] = {}
    for rank in range(3):
        for line in (run.run_dir / f"samples_rank{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            means.setdefault(record["step"], set()).add(record["mean"])
    assert all(len(values) == 1 for values in means.values()), means
    missing = [event["detail"] for event in run.of("tail_input_missing")]
    told = {"of": 0, "replica": False}
    assert missing == [{"collective": "allreduce", **told}, {"collective": "allgather", **told}] * 2
