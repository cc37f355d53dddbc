"""Groups over HCCL, on a torch_npu without an NPU (``on_npu/torch_npu.py``): the whole story, and the bits the same."""

import json
from pathlib import Path

import memories
import pytest
from identity import assert_identical
from memories import Torchrun
from running import Reference, Run, launch

TESTS = Path(__file__).parents[1]
ENVIRON = {"PYTHONPATH": f"{TESTS}:{TESTS / 'process/on_npu'}", "RESILIENT_HCCL": "1"}
RESUME_LINKS, NEW_LINKS = "resume_links", "new_links"
STOPPED = ["stop_device", "check_uce_in_memory"]
KEPT = [*STOPPED, RESUME_LINKS, "restart_device"]
REPLACED = [*STOPPED, "restart_device", NEW_LINKS, NEW_LINKS]
"""Of the two groups of ``train.py``."""


def verbs(run: Run, rank: int, incarnation: int = 0) -> list[str]:
    """What the process told its device, but for marks and waits.

    And but for what frees a thread that waits in the device, if it does just then: another thread stops the device, and
    it is restarted at once for what stands behind the body.
    """
    told: list[str] = []
    for line in (run.run_dir / f"npu_{rank}_{incarnation}.jsonl").read_text().splitlines():
        name, arguments, by_another_thread = json.loads(line)
        assert not by_another_thread or name in ("set_device", "stop_device")
        if name == "reinit_process_group":
            name = NEW_LINKS if arguments["rebuild_link"] else RESUME_LINKS
        if name not in ("synchronize", "update_npu_tensor_to_safe"):
            told.append(name)
    freed = " ".join(["set_device", *KEPT, ""])
    return " ".join(told).replace(freed, "").replace("set_device ", "").split()


def strategies(run: Run) -> list[str]:
    return [event["detail"]["strategy"] for event in run.of("fault")]


def test_ddp(tmp_path: Path, undisturbed: Reference) -> None:
    """Memory is lost; a collective fails; a rank is killed before the update, and the other one behind it."""
    job = ("train.py", "uce:1:2,hcce:0:4", "--steps", "9")
    kills = "kill rank=1 step=6 phase=COMPUTE at=backward; kill rank=0 step=7 phase=APPLIED at=start"
    run = launch(tmp_path / "run", "over_hccl.py", *job, ranks=2, flags=("--faults", kills), **ENVIRON)
    # A rank's own state has the device's generator in it.
    reference = launch(tmp_path / "reference", "over_hccl.py", "train.py", "", "--steps", "9", ranks=2, **ENVIRON)
    assert reference.ends() == undisturbed(ranks=2, steps=9).ends()
    assert_identical(run, reference, ranks=2, recoveries=4)
    assert strategies(run) == ["UCE", "HCCE", "ARF", "ARF"], run.explain()
    assert verbs(run, 0) == [*KEPT, *KEPT, *REPLACED]
    assert verbs(run, 1) == [*KEPT, *KEPT]
    assert verbs(run, 1, 1) == REPLACED, "the other one's end, which comes in a collective behind the update"
    assert verbs(run, 0, 1) == [], "a process that joins has nothing to stop"


@pytest.mark.long
def test_hsdp(tmp_path: Path, torchrun_of: Torchrun) -> None:
    """Each part of the model is held by two ranks. Dropout draws from the device's generator."""
    job = ("hsdp.py", "uce:2:3,hcce:1:5", "--out", str(tmp_path / "out"), "--variant", "drawn")
    kills = "kill rank=0 step=8 phase=COMPUTE at=backward; kill rank=3 step=10 phase=UPDATING at=start"
    run = launch(tmp_path / "run", "over_hccl.py", *job, ranks=4, flags=("--faults", kills), **ENVIRON)
    memories.ends_as(run, torchrun_of("hsdp.py", "drawn"))
    assert strategies(run) == ["UCE", "HCCE", "ARF", "ARF"], run.explain()
    assert run.recoveries() == 4, run.explain()
