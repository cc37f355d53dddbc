"""What a rank publishes of its own state, so that another process can start the next update in its place."""

from __future__ import annotations

from typing import Any

import msgspec

from resilient_train.frameworks.base import Framework
from resilient_train.session.link import Link
from resilient_train.session.loader import Cursor, Position
from resilient_train.session.published import Published, read
from resilient_train.session.resharding import reshard


class Publication:
    """Random state, unsynchronised buffers, loader position and the number of the step that comes next."""

    def __init__(self, link: Link, engine: Framework, cursor: Cursor) -> None:
        self._link = link
        self._engine = engine
        self._cursor = cursor
        strides = engine.strides(cursor.loader)
        self._strides = (strides.batch, strides.replicas) if strides else (0, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self.latest = b""
        self.called = b""
        """What the step was to be called with that this process takes up."""
        """What was published last."""
        self._newest: object = None
        """What was published last: its parts where they can be compared, or else the bytes."""

    def publish(self, commits: int, number: int, called: bytes = b"") -> None:
        """Publishes what this rank needs to start update ``commits`` with step ``number``, unless it is published."""
        engine, position = self._engine, self._cursor.position()
        own, random = engine.rank_state(), engine.random_state()
        parts = None if position.own else (commits, number, random, position, own, called)
        if parts is not None and parts == self._newest:
            return
        payload = self._encoder.encode(
            Published(
                commits,
                number,
                random,
                position.epoch,
                position.taken,
                position.random,
                engine.pack(position.own) if position.own else b"",
                own,
                position.skipped,
                *self._strides,
                position.reused,
                called,
            )
        )
        if parts is not None or payload != self._newest:
            self._link.peers.publish(commits, payload)
        self._newest = parts or payload
        self.latest = payload

    def take_up(self, payload: bytes) -> int:
        """Puts a publication back, in this process. Returns the number of the step that comes next."""
        held = read(payload)
        loader = self._engine.unpack(held.loader) if held.loader else None
        self._cursor.load(Position(held.epoch, held.taken, held.epoch_random, loader, held.skipped, held.reused))
        self._engine.load_rank_state(held.rank)
        self._engine.restore_random_state(held.random)
        self._newest = None
        self.latest = payload
        self.called = held.called
        return held.number

    def elsewhere(self, own: bytes | None, first: bytes) -> tuple[bytes, dict[str, Any]]:
        """What this rank goes on from in a world of another size, see ``resharding.reshard``."""
        return reshard(self._engine, self._cursor, read(own) if own is not None else None, read(first))
