"""Ranks that skip different snapshots: there is always one that all of them hold, and it never is an older one.

Real slots, records, pins and words of the board. Ranks run freely between barriers, also in the middle of one another's
looks and stores; each may be killed at any of them, alone or with all others, and its memory may be lost with it. They
skip snapshots at random, and storage lets go of them one by one. The seed replays a failure.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from resilient_train._native import Board
from resilient_train.session.saves.snapshot_names import OFF, SnapshotNames
from resilient_train.state.vault.client import common_commits
from resilient_train.state.vault.record import Snapshot
from resilient_train.state.vault.room import Room
from resilient_train.state.vault.slots import SlotPair, SnapshotDraft
from resilient_train.state.vault.snapshot_index import RefusedError, SnapshotIndex

MANY = [range(40), *(pytest.param(range(at, at + 500), marks=pytest.mark.long) for at in range(0, 3_000, 500))]
WINDOWS = 16
IMAGE_BYTES = 64


class Killed(BaseException):
    pass


class AllKilled(BaseException):
    pass


class LostError(AssertionError):
    """The newest snapshot that all ranks held is gone."""


class Slots(SlotPair):
    """Before and after each store something else may happen."""

    def __init__(self, job: Job, fd: int, sequence: int) -> None:
        self.job: Job | None = None
        self.draft: SnapshotDraft | None = None
        super().__init__(fd, writes=True, sequence=sequence)
        self.job = job

    def begin(self, keep: int | None = None) -> SnapshotDraft | None:
        self.draft = super().begin(keep)
        return self.draft

    def die(self) -> None:
        if self.draft is not None and not self.draft.over:
            self.draft.image.release()
        self.close()

    def write_record(self, slot: int, data: bytes, offset: int = 0) -> None:
        assert self.job is not None
        self.job.moment(self.rank)
        super().write_record(slot, data, offset)
        self.job.moment(self.rank)


class Words:
    """The words of the board, as ``rank`` sees them."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.world_size = job, rank, job.board.world_size

    def kept(self, rank: int) -> tuple[int, int]:
        self.job.moment(self.rank)
        return self.job.board.kept(rank)

    def set_kept(self, first: int, second: int) -> None:
        self.job.moment(self.rank)
        self.job.board.set_kept(self.rank, first, second)
        self.job.moment(self.rank)


class NewestKept(SnapshotNames):
    """The control: each rank for itself keeps its own newest."""

    def begin(self, pair: SlotPair) -> SnapshotDraft | None:
        return pair.begin()


