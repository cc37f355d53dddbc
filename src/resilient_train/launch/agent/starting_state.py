"""What all ranks start from: the newest state that is whole, in memory or on storage. One that a rank has refused is
not tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from resilient_train.errors import HolderSilentError
from resilient_train.events import Event
from resilient_train.launch.agent.checkpoint_requests import CheckpointRequests
from resilient_train.launch.agent.held_snapshots import HeldSnapshots, OfOtherRanks
from resilient_train.launch.agent.save_troubles import SaveTroubles, Teller
from resilient_train.launch.agent.stored_checkpoints import Stored, find_stored
from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.observe.fields import groups_of, number_of
from resilient_train.observe.history import of_earlier_runs
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import read_run
from resilient_train.protocol.messages import Source
from resilient_train.state.vault.client import was_held
from resilient_train.state.vault.holder import GRACE_S
from resilient_train.state.vault.holder_search import log_path

_SLOW_S = 30.0
_PATIENCE_S = 60.0
"""For storage that does not let itself be read, when all ranks have lost their state: it may come back. For storage
that does not answer, where memory has a state. And for a holder that does not answer.
"""
_LOOK_AGAIN_S = 1.0
_SEE_S = 10.0
"""At the end of a job it is told what is left, if storage says so within this time."""


class _Seen(NamedTuple):
    """What there is to go on from. ``silent``: why the holder of memory could not be asked, though it is there."""

    memory: Source | None
    silent: str
    stored: Stored
    at_rest: bool
    """Nothing was being written, so nothing has landed behind the look at storage."""

    @property
    def newest(self) -> Source | None:
        return _newest(self.memory, self.stored.source)


class StartingState:
    """See the module's text."""

    def __init__(
        self,
        folder: Path,
        states: TrustedStates,
        snapshots: HeldSnapshots,
        requests: CheckpointRequests,
        troubles: SaveTroubles,
        note: Teller,
        say: Callable[[str], None],
    ) -> None:
        self._folder = folder
        self._states = states
        self._snapshots = snapshots
        self._requests = requests
        self._troubles = troubles
        self._note = note
        self._say = say
        self.source: Source | None = None
        """None: the script's own."""
        self._is_first = True
        """Nothing has been chosen yet."""
        self.others: OfOtherRanks | None = None
        """What memory has of another number of ranks, and nobody could go on from: it is newer than all else."""

    async def choose(self, *, needed: bool = False) -> str:
        """Sets ``source``. Returns why that is impossible: there may be checkpoints, but the storage does not let us
        see, and nothing is in memory (snapshots there are as new as what was written of them). ``needed``: the ranks
        have lost a state. Then the storage has some time to come back, and it is impossible as well where there is
        nothing, though it was meant to be kept by the ranks themselves alone; and, once replicas have differed, where
        nothing is of before.
        """
        self._requests.begin_anew()
        self.source = None
        try:
            first, self._is_first = self._is_first, False
            if first:  # later there is nothing that is newer than what all have begun from
                self.others = self._snapshots.of_other_ranks()
            seen = await self._found(_PATIENCE_S if needed else 0)
            if first:  # once more: a holder that was silent may have answered since
                self.others = self.others or self._snapshots.of_other_ranks()
            if self.others is not None and _is_older(seen.newest, self.others.commits):
                reason = await self._have_stored(self.others)
                seen = await self._found(0)
                if _is_older(seen.newest, self.others.commits):
                    self.others = self._snapshots.of_other_ranks() or self.others  # whose holder may be another one
                    return _not_stored(self.others, reason or f"what lies in {self._folder} stands in its way")
            self.others = None
            self._snapshots.forget_others()
            if first:
                self._forget_what_is_gone(seen)
            return self._take(seen, needed=needed)
        finally:
            self._states.going_back = False
            self._snapshots.unpin()

    async def _have_stored(self, others: OfOtherRanks) -> str:
        """What the run before has in memory, of another number of ranks: only on storage can it be divided anew.
        Returns why that is impossible.
        """
        self._say(
            f"memory has update {others.commits} of {others.world} ranks: it is written to storage first, from where "
            "another number can go on"
        )
        return await self._snapshots.store_of_other_ranks(_PATIENCE_S)

    def _forget_what_is_gone(self, seen: _Seen) -> None:
        """Nothing is wrong of what is not there: a machine has been started anew, say."""
        if not seen.silent and self._snapshots.is_empty():
            self._states.wrong_since = None
        if seen.at_rest and not seen.stored.unreadable and not seen.stored.steps:
            self._states.wrong_stored = None

    async def _found(self, patience_s: float) -> _Seen:
        """``patience_s``: for storage. A holder that does not answer is waited for at a job's start as well: nothing is
        lost by that but the time.
        """
        storage_by = time.monotonic() + patience_s
        if self._states.wrong_stored is not None:  # what is being written may be wrong, or the newest that is right
            while self._requests.under_way is not None and time.monotonic() < storage_by:  # noqa: ASYNC110 - results come by the event loop
                await asyncio.sleep(_LOOK_AGAIN_S)
        if self._requests.aside is not None:
            await asyncio.wait([self._requests.aside])
        memory_by, told = 0.0, set[str]()
        while True:
            seen, now = await self._look(), time.monotonic()
            memory_by = memory_by or now + _PATIENCE_S  # storage may have taken as long as that
            waits = (seen.stored.unreadable and now < storage_by) or (seen.silent and now < memory_by)
            if seen.memory is not None or not waits:
                return seen
            self._tell_unanswered(seen, told)
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _look(self) -> _Seen:
        memory, silent = None, ""
        await self._snapshots.revive()
        try:
            memory = self._snapshots.newest_to_stay()
        except HolderSilentError as error:
            silent = str(error)
        slow = asyncio.get_running_loop().call_later(_SLOW_S, self._tell_slow)
        # Where memory has a state, storage that hangs must not keep the job from it. Not so where what is wrong there
        # has to be set aside first.
        wrong_since = self._states.wrong_stored
        at_rest = wrong_since is None or not (self._requests.busy or self._snapshots.may_write())
        limit_s = _PATIENCE_S if memory is not None and wrong_since is None else None
        refused, held = self._states.refused_paths, memory is not None
        try:
            async with asyncio.timeout(limit_s):
                stored = await find_stored(self._folder, refused, bytes_too=True, wrong_since=wrong_since, held=held)
        except TimeoutError:
            stored = Stored(unreadable="it does not answer")
        finally:
            slow.cancel()
        return _Seen(memory, silent, stored, at_rest)

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
        self.source = seen.newest
        for path, reason in ((str(self._folder), stored.unreadable), ("memory", silent), *stored.skipped):
            if reason:
                self._troubles.pass_over(path, reason, ends=self.source is None)
        self._states.begun_with(self.source, stored.steps)
        self._snapshots.begin_from(max(self._states.newest, 0))
        if self.source is not None:
            if not stored.unreadable and seen.at_rest:
                self._states.wrong_stored = None  # it was set aside; else that is tried again, see CheckpointRequests
            return ""
        if why := self._states.why_not_anew():
            return why
        if stored.skipped:
            path, reason = stored.skipped[0]
            return (
                f"none of the {len(stored.skipped)} checkpoints in {self._folder} can be gone on from ({path}: "
                f"{reason}): mend one, or take them all out to begin anew"
            )
        return "nothing is saved" if needed and not self._snapshots.wanted else ""

    def _tell_unanswered(self, seen: _Seen, told: set[str]) -> None:
        """Each once: ``told``."""
        unanswered = {
            "storage_unreadable": (seen.stored.unreadable, f"{self._folder} can't be read ({seen.stored.unreadable})"),
            "holder_silent": (seen.silent, f"{seen.silent}, and may hold the newest state"),
        }
        for kind, (reason, line) in unanswered.items():
            if reason and kind not in told:
                told.add(kind)
                self._note(kind, detail={"reason": reason})
                self._say(f"{line}; that is tried for {_PATIENCE_S:g} s")

    def _tell_slow(self) -> None:
        self._say(f"the checkpoints in {self._folder} are still being read")

    def tell_source(self) -> None:
        """Tells people what the ranks begin with, if that is a saved state, or should be one."""
        if self.source is not None:
            self._say(f"all ranks go on from {_described(self.source)}")
        elif self._snapshots.wanted:
            self._say("there is no saved state to go on from: all ranks begin anew")
        elif events := self._earlier_run():
            saved = [number_of(event, "step") for event in events if event.kind == "saved"]
            if saved:
                what = f"nothing is saved in {self._folder}, where an earlier run had saved step {saved[-1]}"
                self._say(f"{what}: all ranks begin anew")
            elif was_held(self._folder.parent, events[0].time_ns) and not read_run(events).finished:
                self._say(
                    "an earlier run here kept its state in memory, and nothing of it can be gone on from "
                    f"({log_path(self._folder.parent)} says what has become of it): all ranks begin anew"
                )

    def _earlier_run(self) -> list[Event]:
        """The events of the run before in this directory; none where they can't be read."""
        with contextlib.suppress(OSError):
            for newest in of_earlier_runs(self._folder.parent)[-1:]:
                return read_events(newest)
        return []

    def earlier_groups(self) -> tuple[tuple[int, ...], ...]:
        """Which ranks held the same in the run before in this directory; () if that is not known."""
        begun = [event for event in self._earlier_run() if event.kind == "started"]
        world = number_of(begun[-1], "world_size") if begun else None
        return (groups_of(begun[-1], "replicas") or (tuple(range(world)),)) if world else ()

    async def left(self) -> str:
        """What a job that is started again in this run directory would go on from, for people; empty if nothing is seen
        to be there. Of equal ones that on storage: people may look at it.
        """
        if self.others is not None:
            with_them = f"update {self.others.commits} with {self.others.world} ranks (in memory)"
            stored = await self._seen_on_storage()
            return with_them + (f", with another number from {_described(stored)}" if stored is not None else "")
        memory = None
        if self._requests.last_failed or self._snapshots.vault is None:
            with contextlib.suppress(HolderSilentError):
                memory = self._snapshots.newest()
        stored = await self._seen_on_storage()
        newest = _newest(stored, memory)
        if newest is None or newest is stored:
            return _described(newest) if newest is not None else ""
        if self._snapshots.comes_to_storage:
            self._note("left_in_memory", detail={"commits": newest.commits})
            return f"update {newest.commits} (in memory, and in {GRACE_S:g} s on storage)"
        older = f"; then {_described(stored)}" if stored is not None else ""
        return f"update {newest.commits} (in memory, within {GRACE_S:g} s{older})"

    async def _seen_on_storage(self) -> Source | None:
        """The newest checkpoint that looks whole, its bytes unread; None also where storage does not answer soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEE_S):
                return (await find_stored(self._folder, bytes_too=False, wrong_since=self._states.wrong_stored)).source
        return None

    async def memory_is_newest(self) -> bool:
        """Whether memory has a newer state than storage."""
        memory = None
        with contextlib.suppress(HolderSilentError):
            memory = self._snapshots.newest()
        stored = await self._seen_on_storage()
        return memory is not None and (stored is None or stored.commits < memory.commits)


def _is_older(source: Source | None, commits: int) -> bool:
    return source is None or source.commits < commits


def _not_stored(others: OfOtherRanks, reason: str) -> str:
    return (
        f"memory has update {others.commits} of {others.world} ranks, nothing as new can be gone on from, and it can't "
        f"be written to storage ({reason}): start {others.world} ranks, or end its holder (kill {others.holder}) to go "
        "on without it"
    )


def _newest(one: Source | None, other: Source | None) -> Source | None:
    """Of equals the first."""
    found = [each for each in (one, other) if each is not None]
    return max(found, key=lambda each: each.commits, default=None)


def _described(source: Source) -> str:
    return f"update {source.commits} ({source.path or 'in memory'})"
