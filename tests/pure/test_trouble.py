"""A collective that failed is a fault at once, unless a rank dies or leaves: then that is why."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train._native import Board, Page
from resilient_train.launch.agent.agent import Agent
from resilient_train.launch.agent.processes import RankProcess
from resilient_train.protocol.progress import Activity

SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]


class Ranked(SimpleNamespace):
    """A process: hashable."""

    __hash__ = object.__hash__


class Rig:
    """As much of an agent as is asked. Time passes only when it is told to."""

    def __init__(self) -> None:
        self.board = Board.create(2)
        self.pages = [Page(self.board, rank) for rank in (0, 1)]
        self.ended = [False, False]
        self.faults: list[str] = []
        self.later: list[Any] = []
        agent: Any = object.__new__(Agent)
        ranks = {rank: Ranked(rank=rank, ends=lambda rank=rank: self.ended[rank]) for rank in (0, 1)}
        agent._processes = SimpleNamespace(current=ranks)
        agent._board = self.board
        agent._fenced = {}
        agent._job = SimpleNamespace(generation=3, attempt=0)
        agent._loop = SimpleNamespace(call_later=lambda _, what, *told: self.later.append((what, told)))
        agent._on_unexplained = lambda generation, detail: self.faults.append(detail)
        self.agent = agent

    def trouble(self, *, deadline: float = 1e12) -> None:
        self.agent._on_trouble((3, 0), "rank 0: hung up", deadline)

    def look_again(self) -> None:
        (what, told), self.later = self.later[0], []
        what(*told)


def test_nobody_dies_or_leaves() -> None:
    rig = Rig()
    rig.trouble()
    assert rig.faults == ["rank 0: hung up"], "and nothing was waited for"


def test_a_death_is_on_its_way() -> None:
    rig = Rig()
    rig.ended[1] = True
    rig.trouble()
    rig.look_again()
    assert rig.faults == []
    rig.agent._job.generation = 4  # it is seen
    rig.ended[1] = False  # and its place is taken
    rig.look_again()
    assert rig.faults == []
    assert rig.later == []


def test_all_start_again_meanwhile() -> None:
    """In the generation that it was: what failed in the processes of before is no fault of the new ones."""
    rig = Rig()
    rig.ended[1] = True
    rig.trouble()
    rig.agent._job.attempt, rig.ended[1] = 1, False
    rig.look_again()
    assert rig.faults == []
    assert rig.later == []


def test_a_rank_was_just_killed() -> None:
    """By the agent: the kernel may not have said so yet."""
    rig = Rig()
    rig.agent._fenced[rig.agent._processes.current[1]] = "its memory keeps failing"
    rig.trouble()
    rig.look_again()
    assert rig.faults == []


def test_a_rank_leaves_and_comes_back() -> None:
    """An error of the user's, caught outside of the step."""
    rig = Rig()
    rig.pages[1].set_activity(Activity.LEAVING)
    rig.trouble()
    rig.look_again()
    assert rig.faults == []
    rig.pages[1].set_activity(Activity.TRAINING)
    rig.look_again()
    assert rig.faults == ["rank 0: hung up"]


def test_a_rank_leaves_and_does_not_end() -> None:
    rig = Rig()
    rig.pages[0].set_activity(Activity.LEAVING)
    rig.trouble(deadline=0)
    assert rig.faults == ["rank 0: hung up"]


@pytest.mark.process
def test_the_kernel_says_that_a_process_ends() -> None:
    """Before it closes the process's sockets: who has seen them closed may ask."""
    ours, theirs = socket.socketpair()
    with subprocess.Popen(SLEEPS, stdout=subprocess.PIPE, pass_fds=(theirs.fileno(),)) as child:
        theirs.close()
        process = RankProcess(0, 0, child, start="cold", wraps=False)
        assert child.stdout is not None
        child.stdout.readline()
        assert not process.ends()
        process.signal(signal.SIGSTOP)
        assert not process.ends()
        process.signal(signal.SIGKILL)
        assert ours.recv(1) == b"", "its end of the pair is closed"
        assert process.ends()
        process.close()
    ours.close()
