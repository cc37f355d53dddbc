"""The agent's way to the snapshots that its node's holder has in memory.

The agent is a member, for which the holder stays. What it asks in between goes by another connection, as a visitor: by
that of the member comes what the holder has sent already.

It has a hand on the memory itself: what a dead holder held of dead ranks, which nobody else has open, the next one gets
from here. That costs no copy, and protects from what a second copy on the same machine would.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from resilient_train.errors import HolderLostError, HolderSilentError, VaultError
from resilient_train.launch.agent.run_dir_claim import LOCK
from resilient_train.launch.agent.trusted_states import TrustedStates
from resilient_train.protocol.messages import Captured, Source, VaultOpened
from resilient_train.state.vault.client import Vault, common_commits, snapshots_at, socket_path
from resilient_train.state.vault.flush import PLACE, WORK
from resilient_train.state.vault.frames import Inventory, LastWork
from resilient_train.state.vault.holder_search import HolderSearch
from resilient_train.state.vault.record import Snapshot
from resilient_train.state.vault.slots import Control

_REPLY_TIMEOUT_S = 2.0
"""The agent does not wait for the holder for long: it has recoveries to carry out."""
_ASK_AGAIN_S = 30.0
_LOOK_S = 0.1
_ANSWERS_S = 5.0
"""So often a holder that works is asked whether it is there: it may be stopped."""
_TRIES = 3
"""So many holders may die while they write what another number of ranks has left."""


class OfOtherRanks(NamedTuple):
    """The newest state that so many ranks all have in memory."""

    commits: int
    world: int
    holder: int
    """Its process."""


class HeldSnapshots:
    """See the module's text."""

    def __init__(
        self,
        run_dir: Path,
        world_size: int,
        states: TrustedStates,
        heard: Callable[[], None],
        lost: Callable[[str], None],
    ) -> None:
        """``heard``: the holder has sent something. ``lost``: it is gone, or must not be used, and why."""
        self._run_dir = run_dir
        self._world_size = world_size
        self._states = states
        self._heard = heard
        self._lost = lost
        self.wanted = False
        """The ranks keep snapshots, or would."""
        self.vault: Vault | None = None
        """The member's connection."""
        self._listened = -1
        """Its descriptor while the event loop looks at it. The vault may have closed it itself by the end."""
        self._process: Popen[bytes] | None = None
        self._search = HolderSearch(run_dir, {WORK: PLACE}, _REPLY_TIMEOUT_S)
        self._opening = asyncio.Lock()
        self._begun = -1
        """After so many updates the ranks begin, and memory may hold later ones, of a history that is left; -1: not."""
        self._kept: dict[int, list[Control]] = {}
        """The memory of each rank."""
        self._ask_again_s = 0.0
        self._last_work: tuple[bytes, int] | None = None
        """What the holder is left with, see ``leave``; None: with whatever another launcher has left it with."""
        self._of_others: LastWork | None = None
        """That, where it is of another number of ranks: a holder that dies takes neither it nor their memory along."""
        self._pins: Vault | None = None
        """By which one of them stays until all have gone back to it."""

    # -- the holder

    async def open(self) -> VaultOpened:
        """The ranks want to keep snapshots, and need a holder: the one that there is, or a new one if that is gone.

        Where there is none, since the machine is at its end, there may be one later.
        """
        self.wanted = True
        async with self._opening:
            self._heard()
            if self.vault is None:
                try:
                    await self._find()
                except VaultError as error:
                    return VaultOpened(str(error), later=isinstance(error, HolderLostError))
            begun = self._begun
            if begun < 0:
                return VaultOpened()
            if not self.discard(lambda each: each.commits > begun):
                self._lost("it does not answer")
                return VaultOpened("snapshots of a history that is left could not be taken out of memory", later=True)
            self._begun = -1
            if not self._states.going_back:  # else it is a dying rank that asks
                self._states.memory_clean()
            return VaultOpened()

    async def _find(self) -> None:
        """Raises VaultError."""
        vault, process = await self._search.look()
        self._process = process or self._process
        self._keep_to(vault)

    async def revive(self) -> None:
        """Where the holder is dead, another one gets what it held. Nothing happens where one is there and does not
        answer: it may be only stopped, and has it all.
        """
        async with self._opening:
            self._heard()
            self._look_after()
            if self.vault is not None or not self._kept:
                return
            try:
                self._keep_to(self._connect(member=True))
            except HolderSilentError:
                return
            except VaultError:
                with contextlib.suppress(VaultError):  # then there is none
                    await self._find()

    def _look_after(self) -> None:
        """A holder that is just dying closes what it has one by one, and the member's connection may come last."""
        if self.vault is not None:
            try:
                self._inventory()
            except HolderSilentError:  # it may be only stopped
                pass
            except VaultError as error:
                self._lost(str(error))

    def _keep_to(self, vault: Vault) -> None:
        """This process is a member from now on, so that the holder stays, and each has what the other had. Raises
        VaultError.
        """
        if self.vault is not None:  # since ``open`` has waited: of the same holder
            vault.close()
            return
        try:
            for held in [each for kept in self._kept.values() for each in kept]:
                vault.adopt(held)
            others = self._of_others
            for rank in set(range(max(self._world_size, others.world if others else 0))) - set(self._kept):
                if records := vault.records(rank):
                    self._kept[rank] = records
            if self._last_work is not None:
                self._leave(vault, *self._last_work)
            elif others is not None:
                vault.leave(others.work, others.world, others.argument, Path(others.unless), others.until)
        except VaultError:
            vault.close()
            raise
        except OSError:  # no room for descriptors: the next snapshot asks again
            pass
        self.vault = vault
        self._listened = vault.fileno()
        asyncio.get_running_loop().add_reader(self._listened, self._heard)

    def leave(self, last_work: bytes, until: int = -1) -> None:
        """A Flush of whatever is in memory when all processes of the job are gone, and nobody has started it again in
        time; empty: what is there is not to be trusted. ``until``: but what is from behind that step.
        """
        if self._last_work == (last_work, until):
            return
        self._last_work = (last_work, until)
        if self.vault is not None:
            with contextlib.suppress(VaultError):  # it is told when it is found again, or the next one is
                self._leave(self.vault, last_work, until)

    def _leave(self, vault: Vault, last_work: bytes, until: int) -> None:
        vault.leave(WORK if last_work else "", self._world_size, last_work, self._run_dir / LOCK, until)

    def let_go(self) -> None:
        """The holder need not stay for this process."""
        if self.vault is not None:
            asyncio.get_running_loop().remove_reader(self._listened)
            self.vault.close()
            self.vault = None

    def _connect(self, *, member: bool) -> Vault:
        """Raises VaultError."""
        limit_s = _REPLY_TIMEOUT_S
        return Vault.connect(self._run_dir, member=member, timeout_s=limit_s, reply_timeout_s=limit_s)

    def _inventory(self) -> Inventory:
        """Raises VaultError."""
        with contextlib.closing(self._connect(member=False)) as vault:
            return vault.inventory()

    def keep(self, rank: int, sequence: int) -> None:
        """A snapshot of the rank is complete: its memory is not to go with the holder."""
        kept = self._kept.get(rank, [])
        known = any(each.sequence == sequence for held in kept for each in held.complete())
        # Of two the rank has outgrown one: it is let go as soon as the holder does.
        if (known and len(kept) == 1) or time.monotonic() < self._ask_again_s:
            return
        try:
            with contextlib.closing(self._connect(member=False)) as vault:
                fresh = vault.records(rank)
        except (VaultError, OSError):
            self._ask_again_s = time.monotonic() + _ASK_AGAIN_S
            return
        if fresh:
            self._kept[rank] = fresh
            for held in kept:
                held.close()

    # -- what it holds

    def newest(self) -> Source | None:
        """What all ranks may go on from. Raises HolderSilentError if the holder does not answer."""
        try:
            return self._states.newest_of(self._inventory().stores)
        except HolderSilentError:
            raise
        except VaultError as error:  # there is none
            if self._kept:  # but the next one has it all
                raise HolderSilentError(str(error)) from None
            return None

    def is_there(self) -> bool:
        """Whether there is something to go on from, and its holder says so."""
        with contextlib.suppress(HolderSilentError):
            return self.newest() is not None
        return False

    def newest_to_stay(self) -> Source | None:
        """``newest``, with a holder that stays until the ranks have come for it."""
        if not socket_path(self._run_dir).exists() or self.newest() is None:
            return None
        if self.vault is None:
            try:
                self._keep_to(self._connect(member=True))
            except HolderSilentError:
                raise
            except VaultError:
                return None
        return self.newest()

    def parts_of(self, source: Source) -> dict[int, Captured]:
        """Each rank's snapshot of that state. Empty: not all are there. Raises VaultError."""
        held = snapshots_at(self._inventory().stores, self._world_size, source.commits)
        parts = {rank: Captured(each.commits, each.step, each.sequence, store=True) for rank, each in held.items()}
        return parts if len(parts) == self._world_size else {}

    def of_other_ranks(self) -> OfOtherRanks | None:
        """What a job of another number of ranks has left in memory, whose holder stays; None: nothing is seen."""
        if not socket_path(self._run_dir).exists():
            return None
        with contextlib.suppress(VaultError):
            held = self._inventory()
            worlds = {each.world for store in held.stores for each in store.snapshots} - {self._world_size}
            newest = ((world, common_commits(held.stores, world, self._until())[:1]) for world in worlds)
            found = [(commits[0], world) for world, commits in newest if commits]
            if not found:
                return None
            self._of_others = held.last or self._of_others
            if self.vault is None:
                self._keep_to(self._connect(member=True))
            return OfOtherRanks(*max(found), held.pid)
        return None

    def forget_others(self) -> None:
        """What another number of ranks had in memory is of no use any more."""
        self._of_others = None
        for rank in [each for each in self._kept if each >= self._world_size]:
            for held in self._kept.pop(rank):
                held.close()

    def _until(self) -> int:
        return -1 if self._states.wrong_since is None else self._states.wrong_since

    def is_empty(self) -> bool:
        """Nothing is in memory, wrong or right, for all that is seen."""
        if not socket_path(self._run_dir).exists():
            return not self._kept
        try:
            return not any(store.snapshots for store in self._inventory().stores)
        except HolderSilentError:
            return False
        except VaultError:  # there is none
            return not self._kept

    async def store_of_other_ranks(self, patience_s: float) -> str:
        """Has it written to storage, as its job has left word how; by the next holder, where one dies. Returns why that
        is impossible; empty: it is there, or a newer one. ``patience_s``: for a holder that does not answer.
        """
        reason = ""
        for _ in range(_TRIES):
            try:
                await self._have_last_work_done(patience_s)
                return ""
            except VaultError as error:
                reason = str(error)
                if type(error) is not HolderLostError:
                    break
            await self.revive()
        return reason

    async def _have_last_work_done(self, patience_s: float) -> None:
        """Raises VaultError."""
        answered_s = time.monotonic()
        with contextlib.closing(self._connect(member=False)) as vault:
            number = vault.do_last_work(self._until())
            while vault.result(number, 0) is None:
                await asyncio.sleep(_LOOK_S)
                answered_s = self._answered_s(answered_s, patience_s)

    def _answered_s(self, last_s: float, patience_s: float) -> float:
        """When the holder answered last. Raises HolderSilentError when that is ``patience_s`` ago."""
        now_s = time.monotonic()
        if now_s <= last_s + _ANSWERS_S:
            return last_s
        try:
            self._inventory()
        except HolderSilentError:
            if now_s > last_s + patience_s:
                raise
            return last_s
        return now_s

    @property
    def comes_to_storage(self) -> bool:
        """What is in memory, where nobody comes for it."""
        return self._last_work is not None and bool(self._last_work[0])

    def may_write(self) -> bool:
        """Whether something may yet land on storage: the holder has work, also what it was given by somebody who has
        given it up; or it does not answer.
        """
        try:
            return self._inventory().works > 0
        except HolderSilentError:
            return True
        except VaultError:  # there is none
            return False

    def pin(self, step: int) -> bool:
        """Has the holder keep the newest snapshot of those from before that step, until ``unpin``. False: none is there
        any more.
        """
        kept = self._states.kept_before(step)
        if kept < 0:
            return False
        self.unpin()
        try:
            self._pins = vault = self._connect(member=False)
            stores = vault.inventory().stores
            held = [(store.rank, each.sequence) for store in stores for each in store.snapshots if each.step == kept]
            whole = {rank for rank, _ in held}.issuperset(range(self._world_size))
            if whole and all(vault.pin(*each) for each in held):
                return True
        except VaultError:  # what it holds can't be gone back to
            pass
        self.unpin()
        return False

    def unpin(self) -> None:
        """What ``pin`` has kept may be overwritten. Idempotent."""
        if self._pins is not None:
            self._pins.close()
            self._pins = None

    def begin_from(self, commits: int) -> None:
        """The ranks begin after so many updates: ``open`` takes what is of later ones out of memory."""
        self._begun = commits

    def discard(self, wrong: Callable[[Snapshot], bool]) -> bool:
        """Such snapshots count no more, for whoever looks for one from now on. False: they may."""
        try:
            with contextlib.ExitStack() as stack:
                vault = stack.enter_context(contextlib.closing(self._connect(member=False)))
                for rank in range(self._world_size):
                    for pair in vault.open(rank):
                        stack.callback(pair.close)
                        for snapshot in pair.complete():
                            if wrong(snapshot):
                                pair.discard(snapshot.sequence)
        except (VaultError, OSError):
            return False
        return True
