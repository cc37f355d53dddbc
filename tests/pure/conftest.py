"""What several files test with: refused commands; probes of look-alike libraries, each with a control memory."""

import gc
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from pure.probe_rig import FILES, OFF, POLL_MS, Copy, Make
from resilient_train._native import Probes
from resilient_train.testing.fake_device import VARIABLE, FakeDevice, library

settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")


@pytest.fixture
def as_in_a_fork() -> Iterator[None]:
    """What there is now, the collector does not look at: pytest holds half a million objects, a rank its script's."""
    from resilient_train.frameworks.torch.watching import listed_objects  # not where there is no torch

    gc.freeze()
    listed_objects._in_fork()
    yield
    gc.unfreeze()


@pytest.fixture
def refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[list[str], str], None]:
    """Runs ``resilient-train`` in an empty directory: it must say ``words`` in one line, and end with exit code 2."""

    def refused(arguments: list[str], words: str) -> None:
        from resilient_train.launch.cli.tool import main

        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("resilient-train: ")
        assert err.count("\n") == 1
        assert words in err

    return refused


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


@pytest.fixture(autouse=True)
def nobody_looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """At the operations of the next test: behind a loop that has not begun, or not come to its end."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    for owner, name in (
        *((torch.Tensor, name) for name in ("tolist", "numpy", "__dlpack__")),
        (torch.autograd, "_engine_run_backward"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    yield
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
