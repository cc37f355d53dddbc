"""What ranks write goes to files, and what is new in these to the console."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.launch.agent.logs import Logs


def job_of(folder: Path, *quiet: tuple[int, str]) -> Any:
    prefixed = frozenset({(0, "stderr")})
    return SimpleNamespace(log_dir=folder, quiet=frozenset(quiet), prefixed=prefixed, role="r", log_prefix="[${rank}] ")


def test_of_a_quiet_rank_the_lines_of_this_package_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logs = Logs(job_of(tmp_path, (1, "stdout"), (1, "stderr")))
    streams = logs.open(1, 0)
    os.write(streams.out, b"its own\nresilient_train: printed by the script\n")
    os.write(streams.err, b"\r 1/4 |# |" * 9_999 + b"resilient_")
    logs.show_new()
    (follower,) = logs._followers[1, 0]
    assert len(follower._partial) < 99
    os.write(streams.err, b"train: begun\n")
    os.write(streams.err, b"its own\nresilient_train: lo")
    logs.show_new()
    os.write(streams.err, b"st\nits own\n\r 4/14 |##  |resilient_train: found\nand no end")
    for each in streams:
        os.close(each)
    logs.close(1, 0)
    logs.finish()
    assert capfd.readouterr() == ("", "resilient_train: begun\nresilient_train: lost\nresilient_train: found\n")


def test_each_state_of_a_progress_bar_is_a_line_under_a_prefix(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = Logs(job_of(tmp_path))
    streams = logs.open(0, 0)
    os.write(streams.err, b"begun\r\n  0%\r 50%\r")
    logs.show_new()
    assert capfd.readouterr() == ("", "[0] begun\n[0]   0%\n")
    os.write(streams.err, b"\n100%\r" + b"end")
    for each in streams:
        os.close(each)
    logs.show_new()
    assert capfd.readouterr() == ("", "[0]  50%\n[0] 100%\n")
    logs.close(0, 0)
    logs.finish()
    assert capfd.readouterr() == ("", "[0] end\n")


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
