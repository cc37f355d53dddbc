"""A replacement that can't be started costs the job nothing but the rank: the survivors save what they have."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pure.test_controller import of, running
from resilient_train.config import Settings
from resilient_train.launch.agent.agent import _TRIES, Agent
from resilient_train.launch.agent.logs import Streams
from resilient_train.launch.fork.frames import Gate, Life, gates
from resilient_train.launch.fork.imports import Script
from resilient_train.launch.fork.standby_pool import Pool, Standby
from resilient_train.protocol.commands import Command, EndJob, Note, Spawn
from resilient_train.protocol.job import Stage
from resilient_train.protocol.standing import Phase, Standing

GONE = FileNotFoundError(errno.ENOENT, "No such file or directory", "run.sh")
SHORT = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


class Rig:
    """An agent whose rank 1 of 3 was lost after four updates, and whose processes can't be started."""

    def __init__(self, error: OSError) -> None:
        self.controller = running()
        self.standings = [Standing(4, Phase.COMPUTE)] * 3
        (self.spawn,) = of(self.controller.lost(1, 0, "died", self.standings), Spawn)
        self.error = error
        self.tries = 0
        self.later: list[Any] = []
        self.carried_out: list[Command] = []
        agent: Any = object.__new__(Agent)
        agent._controller = self.controller
        agent._ending = None
        agent._unborn = {1: self.spawn}
        agent._loop = SimpleNamespace(call_later=lambda _, what, *told: self.later.append((what, told)))
        agent._processes = SimpleNamespace(start=self._start)
        agent._standings = lambda: self.standings
        agent._carry_out = self.carried_out.extend
        agent._say = lambda _: None
        self.agent = agent

    def _start(self, *_: object, started: Any, **__: object) -> None:
        self.tries += 1
        started(self.error)

    def start(self, spawn: Spawn, looks: int) -> None:
        self.agent._unborn[spawn.rank] = spawn
        self.agent._start(spawn)
        while self.later and self.tries < looks:
            (what, told), self.later = self.later[0], []
            what(*told)


def test_what_can_not_be_helped_makes_the_survivors_save() -> None:
    rig = Rig(GONE)
    rig.start(rig.spawn, 100)
    assert rig.tries == _TRIES, "a file may be written anew at this moment"
    assert not of(rig.carried_out, EndJob)
    job = rig.controller.job
    assert job.stage is Stage.LEAVING
    assert job.leaving is not None
    assert (job.leaving.code, job.leaving.gone) == (2, {1})
    assert job.leaving.reason.startswith("rank 1 failed: its process can't be started: [Errno 2]")
    assert not rig.agent._unborn, "nobody waits for it"


def test_a_job_that_leaves_already_goes_on_saving() -> None:
    rig = Rig(GONE)
    rig.agent._unborn[1] = rig.spawn
    rig.controller.exited(2, 0, 1, rig.standings)
    for tries in range(1, _TRIES + 1):
        rig.agent._on_no_process(rig.spawn, GONE, tries)
    assert rig.controller.job.stage is Stage.LEAVING
    assert not rig.carried_out
    assert not rig.agent._unborn


def test_what_is_short_is_waited_for() -> None:
    """The recovery's own limit ends that."""
    rig = Rig(SHORT)
    rig.start(rig.spawn, 5 * _TRIES)
    assert rig.tries == 5 * _TRIES
    assert rig.controller.job.stage is Stage.RECOVERING


@pytest.mark.parametrize(("error", "tries"), [(GONE, 1), (SHORT, _TRIES)])
def test_where_nobody_has_a_state_the_job_ends(error: OSError, tries: int) -> None:
    rig = Rig(error)
    rig.start(Spawn(1, 1, joining=False, attempt=0), 100)
    assert rig.tries == tries
    assert of(rig.carried_out, EndJob)[0].code == 2


def test_before_the_first_update_there_is_nothing_to_save() -> None:
    rig = Rig(GONE)
    rig.controller = rig.agent._controller = running()
    rig.standings = [Standing(0, Phase.COMPUTE)] * 3
    (spawn,) = of(rig.controller.lost(1, 0, "died", rig.standings), Spawn)
    rig.start(spawn, 100)
    (told,) = [note for note in of(rig.carried_out, Note) if note.kind == "job_end"]
    assert "can't be started" in str(told.detail["reason"])


def test_a_fork_becomes_a_rank_whatever_has_become_of_its_script_and_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editor, or a checkout, takes files away for a moment. What the rank makes of that is its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    command = (sys.executable, "-u", str(tmp_path / "gone.py"), "--steps")

    def lives() -> Life:
        async def story() -> Life:
            ours, theirs = gates()
            pool = Pool("switched off", command, Settings(), lambda *_: None)
            assert pool.give_life(Standby(os.getpid(), ours), command, {}, Streams(1, 2))
            order, streams = Gate(theirs.detach()).next()
            for each in streams:
                os.close(each)
            assert isinstance(order, Life)
            return order

        return asyncio.run(story())

    life = lives()
    assert life.run.target == Script(script=str(tmp_path / "gone.py"), arguments=("--steps",))
    assert life.cwd == bytes(tmp_path / "here")
    (tmp_path / "here").rmdir()
    assert lives().cwd == b""
    assert Script(module="pack.run").folder() == "", "as with Python's own -m"
