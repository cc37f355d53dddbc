"""Checkpoints that are wrong on all ranks alike, as a script has said: none is found later under its name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pure import checkpoint_rig
from resilient_train.errors import HolderLostError, StorageError, VaultError
from resilient_train.launch.agent import checkpoint_requests, held_snapshots, starting_state, stored_checkpoints
from resilient_train.launch.agent.saves import Saves
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.protocol.messages import Captured, Source
from resilient_train.state.nan import NanFound
from resilient_train.state.vault.flush import Flushed
from resilient_train.state.vault.slots import SlotPair, create

PAIR = ((0, 1),)


class Holder:
    """Has the works that it is given done when the test says so."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.value: bytes | None = None
        self.error = ""
        self.finished = False

    def submit(self, *_: object) -> int:
        self.submitted.append(len(self.submitted))
        return self.submitted[-1]

    def hear(self) -> None:
        pass

    def result(self, *_: object) -> bytes | None:
        value, self.value = self.value, None
        if self.error:
            raise VaultError(self.error)
        return value

    def leave(self, *_: object) -> None:
        pass

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None:
        pass


class Rig:
    """An agent's Saves with that holder. Memory holds the state from before update 8."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = run_dir / CHECKPOINTS
        self.told: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.settled: list[int] = []
        self.holder = Holder()
        note = lambda kind, *, detail: self.events.append((kind, detail))
        self.saves = Saves(run_dir, 2, 2, note, self.told.append, self.settled.append, self.begin)
        self.saves._snapshots.vault = self.holder  # type: ignore[assignment]
        monkeypatch.setattr(self.saves._snapshots, "let_go", lambda: None)
        monkeypatch.setattr(self.saves._snapshots, "newest_to_stay", lambda: Source("memory", 8))
        monkeypatch.setattr(self.saves._snapshots, "newest", lambda: Source("memory", 8))
        monkeypatch.setattr(self.saves._snapshots, "_inventory", lambda: SimpleNamespace(works=0, stores=()))
        (run_dir / "holder-0.sock").touch()
        self.begun: list[asyncio.Task[None]] = []

    def begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """The agent's: it looks at the end of each, and a mistake of ours ends the job."""
        self.begun.append(asyncio.create_task(work))
        return self.begun[-1]

    def captured(self, step: int, sequence: int = 1) -> None:
        for rank in range(2):
            self.saves.captured(rank, Captured(step, step, sequence, store=True, fingerprint=7), PAIR)

    def lands(self, step: int, nan: NanFound | None = None) -> None:
        """The flush under way is over."""
        path = checkpoint_rig.write(self.folder, step)
        self.holder.value = msgspec.msgpack.encode(Flushed(str(path), 1, True, "", nan))
        self.saves._hear()

    async def set_aside(self) -> None:
        if self.saves._requests.aside is not None:
            await self.saves._requests.aside

    def names(self) -> list[str]:
        return checkpoint_rig.names(self.folder)


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    rig = Rig(tmp_path, monkeypatch)
    checkpoint_rig.write(rig.folder, 8)
    return rig


def choose(rig: Rig) -> Any:
    return rig.saves.choose(needed=False)  # it waits for no flush then, as after its 60 s


def test_one_that_is_being_written_when_all_go_back(rig: Rig) -> None:
    """It lands after all have begun anew, and after their first snapshot."""

    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        assert not await choose(rig)
        assert rig.saves.start.source == Source("memory", 8)
        rig.captured(12)
        assert rig.holder.submitted == [0], "storage is busy"
        rig.lands(16)
        await rig.set_aside()
        assert rig.names() == ["step_8", "wrong_step_16"]
        assert rig.settled[-1] == 12, "those of the history that was left count no more"
        rig.captured(16)
        rig.lands(16)
        assert rig.names() == ["step_16", "step_8", "wrong_step_16"], "the new one of that step is right"
        assert not await choose(rig)
        assert Path(str(rig.saves.start.source and rig.saves.start.source.path)).name == "step_16"

    asyncio.run(job())
    assert [detail["step"] for kind, detail in rig.events if kind == "saved"] == [16]


