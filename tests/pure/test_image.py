"""The image of a shard: a safetensors file by its own rules, aligned, of a length that no step changes."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pure.checkpoint_rig import NUMPY, block, image, pieces, value, whole
from resilient_train.errors import CheckpointError, StateError
from resilient_train.state.image import (
    BLOCK_BYTES,
    LENGTH,
    MAX_HEADER_BYTES,
    METADATA,
    Header,
    header_length,
    parse_header,
    plan_image,
)
from resilient_train.state.sharding import ITEM_BYTES, Piece

STEP = 120


def header_of(content: bytes) -> Header:
    length = header_length("f", content[:8], len(content))
    return parse_header("f", content[8 : 8 + length], len(content))


def small() -> bytes:
    plan = plan_image(pieces(0, 2), 0, 2)
    return bytes(image(plan, STEP)[: plan.total_bytes])


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 5000), max_size=2).map(tuple)),
        max_size=12,
    )
)
def test_layout(tensors: list[tuple[str, tuple[int, ...]]]) -> None:
    plan = plan_image([whole(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)], 3, 4)
    assert plan.data_start % BLOCK_BYTES == plan.capacity_bytes % BLOCK_BYTES == 0
    assert 0 <= plan.capacity_bytes - plan.total_bytes < BLOCK_BYTES
    at = plan.data_start
    for piece, start in plan.places:
        assert start == at, "safetensors allows no hole"
        assert start % ITEM_BYTES[piece.dtype] == 0
        if piece.size_bytes % 64 == 0:
            assert start % 64 == 0
        at += piece.size_bytes
    assert at == plan.total_bytes
    head = plan.header(7)
    assert len(head) == plan.data_start
    assert parse_header("f", head[8:], plan.total_bytes) == Header(plan.places, 7, 3, 4)


def test_only_the_step_changes() -> None:
    plan = plan_image([*pieces(0, 2), whole("0" * 30, "U8", (1,))], 0, 2)
    first, second = plan.header(0), plan.header((1 << 63) - 1)
    assert len(first) == len(second)
    assert (header_of_plan(plan, 0), header_of_plan(plan, (1 << 63) - 1)) == (0, (1 << 63) - 1)
    changed = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    assert changed[-1] - changed[0] < 20


def header_of_plan(plan, step: int) -> int:
    return parse_header("f", plan.header(step)[8:], plan.total_bytes).step


def test_pieces_without_elements_are_left_out() -> None:
    """A reader finds a piece by its offsets; an empty one shares them with its neighbour."""
    empty = Piece("w", "F32", (0, 4), (8, 4), (8, 0))
    assert plan_image([empty], 0, 1).places == ()
    assert len(plan_image([whole("w", "F32", (0, 4))], 0, 1).places) == 1


@pytest.mark.parametrize("name", ["", METADATA, "a\0b", "a\nb", "\ud800"])
def test_names_that_no_file_can_hold(name: str) -> None:
    with pytest.raises(StateError, match="can't be the name"):
        plan_image([whole(name, "U8", (1,))], 0, 1)


def test_two_of_one_name() -> None:
    with pytest.raises(StateError, match="two tensors 'w'"):
        plan_image([whole("w", "U8", (1,)), whole("w", "U8", (2,))], 0, 1)


def test_the_safetensors_library_reads_it() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    found = safetensors.load(small())
    assert {piece.name for piece in pieces(0, 2)} == set(found)
    for piece in pieces(0, 2):
        assert found[piece.name].dtype == np.dtype(NUMPY[piece.dtype])
        assert np.array_equal(found[piece.name], block(value(piece.name, STEP), piece))


def test_the_safetensors_library_reads_one_without_tensors() -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    plan = plan_image([], 0, 1)
    assert safetensors.load(plan.header(1)) == {}
    assert header_of(plan.header(1)) == Header((), 1, 0, 1)


def changed(edit) -> bytes:
    """A file whose header is another, with the right length in front."""
    content = small()
    length = header_length("f", content[:8], len(content))
    header = json.loads(content[8 : 8 + length])
    text = edit(header)
    text = text if isinstance(text, bytes) else json.dumps(header if text is None else text).encode()
    return LENGTH.pack(len(text)) + text + content[8 + length :]


def sharding_of(header, **changes):
    info = json.loads(header[METADATA]["DCP_SHARDING_INFO"])
    info["model.0.weight"] |= changes
    header[METADATA]["DCP_SHARDING_INFO"] = json.dumps(info)


W = "model.0.weight"
EDITS = {
    "dtype": (lambda h: h[W].update(dtype="F31"), "unknown dtype 'F31'"),
    "dtype that is no name": (lambda h: h[W].update(dtype=[]), "unhashable|unknown dtype"),
    "other size": (lambda h: h[W].update(dtype="F16"), "has 96 bytes instead of 48"),
    "negative": (lambda h: h[W].update(shape=[-4, -6]), "-4 is no size"),
    "true": (lambda h: h[W].update(shape=[True, 24]), "True is no size"),
    "float": (lambda h: h[W].update(shape=[4.0, 6]), "4.0 is no size"),
    "nan": (lambda h: h[W].update(shape=[float("nan"), 6]), "NaN is no size"),
    "huge": (lambda h: h[W].update(shape=[1 << 63, 6]), "is no size"),
    "wide": (lambda h: h[W].update(shape=[1] * 65), "is no list of sizes"),
    "text": (lambda h: h[W].update(shape="4,6"), "is no list of sizes"),
    "three offsets": (lambda h: h[W].update(data_offsets=[0, 96, 97]), "too many values"),
    "backwards": (lambda h: h[W].update(data_offsets=[96, 0]), "has -96 bytes"),
    "overlap": (lambda h: h[W].update(data_offsets=[8, 104]), "a hole or an overlap"),
    "out of the file": (lambda h: h[W].update(data_offsets=[1 << 40, (1 << 40) + 96]), "a hole or an overlap"),
    "another field": (lambda h: h[W].update(strides=[1]), "other fields"),
    "no fields": (lambda h: h.update({W: {}}), "other fields"),
    "no object": (lambda h: h.update({W: 3}), "has no attribute 'keys'"),
    "one less": (lambda h: h.pop(W) and None, "tells of other tensors"),
    "no metadata": (lambda h: h.pop(METADATA) and None, METADATA),
    "no sharding": (lambda h: h[METADATA].pop("DCP_SHARDING_INFO") and None, "DCP_SHARDING_INFO"),
    "sharding is no JSON": (lambda h: h[METADATA].update(DCP_SHARDING_INFO="{"), "JSONDecodeError"),
    "outside of the whole": (lambda h: sharding_of(h, saved_offsets=[5, 0]), "does not lie in"),
    "other dimensions": (lambda h: sharding_of(h, global_shape=[48]), "does not lie in"),
    "step": (lambda h: h[METADATA].update({"resilient_train.step": "x"}), "invalid literal"),
    "shard": (lambda h: h[METADATA].update({"resilient_train.shard": "1"}), "unpack"),
    "a list": (lambda h: [], "header"),
    "not UTF-8": (lambda h: b'{"\xff": 1}', "UnicodeDecodeError"),
    "deep": (lambda h: b"[" * 200_000 + b"]" * 200_000, "RecursionError"),
    "many digits": (lambda h: b'{"x": ' + b"9" * 5000 + b"}", "ValueError"),
    "twice": (lambda h: json.dumps(h).encode()[:-1] + b', "' + W.encode() + b'": 1}', "stands there twice"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_a_false_header_is_refused(kind: str) -> None:
    edit, words = EDITS[kind]
    with pytest.raises(CheckpointError, match=words) as caught:
        header_of(changed(edit))
    assert caught.value.file == "f"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "first", [b"", b"1234567", LENGTH.pack(0), LENGTH.pack(1), LENGTH.pack(1 << 63), LENGTH.pack(MAX_HEADER_BYTES + 1)]
)
def test_a_false_length_is_refused(first: bytes) -> None:
    with pytest.raises(CheckpointError):
        header_length("f", first, 10 * MAX_HEADER_BYTES)


def test_a_longer_file_is_refused() -> None:
    with pytest.raises(CheckpointError, match="holds tensors up to byte"):
        header_of(small() + b"x")


def test_a_longer_header_than_safetensors_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_train.state.image.MAX_HEADER_BYTES", 5000)
    with pytest.raises(StateError, match="safetensors forbids"):
        plan_image([whole("x" * 5000, "U8", (1,))], 0, 1)
