"""A mistake of ours in the agent: the job ends at once with 70, rather than going on with nobody to look after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import launch
from served import changed

BROKEN = """
from resilient_train.launch.agent import {module}

def broken(self, *args, **kwargs):
    calls.append(1)
    if len(calls) > {after}:
        raise LookupError("our own mistake")
    return real(self, *args, **kwargs)

calls = []
real = {module}.{name}
{module}.{name} = broken
{more}
"""
STOP_FAILS = """
from resilient_train.protocol.controller import Controller
def stop(self, *args):
    raise KeyError("and another one")
Controller.stop = stop
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("module", "name", "more"),
    [
        ("logs", "Logs.show_new", ""),  # a task
        ("hang_watch", "HangWatch.look", ""),  # a callback
        ("hang_watch", "HangWatch.look", STOP_FAILS),
        ("saves", "Saves.open", ""),  # a task that a rank waits for
        ("saves", "Saves.finish", ""),  # the main one
    ],
    ids=["task", "callback", "the end too", "a rank's question", "at the end"],
)
def test_the_job_ends(tmp_path: Path, module: str, name: str, more: str) -> None:
    after = 0 if module == "saves" else 40
    code = BROKEN.format(module=module, name=name, after=after, more=more)
    steps = "5" if name == "Saves.finish" else "100000"
    with changed(code=code):
        run = launch(tmp_path / "run", "train.py", "--steps", steps, "--save", "2", ranks=2, timeout_s=60)
    assert run.code == 70, run.explain()
    assert "our own mistake" in run.err
    assert "please report it" in run.err


def test_arenas_that_grow_leave_nothing_behind(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "growing.py", str(tmp_path), ranks=2)
    assert run.code == 0, run.explain()
    for rank in (0, 1):
        lines = [list(map(int, line.split())) for line in (tmp_path / f"descriptors_{rank}").read_text().splitlines()]
        assert lines[-1][0] == 8
        assert lines[-1][1] <= lines[0][1], f"rank {rank}: {lines}"
        assert lines[-1][2] <= lines[0][2] + 1, f"the agent: {lines}"
