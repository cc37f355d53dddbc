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
    return run_job(tmp_path_factory.mktemp("undisturbed"), "")


def run_job(folder: Path, what: str, **environ: str) -> Run:
    arguments = (str(folder), what) if what else (str(folder),)
    run = launch(folder / "run", "device.py", *arguments, ranks=2, **{**LIBRARIES, **environ})
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


@pytest.mark.parametrize("what", ["sleep", "raise"])
def test_memory_that_lost_data(tmp_path: Path, undisturbed: Run, what: str) -> None:
    run = run_job(tmp_path, what)
    (uce,) = run.of("uce")
    assert (uce["rank"], uce["detail"]["tensors"]) == (1, [PARAMETER])
    assert [span[1] for span in uce["detail"]["ranges"]] == [4096]
    assert [event["detail"]["bytes"] for event in run.of("fetched")] == [64 * 64 * 4]
    assert parameters(run) == parameters(undisturbed), run.explain()
    assert len(run.of("spawned")) == 2
    assert run.recoveries() == 1
    assert "rank 1 repaired 1" in run.out
    assert "rank 0 repaired 0" in run.out
    assert what == "raise" or alarms(run) == {(1, "acl", "UCE")}


def test_device_that_fell_off_the_bus(tmp_path: Path, undisturbed: Run) -> None:
    """Nothing of the rank's Python runs any more, and nobody asks it to."""
    run = run_job(tmp_path, "bus")
    assert alarms(run) == {(1, "nvml", "DEVICE")}
    assert [event["rank"] for event in run.of("spawned")][2:] == [1]
    (fault,) = run.of("fault")
    assert fault["detail"]["reason"] == "rank 1 its device failed, says nvml"
    assert parameters(run) == parameters(undisturbed), run.explain()


def test_memory_that_lost_data_under_a_spinning_thread(tmp_path: Path, undisturbed: Run) -> None:
    """It can't be stopped in its step, so its process goes, when the limit for leaving a step is over."""
    run = run_job(tmp_path, "spin", RESILIENT_HANG_TIMEOUT_S="2")
    assert alarms(run) == {(1, "acl", "UCE")}
    assert [event["rank"] for event in run.of("spawned")][2:] == [1]
    assert parameters(run) == parameters(undisturbed), run.explain()


def test_collective_that_the_device_gave_up(tmp_path: Path, undisturbed: Run) -> None:
    run = run_job(tmp_path, "retry")
    assert alarms(run) == {(1, "acl", "HCCE")}
    assert len(run.of("spawned")) == 2
    assert run.recoveries() == 1
    assert parameters(run) == parameters(undisturbed), run.explain()


def test_library_that_stops_answering(tmp_path: Path, undisturbed: Run) -> None:
    run = run_job(tmp_path, "hang")
    (disabled,) = run.of("probe_disabled")
    assert (disabled["rank"], disabled["detail"]["probe"]) == (1, "nvml")
    assert "does not return" in run.of("device")[-1]["detail"]["text"]
    assert run.recoveries() == 0
    assert parameters(run) == parameters(undisturbed)
