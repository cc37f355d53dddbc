"""The agent's part in saving: has snapshots that all ranks hold written to storage, and knows what to start again from.

The work is the holder's (``state/vault``): it goes on if this process dies. Sources are tried in the order memory,
storage; one that a rank has refused is not tried again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen
from typing import Any, NamedTuple, Protocol

import msgspec

from resilient_train.errors import HolderLostError, StorageError, VaultError
from resilient_train.launch.holding import ensure_holder
from resilient_train.protocol.messages import Captured, Source
from resilient_train.state.checkpoint.retention import tidy
from resilient_train.state.checkpoint.verify import newest_complete
from resilient_train.state.vault.client import Vault, common_commits, socket_path
from resilient_train.state.vault.flush import PLACE, WORK, Flush, Flushed

CHECKPOINTS = "checkpoints"


class Teller(Protocol):
    """Writes an event of the agent."""

    def __call__(self, kind: str, *, detail: dict[str, Any]) -> None: ...


class _Save(NamedTuple):
    """A checkpoint on its way to storage."""

    step: int
    commits: int
    begun_ns: int
    works: set[int]
    """Numbers of the works that are not over."""
    over: Callable[[str], None] | None = None
    """Of an end-of-life checkpoint: is told how it ended."""


class Saves:
    """See the module's text. ``groups`` are the replica groups, known once the ranks have started."""

    def __init__(
        self, run_dir: Path, world_size: int, keep: int, note: Teller, settle: Callable[[int], None] = lambda _: None
    ) -> None:
        """``settle`` is told of an update when all checkpoints up to it are over and done with, written or not."""
        self._run_dir = run_dir
        self._folder = run_dir / CHECKPOINTS
        self._world_size = world_size
        self._keep = keep
        self._note = note
        self._settle = settle
        self._newest_over = 0
        self._vault: Vault | None = None
        self._holder: Popen[bytes] | None = None
        self._captured: dict[int, dict[int, Captured]] = {}
        self._under_way: list[_Save] = []
        self._last: Callable[[], None] | None = None
        """The end-of-life checkpoint, waiting for the one before it."""
        self._unsaved = False
        self._refused: set[Source] = set()
        self._told: set[Path] = set()

    def open(self, loop: asyncio.AbstractEventLoop) -> str:
        """The ranks want to keep snapshots. Why they can't; empty if they can."""
        if self._vault is not None:
            return ""
        try:
            self._vault, process = ensure_holder(self._run_dir, works={WORK: PLACE})
        except (VaultError, OSError) as error:
            return str(error)
        self._holder = process or self._holder
        loop.add_reader(self._vault.fileno(), self._hear, loop)
        return ""

    def source(self) -> Source | None:
        """What all ranks are to start from: the newest state that is whole. None: from the script's own."""
        self._captured.clear()  # by ranks that are no more
        self._newest_over = 0
        self._settle(0)
        if not self._folder.exists() and not socket_path(self._run_dir).exists():
            return None
        memory, storage = self._in_memory(), self._on_storage()
        found = [each for each in (memory, storage) if each is not None and each not in self._refused]
        return max(found, key=lambda each: each.commits, default=None)  # of equals the first: memory

    def left(self) -> str:
        """What a job that is started again in this run directory would go on from, for people; empty if nothing."""
        memory = self._in_memory() if self._unsaved or self._vault is None else None
        report = newest_complete(self._folder, digests=False).report
        stored = report.manifest if report is not None else None
        if memory is not None and (stored is None or memory.commits >= stored.commits):
            return f"update {memory.commits} (in memory)"
        return f"update {stored.commits} ({report.path})" if report is not None and stored is not None else ""

    def refuse(self, source: Source) -> None:
        """A rank could not take this source up."""
        self._refused.add(source)

    def can_go_back(self) -> bool:
        """Whether there is a source, as far as it can be told without reading it."""
        return bool(self._in_memory() or self._folder.exists())

    def captured(self, rank: int, frame: Captured, groups: tuple[tuple[int, ...], ...]) -> None:
        """A rank's snapshot is complete. The last one of all sends the checkpoint on its way."""
        ranks = self._captured.setdefault(frame.commits, {})
        ranks[rank] = frame
        if len(ranks) < self._world_size:
            return
        for commits in [each for each in self._captured if each <= frame.commits]:
            del self._captured[commits]  # of older ones some rank has skipped its part
        if all(each.store for each in ranks.values()):
            self._store(ranks, groups)
        else:
            self._over(frame.commits)

    def _over(self, commits: int) -> None:
        self._newest_over = max(self._newest_over, commits)
        if not self._under_way:
            self._settle(self._newest_over)

    def _store(self, ranks: dict[int, Captured], groups: tuple[tuple[int, ...], ...]) -> None:
        first = ranks[0]
        if self._vault is None or self._under_way:
            self._note("save_skipped", detail={"step": first.step, "reason": "storage is still busy with the last one"})
            self._over(first.commits)
            return
        self._submit(Flush(str(self._folder), first.step, first.commits, groups, {}, self._keep, groups), ranks)

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
        job = Flush(
            str(self._folder), first.step, first.commits, groups, {}, self._keep, savers, kind="ttp", reason=reason
        )
        self._last = lambda: self._submit(job, captured, over)
        self._go_on()

    def _go_on(self) -> None:
        if self._last is not None and not self._under_way:
            last, self._last = self._last, None
            last()

    def _submit(self, job: Flush, ranks: Mapping[int, Captured], over: Callable[[str], None] | None = None) -> None:
        works: set[int] = set()
        save = _Save(job.step, job.commits, time.monotonic_ns(), works, over)
        try:
            if self._vault is None:
                raise HolderLostError("nobody holds the snapshots any more")
            for rank, frame in sorted(ranks.items()):
                works.add(self._vault.submit(WORK, rank, frame.sequence, msgspec.msgpack.encode(job)))
        except VaultError as error:
            self._failed(save, str(error))
        if works:
            self._under_way.append(save)
        else:
            self._over(job.commits)

    def _hear(self, loop: asyncio.AbstractEventLoop) -> None:
        """The holder has results, or is gone."""
        for save in list(self._under_way):
            try:
                self._take_results(save)
            except HolderLostError as error:
                self._lost(loop, str(error))
                return
        if not self._under_way and self._vault is not None:
            try:
                self._vault.inventory()  # reads what has come; raises if it was the end
            except HolderLostError as error:
                self._lost(loop, str(error))

    def _take_results(self, save: _Save) -> None:
        assert self._vault is not None
        for number in sorted(save.works):
            try:
                value = self._vault.result(number, 0)
            except HolderLostError:
                raise
            except VaultError as error:
                save.works.discard(number)
                self._failed(save, str(error))
                continue
            if value is None:
                return
            save.works.discard(number)
            flushed = msgspec.msgpack.decode(value, type=Flushed)
            if flushed.path:
                took_ns = time.monotonic_ns() - save.begun_ns
                detail = {"step": save.step, "commits": save.commits, "path": flushed.path}
                self._note("saved", detail={**detail, "bytes": flushed.size_bytes, "duration_ns": took_ns})
                if save.over is not None:
                    save.over(f"its state from after {save.commits} updates is saved: {flushed.path}")
        self._under_way.remove(save)
        self._over(save.commits)
        self._go_on()

    def _failed(self, save: _Save, reason: str) -> None:
        self._note("save_failed", detail={"step": save.step, "reason": reason})
        if save.over is not None:
            self._unsaved = True
            save.over(f"its state could not be saved: {reason}")

    def _lost(self, loop: asyncio.AbstractEventLoop, reason: str) -> None:
        if self._vault is not None:
            loop.remove_reader(self._vault.fileno())
            self._vault.close()
            self._vault = None
        failed, self._under_way = self._under_way, []
        for save in failed:
            self._failed(save, reason)
            self._over(save.commits)
        self._note("holder_lost", detail={"reason": reason})
        self._go_on()

    def _in_memory(self) -> Source | None:
        try:
            if self._vault is not None:
                stores = self._vault.inventory().stores
            else:
                vault = Vault.connect(self._run_dir, member=False)
                try:
                    stores = vault.inventory().stores
                finally:
                    vault.close()
        except VaultError:
            return None
        commits = common_commits(stores, self._world_size)
        usable = [Source("memory", each) for each in commits if Source("memory", each) not in self._refused]
        return usable[0] if usable else None

    def _on_storage(self) -> Source | None:
        if not self._folder.exists():
            return None
        try:
            tidy(self._folder)
        except StorageError as error:
            self._note("save_failed", detail={"step": -1, "reason": str(error)})
        found = newest_complete(self._folder)
        for path, reason in found.skipped:
            if path not in self._told:
                self._told.add(path)
                self._note("checkpoint_skipped", detail={"path": str(path), "reason": reason})
        report = found.report
        if report is None or report.manifest is None:
            return None
        return Source("storage", report.manifest.commits, str(report.path))

    async def finish(self, timeout_s: float) -> None:
        """The job is over: waits for what is on its way to storage, and lets the holder go.

        It stays where the job's last state is nowhere else: for whoever starts the job again, and for a while.
        """
        deadline = time.monotonic() + timeout_s
        while self._under_way and time.monotonic() < deadline:  # noqa: ASYNC110 - results come by the event loop
            await asyncio.sleep(0.01)
        if self._vault is not None:
            asyncio.get_running_loop().remove_reader(self._vault.fileno())
            try:
                if not self._unsaved:
                    self._vault.finish()
            except VaultError:
                return  # it is gone already
            finally:
                self._vault.close()
                self._vault = None
