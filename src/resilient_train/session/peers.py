"""The one way from a rank to the others, and to what must outlive it: shared memory of the agent's.

The *board* has a page for each rank (standing, words) and one for the job (the stop, announcements). A rank's *arena*
holds what it publishes: its own state at the head of each update, and the *log* of its tail, the collectives after the
last update. Nothing else in a session reads or writes them; so a job of several nodes needs another Peers and no other
session.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import msgspec

from resilient_train._native import Board, Page, Probes, Watchdog, hear_terminate
from resilient_train.errors import ConfigError
from resilient_train.frameworks.roles import LoggedCall
from resilient_train.protocol.progress import Activity
from resilient_train.protocol.standing import APPLIED, COMPUTE, UPDATING, Standing, standing_of
from resilient_train.session.publication_format import read
from resilient_train.state.arena import Arena, ArenaFullError, LogEntry

_INPUT, _RESULT, _TOO_LARGE, _FULL = range(4)
"""Kinds of entries of a log. With _FULL it ends: what comes later in this tail is not in it."""
Key = tuple[str, int]
"""A collective of a tail: the group's name, and which of its calls since the update."""


class _Reader:
    """The log of one rank, read as far as it has come."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._of = -1
        self._read = self._offset = 0
        self._calls: dict[Key, LoggedCall] = {}
        self._full = False

    def calls(self, commits: int, entered: Callable[[], int]) -> dict[Key, LoggedCall] | None:
        """Those of one tail, in their order; None if the log is another one's."""
        # The tag first: who empties a log publishes that it is empty before it writes a new tag.
        of = self.arena.log_of
        if of != commits:
            return None
        if of != self._of:
            self._of, self._read, self._offset, self._calls, self._full = of, 0, 0, {}, False
        for _ in range(self._read, entered()):
            entry, self._offset = self.arena.log_read(self._offset)
            self._read += 1
            self._take(entry)
        return self._calls

    def call(self, key: Key, commits: int, entered: Callable[[], int]) -> LoggedCall | None:
        calls = self.calls(commits, entered)
        return None if calls is None else calls.get(key, LoggedCall(b"", None) if self._full else None)

    def call_at(self, place: int, commits: int, entered: Callable[[], int]) -> LoggedCall | None:
        return next(itertools.islice((self.calls(commits, entered) or {}).values(), place, None), None)

    def _take(self, entry: LogEntry) -> None:
        if entry.kind == _FULL:
            self._full = True
            return
        name, sequence, header = msgspec.msgpack.decode(entry.meta, type=tuple[str, int, bytes])
        key = name, sequence
        if entry.kind == _RESULT:
            self._calls[key] = self._calls[key]._replace(result=entry.data)
        else:
            self._calls[key] = LoggedCall(header, entry.data if entry.kind == _INPUT else None, len(self._calls))


