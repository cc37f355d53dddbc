"""The agent's part in saving: has snapshots that all ranks hold written to storage, and knows what to start again from.

The work is the holder's (``state/vault``): it goes on if this process dies. Sources are tried in the order memory,
storage; one that a rank has refused is not tried again. The holder of a source is held on to until the job is over: the
ranks may take long to come for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple, Protocol

import msgspec

from resilient_train.errors import HolderLostError, HolderSilentError, VaultError
from resilient_train.launch.agent.restore_points import Stored, find_stored, is_there, set_wrong_aside
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.protocol.messages import Captured, Skipped, Source, VaultOpened
from resilient_train.protocol.replicas import disagreeing
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.checkpoint.manifest import parse_name
from resilient_train.state.vault.client import Vault, common_commits, socket_path
from resilient_train.state.vault.flush import PLACE, WORK, Flush, Flushed
from resilient_train.state.vault.holder_process import HolderSearch
from resilient_train.state.vault.record import Snapshot
from resilient_train.state.vault.slots import SLOTS

_REPLY_TIMEOUT_S = 2.0
"""The agent waits for the holder at the start of ranks only, and not for long: it has recoveries to carry out."""
_SLOW_S = 30.0
_PATIENCE_S = 60.0
"""For storage that does not let itself be read, when all ranks have lost their state: it may come back. And for storage
that does not answer, where memory has a state.
"""
_LOOK_AGAIN_S = 1.0
_SEE_S = 10.0
"""At the end of a job it is told what is left, if storage says so within this time."""
_TOLD = {
    "save_failed": "not written",
    "save_skipped": "skipped",
    "nan_saved": "written, with values that are not numbers",
    "retention_failed": "older ones could not be deleted",
    "wrong_stay": "those that are wrong could not be set aside",
}


class Teller(Protocol):
    """Writes an event of the agent."""

    def __call__(self, kind: str, *, detail: dict[str, Any]) -> None: ...


class _Save(NamedTuple):
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
        """``settle`` is told of an update when all checkpoints up to it are over and done with, written or not.
        ``begin_task``: what goes on in the background, with somebody to look at its end.
        """
        self._run_dir = run_dir
        self._folder = run_dir / CHECKPOINTS
        self._world_size = world_size
        self._keep = keep
        self._note = note
        self._say = say
        self._settle = settle
        self._begin_task = begin_task
        self._newest_over = 0
        self.source: Source | None = None
        """What all ranks start from: the newest state that is whole. None: from the script's own."""
        self.newest = self.newest_without_nan = -1
        """The update before the newest equal state that is saved; the step of the newest one stored without NaN."""
        self._wanted = False
        """The ranks keep snapshots, or would."""
        self._begun = -1
        """After so many updates the ranks begin, and memory may hold later ones, of a history that is left; -1: not."""
        self._opening = asyncio.Lock()
        self._vault: Vault | None = None
        self._listened = -1
        """The vault's descriptor while the event loop looks at it. The vault may have closed it itself by the end."""
        self._holder: Popen[bytes] | None = None
        self._search = HolderSearch(run_dir, {WORK: PLACE}, _REPLY_TIMEOUT_S)
        self._captured: dict[int, dict[int, Captured]] = {}
        self._under_way: _Save | None = None
        self._last: Callable[[], None] | None = None
        """The end-of-life checkpoint, waiting for the one before it."""
        self._libraries = libraries_here()  # now: it opens files, and there may be no descriptors when it is asked for
        self._unsaved = False
        self.doubted = False
        """Replicas have differed: what memory holds is used as far as it was complete and equal, see ``newest``; and
        the ranks do not begin anew, which may cost more than a look at the machine.
        """
        self._wrong_since: int | None = None
        """The step since which the script says that all is wrong, while wrong states may lie in memory; else None."""
        self._wrong_stored: int | None = None
        """The same of storage. Nothing new is written before that is set aside: nobody could tell the two apart."""
        self._wrong_held = False
        """Wrong snapshots may lie in memory: all were told to go back, and have not taken a new one since."""
        self._going_back = False
        """Until ``choose`` is over: what ranks still say of snapshots is of the history that is left."""
        self._aside: asyncio.Task[None] | None = None
        """Sets wrong checkpoints aside. Meanwhile no flush runs but one that is wrong, and written."""
        self._kept_steps: deque[int] = deque(maxlen=SLOTS)
        """Of the newest snapshots in memory that were equal in all replicas. They may have been overwritten since."""
        self._pins: Vault | None = None
        """By which one of them stays until all have gone back to it."""
        self._stored_steps: deque[int] = deque(maxlen=keep)
        """Of the newest checkpoints that this run has written, or begun with."""
        self._refused: set[Source] = set()
        self._silent = ""
        self.others = False
        """What is in memory is of ranks that held other parts of the model."""
        self._told: set[str] = set()
        self._troubles: set[str] = set()
        """Kinds of trouble that the console was told of: it hears the first of each, until saving is well again."""

    async def open(self) -> VaultOpened:
        """The ranks want to keep snapshots, and need a holder: the one that there is, or a new one if that is gone.

        Where there is none, since the machine is at its end, there may be one later.
        """
        self._wanted = True
        async with self._opening:
            self._hear()
            if self._vault is None:
                try:
                    vault, process = await self._search.look()
                except VaultError as error:
                    return VaultOpened(str(error), later=isinstance(error, HolderLostError))
                self._holder = process or self._holder
                self._keep_to(vault)
            begun = self._begun
            if begun >= 0 and not self._discard(lambda each: each.commits > begun):
                self._lost("it does not answer")
                return VaultOpened("snapshots of a history that is left could not be taken out of memory", later=True)
            self._begun = -1
            return VaultOpened()

    def _keep_to(self, vault: Vault) -> None:
        """This process is a member from now on, so that the holder stays."""
        self._vault = vault
        self._listened = vault.fileno()
        asyncio.get_running_loop().add_reader(self._listened, self._hear)

    async def choose(self, *, needed: bool = False) -> str:
        """Sets ``source``. Returns why that is impossible: there may be checkpoints, but the storage does not let us
        see, and nothing is in memory (snapshots there are as new as what was written of them). ``needed``: the ranks
        have lost a state. Then the storage has some time to come back, and it is impossible as well where there is
        nothing, though it was meant to be kept by the ranks themselves alone; and, once replicas have differed, where
        nothing is of before.
        """
        try:
            return await self._choose(needed=needed)
        finally:
            self._going_back = False
            self._unpin()

    async def _choose(self, *, needed: bool) -> str:
        self._captured.clear()  # by ranks that are no more
        self._newest_over = 0
        self._settle(0)
        self.source = None
        deadline = time.monotonic() + (_PATIENCE_S if needed else 0)
        # What is being written may be wrong, or the newest that is right.
        while self._wrong_stored is not None and self._under_way is not None and time.monotonic() < deadline:  # noqa: ASYNC110 - results come by the event loop
            await asyncio.sleep(_LOOK_AGAIN_S)
        if self._aside is not None:
            await asyncio.wait([self._aside])
        memory, stored = await self._look()
        # A holder that does not answer is waited for at a job's start as well: nothing is lost by that but the time.
        patience = time.monotonic() + _PATIENCE_S
        while memory is None and (
            (stored.unreadable and time.monotonic() < deadline) or (self._silent and time.monotonic() < patience)
        ):
            self._tell_unanswered(stored.unreadable)
            await asyncio.sleep(_LOOK_AGAIN_S)
            memory, stored = await self._look()
        if self._silent and memory is None and stored.source is None:
            return (
                f"{self._silent}, and may hold snapshots of this run: continue its process (kill -CONT) and start the "
                "job again, or choose another --run-dir"
            )
        if stored.unreadable and memory is None:
            return (
                f"{self._folder} can't be read ({stored.unreadable}), and may hold checkpoints of this run: mend it, "
                "or choose another --run-dir"
            )
        if stored.untidy:
            self._trouble("retention_failed", None, stored.untidy)
        if stored.unreadable:
            self._pass_over(str(self._folder), stored.unreadable)
        if self._silent:
            self._pass_over("memory", self._silent)
        for path, reason in stored.skipped:
            self._pass_over(path, reason)
        self.source = _newest(memory, stored.source)
        self.newest = self.source.commits if self.source is not None else -1
        self._begun = max(self.newest, 0)
        if self.source is not None and not stored.unreadable and self._under_way is None:
            self._wrong_stored = None  # it was set aside; else that is tried again, see ``_store``
        wrong = self._wrong_since
        if self.source is not None and (name := parse_name(Path(self.source.path).name)):
            self._stored_steps.append(name.step)
        if self.source is None and self.others:
            return (
                "nothing of it is on storage: start the job as it was and end it by SIGTERM, which saves it there, or "
                "choose another --run-dir"
            )
        if self.source is None and self.doubted:
            return "no saved state is left in which they were equal"
        if self.source is None and wrong is not None:
            return f"no saved state is left that is from before step {wrong}"
        return "nothing is saved" if needed and self.source is None and not self._wanted else ""

    async def _look(self) -> tuple[Source | None, Stored]:
        self._silent = ""
        memory = self._held() if socket_path(self._run_dir).exists() else None
        refused = [Path(source.path) for source in self._refused if source.kind == "storage"]
        slow = asyncio.get_running_loop().call_later(_SLOW_S, self._tell_slow)
        # Where memory has a state, storage that hangs must not keep the job from it. Not so where what is wrong there
        # has to be set aside first.
        limit_s = _PATIENCE_S if memory is not None and self._wrong_stored is None else None
        try:
            async with asyncio.timeout(limit_s):
                return memory, await find_stored(
                    self._folder, refused, bytes_too=True, wrong_since=self._wrong_stored, held=memory is not None
                )
        except TimeoutError:
            return memory, Stored(unreadable="it does not answer")
        finally:
            slow.cancel()

    def _tell_unanswered(self, unreadable: str) -> None:
        if unreadable and "storage_unreadable" not in self._troubles:
            self._troubles.add("storage_unreadable")
            self._note("storage_unreadable", detail={"reason": unreadable})
            self._say(f"{self._folder} can't be read ({unreadable}); that is tried for {_PATIENCE_S:g} s")
        if self._silent and "holder_silent" not in self._troubles:
            self._troubles.add("holder_silent")
            self._note("holder_silent", detail={"reason": self._silent})
            self._say(f"{self._silent}, and may hold the newest state; that is tried for {_PATIENCE_S:g} s")

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
        memory = self._in_memory() if self._unsaved or self._vault is None else None
        newest = _newest(memory, await self._seen_on_storage())
        return _described(newest) if newest is not None else ""

    async def _seen_on_storage(self) -> Source | None:
        """The newest checkpoint that looks whole, its bytes unread; None also where storage does not answer soon."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SEE_S):
                return (await find_stored(self._folder, bytes_too=False, wrong_since=self._wrong_stored)).source
        return None

    def refuse(self, source: Source, *, whole: bool = False) -> None:
        """A rank could not take this source up. ``whole``: it could, if the model were divided as it was."""
        self._refused.add(source)
        self.others = self.others or whole

    def doubt(self) -> None:
        """Replicas were found to differ, nobody knows since when."""
        self.doubted = True

    def distrust(self, step: int) -> None:
        """What was saved behind that step is wrong: the next ``choose`` sets it aside."""
        self._wrong_since = step
        self._wrong_stored = step if self._wrong_stored is None else min(step, self._wrong_stored)
        self._going_back = self._wrong_held = True
        if self._under_way is not None and self._under_way.step > step:
            self._under_way = self._under_way._replace(wrong=True)
        self._stored_steps = deque((each for each in self._stored_steps if each <= step), self._stored_steps.maxlen)
        if self.newest_without_nan > step:
            self.newest_without_nan = -1
        self._kept_steps = deque((each for each in self._kept_steps if each <= step), SLOTS)

    def saved_before(self, step: int) -> bool:
        """Whether a state from before that step, or an older one, is known to be saved. To be asked if all go back to
        it then: what the ranks would overwrite in memory stays until ``choose`` is over.
        """
        return any(0 <= saved <= step for saved in (*self._stored_steps, self.newest_without_nan)) or self._pin(step)

    def _pin(self, step: int) -> bool:
        """Has memory keep the newest snapshot of those from before that step. False: none is there any more."""
        kept = [each for each in self._kept_steps if each <= step]
        if not kept:
            return False
        self._unpin()
        try:
            self._pins = vault = self._visit()
            stores = vault.inventory().stores
            held = [
                (store.rank, each.sequence) for store in stores for each in store.snapshots if each.step == kept[-1]
            ]
            if {rank for rank, _ in held}.issuperset(range(self._world_size)) and all(
                vault.pin(*each) for each in held
            ):
                return True
        except VaultError:  # what it holds can't be gone back to
            pass
        self._unpin()
        return False

    def _unpin(self) -> None:
        if self._pins is not None:
            self._pins.close()
            self._pins = None

    def can_go_back(self) -> bool:
        """Whether there may be a source; ``choose`` knows. A job that saves, and has come to its end before the first
        time, loses nothing by beginning anew.
        """
        return self._wanted or self._in_memory() is not None or is_there(self._folder)

    def captured(self, rank: int, frame: Captured, groups: tuple[tuple[int, ...], ...]) -> None:
        """A rank's snapshot is complete. The last one of all sends the checkpoint on its way."""
        if self._going_back:
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
            self.newest = max(self.newest, frame.commits)
            self._kept_steps.append(frame.step)
            self._wrong_since, self._wrong_held = None, False
        if all(each.store for each in ranks.values()):
            self._store(ranks, groups)
        else:
            self._over(frame.commits)

    def skipped(self, rank: int, frame: Skipped, groups: tuple[tuple[int, ...], ...]) -> None:
        """A rank has no snapshot where one was due: there will be no checkpoint of that update."""
        self._trouble("save_skipped", frame.step, frame.reason)
        self.captured(rank, Captured(frame.commits, frame.step, sequence=0, store=False), groups)

    def _over(self, commits: int) -> None:
        self._newest_over = max(self._newest_over, commits)
        if self._under_way is None:
            self._settle(self._newest_over)

    def _store(self, ranks: dict[int, Captured], groups: tuple[tuple[int, ...], ...]) -> None:
        first = ranks[0]
        if self._under_way is not None:
            self._leave_out(first, f"storage is still busy with that of step {self._under_way.step}")
            return
        if self._wrong_stored is not None:
            self._begin_aside()
            self._leave_out(first, f"those from behind step {self._wrong_stored} are wrong, and are set aside first")
            return
        self._submit(self._job(first, groups, groups), ranks)

    def _leave_out(self, of: Captured, reason: str) -> None:
        self._trouble("save_skipped", of.step, reason)
        self._over(of.commits)

    def _begin_aside(self) -> None:
        if self._aside is None:
            self._aside = self._begin_task(self._set_aside())

    async def _set_aside(self) -> None:
        """What lies on storage from behind the wrong step gets a name that nobody goes on from."""
        since, held = self._wrong_stored, not self._going_back or self._in_memory() is not None
        reason = "" if since is None else await set_wrong_aside(self._folder, since, held=held)
        self._aside = None
        landed, self._under_way = self._under_way, None
        if reason:
            self._trouble("wrong_stay", None, reason)
        elif self._wrong_stored == since:
            self._wrong_stored = None
        if landed is not None:
            self._over(0)  # its number is of the history that is left
        self._go_on()

    def store_last(
        self,
        captured: Mapping[int, Captured],
        groups: tuple[tuple[int, ...], ...],
        savers: tuple[tuple[int, ...], ...],
        reason: str,
        over: Callable[[str], None],
    ) -> None:
        """Writes the end-of-life checkpoint from the savers' snapshots. ``over`` is told, once, how that ended."""
        first = next(iter(captured.values()))
        job = msgspec.structs.replace(self._job(first, groups, savers), kind="ttp", reason=reason)
        self._last = lambda: self._submit(job, captured, over)
        if self._wrong_stored is not None and self._under_way is None:
            self._begin_aside()
        self._go_on()

    def _job(self, of: Captured, groups: tuple[tuple[int, ...], ...], savers: tuple[tuple[int, ...], ...]) -> Flush:
        return Flush(str(self._folder), of.step, of.commits, groups, self._libraries, self._keep, savers)

    def _go_on(self) -> None:
        if self._last is not None and self._under_way is None and self._aside is None:
            last, self._last = self._last, None
            last()

    def _submit(self, job: Flush, ranks: Mapping[int, Captured], over: Callable[[str], None] | None = None) -> None:
        save = _Save(job.step, job.commits, time.monotonic_ns(), 0, over)
        if self._vault is None:
            self._failed(save, "the snapshots' holder is gone; the next save starts another")
            return
        snapshots = [(rank, frame.sequence) for rank, frame in sorted(ranks.items())]
        try:
            number = self._vault.submit(WORK, snapshots, msgspec.msgpack.encode(job))
        except HolderLostError as error:  # if it is news: the event loop hears of it next
            self._failed(save, str(error))
            return
        self._under_way = save._replace(number=number)

    def _hear(self) -> None:
        """The holder has a result, or is gone."""
        if self._vault is None:
            return
        try:
            self._vault.hear()
            if self._under_way is not None:
                self._take_result(self._vault, self._under_way)
        except HolderLostError as error:
            self._lost(str(error))

    def _take_result(self, vault: Vault, save: _Save) -> None:
        try:
            value = vault.result(save.number, 0)
        except HolderLostError:
            raise
        except VaultError as error:
            self._under_way = None
            self._failed(save, str(error))
            self._go_on()
            return
        if value is None:
            return
        if save.wrong:
            self._trouble("save_skipped", save.step, "it is wrong, and is set aside")
            self._begin_aside()
            return
        self._under_way = None
        flushed = msgspec.msgpack.decode(value, type=Flushed)
        took_ns = time.monotonic_ns() - save.begun_ns
        detail = {"step": save.step, "commits": save.commits, "path": flushed.path, "duration_ns": took_ns}
        nan = {"nan_tensors": flushed.nan.tensors} if flushed.nan else {}
        self._note("saved", detail={**detail, "bytes": flushed.size_bytes, **nan})
        if self._wrong_since is None or save.step <= self._wrong_since:
            self._stored_steps.append(save.step)
            self.newest_without_nan = self.newest_without_nan if flushed.nan else save.step
        if "save_failed" in self._troubles:
            self._troubles.clear()
            self._say(f"checkpoint of step {save.step}: written; saving is well again")
        if flushed.untidy:
            self._trouble("retention_failed", save.step, flushed.untidy)
        if save.over is not None:
            holds = f". It holds {flushed.nan}" if flushed.nan else ""
            save.over(f"its state from after {save.commits} updates is saved: {flushed.path}{holds}")
        elif flushed.nan:
            self._trouble("nan_saved", save.step, f"{flushed.nan}; the newest one without stays, if there is one")
        self._over(save.commits)
        self._go_on()

    def _failed(self, save: _Save, reason: str) -> None:
        self._trouble("save_failed", save.step, reason)
        if save.over is not None:
            self._unsaved = True
            save.over(f"its state could not be saved: {reason}")
        self._over(0 if save.wrong else save.commits)

    def _trouble(self, kind: str, step: int | None, reason: str) -> None:
        """``step``: of the checkpoint that it is about; None: of none."""
        self._note(kind, detail={"reason": reason} if step is None else {"step": step, "reason": reason})
        if kind not in self._troubles:
            self._troubles.add(kind)
            subject = "checkpoints" if step is None else f"checkpoint of step {step}"
            self._say(f"{subject}: {_TOLD[kind]}: {reason}. Training goes on")

    def _let_go(self) -> None:
        assert self._vault is not None
        asyncio.get_running_loop().remove_reader(self._listened)
        self._vault.close()
        self._vault = None

    def _lost(self, reason: str) -> None:
        self._let_go()
        self._kept_steps.clear()
        self._note("holder_lost", detail={"reason": reason})
        save, self._under_way = self._under_way, None
        if save is not None:
            self._failed(save, reason)
        self._go_on()

    def _held(self) -> Source | None:
        """``_in_memory``, with a holder that stays until the ranks have come for it."""
        if self._in_memory() is None:
            return None
        if self._vault is None:
            try:
                self._keep_to(
                    Vault.connect(self._run_dir, timeout_s=_REPLY_TIMEOUT_S, reply_timeout_s=_REPLY_TIMEOUT_S)
                )
            except VaultError as error:
                self._silent = str(error) if isinstance(error, HolderSilentError) else ""
                return None
        return self._in_memory()

    def _visit(self) -> Vault:
        """The holder, as a visitor: what the agent's own connection has sent already is not answered in between. Raises
        VaultError.
        """
        return Vault.connect(self._run_dir, member=False, timeout_s=_REPLY_TIMEOUT_S, reply_timeout_s=_REPLY_TIMEOUT_S)

    def _in_memory(self) -> Source | None:
        """``_silent`` says afterwards why the holder could not be asked, though it is there; empty: it was."""
        self._silent = ""
        try:
            vault = self._visit()
            try:
                stores = vault.inventory().stores
            finally:
                vault.close()
        except HolderSilentError as error:
            self._silent = str(error)
            return None
        except VaultError:
            return None
        commits = common_commits(stores, self._world_size)
        if self._wrong_since is not None:
            steps = {held.commits: held.step for store in stores for held in store.snapshots}
            commits = [each for each in commits if steps[each] <= self._wrong_since]
        if self.doubted:
            commits = [each for each in commits if each <= self.newest]
        usable = [Source("memory", each) for each in commits if Source("memory", each) not in self._refused]
        return usable[0] if usable else None

    def _pass_over(self, path: str, reason: str) -> None:
        if path not in self._told:
            self._told.add(path)
            self._note("checkpoint_skipped", detail={"path": path, "reason": reason})

    async def finish(self, timeout_s: float, *, failed: bool) -> None:
        """The job is over: waits for what is on its way to storage, and lets the holder go.

        It stays where the job's last state is nowhere else: for whoever starts the job again, and for a while.
        """
        deadline = time.monotonic() + timeout_s
        if self._going_back and self._under_way is None:  # ``choose`` has not come to it
            self._begin_aside()
        while (self._under_way is not None or self._aside is not None) and time.monotonic() < deadline:  # noqa: ASYNC110 - results come by the event loop
            await asyncio.sleep(0.01)
        if self._under_way is not None:
            self._say(f"checkpoint of step {self._under_way.step}: storage is still busy with it; its writer goes on")
        if self._wrong_stored is not None:
            self._say(
                f"checkpoints from behind step {self._wrong_stored} are wrong if they were written before all went "
                f"back, and could not be set aside: take them out of {self._folder} before the job is started again"
            )
        if self._vault is not None:
            since = self._wrong_since
            clean = not self._wrong_held or self._discard(lambda each: since is not None and each.step > since)
            if not clean and (failed or self._unsaved):
                self._say(f"what is in memory is given up: what is wrong there since step {self._wrong_since} stays")
            try:
                if not (clean and (self._unsaved or (failed and (self.others or await self._memory_is_newest())))):
                    self._vault.finish()
            except VaultError:
                return  # it is gone already
            finally:
                self._let_go()

    def _discard(self, wrong: Callable[[Snapshot], bool]) -> bool:
        """Such snapshots count no more, for whoever looks for one from now on. False: they may."""
        try:
            with contextlib.ExitStack() as stack:
                vault = self._visit()
                stack.callback(vault.close)
                for rank in range(self._world_size):
                    for pair in vault.open(rank):
                        stack.callback(pair.close)
                        for snapshot in pair.complete():
                            if wrong(snapshot):
                                pair.discard(snapshot.sequence)
        except (VaultError, OSError):
            return False
        return True

    async def _memory_is_newest(self) -> bool:
        memory, stored = self._in_memory(), await self._seen_on_storage()
        return memory is not None and (stored is None or stored.commits < memory.commits)


def _newest(memory: Source | None, stored: Source | None) -> Source | None:
    found = [each for each in (memory, stored) if each is not None]
    return max(found, key=lambda each: each.commits, default=None)  # of equals the first: memory


def _described(source: Source) -> str:
    return f"update {source.commits} ({source.path or 'in memory'})"
