"""What the agent knows of saved states without a holder: what there is to go back to, and when there is nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pure import checkpoint_rig
from pure.silent_holder import silent_holder
from resilient_train.errors import HolderLostError, HolderSilentError
from resilient_train.events import now
from resilient_train.launch.agent import held_snapshots, starting_state, stored_checkpoints, trusted_states
from resilient_train.launch.agent.distrust_record import FILE, Distrusted, DistrustRecord
from resilient_train.launch.agent.held_snapshots import HeldSnapshots, OfOtherRanks
from resilient_train.launch.agent.saves import Saves
from resilient_train.launch.agent.stored_checkpoints import Stored
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.observe.sinks import JsonLines
from resilient_train.protocol.messages import Captured, Source, VaultOpened
from resilient_train.state.vault import holder_search, slots
from resilient_train.state.vault.client import lock_of, socket_path
from resilient_train.state.vault.slots import SlotPair


def saves(run_dir: Path) -> Saves:
    return Saves(run_dir, 2, 2, lambda *_, **__: None, lambda _: None, lambda _: None, asyncio.create_task)


def choose(each: Saves, *, needed: bool = False) -> str:
    return asyncio.run(each.choose(needed=needed))


def left(run_dir: Path) -> str:
    return asyncio.run(saves(run_dir).start.left())


@pytest.mark.parametrize("there", [False, True])
def test_nothing_was_saved(tmp_path: Path, *, there: bool) -> None:
    """A folder is no state, nor is a draft."""
    if there:
        (tmp_path / CHECKPOINTS / "step_4.tmp").mkdir(parents=True)
    each = saves(tmp_path)
    assert each.can_go_back() == there, "it may be worth a look"
    assert choose(each, needed=True) == "nothing is saved"
    assert choose(each) == ""
    assert each.start.source is None
    assert left(tmp_path) == ""


@pytest.mark.parametrize("needed", [False, True])
def test_beside_damaged_checkpoints_nobody_begins_anew(tmp_path: Path, *, needed: bool) -> None:
    """The job would train from its beginning, and write over them in the end."""
    for step in (4, 6):
        (tmp_path / CHECKPOINTS / f"step_{step}").mkdir(parents=True)
    each = saves(tmp_path)
    blind = choose(each, needed=needed)
    assert blind.startswith(f"none of the 2 checkpoints in {tmp_path / CHECKPOINTS} can be gone on from (")
    assert "step_6: manifest.json" in blind


def test_a_job_that_saves_may_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: object, **__: object) -> tuple[None, None]:
        raise OSError("none comes up")

    monkeypatch.setattr(holder_search, "find_holder", found)
    each = saves(tmp_path)
    assert "none comes up" in asyncio.run(each.open()).error
    assert each.can_go_back()
    assert choose(each, needed=True) == ""


def test_a_holder_that_does_not_come_up_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For one that comes up late the job would train without saves to its end."""
    now_s, looked = 1000.0, list[float]()

    async def found(*_: object, patience_s: float, **__: object) -> tuple[Any, None]:
        looked.append(patience_s)
        if len(looked) < 3:
            raise HolderLostError("it takes its time")
        return Holding(), None

    monkeypatch.setattr(holder_search, "find_holder", found)
    monkeypatch.setattr(holder_search.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(HeldSnapshots, "_keep_to", lambda *_: None)
    each = saves(tmp_path)
    for times in (1, 2):
        for _ in range(3):
            assert asyncio.run(each.open()) == VaultOpened("it takes its time", later=True)
        assert len(looked) == times, "the ranks ask at each step, and wait"
        now_s += 31
    assert asyncio.run(each.open()) == VaultOpened()
    assert looked == [20, 0, 0], "all train meanwhile"
    looked.clear()
    assert asyncio.run(each.open()).later
    now_s += 3601
    assert asyncio.run(each.open()) == VaultOpened("it takes its time"), "they leave off"


def test_what_a_silent_holder_has_of_a_history_that_was_left_is_no_snapshot_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All went on from storage, and come to the same updates again: a rank must not find that of before there."""
    with contextlib.closing(SlotPair(slots.create(0, 4096), writes=True)) as pair:
        for commits in (5, 6):
            draft = pair.begin()
            assert draft is not None
            draft.commit(commits=commits, step=commits, image_bytes=0, generation=0, world=2)
        answers: list[Any] = [Visiting(pair), silent, Visiting(pair)]

        def connect(*_: object, **__: object) -> Any:
            answer = answers.pop(0) if len(answers) > 1 else answers[0]
            return answer() if answer is silent else answer

        async def found(*_: object, **__: object) -> tuple[Any, None]:
            return connect(), None

        monkeypatch.setattr(holder_search, "find_holder", found)
        monkeypatch.setattr(held_snapshots.Vault, "connect", connect)
        monkeypatch.setattr(HeldSnapshots, "_keep_to", lambda self, vault: setattr(self, "vault", vault))
        monkeypatch.setattr(HeldSnapshots, "let_go", lambda self: setattr(self, "vault", None))
        each = saves(tmp_path)
        each.states.newest = 5
        checkpoint_rig.write(tmp_path / CHECKPOINTS, 5)
        assert not choose(each)
        opened = asyncio.run(each.open())
        assert (opened.error != "", opened.later) == (True, True), "it stands still once more"
        assert [held.commits for held in pair.complete()] == [6, 5]
        each.states.distrust(5)
        each.states.going_back = False  # no device's snapshots are ever compared, so nothing else ends it
        assert asyncio.run(each.open()) == VaultOpened()
        assert each.states.wrong_since is None
        assert [held.commits for held in pair.complete()] == [5]
        assert asyncio.run(each.open()) == VaultOpened()


class Visiting:
    """A connection to a holder of this pair."""

    def __init__(self, pair: SlotPair) -> None:
        self._pair = pair

    def open(self, rank: int) -> list[Any]:
        of = SimpleNamespace(complete=self._pair.complete, discard=self._pair.discard, close=lambda: None)
        return [] if rank else [of]

    def hear(self) -> None:
        pass

    def close(self) -> None:
        pass


def silent(*_: object, **__: object) -> None:
    raise HolderSilentError("the holder did not answer within 2 s")


@pytest.mark.parametrize("needed", [True, False])
def test_nobody_begins_anew_beside_a_holder_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, needed: bool
) -> None:
    socket_path(tmp_path).touch()
    monkeypatch.setattr(held_snapshots.Vault, "connect", silent)
    monkeypatch.setattr(starting_state, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(starting_state, "_LOOK_AGAIN_S", 0.01)
    each = saves(tmp_path)
    assert "did not answer within 2 s, and may hold snapshots of this run" in choose(each, needed=needed)
    checkpoint_rig.write(tmp_path / CHECKPOINTS, 4)
    assert not choose(each, needed=needed)
    assert each.start.source is not None
    assert Path(each.start.source.path).name == "step_4"


def test_a_holder_that_answers_in_the_end_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    socket_path(tmp_path).touch()
    answers = [silent, silent, lambda *_, **__: Holding()]
    monkeypatch.setattr(held_snapshots.Vault, "connect", lambda *_, **__: answers.pop(0)() if answers else Holding())
    monkeypatch.setattr(starting_state, "_LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(trusted_states, "common_commits", lambda *_: [6])
    monkeypatch.setattr(HeldSnapshots, "_keep_to", lambda self, vault: setattr(self, "vault", vault))
    checkpoint_rig.write(tmp_path / CHECKPOINTS, 4)
    each = saves(tmp_path)
    assert not choose(each, needed=True)
    assert each.start.source == Source("memory", 6), "what is on storage is older"


def test_storage_that_takes_its_time_takes_none_from_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look at it takes longer than the holder is waited for; memory may have the newest state."""

    async def slow(*_: object, **__: object) -> Stored:
        await asyncio.sleep(0.2)
        return Stored(source=Source("storage", 4, "step_4"))

    answers = [None, Source("memory", 6)]

    def newest() -> Source | None:
        if (answer := answers.pop(0)) is None:
            silent()
        return answer

    monkeypatch.setattr(starting_state, "find_stored", slow)
    monkeypatch.setattr(starting_state, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(starting_state, "_LOOK_AGAIN_S", 0.01)
    each = saves(tmp_path)
    monkeypatch.setattr(each._snapshots, "newest_to_stay", newest)
    assert not choose(each)
    assert each.start.source == Source("memory", 6)


def test_a_rank_that_dies_makes_nothing_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for a holder as all are told to go back to before what they began with."""
    each = saves(tmp_path)
    holder = SimpleNamespace(hear=lambda: None, result=lambda *_: None, leave=lambda *_: None)
    monkeypatch.setattr(each._snapshots, "vault", holder)
    monkeypatch.setattr(each._snapshots, "discard", lambda _: True)
    for going_back in (True, False):
        each.distrust(13)
        each.states.going_back = going_back
        each._snapshots.begin_from(20)
        assert asyncio.run(each.open()) == VaultOpened()
        assert each.states.wrong_since == (13 if going_back else None)


def test_ranks_ask_for_a_holder_while_all_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both come to it. The connection that is given up must not stay in the event loop, under another's number."""

    class Ends:
        def __init__(self) -> None:
            self.socket, self.other = socket.socketpair()
            self.fileno, self.close = self.socket.fileno, self.socket.close

        def hear(self) -> None:
            pass

        def records(self, _: int) -> list[Any]:
            return []

    async def ask() -> None:
        each, first, second = saves(tmp_path), Ends(), Ends()

        async def look() -> tuple[Any, None]:
            each._snapshots._keep_to(first)  # type: ignore[arg-type]
            return second, None

        monkeypatch.setattr(each._snapshots._search, "look", look)
        assert await each.open() == VaultOpened()
        assert each._snapshots.vault is first
        assert (first.fileno() >= 0, second.fileno()) == (True, -1)
        each._snapshots.let_go()
        for end in (first.other, second.other):
            end.close()

    asyncio.run(ask())


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint_rig.write(tmp_path / CHECKPOINTS, step)
    (tmp_path / CHECKPOINTS / "step_12").mkdir()
    each = saves(tmp_path)
    assert each.can_go_back()
    assert not choose(each, needed=True)
    assert each.start.source is not None
    assert Path(each.start.source.path).name == "step_8"
    assert each.start.source.path in left(tmp_path)


PAIR = ((0, 1),)


@pytest.mark.parametrize(
    ("groups", "frames", "newest"),
    [
        (PAIR, [(5, 1, 7), (5, 1, 7)], 5),
        (PAIR, [(5, 1, 7), (5, 1, 8)], -1),  # they differ
        (PAIR, [(5, 1, 0), (5, 1, 0)], -1),  # on a device: nobody has compared them
        (PAIR, [(5, 1, 7), (5, 0, 0)], -1),  # one rank has skipped its part
        (PAIR, [(5, 1, 7)], -1),
        (((0,), (1,)), [(5, 1, 0), (5, 1, 0)], 5),  # nobody has the same
    ],
)
def test_what_was_equal_is_known(
    tmp_path: Path, groups: tuple[tuple[int, ...], ...], frames: list[tuple[int, int, int]], newest: int
) -> None:
    each = saves(tmp_path)
    for rank, (commits, sequence, fingerprint) in enumerate(frames):
        each.captured(rank, Captured(commits, commits, sequence, store=False, fingerprint=fingerprint), groups)
    assert each.states.newest == newest


def test_once_replicas_have_differed_memory_counts_as_far_as_they_were_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "holder-0.sock").touch()
    monkeypatch.setattr(held_snapshots, "Vault", Holding)
    monkeypatch.setattr(trusted_states, "common_commits", lambda *_: [6, 5])
    each = saves(tmp_path)
    assert each._snapshots.newest() == Source("memory", 6)
    for rank in (0, 1):
        each.captured(rank, Captured(5, 5, 1, store=False, fingerprint=7), PAIR)
    each.states.doubt()
    assert each._snapshots.newest() == Source("memory", 5)
    monkeypatch.setattr(each._snapshots, "newest_to_stay", each._snapshots.newest)
    assert not choose(each)
    assert each.start.source == Source("memory", 5)
    monkeypatch.setattr(trusted_states, "common_commits", lambda *_: [6])
    assert choose(each) == "no saved state is left in which they were equal", "it may have been days"


def test_what_is_wrong_since_a_step_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "holder-0.sock").touch()
    snapshots = [SimpleNamespace(commits=each, step=each * 2, sequence=each, world=2) for each in (5, 6)]
    monkeypatch.setattr(Holding, "stores", [SimpleNamespace(rank=rank, snapshots=snapshots) for rank in (0, 1)])
    monkeypatch.setattr(held_snapshots, "Vault", Holding)
    monkeypatch.setattr(trusted_states, "common_commits", lambda *_: [6, 5])
    each = saves(tmp_path)
    monkeypatch.setattr(each._snapshots, "newest_to_stay", each._snapshots.newest)
    assert not each.saved_before(100)
    for rank in (0, 1):
        each.captured(rank, Captured(5, 10, 1, store=False, fingerprint=7), PAIR)
    assert (each.saved_before(9), each.saved_before(10)) == (False, True)
    each.distrust(11)
    for _ in range(2):  # a rank may die before all have begun anew
        assert not choose(each)
        assert each.start.source == Source("memory", 5)
    assert each.saved_before(10)
    for rank in (0, 1):
        each.captured(rank, Captured(6, 12, 2, store=False, fingerprint=7), PAIR)
    assert (each.saved_before(9), each.saved_before(11), each.saved_before(12)) == (False, True, True)
    assert not choose(each)
    assert each.start.source == Source("memory", 6), "it is a new one"
    each.distrust(9)
    assert choose(each).startswith("no saved state is left that is from before step 9")


