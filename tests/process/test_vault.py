"""Snapshots in memory against the deaths of everybody who has to do with them."""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import xxhash
from running import JOBS

from resilient_train._native import Copier, die_with_parent
from resilient_train.errors import HolderLostError, HolderSilentError, MemoryLimitError, ProtocolError, VaultError
from resilient_train.launch.agent import held_snapshots
from resilient_train.launch.agent.held_snapshots import HeldSnapshots
from resilient_train.launch.agent.run_dir_claim import Claim
from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.state.vault.client import Vault, common_commits, lock_of, socket_path
from resilient_train.state.vault.holder_search import find_holder, log_path
from resilient_train.state.vault.slots import SlotPair, image_digest

IMAGE_BYTES = 300_000
TIMEOUT_S = 20.0
TIMEOUT_MS = 20_000
WORKS = {name: f"vault_works:{name}" for name in ("digest", "wait", "fail", "write_down")}


class Rig:
    """A run directory and its holders, none of which outlives the test."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.vaults: list[Vault] = []
        self.holders: list[subprocess.Popen[bytes]] = []

    def start(self, grace_s: float = 0.0) -> Vault:
        vault, process = asyncio.run(find_holder(self.run_dir, grace_s=grace_s, works=WORKS))
        self.vaults.append(vault)
        if process is not None:
            self.holders.append(process)
        return vault

    def connect(self, *, member: bool = True) -> Vault:
        self.vaults.append(Vault.connect(self.run_dir, member=member))
        return self.vaults[-1]

    def close(self) -> None:
        for vault in self.vaults:
            vault.close()
        for process in self.holders:
            process.kill()
            process.wait()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setenv("PYTHONPATH", str(JOBS))
    rig = Rig(tmp_path / "run")
    rig.run_dir.mkdir()
    yield rig
    rig.close()


def content(rank: int, commits: int) -> bytes:
    return bytes([rank, commits % 256, 7]) * (IMAGE_BYTES // 3)


def take(pair: SlotPair, commits: int, world: int = 1) -> bool:
    draft = pair.begin()
    if draft is None:
        return False
    data = content(pair.rank, commits)
    copier, source = Copier(), ctypes.create_string_buffer(data, IMAGE_BYTES)
    with draft.image[:IMAGE_BYTES] as image:
        copier.gather(image, [(ctypes.addressof(source), IMAGE_BYTES, 0)])
        assert copier.wait(TIMEOUT_MS)
    digest = image_digest(copier.digests())
    draft.commit(commits=commits, step=commits, image_bytes=IMAGE_BYTES, generation=1, world=world, digest=digest)
    return True


def newest(vault: Vault, rank: int = 0, commits: int | None = None) -> int | None:
    """The commits of the newest snapshot, whose bytes are right."""
    with vault.newest(rank, commits=commits) as found:
        if found is None:
            return None
        pair, snapshot = found
        with pair.image(snapshot) as image:
            assert image == content(rank, snapshot.commits)
        assert pair.verified(Copier(), snapshot, TIMEOUT_MS)
        return snapshot.commits


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def forked(body: Callable[[], None]) -> Iterator[int]:
    """A child that runs ``body`` and then waits to be killed; the block begins when ``body`` is done."""
    hears, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL)
            body()
            os.write(tells, b"d")
            signal.pause()
        finally:
            os._exit(1)
    os.close(tells)
    try:
        assert os.read(hears, 1) == b"d", "the child failed"
        yield pid
    finally:
        os.close(hears)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def kills(rig: Rig, kind: str, count: int) -> dict[str, int]:
    rig.start(grace_s=60)
    command = [sys.executable, str(JOBS / "vault_kills.py"), str(rig.run_dir), kind, str(count)]
    told = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.long)])
def test_writers_killed_at_random_instants_tear_and_lose_nothing(rig: Rig, count: int) -> None:
    found = kills(rig, "right", count)
    assert found.keys() <= {"good", "none yet"}, "the first writer may die before it has acknowledged anything"
    assert found["good"] >= count - 1


@pytest.mark.parametrize(("kind", "damage"), [("single", "lost"), ("early", "torn")])
def test_the_same_kills_find_what_is_written_wrongly(rig: Rig, kind: str, damage: str) -> None:
    found = kills(rig, kind, 12)
    assert found.get(damage, 0) > 0, found


def test_all_ranks_and_the_agent_killed_at_once(rig: Rig) -> None:
    def be_agent() -> None:
        Vault.connect(rig.run_dir)

    def be_rank(rank: int) -> None:
        pair = Vault.connect(rig.run_dir).reserve(rank, IMAGE_BYTES)
        for commits in (4, 5, 6 + rank):
            assert take(pair, commits, world=2)

    first = rig.start(grace_s=60)
    with forked(be_agent), forked(lambda: be_rank(0)), forked(lambda: be_rank(1)):
        first.close()
    vault = rig.connect()
    assert vault.inventory().members == 1
    assert common_commits(vault.inventory().stores, 2) == [5]
    assert common_commits(vault.inventory().stores, 3) == []
    for rank in (0, 1):
        assert newest(vault, rank) == 6 + rank
        assert newest(vault, rank, commits=5) == 5
    assert newest(vault, 2) is None


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("gone", "0: 5, 1: 5"),
        ("wrong behind 5", "0: 5, 1: 5"),
        *((each, "") for each in ("wrong behind 4", "job over", "taken back", "another world", "not known")),
        *((each, "") for each in ("another launcher", "no launcher's lock", "another directory")),
    ],
)
def test_the_last_work_is_done_where_nobody_comes(rig: Rig, end: str, told: str) -> None:
    """On the newest snapshots that all ranks have of one update. Not in the directory of another job, nor beside what
    another launcher has begun from something else.
    """
    vault, file, launchers = rig.start(), rig.run_dir.parent / "told", rig.run_dir / "agent-0.lock"
    for rank in (0, 1):
        with contextlib.closing(vault.reserve(rank, IMAGE_BYTES)) as pair:
            for commits in (4, 5, 6)[: 3 - rank]:
                assert take(pair, commits, world=2)
    if end != "no launcher's lock":
        launchers.touch()
    work = "unheard of" if end == "not known" else "write_down"
    until = int(end[-1]) if end.startswith("wrong behind") else -1
    vault.leave(work, 3 if end == "another world" else 2, os.fsencode(file), launchers, until)
    if end == "taken back":
        vault.leave("", 2)
    if end == "job over":
        vault.finish()
    if end == "another directory":
        rig.run_dir.rename(rig.run_dir.with_name("moved"))
        rig.run_dir.mkdir()
        launchers.touch()
        lock_of(socket_path(rig.run_dir)).touch()
    with contextlib.closing(Claim(rig.run_dir)) if end == "another launcher" else contextlib.nullcontext():
        vault.close()
        rig.holders[0].wait(TIMEOUT_S)
    assert (file.read_text() if file.exists() else "") == told


@pytest.mark.parametrize("end", ["storage is there again", "SIGTERM"])
def test_a_last_work_that_fails_is_tried_again(rig: Rig, end: str) -> None:
    """As long as the holder may stay: nobody else has the state."""
    vault, file = rig.start(grace_s=0.3), rig.run_dir.parent / "later" / "told"
    (rig.run_dir / "agent-0.lock").touch()
    with contextlib.closing(vault.reserve(0, IMAGE_BYTES)) as pair:
        assert take(pair, 5)
    vault.leave("write_down", 1, os.fsencode(file), rig.run_dir / "agent-0.lock")
    vault.close()
    log = log_path(rig.run_dir)
    assert eventually(lambda: log.read_text().count("write_down failed: FileNotFoundError") >= 2)
    assert "it stays in memory, and is tried 58 times more, every 0.3 s" in log.read_text()
    if end == "SIGTERM":
        rig.holders[0].terminate()
    else:
        file.parent.mkdir()
    rig.holders[0].wait(TIMEOUT_S)
    assert file.exists() == (end != "SIGTERM")


def test_a_killed_holder_is_replaced_and_adopts_what_lives_in_others(rig: Rig) -> None:
    vault = rig.start()
    pair = vault.reserve(0, IMAGE_BYTES)
    for commits in (1, 2):
        assert take(pair, commits)
    assert vault.pin(0, 1)
    rig.holders[0].kill()
    rig.holders[0].wait()
    with pytest.raises(HolderLostError, match=r"the holder at .* (is gone|closed)"):
        vault.inventory()
    assert not take(pair, 3)  # the pin outlives the holder that counted it
    second = rig.start()
    assert second.inventory().stores == ()
    for _ in range(2):
        second.adopt(pair)
    assert [store.rank for store in second.inventory().stores] == [0]
    assert newest(second) == 2
    assert take(pair, 3)
    again = second.reserve(0, IMAGE_BYTES)
    assert (again.identity, newest(second)) == (pair.identity, 3)
    again.close()
    pair.close()


def test_an_agent_gives_the_next_holder_what_the_dead_had(rig: Rig) -> None:
    """Rank and holder are dead. A store that the rank has outgrown goes with the holder's, or it would take up memory
    for the rest of the job. The second time the agent's own connection says nothing of the death, as on a busy machine
    the one of a process that is just dying does.
    """

    vault = rig.start()
    told: list[str] = []

    def lost(why: str) -> None:
        told.append(why)
        agent.let_go()

    agent = HeldSnapshots(rig.run_dir, 1, TrustedStates(1, 2), lambda: None, lost)
    small = vault.reserve(0, IMAGE_BYTES)
    assert take(small, 1)
    agent.keep(0, 1)
    (first,) = agent._kept[0]
    large = vault.reserve(0, 2 * IMAGE_BYTES)
    assert take(large, 2)
    agent.keep(0, 2)
    assert [each.identity for each in agent._kept[0]] == [large.identity, small.identity]
    assert take(large, 3)
    assert eventually(lambda: len(vault.inventory().stores) == 1)
    agent.keep(0, 3)
    assert [each.identity for each in agent._kept[0]] == [large.identity]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first.fd)
    for pair in (small, large):
        pair.close()
    rig.holders[0].kill()
    rig.holders[0].wait()
    with pytest.raises(HolderSilentError, match="no holder of memory snapshots listens"):
        agent.newest()  # the next one will have it

    assert asyncio.run(held_by_the_next_two(rig, agent)) == [3, 3]
    assert len(told) == 1


async def held_by_the_next_two(rig: Rig, agent: HeldSnapshots) -> list[int | None]:
    """The newest snapshots of the holders that the agent finds."""
    found: list[int | None] = []
    while len(found) < 2:
        await agent.revive()
        assert agent._process is not None
        rig.holders.append(agent._process)
        with contextlib.closing(rig.connect(member=False)) as visitor:
            found.append(newest(visitor))
        rig.holders[-1].kill()
        rig.holders[-1].wait()
    agent.let_go()
    return found


def ended(pipe: Path) -> bool:
    """Whether somebody reads a named pipe, who has its end by this."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def test_what_another_number_of_ranks_has_left_outlives_a_holder_that_writes_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one has the memory of them all, and knows what to do with it."""
    monkeypatch.setattr(held_snapshots, "WORK", "wait")
    monkeypatch.setattr(held_snapshots, "PLACE", WORKS["wait"])
    vault, pipe = rig.start(grace_s=TIMEOUT_S), rig.run_dir / "pipe"
    os.mkfifo(pipe)
    for rank in (0, 1):
        with contextlib.closing(vault.reserve(rank, IMAGE_BYTES)) as pair:
            assert take(pair, 5, world=2)
    vault.leave("wait", 2, os.fsencode(pipe), rig.run_dir / "agent-0.lock")
    vault.close()
    agent = HeldSnapshots(rig.run_dir, 1, TrustedStates(1, 2), lambda: None, lambda _: agent.let_go())

    async def come() -> None:
        assert agent.of_other_ranks() == (5, 2, rig.holders[0].pid)
        stored = asyncio.create_task(agent.store_of_other_ranks(TIMEOUT_S))
        assert await asyncio.to_thread(eventually, agent.may_write)
        rig.holders[0].kill()
        rig.holders[0].wait()
        assert await asyncio.to_thread(eventually, lambda: ended(pipe)), "the next one reads"
        assert await stored == ""
        assert agent._process is not None
        rig.holders.append(agent._process)
        agent.forget_others()
        assert list(agent._kept) == [0]
        agent.let_go()

    asyncio.run(come())


