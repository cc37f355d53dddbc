"""Two slots for the snapshots of one rank, in a sealed memfd that its writer, readers and the holder map.

::

    0         header: magic, version, rank, capacity, identity
    4096      slot 0: record at +0 (see record.py), use word at +256
    8192      slot 1: likewise
    65536     image of slot 0, then that of slot 1, each at a multiple of 64 KiB (the largest page size in use)

A snapshot goes into the slot that does not hold the one to be kept, the newest that all ranks have: claim it, mark it
WRITING, copy, fence, fields, release it, COMPLETE. Whenever the writer is killed, the other slot is complete; so is
this one, from the last store on.

The use word says who needs the image: bit 63 the writer, the low half the number of pins. One compare-and-exchange
lets in either, so an image is never overwritten under a reader. The holder alone counts pins, and takes back those of
the dead. A writer that was killed between its claim and its mark leaves a complete snapshot that nobody can pin: it is
nobody's source (``readable``). No snapshot is complete before its claim is given back, so this is never the newest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import uuid
from collections.abc import Callable

import xxhash

from resilient_train._native import Copier, Word, populate
from resilient_train.errors import ProtocolError, UsageError
from resilient_train.state.digest import tree_digest
from resilient_train.state.vault.record import COMMIT_BYTES, RECORD_BYTES, SlotState, Snapshot, pack, unpack

SLOTS = 2
PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64 << 10
_PREFAULT_BYTES = 64 << 20
_USE_OFFSET = 256  # on a cache line of its own, also where lines are 128 bytes
_CONTROL_BYTES = (1 + SLOTS) * PAGE_BYTES
_MAGIC = 0x31303056544C5541
_VERSION = 1
_HEADER = struct.Struct("<QIIQ16s")
_HEADER_CHECKSUM = struct.Struct("<Q")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
WRITER = 1 << 63
_PINS = (1 << 32) - 1


def stride_bytes(capacity_bytes: int) -> int:
    """What one image takes."""
    return -(-capacity_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(capacity_bytes: int) -> int:
    """What a pair of slots takes, for images of up to ``capacity_bytes``."""
    return ALIGNMENT_BYTES + SLOTS * stride_bytes(capacity_bytes)


def create(rank: int, capacity_bytes: int) -> int:
    """A memfd for a rank's pair, sealed; the caller owns it. None of its pages has memory yet but the first."""
    header = _HEADER.pack(_MAGIC, _VERSION, rank, capacity_bytes, uuid.uuid4().bytes)
    fd = os.memfd_create("resilient-snapshots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, total_bytes(capacity_bytes))
        os.pwrite(fd, header + _HEADER_CHECKSUM.pack(xxhash.xxh3_64_intdigest(header)), 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


class Use:
    """The use word of one slot."""

    def __init__(self, word: Word) -> None:
        self._word = word

    @property
    def pins(self) -> int:
        return self._word.value & _PINS

    @property
    def claimed(self) -> bool:
        """By a writer, alive or dead."""
        return bool(self._word.value & WRITER)

    def claim(self) -> bool:
        """The writer's: the image is its own until ``release``. False while it is pinned."""
        return self._word.exchange_if(0, WRITER)

    def release(self) -> None:
        """The writer's, or of the one that takes over from a dead writer."""
        self._change(lambda value: value & ~WRITER)

    def pin(self) -> bool:
        """False while a writer has claimed it."""
        return self._change(lambda value: None if value & WRITER else value + 1)

    def unpin(self) -> None:
        self._change(lambda value: value - 1 if value & _PINS else value)

    def forget_pins(self) -> None:
        """Those of a holder that is dead."""
        self._change(lambda value: value & WRITER)

    def _change(self, change: Callable[[int], int | None]) -> bool:
        while True:
            before = self._word.value
            after = change(before)
            if after is None:
                return False
            if self._word.exchange_if(before, after):
                return True

    def close(self) -> None:
        self._word.close()


class Control:
    """The records of a pair, without its images: all that the holder maps."""

    def __init__(self, fd: int, *, whole: bool = False) -> None:
        """Takes the descriptor over; where this raises, it stays the caller's.

        Raises ProtocolError if it is not a sealed pair of slots, OSError if it can't be mapped.
        """
        self.fd = fd
        self.size_bytes = os.fstat(fd).st_size
        self.rank, self.capacity_bytes, self.identity = _read_header(fd, self.size_bytes)
        self._map = mmap.mmap(fd, self.size_bytes if whole else _CONTROL_BYTES)
        self.uses = tuple(Use(Word(self._map, _page(slot) + _USE_OFFSET)) for slot in range(SLOTS))

    def record(self, slot: int) -> tuple[SlotState, Snapshot]:
        """The slot's state, and the snapshot that its record speaks of."""
        state, snapshot = unpack(self._map[_page(slot) : _page(slot) + RECORD_BYTES], self.rank, slot)
        if snapshot.image_bytes > self.capacity_bytes:
            return SlotState.EMPTY, Snapshot(rank=self.rank, slot=slot, sequence=0)
        return state, snapshot

    def complete(self) -> list[Snapshot]:
        """The complete snapshots, newest first."""
        records = [self.record(slot) for slot in range(SLOTS)]
        found = [snapshot for state, snapshot in records if state is SlotState.COMPLETE]
        return sorted(found, key=lambda snapshot: -snapshot.sequence)

    def readable(self) -> list[Snapshot]:
        """The complete ones that can be pinned, newest first."""
        return [snapshot for snapshot in self.complete() if not self.uses[snapshot.slot].claimed]

    def sequence(self) -> int:
        """The highest that was ever begun here, as far as the records tell."""
        return max(self.record(slot)[1].sequence for slot in range(SLOTS))

    def start_of(self, slot: int) -> int:
        """Where the slot's image begins in the memfd."""
        return ALIGNMENT_BYTES + slot * stride_bytes(self.capacity_bytes)

    def backed_bytes(self) -> int:
        """How much of it has memory by now."""
        return os.fstat(self.fd).st_blocks * 512

    def discard(self, sequence: int) -> None:
        """The snapshot counts no more, and its slot is the next to be overwritten: it is damaged, or the job went back
        behind it. Nothing happens if there is no such snapshot.
        """
        for snapshot in self.complete():
            if snapshot.sequence == sequence:
                self.write_record(snapshot.slot, pack(SlotState.DISCARDED, snapshot))

    def write_record(self, slot: int, data: bytes, offset: int = 0) -> None:
        """Writes a part of a slot's record: the writer's alone, and the order is what keeps it readable."""
        start = _page(slot) + offset
        self._map[start : start + len(data)] = data

    def close(self) -> None:
        """Unmaps, and closes the descriptor. Raises BufferError while a view of an image is in use."""
        for use in self.uses:
            use.close()
        self._map.close()
        os.close(self.fd)


class SlotPair(Control):
    """A rank's two slots with their images, mapped. One writer at a time in all processes; any number of readers."""

    def __init__(self, fd: int, *, writes: bool, sequence: int = 0) -> None:
        """Maps the pair behind ``fd``, see ``Control``.

        ``writes``: this process is the rank's writer from now on, and the one before it is dead. ``sequence``: numbers
        up to it have been used elsewhere.
        """
        super().__init__(fd, whole=True)
        self._writes = writes
        self._sequence = max(sequence, self.sequence())
        self._draft: SnapshotDraft | None = None
        self.skipped = 0
        """Snapshots that were not taken because a reader had the slot pinned."""
        if writes:
            for use in self.uses:
                use.release()

    def prefault(self, going: Callable[[], bool] = lambda: True) -> None:
        """Has every page backed and mapped now, without the GIL, so that no snapshot waits for the kernel.

        As long as ``going`` says so, which is asked in between. Raises OSError if there are no pages to be had.

        In the process that will write: pages come from the NUMA node of the core that asks for them first.
        """
        with memoryview(self._map) as memory:
            for start in range(0, len(memory), _PREFAULT_BYTES):
                if going():
                    populate(memory[start : start + _PREFAULT_BYTES])

    def image(self, snapshot: Snapshot) -> memoryview:
        """The bytes of a snapshot where they lie. They stay what they are as long as its slot is not overwritten."""
        return self.region(snapshot.slot)[: snapshot.image_bytes]

    def begin(self, keep: int | None = None) -> SnapshotDraft | None:
        """The slot for the next snapshot, whose image may be written from now on.

        ``keep``: the snapshot from before that update is not overwritten; where it lies elsewhere, only one slot is in
        use, so that the holder drops no older store. None: the newest is not. Returns None if a reader has pinned the
        slot (then ``skipped`` grows): try again with the next snapshot.
        """
        if not self._writes:
            raise UsageError(f"the snapshots of rank {self.rank} were opened for reading; reserve them to write")
        if self._draft and not self._draft.over:
            raise UsageError(f"snapshot {self._draft.sequence} of rank {self.rank} is neither committed nor abandoned")
        slot = self._target(keep)
        if not self.uses[slot].claim():
            self.skipped += 1
            return None
        self._sequence += 1
        begun = Snapshot(rank=self.rank, slot=slot, sequence=self._sequence)
        self.write_record(slot, pack(SlotState.WRITING, begun))
        self._draft = SnapshotDraft(self, slot, self._sequence)
        return self._draft

    def _target(self, keep: int | None) -> int:
        complete = self.complete()
        kept = next((each for each in complete if keep in (None, each.commits)), None)
        if kept is not None:
            return 1 - kept.slot
        return complete[0].slot if complete else 0

    def newest(self) -> Snapshot | None:
        """The newest complete snapshot by its record; ``verified`` looks at its bytes, too."""
        return next(iter(self.complete()), None)

    def verified(self, copier: Copier, snapshot: Snapshot, timeout_ms: int) -> bool:
        """Whether the image has its digest. Reads it once, and maps none of it; True for one that was not hashed."""
        if not snapshot.digest:
            return True
        copier.read(self.fd, self.start_of(snapshot.slot), snapshot.image_bytes, [])
        if not copier.wait(timeout_ms):
            copier.abort()
            raise TimeoutError(f"hashing {snapshot.image_bytes} bytes of rank {self.rank} took over {timeout_ms} ms")
        return image_digest(copier.digests()) == snapshot.digest

    def region(self, slot: int) -> memoryview:
        """All the room for the slot's image."""
        start = self.start_of(slot)
        return memoryview(self._map)[start : start + self.capacity_bytes]


class SnapshotDraft:
    """A snapshot that is being written. End it by ``commit`` or ``abandon``."""

    def __init__(self, pair: SlotPair, slot: int, sequence: int) -> None:
        self._pair = pair
        self.slot = slot
        self.sequence = sequence
        self.over = False
        self.image = pair.region(slot)
        """``capacity_bytes`` to be written to, at a multiple of 64 KiB."""

    def commit(
        self, *, commits: int, step: int, image_bytes: int, generation: int, world: int, digest: bytes = b""
    ) -> Snapshot:
        """The image is complete: all copies into it have been waited for. From the last store on it is the newest.

        Raises BufferError while a copier writes to ``image`` itself (a slice of it is another object, which nobody
        sees).
        """
        if image_bytes > self._pair.capacity_bytes:
            raise UsageError(f"an image of {image_bytes} bytes in a slot of {self._pair.capacity_bytes}")
        snapshot = Snapshot(
            rank=self._pair.rank, slot=self.slot, sequence=self.sequence, commits=commits, step=step,
            image_bytes=image_bytes, generation=generation, world=world, time_ns=time.time_ns(), digest=digest,
        )  # fmt: skip
        record = pack(SlotState.COMPLETE, snapshot)
        self._end()
        self._pair.write_record(self.slot, record[COMMIT_BYTES:], COMMIT_BYTES)
        self._pair.write_record(self.slot, record[:COMMIT_BYTES])
        return snapshot

    def abandon(self) -> None:
        """Gives it up; its slot stays incomplete until the next snapshot. All copies into it have been waited for."""
        self._end()

    def _end(self) -> None:
        if self.over:
            raise UsageError(f"snapshot {self.sequence} has been committed or abandoned already")
        self.image.release()
        self.over = True
        self._pair.uses[self.slot].release()


def image_digest(chunk_digests: bytes) -> bytes:
    """The digest of an image, from those of its chunks (``Copier.digests``)."""
    return bytes.fromhex(tree_digest([chunk_digests]))


def _page(slot: int) -> int:
    return (1 + slot) * PAGE_BYTES


def _read_header(fd: int, size_bytes: int) -> tuple[int, int, str]:
    refusal = f"descriptor {fd} holds no snapshots"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ProtocolError(f"{refusal}: not a memfd ({error})") from None
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"{refusal}: it could be shrunk under its readers")
    data = os.pread(fd, _HEADER.size + _HEADER_CHECKSUM.size, 0)
    if len(data) < _HEADER.size + _HEADER_CHECKSUM.size:
        raise ProtocolError(f"{refusal}: {size_bytes} bytes")
    magic, version, rank, capacity_bytes, identity = _HEADER.unpack_from(data)
    (checksum,) = _HEADER_CHECKSUM.unpack_from(data, _HEADER.size)
    if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(data[: _HEADER.size]):
        raise ProtocolError(f"{refusal}: wrong magic number or checksum")
    if version != _VERSION:
        raise ProtocolError(
            f"{refusal} of version {_VERSION}, but of {version}: all processes must run the same library"
        )
    if size_bytes != total_bytes(capacity_bytes):
        raise ProtocolError(f"{refusal}: {size_bytes} bytes for images of {capacity_bytes}")
    return rank, capacity_bytes, identity.hex()
