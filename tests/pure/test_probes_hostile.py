"""Libraries that are absent, hang, lie or crash cost their probe, never the process."""

import os
import signal
import time
from pathlib import Path

import pytest

from pure.probe_rig import (
    COMM,
    LIMIT_MS,
    OFF,
    POLL_MS,
    Copy,
    Make,
    eventually,
    let_it_poll,
    thread_names,
    wait_for,
    wait_for_one,
)
from resilient_train._native import Probes
from resilient_train.testing.fake_device import FakeDevice


def test_missing_library_is_absence_not_fault() -> None:
    probes = Probes(**(OFF | {"hccl": "libresilient_no_such.so", "nccl": "libm.so.6"}), poll_ms=1)
    probes.start()
    eventually(lambda: all(status.state == "absent" for status in probes.status()))
    missing, wrong = probes.status()
    assert "libresilient_no_such.so" in missing.reason
    assert "none of the symbols" in wrong.reason
    assert "ncclCommGetAsyncError" in wrong.missing
    assert probes.take() == []
    with pytest.raises(RuntimeError, match="libresilient_no_such"):
        probes.suspend_comm(COMM)
    assert probes.stop() == []


def test_missing_symbols_cost_their_ability_only(make: Make, device: FakeDevice, copy: Copy) -> None:
    probes = make("acl", acl=copy("libascendcl_old.so"))
    let_it_poll(probes)
    assert set(probes.status()[0].missing) == {
        "aclrtGetMemUceInfo",
        "aclrtMemUceRepair",
        "aclrtGetErrorVerbose",
    }
    with pytest.raises(RuntimeError, match="has no aclrtMemUceRepair"):
        probes.repair_memory([(8, 8)])
    device.set_last_error(507904)
    assert wait_for_one(probes).kind == "HCCE"


def test_question_that_the_device_does_not_support(make: Make, device: FakeDevice) -> None:
    device.fail("aclrtGetMemUceInfo", 207000)
    probes = make("acl")
    let_it_poll(probes)
    assert any("not supported" in each for each in probes.status()[0].missing)
    assert device.count("aclrtGetMemUceInfo") == 1
    assert probes.take() == []


@pytest.mark.parametrize(
    ("kind", "function"),
    [("hccl", "HcclGetCommAsyncError"), ("acl", "aclrtPeekAtLastError"), ("nccl", "ncclCommGetAsyncError")],
)
def test_call_that_never_returns_disables_its_probe(make: Make, device: FakeDevice, kind: str, function: str) -> None:
    probes = make(kind, "nvml", call_limit_ms=LIMIT_MS)
    if kind != "acl":
        probes.add_comm(kind, COMM)
    let_it_poll(probes)
    start = time.monotonic()
    device.hang(function)
    finding = wait_for_one(probes)
    assert time.monotonic() - start >= LIMIT_MS / 1000
    assert (finding.kind, finding.probe, finding.text) == ("DISABLED", kind, f"{function} does not return")
    stuck, other = probes.status()
    assert (stuck.state, stuck.reason, other.state) == ("disabled", finding.text, "polling")
    if kind != "acl":
        assert not probes.remove_comm(kind, COMM, limit_ms=1)
        with pytest.raises(RuntimeError, match="does not return"):
            (probes.destroy_comm if kind == "hccl" else probes.abort_comm)(COMM, limit_ms=1)
    start = time.monotonic()
    assert probes.stop() == [kind]
    assert time.monotonic() - start < 5
    assert probes.stop() == []


def test_stop_is_bounded_though_nobody_has_noticed_the_hang_yet(make: Make, device: FakeDevice) -> None:
    device.hang("aclrtPeekAtLastError")
    probes = make("acl", call_limit_ms=1_500)
    eventually(lambda: device.count("aclrtPeekAtLastError") == 1)
    start = time.monotonic()
    assert probes.stop() == ["acl"]
    assert time.monotonic() - start < 5
    assert probes.take() == []


def test_dropped_probes_leave_a_stuck_thread_its_memory(make: Make, device: FakeDevice, copy: Copy) -> None:
    probes = Probes(**(OFF | {"acl": copy("libascendcl.so")}), poll_ms=1, call_limit_ms=20, trial=False)
    device.hang("aclrtPeekAtLastError")
    probes.start()
    wait_for_one(probes)
    del probes
    device.heal()
    eventually(lambda: "rt-probe" not in thread_names())


def test_verb_that_never_returns_is_bounded(make: Make, device: FakeDevice) -> None:
    probes = make("hccl")
    with device.hanging("HcclCommSuspend"), pytest.raises(TimeoutError):
        probes.suspend_comm(COMM, limit_ms=20)
    for bad in (-1, 3_600_001):
        with pytest.raises(ValueError, match="limit_ms"):
            probes.suspend_comm(COMM, limit_ms=bad)


@pytest.mark.parametrize(
    ("kind", "function", "reason"),
    [
        ("hccl", "HcclGetCommAsyncError", "reported -559038737"),
        ("acl", "aclrtPeekAtLastError", "gave -1"),
        ("acl", "aclrtGetMemUceInfo", "1000000007 ranges"),
        ("nccl", "ncclCommGetAsyncError", "reported"),
        ("nvml", "nvmlEventSetWait_v2", "XID"),
    ],
)
def test_garbage_disables(make: Make, device: FakeDevice, kind: str, function: str, reason: str) -> None:
    device.garbage(function)
    probes = make(kind)
    if kind in {"hccl", "nccl"}:
        probes.add_comm(kind, COMM)
    finding = wait_for_one(probes)
    assert finding.kind == "DISABLED"
    assert reason in finding.text
    assert probes.status()[0].reason == finding.text


