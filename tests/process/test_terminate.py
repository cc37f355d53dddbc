"""SIGTERM to a rank is written down, once, and never gets in the way of who wants the process to end."""

from __future__ import annotations

import subprocess
import sys

import pytest
from running import JOBS


@pytest.mark.parametrize(
    ("mode", "code", "printed"),
    [
        ("plain", -15, ["True", "0 15"]),  # the second one ends it
        ("usr1", -15, ["True", "0 10"]),
        ("agents", -15, ["True"]),  # the agent has had enough
        ("left", -15, ["True"]),
        ("late", -15, ["True"]),  # both come when the module's own destructors have run
        ("exits", -15, ["True"]),
        ("users", 5, ["False"]),
        ("child", 0, ["True", "-15 0"]),  # a worker of the rank's dies of it, and the rank hears nothing
        ("usr1-child", 0, ["True", "0", "-15 0"]),  # what is sent to all processes means the rank
        ("shielded", 0, ["True", "0", "-15 0"]),  # only the rank itself ends a worker that it needs
        ("forked", 0, ["True", "-15 0"]),
    ],
)
def test_terminate(mode: str, code: int, printed: list[str]) -> None:
    command = [sys.executable, str(JOBS / "terminated.py"), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (code, printed), done.stderr