def test_a_foreign_descriptor_is_not_adopted(rig: Rig) -> None:
    vault = rig.start()
    pair = vault.reserve(0, IMAGE_BYTES)
    real, pair.fd = pair.fd, os.open("/dev/null", os.O_RDWR)
    with pytest.raises(VaultError, match="not a memfd"):
        vault.adopt(pair)
    os.close(pair.fd)
    pair.fd = real
    assert len(vault.inventory().stores) == 1


def test_the_next_agent_of_the_run_finds_the_snapshots_of_the_one_before(rig: Rig) -> None:
    script = (
        "import asyncio, sys, signal; from pathlib import Path\n"
        "from resilient_train.state.vault.holder_search import find_holder, log_path\n"
        "vault, holder = asyncio.run(find_holder(Path(sys.argv[1]), grace_s=60))\n"
        "print(holder.pid, flush=True); signal.pause()\n"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", script, str(rig.run_dir)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert agent.stdout is not None
    holder = psutil.Process(int(agent.stdout.readline()))
    try:
        pair = rig.connect().reserve(0, IMAGE_BYTES)
        assert take(pair, 7)
        pair.close()
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
        rig.vaults.pop().close()
        vault = rig.start()
        assert rig.holders == []
        assert newest(vault) == 7
        vault.finish()
        vault.close()
        holder.wait(TIMEOUT_S)
    finally:
        agent.stdout.close()
        with contextlib.suppress(psutil.NoSuchProcess):
            holder.kill()


def test_pins_press_back_and_end_with_their_process(rig: Rig) -> None:
    vault = rig.start()
    pair = vault.reserve(0, IMAGE_BYTES)
    for commits in (1, 2):
        assert take(pair, commits)

    def pin_and_fork() -> None:
        client = Vault.connect(rig.run_dir)
        assert client.pin(0, 1)
        if os.fork() == 0:  # a data loader worker: it keeps the connection open when its parent is dead
            die_with_parent(0)
            os.setsid()
            time.sleep(TIMEOUT_S)
            os._exit(0)

    with forked(pin_and_fork) as pid:
        workers = psutil.Process(pid).children()
        assert not take(pair, 3)
        assert pair.skipped == 1
        assert newest(vault) == 2
    assert eventually(lambda: take(pair, 3))
    assert all(worker.is_running() for worker in workers)
    for worker in workers:
        worker.kill()
    assert not vault.pin(0, 1)
    assert vault.pin(0, 2)
    vault.unpin(0, 2)
    with pytest.raises(VaultError, match="was not pinned by you"):
        vault.unpin(0, 2)


def test_too_little_memory_is_said_before_any_is_taken(rig: Rig) -> None:
    vault = rig.start()
    with pytest.raises(MemoryLimitError, match=r"rank 5: its two memory snapshots need \d{5}\.\d\d GiB.*Nothing was"):
        vault.reserve(5, 1 << 44)
    assert vault.inventory().stores == ()
    available = psutil.virtual_memory().available
    pair = vault.reserve(0, int(available * 0.3))  # promised by the holder, and touched by nobody
    with pytest.raises(MemoryLimitError, match="promised to other ranks"):
        vault.reserve(1, int(available * 0.3))
    vault.drop(0)
    vault.reserve(1, int(available * 0.3)).close()
    pair.close()


def test_larger_slots_take_over_when_they_hold_as_much(rig: Rig) -> None:
    vault = rig.start()
    small = vault.reserve(0, IMAGE_BYTES)
    for commits in (1, 2):
        assert take(small, commits)
    small.close()
    large = vault.reserve(0, 2 * IMAGE_BYTES)
    assert (newest(vault), len(vault.inventory().stores)) == (2, 2)
    assert take(large, 3)
    assert (newest(vault), newest(vault, commits=2)) == (3, 2)
    assert take(large, 4)
    assert eventually(lambda: len(vault.inventory().stores) == 1)
    assert (newest(vault), newest(vault, commits=2)) == (4, None)
    again = vault.reserve(0, IMAGE_BYTES)
    assert again.identity == large.identity
    for pair in (large, again):
        pair.close()


def test_it_ends_when_its_members_are_gone(rig: Rig) -> None:
    vault = rig.start()
    visitor, other = rig.connect(member=False), rig.connect()
    vault.finish()
    vault.close()
    assert other.inventory().members == 1
    other.close()
    assert rig.holders[0].wait(TIMEOUT_S) == 0
    assert not socket_path(rig.run_dir).exists()
    with pytest.raises(HolderLostError):
        visitor.inventory()
    with pytest.raises(HolderLostError, match="no holder"):
        Vault.connect(rig.run_dir)


def test_signals_for_the_job_do_not_end_it_and_sigterm_takes_its_grace(rig: Rig) -> None:
    vault = rig.start(grace_s=600)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        rig.holders[0].send_signal(number)
        assert vault.inventory().members == 1
    assert os.getsid(rig.holders[0].pid) == rig.holders[0].pid != os.getsid(0)
    vault.close()
    assert rig.holders[0].wait(TIMEOUT_S) == 0


def test_a_run_has_one_holder_however_many_ask_at_once(rig: Rig) -> None:
    threads = [threading.Thread(target=rig.start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert len(rig.vaults) == 4
    assert len(rig.holders) == 1
    assert {vault.inventory().pid for vault in rig.vaults} == {rig.holders[0].pid}


def test_work_on_a_snapshot_outlives_who_asked_for_it(rig: Rig, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    vault = rig.start()
    pair = vault.reserve(0, IMAGE_BYTES)
    for commits in (1, 2):
        assert take(pair, commits)
    asked = rig.connect()
    asked.submit("wait", [(0, 1)], bytes(pipe))
    asked.inventory()  # the work was taken in by now
    number = vault.submit("digest", [(0, 2)])
    assert vault.result(number, timeout_s=0) is None
    asked.close()
    assert not take(pair, 3)  # the work has it pinned
    pair.close()
    rig.holders[0].send_signal(signal.SIGTERM)
    pipe.write_bytes(b"go on")
    assert vault.result(number, TIMEOUT_S) == xxhash.xxh3_128_digest(content(0, 2))
    assert vault.inventory().works == 0
    with pytest.raises(VaultError, match=r"OSError: .*no room for snapshot 2"):
        vault.result(vault.submit("fail", [(0, 2)]), TIMEOUT_S)
    with pytest.raises(VaultError, match="knows no work 'flash', but"):
        vault.result(vault.submit("flash", [(0, 2)]), TIMEOUT_S)
    with pytest.raises(VaultError, match="no complete snapshot 9"):
        vault.result(vault.submit("digest", [(0, 2), (0, 9)]), TIMEOUT_S)
    vault.submit("wait", [(0, 2)], bytes(pipe))
    vault.close()
    with pytest.raises(subprocess.TimeoutExpired):
        rig.holders[0].wait(0.2)
    pipe.write_bytes(b"end")
    assert rig.holders[0].wait(TIMEOUT_S) == 0


def test_hostile_clients_harm_only_themselves(rig: Rig) -> None:
    vault = rig.start()
    for send in (
        lambda wire: wire._socket.sendall(b"GET / HTTP/1.1\r\n\r\n"),
        lambda wire: wire._socket.sendall(b"\5\0\0\0abc"),
        lambda wire: wire._socket.sendall(b"\3\0\0\0abc"),
    ):
        foreign = rig.connect(member=False)
        send(foreign._wire)
        with contextlib.suppress(HolderLostError):
            foreign._wire.receive(0.05)
        foreign.close()
    for rank, image_bytes in ((-1, 5), (0, 0), (0, 1 << 45)):
        foreign = rig.connect()
        with pytest.raises((HolderLostError, ProtocolError)):
            foreign.reserve(rank, image_bytes)
    assert eventually(lambda: vault.inventory().members == 1)


def test_the_holder_is_small(rig: Rig) -> None:
    vault = rig.start()
    pair = vault.reserve(0, 100 << 20)
    pair.prefault()
    memory = psutil.Process(rig.holders[0].pid).memory_info()
    assert memory.rss < 40 << 20
    maps = Path(f"/proc/{rig.holders[0].pid}/maps").read_text()
    assert "/torch/" not in maps
    assert "/numpy/" not in maps
    assert vault.inventory().stores[0].backed_bytes > 200 << 20
    pair.close()
