"""Where a rank goes on in a world of another size: its own state, and its place in the data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure import checkpoint_rig
from pure.checkpoint_rig import write
from resilient_train.errors import LayoutError
from resilient_train.frameworks.roles import Strides
from resilient_train.protocol.messages import Refused, Source
from resilient_train.session.publication_format import Published, read
from resilient_train.session.redo.loader import Cursor
from resilient_train.session.saves.from_saved import FromSaved
from resilient_train.session.saves.from_saved import Own as FromSavedOwn
from resilient_train.session.saves.resharding import reshard

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402 - only where torch is
from torch.utils.data.distributed import DistributedSampler  # noqa: E402

from resilient_train.frameworks.torch.data import fast_forward, iterate, strides, workers  # noqa: E402


class Own:
    """The part of a RankState that a newcomer asks for."""

    def __init__(self) -> None:
        self.buffers = b""

    def adopt(self, state: bytes) -> None:
        self.buffers = state

    def packed(self) -> bytes:
        return b"adopted " + self.buffers


class Data:
    """Loaders are torch's; random numbers are none."""

    random_state = staticmethod(lambda: b"seeded here")
    restore_random_state = staticmethod(lambda _: None)
    workers = staticmethod(workers)
    fast_forward = staticmethod(fast_forward)
    iterate = staticmethod(iterate)
    strides = staticmethod(strides)
    pack = staticmethod(msgspec.msgpack.encode)
    unpack = staticmethod(msgspec.msgpack.decode)


def cursor_over(loader: Any) -> Cursor:
    return Cursor(loader, Data())


def loader_of(rank: int, world: int, batch: int, *, samples: int, drop_last: bool = False) -> DataLoader:
    sampler = DistributedSampler(list(range(samples)), world, rank, seed=5)
    return DataLoader(list(range(samples)), batch, sampler=sampler, drop_last=drop_last)


def published(place: Cursor, batch: int, replicas: int, loader: bytes = b"") -> Published:
    epoch, taken, _, _, skipped, *_ = place.position()
    return Published(9, 9, b"random", epoch, taken, b"then", loader, b"buffers", skipped, batch, replicas)


def moved(rank: int, world: int, batch: int, held: Published, samples: int, **options: Any) -> tuple[Cursor, dict]:
    place = cursor_over(loader_of(rank, world, batch, samples=samples, **options))
    payload, found = reshard(Own(), Data(), place, held, held)
    told = read(payload)
    place.load(place.position()._replace(epoch=told.epoch, taken=told.taken, skipped=told.skipped))
    return place, found


def rest_of_epoch(place: Cursor, epoch: int) -> list[int]:
    found: list[int] = []
    while (batch := place.next()).epoch == epoch:
        found += batch.value.tolist()
    return found


@given(
    st.integers(1, 60), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9)
)
def test_no_sample_is_left_out_and_hardly_one_used_twice(
    samples: int, old: int, batch: int, new: int, batch_then: int, done: int
) -> None:
    before = [cursor_over(loader_of(rank, old, batch, samples=samples)) for rank in range(old)]
    used: list[int] = []
    for place in before:
        drawn = [place.next() for _ in range(done)]
        used += [each for got in drawn if got.epoch == place.position().epoch for each in got.value.tolist()]
    held = published(before[0], batch, old)
    after = [moved(rank, new, batch_then, held, samples) for rank in range(new)]
    epoch = after[0][0].position().epoch
    assert {place.position().epoch for place, _ in after} == {epoch}
    if epoch != held.epoch:
        assert set(used) == set(range(samples))
        return
    rest = [rest_of_epoch(place, epoch) for place, _ in after]
    assert len({len(each) for each in rest}) == 1, "the epochs of the ranks end together"
    assert set(used).union(*rest) == set(range(samples))
    padding = -samples % old + -samples % new
    assert len(used) + sum(map(len, rest)) <= samples + padding + new - 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_a_place_behind_left_out_samples_is_found_again(old: int, new: int, more: int) -> None:
    first = cursor_over(loader_of(0, old, 3, samples=41))
    first.next()
    going, _ = moved(0, new, 3, published(first, 3, old), 41)
    for _ in range(more):
        going.next()
    again = cursor_over(loader_of(0, new, 3, samples=41))
    again.load(going.position())
    assert [again.next().value.tolist() for _ in range(12)] == [going.next().value.tolist() for _ in range(12)]
    assert again.position() == going.position()


