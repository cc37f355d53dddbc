"""How an agent, a rank or a command talks to the holder of its node."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from resilient_train.errors import HolderLostError, HolderSilentError, MemoryLimitError, ProtocolError, VaultError
from resilient_train.state.vault import frames
from resilient_train.state.vault.record import Snapshot
from resilient_train.state.vault.slots import Control, SlotPair
from resilient_train.transport import Wire, connect, peer_of

REPLY_TIMEOUT_S = 30.0
"""For who can wait. The holder answers at once, unless it was stopped or the machine is at its end."""
_Answer = TypeVar("_Answer")
_Held = TypeVar("_Held", bound=Control)
_decoder: msgspec.msgpack.Decoder[frames.FromHolder] = msgspec.msgpack.Decoder(frames.FromHolder)


def socket_path(run_dir: Path, node: int = 0) -> Path:
    """Where the holder of a run's node listens."""
    return run_dir / f"holder-{node}.sock"


def lock_of(socket: Path) -> Path:
    """What the holder that listens there has a lock on, as long as it lives."""
    return socket.with_suffix(".lock")


def was_held(run_dir: Path, since_ns: int) -> bool:
    """Whether a run in this directory that began then (on CLOCK_REALTIME) had a state of all ranks in memory."""
    try:
        return lock_of(socket_path(run_dir)).stat().st_mtime_ns >= since_ns
    except OSError:
        return False


