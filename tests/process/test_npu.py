"""torch_npu's verbs in real recoveries: a recorder in its place, everything else as ever, and the bits the same."""

import json
from pathlib import Path
from typing import Any

from identity import assert_identical
from running import Reference, Run, launch

TESTS = Path(__file__).parents[1]
STOP, CHECK, RESTART = "stop_device", "check_uce_in_memory", "restart_device"
RESUME_LINKS, NEW_LINKS = "resume links", "new links"
KEPT = [STOP, CHECK, RESUME_LINKS, RESTART]
REPLACED = [STOP, CHECK, RESTART, NEW_LINKS]


def journal(run: Run, rank: int, incarnation: int) -> list[tuple[str, dict[str, Any]]]:
    lines = (run.run_dir / f"npu_{rank}_{incarnation}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def verbs(run: Run, rank: int, incarnation: int) -> list[str]:
    """What the process told its device in recoveries; the marks of one mending count once."""
    told: list[str] = []
    for name, arguments in journal(run, rank, incarnation):
        verb = name
        if name in ("is_initialized", "current_device"):
            assert not told, "the device is known from the start"
        if name in ("is_initialized", "current_device", "synchronize"):
            continue
        if name == "reinit_process_group":
            verb = NEW_LINKS if arguments["rebuild_link"] else RESUME_LINKS
        if verb != "update_npu_tensor_to_safe" or told[-1] != verb:
            told.append(verb)
    return told


def test_recoveries(tmp_path: Path, undisturbed: Reference) -> None:
    """Memory is lost; then a collective fails, and in that recovery a device does not stop: its process is replaced."""
    plan = "uce rank=1 step=3 phase=COMPUTE at=forward target=param; hcce rank=1 step=5 phase=COMPUTE at=forward"
    run = launch(tmp_path / "run", "npu.py", "--steps", "9", ranks=2, flags=("--faults", plan), PYTHONPATH=str(TESTS))
    assert_identical(run, undisturbed(ranks=2, steps=9), ranks=2, recoveries=2)
    assert verbs(run, 0, 0) == [*KEPT, STOP]
    (failed,) = run.of("device_failed")
    assert failed["rank"] == 0
    assert "stop_device(3) answered 1" in failed["detail"]["error"]
    assert [(event["rank"], event["incarnation"]) for event in run.of("spawned")[2:]] == [(0, 1)]
    assert verbs(run, 0, 1) == [], "a process that joins has nothing to stop"
    # It may have noticed both of the last two stops, or the second alone.
    marked = [*KEPT, "update_npu_tensor_to_safe"]
    assert verbs(run, 1, 0) in ([*marked, *REPLACED], [*marked, STOP, CHECK, *REPLACED[1:]])
    waits = [name for name, _ in journal(run, 1, 0)].count("synchronize")
    assert waits >= 2 * 9, "before READY and before APPLIED of each step"