def test_what_the_launcher_before_knew_to_be_wrong_is_passed_over_until_it_is_gone(tmp_path: Path) -> None:
    DistrustRecord(tmp_path).write(Distrusted(in_memory=9, on_storage=9))
    wrong = checkpoint_rig.write(tmp_path / CHECKPOINTS, 12)
    for _ in range(2):
        assert choose(saves(tmp_path)).startswith("no saved state is left that is from before step 9: take the ")
        assert DistrustRecord(tmp_path).held == Distrusted(on_storage=9), "nothing is in memory"
    right = checkpoint_rig.write(tmp_path / CHECKPOINTS, 8)
    each = saves(tmp_path)
    assert not choose(each)
    assert each.start.source == Source("storage", 8, str(right))
    assert not wrong.exists()
    assert wrong.with_name("wrong_step_12").exists()
    assert not (tmp_path / FILE).exists()

    DistrustRecord(tmp_path).write(Distrusted(in_memory=9, on_storage=9))
    shutil.rmtree(tmp_path / CHECKPOINTS)
    each = saves(tmp_path)
    assert not choose(each)
    assert each.start.source is None
    assert not (tmp_path / FILE).exists()


def test_a_holder_that_was_silent_first_has_what_another_number_of_ranks_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked before storage is looked at, so that it stays, and behind that."""
    answers = [None, OfOtherRanks(25, 3, 77), OfOtherRanks(25, 3, 78)]

    async def refuses(_: float) -> str:
        return "no space"

    each = saves(tmp_path)
    monkeypatch.setattr(each._snapshots, "of_other_ranks", lambda: answers.pop(0))
    monkeypatch.setattr(each._snapshots, "store_of_other_ranks", refuses)
    refused = choose(each)
    assert refused.startswith("memory has update 25 of 3 ranks, nothing as new can be gone on from")
    assert refused.endswith("start 3 ranks, or end its holder (kill 78) to go on without it"), "the one that lives now"
    assert not answers


class Holding:
    """A holder that is there, and has nothing to do."""

    stores = ()
    works = 0

    @classmethod
    def connect(cls, *_: object, **__: object) -> Holding:
        return cls()

    def inventory(self) -> Holding:
        return self

    def pin(self, rank: int, sequence: int) -> bool:
        return any(held.sequence == sequence for store in self.stores if store.rank == rank for held in store.snapshots)

    def records(self, _: int) -> list[Any]:
        return []

    def close(self) -> None:
        pass


def test_a_holder_that_has_work_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for who has given it up; and one that does not answer."""
    each = saves(tmp_path)._snapshots
    assert not each.may_write(), "there is none"
    monkeypatch.setattr(held_snapshots, "Vault", Holding)
    for works in (0, 1):
        monkeypatch.setattr(Holding, "works", works)
        assert each.may_write() == bool(works)
    monkeypatch.setattr(Holding, "connect", silent)
    assert each.may_write()