def lands_during_the_look(rig: Rig, monkeypatch: pytest.MonkeyPatch, step: int, pause_s: float) -> None:
    """What is under way is written behind the first look at storage, and a while before its answer is taken."""
    real, looks = starting_state.find_stored, list[int]()

    async def look(*arguments: Any, **more: Any) -> Any:
        found = await real(*arguments, **more)
        looks.append(step)
        if len(looks) == 1:
            rig.lands(step)
            await asyncio.sleep(pause_s)
        return found

    monkeypatch.setattr(starting_state, "find_stored", look)


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1], ids=["same turn", "while it is set aside", "behind that"])
@pytest.mark.parametrize("problem", ["", "read-only"])
def test_one_that_lands_while_all_look(rig: Rig, monkeypatch: pytest.MonkeyPatch, pause_s: float, problem: str) -> None:
    """It is on storage then, and nobody has seen it there."""
    real = checkpoint_requests.set_wrong_aside

    async def slow(*arguments: Any, **more: Any) -> str:
        await asyncio.sleep(0.05)
        return problem or await real(*arguments, **more)

    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        lands_during_the_look(rig, monkeypatch, 16, pause_s)
        monkeypatch.setattr(checkpoint_requests, "set_wrong_aside", slow)
        assert not await choose(rig)
        rig.captured(12)
        await rig.set_aside()
        monkeypatch.setattr(checkpoint_requests, "set_wrong_aside", real)
        rig.captured(14)
        await rig.set_aside()
        assert rig.names()[0] == "step_8"
        assert "step_16" not in rig.names()
        assert not await choose(rig)
        assert rig.saves.start.source == Source("memory", 8)

    asyncio.run(job())