class Peers:
    """All ranks of a node, as seen from one of them.

    ``borrow`` gives the descriptor of another rank's arena, ``reserve`` that of a larger one for this rank; both ask
    the agent.
    """

    def __init__(
        self, board: Board, rank: int, arena: Arena, borrow: Callable[[int], int], reserve: Callable[[int], int]
    ) -> None:
        self.rank = rank
        self.world_size = board.world_size
        self._board = board
        self.left_at = standing_of(board.standing(rank))
        """How far the process has come whose place this one takes."""
        self._page = Page(board, rank)
        self._arena = arena
        self._borrow, self._reserve = borrow, reserve
        self._readers: dict[int, _Reader] = {}
        self._logged = True
        """Since the last ``reset_log``. Before the first one it is not known: an attempt of which all ranks have died
        may have left a log of the very tail that comes first.
        """
        # Used in each step: a call through this object costs as much as the store itself.
        self.stop_raised = self._page.stop_raised
        self.enter_collective = self._page.enter
        self.begin_call = self._page.begin_call
        self.take_back_call = self._page.take_back_call
        self.order = self._page.order
        self.pause_due = self._page.pause_due
        self.add_computed = self._page.add_computed
        self.excuse_window = self._page.excuse

    @classmethod
    def attach(
        cls,
        rank: int,
        world_size: int,
        descriptors: tuple[int, int],
        borrow: Callable[[int], int],
        reserve: Callable[[int], int],
    ) -> Peers:
        """Maps the board and the rank's arena. Raises ConfigError if the job has another number of ranks."""
        board = Board.attach(descriptors[0])
        os.close(descriptors[0])
        if board.world_size != world_size:
            raise ConfigError(f"WORLD_SIZE is {world_size}, but this job has {board.world_size} ranks")
        return cls(board, rank, Arena(descriptors[1]), borrow, reserve)

    # -- how far ranks are

    def record(self, standing: Standing, step: int) -> None:
        """Writes this rank's step record. With APPLIED a tail begins, and with COMPUTE a window: neither has entered a
        collective. Nobody may read COMPUTE with the tail's: that is a rank which trains on where others have left.
        """
        commits, phase = standing
        if phase == APPLIED:
            self._page.begin(commits, phase, step)
            return
        if phase == COMPUTE:
            self._page.restart()
        self._page.write(commits, phase, step)

    def arrive(self, standing: Standing, step: int) -> None:
        """Writes the record, and wakes who waits for it."""
        self._page.arrive(standing.commits, standing.phase, step)

    def cross(self, standing: Standing, step: int, generation: int) -> bool:
        """Waits until all ranks stand at ``standing`` (READY) or beyond, then records UPDATING. False: stopped."""
        return self._page.cross(standing.commits, standing.phase, UPDATING, step, generation)

    def progress(self) -> tuple[int, int, int, int]:
        """This rank's step record."""
        return self._board.progress(self.rank)

    def set_activity(self, activity: Activity) -> None:
        """What this rank is at, for the hang detector."""
        self._page.set_activity(activity)

    # -- the stop

    @property
    def stop_generation(self) -> int:
        """The newest generation that was announced."""
        return self._board.stop_generation

    def wait_stop(self, generation: int, timeout_ms: int) -> bool:
        """Waits for a stop newer than ``generation``; True if there is one. Raises ValueError when closed."""
        return self._board.wait_stop(generation, timeout_ms)

    def watchdog_done(self, generation: int) -> bool:
        """Whether this rank's watchdog is done with the descriptors of older generations."""
        return self._board.stopped_generation(self.rank) >= generation

    def watchdog(self, *, beat_ms: int, grace_ms: int, signal_number: int) -> Watchdog:
        """This rank's watchdog, not yet started."""
        return Watchdog(self._board, self.rank, beat_ms=beat_ms, grace_ms=grace_ms, signal_number=signal_number)

    def hear_terminate(self) -> None:
        """From now on a first SIGTERM or SIGUSR1 is only written into this rank's page; the agent looks at it."""
        hear_terminate(self._board, self.rank)

    # -- a rank's own state

    def publish(self, commits: int, payload: bytes) -> None:
        """Publishes the state from which update ``commits`` can start. On return it outlives this process."""
        try:
            self._arena.publish(commits, payload)
        except ArenaFullError as full:
            larger = Arena(self._reserve(full.needed_bytes * 2))
            larger.log_continue(self._arena)
            self._readers.pop(self.rank, None)
            self._arena.close()
            self._arena = larger
            self._arena.publish(commits, payload)

    def published(self, commits: int) -> bytes | None:
        """What this rank, or the process whose place this one has taken, published for update ``commits``."""
        return self._arena.published(commits)

    # -- the tail

    def reset_log(self, commits: int) -> None:
        """The tail after so many updates begins."""
        if self._logged or self._arena.log_of != commits:
            self._board.set_tail(self.rank, 0, 0)
            self._arena.log_begin(commits)
            self._logged = False

    def log(self, key: Key, header: bytes, inputs: bytes) -> bool:
        """Publishes what this rank gives to a collective of the tail. False: it is too large, and that is published."""
        meta = msgspec.msgpack.encode((*key, header))
        if self._append(_INPUT, meta, inputs):
            return True
        if not self._append(_TOO_LARGE, meta, b""):
            self._end_log()
        return False

    def log_result(self, key: Key, result: bytes) -> None:
        """Publishes the result of a collective of the tail, before ``completed``; not if it is too large."""
        self._append(_RESULT, msgspec.msgpack.encode((*key, b"")), result)

    def completed(self, count: int) -> None:
        """So many calls of the tail are over: the first ones that were published."""
        self._board.set_tail(self.rank, self._board.tail(self.rank)[0], count)

    def completed_of(self, rank: int) -> int:
        """The last word of the rank's ``completed``."""
        return self._board.tail(rank)[1]

    def _append(self, kind: int, meta: bytes, data: bytes) -> bool:
        self._logged = True
        return self._arena.log_append(kind, meta, data, aside=kind == _RESULT) and self._count_entry()

    def _end_log(self) -> None:
        if self._arena.log_close(_FULL):
            self._count_entry()

    def _count_entry(self) -> bool:
        entered, completed = self._board.tail(self.rank)
        self._board.set_tail(self.rank, entered + 1, completed)
        return True

    def call(self, rank: int, key: Key, commits: int) -> LoggedCall | None:
        """What that rank, or its dead process, has logged of a collective of the tail after ``commits`` updates."""
        return self._reader_of(rank).call(key, commits, lambda: self._board.tail(rank)[0])

    def call_at(self, rank: int, place: int, commits: int) -> LoggedCall | None:
        """The same of the collective that was its ``place``-th, from 0."""
        return self._reader_of(rank).call_at(place, commits, lambda: self._board.tail(rank)[0])

    def own_state(self, rank: int, commits: int) -> bytes | None:
        """What that rank alone had in front of the tail after ``commits`` updates; None if it has not published it."""
        around = self.around_tail(rank, commits)
        return around[0] if around is not None and not around[2] else None

    def around_tail(self, rank: int, commits: int) -> tuple[bytes, bytes, bool] | None:
        """What that rank alone had in front of the tail that leads to update ``commits``, and what it has published
        since, before it begins that: which is the same if its tail has written nothing. Whether it has; None if it has
        published none of it, or it is gone.
        """
        found = [read(each) for each in self._reader_of(rank).arena.publications(commits)]
        front = next((each for each in found if each.ahead), None)
        return (front.rank, found[0].rank, not found[0].ahead) if front is not None else None

    def _reader_of(self, rank: int) -> _Reader:
        reader = self._readers.get(rank)
        if reader is None:
            arena = self._arena if rank == self.rank else Arena(self._borrow(rank))
            reader = self._readers[rank] = _Reader(arena)
        return reader

    def forget_logs(self) -> None:
        """The others' arenas may be others by now."""
        for rank, reader in self._readers.items():
            if rank != self.rank:
                reader.arena.close()
        self._readers.clear()

    # -- words

    def announce(self, commits: int, what: int) -> None:
        """Rank 0: what (0..3) all ranks do at the head of update ``commits``."""
        self._board.announce(commits, what)

    def announced(self, commits: int) -> int:
        """What was announced for update ``commits``; 0 if nothing was."""
        return self._board.announced(commits)

    @property
    def settled(self) -> int:
        """The update whose checkpoint the agent is done with, written or not."""
        return self._board.settled

    def kept(self, rank: int) -> tuple[int, int]:
        """Updates from before which the rank holds a complete snapshot in memory; 0: none."""
        return self._board.kept(rank)

    def set_kept(self, first: int, second: int) -> None:
        """The same of this rank."""
        self._board.set_kept(self.rank, first, second)

    def fingerprint(self, rank: int, commits: int) -> int:
        """What the rank has written of its replicated state from before update ``commits``; 0: nothing."""
        return self._board.fingerprint(rank, commits)

    def set_fingerprint(self, commits: int, held: int) -> None:
        """The same of this rank. An even and an odd update are held."""
        self._board.set_fingerprint(self.rank, commits, held)

    def set_order(self, order: int) -> None:
        """The word by which an operator orders a fault here."""
        self._board.set_order(self.rank, order)

    @property
    def report_asked(self) -> int:
        """Number of the newest report that the agent wants of the ranks' collectives. Raises ValueError when closed."""
        return self._board.report_asked

    def set_reported(self, number: int) -> None:
        """This rank has written that report. Raises ValueError when closed."""
        self._board.set_reported(self.rank, number)

    def alarms(self) -> list[tuple[str, str]]:
        """(probe, kind) of what this rank's probes have found since ``clear_alarms``."""
        return list(self._board.alarms(self.rank))

    def alarm_by(self, probes: Probes) -> None:
        """What these find from now on sets this rank's alarms, without its Python."""
        probes.alarm(self._board, self.rank)

    def clear_alarms(self) -> None:
        """Before the findings are taken, so that a new one in between raises its alarm again."""
        self._board.clear_alarms(self.rank)

    def close(self) -> None:
        """Unmaps the memory."""
        self.forget_logs()
        self._arena.close()
        self._board.close()