class Vault:
    """A connection to the holder. One thread at a time. Pins are given back when it closes, or its process ends.

    Every method raises HolderLostError when the holder is gone: start another one, and let it ``adopt`` what this
    process and others have mapped. So it does once a holder has not answered in time: the connection is closed then.
    """

    def __init__(self, wire: Wire[frames.FromHolder], reply_timeout_s: float = REPLY_TIMEOUT_S, pid: int = 0) -> None:
        self._wire = wire
        self._pid = pid
        self._reply_timeout_s = reply_timeout_s
        self._submitted = 0
        self._results: dict[int, frames.Result] = {}

    @classmethod
    def connect(
        cls,
        run_dir: Path,
        *,
        node: int = 0,
        member: bool = True,
        timeout_s: float = 10.0,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> Vault:
        """Connects as a ``member``, for which the holder stays, or as a visitor. ``reply_timeout_s``: how long each
        answer is waited for, this one too.

        Raises HolderLostError if there is no holder, HolderSilentError if there is one that does not answer, VaultError
        if one of another user listens there.
        """
        path = socket_path(run_dir, node)
        try:
            endpoint = connect(str(path), timeout_s)
        except (TimeoutError, BlockingIOError):  # so many wait for it already that the kernel takes no more
            raise HolderSilentError(f"the holder at {path} does not answer") from None
        except OSError as error:
            raise HolderLostError(f"no holder of memory snapshots listens at {path} ({error})") from None
        peer = peer_of(endpoint)
        if not peer.trusted:
            endpoint.close()
            raise VaultError(f"the holder at {path} belongs to another user: its snapshots are not to be trusted")
        wire = Wire(endpoint, _decoder, lambda reason: HolderLostError(f"the holder at {path} {reason}"))
        vault = cls(wire, reply_timeout_s, peer.pid)
        try:
            vault._ask(frames.Attach(member), frames.Acknowledged)
        except HolderLostError:  # it was just ending
            vault.close()
            raise
        return vault

    def reserve(self, rank: int, image_bytes: int) -> SlotPair:
        """Slots of ``rank`` to write, for images of up to ``image_bytes``; ``prefault`` them before the first snapshot.

        This process becomes the rank's writer: the one before it is dead. Slots that are large enough are handed out
        again with what is in them; else new ones are made, and the old stay until a newer snapshot is complete. Raises
        MemoryLimitError, before anything is allocated, if that would be too much.
        """
        reply = self._ask(frames.ReserveStore(rank, image_bytes), frames.Stores)
        (pair,) = self._map(reply, 1, writes=True)
        return pair

    def open(self, rank: int) -> list[SlotPair]:
        """All slots of ``rank``, to read, those with the newest snapshot first; the caller closes them."""
        reply = self._ask(frames.OpenStores(rank), frames.Stores)
        return self._map(reply, len(reply.stores), writes=False)

    def records(self, rank: int) -> list[Control]:
        """The same without images. Memory stays as long as any process has it open, so whoever has these can give them
        to the next holder when this one and the rank are dead.
        """
        reply = self._ask(frames.OpenStores(rank), frames.Stores)
        return self._taken(len(reply.stores), Control)

    @contextlib.contextmanager
    def newest(self, rank: int, *, commits: int | None = None) -> Iterator[tuple[SlotPair, Snapshot] | None]:
        """The newest complete snapshot of ``rank``, or the one at ``commits``, pinned inside the block; None: there is
        none.

        Its bytes are not verified: see ``SlotPair.verified``.
        """
        pairs = self.open(rank)
        found: tuple[SlotPair, Snapshot] | None = None
        try:
            candidates = [(pair, snapshot) for pair in pairs for snapshot in pair.complete()]
            for pair, snapshot in sorted(candidates, key=lambda each: -each[1].sequence):
                if commits in (None, snapshot.commits) and self.pin(rank, snapshot.sequence):
                    found = pair, snapshot
                    break
            yield found
        finally:
            if found:
                with contextlib.suppress(HolderLostError):  # it took the pins along
                    self.unpin(rank, found[1].sequence)
            for pair in pairs:
                pair.close()

    def pin(self, rank: int, sequence: int) -> bool:
        """Keeps a complete snapshot from being overwritten until ``unpin``. False: it is not there (any more)."""
        try:
            self._ask(frames.Pin(rank, sequence), frames.Acknowledged)
        except _GoneError:
            return False
        return True

    def unpin(self, rank: int, sequence: int) -> None:
        """Takes one ``pin`` back."""
        self._ask(frames.Unpin(rank, sequence), frames.Acknowledged)

    def adopt(self, held: Control) -> None:
        """Gives a new holder what this process has mapped. Nothing happens if it has it already."""
        self._ask(frames.Adopt(), frames.Acknowledged, [held.fd])

    def drop(self, rank: int) -> None:
        """Holds nothing for ``rank`` any longer; its memory is free when nobody maps it."""
        self._ask(frames.Drop(rank), frames.Acknowledged)

    def inventory(self) -> frames.Inventory:
        """All that is held, and by how many processes."""
        return self._ask(frames.AskInventory(), frames.Inventory)

    def submit(self, work: str, snapshots: Iterable[tuple[int, int]], argument: bytes = b"") -> int:
        """Has the holder do ``work`` on snapshots (rank, sequence). They stay pinned for it, even if this process dies.

        Returns its number, and waits for nothing: a snapshot that is not there, or work that the holder does not know,
        is a failure that ``result`` tells.
        """
        self._submitted += 1
        self._wire.send(frames.Submit(self._submitted, work, tuple(snapshots), argument))
        return self._submitted

    def leave(
        self, work: str, world: int, argument: bytes = b"", unless: Path = Path(os.devnull), until: int = -1
    ) -> None:
        """What the holder is to do if nobody comes for what it holds, in place of what it was told before. ``work``
        empty: nothing. ``unless``, ``until``: see ``frames.LastWork``.
        """
        self._ask(frames.LastWork(work, world, argument, str(unless), until), frames.Acknowledged)

    def do_last_work(self, until: int = -1) -> int:
        """Has the holder do what it was left with now. Returns its number, as ``submit`` does."""
        self._submitted += 1
        self._wire.send(frames.DoLastWork(self._submitted, until))
        return self._submitted

    def result(self, number: int, timeout_s: float | None = None) -> bytes | None:
        """What the work with this number gave; None if it is not over after ``timeout_s``. Raises VaultError if it
        failed, or was refused.
        """
        while number not in self._results:
            if not self._take_result(timeout_s):
                return None
        result = self._results.pop(number)
        if result.error:
            raise VaultError(result.error)
        return result.value

    def hear(self) -> None:
        """Takes in what the holder has sent, without waiting. Raises HolderLostError if that was the last of it."""
        while self._take_result(0):
            pass

    def _take_result(self, timeout_s: float | None) -> bool:
        if self.fileno() < 0:
            raise HolderLostError("the connection to the holder is closed: it had not answered in time")
        frame = self._wire.receive(timeout_s)
        if frame is None:
            return False
        if not isinstance(frame, frames.Result):
            raise ProtocolError(f"the holder sent {type(frame).__name__}, which nobody asked for")
        self._results[frame.number] = frame
        return True

    def finish(self) -> None:
        """The job is over for good: the holder need not wait for another agent."""
        self._ask(frames.JobOver(), frames.Acknowledged)

    def fileno(self) -> int:
        """Readable when a result is there, or the holder is gone; -1 when closed."""
        return self._wire.fileno()

    def close(self) -> None:
        """Leaves; what is mapped stays mapped."""
        self._wire.close()

    def _ask(self, request: msgspec.Struct, answer: type[_Answer], descriptors: Iterable[int] = ()) -> _Answer:
        self._wire.send(request, tuple(descriptors))
        while True:
            reply = self._wire.receive(self._reply_timeout_s)
            match reply:
                case frames.Result():
                    self._results[reply.number] = reply
                    continue
                case frames.Denied(cause="memory"):
                    raise MemoryLimitError(reply.text)
                case frames.Denied(cause="gone"):
                    raise _GoneError(reply.text)
                case frames.Denied():
                    raise VaultError(reply.text)
                case None:
                    self.close()  # or a late answer would be taken for that to the next question
                    what = f"the holder of memory snapshots (process {self._pid})"
                    raise HolderSilentError(f"{what} did not answer within {self._reply_timeout_s:.0f} s")
            if not isinstance(reply, answer):
                raise ProtocolError(f"the holder answered {type(request).__name__} with {type(reply).__name__}")
            return reply

    def _map(self, reply: frames.Stores, count: int, *, writes: bool) -> list[SlotPair]:
        if len(reply.stores) != count:
            raise ProtocolError(f"the holder sent {len(reply.stores)} stores instead of {count}")
        return self._taken(count, lambda fd: SlotPair(fd, writes=writes, sequence=reply.sequence))

    def _taken(self, count: int, made_of: Callable[[int], _Held]) -> list[_Held]:
        descriptors, taken = self._wire.take_descriptors(count), list[_Held]()
        try:
            for fd in descriptors:
                taken.append(made_of(fd))
        except BaseException:
            for each in taken:
                each.close()
            for fd in descriptors[len(taken) :]:
                os.close(fd)
            raise
        return taken


class _GoneError(VaultError):
    """There is no such snapshot."""


def common_commits(stores: Iterable[frames.Store], world: int, until: int = -1) -> list[int]:
    """The updates at which *all* ranks 0..world-1 have a complete snapshot, newest first: a job can restore from
    those. ``until``: none from behind this step counts.
    """
    held: dict[int, set[int]] = {rank: set() for rank in range(world)}
    for store in stores:
        held.setdefault(store.rank, set()).update(
            snapshot.commits
            for snapshot in store.snapshots
            if snapshot.world == world and (until < 0 or snapshot.step <= until)
        )
    return sorted(set.intersection(*(held[rank] for rank in range(world))), reverse=True)


def snapshots_at(stores: Iterable[frames.Store], world: int, commits: int) -> dict[int, Snapshot]:
    """Each rank's complete snapshot at that update, of those that have one."""
    held = ((store.rank, each) for store in stores for each in store.snapshots)
    return {rank: each for rank, each in held if (each.commits, each.world) == (commits, world)}
