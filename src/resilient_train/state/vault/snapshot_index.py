"""What a holder holds: stores by rank, who has pinned what, what was promised. Knows no sockets."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

from resilient_train.errors import ProtocolError
from resilient_train.state.vault import frames, room, slots
from resilient_train.state.vault.record import Snapshot


class RefusedError(Exception):
    """A request that can't be met; see ``frames.Refused``."""

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.frame = frames.Denied(cause, text)


class SnapshotIndex:
    """Pins are by owner, any hashable thing: when it ends, ``release_all`` takes back what it has pinned."""

    def __init__(self, tightest: Callable[[], room.Room] = room.tightest) -> None:
        self._tightest = tightest
        self._stores: dict[int, list[slots.Control]] = {}
        self._pins: dict[object, Counter[tuple[str, int]]] = {}

    def reserve(self, rank: int, image_bytes: int) -> slots.Control:
        """A store of the rank that is large enough: one that is there, or a new one."""
        for store in self.of(rank):
            if store.capacity_bytes >= image_bytes:
                return store
        text = room.refusal(rank, slots.total_bytes(image_bytes), self._promised_bytes(), self._tightest())
        if text:
            raise RefusedError("memory", text)
        try:
            store = slots.Control(slots.create(rank, image_bytes))
        except OSError as error:
            raise RefusedError(
                "memory", f"rank {rank}: the kernel made no memory for its snapshots ({error})"
            ) from None
        self._stores.setdefault(rank, []).append(store)
        return store

    def adopt(self, fd: int) -> None:
        """Takes ``fd`` over. Raises RefusedError unless it is a store."""
        try:
            store = slots.Control(fd)
        except (ProtocolError, OSError, ValueError) as error:
            os.close(fd)
            raise RefusedError("wrong", str(error)) from None
        known = self._stores.setdefault(store.rank, [])
        if any(each.identity == store.identity for each in known):
            store.close()
            return
        for use in store.uses:
            use.forget_pins()
        known.append(store)

    def of(self, rank: int) -> list[slots.Control]:
        """The rank's stores, the one with the newest snapshot first."""
        return sorted(self._stores.get(rank, ()), key=_newest, reverse=True)

    def sequence(self, rank: int) -> int:
        """The highest that was begun for this rank."""
        return max((store.sequence() for store in self.of(rank)), default=0)

    def find(self, rank: int, sequence: int) -> tuple[slots.Control, Snapshot]:
        """A complete snapshot. Raises RefusedError if there is none."""
        for store in self.of(rank):
            for snapshot in store.complete():
                if snapshot.sequence == sequence:
                    return store, snapshot
        raise RefusedError("gone", f"rank {rank} has no complete snapshot {sequence} in memory")

    def pin(self, owner: object, rank: int, sequence: int) -> tuple[slots.Control, Snapshot]:
        """Keeps the snapshot from being overwritten. Raises RefusedError if it is not there."""
        store, snapshot = self.find(rank, sequence)
        use = store.uses[snapshot.slot]
        if not use.pin():
            raise RefusedError("gone", f"snapshot {sequence} of rank {rank} is being overwritten")
        # It may have been overwritten between the two looks; from now on it can't be.
        if snapshot not in store.complete():
            use.unpin()
            raise RefusedError("gone", f"snapshot {sequence} of rank {rank} has just been overwritten")
        self._pins.setdefault(owner, Counter())[store.identity, snapshot.slot] += 1
        return store, snapshot

    def unpin(self, owner: object, rank: int, sequence: int) -> None:
        """Takes back one pin of this owner. Raises RefusedError if it has none there."""
        for store in self.of(rank):
            for slot in range(slots.SLOTS):
                pins = self._pins.get(owner, Counter())
                # Discarded meanwhile or not: the record still has its number, since nobody could overwrite it.
                if store.record(slot)[1].sequence == sequence and pins[store.identity, slot] > 0:
                    pins[store.identity, slot] -= 1
                    store.uses[slot].unpin()
                    return
        raise RefusedError("wrong", f"snapshot {sequence} of rank {rank} was not pinned by you")

    def release_all(self, owner: object) -> None:
        """The owner has ended."""
        pins = self._pins.pop(owner, Counter())
        for stores in self._stores.values():
            for store in stores:
                for slot, use in enumerate(store.uses):
                    for _ in range(pins[store.identity, slot]):
                        use.unpin()

    def drop(self, rank: int) -> None:
        """Forgets the rank, pins or not: who has it mapped keeps the memory."""
        for store in self._stores.pop(rank, ()):
            store.close()

    def drop_superseded(self) -> None:
        """Of a rank that has outgrown its slots, the old ones, as soon as both of the new have a complete snapshot:
        until then another rank may lack the newest, and the job needs the one before it.
        """
        for rank in list(self._stores):
            newest, *older = self.of(rank)
            if len(newest.complete()) < slots.SLOTS:
                continue
            for store in older:
                if store.capacity_bytes < newest.capacity_bytes and not any(use.pins for use in store.uses):
                    self._stores[rank].remove(store)
                    store.close()

    def outgrown(self) -> bool:
        """Whether some rank has more than one store."""
        return any(len(stores) > 1 for stores in self._stores.values())

    def describe(self) -> tuple[frames.Store, ...]:
        """Everything that is held."""
        return tuple(describe(store) for rank in sorted(self._stores) for store in self.of(rank))

    def _promised_bytes(self) -> int:
        stores = [store for each in self._stores.values() for store in each]
        return sum(max(0, store.size_bytes - store.backed_bytes()) for store in stores)


def describe(store: slots.Control) -> frames.Store:
    """What a client is told of a store."""
    return frames.Store(
        rank=store.rank,
        identity=store.identity,
        capacity_bytes=store.capacity_bytes,
        backed_bytes=store.backed_bytes(),
        sequence=store.sequence(),
        snapshots=tuple(store.readable()),
    )


def _newest(store: slots.Control) -> tuple[int, int]:
    return max((snapshot.sequence for snapshot in store.complete()), default=0), store.capacity_bytes