class Process:
    """A rank's process, from its start to its death."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job = job
        self.rank = rank
        self.kept = job.rule(Words(job, rank))  # type: ignore[arg-type]
        self.pair: Slots | None = None
        self.pending: tuple[SnapshotDraft, int] | None = None
        self.taken = -1
        self.off = False

    def window(self, commits: int) -> Iterator[None]:
        """One window: head, fence, and then it is at the barrier."""
        if self.pair is None:
            self.kept.lacks(self.job.holdings.of(self.rank))
        if self.pair is None or self.pair.capacity_bytes < self.job.image_bytes:
            self.reserve()
        yield
        skipped = not self.job.quiet and self.job.chance.random() < 0.2
        if not self.off and self.job.due(commits) and commits != self.taken and not skipped:
            if self.kept.left_off() is not None or (not self.job.quiet and self.job.chance.random() < 0.005):
                self.kept.leave_off()
                self.off = True
                self.job.tally["off"] += 1
            else:
                self.begin(commits)
        yield
        self.fence()

    def reserve(self) -> None:
        holdings = self.job.holdings
        store = holdings.reserve(self.rank, self.job.image_bytes)
        self.close()
        self.pair = Slots(self.job, os.dup(store.fd), holdings.sequence(self.rank))

    def begin(self, commits: int) -> None:
        assert self.pair is not None
        for held in self.pair.complete():
            if held.commits == commits:
                self.kept.found(commits)
                self.job.captured(held)
                return
        draft = self.kept.begin(self.pair)
        if draft is not None:
            self.pending = draft, commits
            self.taken = commits

    def fence(self) -> None:
        if self.pending is None:
            return
        (draft, commits), self.pending = self.pending, None
        draft.image[:IMAGE_BYTES] = picture(commits)
        snapshot = draft.commit(
            commits=commits, step=commits, image_bytes=IMAGE_BYTES, generation=0, world=self.job.board.world_size
        )
        self.kept.complete(commits)
        self.job.captured(snapshot)

    def close(self) -> None:
        if self.pair is not None:
            self.pair.die()
            self.pair = self.pending = None


class Job:
    def __init__(self, seed: int, rule: type[SnapshotNames]) -> None:
        self.chance = random.Random(seed)
        self.rule = rule
        self.dues = [self.chance.random() < 0.67 for _ in range(WINDOWS)]
        self.board = Board.create(self.chance.choice([1, 2, 3, 4]))
        self.holdings = SnapshotIndex(lambda: Room("memory", 1 << 40, 1 << 40))
        self.image_bytes = IMAGE_BYTES
        self.processes = [Process(self, rank) for rank in range(self.board.world_size)]
        self.windows: dict[int, Iterator[None]] = {}
        self.running: set[int] = set()
        self.snapshots: dict[int, dict[int, Snapshot]] = {}
        self.flushed: list[tuple[int, int]] = []
        """Owners of pins: update and rank."""
        self.storage = self.commits = 0
        self.newest = 0
        """Which all ranks have named."""
        self.gone: set[int] = set()
        """What ranks had named that have lost their memory."""
        self.quiet = False
        self.tally = dict.fromkeys(("deaths", "restarts", "from_memory", "lost", "commons", "off"), 0)

    def due(self, commits: int) -> bool:
        return self.quiet or self.dues[commits]

    def look(self) -> None:
        """The invariant: what all ranks have named stays, until all have named a newer one."""
        named = (self.board.kept(rank) for rank in range(self.board.world_size))
        newest = max(set.intersection(*map(set, named)) - self.gone - {OFF}, default=0)
        self.tally["commons"] += newest > self.newest
        self.newest = max(newest, self.newest)
        if self.common() < self.newest:
            raise LostError(f"all ranks held a snapshot from before update {self.newest}, now only {self.common()}")

    def common(self) -> int:
        """What a restart of all ranks would find in memory."""
        return max(common_commits(self.holdings.describe(), self.board.world_size), default=0)

    def moment(self, rank: int) -> None:
        """``rank`` is about to look or to store, or just has."""
        self.look()
        draw = self.chance.random()
        if self.quiet or draw > 0.25:
            return
        if draw < 0.004:
            raise AllKilled
        if draw < 0.016:
            raise Killed
        if draw < 0.03:
            self.let_go()
        elif draw < 0.04:
            self.holdings.drop_superseded()
        else:
            self.step(self.chance.randrange(self.board.world_size))
        assert rank in self.running

    def step(self, rank: int) -> None:
        """Lets the rank go on by a piece of its window, unless it is in the midst of one, or at the barrier."""
        if rank in self.running or rank not in self.windows:
            return
        self.running.add(rank)
        try:
            if next(self.windows[rank], "over") == "over":
                del self.windows[rank]
        except Killed:
            self.dies(rank)
        finally:
            self.running.discard(rank)

    def dies(self, rank: int) -> None:
        """And another process takes its place, once the others have fenced."""
        self.tally["deaths"] += 1
        self.processes[rank].close()
        self.processes[rank] = Process(self, rank)
        self.windows[rank] = self.recovery(rank)

    def recovery(self, rank: int) -> Iterator[None]:
        if self.chance.random() < 0.1:
            # With the holder: the next one forgets all pins, and what was on its way to storage does not arrive.
            self.gone |= set(self.board.kept(rank))
            while self.flushed:
                self.holdings.release_all(self.flushed.pop())
            self.holdings.drop(rank)
            self.tally["lost"] += 1
            self.newest = 0
        commits = self.commits
        for other in self.processes:
            while other.pending is not None:
                yield
        if self.chance.random() < 0.7:  # the step is redone; else all were READY, and it goes on behind its barrier
            yield from self.processes[rank].window(commits)

    def captured(self, snapshot: Snapshot) -> None:
        ranks = self.snapshots.setdefault(snapshot.commits, {})
        ranks[snapshot.rank] = snapshot
        if len(ranks) == self.board.world_size and not self.quiet and self.chance.random() < 0.5:
            try:
                for each in ranks.values():
                    self.holdings.pin((each.commits, each.rank), each.rank, each.sequence)
                    self.flushed.append((each.commits, each.rank))
            except RefusedError:  # lost, or overwritten already
                while self.flushed and self.flushed[-1][0] == snapshot.commits:
                    self.holdings.release_all(self.flushed.pop())

    def let_go(self) -> None:
        """Storage has one rank's snapshot; the others of that update may stay pinned for long."""
        if self.flushed:
            commits, _ = owner = self.chance.choice(self.flushed)
            self.flushed.remove(owner)
            self.holdings.release_all(owner)
            if not any(each[0] == commits for each in self.flushed):
                self.storage = max(self.storage, commits)

    def train(self) -> None:
        while self.commits < WINDOWS:
            try:
                self.window()
            except AllKilled:
                self.restart()
        self.quiet = True
        while self.flushed:
            self.let_go()
        for _ in range(2):
            self.window()
        if any(process.off for process in self.processes):
            assert all(process.off for process in self.processes), "the others find it when the next is due"
        else:
            assert self.newest == self.commits - 1, "a snapshot that all have taken is what they go on from"

    def window(self) -> None:
        self.windows = {each.rank: each.window(self.commits) for each in self.processes}
        while self.windows:
            self.step(self.chance.choice(list(self.windows)))
        self.commits += 1
        self.image_bytes *= 4 if not self.quiet and self.chance.random() < 0.05 else 1

    def restart(self) -> None:
        self.tally["restarts"] += 1
        for process in self.processes:
            process.close()
        self.running.clear()
        self.snapshots.clear()
        self.commits = max(self.common(), self.storage)
        self.tally["from_memory"] += 0 < self.commits == self.common()
        self.processes = [Process(self, rank) for rank in range(self.board.world_size)]
        for process in self.processes:
            for store in self.holdings.of(process.rank):
                self.look_at(store.complete(), process.rank)
            quiet, self.quiet = self.quiet, True  # a death in here is a restart again
            process.kept.begin_at(self.commits, self.holdings.of(process.rank))
            process.taken = self.commits
            self.quiet = quiet
        self.gone.clear()
        if self.commits > self.common():  # storage has a newer one: memory's is not needed any more
            self.newest = 0

    def look_at(self, snapshots: list[Snapshot], rank: int) -> None:
        for snapshot in snapshots:
            store, _ = self.holdings.find(rank, snapshot.sequence)
            reader = SlotPair(os.dup(store.fd), writes=False)
            with reader.image(snapshot) as image:
                assert bytes(image) == picture(snapshot.commits)
            reader.close()

    def close(self) -> None:
        for process in self.processes:
            process.close()
            self.holdings.drop(process.rank)
        self.board.close()