def test_writing_behind_the_array_disables(make: Make, device: FakeDevice) -> None:
    device.overrun("aclrtGetMemUceInfo")
    assert "behind" in wait_for_one(make("acl")).text


@pytest.mark.parametrize("bad", [(0, 8), (4096, 0), (4096, 2**41), (2**64 - 8, 64)])
def test_impossible_ranges_disable(make: Make, device: FakeDevice, bad: tuple[int, int]) -> None:
    device.set_uce([bad], pid=1)  # of another process: nothing is written there
    finding = wait_for_one(make("acl"))
    assert finding.kind == "DISABLED"
    assert str(bad[1]) in finding.text


def test_too_many_ranges_in_the_detailed_report_disable(make: Make, device: FakeDevice) -> None:
    device.garbage("aclrtGetErrorVerbose")
    device.set_detail(1, repairable=False)
    probes = make("acl")
    device.set_last_error(507053)
    assert "1000 ranges" in wait_for_one(probes).text


@pytest.mark.parametrize("endless", [False, True])
@pytest.mark.parametrize("kind", ["hccl", "nccl"])
def test_error_gets_through_though_its_text_is_garbage(
    make: Make, device: FakeDevice, kind: str, endless: bool
) -> None:
    function = {"hccl": "HcclGetErrorString", "nccl": "ncclGetErrorString"}[kind]
    device.garbage(function)
    device.fail(function, int(endless))
    device.set_comm_error(5)
    probes = make(kind)
    probes.add_comm(kind, COMM)
    error, disabled = wait_for(probes, 2)
    assert (error.kind, error.code, disabled.kind) == ("HCCE", 5, "DISABLED")
    assert "no readable text" in disabled.text


def test_calls_that_keep_failing_disable(make: Make, device: FakeDevice) -> None:
    device.fail("aclrtGetMemUceInfo", 107002)
    finding = wait_for_one(make("acl"))
    assert (finding.kind, finding.code) == ("DISABLED", 0)
    assert "failed 3 times in a row, last with 107002" in finding.text
    assert device.count("aclrtGetMemUceInfo") == 3


def test_crash_in_the_trial_costs_the_probe_only(make: Make, device: FakeDevice) -> None:
    device.crash("aclrtGetMemUceInfo")
    finding = wait_for_one(make("acl", trial=True))
    assert (finding.kind, finding.text) == ("DISABLED", "the trial call ended with Segmentation fault")
    assert [call for call in device.calls() if call.pid == os.getpid()] == []


def test_trial_that_never_returns(make: Make, device: FakeDevice) -> None:
    device.hang("aclrtPeekAtLastError")
    probes = make("acl", trial=True, open_limit_ms=50)
    assert wait_for_one(probes).text == "the trial call did not return"
    assert probes.stop() == []


def test_stop_does_not_wait_for_a_trial(make: Make, device: FakeDevice) -> None:
    device.hang("aclrtPeekAtLastError")
    probes = make("acl", trial=True, call_limit_ms=10_000)
    eventually(lambda: device.count("aclrtPeekAtLastError") == 1)
    assert probes.stop() == []
    assert (probes.take(), probes.status()[0].state) == ([], "stopped")


def test_trial_happens_once_per_loaded_library(device: FakeDevice, copy: Copy) -> None:
    path = copy("libascendcl.so")
    for round_number in range(2):
        probes = Probes(**(OFF | {"acl": path}), poll_ms=POLL_MS)
        probes.start()
        let_it_poll(probes)
        assert probes.take() == []
        probes.stop()
        foreign = {call.pid for call in device.calls()} - {os.getpid()}
        assert len(foreign) == 1, round_number


def test_forked_child_can_do_no_harm(make: Make, device: FakeDevice) -> None:
    probes = make("acl", "hccl")
    device.set_last_error(507053)
    wait_for_one(probes)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            quiet = (probes.take(), probes.status(), probes.stop()) == ([], [], [])
            probes.rearm()
            refused = 0
            for verb in (probes.start, lambda: probes.repair_memory([(64, 8)]), lambda: probes.add_comm("hccl", COMM)):
                try:
                    verb()
                except RuntimeError:
                    refused += 1
            code = 0 if quiet and refused == 3 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    let_it_poll(probes)
    probes.rearm()
    assert wait_for_one(probes).kind == "UCE"


def test_threads_take_no_signals_and_have_names(make: Make) -> None:
    let_it_poll(make("acl"))
    assert {"rt-probe", "rt-probe-watch"} <= set(thread_names())
    for path in Path("/proc/self/task").glob("*/comm"):
        if path.read_text().startswith("rt-probe"):
            status = dict(line.split(":\t") for line in (path.parent / "status").read_text().splitlines())
            blocked = int(status["SigBlk"], 16)
            assert all(blocked >> (number - 1) & 1 for number in (signal.SIGURG, signal.SIGTERM, signal.SIGINT))


@pytest.mark.parametrize(
    "bad", [{"poll_ms": 0}, {"poll_ms": 60_001}, {"call_limit_ms": 0}, {"open_limit_ms": 0}, {"device": 2**31}]
)
def test_bad_options(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Probes(**(OFF | bad))


def test_wrong_use() -> None:
    probes = Probes(**OFF)
    with pytest.raises(ValueError, match="switched off"):
        probes.add_comm("hccl", COMM)
    with pytest.raises(ValueError, match="hccl and nccl"):
        probes.add_comm("gloo", COMM)
    probes.start()
    with pytest.raises(RuntimeError, match="started before"):
        probes.start()
    assert probes.stop() == []
    with pytest.raises(RuntimeError, match="started before"):
        probes.start()
