"""What the device's own libraries say, from dlopen to the recovered job, through the C symbols that real ones have.

The training thread is where no operation would tell it: asleep, or in a loop that never lets go of the GIL.
"""

from pathlib import Path

import pytest
from running import Run, launch

from resilient_train.testing.fake_device import library

PARAMETER = "model.0.module.0.weight"
LIBRARIES = {
    "RESILIENT_ACL_LIBRARY": str(library("libascendcl.so")),
    "RESILIENT_NVML_LIBRARY": str(library("libnvidia-ml.so.1")),
    "RESILIENT_HANG_TIMEOUT_S": "30",
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_job(tmp_path_factory.mktemp("undisturbed"))


def run_job(folder: Path, *what: str, **environ: str) -> Run:
    run = launch(folder / "run", "device.py", str(folder), *what, ranks=2, **{**LIBRARIES, **environ})
    assert run.code == 0, run.explain()
    return run


def parameters(run: Run) -> str:
    (digest,) = {digest for digest, _ in run.digests().values()}
    return digest


def alarms(run: Run) -> set[tuple[int, str, str]]:
    return {(e["rank"], e["detail"]["probe"], e["detail"]["kind"]) for e in run.of("alarm")}


def test_a_healthy_device(undisturbed: Run) -> None:
    for kind in ("uce", "alarm", "device", "probe_disabled", "fault"):
        assert undisturbed.of(kind) == []


def test_what_is_repaired_in_the_process(tmp_path: Path, undisturbed: Run) -> None:
    """Memory loses data, once under an operation and once under a sleeping thread; then the device gives a collective
    up; at last a library stops answering, which is no fault.
    """
    run = run_job(tmp_path, "raise:1:3", "sleep:1:5", "retry:1:7", "hang:1:9")
    assert [(uce["rank"], uce["detail"]["tensors"]) for uce in run.of("uce")] == [(1, [PARAMETER])] * 2
    assert [[span[1] for span in uce["detail"]["ranges"]] for uce in run.of("uce")] == [[4096]] * 2
    assert [event["detail"]["bytes"] for event in run.of("fetched")] == [64 * 64 * 4] * 2
    assert parameters(run) == parameters(undisturbed), run.explain()
    assert len(run.of("spawned")) == 2
    assert run.recoveries() == 3
    assert [event["detail"]["strategy"] for event in run.of("fault")] == ["UCE", "UCE", "HCCE"]
    assert "rank 1 repaired 2" in run.out
    assert "rank 0 repaired 0" in run.out
    assert alarms(run) == {(1, "acl", "UCE"), (1, "acl", "HCCE")}
    (disabled,) = run.of("probe_disabled")
    assert (disabled["rank"], disabled["detail"]["probe"]) == (1, "nvml")
    assert "does not return" in run.of("device")[-1]["detail"]["text"]


def test_processes_that_no_signal_reaches(tmp_path: Path, undisturbed: Run) -> None:
    """Memory loses data under a spinning thread: it can't be stopped in its step, so its process goes, when the limit
    for leaving a step is over. Then the other rank's device falls off the bus: nothing of its Python runs any more, and
    nobody asks it to.
    """
    run = run_job(tmp_path, "spin:1:4", "bus:0:8", RESILIENT_HANG_TIMEOUT_S="5")
    assert alarms(run) == {(1, "acl", "UCE"), (0, "nvml", "DEVICE")}
    assert [event["rank"] for event in run.of("spawned")][2:] == [1, 0]
    assert run.of("fault")[-1]["detail"]["reason"] == "rank 0 its device failed, says nvml"
    assert parameters(run) == parameters(undisturbed), run.explain()
