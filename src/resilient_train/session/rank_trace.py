"""What a rank's machine was told, and what it wanted done: with ``RESILIENT_TRACE`` in a file for each process.

One line of JSON for each event, written before the effects are performed, so that a kill loses at most a line's end.
``testing/replay.py`` reads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from resilient_train.config import AgentLink
from resilient_train.errors import ProtocolError
from resilient_train.observe.sinks import open_to_append, say_aside
from resilient_train.protocol.rank import Effects, Rank

FOLDER = "rank_traces"


class Made(msgspec.Struct, frozen=True, tag="made"):
    """A process begins, with a machine that was made so. Those of a later run in this directory follow in one file."""

    me: int
    options: dict[str, Any]


class Turn(msgspec.Struct, frozen=True, tag="turn"):
    """One event, and its effects, as what they are encoded to. ``refused``: the machine's error instead of effects."""

    time_ns: int
    event: Any
    effects: tuple[Any, ...] = ()
    refused: str = ""


class Torn(msgspec.Struct, frozen=True, tag="torn"):
    """The last line: the rest could not be written, and why."""

    why: str


def path_of(run_dir: Path, rank: int, incarnation: int) -> Path:
    """The file of one process."""
    return run_dir / FOLDER / f"rank_{rank}.{incarnation}.jsonl"


class RankTrace:
    """Makes the rank's machine. If ``wanted``, one that writes.

    Where that fails (the disk is full) it is said once, and the training goes on without it.
    """

    def __init__(self, agent: AgentLink, *, wanted: bool) -> None:
        self._path = path_of(Path(agent.run_dir), agent.rank, agent.incarnation)
        self._wanted = wanted
        self._encoder = msgspec.json.Encoder()
        self._descriptor = -1

    def machine(self, me: int, **options: Any) -> Rank:
        """``Rank(me, **options)``."""
        if not self._wanted:
            return Rank(me, **options)
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = open_to_append(self._path)
        except OSError as error:
            self._give_up(str(error))
        # The line of a process that was killed may have no end.
        self._write(Made(me, options), before=b"\n")
        return _Traced(self._write, me, **options)

    def _write(self, line: Made | Turn, before: bytes = b"") -> None:
        if self._descriptor < 0:
            return
        try:
            encoded = before + self._encoder.encode(line) + b"\n"
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            encoded, why = self._encoder.encode(Torn(repr(error))) + b"\n", repr(error)
        else:
            why = ""
        try:
            if os.write(self._descriptor, encoded) < len(encoded):
                why = "the disk is full; the last line is cut"
        except OSError as error:
            why = str(error)
        if why:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        say_aside(f"what this rank does can't be written to {self._path} any more: {why}")
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class _Traced(Rank):
    __slots__ = ("_write",)

    def __init__(self, write: Callable[[Made | Turn], None], me: int, **options: Any) -> None:
        super().__init__(me, **options)
        self._write = write

    def on(self, event: Any) -> Effects:
        try:
            effects = super().on(event)
        except ProtocolError as error:
            self._write(Turn(time.time_ns(), event, refused=str(error)))
            raise
        self._write(Turn(time.time_ns(), event, effects))
        return effects
