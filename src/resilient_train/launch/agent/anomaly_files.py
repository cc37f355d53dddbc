"""Keeps the files of what was anomalous (``state/abnormal.py``) up to date, beside all else that the agent does.

A file is replaced as a whole, and flushed, by a process of its own: storage may be busy with a checkpoint, or gone, and
nobody's recovery waits for it. What comes meanwhile is written together, next. A training that has diverged adds a row
in each step to a file that becomes ever longer; so it rests between two writes, and they never take more than a
certain share of the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from resilient_train.launch.agent.forked_work import aside
from resilient_train.state import abnormal

_SOON_S = 0.2
"""First comes the recovery, whose messages would wait while this process is forked; and what the step's second run has
come to is as a rule written together with the first.
"""
_REST = 9.0
"""Times as long as a write has taken nothing is written behind it."""


class AnomalyFiles:
    """``known``: what the runs before this one have left, (``norm`` or ``loss``, step) -> values. ``begin_task``: what
    goes on in the background, with somebody to look at its end. ``say`` writes to the console.
    """

    def __init__(
        self,
        run_dir: Path,
        known: Mapping[tuple[str, int], tuple[float, ...]],
        begin_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        say: Callable[[str], None],
    ) -> None:
        self._run_dir, self._begin_task, self._say = run_dir, begin_task, say
        self._rows: dict[str, dict[int, tuple[float, ...]]] = {what: {} for what in abnormal.FILES}
        for (what, step), values in known.items():
            self._rows[what][step] = values
        self._changed: set[str] = set()
        self._failed: set[str] = set()
        """What was not written when it was tried last."""
        self._writing: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()

    def keep(self, what: str, step: int, values: tuple[float, ...]) -> None:
        """The values of that step, one for each time that it ran, are to be in the file. Returns at once."""
        self._rows[what][step] = values
        self._changed.add(what)
        self._go_on()

    async def finish(self, limit_s: float) -> None:
        """The job is over: returns when all is written, or after so long."""
        self._ending.set()
        self._changed |= self._failed
        self._go_on()
        if self._writing is None:
            return
        await asyncio.wait([self._writing], timeout=limit_s)
        if self._writing.done():
            return
        names = " and ".join(abnormal.FILES[what] for what in sorted(self._changed | self._failed))
        self._say(f"{names}: storage has not taken what is new in {limit_s:g} s, so a later run will not know of it")
        self._writing.cancel()
        await asyncio.wait([self._writing])  # its process is killed

    def _go_on(self) -> None:
        if self._changed and (self._writing is None or self._writing.done()):
            self._writing = self._begin_task(self._write())

    async def _write(self) -> None:
        await self._rest(_SOON_S)
        while self._changed:
            what, begun = self._changed.pop(), time.monotonic()
            self._failed.add(what)
            if not (problem := await self._replace(what)):
                self._failed.discard(what)
            else:
                self._say(f"{abnormal.FILES[what]} can't be written, so a later run will not know of it: {problem}")
            await self._rest(_REST * (time.monotonic() - begun))

    async def _rest(self, limit_s: float) -> None:
        """Not when the job is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), limit_s)

    async def _replace(self, what: str) -> str:
        """Returns why that has failed; empty if it has not."""

        def work() -> bytes:
            try:
                abnormal.write(self._run_dir, what, dict(sorted(self._rows[what].items())))
            except OSError as error:
                return str(error).encode()
            return b""

        try:
            return (await aside(work)).decode()
        except OSError as error:
            return str(error)
