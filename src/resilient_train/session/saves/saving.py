"""A rank's part in saving: snapshots of its share of the state, in memory that outlives it.

A snapshot is begun with the first body of a window and copied behind its forward and backward passes. What an update
changes is whole again at the next fence: before the update, before a recovery, at the end. Not at the head of the loop:
between that and its body a script may evaluate other weights, and put its own back. Of what is written early the engine
has a copy from the second time on, and the snapshot is of that; the first time spoils it, which is seen, and told.

Which windows begin with one, the same on all ranks: see ``cadence.py``. Which of its two slots a rank overwrites:
``snapshot_names.py``. The way back: ``from_saved.py``.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from resilient_train import config
from resilient_train._native import Copier
from resilient_train.errors import (
    ConfigError,
    HolderLostError,
    LayoutError,
    ProtocolError,
    TransferError,
    VaultError,
)
from resilient_train.frameworks.roles import Image, SaveShare, State, Window
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.messages import Captured, OpenVault, SaveLast, Skipped, Source, Unsaved, VaultOpened
from resilient_train.session.agent_link import Link
from resilient_train.session.comparisons.replica_comparison import Comparison, fingerprint
from resilient_train.session.saves.autosave import cadence_for
from resilient_train.session.saves.cadence import Cadence, Due, Wish
from resilient_train.session.saves.from_saved import FromSaved, Own
from resilient_train.session.saves.publication import Publication
from resilient_train.session.saves.snapshot_in_flight import SnapshotInFlight
from resilient_train.session.saves.snapshot_names import SnapshotNames
from resilient_train.state.capture import Capture
from resilient_train.state.sharding import shares
from resilient_train.state.vault import trailer
from resilient_train.state.vault.backing import Backing
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.slots import SlotPair, SnapshotDraft
from resilient_train.tft_switches import auto_save, snapshot_steps

_REPLY_TIMEOUT_S = 2.0
"""The training waits meanwhile: if the holder does not answer, this snapshot is not taken."""
_SLOT_POLL_MS = 10
_SHORT = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}


class Saving:
    """``event`` writes an event of this rank. Off until ``every`` says how often."""

    def __init__(
        self,
        link: Link,
        state: State,
        window: Window,
        publication: Publication,
        run_dir: str,
        groups: tuple[tuple[int, ...], ...],
        event: Callable[[str, dict[str, Any]], None],
        comparison: Comparison,
    ) -> None:
        self._comparison = comparison
        self._link = link
        self._state = state
        self._window = window
        self._publication = publication
        self._run_dir = Path(run_dir)
        self._groups = groups
        self._event = event
        self._wish: Wish | None = None
        self._cadence: Cadence | None = None
        self._vault: Vault | None = None
        self._pair: SlotPair | None = None
        self._backing: Backing | None = None
        self._restoring = FromSaved(link, state, window, publication, self._run_dir, self._groups, event)
        self._copier = Copier()
        self._names = SnapshotNames(link.peers)
        self._in_flight: SnapshotInFlight | None = None
        self._fenced = False
        """What it is a copy of may have been overwritten since."""
        self._due: tuple[int, int, Due] | None = None
        """The snapshot with which the next body begins: before which update, of which step, and what for."""
        self._newest = self._step = -1

    def every(self, wish: Wish) -> None:
        """How often to save."""
        self._wish = wish

    def open(self) -> None:
        """The loop begins."""
        switches = config.read_switches()
        if self._wish is None and auto_save(switches) is not None:
            self._wish = Wish(auto=True)
        elif self._wish is None and (steps := snapshot_steps(switches)):
            self._wish = Wish(memory_steps=steps)

    def begin_at(self, commits: int) -> None:
        """The job begins after so many updates."""
        if self._wish is None:
            return
        try:
            with self._stores(self._connected()) as stores:
                self._names.begin_at(commits, stores)
        except HolderLostError as error:
            self._names.begin_at(commits, ())
            self._event("save_skipped", {"commits": commits, "reason": str(error)})
        except VaultError as error:
            self._give_up(str(error))

    def head(self, commits: int, step: int) -> None:
        """A window begins, and all that it starts from is published: is a snapshot due?"""
        self._due = None
        if self._wish is None:
            return
        due = Due.NOTHING
        try:
            self._step = step
            if self._cadence is None:
                self._cadence = cadence_for(self._wish, self._link, self._run_dir, self._event, self._leave_out)
            due = self._cadence.head(commits)
            if self._pair is None and commits:  # the first update has made all there is to save
                self._room_for(self._connected(), *self._described(step))
            if due is Due.NOTHING or commits == self._newest:
                return
            if self._comparison.doubted:
                self._skip(commits, step, "the snapshot before differs between replicas: they compare first")
                return
            off = self._names.left_off()
            if off is not None:
                reason = f"rank {off} takes no snapshots any more, and without its part there is no checkpoint"
                self._leave_off({"reason": reason, "follows": off})
                return
            self._due = commits, step, due
        except (VaultError, ConfigError, LayoutError, OSError) as error:
            self._failed(commits, step, due, error)

    def body_begins(self, commits: int) -> None:
        """The first body of a window, or another one: begins the snapshot that is due."""
        if self._due is None:
            return
        (of, step, due), self._due = self._due, None
        if of != commits or self._wish is None or self._cadence is None:
            return  # a recovery has come between
        try:
            begun_s = time.monotonic()
            self._begin(commits, step, store=due is Due.STORAGE)
            self._cadence.waited(time.monotonic() - begun_s)
        except (VaultError, ConfigError, LayoutError, OSError) as error:
            self._failed(commits, step, due, error)
        if self._in_flight is None:
            self._comparison.not_shown(commits)

    def _failed(self, commits: int, step: int, due: Due, error: Exception) -> None:
        if due is not Due.NOTHING:
            self._skip(commits, step, str(error))
        if not _passes(error):
            self._give_up(str(error))

    def _connected(self) -> Vault:
        """The holder: the one that there was, or a new one, which takes over what this rank has mapped.

        Raises HolderLostError if there is none at the moment, VaultError if there will be none.
        """
        if self._vault is not None:
            try:
                self._vault.hear()
                return self._vault
            except HolderLostError:
                self._vault.close()
                self._vault = None
        self._link.channel.send(OpenVault())
        answer = self._link.expect(VaultOpened)
        if answer.error:
            raise HolderLostError(answer.error) if answer.later else VaultError(answer.error)
        vault = Vault.connect(self._run_dir, reply_timeout_s=_REPLY_TIMEOUT_S)
        if self._pair is not None:
            try:
                vault.adopt(self._pair)
            except HolderLostError:
                vault.close()
                raise
        self._vault = vault
        return vault

    def _begin(self, commits: int, step: int, *, store: bool) -> None:
        if (
            self._in_flight is not None
        ):  # named behind the barrier of its update, it would be too late: see ``snapshot_names.py``
            self._skip(commits, step, "the snapshot before is still on its way from the device's buffers to its slot")
            return
        image, own = self._described(step)
        pair = self._room_for(self._connected(), image, own)
        for held in pair.complete():
            if held.commits == commits:  # a rank that took this one's place finds its snapshot
                self._newest = commits
                self._names.found(commits)
                known = self._comparison.write(commits) if store else 0
                self._link.channel.send(Captured(commits, held.step, held.sequence, store, fingerprint=known))
                return
        draft = self._names.begin(pair)
        if draft is None:
            self._skip(commits, step, "the snapshot before last is still being read")
            return
        self._copy(draft, image, commits, step, own, store=store)
        self._newest = commits

    def _known(self, commits: int, *, store: bool) -> Callable[[], int]:
        """What replicas compare it by. Memory is read behind the copy: what changes there without a sign is seen if it
        may be in the copy. A device's memory is read now, and only for what goes to storage.
        """
        if self._comparison.alone:
            return lambda: 0
        if not self._state.on_host():
            held = self._comparison.write(commits) if store else 0
            return lambda: held
        made = self._state.fingerprint(after=self._copier)
        return lambda: fingerprint(made.digest())

    def _leave_out(self, commits: int, reason: str) -> None:
        """No rank takes the snapshot that is due at the next window, which begins with the next step or a later one."""
        self._skip(commits, self._step + 1, reason)

    def _skip(self, commits: int, step: int, reason: str) -> None:
        """This rank has no snapshot for that update, and nobody is to wait for it."""
        self._link.channel.send(Skipped(commits, step, f"rank {self._link.rank}: {reason}"))

    def last(self, generation: int, commits: int, step: int, order: SaveLast | None) -> None:
        """The job ends: a snapshot of the state, which stands still, for the end-of-life checkpoint.

        ``order`` says this rank's part where not all ranks are left. The agent is told if it can't be done.
        """
        try:
            self._capture_last(generation, commits, step, order)
        except (ProtocolError, TransferError, VaultError, OSError) as error:
            self._link.channel.send(Unsaved(generation, f"rank {self._link.rank}: {error}"))

    def _capture_last(self, generation: int, commits: int, step: int, order: SaveLast | None) -> None:
        self.wait()
        published = self._link.peers.published(commits)
        if published is None:
            raise ProtocolError(f"it had published nothing from which update {commits} starts")
        everybody = [rank for group in self._groups for rank in group]
        share = self._share(everybody.index(self._link.rank))
        if order is not None:
            share = SaveShare(order.part, order.parts, order.shard, order.shards)
        image = self._state.image(step, share)
        others = order.others if order is not None else {}
        own = {rank: self._packed(each, image) for rank, each in {self._link.rank: published, **others}.items()}
        pair = self._room_for(self._connected(), image, own)
        while (draft := self._names.begin(pair)) is None:
            # Storage still reads the snapshot before last. The agent ends this process when the time is over.
            if self._link.peers.wait_stop(generation, _SLOT_POLL_MS):
                return
        self._complete(self._copy(draft, image, commits, step, own, store=True, last=generation))

    def _described(self, step: int) -> tuple[Image, dict[int, bytes]]:
        image = self._state.image(step, self._share())
        return image, {self._link.rank: self._packed(self._publication.latest, image)}

    def _packed(self, published: bytes, image: Image) -> bytes:
        return msgspec.msgpack.encode(
            Own(published, self._window.layout(), image.division, self._window.changed_beside(sometimes=True))
        )

    def _copy(
        self,
        draft: SnapshotDraft,
        image: Image,
        commits: int,
        step: int,
        own: dict[int, bytes],
        *,
        store: bool,
        last: int = -1,
    ) -> SnapshotInFlight:
        if self._backing is not None:
            self._backing.wait()
        memory = draft.image[: image.total_bytes]
        capture: Capture | None = None
        try:
            capture = image.begin(memory, self._copier)
            known = self._known(commits, store=store)
        except BaseException:
            if capture is not None:
                capture.abort()
            memory.release()  # the error's traceback would keep it, and the slots could not be closed
            draft.abandon()
            raise
        self._in_flight, self._fenced = (
            SnapshotInFlight(draft, image, capture, commits, step, own, store, last, known),
            False,
        )
        return self._in_flight

    @property
    def will_show(self) -> bool:
        """Whether replicas will see, before the update, what the snapshot is of with which the body begins."""
        return self._due is not None and not self._comparison.alone and self._state.on_host()

    def fence(self) -> None:
        """Waits until what the snapshot that was begun is a copy of may be overwritten; most often it is complete then.

        One that can't be copied (its memory, or its device, fails) is given up, and the agent told.
        """
        flying = self._in_flight
        if flying is None:
            return
        begun_s = time.monotonic()
        try:
            self._comparison.show(flying.commits, flying.fingerprint())
            flying.capture.fence()
            self._look(flying)
            if flying.capture.done:
                self._complete(flying)
        except TransferError as error:
            self._abandon()
            self._skip(flying.commits, flying.step, str(error))
        if self._cadence is not None:
            self._cadence.waited(time.monotonic() - begun_s)

    def wait(self) -> None:
        """Waits until the snapshot that was begun is complete. One that can't be is given up, and the agent told."""
        flying = self._in_flight
        if flying is None:
            return
        try:
            self._look(flying)
            self._complete(flying)
        except TransferError as error:
            self._abandon()
            self._skip(flying.commits, flying.step, str(error))

    def _look(self, flying: SnapshotInFlight) -> None:
        """At the first fence. Raises TransferError for a copy of what has changed meanwhile."""
        fenced, self._fenced = self._fenced, True
        if not fenced and (name := flying.image.changed()):
            raise TransferError(f"{name!r} was written before the update of its step, while it was copied")

    def _complete(self, flying: SnapshotInFlight) -> None:
        try:
            captured = flying.complete(self._link.generation, self._link.world_size)
        except TransferError:
            self._abandon()
            raise
        self._in_flight = None
        self._names.complete(flying.commits)
        self._link.channel.send(captured)

    def _abandon(self) -> None:
        flying, self._in_flight = self._in_flight, None
        if flying is not None:
            flying.abandon()

    def close(self) -> None:
        """Lets go of the memory; the holder keeps it. Idempotent."""
        self._abandon()
        self._let_go()
        if self._vault is not None:
            self._vault.close()
            self._vault = None

    def restore(self, source: Source) -> bytes:
        """See ``FromSaved.restore``."""
        published = self._restoring.restore(source)
        self._newest = source.commits
        return published

    def _share(self, shard: int | None = None) -> SaveShare:
        """``shard``: the number of this rank's; see ``state/vault/flush.Flush.savers``."""
        rank, world_size = self._link.rank, self._link.world_size
        mine = next(each for each in shares(self._groups) if each.holders[0] == rank)
        return SaveShare(mine.part, mine.of, rank if shard is None else shard, world_size)

    def _room_for(self, vault: Vault, image: Image, own: dict[int, bytes]) -> SlotPair:
        size = trailer.size_bytes(image.total_bytes, image.tree, image.names, own)
        needed = trailer.start_of(image.total_bytes) + size
        if self._pair is None:
            with self._stores(vault) as stores:
                self._names.lacks(stores)
        if self._pair is None or self._pair.capacity_bytes < needed:
            self._let_go()
            self._pair = vault.reserve(self._link.rank, trailer.room_bytes(image.total_bytes, size))
            self._backing = Backing(self._pair)
        return self._pair

    @contextlib.contextmanager
    def _stores(self, vault: Vault) -> Iterator[list[SlotPair]]:
        """All that the holder has of this rank."""
        stores = vault.open(self._link.rank)
        try:
            yield stores
        finally:
            for pair in stores:
                pair.close()

    def _let_go(self) -> None:
        if self._backing is not None:
            self._backing.close()
            self._backing = None
        if self._pair is not None:
            self._pair.close()
            self._pair = None

    def _give_up(self, reason: str) -> None:
        """Nothing can be saved, or no more; the training goes on without. The other ranks leave off with the next."""
        self._leave_off({"reason": reason})
        say_aside(f"rank {self._link.rank} saves nothing any more: {reason}")

    def _leave_off(self, detail: dict[str, Any]) -> None:
        self.close()
        self._wish = None
        self._names.leave_off()
        self._event("save_off", detail)


def _passes(error: Exception) -> bool:
    """Whether the next snapshot may succeed: it will find another holder, or what was short for a moment."""
    return isinstance(error, HolderLostError) or (isinstance(error, OSError) and error.errno in _SHORT)
