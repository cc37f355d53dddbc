"""What a process of another user on this machine can do to a job: nothing that needs the run directory or its sockets,
and from another machine nothing at all. ``docs/security.md`` says what is still open.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import saved_jobs
import torch.distributed as dist
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from saved_jobs import STEPS, command, pid_of, wait_for, wait_for_step
from served import changed
from test_descriptors import allowed
from watched_jobs import end_holder

from resilient_train.state.vault.client import socket_path

STRANGER = 54321
"""Nobody has this number."""
LISTENS = "0A"
"""In ``/proc/net/tcp``."""
RANKS = 2


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """Where anybody may look, unlike in pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="rt-strangers-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def job(open_folder: Path) -> Iterator[tuple[Path, int]]:
    """A job that trains and saves: its run directory, and its launcher."""
    run_dir = open_folder / "run"
    script = [str(JOBS / "train.py"), "--steps", "100000", "--save", "2", "--pace", str(open_folder / "never")]
    try:
        with start([*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *script]) as process:
            wait_for_step(run_dir, 3)
            wait_for(run_dir, process, "saved")
            yield run_dir, process.pid
            assert process.poll() is None, "something ended it"
    finally:
        end_holder(run_dir)


def as_stranger(attempts: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What comes of each attempt in a process of another user: the name of its exception, or "done"."""
    hears, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            found = {}
            for name, attempt in attempts.items():
                try:
                    attempt()
                    found[name] = "done"
                except Exception as error:
                    found[name] = type(error).__name__
            os.write(tells, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(tells)
    with os.fdopen(hears) as stream:
        told = stream.read()
    os.waitpid(pid, 0)
    return json.loads(told)


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(path))


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Addresses on which these processes take TCP connections, from whatever interface."""
    held = {link for pid in pids for link in opened_by(pid)}
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in held:
                address, _, port = local.partition(":")
                words = bytes.fromhex(address)
                turned = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
                found.add((socket.inet_ntop(family, turned), int(port, 16)))
    return found


def opened_by(pid: int) -> Iterator[str]:
    """What the descriptors of its threads lead to: each may have its own, and the store's has."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            for descriptor in (thread / "fd").iterdir():
                with suppress(FileNotFoundError):  # it was just closed
                    yield str(descriptor.readlink())


def family(launcher: int) -> list[int]:
    return [launcher, *(each.pid for each in psutil.Process(launcher).children(recursive=True))]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_stranger_is_shut_out(job: tuple[Path, int]) -> None:
    run_dir, launcher = job
    rank = pid_of(run_dir, 1)
    attempts: dict[str, Callable[[], object]] = {
        "list": lambda: list(run_dir.iterdir()),
        "events": (run_dir / "events.jsonl").read_bytes,
        "logs": (run_dir / "logs" / "rank_0" / "0.err").read_bytes,
        "checkpoints": lambda: list((run_dir / "checkpoints").iterdir()),
        "agent": lambda: connect(run_dir / "agent-0.sock"),
        "holder": lambda: connect(socket_path(run_dir)),
        "lock": (run_dir / "agent-0.lock").read_bytes,
        "write": (run_dir / "mine").touch,
        "token": Path(f"/proc/{rank}/environ").read_bytes,
        "memory": lambda: Path(f"/proc/{rank}/mem").open("rb").close(),
        "snapshots": lambda: list(Path(f"/proc/{launcher}/fd").iterdir()),
        "signal": lambda: os.kill(rank, 9),
    }
    found = as_stranger({"itself": Path("/proc/self/stat").read_bytes, **attempts})
    assert found.pop("itself") == "done", "the test can fail"
    assert found == dict.fromkeys(attempts, "PermissionError")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_sockets_are_shut_even_where_the_folder_is_open(job: tuple[Path, int]) -> None:
    """A run directory that was there before keeps the mode that its owner has given it."""
    run_dir, _ = job
    run_dir.chmod(0o755)
    try:
        attempts: dict[str, Callable[[], object]] = {
            "agent": lambda: connect(run_dir / "agent-0.sock"),
            "holder": lambda: connect(socket_path(run_dir)),
            "events": (run_dir / "events.jsonl").read_bytes,
            "logs": (run_dir / "logs" / "rank_0" / "0.err").read_bytes,
            "standby": (run_dir / "logs" / "standby.log").read_bytes,
            "holder's log": (run_dir / "logs" / "holder-0.log").read_bytes,
            "stacks": (run_dir / "stacks" / "rank_0.0.txt").read_bytes,
            "lock": (run_dir / "agent-0.lock").read_bytes,
        }
        found = as_stranger({"list": lambda: list(run_dir.iterdir()), **attempts})
    finally:
        run_dir.chmod(0o700)
    assert found.pop("list") == "done", "the test can fail"
    assert found == dict.fromkeys(attempts, "PermissionError")


def test_nothing_listens_on_an_interface_that_others_reach(job: tuple[Path, int]) -> None:
    run_dir, launcher = job
    found = listening(family(launcher))
    assert listening([launcher]), "the store does"
    assert listening([pid_of(run_dir, 0)]), "gloo does"
    assert {address for address, _ in found} == {"127.0.0.1"}
    for _, number in found:
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", number), 5).close()  # another address of this machine


def test_what_is_put_into_the_store_spoils_no_recovery(tmp_path: Path) -> None:
    """Any process of this machine can write there. Ranks tell each other where they listen by way of their agent."""
    run_dir, spoilt = tmp_path / "run", threading.Event()
    with start(command(run_dir, "--steps", "60", "--pace", str(tmp_path / "go"))) as process:
        wait_for_step(run_dir, 3)
        ((host, port),) = listening([process.pid])
        store = dist.TCPStore(host, port, is_master=False)
        over = threading.Event()

        def spoil() -> None:
            while not over.wait(0.001):  # without it the stranger would have a whole core
                for key in store.list_keys():
                    store.set(key, "rubbish")
                spoilt.set()

        stranger = threading.Thread(target=spoil)
        stranger.start()
        try:
            assert spoilt.wait(60)
            for rank in range(RANKS):
                os.kill(pid_of(run_dir, rank), signal.SIGKILL)
                wait_for(run_dir, process, "resumed", rank + 1)
        finally:
            over.set()
            stranger.join()
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)
    assert [event["rank"] for event in read_events(run_dir) if event["kind"] == "fault"] == list(range(RANKS))


def test_modes(job: tuple[Path, int]) -> None:
    run_dir, _ = job
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700
    logs = [each for each in run_dir.glob("logs/**/*.*") if each.is_file()]
    for path in (run_dir / "events.jsonl", *logs, *run_dir.glob("stacks/*"), *run_dir.glob("*.sock")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_the_users_own_umask_stays(tmp_path: Path) -> None:
    """What the script itself writes is its own business."""
    (tmp_path / "script.py").write_text("import os; old = os.umask(0); print('umask', oct(old))\n")
    for number, flags in enumerate(((), ("--standby", "0"))):
        with changed(umask=0o027):
            run = launch(tmp_path / f"run{number}", tmp_path / "script.py", ranks=1, flags=flags)
        assert (run.code, run.out) == (0, "umask 0o27\n"), run.err
    found = sorted(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("run*"))
    assert found == [0o700, 0o700]


def test_a_folder_in_which_others_may_write_is_told(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o775)
    (tmp_path / "script.py").write_text("print('ran')\n")
    with start([*LAUNCHER, "--run-dir", str(run_dir), str(tmp_path / "script.py")]) as process:
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "others may write in" in err
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o775, "it is its owner's to say who may"


def is_kept(client: socket.socket) -> bool:
    """Whether who has connected is not hung up on."""
    client.settimeout(0.05)
    try:
        return bool(client.recv(1))
    except TimeoutError:
        return True
    except ConnectionResetError:
        return False


@contextmanager
def hogged(address: tuple[str, int]) -> Iterator[threading.Event]:
    """A stranger has all connections that there are there, also each one that comes free. The event: it has them."""
    over, full = threading.Event(), threading.Event()

    def take() -> None:
        with ExitStack() as held:
            while not over.is_set():
                client = socket.create_connection(address, 60)
                if is_kept(client):
                    held.enter_context(client)
                else:
                    client.close()
                    full.set()

    stranger = threading.Thread(target=take)
    stranger.start()
    try:
        yield full
    finally:
        over.set()
        stranger.join()


def test_who_holds_all_connections_of_the_store_stops_no_recovery(tmp_path: Path, undisturbed: Reference) -> None:
    """A process that takes a rank's place needs none."""
    run_dir = tmp_path / "run"
    with start(command(run_dir, "--pace", str(run_dir / "enough"))) as process:
        wait_for_step(run_dir, 2)
        (address,) = listening([process.pid])
        with allowed(process.pid, 20), hogged(address) as full:
            assert full.wait(60)
            for times, rank in enumerate((0, 2), 1):
                os.kill(pid_of(run_dir, rank), signal.SIGKILL)
                wait_for(run_dir, process, "resumed", times)
        (run_dir / "enough").touch()
        out, err = process.communicate(timeout=60)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert_identical(run, undisturbed(ranks=saved_jobs.RANKS, steps=STEPS), ranks=saved_jobs.RANKS, recoveries=2)
