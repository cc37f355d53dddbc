"""Who writes what, and where pieces overlap: compared with the plainest way to say it."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pure.checkpoint_rig import whole
from resilient_train.state import sharding
from resilient_train.state.sharding import (
    Block,
    Piece,
    Share,
    divide,
    overlap,
    run_in,
    shares,
    uncovered,
)

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


@st.composite
def block_in(draw, shape):
    low = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return Block(low, tuple(draw(st.integers(1, extent - at)) for at, extent in zip(low, shape, strict=True)))


def cells(block: Block) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in zip(block.offsets, block.shape, strict=True))))


@given(st.data())
def test_overlap(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    one, other = data.draw(block_in(shape)), data.draw(block_in(shape))
    common = overlap(one, other)
    assert (cells(common) if common else set()) == cells(one) & cells(other)


@given(st.data())
def test_a_run_is_found_where_there_is_one(data: st.DataObject) -> None:
    outer = data.draw(block_in(data.draw(shapes)))
    inside = data.draw(block_in(outer.shape))
    inner = Block(tuple(a + b for a, b in zip(inside.offsets, outer.offsets, strict=True)), inside.shape)
    numbers = np.arange(math.prod(outer.shape)).reshape(outer.shape)
    taken = numbers[tuple(slice(a, a + n) for a, n in zip(inside.offsets, inside.shape, strict=True))].reshape(-1)
    contiguous = (np.diff(taken) == 1).all()
    assert run_in(inner, outer) == ((taken[0], taken.size) if contiguous else None)


@settings(max_examples=300)
@given(st.data())
def test_coverage(data: st.DataObject) -> None:
    """Cut at random into blocks, some taken away or moved: a hole or an overlap is seen, and nothing else is."""
    shape = data.draw(shapes)
    blocks = [Block((0,) * len(shape), shape)]
    for _ in range(data.draw(st.integers(0, 6))):
        block = blocks.pop(data.draw(st.integers(0, len(blocks) - 1)))
        axes = [axis for axis, extent in enumerate(block.shape) if extent > 1]
        if not axes:
            blocks.append(block)
            continue
        axis = data.draw(st.sampled_from(axes))
        at = data.draw(st.integers(1, block.shape[axis] - 1))
        for low, extent in ((0, at), (at, block.shape[axis] - at)):
            offsets, sizes = list(block.offsets), list(block.shape)
            offsets[axis] += low
            sizes[axis] = extent
            blocks.append(Block(tuple(offsets), tuple(sizes)))
    assert uncovered(shape, blocks) == ""
    chosen = data.draw(st.sampled_from(blocks))
    assert "elements are there" in uncovered(shape, [block for block in blocks if block != chosen])
    assert uncovered(shape, [*blocks, chosen]) != ""
    replacement = data.draw(block_in(shape))
    changed = [replacement if block == chosen else block for block in blocks]
    together = [cell for block in changed for cell in cells(block)]
    assert (uncovered(shape, changed) == "") == (len(together) == len(set(together)) == math.prod(shape))


def test_tensors_without_elements_need_nothing() -> None:
    assert uncovered((0, 4), [Block((0, 0), (0, 4)), Block((0, 0), (0, 4))]) == ""
    assert uncovered((4, 4), [Block((0, 0), (4, 4)), Block((4, 0), (0, 4))]) == ""


def test_many_rows_and_columns_are_quick() -> None:
    rows = [Block((i, 0), (1, 4000)) for i in range(4000)]
    columns = [Block((0, i), (4000, 1)) for i in range(4000)]
    assert uncovered((4000, 4000), rows) == uncovered((4000, 4000), columns) == ""


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "tensors", [{"a": (64,)}, {"a": (9, 3), "b": (), "c": (1, 40, 2), "d": (0, 3)}, {}, {"a": (3,), "b": (500, 2)}]
)
def test_divided_evenly_once_and_whole(
    parts: int, tensors: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "SPLIT_MIN_BYTES", 16)
    pieces = [whole(name, "F32", shape) for name, shape in tensors.items()]
    divided = divide(pieces, parts)
    assert len(divided) == parts
    for piece in pieces:
        cut = [Block(each.offsets, each.shape) for part in divided for each in part if each.name == piece.name]
        assert uncovered(piece.shape, cut) == ""
    for part in divided:
        assert len({piece.name for piece in part}) == len(part), "two pieces of one tensor in one file"
    sizes = [sum(piece.size_bytes for piece in part) for part in divided]
    row = max((piece.size_bytes // max(piece.shape, default=1) for piece in pieces if piece.size_bytes), default=0)
    assert max(sizes) - sum(sizes) / parts <= max(row, 16)


def test_small_tensors_stay_whole() -> None:
    pieces = [whole(str(number), "F32", (100,)) for number in range(8)]
    assert divide(pieces, 4) == [pieces[i : i + 2] for i in range(0, 8, 2)]


def test_a_block_is_divided_within_its_tensor() -> None:
    rows = 1 << 19
    piece = Piece("w", "F32", (rows, 2), (4 * rows, 2), (rows, 0))
    first, second = divide([piece], 2)
    assert (first[0].offsets, first[0].shape) == ((rows, 0), (rows // 2, 2))
    assert (second[0].offsets, second[0].shape) == ((rows + rows // 2, 0), (rows // 2, 2))
    assert first[0].global_shape == piece.global_shape


def test_shares() -> None:
    assert shares([[0, 2], [1]]) == (Share(0, 0, 2, (0, 2)), Share(0, 1, 2, (2, 0)), Share(1, 0, 1, (1,)))