def test_an_earlier_run_that_had_saved_is_told_of(tmp_path: Path) -> None:
    """An unmounted volume looks like a job that has saved nothing yet."""
    said: list[str] = []
    each = Saves(tmp_path, 2, 2, lambda *_, **__: None, said.append, lambda _: None, asyncio.create_task)
    for number, kinds in enumerate((["run_start", "saved"], ["run_start"])):
        earlier = JsonLines(tmp_path / f"events-{number + 1}.jsonl")
        for kind in kinds:
            earlier.write(now(kind, detail={"step": 80}))
        earlier.close()
        os.utime(tmp_path / f"events-{number + 1}.jsonl", (number, number))
        assert not choose(each)
        each.start.tell_source()
    (line,) = said
    assert line.endswith("where an earlier run had saved step 80: all ranks begin anew")


@pytest.mark.parametrize("replicas", [{}, {"replicas": [[0, 2], [1, 3]]}])
def test_an_earlier_run_that_had_kept_its_state_in_memory_alone_is_told_of(
    tmp_path: Path, replicas: dict[str, Any]
) -> None:
    """Not where it has come to its end, nor where nothing was ever kept. Who was whose replica is still known."""
    said: list[str] = []
    each = Saves(tmp_path, 4, 2, lambda *_, **__: None, said.append, lambda _: None, asyncio.create_task)
    for number, (kinds, held) in enumerate(
        [(["started"], False), (["started", "finished"], True), (["started"], True)]
    ):
        earlier = JsonLines(tmp_path / f"events-{number + 1}.jsonl")
        for kind in kinds:
            earlier.write(now(kind, detail={"world_size": 4, **replicas}))
        earlier.close()
        os.utime(tmp_path / f"events-{number + 1}.jsonl", (number, number))
        if held:
            lock_of(socket_path(tmp_path)).touch()
            os.utime(lock_of(socket_path(tmp_path)), ns=(time.time_ns(), time.time_ns()))  # else milliseconds before
        assert not choose(each)
        each.start.tell_source()
        assert len(said) == (number >= 2), said
    assert f"({tmp_path}/logs/holder-0.log says what has become of it): all ranks begin anew" in said[0]
    assert each.start.earlier_groups() == (((0, 2), (1, 3)) if replicas else ((0, 1, 2, 3),))


