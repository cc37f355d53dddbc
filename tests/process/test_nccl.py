"""Groups over NCCL, without a GPU (``on_cuda/nccl_on_cpu.py``): the whole story, and the bits the same."""

from pathlib import Path

import memories
import pytest
from identity import assert_identical
from memories import Torchrun
from running import Reference, launch
from test_hccl import strategies

TESTS = Path(__file__).parents[1]
ENVIRON = {"PYTHONPATH": f"{TESTS}:{TESTS / 'process/on_cuda'}", "RESILIENT_NCCL": "1"}


def test_ddp(tmp_path: Path, undisturbed: Reference) -> None:
    """A collective fails; a rank is killed before the update, and the other one behind it."""
    faults = (
        "hcce rank=0 step=4 phase=COMPUTE at=start; kill rank=1 step=6 phase=COMPUTE at=backward; "
        "kill rank=0 step=7 phase=APPLIED at=start"
    )
    job = ("over_nccl.py", "train.py", "--steps", "9")
    run = launch(tmp_path / "run", *job, ranks=2, flags=("--faults", faults), **ENVIRON)
    assert_identical(run, undisturbed(ranks=2, steps=9), ranks=2, recoveries=3)
    assert strategies(run) == ["HCCE", "ARF", "ARF"], run.explain()


@pytest.mark.long
def test_hsdp(tmp_path: Path, torchrun_of: Torchrun) -> None:
    """Each part of the model is held by two ranks. What four have given behind the update gloo adds up instead of NCCL:
    it is told, for the order is another.
    """
    faults = (
        "hcce rank=1 step=5 phase=COMPUTE at=start; kill rank=0 step=8 phase=COMPUTE at=backward; "
        "kill rank=3 step=10 phase=UPDATING at=start"
    )
    job = ("over_nccl.py", "hsdp.py", "--out", str(tmp_path / "out"))
    run = launch(tmp_path / "run", *job, ranks=4, flags=("--faults", faults), **ENVIRON)
    memories.ends_as(run, torchrun_of("hsdp.py", "base"))
    assert strategies(run) == ["HCCE", "ARF", "ARF"], run.explain()
    assert run.recoveries() == 3, run.explain()
    assert [event["detail"] for event in run.of("tail_added_otherwise")] == [{"collective": "allreduce", "members": 4}]


FAULTS = {
    "kills": (
        "kill rank=0 step=3 phase=COMPUTE at=backward; kill rank=3 step=6 phase=UPDATING at=start; "
        "kill rank=1 step=9 phase=COMPUTE at=start"
    ),
    "cut": "hcce rank=2 step=4 phase=COMPUTE at=start; kill rank=2 step=7 phase=APPLIED at=start",
    "two": "kill rank=0 step=5 phase=COMPUTE at=backward; kill rank=1 step=5 phase=COMPUTE at=backward",
}
LAYOUTS = [
    ("hsdp.py", "accumulate+mixed+two"),
    ("hsdp.py", "alone"),
    ("hsdp.py", "tp+copied"),
    ("pipelined.py", "replicate"),
    ("zero.py", "base"),
]


@pytest.mark.long
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize(("job", "variant"), LAYOUTS)
def test_other_layouts(tmp_path: Path, torchrun_of: Torchrun, job: str, variant: str, faults: str) -> None:
    """FSDP and ZeRO-1 go back to a snapshot in memory."""
    in_memory = ("--save", "100", "--memory", "1") if (job, variant) in (LAYOUTS[1], LAYOUTS[4]) else ()
    options = ("--out", str(tmp_path / "out"), "--variant", variant, *in_memory)
    flags = ("--faults", FAULTS[faults])
    run = launch(tmp_path / "run", "over_nccl.py", job, *options, ranks=4, flags=flags, **ENVIRON)
    memories.ends_as(run, torchrun_of(job, variant))
