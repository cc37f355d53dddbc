"""What errors of an Ascend device mean for a recovery: their texts, their numbers, and what a rank makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train._native import ASCEND_WORDS, ascend_kind
from resilient_train.errors import DeviceError
from resilient_train.frameworks.torch_npu.errors import kind_of
from resilient_train.protocol.rank_events import Exit
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session.device_errors import DeviceErrors
from resilient_train.session.explain import Explainer

TAIL = "\n[ERROR] 2026-08-21-10:12:09 (PID:1, Device:0, RankID:1) ERR00100 PTA call acl api failed"
TEXTS = {
    # torch_npu: at the call, from the queue of operations, and at the next enqueue of a collective
    f"synchronize:c10/npu/NPUStream.cpp:1 NPU function error: UCE ERROR, error code is 507053{TAIL}": "UCE",
    "UCE ERROR happened with workEnqueue.": "UCE",
    "HBM MULTI BIT ECC ERROR. time us= 1754300000.": "UCE",
    "NPU function error: SUSPECT MEM ERROR, error code is 507055": "UCE",
    "NPU function error: HCCS LINK ERROR, error code is 507056": "LINK",
    "UB LINK ERROR happened with workEnqueue.": "LINK",
    "SUSPECT REMOTE ERROR happened with workEnqueue.": "HCCE",
    f"NPU function error: HCCL OP RETRY FAILED, error code is 507904{TAIL}": "HCCE",
    f"FORCE STOP.{TAIL}": "STOPPED",
    "NPU function error: FORCE STOP, error code is 107022": "STOPPED",
    # a number alone
    f"NPU function error: aclrtSynchronizeDeviceWithTimeout, error code is 507053{TAIL}": "UCE",
    "NPU function error: c10_npu::acl::X, error code is 507054": "UCE",
    "NPU function error: c10_npu::acl::X, error code is 507899": "DEVICE",
    "NPU function error: c10_npu::acl::X, error code is 107002": "",
    "NPU function error: c10_npu::acl::X, error code is 107020": "",
    "NPU function error: c10_npu::acl::X, error code is 99999999999": "",
    "HCCL function error: HcclAllReduce, error code is 4, ERR02200": "HCCE",
    "HCCL function error: HcclAllReduce, error code is 9, ERR02200": "HCCE",
    "HCCL function error: HcclAllReduce, error code is 1, ERR02200": "",
    "HCCL function error: HcclAllReduce, error code is 24, ERR02200": "",
    # MindSpore
    "UCEError error occurs when execute, error_code=507053.": "UCE",
    "HCCEError error occurs when execute, error_code=507904.": "HCCE",
    "HCCEError error occurs when execute": "HCCE",
    "SuspectRemoteError error occurs when execute, error_code=507057.": "HCCE",
    "ForceStopError error occurs when execute, error_code=107022.": "STOPPED",
    # nobody's but the script's
    "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x8)": "",
    "error code is 4": "",
    "There is unsafe data in the input tensor.": "",
}
HCCL = {4, 7, 9, 11, 12, 13, 14, 15, 16, 19, 21, 23}


@pytest.mark.parametrize("text", TEXTS)
def test_recorded_texts(text: str) -> None:
    assert kind_of(text) == TEXTS[text]


def test_words_and_numbers_are_one_table() -> None:
    """torch_npu's words, and the number that its sources give them."""
    numbers = {
        "UCE ERROR": 507053,
        "HBM MULTI BIT ECC": 507054,
        "SUSPECT MEM ERROR": 507055,
        "HCCS LINK ERROR": 507056,
        "SUSPECT REMOTE ERROR": 507057,
        "HCCL OP RETRY FAILED": 507904,
        "FORCE STOP": 107022,
    }
    assert {words: ascend_kind("acl", code) for words, code in numbers.items()}.items() <= dict(ASCEND_WORDS).items()
    assert {code for code in range(30) if ascend_kind("hccl", code) == "HCCE"} == HCCL
    assert [code for code in range(30) if ascend_kind("hccl", code) == "STOPPED"] == [22]


def test_words_are_those_of_the_wheel() -> None:
    """And what is called of HCCL's backend, which is in no Python file."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("reads the libraries of torch_npu 2.13.0; see CONTRIBUTING.md")
    package = Path(next(iter(spec.submodule_search_locations)))
    compiled = b"".join(path.read_bytes() for path in (package / "lib/libtorch_npu.so", *package.glob("_C*.so")))
    its_own = [words for words, _ in ASCEND_WORDS if words.isupper()]
    assert len(its_own) == 8
    called = ("get_hccl_comm", "get_hccl_comm_name", "init_comm", "resume_hccl_comm", "abort_hccl_comm")
    missing = [words for words in (*its_own, *called) if words.encode() not in compiled]
    assert missing == []


def explained(kind: str, phase: Phase, *, mends: bool = True) -> Exit:
    peers: Any = SimpleNamespace(rank=1, clear_alarms=lambda: None, stop_raised=lambda _: False)
    nothing_found = {"errors": lambda *, wait: [], "notes": list}
    device = DeviceErrors(peers, SimpleNamespace(kind_of=lambda _: kind, **nothing_found), print, mends=mends)  # type: ignore[arg-type] # what is asked of a device here
    groups: Any = SimpleNamespace(broken=lambda: False)
    explainer = Explainer(peers, groups, device, SimpleNamespace(damaged=None))  # type: ignore[arg-type] # likewise
    return explainer.exit(RuntimeError("it failed"), Standing(3, phase), 0, redoes=False)


def test_before_the_update() -> None:
    text = "RuntimeError: it failed"
    for kind in ("HCCE", "LINK", "STOPPED"):
        assert explained(kind, Phase.COMPUTE) == Exit("fault", text)
    assert explained("UCE", Phase.COMPUTE) == Exit("fault", text, damaged=True)
    assert explained("", Phase.COMPUTE) == Exit("error", text)
    with pytest.raises(DeviceError, match=r"rank 1: its device failed .* RuntimeError: it failed; this process ends"):
        explained("DEVICE", Phase.COMPUTE)


def test_in_the_update_and_behind_it() -> None:
    """Torn memory is copied anew; a step whose update is written can't be left, so the process is replaced."""
    assert explained("UCE", Phase.UPDATING) == Exit("fault", "RuntimeError: it failed", damaged=True)
    for kind in ("HCCE", "LINK", "STOPPED", "DEVICE"):
        for phase in (Phase.UPDATING, Phase.APPLIED):
            with pytest.raises(DeviceError):
                explained(kind, phase)
    with pytest.raises(DeviceError):
        explained("UCE", Phase.APPLIED)
    assert explained("", Phase.APPLIED).how == "error"


def test_a_memory_error_that_is_not_to_be_mended_is_the_scripts() -> None:
    assert explained("UCE", Phase.COMPUTE, mends=False).how == "error"
