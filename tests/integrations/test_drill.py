"""``resilient-train drill`` on scripts with a Trainer: they recover bit for bit, and it says so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from served import plain_environ
from trained import JOBS

TOOL = [sys.executable, "-m", "resilient_train.launch.cli.tool", "drill", "--json", "--ranks", "2"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_new_process_takes_up_its_place_behind_its_first_record(tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    flags = ("--run-dir", str(tmp_path / "drill"), "--faults", "2", "--kinds", "kill,hcce", "--seed", "1")
    command = [*TOOL, *flags, "--", str(JOBS / f"with_{library}.py")]
    told = subprocess.run(command, env=plain_environ(), capture_output=True, text=True, timeout=500, check=False)
    assert told.returncode == 0, (told.stdout, told.stderr)
    result = json.loads(told.stdout)
    assert result["ok"] is result["identical"] is True
    assert not any("trainer" in name for name in result["not_compared"])
