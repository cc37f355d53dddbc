"""Has the holder write snapshots to storage: one checkpoint at a time, and knows how each ended.

    what is done                      | a snapshot of all is there | the script says: wrong since | it is over
    ----------------------------------|----------------------------|------------------------------|--------------------
    nothing                           | it is written, or (*)      |                              |
    one is written                    | it is left out             | a later one than that is     | nothing is done
                                      |                            | wrong                        |
    one is written, and it is wrong   | it is left out             |                              | (*) if it is there
    wrong ones are set aside          | it is left out             |                              | nothing is done

(*) While wrong ones may lie on storage (``TrustedStates.wrong_stored``) they are set aside, and no other is written.
The end-of-life checkpoint is not left out: it waits until nothing is done, and no longer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train.errors import HolderLostError, VaultError
from resilient_train.launch.agent.held_snapshots import HeldSnapshots
from resilient_train.launch.agent.save_troubles import SaveTroubles, Teller
from resilient_train.launch.agent.stored_checkpoints import set_wrong_aside
from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.protocol.messages import Captured
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.flush import LEFT, WORK, Flush, Flushed

Groups = tuple[tuple[int, ...], ...]
"""Ranks that are replicas of one another."""


class PendingCheckpoint(NamedTuple):
    """A checkpoint on its way to storage."""

    step: int
    commits: int
    begun_ns: int
    number: int
    """Of the holder's work."""
    over: Callable[[str], None] | None = None
    """Of an end-of-life checkpoint: is told how it ended."""
    wrong: bool = False
    """It is of a history that the job has left, and must not be found when it is written."""


