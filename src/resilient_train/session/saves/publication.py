"""What a rank publishes of its own state, so that another process can start the next update in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from resilient_train.frameworks.roles import (
    GIVEN_HERE,
    NOTHING_OF_ITS_OWN,
    NOTHING_WRITTEN,
    Data,
    RankState,
    TailsWrite,
    WrittenInTail,
)
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session.agent_link import Link
from resilient_train.session.publication_format import Published, read
from resilient_train.session.redo.loader import Cursor, DataPosition
from resilient_train.session.saves.resharding import reshard
from resilient_train.session.saves.tails_seen import TailsSeen
from resilient_train.state.transfer import digest

_DRAWN = ("random numbers",)


class Publication:
    """Random state, unsynchronised buffers, loader position and the number of the step that comes next."""

    def __init__(self, link: Link, rank_state: RankState, data: Data, cursor: Cursor, replicas: Sequence[int]) -> None:
        self._link = link
        self._rank_state = rank_state
        self._data = data
        self._cursor = cursor
        cursor.looks = True
        strides = data.strides(cursor.loader)
        self._strides = (strides.batch, strides.replicas) if strides else (0, 0)
        self._encoder = msgspec.msgpack.Encoder()
        self.latest = b""
        """What was published last."""
        self.called = b""
        """What the step was to be called with that this process takes up."""
        self.headed = False
        """See ``Published``, of that."""
        self._newest: object = None
        """Its parts."""
        self._before_tail: dict[int, tuple[bytes, bytes]] = {}
        """Update -> what this rank alone had before the tail that leads to it, and the numbers that it draws from. Of
        the last two.
        """
        self._begun: tuple[int, bytes, bytes] = (-1, b"", b"")
        """The last update that was begun, with these random numbers, and with this that the rank alone had. Its first
        batch is not drawn yet: that is no tail's doing.
        """
        self._tails_draw = False
        """See ``Published``."""
        self._tails_seen = TailsSeen(link.peers, rank_state, replicas)
        self.loops = self.missed_loops = self._missed_told = 0
        """See ``Published``; and how many of them this process has not begun, since it began in a later one."""
        self.tail_cut = False
        """The process whose place this one has taken was lost in or behind an update, and had not begun the next."""
        self.behind: tuple[str, ...] = ()
        """What the tail that this process takes up may have written, and is as it was before it; and ..."""
        self.given: tuple[str, ...] = ()
        """... what is as a replica has broadcast it there."""
        self.compiled = ""
        """See ``Published``."""

    def publish(
        self, commits: int, number: int, called: bytes = b"", *, ahead: bool = False, headed: bool = False
    ) -> None:
        """Publishes what this rank needs to start update ``commits`` with step ``number``, unless it is published.
        ``ahead``: the update before is not applied yet. ``headed``: see ``Published``.
        """
        position = self._cursor.position()
        self.compiled = self.compiled or self._rank_state.compiled_for_shapes()
        own, random = self._rank_state.packed(), self._data.random_state()
        numbers = random + self._cursor.told_states()
        if ahead:
            self._before_tail[commits] = own, numbers
            self._before_tail.pop(commits - 2, None)
            self._tails_seen.tail_begins(commits, own)
        else:
            self._begun = commits, numbers, own
            self._tails_draw |= self._before_tail.get(commits, (own, numbers))[1] != numbers
            self._tails_seen.begins(commits, own)
        # Where tails have written what is told of a lost one, it counts that this one has not.
        tails = self._tails_seen.found
        draws = ahead and (self._tails_draw or tails != NOTHING_OF_ITS_OWN)
        parts = commits, number, random, position, own, called, draws, self.loops, tails, self.compiled
        if parts == self._newest:
            return
        payload = self._encoder.encode(
            Published(
                commits,
                number,
                random,
                position.epoch,
                position.taken,
                position.random,
                position.own,
                own,
                position.skipped,
                *self._strides,
                position.reused,
                called,
                position.last,
                position.drawn_from,
                ahead,
                headed,
                self._tails_draw,
                loops=self.loops,
                tails=tails,
                workers=position.workers,
                compiled=self.compiled,
            )
        )
        self._link.peers.publish(commits, payload)
        self._newest = parts
        self.latest = payload

    def newly_missed(self) -> int:
        """``missed_loops``, if that is news."""
        news, self._missed_told = self.missed_loops - self._missed_told, self.missed_loops
        return self.missed_loops if news > 0 else 0

    def pass_begun(self, commits: int, first: bytes) -> None:
        """Publishes it once more: the update has begun a pass, and ``first`` is a look at its first batch."""
        held = read(self.latest)
        if held.commits == commits and not held.begun:
            held.begun = first
            self.latest = self._encoder.encode(held)
            self._link.peers.publish(commits, self.latest)

    def around_tail(self, commits: int) -> WrittenInTail:
        """What the tail that leads to update ``commits``, and is over, has written of what this rank alone has."""
        if commits not in self._before_tail:
            return NOTHING_WRITTEN
        (own, random), (begun, numbers, had) = self._before_tail[commits], self._begun
        over = begun == commits
        drawn = random != (numbers if over else self._numbers())
        written = self._rank_state.written_since(own, had if over else None)
        return written._replace(drawn=drawn, seen=TailsWrite(self._tails_seen.at_loss(commits).apart))

    def _numbers(self) -> bytes:
        """What random numbers are drawn from next: in general, and by the loader."""
        return self._data.random_state() + self._cursor.states()

    def take_up(self, payload: bytes, tail: WrittenInTail = NOTHING_WRITTEN) -> int:
        """Puts a publication back, in this process. Returns the number of the step that comes next. ``tail``: that of
        a replica, which this rank may not have come to.
        """
        held = read(payload)
        before = held.rank if held.ahead or not tail.before else tail.before
        self._begun = -1, b"", b""
        self._tails_seen.take_up(held.tails)
        seen = TailsWrite(tuple({*tail.seen.apart, *held.tails.apart}), held.tails.alone)
        lost = tail._replace(drawn=tail.drawn or held.tails_draw, seen=seen) if held.ahead else NOTHING_WRITTEN
        self._tails_draw = held.tails_draw
        self.compiled = held.compiled
        self.missed_loops += max(0, held.loops - self.loops)
        self.loops = max(held.loops, self.loops)
        # Before the loader: its order, and its workers, may come of it.
        left = self._link.peers.left_at
        self.tail_cut = Standing(held.commits - 1, Phase.COMPUTE) < left < Standing(held.commits, Phase.COMPUTE)
        self.given = tuple(name for name, giver in lost.given if giver == GIVEN_HERE)
        self.behind = self._rank_state.restore(held.rank, lost) + (_DRAWN if lost.drawn else ())
        self._cursor.load(
            DataPosition(
                held.epoch,
                held.taken,
                held.epoch_random,
                held.loader,
                held.skipped,
                held.reused,
                held.last,
                held.drawn_from,
                held.begun,
                held.workers,
            )
        )
        self._data.restore_random_state(held.random)
        self._before_tail = {held.commits: (before, b"" if tail.drawn else self._numbers())}
        self._newest = None
        self.latest = payload
        self.called, self.headed = held.called, held.headed
        return held.number

    def elsewhere(self, own: bytes | None, first: bytes) -> tuple[bytes, dict[str, Any]]:
        """What this rank goes on from in a world of another size, see ``resharding.reshard``."""
        mine = read(own) if own is not None else None
        return reshard(self._rank_state, self._data, self._cursor, mine, read(first))

    def digest(self) -> str:
        """Of what this rank alone has, but for the place in the data."""
        return digest(self._rank_state.packed() + self._data.random_state(), [])
