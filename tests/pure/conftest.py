"""Probes of look-alike libraries, each test with copies and a control memory of its own."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pure.probe_rig import FILES, OFF, POLL_MS, Copy, Make
from resilient_train._native import Probes
from resilient_train.testing.fake_device import VARIABLE, FakeDevice, library


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    device = FakeDevice.create(tmp_path / "device")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "device"))
    yield device
    device.heal()  # so that no thread is left inside a call
    device.close()


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """The path of a look-alike that this process has never loaded: it looks for its device when first called."""

    def copy(name: str) -> str:
        return shutil.copyfile(library(name), tmp_path / name).as_posix()

    return copy


@pytest.fixture
def make(device: FakeDevice, copy: Copy) -> Iterator[Make]:
    """Makes running probes of the named kinds."""
    made: list[Probes] = []

    def make(*kinds: str, start: bool = True, **options: object) -> Probes:
        paths = {kind: copy(FILES[kind]) for kind in kinds}
        defaults = {"poll_ms": POLL_MS, "call_limit_ms": 20_000, "open_limit_ms": 20_000, "trial": False}
        probes = Probes(**(OFF | paths | defaults | options))
        made.append(probes)
        if start:
            probes.start()
        return probes

    yield make
    device.heal()
    for probes in made:
        probes.stop()