def test_twice_in_one_epoch() -> None:
    first = cursor_over(loader_of(0, 4, 2, samples=96))
    for _ in range(3):
        first.next()
    second, found = moved(0, 3, 2, published(first, 2, 4), 96)
    assert found == {"loader": "by samples", "epoch": 0, "used": 24, "used_again": 0}
    for _ in range(4):
        second.next()
    _, found = moved(0, 5, 2, published(second, 2, 3), 96)
    assert found == {"loader": "by samples", "epoch": 0, "used": 48, "used_again": 3}


def test_dropping_the_last_batch_may_leave_none() -> None:
    first = cursor_over(loader_of(0, 2, 4, samples=16))
    first.next()
    place, _ = moved(0, 1, 12, published(first, 4, 2), 16, drop_last=True)
    assert place.next().epoch == 1


def test_a_new_rank_keeps_its_own_random_numbers() -> None:
    first = cursor_over(loader_of(0, 2, 4, samples=64))
    first.next()
    place = cursor_over(loader_of(2, 3, 4, samples=64))
    told = read(reshard(Own(), Data(), place, None, published(first, 4, 2))[0])
    assert (told.random, told.epoch_random, told.rank) == (b"seeded here", b"seeded here", b"adopted buffers")
    assert (told.commits, told.number, told.skipped) == (9, 9, 2)
    kept = read(reshard(Own(), Data(), place, published(first, 4, 2), published(first, 4, 2))[0])
    assert (kept.random, kept.rank) == (b"random", b"buffers")


def test_loaders_that_nobody_can_divide() -> None:
    plain = cursor_over([1, 2, 3])
    plain.next()
    told, found = reshard(Own(), Data(), plain, None, published(plain, 0, 0))
    assert (read(told).taken, "not known" in found["loader"]) == (1, True)
    stateful = published(plain, 0, 0, loader=Data.pack({"inner": {"at": 1}, "generators": []}))
    told, found = reshard(Own(), Data(), plain, stateful, stateful)
    assert (read(told).epoch, read(told).taken, read(told).loader) == (0, 0, b"")
    assert "begins again" in found["loader"]
    at_its_end = published(plain, 0, 0, loader=Data.pack({"inner": {"at": 3}, "over": True, "generators": []}))
    told, found = reshard(Own(), Data(), plain, at_its_end, at_its_end)
    assert (read(told).epoch, read(told).taken, found["loader"]) == (1, 0, "an epoch began"), "none of it is used again"


def test_the_strides_of_loaders() -> None:
    data = list(range(10))
    assert strides(loader_of(1, 3, 4, samples=10)) == Strides(4, 3, 4)
    for loader in (data, None, DataLoader(data, 4, shuffle=True), DataLoader(data, batch_sampler=[[1, 2], [3]])):
        assert strides(loader) is None

    class Other(DistributedSampler):
        def __iter__(self):
            return iter([0])

    assert strides(DataLoader(data, 4, sampler=Other(data, 2, 0))) is None


def test_parts_that_are_not_alike_are_not_divided_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = msgspec.msgpack.encode(FromSavedOwn(b"published", b"layout", "of parts"))
    monkeypatch.setattr(checkpoint_rig, "own", lambda *_: held)
    path = write(tmp_path, 8, shards=3)
    sent: list[Any] = []

    def end() -> None:
        raise SystemExit(2)

    link = SimpleNamespace(rank=0, world_size=4, channel=SimpleNamespace(send=sent.append), wait_for_the_end=end)

    def load(saved: Any, fill: Any) -> None:
        trees = saved("")
        fill([], range(len(trees)))
        raise LayoutError(f"of the {len(trees)} groups' trees, not all are alike")

    state: Any = SimpleNamespace(load=load)
    restoring = FromSaved(link, state, None, None, tmp_path, ((0, 1), (2, 3)), lambda *_: None)
    with pytest.raises(SystemExit):
        restoring.restore(Source("storage", 8, str(path)))
    (refused,) = sent
    assert isinstance(refused, Refused)
    assert "of the 3 groups' trees, not all are alike" in refused.text
    assert "--run-dir" in refused.text
