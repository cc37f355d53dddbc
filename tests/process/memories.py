"""What each rank of a job has in its memory at the end, against a run of plain torchrun.

Compared are the bytes that the job's script has written, tensor by tensor, by a process that can't import anything of
ours (``compare_memories.py``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from running import JOBS, LAUNCHER, Run, launch, start
from watched_jobs import end_holder

from resilient_train.state.checkpoint.verify import newest_complete

RANKS = 4
COMPARE = Path(__file__).with_name("compare_memories.py")
Memory = list[bytes]


def memory_of(folder: Path) -> Memory:
    """What each rank had at its end."""
    return [(folder / f"rank{rank}.bin").read_bytes() for rank in range(RANKS)]


class Torchrun:
    """Runs of one script without a word of ours, by variant; each is made once."""

    def __init__(self, job: str, folder: Path, **environ: str) -> None:
        self._job, self._folder = job, folder
        self._environ = {**os.environ, **environ}
        self._known: dict[str, Path] = {}

    def __call__(self, variant: str) -> Path:
        """The folder with what each rank has written."""
        if variant not in self._known:
            out = self._folder / variant
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone"]
            job = [str(JOBS / self._job), "--plain", "--out", str(out), "--variant", variant]
            done = self._run([*command, *job])
            assert done.returncode == 0, done.stderr[-3000:]
            self._known[variant] = out
        return self._known[variant]

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Again where a rank's gloo has aborted it as it ended, which stock gloo does now and then (docs/facts.md)."""
        for _ in range(3):
            done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=self._environ)
            if "Signal 6 (SIGABRT)" not in done.stderr:
                break
        return done


def train(job: str, run_dir: Path, faults: str, *more: str, variant: str, **environ: str) -> Run:
    """The same script under ``resilient-run``."""
    flags = ("--faults", faults) if faults else ()
    arguments = ("--out", str(run_dir.parent / "out"), "--variant", variant, *more)
    return launch(run_dir, job, *arguments, ranks=RANKS, flags=flags, timeout_s=200, **environ)


def ended_by_the_scheduler(job: str, run_dir: Path, *more: str, variant: str) -> None:
    """Trains for some steps, until SIGTERM; the state is saved then."""
    told = run_dir.parent / "told"
    command = [str(JOBS / job), "--out", str(run_dir.parent / "out"), "--variant", variant, *more, "--tell", str(told)]
    with start([*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *command]) as process:
        wait_for_step(told, 2)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert newest_complete(run_dir / "checkpoints").report is not None, err
    end_holder(run_dir)


def wait_for_step(told: Path, step: int) -> None:
    """``told`` is what the job writes its steps to."""
    deadline = time.monotonic() + 60
    while not told.exists() or not told.read_text() or int(told.read_text()) < step:
        assert time.monotonic() < deadline, f"it did not come to step {step}"
        time.sleep(0.01)


def ends_as(run: Run, plain: Path) -> None:
    assert run.code == 0, run.explain()
    folders = [str(plain), str(run.run_dir.parent / "out")]
    command = [sys.executable, "-I", "-S", str(COMPARE), *folders, str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{run.explain()}"
