"""What the probes find in look-alike libraries (``csrc/fake``), and what a recovery asks of them."""

import os
import threading
import time

import pytest

from pure.probe_rig import COMM, Make, eventually, let_it_poll, tensor, wait_for_one
from resilient_train.testing.fake_device import POISON, FakeDevice


def test_memory_error_comes_with_its_ranges_and_really_destroys_the_bytes(make: Make, device: FakeDevice) -> None:
    probes = make("acl", device=3)
    let_it_poll(probes)
    array, address = tensor()
    before = time.time_ns()
    device.set_uce([(address + 16, 64), (address + 1024, 8)])
    finding = wait_for_one(probes)
    assert (finding.kind, finding.probe, finding.code, finding.comm) == ("UCE", "acl", 507053, 0)
    assert finding.ranges == [(address + 16, 64), (address + 1024, 8)]
    assert "memory" in finding.text
    assert before <= finding.time_ns <= time.time_ns()
    assert device.poisonings == 1
    hit = {*range(16, 80), *range(1024, 1032)}
    assert all(array[at] == (7 ^ POISON if at in hit else 7) for at in range(len(array)))


def test_memory_error_without_a_code_is_seen_by_its_ranges(make: Make, device: FakeDevice) -> None:
    """On real devices the last error belongs to a thread, and is not the probe's."""
    probes = make("acl")
    _array, address = tensor()
    device.set_last_error(507054, tid=threading.get_native_id())
    device.set_uce([(address, 4)], code=0)
    assert wait_for_one(probes).code == 507053


def test_repair_clears_the_ranges_and_only_those(make: Make, device: FakeDevice) -> None:
    probes = make("acl")
    array, address = tensor()
    ranges = [(address, 4), (address + 100, 4)]
    device.set_uce(ranges)
    finding = wait_for_one(probes)
    assert probes.repair_memory([(address, 5)]) != 0, "nobody knows that range"
    assert device.ranges == ranges
    assert probes.repair_memory(finding.ranges[:1]) == 0
    assert device.ranges == ranges[1:]
    assert probes.repair_memory(finding.ranges[1:]) == 0
    assert device.ranges == []
    assert array[0] == 7 ^ POISON, "repairing memory brings no bytes back"
    let_it_poll(probes)
    probes.take()
    probes.rearm()
    let_it_poll(probes)
    assert probes.take() == []


def test_full_list_of_ranges(make: Make, device: FakeDevice) -> None:
    probes = make("acl")
    _array, address = tensor()
    ranges = [(address + 8 * index, 8) for index in range(128)]
    device.set_uce(ranges)
    assert wait_for_one(probes).ranges == ranges
    assert probes.repair_memory(ranges) == 0
    for bad in ([], [*ranges, (address, 1)]):
        with pytest.raises(ValueError, match=r"1\.\.128"):
            probes.repair_memory(bad)


def test_fault_is_told_once_and_again_after_rearming(make: Make, device: FakeDevice) -> None:
    probes = make("acl")
    device.set_last_error(507056)
    assert wait_for_one(probes).kind == "LINK"
    let_it_poll(probes)
    assert probes.take() == []
    probes.rearm()
    assert wait_for_one(probes).kind == "LINK"
    device.set_last_error(0)
    let_it_poll(probes)
    device.set_last_error(507056)
    assert wait_for_one(probes).kind == "LINK"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (107022, "STOPPED"),
        (507053, "UCE"),
        (507054, "UCE"),
        (507055, "UCE"),
        (507056, "LINK"),
        (507057, "HCCE"),
        (507904, "HCCE"),
        (507014, "DEVICE"),
    ],
)
def test_codes_of_the_runtime(make: Make, device: FakeDevice, code: int, kind: str) -> None:
    probes = make("acl")
    device.set_last_error(code)
    finding = wait_for_one(probes)
    assert (finding.kind, finding.code, finding.ranges) == (kind, code, [])


def test_codes_that_are_the_programs_own_business(make: Make, device: FakeDevice) -> None:
    probes = make("acl")
    for code in (0, 1, 100000, 107002, 207001, 506999, 508000, 2**31 - 1):
        device.set_last_error(code)
        let_it_poll(probes)
    assert probes.take() == []


