"""The look-alike libraries and their control memory; our declarations against the vendor's."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from pure.probe_rig import COMM, OFF, Copy, Make, let_it_poll
from resilient_train._native import Probes
from resilient_train.testing.fake_device import FUNCTIONS, VARIABLE, DeviceCall, FakeDevice


def test_control_memory_is_checked(tmp_path: Path, device: FakeDevice) -> None:
    (tmp_path / "other").write_bytes(bytes(15_192))
    with pytest.raises(ValueError, match="version 1"):
        FakeDevice(tmp_path / "other")
    again = FakeDevice(tmp_path / "device")
    device.set_comm_error(9)
    assert again.calls() == []
    again.close()
    with pytest.raises(ValueError, match="128 at most"):
        device.set_uce([(8, 8)] * 129)


def test_numbers_of_functions_are_those_of_the_look_alikes() -> None:
    source = (Path(__file__).parents[2] / "csrc/fake/control.hpp").read_text()
    listed = [
        line.strip().rstrip(",") for line in source.partition("enum class Function")[2].partition("};")[0].splitlines()
    ]
    assert [line for line in listed if " = " in line] == [f"{name} = {at}" for at, name in enumerate(FUNCTIONS)]


def test_healthy_without_control_memory(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    probes = Probes(**(OFF | {"acl": copy("libascendcl.so"), "hccl": copy("libhccl.so")}), poll_ms=1, trial=False)
    probes.add_comm("hccl", COMM)
    probes.start()
    let_it_poll(probes)
    assert probes.take() == []
    assert probes.stop() == []


def test_ring_keeps_the_newest_calls(make: Make, device: FakeDevice) -> None:
    let_it_poll(make("acl"), polls=200)
    calls = device.calls("aclrtPeekAtLastError")
    assert 0 < len(calls) <= 256
    assert calls[-1].number > 256
    assert all(isinstance(call, DeviceCall) and call.pid == os.getpid() for call in calls)


def test_declarations_are_those_of_the_vendor(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("torch_npu")
    compiler = shutil.which("c++")
    if spec is None or spec.submodule_search_locations is None or compiler is None:
        pytest.skip("compares with the headers inside the torch_npu wheel, by the compiler; one of them is missing")
    include = Path(next(iter(spec.submodule_search_locations))) / "include"
    folders = [include, include / "third_party/acl/inc", include / "third_party/hccl/inc"]
    sources = Path(__file__).parents[2] / "csrc"
    command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{sources}", sources / "tests/abi_test.cpp"]
    command += [part for folder in folders for part in ("-isystem", folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
