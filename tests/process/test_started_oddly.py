"""A launcher that is started without its standard streams, or with a signal that is to be ignored."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, Run, read_events, start
from saved_jobs import wait_for


def ended(process: subprocess.Popen[str], run_dir: Path) -> Run:
    out, err = process.communicate(timeout=60)
    return Run(run_dir, process.returncode, out, err, read_events(run_dir))


def job(run_dir: Path, steps: int) -> list[str]:
    script = [str(JOBS / "train.py"), "--steps", str(steps)]
    return [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script]


@pytest.mark.long
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_closed_stream_costs_its_text_only(tmp_path: Path, closed: str) -> None:
    run_dir = tmp_path / "run"
    with start(["sh", "-c", f'exec "$@" {closed}', "sh", *job(run_dir, 3)]) as process:
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()


@pytest.mark.long
def test_without_streams_and_under_nohup_the_job_ends_well(tmp_path: Path) -> None:
    """Three closed streams cost their text only, and a signal that is to be ignored is."""
    run_dir = tmp_path / "run"
    with start(["nohup", "sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *job(run_dir, 30)]) as process:
        wait_for(run_dir, process, "started")
        os.killpg(process.pid, signal.SIGHUP)
        run = ended(process, run_dir)
    assert run.code == 0, run.explain()
    assert not run.of("fault")