def test_nothing_right_is_written_beside_what_is_set_aside(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get a name that nobody goes on from."""
    real = checkpoint_requests.set_wrong_aside

    async def slow(*arguments: Any, **more: Any) -> str:
        await asyncio.sleep(0.1)
        return await real(*arguments, **more)

    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        lands_during_the_look(rig, monkeypatch, 16, 0.02)
        monkeypatch.setattr(checkpoint_requests, "set_wrong_aside", slow)
        assert not await choose(rig)
        rig.captured(18)
        assert rig.holder.submitted == [0]
        await rig.set_aside()
        rig.captured(20)
        assert rig.holder.submitted == [0, 1]

    asyncio.run(job())


def test_a_holder_that_was_given_up_may_still_write_what_is_wrong(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still, and was taken for gone."""
    stands_still = True
    monkeypatch.setattr(rig.saves._snapshots, "may_write", lambda: stands_still)

    async def job() -> None:
        nonlocal stands_still
        rig.captured(16)
        rig.saves.distrust(13)
        assert not await choose(rig)
        rig.saves._lost("it does not answer")
        rig.captured(12)
        await rig.set_aside()
        assert ("wrong_stay", {"reason": "the holder of memory snapshots may still write one"}) in rig.events
        checkpoint_rig.write(rig.folder, 16)
        stands_still = False
        rig.captured(14)
        await rig.set_aside()
        assert rig.names() == ["step_8", "wrong_step_16"]
        rig.captured(15)
        assert rig.holder.submitted == [0, 1]

    asyncio.run(job())


def test_what_a_holder_says_last_is_heard(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result and its end come at once."""

    def ends() -> None:
        raise HolderLostError("it is gone")

    async def job() -> None:
        rig.captured(16)
        monkeypatch.setattr(rig.holder, "hear", ends)
        rig.lands(16)
        assert [kind for kind, _ in rig.events] == ["saved", "holder_lost"]

    asyncio.run(job())


def test_what_is_being_written_may_have_an_older_one_deleted(rig: Rig) -> None:
    """``keep=2``: what all would go back to has to be there when they come to it."""

    async def job() -> None:
        for step in (10, 14):
            rig.captured(step)
            rig.lands(step)
        assert rig.saves.saved_before(13)
        rig.captured(16)
        assert not rig.saves.saved_before(13), "nothing is in memory here"
        assert rig.saves.saved_before(14)
        rig.lands(16)
        assert not rig.saves.saved_before(13)

    asyncio.run(job())


def test_one_that_holds_nan_is_told_once(rig: Rig) -> None:
    """And at the end of the job in the sentence that says where the state is."""
    nan, ends = NanFound(3, 6, "w"), []

    async def job() -> None:
        for step in (16, 24):
            rig.captured(step)
            rig.lands(step, nan)
        last = {rank: Captured(32, 32, 1, store=True, fingerprint=7) for rank in range(2)}
        rig.saves.store_last(last, PAIR, PAIR, "asked for", ends.append)
        rig.lands(32, nan)

    asyncio.run(job())
    (told,) = rig.told
    assert told.startswith("checkpoint of step 16: written, with values that are not numbers: NaN in 3 of 6 tensors")
    assert [detail["nan_tensors"] for kind, detail in rig.events if kind == "saved"] == [3, 3, 3]
    (end,) = ends
    assert end.endswith("step_32. It holds NaN in 3 of 6 tensors ('w' for one)")


def test_the_newest_without_nan_is_known(rig: Rig) -> None:
    """However many with NaN were written since: it is not deleted."""

    async def job() -> None:
        for step, nan in ((10, None), (12, None), (14, NanFound(1, 6, "w")), (16, NanFound(3, 6, "w")), (18, None)):
            rig.captured(step)
            rig.lands(step, nan)
            if step == 16:
                assert rig.saves.states.newest_without_nan == 12
                assert rig.saves.saved_before(12)
                assert not rig.saves.saved_before(11)
        assert rig.saves.states.newest_without_nan == 18
        rig.saves.distrust(18)
        assert rig.saves.states.newest_without_nan == 18
        rig.saves.distrust(17)
        assert rig.saves.states.newest_without_nan == -1

    asyncio.run(job())


def test_a_mistake_of_ours_there_is_seen(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent was never told, and the job went on without saving anything any more."""

    async def broken(*_: object, **__: object) -> str:
        raise LookupError("our own mistake")

    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        assert not await choose(rig)
        monkeypatch.setattr(checkpoint_requests, "set_wrong_aside", broken)
        rig.lands(16)
        (task,) = rig.begun
        with pytest.raises(LookupError):
            await task

    asyncio.run(job())


def test_one_that_is_being_written_and_fails(rig: Rig) -> None:
    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        assert not await choose(rig)
        rig.captured(12)
        rig.holder.error = "no space"
        rig.saves._hear()
        rig.holder.error = ""
        assert rig.settled[-1] == 12
        rig.captured(14)
        await rig.set_aside()
        rig.captured(15)
        assert rig.holder.submitted == [0, 1], "one is left out for what may lie there"

    asyncio.run(job())


def test_those_that_can_not_be_set_aside(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside them: nobody could tell what is right from what is wrong."""
    checkpoint_rig.write(rig.folder, 16)

    def refused(*_: object) -> None:
        raise StorageError("read-only")

    async def job() -> None:
        rig.saves.distrust(13)
        with monkeypatch.context() as read_only:
            read_only.setattr(stored_checkpoints, "set_aside", refused)
            assert not await choose(rig)
            assert rig.saves.start.source == Source("memory", 8), "the job goes on"
            rig.captured(12)
            await rig.set_aside()
            assert (rig.holder.submitted, rig.names()) == ([], ["step_16", "step_8"])
            assert ("wrong_stay", {"reason": "read-only"}) in rig.events
            rig.captured(14)
            await rig.set_aside()
            await rig.saves.finish(5, failed=False)
            assert "could not be set aside" in rig.told[-1]
        assert not await choose(rig)
        assert rig.names() == ["step_8", "wrong_step_16"], "it is tried again each time that all start"
        rig.captured(16)
        rig.lands(16)
        assert rig.names() == ["step_16", "step_8", "wrong_step_16"]

    asyncio.run(job())


def test_they_are_set_aside_before_the_next_one_is_written(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_rig.write(rig.folder, 16)

    def refused(*_: object) -> None:
        raise StorageError("read-only")

    async def job() -> None:
        rig.saves.distrust(13)
        with monkeypatch.context() as read_only:
            read_only.setattr(stored_checkpoints, "set_aside", refused)
            assert not await choose(rig)
        rig.captured(12)
        await rig.set_aside()
        assert rig.names() == ["step_8", "wrong_step_16"]
        rig.captured(16)
        assert rig.holder.submitted == [0]

    asyncio.run(job())


def test_what_dying_ranks_still_say_is_of_the_history_that_is_left(rig: Rig) -> None:
    async def job() -> None:
        rig.saves.distrust(13)
        rig.captured(16)
        assert rig.holder.submitted == []
        assert rig.saves.states.wrong_since == 13
        assert not await choose(rig)
        rig.captured(12)
        assert rig.holder.submitted == [0]

    asyncio.run(job())


def test_a_job_that_ends_before_all_have_gone_back(rig: Rig) -> None:
    checkpoint_rig.write(rig.folder, 16)

    async def job() -> None:
        rig.saves.distrust(13)
        await rig.saves.finish(5, failed=True)
        assert rig.names() == ["step_8", "wrong_step_16"]

    asyncio.run(job())


def test_a_job_that_ends_while_a_wrong_one_fails(rig: Rig) -> None:
    """The one before it is wrong too."""
    checkpoint_rig.write(rig.folder, 14)

    async def job() -> None:
        rig.captured(16)
        rig.saves.distrust(13)
        ended = asyncio.create_task(rig.saves.finish(5, failed=True))
        await asyncio.sleep(0)
        rig.holder.error = "no space"
        rig.saves._hear()
        await ended
        assert rig.names() == ["step_8", "wrong_step_14"]

    asyncio.run(job())


def test_a_holder_that_goes_while_a_job_ends(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        async def newest() -> bool:
            rig.saves._snapshots.vault = None
            return False

        monkeypatch.setattr(rig.saves.start, "memory_is_newest", newest)
        await rig.saves.finish(1, failed=True)

    asyncio.run(job())


def test_memory_is_kept_without_what_is_wrong(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """For who starts a job again that ended before all had begun anew."""
    pair = SlotPair(create(0, 4096), writes=True)
    for step in (9, 16):
        draft = pair.begin()
        assert draft is not None
        draft.commit(commits=step, step=step, image_bytes=0, generation=1, world=2, digest=b"")
    visitor = Visitor(pair)
    monkeypatch.setattr(held_snapshots.Vault, "connect", lambda *_, **__: visitor)
    monkeypatch.setattr(rig.saves._snapshots, "newest", lambda: Source("memory", 9))
    rig.saves.distrust(13)
    asyncio.run(rig.saves.finish(5, failed=True))
    assert [each.commits for each in pair.complete()] == [9]
    assert not rig.holder.finished, "it is newer than what is on storage"
    pair.close()


def test_memory_that_can_not_be_cleaned_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise HolderLostError("it does not answer")

    monkeypatch.setattr(held_snapshots.Vault, "connect", silent)
    monkeypatch.setattr(rig.saves._snapshots, "newest", lambda: Source("memory", 9))
    rig.saves.distrust(13)
    asyncio.run(rig.saves.finish(5, failed=True))
    assert rig.holder.finished
    assert "what is in memory is given up" in rig.told[-1]


class Memory:
    """A connection to a holder that has these steps of each of two ranks. A pin ends with it."""

    def __init__(self, *steps: tuple[int, ...]) -> None:
        self.steps = steps
        self.pinned: set[tuple[int, int]] = set()

    def inventory(self) -> Any:
        stores = [SimpleNamespace(rank=rank, snapshots=self._held(each)) for rank, each in enumerate(self.steps)]
        return SimpleNamespace(stores=stores, works=0)

    def _held(self, steps: tuple[int, ...]) -> list[Any]:
        return [SimpleNamespace(step=step, commits=step, sequence=100 + step, world=2) for step in steps]

    def pin(self, rank: int, sequence: int) -> bool:
        there = sequence - 100 in self.steps[rank]
        self.pinned |= {(rank, sequence)} if there else set()
        return there

    def records(self, _: int) -> list[Any]:
        return []

    def close(self) -> None:
        self.pinned.clear()


def test_the_older_one_in_memory_stays_until_all_have_gone_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory((16, 12), (16, 12))
    monkeypatch.setattr(held_snapshots.Vault, "connect", lambda *_, **__: memory)

    async def job() -> None:
        for step in (8, 12, 16):
            rig.captured(step)
        assert not rig.saves.saved_before(11), "that one was overwritten"
        assert memory.pinned == set()
        assert rig.saves.saved_before(16)
        assert memory.pinned == {(0, 116), (1, 116)}
        assert rig.saves.saved_before(13)
        assert memory.pinned == {(0, 112), (1, 112)}
        rig.saves.distrust(13)
        await choose(rig)
        assert memory.pinned == set(), "the next snapshot may have its place"

    asyncio.run(job())


@pytest.mark.parametrize("held", [((16, 12), (16,)), ((16,), (16,)), ((20, 16), (16, 12))])
def test_one_that_is_being_overwritten_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch, held: Any) -> None:
    memory = Memory(*held)
    monkeypatch.setattr(held_snapshots.Vault, "connect", lambda *_, **__: memory)

    async def job() -> None:
        rig.captured(12)
        rig.captured(16)
        assert not rig.saves.saved_before(13)
        assert memory.pinned == set(), "nothing is held up by it"

    asyncio.run(job())


def test_a_holder_that_does_not_answer_has_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise HolderLostError("it does not answer")

    monkeypatch.setattr(held_snapshots.Vault, "connect", silent)

    async def job() -> None:
        rig.captured(12)
        assert not rig.saves.saved_before(13)

    asyncio.run(job())


class Visitor:
    """A connection by which one reads what memory holds of rank 0."""

    def __init__(self, pair: SlotPair) -> None:
        self._pair = pair

    def inventory(self) -> Any:
        return SimpleNamespace(stores=(), works=0)

    def open(self, rank: int) -> list[SlotPair]:
        return [] if rank else [SlotPair(os.dup(self._pair.fd), writes=False)]

    def close(self) -> None:
        pass
