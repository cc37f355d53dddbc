"""The files of what was anomalous are kept up to date aside: nobody waits for storage, and at the end all is there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from resilient_train.launch.agent.anomaly_files import AnomalyFiles
from resilient_train.launch.agent.event_loop import BackgroundTasks
from resilient_train.state import abnormal

NEW = ".abnormal_global_norm.json.new"


def told(story: Callable[[AnomalyFiles], Coroutine[Any, Any, None]], run_dir: Path, **known: Any) -> list[str]:
    """What the console hears while ``story`` runs."""
    said: list[str] = []

    async def run() -> None:
        await story(AnomalyFiles(run_dir, known.get("known", {}), BackgroundTasks().begin, said.append))

    asyncio.run(asyncio.wait_for(run(), 60))
    return said


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def test_at_the_end_all_is_there(tmp_path: Path) -> None:
    """Also what the runs before have left."""

    async def story(files: AnomalyFiles) -> None:
        files.keep("norm", 7, (50.0,))
        files.keep("norm", 2, (45.70,))
        files.keep("loss", 7, (float("inf"),))
        files.keep("norm", 2, (45.70, 45.706))
        await files.finish(30)

    assert told(story, tmp_path, known={("norm", 4): (44.5,), ("loss", 1): (9.0,)}) == []
    assert (tmp_path / "abnormal_global_norm.json").read_text() == '{"2": [45.7, 45.706], "4": [44.5], "7": [50.0]}\n'
    assert abnormal.read(tmp_path)["loss", 7] == (float("inf"),)


def test_where_nothing_was_anomalous_there_is_no_file(tmp_path: Path) -> None:
    async def story(files: AnomalyFiles) -> None:
        await files.finish(30)

    assert told(story, tmp_path, known={("norm", 4): (44.5,)}) == []
    assert list(tmp_path.iterdir()) == []


def test_storage_that_does_not_answer_holds_nobody_up(tmp_path: Path) -> None:
    """Opening a pipe that nobody reads from waits, as a disk that is gone does."""
    os.mkfifo(tmp_path / NEW)
    before = children()

    async def story(files: AnomalyFiles) -> None:
        files.keep("norm", 2, (45.70,))
        while children() == before:  # noqa: ASYNC110 - the loop turns, until there is one who waits for storage
            await asyncio.sleep(0.001)
        files.keep("norm", 2, (45.70, 45.706))
        await files.finish(0.2)

    (said,) = told(story, tmp_path)
    assert said.startswith("abnormal_global_norm.json: storage has not taken what is new in 0.2 s")
    assert children() == before, "nobody is left behind"


def test_what_could_not_be_written_is_tried_again_at_the_end(tmp_path: Path) -> None:
    (tmp_path / NEW).mkdir()
    said: list[str] = []

    async def story() -> None:
        told = asyncio.Event()
        files = AnomalyFiles(tmp_path, {}, BackgroundTasks().begin, lambda text: (said.append(text), told.set())[1])
        files.keep("norm", 2, (45.70,))
        await told.wait()
        (tmp_path / NEW).rmdir()
        await files.finish(30)

    asyncio.run(asyncio.wait_for(story(), 60))
    (line,) = said
    assert line.startswith("abnormal_global_norm.json can't be written, so a later run will not know of it: ")
    assert abnormal.read(tmp_path) == {("norm", 2): (45.70,)}


def test_writing_takes_a_tenth_of_the_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something is anomalous. At the end nobody rests."""
    took_s, begun = 0.05, time.monotonic()

    def slowly(run_dir: Path, what: str, values: Any) -> None:
        time.sleep(took_s)
        with (run_dir / "writes").open("a") as file:
            file.write(f"{what} {len(values)}\n")

    monkeypatch.setattr(abnormal, "write", slowly)

    async def story(files: AnomalyFiles) -> None:
        while time.monotonic() < begun + 1.5:
            for step in range(1000):
                files.keep("norm", step, (45.70,))
            await asyncio.sleep(0.005)
        files.keep("norm", 1000, (45.70,))
        await files.finish(30)

    assert told(story, tmp_path) == []
    writes = (tmp_path / "writes").read_text().splitlines()
    assert len(writes) <= 2 + 1 + 1.5 / (10 * took_s)
    assert writes[-1] == "norm 1001", "what came last is in it"