def picture(commits: int) -> bytes:
    return bytes([commits % 256]) * IMAGE_BYTES


def run(seed: int, rule: type[SnapshotNames] = SnapshotNames) -> dict[str, int]:
    job = Job(seed, rule)
    try:
        job.train()
        return job.tally
    finally:
        job.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_there_is_always_a_snapshot_that_all_ranks_hold(seeds: range) -> None:
    tallies: list[dict[str, Any]] = []
    for seed in seeds:
        try:
            tallies.append(run(seed))
        except AssertionError as error:
            raise AssertionError(f"run({seed}): {error}") from error
    total = {name: sum(each[name] for each in tallies) for name in tallies[0]}
    print(total)
    assert total["deaths"] > len(seeds)
    assert total["restarts"] > len(seeds) / 4
    assert total["from_memory"] > len(seeds) / 8
    assert total["lost"] > len(seeds) / 20
    assert total["commons"] > 2 * len(seeds)
    assert total["off"] > len(seeds) / 4


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seeds", MANY, ids=str)
def test_ranks_that_keep_their_own_newest_lose_it(seeds: range) -> None:
    """The control."""
    lost = 0
    for seed in seeds:
        try:
            run(seed, NewestKept)
        except LostError:
            lost += 1
    assert lost > len(seeds) / 4
