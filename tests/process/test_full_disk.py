"""Nothing that only tells may end a job: events, logs, stacks, the holder's own words, where the disk is full or the
run directory was tidied away.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, start
from test_vault import IMAGE_BYTES, Rig, newest, rig, take  # noqa: F401 - a fixture
from watched_jobs import end_holder

from resilient_train.state.vault.client import socket_path
from resilient_train.state.vault.holder_search import log_path

RANKS = 2
WRITES = """
import sys
from resilient_train.events import now
from resilient_train.observe.sinks import JsonLines, say_aside
sink = JsonLines(sys.argv[1])
for _ in range(3):
    sink.write(now("x"))
say_aside("nobody hears this")
print(sink.dropped)
"""


@pytest.mark.parametrize("path", ["/dev/full", "/not/there/events.jsonl"])
def test_an_event_that_can_not_be_written_with_stderr_on_the_same_disk(path: str) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", WRITES, path], stdout=subprocess.PIPE, stderr=full, timeout=60, check=False
        )
    assert (done.returncode, done.stdout) == (0, b"3\n")


def test_a_holder_that_can_not_speak_holds_on(rig: Rig) -> None:  # noqa: F811
    log_path(rig.run_dir, 0).parent.mkdir()
    log_path(rig.run_dir, 0).symlink_to("/dev/full")
    vault = rig.start()
    pair = vault.reserve(0, IMAGE_BYTES)
    assert take(pair, 7)
    pair.close()
    for _ in range(3):
        stranger = rig.connect(member=False)
        stranger._wire._socket.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert newest(vault) == 7
    assert Path(f"/proc/{rig.holders[0].pid}/fd/2").readlink() == Path("/dev/full")


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=120", "tmpfs", folder], check=True, timeout=60)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=60)


def fill(disk: Path) -> None:
    """No byte can be written there any more, and no file be made."""
    try:
        with (disk / "fill").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
    except OSError:
        pass
    try:
        for number in range(1000):
            (disk / f"fill-{number}").touch()
    except OSError:
        return
    raise AssertionError("there is no end to it")


def learnt(folder: Path) -> set[str]:
    return {(folder / f"rank_{rank}").read_text() for rank in range(RANKS)}


def disturbed(run_dir: Path, out: Path, disturb: Callable[[list[int]], None], *arguments: str) -> str:
    """The job ends with 0, whatever ``disturb`` does, which gets the ranks' processes. Returns what it has said."""
    out.mkdir(exist_ok=True)
    script = [str(JOBS / "quiet.py"), str(out), *arguments]
    with start([*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *script]) as process:
        deadline = time.monotonic() + 60
        while not all((out / f"begun_{rank}").exists() for rank in range(RANKS)):
            assert time.monotonic() < deadline, "it does not begin"
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        disturb(ranks_of(process.pid, run_dir))
        (out / "enough").touch()
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    return err


def ranks_of(launcher: int, run_dir: Path) -> list[int]:
    """Their processes, in the order of ranks."""
    found = {}
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):  # of those that come and go beside the ranks
            path = str(Path(f"/proc/{pid}/fd/1").readlink())
            if "/rank_" in path and path.endswith("0.out"):
                found[path] = int(pid)
    assert len(found) == RANKS, (found, run_dir)
    return [found[path] for path in sorted(found)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    disturbed(folder / "run", folder / "out", lambda _: None)
    assert len(learnt(folder / "out")) == 1
    return learnt(folder / "out")


@pytest.mark.timeout(120)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_rank_is_replaced_on_a_full_disk(tmp_path: Path, expected: set[str]) -> None:
    with small_disk(tmp_path / "disk") as disk:

        def disturb(ranks: list[int]) -> None:
            fill(disk)
            os.kill(ranks[1], signal.SIGKILL)

        err = disturbed(disk / "run", tmp_path / "out", disturb)
    assert learnt(tmp_path / "out") == expected
    assert "training again" in err
    assert "No space left on device" in err


@pytest.mark.timeout(120)
def test_the_stacks_are_tidied_away(tmp_path: Path, expected: set[str]) -> None:
    disturbed(tmp_path / "run", tmp_path / "out", lambda _: shutil.rmtree(tmp_path / "run" / "stacks"))
    assert learnt(tmp_path / "out") == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("save", [(), ("5",)], ids=["without saves", "with saves"])
def test_the_run_directory_is_deleted_and_then_a_rank_dies(
    tmp_path: Path, expected: set[str], save: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"

    def disturb(ranks: list[int]) -> None:
        gone = run_dir.rename(run_dir.with_name("deleted"))  # at once: files come and go in it while it is emptied
        shutil.rmtree(gone, ignore_errors=True)
        os.kill(ranks[1], signal.SIGKILL)

    try:
        err = disturbed(run_dir, tmp_path / "out", disturb, *save)
    finally:
        if socket_path(run_dir).exists():
            end_holder(run_dir)
    assert learnt(tmp_path / "out") == expected
    assert "training again" in err