def test_where_nothing_is_whole_each_is_written_down_and_the_end_says_it(tmp_path: Path) -> None:
    noted: list[str] = []
    said: list[str] = []
    each = Saves(
        tmp_path,
        2,
        2,
        lambda kind, *, detail, **_: noted.append(f"{kind} {Path(detail['path']).name}"),
        said.append,
        lambda _: None,
        asyncio.create_task,
    )
    for step in (4, 8):
        (tmp_path / CHECKPOINTS / f"step_{step}").mkdir(parents=True)
    assert choose(each).startswith("none of the 2 checkpoints")
    assert sorted(noted) == ["checkpoint_skipped step_4", "checkpoint_skipped step_8"]
    assert not said


def test_what_is_passed_over_is_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    each = Saves(tmp_path, 2, 2, lambda *_, **__: None, said.append, lambda _: None, asyncio.create_task)
    (tmp_path / CHECKPOINTS / "step_4").mkdir(parents=True)
    each._snapshots.newest_to_stay = lambda: Source("memory", 3)  # type: ignore[method-assign]
    for _ in range(2):
        assert not choose(each)
    (line,) = said
    assert line.startswith(f"{tmp_path / CHECKPOINTS / 'step_4'} is passed over: ")


def test_storage_that_does_not_let_us_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / CHECKPOINTS).write_text("in the way")
    blind = saves(tmp_path)
    assert left(tmp_path) == ""
    assert blind.can_go_back(), "whoever tries hears why it is impossible"
    assert "can't be read" in choose(blind), "all ranks must not begin anew beside what is there"
    assert blind.start.source is None
    (tmp_path / "holder-0.sock").touch()
    monkeypatch.setattr(blind._snapshots, "newest_to_stay", lambda: Source("memory", 8))
    assert not choose(blind), "what is in memory is as new"
    assert blind.start.source == Source("memory", 8)


