"""Jobs on a real GPU over a real NCCL: ranks are killed, and each ends with the bits that torchrun's has.

One GPU does: the ranks share it. Several of these can run at a time (``pytest -n 4``).
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and torch.distributed.is_nccl_available()), reason="no CUDA device here, no NCCL"
    ),
]
JOB = Path(__file__).parent / "jobs/cuda_train.py"
STEPS = 12
TORCHRUN = ("torch.distributed.run",)
OURS = ("resilient_train.launch.cli.run",)
_LIMIT_S = 150


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(launcher: tuple[str, ...], ranks: int, *job: str, **environ: str) -> str:
    """Runs the job to its end; nothing of it is left. Returns what it has said."""
    command = [sys.executable, "-m", *launcher, "--nproc-per-node", str(ranks), "--master-port", str(_free_port())]
    with subprocess.Popen(
        [*command, str(JOB), *job],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGABRT)
            said, _ = process.communicate()
            raise AssertionError(f"did not end:\n{said[-6000:]}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"code {process.returncode}\n{said[-6000:]}"
    return said


def ends(out: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(ranks)]


CASES = {
    "undisturbed": ("nccl", "ddp", 2, "", (), set()),
    "killed": (
        "nccl", "ddp", 2,
        "kill rank=1 step=3 phase=COMPUTE at=backward; kill rank=0 step=6 phase=UPDATING at=start", (), {"ARF"},
    ),
    "cut": (
        "nccl", "ddp", 2,
        "hcce rank=0 step=4 phase=COMPUTE at=start; kill rank=0 step=7 phase=APPLIED at=start", (), {"HCCE", "ARF"},
    ),
    "three": ("nccl", "ddp", 3, "kill rank=2 step=3 phase=COMPUTE at=start", (), {"ARF"}),
    "two-of-three": (
        "nccl", "ddp", 3,
        "kill rank=0 step=4 phase=COMPUTE at=backward; kill rank=1 step=4 phase=COMPUTE at=backward", (), {"ARF"},
    ),
    "default": ("default", "ddp", 2, "kill rank=1 step=5 phase=COMPUTE at=backward", ("saving",), {"ARF"}),
    "both": ("cpu:gloo,cuda:nccl", "ddp", 2, "kill rank=0 step=5 phase=COMPUTE at=backward", (), {"ARF"}),
    "lost": ("nccl", "ddp", 2, "", ("lost",), {"ARF"}),
    "stopped": ("nccl", "ddp", 2, "stop rank=1 step=5 phase=COMPUTE at=backward", (), {"ARF"}),
    "hsdp": (
        "nccl", "hsdp", 4,
        "kill rank=0 step=4 phase=COMPUTE at=backward; kill rank=3 step=7 phase=UPDATING at=start", (), {"ARF"},
    ),
    "fsdp": ("nccl", "fsdp", 2, "kill rank=1 step=5 phase=COMPUTE at=backward", ("saving",), {"ARF"}),
    "all": (
        "nccl", "ddp", 2,
        "kill rank=0 step=6 phase=COMPUTE at=start; kill rank=1 step=6 phase=COMPUTE at=start", ("saving",), {"ARF"},
    ),
}  # fmt: skip


def plain(folder: Path, backend: str, layout: str, ranks: int) -> list[dict[str, Any]]:
    """What torchrun's ranks have at their end: made once for all workers."""
    out = folder / f"{backend}-{layout}-{ranks}"
    with (folder / f"{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            run(TORCHRUN, ranks, backend, layout, str(STEPS), str(out))
    return ends(out, ranks)


@pytest.mark.parametrize("name", CASES)
def test_it_ends_as_torchruns(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    backend, layout, ranks, faults, flags, strategies = CASES[name]
    own = tmp_path_factory.getbasetemp()
    expected = plain(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own, backend, layout, ranks)
    environ = {"RESILIENT_NCCL": "1", "RESILIENT_RUN_DIR": str(tmp_path / "run"), "RESILIENT_FAULTS": faults}
    if name == "stopped":
        environ["RESILIENT_HANG_TIMEOUT_S"] = "4"
    said = run(OURS, ranks, backend, layout, str(STEPS), str(tmp_path / "ours"), *flags, **environ)
    print(said)
    assert ends(tmp_path / "ours", ranks) == expected, said[-6000:]
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").read_text().splitlines()]
    found = {event["detail"].get("strategy") for event in events if event["kind"] == "fault"}
    assert found == strategies, said[-6000:]
