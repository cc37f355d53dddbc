"""What each rank of a job has in its memory at the end, against a run of plain torchrun.

Compared are the bytes that the job's script has written, parameter by parameter; nothing of ours has a part in that.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from running import JOBS, Run, launch

RANKS = 4
Memory = list[bytes]


def memory_of(folder: Path) -> Memory:
    """What each rank had at its end."""
    return [(folder / f"rank{rank}.bin").read_bytes() for rank in range(RANKS)]


class Torchrun:
    """Runs of one script without a word of ours, by variant; each is made once."""

    def __init__(self, job: str, folder: Path) -> None:
        self._job, self._folder = job, folder
        self._known: dict[str, Memory] = {}

    def __call__(self, variant: str) -> Memory:
        if variant not in self._known:
            out = self._folder / variant
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
            job = [str(JOBS / self._job), "--plain", "--out", str(out), "--variant", variant]
            done = subprocess.run([*command, *job], capture_output=True, text=True, timeout=240, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            self._known[variant] = memory_of(out)
        return self._known[variant]


def train(job: str, run_dir: Path, faults: str, *more: str, variant: str, **environ: str) -> Run:
    """The same script under ``resilient-run``."""
    flags = ("--faults", faults) if faults else ()
    arguments = ("--out", str(run_dir.parent / "out"), "--variant", variant, *more)
    return launch(run_dir, job, *arguments, ranks=RANKS, flags=flags, timeout_s=200, **environ)


def ends_as(run: Run, expected: Memory) -> None:
    assert run.code == 0, run.explain()
    assert memory_of(run.run_dir.parent / "out") == expected, run.explain()
