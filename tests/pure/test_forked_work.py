"""Work in a fork: its answer, or its end, is an event, and nothing of it holds anything up."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from pathlib import Path

import pytest

from resilient_train.launch.agent.forked_work import aside


def test_an_answer_of_any_size() -> None:
    async def story() -> list[bytes]:
        return await asyncio.gather(*(aside(lambda size=size: bytes(size)) for size in (0, 1, 1 << 20)))

    assert list(map(len, asyncio.run(story()))) == [0, 1, 1 << 20]


def fail() -> bytes:
    raise LookupError("it is in the log")


def die() -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


@pytest.mark.parametrize("work", [fail, die])
def test_no_answer(work: object) -> None:
    with pytest.raises(OSError, match="without an answer"):
        asyncio.run(aside(work))  # type: ignore[arg-type]


def test_who_does_not_wait_any_more_leaves_nothing_behind(tmp_path: Path) -> None:
    def work() -> bytes:
        (tmp_path / "part").write_text(str(os.getpid()))
        (tmp_path / "part").rename(tmp_path / "pid")
        time.sleep(600)
        return b""

    async def story() -> None:
        turns = 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                task = asyncio.create_task(aside(work))
                while not (tmp_path / "pid").exists() or turns < 20:
                    turns += 1
                    await asyncio.sleep(0.005)
                task.cancel()
                await asyncio.wait([task])
                raise TimeoutError

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(story())
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists(), "killed and reaped"
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_it_holds_no_lock_of_ours(tmp_path: Path) -> None:
    """One that can't be killed must not keep the next launcher out."""
    descriptor = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def work() -> bytes:
        (tmp_path / "at work").touch()
        time.sleep(600)
        return b""

    async def story() -> None:
        task = asyncio.create_task(aside(work))
        while not (tmp_path / "at work").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        os.close(descriptor)
        other = os.open(tmp_path / "lock", os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(story())