class CheckpointRequests:
    """See the module's text."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        states: TrustedStates,
        snapshots: HeldSnapshots,
        troubles: SaveTroubles,
        note: Teller,
        settle: Callable[[int], None],
        begin_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clean: Callable[[], None],
    ) -> None:
        """``settle`` is told of an update when all checkpoints up to it are over and done with, written or not.
        ``begin_task``: what goes on in the background, with somebody to look at its end. ``clean`` is told when nothing
        that is wrong is on storage any more.
        """
        self._folder = folder
        self._keep = keep
        self._states = states
        self._snapshots = snapshots
        self._troubles = troubles
        self._note = note
        self._settle = settle
        self._begin_task = begin_task
        self._clean = clean
        self._libraries = libraries_here()  # now: it opens files, and there may be no descriptors when it is asked for
        self.under_way: PendingCheckpoint | None = None
        self.aside: asyncio.Task[None] | None = None
        """Sets wrong checkpoints aside."""
        self._last: Callable[[], None] | None = None
        """The end-of-life checkpoint, waiting for what is done before it."""
        self._newest_over = 0
        self.last_failed = False
        """The end-of-life checkpoint could not be written."""

    @property
    def busy(self) -> bool:
        """Whether anything is done."""
        return self.under_way is not None or self.aside is not None

    # -- what is due

    def store(self, ranks: Mapping[int, Captured], groups: Groups) -> None:
        """All ranks have a snapshot that is to be written. It is left out where storage can't take it now."""
        first = ranks[0]
        if self.under_way is not None:
            self._leave_out(first, f"storage is still busy with that of step {self.under_way.step}")
        elif self._states.wrong_stored is not None:
            self.set_aside()
            since = self._states.wrong_stored
            self._leave_out(first, f"those from behind step {since} are wrong, and are set aside first")
        else:
            self._submit(self._job(first, groups, groups), ranks)

    def store_last(
        self, ranks: Mapping[int, Captured], groups: Groups, savers: Groups, reason: str, over: Callable[[str], None]
    ) -> None:
        """Writes the end-of-life checkpoint from the savers' snapshots. ``over`` is told, once, how that ended."""
        first = next(iter(ranks.values()))
        job = msgspec.structs.replace(self._job(first, groups, savers), kind="ttp", reason=reason)
        self._last = lambda: self._submit(job, ranks, over)
        if self._states.wrong_stored is not None and self.under_way is None:
            self.set_aside()
        self._go_on()

    def _job(self, of: Captured, groups: Groups, savers: Groups) -> Flush:
        return Flush(
            folder=str(self._folder),
            step=of.step,
            commits=of.commits,
            replica_groups=groups,
            libraries=self._libraries,
            keep=self._keep,
            savers=savers,
            agreed_step=self._states.agreed_step,
        )

    def store_left(self, ranks: Mapping[int, Captured], groups: Groups) -> None:
        """Writes what is in memory when a job ends that has not saved it. Nothing else is done by then."""
        self._submit(self._left(groups), ranks)

    def left(self, groups: Groups, wrong_since: int | None = None) -> bytes:
        """What is to be written if nobody is there any more to say what: see ``HeldSnapshots.leave``."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self._left(groups), wrong_since=wrong_since))

    def _left(self, groups: Groups) -> Flush:
        job = self._job(Captured(LEFT, LEFT, 0, store=True), groups, groups)
        return msgspec.structs.replace(job, reason="left in memory", agreed_step=-1)

    def _submit(self, job: Flush, ranks: Mapping[int, Captured], over: Callable[[str], None] | None = None) -> None:
        first = next(iter(ranks.values()))
        save = PendingCheckpoint(first.step, first.commits, time.monotonic_ns(), 0, over)
        vault = self._snapshots.vault
        if vault is None:
            self._failed(save, "the snapshots' holder is gone; the next save starts another")
            return
        snapshots = [(rank, frame.sequence) for rank, frame in sorted(ranks.items())]
        try:
            number = vault.submit(WORK, snapshots, msgspec.msgpack.encode(job))
        except HolderLostError as error:  # if it is news: the event loop hears of it next
            self._failed(save, str(error))
            return
        self.under_way = save._replace(number=number)

    def _leave_out(self, of: Captured, reason: str) -> None:
        self._troubles.tell("save_skipped", of.step, reason)
        self.over(of.commits)

    def _go_on(self) -> None:
        if self._last is not None and not self.busy:
            last, self._last = self._last, None
            last()

    # -- what has become of it

    def take_result(self, vault: Vault) -> None:
        """The holder has sent something. Raises HolderLostError if it is gone."""
        save = self.under_way
        if save is None:
            return
        try:
            value = vault.result(save.number, 0)
        except HolderLostError:
            raise
        except VaultError as error:
            self.under_way = None
            self._failed(save, str(error))
            self._go_on()
            return
        if value is None:
            return
        self.under_way = None
        if save.wrong:
            self._troubles.tell("save_skipped", save.step, "it is wrong, and is set aside")
            self.set_aside()
        else:
            self._written(save, msgspec.msgpack.decode(value, type=Flushed))

    def _written(self, save: PendingCheckpoint, flushed: Flushed) -> None:
        took_ns = time.monotonic_ns() - save.begun_ns
        detail = {"step": save.step, "commits": save.commits, "path": flushed.path, "duration_ns": took_ns}
        nan = {"nan_tensors": flushed.nan.tensors} if flushed.nan else {}
        self._note("saved", detail={**detail, "bytes": flushed.size_bytes, **nan})
        self._states.stored(save.step, nan=bool(flushed.nan))
        self._troubles.written(save.step)
        if flushed.untidy:
            self._troubles.tell("retention_failed", save.step, flushed.untidy)
        if save.over is not None:
            holds = f". It holds {flushed.nan}" if flushed.nan else ""
            save.over(f"its state from after {save.commits} updates is saved: {flushed.path}{holds}")
        elif flushed.nan:
            told = f"{flushed.nan}; the newest one without stays, if there is one"
            self._troubles.tell("nan_saved", save.step, told)
        self.over(save.commits)
        self._go_on()

    def _failed(self, save: PendingCheckpoint, reason: str) -> None:
        self._troubles.tell("save_failed", save.step, reason, ends=save.over is not None)
        if save.over is not None:
            self.last_failed = True
            save.over(f"its state could not be saved: {reason}")
        self.over(0 if save.wrong else save.commits)

    def holder_lost(self, reason: str) -> None:
        """Nobody will say what has become of what is under way. A holder that only stood still may yet write it."""
        save, self.under_way = self.under_way, None
        if save is not None:
            self._failed(save, reason)
        self._go_on()

    def over(self, commits: int) -> None:
        """There will be no other checkpoint up to that update. 0: what was done was of no update of this history."""
        self._newest_over = max(self._newest_over, commits)
        if self.under_way is None:
            self._settle(self._newest_over)

    # -- what is wrong

    def distrust(self, step: int) -> None:
        """What is written from behind that step is not to be found."""
        if self.under_way is not None and self.under_way.step > step:
            self.under_way = self.under_way._replace(wrong=True)

    def set_aside(self) -> None:
        """What lies on storage from behind the wrong step gets a name that nobody goes on from, if that is not done."""
        if self.aside is None:
            self.aside = self._begin_task(self._set_aside())

    async def _set_aside(self) -> None:
        since, reason = self._states.wrong_stored, ""
        if since is not None:
            held = not self._states.going_back or self._snapshots.is_there()
            unheard = self._snapshots.may_write()  # asked before: what lands behind the look at storage is not seen
            reason = await set_wrong_aside(self._folder, since, held=held)
            if unheard and not reason:
                reason = "the holder of memory snapshots may still write one"
        self.aside = None
        if reason:
            self._troubles.tell("wrong_stay", None, reason)
        elif self._states.wrong_stored == since:
            self._states.wrong_stored = None
            self._clean()
        self.over(0)
        self._go_on()

    def begin_anew(self) -> None:
        """All ranks start again: what was over counts no more."""
        self._newest_over = 0
        self._settle(0)
