"""What is trained lies in the memory of a device, which the host can't touch (``on_npu/protected_memory.cpp``).

Everywhere else tensors of a fake device lie on the CPU: a pointer to them that is taken for one of the host's is one.
Here whoever takes it so ends by SIGSEGV. And here the backward pass runs on a thread of its own, as on any device.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import Run, launch

ON_NPU = Path(__file__).with_name("on_npu")
TESTS = Path(__file__).parents[1]
STEPS = "14"
IN_BACKWARD, IN_UPDATE = "phase=COMPUTE at=backward", "phase=UPDATING"

pytestmark = pytest.mark.long


@pytest.fixture(scope="session")
def memory() -> str:
    """The library, built once for each version of torch and of its source."""
    torch = pytest.importorskip("torch")
    source = ON_NPU / "protected_memory.cpp"
    version = hashlib.sha256(source.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    built = TESTS.parent / f"build/protected_memory/{version}.so"
    if not built.exists():
        built.parent.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        new = built.with_suffix(f".{os.getpid()}")
        flags = ("-std=c++20", "-O1", "-fPIC", "-shared", f"-I{root}/include", f"-L{root}/lib")
        subprocess.run(["c++", *flags, "-o", new, source, "-lc10", "-ltorch_cpu"], check=True)
        new.rename(built)
    return str(built)


def job(folder: Path, memory: str, layout: str, faults: str, kills: str, ranks: int) -> Run:
    environ = {"PYTHONPATH": f"{TESTS}:{ON_NPU}", "RESILIENT_HCCL": "1", "NPU_MEMORY": memory}
    flags = ("--faults", kills) if kills else ()
    return launch(folder, "over_hccl.py", "on_device.py", faults, layout, STEPS, ranks=ranks, flags=flags, **environ)


def test_the_host_can_not_touch_it(memory: str) -> None:
    """Else all that follows would show nothing."""
    program = (
        "import ctypes, torch, types\n"
        "torch.utils.rename_privateuse1_backend('npu')\n"
        "torch._register_device_module('npu', types.SimpleNamespace(is_available=lambda: True))\n"
        f"torch.ops.load_library({memory!r})\n"
        "there = torch.arange(4.0).to('npu')\n"
        "assert (there + 1).sum().item() == 10\n"
        "ctypes.string_at(there.data_ptr(), 1)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -11


@pytest.mark.parametrize(
    ("layout", "ranks", "faults", "kills"),
    [
        (
            "ddp",
            2,
            "uce:1:2,hcce:0:4",
            (
                "uce rank=0 step=5 phase=COMPUTE at=forward target=param",
                f"kill rank=1 step=6 {IN_BACKWARD}",
                f"kill rank=0 step=9 {IN_UPDATE}",
                f"kill rank=0 step=12 {IN_BACKWARD} incarnation=1",
            ),
        ),
        ("hsdp", 4, "hcce:2:3", (f"kill rank=1 step=6 {IN_BACKWARD}", f"kill rank=2 step=9 {IN_UPDATE}")),
        ("fsdp", 2, "hcce:0:3", (f"kill rank=1 step=6 {IN_BACKWARD}", f"kill rank=0 step=9 {IN_UPDATE} incarnation=1")),
    ],
    ids=["ddp", "hsdp", "fsdp"],
)
def test_the_bits_are_those_of_an_undisturbed_run(
    tmp_path: Path, memory: str, layout: str, ranks: int, faults: str, kills: tuple[str, ...]
) -> None:
    """Its memory loses data, a collective of its library fails, ranks are killed: in one job."""
    reference = job(tmp_path / "reference", memory, layout, "", "", ranks)
    assert reference.code == 0, reference.explain()
    run = job(tmp_path / "run", memory, layout, faults, "; ".join(kills), ranks)
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == len(kills), run.explain()
    assert run.digests() == reference.digests(), run.explain()
