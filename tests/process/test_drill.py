"""``resilient-train drill``: a user's own script, undisturbed and with faults."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import JOBS, start

TOOL = [sys.executable, "-m", "resilient_train.launch.cli", "drill", "--json"]


def drill(run_dir: Path, *arguments: str, **environ: str) -> tuple[int, dict, str]:
    with start([*TOOL, "--run-dir", str(run_dir), *arguments], **environ) as process:
        try:
            out, err = process.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            pytest.fail("the drill did not end")
    return process.returncode, json.loads(out), err


@pytest.mark.timeout(170)
def test_every_kind_on_a_users_script(tmp_path: Path) -> None:
    flags = ("--ranks", "2", "--faults", "5", "--kinds", "kill,stop,hcce,uce,loop", "--seed", "3")
    script = ("--", str(JOBS / "train.py"), "--steps", "14")
    code, result, err = drill(tmp_path / "drill", *flags, *script, RESILIENT_HANG_TIMEOUT_S="2")
    assert code == 0, (result, err)
    assert result["ok"] is result["identical"] is True
    assert [fault["strategy"] for fault in result["faults"]] == ["ARF", "HANG, ARF", "HCCE", "UCE", "HANG, ARF"]
    assert all(fault["recovery_ms"] > 0 for fault in result["faults"])
    assert result["committed_steps_lost"] == 0


@pytest.mark.parametrize(("mode", "words"), [("no-session", "no Session"), ("drifts", "parameters differ")])
def test_a_script_that_does_not_recover_is_told(tmp_path: Path, mode: str, words: str) -> None:
    """It fails by itself; it has no Session; it depends on something that no seed covers."""
    flags = ("--ranks", "2", "--faults", "1", "--kinds", "hcce")
    code, result, err = drill(tmp_path / "drill", *flags, "--", str(JOBS / "drilled.py"), mode)
    assert code == 1, (result, err)
    assert words in " ".join(result["problems"])
    assert not result["identical"]