def test_collective_error_of_one_communicator(make: Make, device: FakeDevice) -> None:
    probes = make("hccl", "nccl")
    probes.add_comm("hccl", COMM)
    probes.add_comm("hccl", COMM + 1)
    probes.add_comm("nccl", COMM + 2)
    device.set_comm_error(23, comm=COMM + 1)
    finding = wait_for_one(probes)
    assert (finding.kind, finding.probe, finding.code, finding.comm) == ("HCCE", "hccl", 23, COMM + 1)
    assert finding.text == "collective ? error"
    device.set_comm_error(6, comm=COMM + 2)
    finding = wait_for_one(probes)
    assert (finding.kind, finding.probe, finding.code, finding.comm) == ("HCCE", "nccl", 6, COMM + 2)


@pytest.mark.parametrize(("kind", "code"), [("hccl", 20), ("nccl", 7)])
def test_work_in_progress_is_no_error(make: Make, device: FakeDevice, kind: str, code: int) -> None:
    probes = make(kind)
    probes.add_comm(kind, COMM)
    device.set_comm_error(code)
    let_it_poll(probes)
    assert probes.take() == []


def test_verbs_arrive_with_their_arguments_in_order(make: Make, device: FakeDevice) -> None:
    probes = make("hccl", "acl", "nccl", device=5)
    let_it_poll(probes)
    assert probes.suspend_comm(COMM) == 0
    assert probes.repair_memory([(64, 8)]) != 0
    assert probes.resume_comm(COMM) == 0
    assert probes.destroy_comm(COMM) == 0
    assert probes.abort_comm(COMM + 1, limit_ms=0) == 0
    device.fail("HcclCommResume", 4)
    assert probes.resume_comm(COMM) == 4
    verbs = [
        call for call in device.calls(pid=os.getpid()) if "Get" not in call.function and "Peek" not in call.function
    ]
    assert [(call.function, call.arguments[:3]) for call in verbs] == [
        ("HcclCommSuspend", (COMM, 0, 0)),
        ("aclrtMemUceRepair", (5, 1, 64)),
        ("HcclCommResume", (COMM, 0, 0)),
        ("HcclCommDestroy", (COMM, 0, 0)),
        ("ncclCommAbort", (COMM + 1, 0, 0)),
        ("HcclCommResume", (COMM, 0, 0)),
    ]


def test_destroyed_communicator_is_not_looked_at_any_more(make: Make, device: FakeDevice) -> None:
    probes = make("hccl")
    probes.add_comm("hccl", COMM)
    eventually(lambda: device.count("HcclGetCommAsyncError") > 2)
    assert probes.destroy_comm(COMM) == 0
    after = [call.function for call in device.calls()]
    let_it_poll(probes)
    assert [call.function for call in device.calls()][len(after) :] == []
    assert after[-1] == "HcclCommDestroy"


def test_nvml_counts_growth_and_hears_xids(make: Make, device: FakeDevice) -> None:
    device.set_ecc_errors(40)
    probes = make("nvml", uuid="GPU-7")
    let_it_poll(probes)
    assert probes.take() == []
    device.set_ecc_errors(43)
    assert (finding := wait_for_one(probes)).kind == "UCE"
    assert finding.text.startswith("3 more")
    device.set_ecc_errors(0)  # a reset
    let_it_poll(probes)
    for xid, kind in ((48, "UCE"), (74, "LINK"), (79, "DEVICE")):
        device.send_xid(xid)
        assert ((finding := wait_for_one(probes)).kind, finding.code) == (kind, xid)
    for xid in (13, 31, 43, 45):
        device.send_xid(xid)
        let_it_poll(probes)
    assert probes.take() == []
    device.fail("nvmlDeviceGetTotalEccErrors", 15)
    assert "bus" in wait_for_one(probes).text


def test_no_finding_in_many_clean_polls(make: Make, device: FakeDevice) -> None:
    probes = make("hccl", "acl", "nccl", "nvml")
    probes.add_comm("hccl", COMM)
    probes.add_comm("nccl", COMM)
    let_it_poll(probes, polls=200)
    assert probes.take() == []
    assert [status.state for status in probes.status()] == ["polling"] * 4
    assert device.count("HcclGetCommAsyncError") >= 200


def test_slow_calls_are_no_fault(make: Make, device: FakeDevice) -> None:
    device.delay("aclrtPeekAtLastError", 20_000)
    probes = make("acl", call_limit_ms=1000)
    let_it_poll(probes)
    assert probes.take() == []