def test_storage_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said that it takes its time; at the end of a job nobody waits for it."""

    async def never(*_: object, bytes_too: bool, **__: object) -> Stored:
        await asyncio.sleep(0.2 if bytes_too else 60)
        return Stored()

    told: list[str] = []
    monkeypatch.setattr(starting_state, "find_stored", never)
    monkeypatch.setattr(starting_state, "_SLOW_S", 0.05)
    monkeypatch.setattr(starting_state, "_SEE_S", 0.05)
    slow = Saves(tmp_path, 2, 2, lambda *_, **__: None, told.append, lambda _: None, asyncio.create_task)
    assert not choose(slow)
    assert len(told) == 1
    assert "still being read" in told[0]
    assert left(tmp_path) == ""


def test_storage_that_hangs_keeps_nobody_from_what_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What looks there is given up, and left behind if it can't be killed."""
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / "holder-0.sock").touch()
    monkeypatch.setattr(stored_checkpoints, "_look", lambda *_: time.sleep(600))
    monkeypatch.setattr(starting_state, "_PATIENCE_S", 0.05)
    each = saves(tmp_path)
    monkeypatch.setattr(each._snapshots, "newest_to_stay", lambda: Source("memory", 8))
    before = psutil.Process().children()
    assert not choose(each, needed=True)
    assert each.start.source == Source("memory", 8)
    assert psutil.Process().children() == before, "killed and reaped"


@pytest.mark.parametrize("held", [None, Source("memory", 2)])
def test_storage_that_takes_its_time_is_waited_for_where_it_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: Source | None
) -> None:
    """Nothing else is there to go on from; or what is wrong there is to be set aside first, lest it be found later."""

    async def slow(*_: object, **__: object) -> Stored:
        await asyncio.sleep(0.2)
        return Stored(source=Source("storage", 4, "step_4"))

    (tmp_path / "holder-0.sock").touch()
    monkeypatch.setattr(starting_state, "find_stored", slow)
    monkeypatch.setattr(starting_state, "_PATIENCE_S", 0.05)
    each = saves(tmp_path)
    monkeypatch.setattr(each._snapshots, "newest_to_stay", lambda: held)
    if held is not None:
        each.distrust(5)
    assert not choose(each, needed=True)
    assert each.start.source == Source("storage", 4, "step_4")


def test_a_holder_that_does_not_answer_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has finished well stays one that has."""

    async def end() -> None:
        with silent_holder() as silent:
            each = saves(tmp_path)
            monkeypatch.setattr(silent, "records", lambda _: [])
            each._snapshots._keep_to(silent)
            await each.finish(0, failed=False)
            assert each._snapshots.vault is None

    asyncio.run(end())
