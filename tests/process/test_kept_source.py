"""The agent holds on to the memory that its ranks are to start from, however long they take to come for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from test_vault import IMAGE_BYTES, TIMEOUT_S, Rig, eventually, newest, rig, take  # noqa: F401 - a fixture

from resilient_train.launch.agent.saves import Saves
from resilient_train.protocol.messages import Source
from resilient_train.state.vault.client import socket_path

GRACE_S = 0.3


def told(run_dir: Path, story: Callable[[Saves], Awaitable[None]]) -> None:
    async def tell() -> None:
        saves = Saves(run_dir, 1, 2, lambda *_, **__: None, lambda _: None, lambda _: None, asyncio.create_task)
        assert not await saves.choose()
        assert saves.start.source == Source("memory", 7)
        await story(saves)

    asyncio.run(tell())


@pytest.mark.parametrize("failed", [False, True])
def test_memory_outlives_its_grace_while_the_ranks_are_coming(rig: Rig, failed: bool) -> None:  # noqa: F811
    """A launcher was killed, another one starts: its ranks import for a minute, and longer than the holder's grace."""
    first = rig.start(grace_s=TIMEOUT_S if failed else GRACE_S)
    pair = first.reserve(0, IMAGE_BYTES)
    assert take(pair, 7)
    pair.close()

    async def story(saves: Saves) -> None:
        first.close()
        await asyncio.sleep(4 * GRACE_S)
        assert newest(rig.connect(member=False)) == 7
        await saves.finish(1.0, failed=failed)

    told(rig.run_dir, story)
    if failed:
        assert newest(rig.connect(member=False)) == 7, "the job's last state is nowhere else: for whoever comes next"
        rig.holders[0].terminate()  # to spare its grace
    assert rig.holders[0].wait(TIMEOUT_S) == 0
    assert eventually(lambda: not socket_path(rig.run_dir).exists())
