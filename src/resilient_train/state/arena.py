"""A rank's arena: agent-owned shared memory in which the rank publishes what no replica has.

Two parts. *Slots* hold the per-rank state (RNG, loader position, unsynchronised buffers) from which an update can
start; a slot is written payload first, header last, so a rank killed at any instant leaves only complete slots. The
*log* holds what the rank gave to the collectives that the loop called after its last update (``session/peers.py``).

The memory is a memfd of the agent's, so it outlives the rank and counts against nobody's /dev/shm.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from resilient_train.errors import ConfigError, ProtocolError

MAGIC = 0x52544152454E4131
VERSION = 3
SLOTS = 4
"""Start-of-update publications come at most three times per update (after READY; if the tail changed something; where
it begins a pass over the data), and of two updates at a time the newest is needed."""

_HEADER = struct.Struct("<QQQQ")
_HEADER_BYTES = 4096
_SLOT = struct.Struct("<QQQ16s")
_SEQUENCE = struct.Struct("<Q")
_BEHIND_SEQUENCE = struct.Struct("<QQ16s")
_SLOT_HEADER_BYTES = 64
_ENTRY = struct.Struct("<III")
DEFAULT_SLOT_BYTES = 128 << 10


class LogEntry(NamedTuple):
    """One entry of a log. ``kind`` is the caller's."""

    kind: int
    meta: bytes
    data: bytes


