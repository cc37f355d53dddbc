"""The agent's part in saving: has snapshots that all ranks hold written to storage, and knows what to start again from.

The work is the holder's (``state/vault``): it goes on if this process dies. It is held on to until the job is over: the
ranks may take long to come for what they start from.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from resilient_train.errors import HolderLostError, VaultError
from resilient_train.launch.agent.checkpoint_requests import CheckpointRequests, Groups
from resilient_train.launch.agent.distrust_record import Distrusted, DistrustRecord
from resilient_train.launch.agent.held_snapshots import HeldSnapshots
from resilient_train.launch.agent.save_troubles import SaveTroubles, Teller
from resilient_train.launch.agent.starting_state import StartingState
from resilient_train.launch.agent.stored_checkpoints import is_there
from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.protocol.messages import Captured, Skipped, VaultOpened
from resilient_train.protocol.replicas import disagreeing


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
        """``settle`` and ``begin_task``: see CheckpointRequests. Raises ConfigError if it can't be read what an earlier
        launcher knew to be wrong.
        """
        self._folder = run_dir / CHECKPOINTS
        self._world_size = world_size
        self._note = note
        self._say = say
        self.states = states = TrustedStates(world_size, keep)
        self._record = DistrustRecord(run_dir)
        self._unwritten = ""
        """Why what is wrong could not be written down, as people were told."""
        self._recall(self._record.held)
        self._snapshots = HeldSnapshots(run_dir, world_size, states, self._hear, self._lost)
        self._troubles = SaveTroubles(note, say)
        self._requests = CheckpointRequests(
            self._folder, keep, states, self._snapshots, self._troubles, note, settle, begin_task, self._write_down
        )
        self.start = StartingState(self._folder, states, self._snapshots, self._requests, self._troubles, note, say)
        self._captured: dict[int, dict[int, Captured]] = {}
        self._groups: Groups = ()
        """As all ranks said who is whose replica, when they had a snapshot; (): they have not in this run."""

    def _recall(self, wrong: Distrusted) -> None:
        self.states.recall(wrong.in_memory, wrong.on_storage)
        since = [step for step in (wrong.in_memory, wrong.on_storage) if step is not None]
        if since:
            self._say(f"what was saved behind step {min(since)} is wrong, as the run before found: it is passed over")

    async def open(self) -> VaultOpened:
        """The ranks want to keep snapshots, see HeldSnapshots."""
        opened = await self._snapshots.open()
        self._write_down()
        return opened

    async def choose(self, *, needed: bool = False) -> str:
        """From what all ranks start, see StartingState."""
        self._captured.clear()  # by ranks that are no more
        blind = await self.start.choose(needed=needed)
        self._write_down()
        return blind

    def distrust(self, step: int) -> None:
        """What was saved behind that step is wrong: the next ``choose`` sets it aside."""
        self.states.distrust(step)
        self._write_down()
        self._requests.distrust(step)
        trusted = self._groups and not self.states.doubted
        self._snapshots.leave(self._requests.left(self._groups, step) if trusted else b"", step)

    def _write_down(self) -> None:
        """What is wrong, for a launcher after this one."""
        try:
            self._record.write(Distrusted(self.states.wrong_since, self.states.wrong_stored))
        except OSError as error:
            if str(error) != self._unwritten:  # it is tried with each snapshot
                self._unwritten = str(error)
                self._say(
                    f"which saved states are wrong can't be written down ({error}): a launcher that comes after this "
                    "one may go on from the wrong ones, or without the right ones"
                )

    def doubt(self) -> None:
        """Replicas were found to differ, nobody knows since when: what is in memory counts as far as all were equal,
        which nobody knows but this process.
        """
        self.states.doubt()
        self._snapshots.leave(b"")

    def saved_before(self, step: int) -> bool:
        """Whether a state from before that step, or an older one, is known to be saved. To be asked if all go back to
        it then: what the ranks would overwrite in memory stays until ``choose`` is over.
        """
        one_more = self._requests.under_way is not None
        return self.states.stored_before(step, one_more=one_more) or self._snapshots.pin(step)

    def agreed_step(self) -> int:
        """Of the newest update on which replicas agreed, if a state from before it is known to be saved; else -1."""
        step = self.states.agreed_step
        return step if step >= 0 and self.saved_before(step) else -1

    def can_go_back(self) -> bool:
        """Whether there may be a source; ``choose`` knows. A job that saves, and has come to its end before the first
        time, loses nothing by beginning anew.
        """
        return self._snapshots.wanted or self._snapshots.is_there() or is_there(self._folder)

    # -- what ranks have saved

    def captured(self, rank: int, frame: Captured, groups: Groups) -> None:
        """A rank's snapshot is complete. The last one of all sends the checkpoint on its way."""
        if self.states.going_back:
            return
        self._write_down()
        if frame.sequence:
            self._snapshots.keep(rank, frame.sequence)
        ranks = self._captured.setdefault(frame.commits, {})
        ranks[rank] = frame
        if len(ranks) < self._world_size:
            return
        self._groups = groups
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
            self._write_down()
            if not self.states.doubted:
                self._snapshots.leave(self._requests.left(groups))
        if all(each.store for each in ranks.values()):
            self._requests.store(ranks, groups)
        else:
            self._requests.over(frame.commits)

    def skipped(self, rank: int, frame: Skipped, groups: Groups) -> None:
        """A rank has no snapshot where one was due: there will be no checkpoint of that update."""
        self._troubles.tell("save_skipped", frame.step, frame.reason)
        self.captured(rank, Captured(frame.commits, frame.step, sequence=0, store=False), groups)

    def store_last(
        self, captured: Mapping[int, Captured], groups: Groups, savers: Groups, reason: str, over: Callable[[str], None]
    ) -> None:
        """Writes the end-of-life checkpoint, see CheckpointRequests."""
        self._requests.store_last(captured, groups, savers, reason, over)

    def _hear(self) -> None:
        """The holder has a result, or is gone."""
        vault = self._snapshots.vault
        if vault is None:
            return
        lost = ""
        try:
            vault.hear()
        except HolderLostError as error:  # the last that it said may be a result
            lost = str(error)
        try:
            self._requests.take_result(vault)
        except HolderLostError as error:
            lost = lost or str(error)
        if lost:
            self._lost(lost)

    def _lost(self, reason: str) -> None:
        self._snapshots.let_go()
        self.states.memory_lost()
        self._note("holder_lost", detail={"reason": reason})
        self._requests.holder_lost(reason)

    # -- the end

    async def finish(self, timeout_s: float, *, failed: bool, at_once: bool = False) -> None:
        """The job is over: waits for what is on its way to storage, and lets the holder go.

        It stays where the job's last state is nowhere else: for whoever starts the job again, and for a while. Nothing
        is begun that somebody would have to wait for who wants the job to end ``at_once``.
        """
        deadline = time.monotonic() + timeout_s
        await self._quiet(deadline)
        if self.states.wrong_stored is not None and not self._requests.busy:
            self._requests.set_aside()  # ``choose`` has not come to it, or in vain
            await self._quiet(deadline)
        if self._requests.under_way is not None:
            step = self._requests.under_way.step
            self._say(f"checkpoint of step {step}: storage is still busy with it; its writer goes on")
        if self.states.wrong_stored is not None:
            self._say(
                f"checkpoints from behind step {self.states.wrong_stored} are wrong if they were written before all "
                f"went back, and could not be set aside: take them out of {self._folder} before the job is started "
                "again"
            )
        if failed:
            await self._snapshots.revive()
            if not at_once:
                with contextlib.suppress(VaultError):
                    await self._store_from_memory()
                await self._quiet(deadline)
        if self._snapshots.vault is not None:
            try:
                stays = await self._holder_stays(failed=failed)
                if not stays and self._snapshots.vault is not None:  # it may have gone meanwhile
                    self._snapshots.vault.finish()
            except VaultError:
                return  # it is gone already
            finally:
                self._write_down()
                self._snapshots.let_go()
        else:
            self._write_down()

    async def _store_from_memory(self) -> None:
        """Where the job's last state is nowhere but in memory, and no rank is left to save it (all were starting from
        it, say), storage gets it: nobody may start the job again as soon as memory needs. Raises VaultError.
        """
        states = self.states
        distrusted = states.others or states.wrong_since is not None or states.wrong_stored is not None
        if distrusted or self._requests.last_failed or not await self.start.memory_is_newest():
            return
        source, groups = self._snapshots.newest_to_stay(), self._groups or self.start.earlier_groups()
        parts = self._snapshots.parts_of(source) if source is not None else {}
        if parts and sorted(rank for group in groups for rank in group) == sorted(parts):
            self._requests.store_left(parts, groups)

    async def _quiet(self, deadline: float) -> None:
        """Until nothing is on its way to storage."""
        while self._requests.busy and time.monotonic() < deadline:  # noqa: ASYNC110 - results come by the event loop
            await asyncio.sleep(0.01)

    async def _holder_stays(self, *, failed: bool) -> bool:
        """Whether the job's last state is nowhere but in memory."""
        if self.start.others is not None:
            return True
        since, unsaved = self.states.wrong_since, self._requests.last_failed
        if since is not None:
            if not self._snapshots.discard(lambda each: each.step > since):
                if failed or unsaved:
                    self._say(f"what is in memory is given up: what is wrong there since step {since} stays")
                return False
            self.states.memory_clean()
        return unsaved or (failed and (self.states.others or await self.start.memory_is_newest()))
