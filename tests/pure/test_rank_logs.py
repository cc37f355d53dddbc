"""What ranks write goes to files, and what is new in these to the console."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.launch.agent.logs import Logs


def job_of(folder: Path) -> Any:
    prefixed = frozenset({(0, "stderr")})
    return SimpleNamespace(log_dir=folder, quiet=frozenset(), prefixed=prefixed, role="r", log_prefix="[${rank}] ")


def test_a_run_shows_what_it_has_written_itself(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The one before it in the same directory had files of the same names."""
    for run in ("first", "second"):
        logs = Logs(job_of(tmp_path))
        streams = logs.open(0, 0)
        os.write(streams.out, f"{run} out\n".encode())
        logs.show_new()
        os.write(streams.err, f"{run} err\nno end".encode())
        for each in streams:
            os.close(each)
        logs.close(0, 0)
        logs.finish()
        assert capfd.readouterr() == (f"{run} out\n", f"[0] {run} err\n[0] no end\n")
    assert (tmp_path / "rank_0" / "0.out").read_text() == "first out\nsecond out\n"
