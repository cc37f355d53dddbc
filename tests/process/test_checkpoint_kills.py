"""kill -9 of a process that writes, renames and retires checkpoints: no complete one is lost, no torn one accepted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import JOBS

pytestmark = pytest.mark.process


CALLS = 240
"""Of a writer that tidies up, writes a step again and two new ones, and retires the old."""


def run(folder: Path, how: str, trials: int, number: int) -> tuple[int, str]:
    """(violations, everything that was printed) of ``jobs/checkpoints.py``."""
    folder.mkdir()
    command = [sys.executable, str(JOBS / "checkpoints.py"), str(folder), how, str(trials), str(number)]
    path = os.pathsep.join([str(JOBS.parent.parent), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not done.stderr, done.stderr[-3000:]
    return int(done.stdout.split("violations=")[1]), done.stdout


@pytest.mark.parametrize("kills", [15, pytest.param(500, marks=pytest.mark.long)])
def test_at_any_instant(tmp_path: Path, kills: int) -> None:
    seed = int.from_bytes(os.urandom(4))
    count, told = run(tmp_path / "checkpoints", "time", kills, seed)
    assert count == 0, f"seed {seed}\n{told}"


@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.long)])
def test_at_every_call(tmp_path: Path, every: int) -> None:
    count, told = run(tmp_path / "checkpoints", "call", CALLS // every, every)
    assert count == 0, told


@pytest.mark.parametrize("wrong", ["first", "inplace"])
def test_a_wrong_writer_is_caught(wrong: str, tmp_path: Path) -> None:
    """The controls: one that deletes the old checkpoint first, one that writes under the final name."""
    count, _ = run(tmp_path / "checkpoints", f"call-{wrong}", CALLS // 24, 24)
    assert count > 0
