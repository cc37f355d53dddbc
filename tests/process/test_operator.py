"""A person at two terminals who waits for nothing: what the console, ``status`` and ``inject`` tell."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from running import JOBS, LAUNCHER, start

TOOL = [sys.executable, "-m", "resilient_train.launch.cli.tool"]
OURS = re.compile(r"\d\d:\d\d:\d\d resilient-run: ")


def status_when(run_dir: Path, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The first status that is so."""
    deadline = time.monotonic() + 60
    while True:
        command = [*TOOL, "status", str(run_dir), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else {"stage": "NOT YET"}
        if condition(found):
            return found
        assert time.monotonic() < deadline, (found, done.stderr)


def test_from_a_start_that_takes_its_time_to_the_end(tmp_path: Path) -> None:
    run_dir, folder = tmp_path / "run", tmp_path / "held"
    folder.mkdir()
    job = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), str(JOBS / "held.py"), str(folder)]
    kill = [*TOOL, "inject", str(run_dir), "kill", "--rank", "1"]
    with start(job) as process, start(kill, new=True) as inject:  # at the same moment
        early = status_when(run_dir, lambda each: each["stage"] == "STARTING" and each["waits_for"] == [1])
        assert [row["phase"] for row in early["ranks"]] == ["APPLIED", "STARTING"], early
        assert early["ranks"][1]["step"] is None
        assert early["ranks"][1]["pid"] is not None
        assert inject.stderr is not None
        said = inject.stderr.readline()
        assert re.search(r": waiting, at most \d+ s$", said.strip()), said
        (folder / "0").touch()
        told, more = inject.communicate(timeout=60)
        assert (inject.returncode, more) == (0, "")
        assert told.startswith("kill of rank 1"), told
        joining = status_when(run_dir, lambda each: each["waits_for"] == [1] and each["ranks"][1]["pid"] is not None)
        assert joining["stage"] == "RECOVERING"
        row = joining["ranks"][1]
        assert (row["phase"], row["incarnation"], row["step"], row["commits"]) == ("JOINING", 1, None, None), joining
        assert joining["stage_s"] >= 0
        assert (joining["restarts"], joining["replacements"]) == (0, 1)
        (folder / "1").touch()
        again = status_when(run_dir, lambda each: each["stage"] == "RUNNING")
        assert again["waits_for"] == []
        assert again["ranks"][1]["phase"] not in ("STARTING", "JOINING")
        (folder / "enough").touch()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert all(OURS.match(line) for line in err.splitlines() if "resilient-run" in line), err
    assert re.search(r": done after \d+ s: \d+ steps, 1 recovery, [01] steps? redone, 0 committed steps lost", err), err
    assert err.rstrip().endswith(f"Logs: {run_dir}/logs; all of it: resilient-train report {run_dir}")
    report = subprocess.run([*TOOL, "report", str(run_dir), "--json"], capture_output=True, text=True, check=True)
    told = json.loads(report.stdout)
    assert (told["restarts"], told["replacements"]) == (0, 1), "the same words mean the same as in the status"
