"""The agent's part in saving: has snapshots that all ranks hold written to storage, and knows what to start again from.

The work is the holder's (``state/vault``): it goes on if this process dies. Sources are tried in the order memory,
storage; one that a rank has refused is not tried again. The holder of a source is held on to until the job is over: the
ranks may take long to come for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.errors import HolderLostError, HolderSilentError, VaultError
from resilient_train.launch.agent.checkpoint_writer import CheckpointWriter, Groups
from resilient_train.launch.agent.held_snapshots import HeldSnapshots
from resilient_train.launch.agent.restore_points import Stored, find_stored, is_there
from resilient_train.launch.agent.save_troubles import SaveTroubles, Teller
from resilient_train.launch.agent.saved_states import SavedStates
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.protocol.messages import Captured, Skipped, Source, VaultOpened
from resilient_train.protocol.replicas import disagreeing

_SLOW_S = 30.0
_PATIENCE_S = 60.0
"""For storage that does not let itself be read, when all ranks have lost their state: it may come back. And for storage
that does not answer, where memory has a state.
"""
_LOOK_AGAIN_S = 1.0
_SEE_S = 10.0
"""At the end of a job it is told what is left, if storage says so within this time."""


class _Seen(NamedTuple):
    """What there is to go on from. ``silent``: why the holder of memory could not be asked, though it is there."""

    memory: Source | None
    silent: str
    stored: Stored

    @property
    def newest(self) -> Source | None:
        return _newest(self.memory, self.stored.source)


class Saves:
    """See the module's text. ``say`` writes to the console: storage that fails is told there once, until it is well."""

    def __init__(
        self,
        run_dir: Path,
        world_size: int,
        keep: int,
        note: Teller,
        say: Callable[[str], None],
        settle: Callable[[int], None],
        begin_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """``settle`` and ``begin_task``: see CheckpointWriter."""
        self._folder = run_dir / CHECKPOINTS
        self._world_size = world_size
        self._note = note
        self._say = say
        self.states = states = SavedStates(world_size, keep)
        self._snapshots = HeldSnapshots(run_dir, world_size, states, self._hear, self._lost)
        self._troubles = SaveTroubles(note, say)
        self._writer = CheckpointWriter(
            self._folder, keep, states, self._snapshots, self._troubles, note, settle, begin_task
        )
        self.source: Source | None = None
        """What all ranks start from: the newest state that is whole. None: from the script's own."""
        self._wanted = False
        """The ranks keep snapshots, or would."""
        self._captured: dict[int, dict[int, Captured]] = {}

    async def open(self) -> VaultOpened:
        """The ranks want to keep snapshots, see HeldSnapshots."""
        self._wanted = True
        return await self._snapshots.open()

    # -- what all start from

    async def choose(self, *, needed: bool = False) -> str:
        """Sets ``source``. Returns why that is impossible: there may be checkpoints, but the storage does not let us
        see, and nothing is in memory (snapshots there are as new as what was written of them). ``needed``: the ranks
        have lost a state. Then the storage has some time to come back, and it is impossible as well where there is
        nothing, though it was meant to be kept by the ranks themselves alone; and, once replicas have differed, where
        nothing is of before.
        """
        self._captured.clear()  # by ranks that are no more
        self._writer.begin_anew()
        self.source = None
        try:
            return self._take(await self._found(_PATIENCE_S if needed else 0), needed=needed)
        finally:
            self.states.going_back = False
            self._snapshots.unpin()

    async def _found(self, patience_s: float) -> _Seen:
        """``patience_s``: for storage. A holder that does not answer is waited for at a job's start as well: nothing is
        lost by that but the time.
        """
        storage_by = time.monotonic() + patience_s
        if self.states.wrong_stored is not None:  # what is being written may be wrong, or the newest that is right
            while self._writer.under_way is not None and time.monotonic() < storage_by:  # noqa: ASYNC110 - results come by the event loop
                await asyncio.sleep(_LOOK_AGAIN_S)
        if self._writer.aside is not None:
            await asyncio.wait([self._writer.aside])
        memory_by = time.monotonic() + _PATIENCE_S
        while True:
            seen, now = await self._look(), time.monotonic()
            waits = (seen.stored.unreadable and now < storage_by) or (seen.silent and now < memory_by)
            if seen.memory is not None or not waits:
                return seen
            self._tell_unanswered(seen)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _look(self) -> _Seen:
        memory, silent = None, ""
        try:
            memory = self._snapshots.newest_to_stay()
        except HolderSilentError as error:
            silent = str(error)
        slow = asyncio.get_running_loop().call_later(_SLOW_S, self._tell_slow)
        # Where memory has a state, storage that hangs must not keep the job from it. Not so where what is wrong there
        # has to be set aside first.
        wrong_since = self.states.wrong_stored
        limit_s = _PATIENCE_S if memory is not None and wrong_since is None else None
        refused, held = self.states.refused_paths, memory is not None
        try:
            async with asyncio.timeout(limit_s):
                stored = await find_stored(self._folder, refused, bytes_too=True, wrong_since=wrong_since, held=held)
        except TimeoutError:
            stored = Stored(unreadable="it does not answer")
        finally:
            slow.cancel()
        return _Seen(memory, silent, stored)

    def _take(self, seen: _Seen, *, needed: bool) -> str:
        """``choose``, when all is seen that there is to see."""
        silent, stored = seen.silent, seen.stored
        if silent and seen.newest is None:
            return (
                f"{silent}, and may hold snapshots of this run: continue its process (kill -CONT) and start the job "
                "again, or choose another --run-dir"
            )
        if stored.unreadable and seen.memory is None:
            return (
                f"{self._folder} can't be read ({stored.unreadable}), and may hold checkpoints of this run: mend it, "
                "or choose another --run-dir"
            )
        if stored.untidy:
            self._troubles.tell("retention_failed", None, stored.untidy)
        for path, reason in ((str(self._folder), stored.unreadable), ("memory", silent), *stored.skipped):
            if reason:
                self._troubles.pass_over(path, reason)
        self.source = seen.newest
        self.states.begun_with(self.source)
        self._snapshots.begin_from(max(self.states.newest, 0))
        if self.source is not None:
            if not stored.unreadable and self._writer.under_way is None:
                self.states.wrong_stored = None  # it was set aside; else that is tried again, see CheckpointWriter
            return ""
        return self.states.why_not_anew() or ("nothing is saved" if needed and not self._wanted else "")

    def _tell_unanswered(self, seen: _Seen) -> None:
        tried = f"that is tried for {_PATIENCE_S:g} s"
        if reason := seen.stored.unreadable:
            self._troubles.tell_once("storage_unreadable", reason, f"{self._folder} can't be read ({reason}); {tried}")
        if reason := seen.silent:
            self._troubles.tell_once("holder_silent", reason, f"{reason}, and may hold the newest state; {tried}")

    def _tell_slow(self) -> None:
        self._say(f"the checkpoints in {self._folder} are still being read")

    def tell_source(self) -> None:
        """Tells people what the ranks begin with, if that is a saved state, or should be one."""
        if self.source is not None:
            self._say(f"all ranks go on from {_described(self.source)}")
        elif self._wanted:
            self._say("there is no saved state to go on from: all ranks begin anew")

    async def left(self) -> str:
        """What a job that is started again in this run directory would go on from, for people; empty if nothing is seen
        to be there.
        """
        memory = None
        if self._writer.last_failed or self._snapshots.vault is None:
            with contextlib.suppress(HolderSilentError):
                memory = self._snapshots.newest()
        newest = _newest(memory, await self._seen_on_storage())
        return _described(newest) if newest is not None else ""

    async def _seen_on_storage(self) -> Source | None:
        """The newest checkpoint that looks whole, its bytes unread; None also where storage does not answer soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEE_S):
                return (await find_stored(self._folder, bytes_too=False, wrong_since=self.states.wrong_stored)).source
        return None

    def distrust(self, step: int) -> None:
        """What was saved behind that step is wrong: the next ``choose`` sets it aside."""
        self.states.distrust(step)
        self._writer.distrust(step)

    def saved_before(self, step: int) -> bool:
        """Whether a state from before that step, or an older one, is known to be saved. To be asked if all go back to
        it then: what the ranks would overwrite in memory stays until ``choose`` is over.
        """
        return self.states.stored_before(step) or self._snapshots.pin(step)

    def can_go_back(self) -> bool:
        """Whether there may be a source; ``choose`` knows. A job that saves, and has come to its end before the first
        time, loses nothing by beginning anew.
        """
        return self._wanted or self._snapshots.is_there() or is_there(self._folder)

    # -- what ranks have saved

    def captured(self, rank: int, frame: Captured, groups: Groups) -> None:
        """A rank's snapshot is complete. The last one of all sends the checkpoint on its way."""
        if self.states.going_back:
            return
        ranks = self._captured.setdefault(frame.commits, {})
        ranks[rank] = frame
        if len(ranks) < self._world_size:
            return
        for commits in [each for each in self._captured if each <= frame.commits]:
            del self._captured[commits]  # of older ones some rank has skipped its part
        differing = disagreeing(groups, {each: captured.fingerprint for each, captured in ranks.items()})
        if differing:  # the ranks see it themselves, and compare
            reason = f"ranks {differing} are to hold the same bits, and don't"
            self._note("save_skipped", detail={"step": frame.step, "reason": reason})
            return
        # Else some rank has skipped its part, or its replicated state lies on a device, where nobody has compared it.
        if all(
            ranks[each].sequence and (ranks[each].fingerprint or len(group) == 1) for group in groups for each in group
        ):
            self.states.equal(frame.commits, frame.step)
        if all(each.store for each in ranks.values()):
            self._writer.store(ranks, groups)
        else:
            self._writer.over(frame.commits)

    def skipped(self, rank: int, frame: Skipped, groups: Groups) -> None:
        """A rank has no snapshot where one was due: there will be no checkpoint of that update."""
        self._troubles.tell("save_skipped", frame.step, frame.reason)
        self.captured(rank, Captured(frame.commits, frame.step, sequence=0, store=False), groups)

    def store_last(
        self, captured: Mapping[int, Captured], groups: Groups, savers: Groups, reason: str, over: Callable[[str], None]
    ) -> None:
        """Writes the end-of-life checkpoint, see CheckpointWriter."""
        self._writer.store_last(captured, groups, savers, reason, over)

    def _hear(self) -> None:
        """The holder has a result, or is gone."""
        vault = self._snapshots.vault
        if vault is None:
            return
        try:
            vault.hear()
            self._writer.take_result(vault)
        except HolderLostError as error:
            self._lost(str(error))

    def _lost(self, reason: str) -> None:
        self._snapshots.let_go()
        self.states.memory_lost()
        self._note("holder_lost", detail={"reason": reason})
        self._writer.holder_lost(reason)

    # -- the end

    async def finish(self, timeout_s: float, *, failed: bool) -> None:
        """The job is over: waits for what is on its way to storage, and lets the holder go.

        It stays where the job's last state is nowhere else: for whoever starts the job again, and for a while.
        """
        deadline = time.monotonic() + timeout_s
        if self.states.going_back and self._writer.under_way is None:  # ``choose`` has not come to it
            self._writer.set_aside()
        while self._writer.busy and time.monotonic() < deadline:  # noqa: ASYNC110 - results come by the event loop
            await asyncio.sleep(0.01)
        if self._writer.under_way is not None:
            step = self._writer.under_way.step
            self._say(f"checkpoint of step {step}: storage is still busy with it; its writer goes on")
        if self.states.wrong_stored is not None:
            self._say(
                f"checkpoints from behind step {self.states.wrong_stored} are wrong if they were written before all "
                f"went back, and could not be set aside: take them out of {self._folder} before the job is started "
                "again"
            )
        if self._snapshots.vault is not None:
            try:
                if not await self._holder_stays(failed=failed):
                    self._snapshots.vault.finish()
            except VaultError:
                return  # it is gone already
            finally:
                self._snapshots.let_go()

    async def _holder_stays(self, *, failed: bool) -> bool:
        """Whether the job's last state is nowhere but in memory."""
        since, unsaved = self.states.wrong_since, self._writer.last_failed
        if since is not None and not self._snapshots.discard(lambda each: each.step > since):
            if failed or unsaved:
                self._say(f"what is in memory is given up: what is wrong there since step {since} stays")
            return False
        return unsaved or (failed and (self.states.others or await self._memory_is_newest()))

    async def _memory_is_newest(self) -> bool:
        memory = None
        with contextlib.suppress(HolderSilentError):
            memory = self._snapshots.newest()
        stored = await self._seen_on_storage()
        return memory is not None and (stored is None or stored.commits < memory.commits)


def _newest(memory: Source | None, stored: Source | None) -> Source | None:
    found = [each for each in (memory, stored) if each is not None]
    return max(found, key=lambda each: each.commits, default=None)  # of equals the first: memory


def _described(source: Source) -> str:
    return f"update {source.commits} ({source.path or 'in memory'})"