class ArenaFullError(Exception):
    """What is to be published does not fit; ``needed_bytes`` would do."""

    def __init__(self, needed_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes needed")
        self.needed_bytes = needed_bytes


class Arena:
    """One rank's arena, mapped. The agent creates it, both sides attach."""

    def __init__(self, fd: int) -> None:
        """Maps the arena behind ``fd`` and takes the descriptor over. Raises ProtocolError if it isn't one."""
        self.fd = fd
        size = os.fstat(fd).st_size
        if size < _HEADER_BYTES:
            raise ProtocolError(f"descriptor {fd} is no arena: {size} bytes")
        self._map = mmap.mmap(fd, size)
        magic, version, self.slot_bytes, self.log_bytes = _HEADER.unpack_from(self._map)
        if (magic, version) != (MAGIC, VERSION) or size != _total_bytes(self.slot_bytes, self.log_bytes):
            raise ProtocolError(f"descriptor {fd} is no arena of version {VERSION}")
        self._stride: int = _SLOT_HEADER_BYTES + self.slot_bytes
        self._sequence = max(self._slot_header(slot)[0] for slot in range(SLOTS))
        self._log_of = _HEADER_BYTES + SLOTS * self._stride
        self._log_start = self._log_of + _SEQUENCE.size
        self._log_end = 0
        self._log_used = [0, 0]
        self._log_closed = False

    @classmethod
    def create(cls, slot_bytes: int = DEFAULT_SLOT_BYTES, log_bytes: int = 0) -> Arena:
        """A new arena in a memfd of this process. Raises ConfigError where the system has none to give."""
        fd, size = os.memfd_create("resilient-arena", os.MFD_CLOEXEC), _total_bytes(slot_bytes, log_bytes)
        try:
            os.ftruncate(fd, size)
        except OSError as error:
            os.close(fd)
            raise ConfigError(f"{size} bytes of shared memory for a rank can't be had: {error} (ulimit -f)") from None
        os.pwrite(fd, _HEADER.pack(MAGIC, VERSION, slot_bytes, log_bytes), 0)
        return cls(fd)

    def grown(self, slot_bytes: int) -> Arena:
        """A larger arena with the same publications (oldest first, so that their order stays) and the same log."""
        larger = Arena.create(slot_bytes, self.log_bytes)
        for slot in sorted(range(SLOTS), key=lambda slot: self._slot_header(slot)[0]):
            sequence, commits, _, _ = self._slot_header(slot)
            payload = self._payload(slot) if sequence else None
            if payload is not None:
                larger.publish(commits, payload)
        larger._map[larger._log_of :] = self._map[self._log_of :]  # noqa: SLF001 - of this class too
        return larger

    def publish(self, commits: int, payload: bytes) -> None:
        """Publishes the state from which update ``commits`` can start. Raises ArenaFullError if it doesn't fit."""
        if len(payload) > self.slot_bytes:
            raise ArenaFullError(len(payload))
        sequence, memory, size = self._sequence + 1, self._map, len(payload)
        start = _HEADER_BYTES + sequence % SLOTS * self._stride
        _SEQUENCE.pack_into(memory, start, 0)
        body = start + _SLOT_HEADER_BYTES
        memory[body : body + size] = payload
        digest = xxhash.xxh3_128_digest(payload, seed=commits)  # as _digest
        _BEHIND_SEQUENCE.pack_into(memory, start + _SEQUENCE.size, commits, size, digest)
        _SEQUENCE.pack_into(memory, start, sequence)
        self._sequence = sequence

    def published(self, commits: int) -> bytes | None:
        """The newest complete publication for update ``commits``, verified; None if there is none."""
        return next(self.publications(commits), None)

    def publications(self, commits: int) -> Iterator[bytes]:
        """Those for update ``commits`` that are complete, verified, the newest first."""
        for slot in sorted(range(SLOTS), key=lambda slot: -self._slot_header(slot)[0]):
            sequence, of, _, _ = self._slot_header(slot)
            if sequence and of == commits and (payload := self._payload(slot)) is not None:
                yield payload

    # -- the log

    @property
    def log_of(self) -> int:
        """After how many updates the tail is whose collectives are logged."""
        (commits,) = _SEQUENCE.unpack_from(self._map, self._log_of)
        return int(commits)

    def log_begin(self, commits: int) -> None:
        """Forgets the log: that of the tail after so many updates begins. The caller has published that it is empty."""
        _SEQUENCE.pack_into(self._map, self._log_of, commits)
        self._log_end = 0
        self._log_used = [0, 0]
        self._log_closed = False

    def log_continue(self, before: Arena) -> None:
        """Goes on with the log of the arena from which this one has grown."""
        self._log_end, self._log_used, self._log_closed = before._log_end, before._log_used, before._log_closed

    def log_append(self, kind: int, meta: bytes, data: bytes, *, aside: bool = False) -> bool:
        """Writes the next entry; False if the log is full. The caller publishes the new count (``Board.set_tail``).

        ``aside``: it takes no room from the others; there is as much for entries of this kind.
        """
        used = self._log_used[aside] + _ENTRY.size + len(meta) + len(data)
        if self._log_closed or used > self.log_bytes:
            return False
        self._write(kind, meta, data)
        self._log_used[aside] = used
        return True

    def log_close(self, kind: int) -> bool:
        """Writes an empty entry, for which there is always room, as the last one. False if that was done before."""
        if self._log_closed:
            return False
        self._write(kind, b"", b"")
        self._log_closed = True
        return True

    def _write(self, kind: int, meta: bytes, data: bytes) -> None:
        base = self._log_start + self._log_end
        _ENTRY.pack_into(self._map, base, kind, len(meta), len(data))
        base += _ENTRY.size
        self._map[base : base + len(meta) + len(data)] = meta + data
        self._log_end += _ENTRY.size + len(meta) + len(data)

    def log_read(self, offset: int) -> tuple[LogEntry, int]:
        """The entry at ``offset`` (0 is that of the first), and where the next one is. Raises ProtocolError."""
        begin, limit = offset + _ENTRY.size, _log_size(self.log_bytes)
        if begin > limit:
            raise ProtocolError("an entry of a tail log runs over its end")
        kind, meta_bytes, data_bytes = _ENTRY.unpack_from(self._map, self._log_start + offset)
        end = begin + meta_bytes + data_bytes
        if end > limit:
            raise ProtocolError("an entry of a tail log runs over its end")
        body = memoryview(self._map)[self._log_start + begin : self._log_start + end]
        try:
            return LogEntry(kind, bytes(body[:meta_bytes]), bytes(body[meta_bytes:])), end
        finally:
            body.release()

    def close(self) -> None:
        """Unmaps and closes the descriptor."""
        self._map.close()
        os.close(self.fd)

    def _slot_start(self, slot: int) -> int:
        return _HEADER_BYTES + slot * self._stride

    def _slot_header(self, slot: int) -> tuple[int, int, int, bytes]:
        sequence, commits, length, digest = _SLOT.unpack_from(self._map, _HEADER_BYTES + slot * self._stride)
        return sequence, commits, length, digest

    def _payload(self, slot: int) -> bytes | None:
        _, commits, length, digest = self._slot_header(slot)
        if length > self.slot_bytes:
            return None
        body = self._slot_start(slot) + _SLOT_HEADER_BYTES
        payload = self._map[body : body + length]
        return payload if _digest(payload, commits) == digest else None


def _digest(payload: bytes, commits: int) -> bytes:
    # The update is part of it: a header of which only this word is an older one's must not pass.
    return xxhash.xxh3_128_digest(payload, seed=commits)


def _total_bytes(slot_bytes: int, log_bytes: int) -> int:
    return _HEADER_BYTES + SLOTS * (_SLOT_HEADER_BYTES + slot_bytes) + _SEQUENCE.size + _log_size(log_bytes)


def _log_size(log_bytes: int) -> int:
    """With the entries that lie aside, and the one that closes it. What nobody writes takes no memory."""
    return 2 * log_bytes + _ENTRY.size
