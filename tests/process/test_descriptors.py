"""Descriptors run out: in the agent, in the holder, by a flood of connections. Nobody who is in notices."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, Run, finish, launch, read_events, start
from saved_jobs import RANKS, STEPS, command, pid_of, wait_for, wait_for_step
from served import changed
from test_vault import TIMEOUT_S, Rig, eventually, newest, rig, take  # noqa: F401 - a fixture
from watched_jobs import end_holder, holder_pid

from resilient_train.errors import HolderLostError
from resilient_train.protocol import messages as m
from resilient_train.state.vault.client import Vault, socket_path
from resilient_train.transport import Channel

SOFT = 100


@contextmanager
def allowed(pid: int, more: int) -> Iterator[None]:
    """The process may have so many descriptors more than it has now."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    now = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()) + 1
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def limited(soft: int) -> Iterator[None]:
    """A launcher that is started meanwhile may have so many descriptors, as behind ``ulimit -S``."""
    with changed(descriptors=(soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])):
        yield


def flood(path: Path, count: int) -> list[socket.socket]:
    """Connections that say nothing."""
    found = []
    for _ in range(count):
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(TIMEOUT_S)
        client.connect(str(path))
        found.append(client)
    return found


@pytest.mark.parametrize("flags", [(), ("--standby", "0")], ids=["forked", "cold"])
def test_ranks_have_the_users_own_limit(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """`select` breaks above 1,024; so the agent alone has more."""
    run_dir = tmp_path / "run"
    with limited(SOFT):
        run = launch(run_dir, "limits.py", ranks=2, flags=flags)
    assert run.code == 0, run.explain()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert [(run_dir / f"limit_of_rank{rank}").read_text() for rank in (0, 1)] == [str((SOFT, hard))] * 2


def test_the_holder_of_a_limited_job_has_all_there_are(tmp_path: Path) -> None:
    """And ranks that save have the user's own still."""
    run_dir = tmp_path / "run"
    try:
        with (
            limited(SOFT),
            start(command(run_dir, "--save", "2", "--await-saves", "--pace", str(run_dir / "enough"))) as process,
        ):
            wait_for(run_dir, process, "saved")
            pids = [holder_pid(run_dir), *(pid_of(run_dir, rank) for rank in range(RANKS))]
            limits = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
            (run_dir / "enough").touch()
            out, err = process.communicate(timeout=100)
    finally:
        end_holder(run_dir)
    assert process.returncode == 0, out + err
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits == [(hard, hard), *[(SOFT, hard)] * RANKS]


def test_a_holder_raises_its_own_limit(rig: Rig) -> None:  # noqa: F811
    """Whoever starts it: it does not live on what it inherits of an agent."""
    with allowed(os.getpid(), 40):
        rig.start()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(rig.holders[0].pid, resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.long
def test_a_job_with_few_descriptors_comes_to_its_end(tmp_path: Path, undisturbed: Reference) -> None:
    """A rank needs 29 while it trains. In a recovery it holds up to 55, groups that are being freed among them."""
    plan = "kill rank=1 step=5 phase=COMPUTE; kill rank=0 step=8 phase=UPDATING"
    run_dir = tmp_path / "run"
    with limited(34):
        run = finish(command(run_dir, "--save", "4", flags=("--faults", plan)), run_dir)
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=2)


def test_a_job_that_can_not_begin_says_so(tmp_path: Path) -> None:
    """Too few for good: there are no more to be raised to."""
    sooner = "from resilient_train.launch.agent import agent; agent._SHORT_S = 0.1"  # ten times, and then for good
    with changed(descriptors=(30, 30), code=sooner):
        run = finish(command(tmp_path / "run"), tmp_path / "run")
    assert run.code == 2, run.explain()
    (end,) = [line for line in run.err.splitlines() if "resilient-run: the job ends" in line]
    assert "[Errno 24] Too many open files" in end  # for a process, or for its connection: it is a matter of speed
    assert len(run.err.splitlines()) < 10, run.err


NO_ROOM = """
import errno
from resilient_train import unix_listener
unix_listener._PAUSE_S = 0.1
def out_of_descriptors(listener):
    if listener._path.name.startswith("agent"):
        return listener._pause(OSError(errno.EMFILE, "Too many open files"))
    return accept(listener)
accept, unix_listener.Listener._accept = unix_listener.Listener._accept, out_of_descriptors
"""


def test_a_job_whose_ranks_can_never_connect_says_so(tmp_path: Path) -> None:
    with changed(code=NO_ROOM):
        run = finish(command(tmp_path / "run"), tmp_path / "run")
    assert run.code == 2, run.explain()
    (end,) = [line for line in run.err.splitlines() if "resilient-run: the job ends" in line]
    assert "can't connect to the agent, which has too few descriptors (ulimit -n): [Errno 24]" in end
    assert len(run.of("foreign_frame")) == 1


@pytest.mark.long
@pytest.mark.timeout(120)
def test_an_agent_without_descriptors_goes_on(tmp_path: Path, undisturbed: Reference) -> None:
    """Nobody can connect, and no process be started, until there are some again."""
    run_dir = tmp_path / "run"
    agent = run_dir / "agent-0.sock"
    with start(command(run_dir, "--pace", str(run_dir / "enough"))) as process:
        wait_for_step(run_dir, 2)
        with allowed(process.pid, 4):
            clients = flood(agent, 30)
            wait_for(run_dir, process, "foreign_frame")
            os.kill(pid_of(run_dir, 1), signal.SIGKILL)
            wait_for(run_dir, process, "fault")
            time.sleep(1.5)
            assert process.poll() is None
        for client in clients:
            client.close()
        wait_for(run_dir, process, "resumed")
        channel = Channel(str(agent))
        channel.send(m.Hello("operator"))
        channel.send(m.Query())
        assert isinstance(channel.receive(20), m.Reply)
        channel.close()
        (run_dir / "enough").touch()
        out, err = process.communicate(timeout=60)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=1)
    assert "nobody can connect for now: [Errno 24] Too many open files; ranks that come wait until" in err


@pytest.mark.timeout(120)
def test_an_agent_that_is_to_save_without_descriptors(tmp_path: Path, undisturbed: Reference) -> None:
    """The first checkpoint of the job: whatever that reads for the first time can't be opened. Found by the soak."""
    run_dir = tmp_path / "run"
    with start(command(run_dir, "--save", "4", "--pace", str(run_dir / "enough"))) as process:
        wait_for_step(run_dir, 1)
        with allowed(process.pid, 0):
            wait_for_step(run_dir, 6)
            assert process.poll() is None
        (run_dir / "enough").touch()
        out, err = process.communicate(timeout=60)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=0)


def test_a_holder_without_descriptors_keeps_what_it_holds(rig: Rig) -> None:  # noqa: F811
    vault = rig.start()
    pair = vault.reserve(0, 300_000)
    assert take(pair, 7)
    holder = rig.holders[0].pid
    with allowed(holder, 3):
        clients = flood(socket_path(rig.run_dir), 30)
        time.sleep(0.5)
        assert newest(vault) == 7, "who is in notices nothing"
        with pytest.raises(HolderLostError, match="did not answer"):
            Vault.connect(rig.run_dir, reply_timeout_s=0.5)
    for client in clients:
        client.close()
    assert eventually(lambda: rig.holders[0].poll() is None and _connects(rig.run_dir))
    assert newest(vault) == 7
    pair.close()


def _connects(run_dir: Path) -> bool:
    try:
        Vault.connect(run_dir, member=False, reply_timeout_s=1.0).close()
    except HolderLostError:
        return False
    return True
