"""State trees: what goes in comes out, what cannot be carried is refused with its path, so are false bytes."""

from collections import OrderedDict
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from resilient_train.errors import ProtocolError, StateError
from resilient_train.state.tree import Path, Slot, TensorKind, flatten, unflatten


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


class Dtype:
    def __init__(self, name: str) -> None:
        self.name = name


KIND = TensorKind(
    is_tensor=lambda value: isinstance(value, Tensor),
    describe=lambda value: ("float32", value.shape, False, (), False),
    is_constant=lambda value: isinstance(value, Dtype),
    name_constant=lambda value: value.name,
    constant=Dtype,
)


NO_TENSORS = KIND._replace(is_tensor=lambda _: False, is_constant=lambda _: False)


def no_tensor(path: Path, slot: Slot) -> Any:
    raise AssertionError("no tensor here")


def round_trip(tree: Any) -> Any:
    payload, tensors = flatten(tree, NO_TENSORS)
    assert not tensors
    return unflatten(payload, NO_TENSORS, no_tensor)


text = st.text(st.characters(exclude_categories=()))  # surrogates too: names of files that are not UTF-8
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | text
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
keys = st.integers(-(1 << 70), 1 << 70) | text | st.tuples(st.integers(), text) | st.booleans() | st.none()
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple) | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(p, q) and same(v, w) for (p, v), (q, w) in pairs)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@given(trees)
def test_round_trip(tree: Any) -> None:
    assert same(round_trip(tree), tree)


@pytest.mark.parametrize(
    "value", [1 << 63, -(1 << 63), (1 << 63) - 1, -(1 << 63) - 1, 1 << 64, 10**100, np.uint64(2**64 - 1)]
)
def test_integers_of_any_size(value: int) -> None:
    (found,) = round_trip({"seed": value}).values()
    assert (found, type(found)) == (value, type(value)), "NumPy's wrap around, and Python's do not"


def test_nan_and_infinities() -> None:
    assert str(round_trip([float("nan"), float("inf"), -0.0, -float("inf")])) == "[nan, inf, -0.0, -inf]"


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array([], dtype=np.float64),
        np.zeros((0, 3), dtype=np.int8),
        np.array(2.5),
        np.arange(10)[::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(3, dtype=">i4"),
        np.array(["a", "bc"]),
        np.array([True, False]),
        np.array(["2020-01-01"], dtype="datetime64[D]"),
    ],
)
def test_arrays(array: np.ndarray) -> None:
    back = round_trip({"a": array})["a"]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


@pytest.mark.parametrize(
    "array",
    [np.arange(24.0).reshape(2, 3, 4).transpose(axes) for axes in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1))],
)
def test_an_array_lies_there_as_it_did_here(array: np.ndarray) -> None:
    """A sum over an axis adds up in another order where it lies otherwise."""
    back = round_trip(array)
    assert back.strides == array.strides
    np.testing.assert_array_equal(back, array)
    back[0, 0, 0] = 1


RECORD = np.dtype([("state", "<f4", (3,)), ("action", "<i8"), ("more", [("done", "?"), ("at", "<M8[s]")])], align=True)


@pytest.mark.parametrize("shape", [(), (5,), (2, 2)])
def test_arrays_with_fields(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype=RECORD)
    array["state"], array["action"], array["more"]["done"] = 1.5, 7, True
    back = round_trip(array)
    assert back.dtype == RECORD
    assert back.tobytes() == array.tobytes()
    assert type(round_trip(array[..., None][0, ...].reshape(-1)[0])) is np.void


@pytest.mark.parametrize("array", [np.ma.masked_less(np.arange(4.0), 2), np.matrix([[1.0]]), np.rec.array([(1,)])])
def test_what_is_more_than_its_elements_is_refused(array: np.ndarray) -> None:
    with pytest.raises(StateError, match="state at 'held' is a"):
        flatten({"held": array}, NO_TENSORS)


@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex64(1 + 2j)])
def test_scalars_keep_their_type(scalar: np.generic) -> None:
    back = round_trip([scalar])[0]
    assert type(back) is type(scalar)
    assert back == scalar


def test_the_state_of_python_and_numpy_generators() -> None:
    import random

    state = {"python": random.Random(1).getstate(), "numpy": np.random.default_rng(1).bit_generator.state}
    assert same(round_trip(state), state)


def test_ordered_dict_is_a_dict_in_order() -> None:
    assert list(round_trip(OrderedDict([("b", 1), ("a", 2)]))) == ["b", "a"]


def test_tensors_are_left_out_and_put_in() -> None:
    one, two = Tensor(2, 3), Tensor()
    tree = {"state": {0: {"exp_avg": one}}, "list": [1, (two,)]}
    payload, tensors = flatten(tree, KIND)
    assert tensors == {("state", 0, "exp_avg"): one, ("list", 1, 0): two}
    asked: list[tuple[Path, Slot]] = []

    def place(path: Path, slot: Slot) -> Any:
        asked.append((path, slot))
        return list(tensors.values())[slot.number]

    assert unflatten(payload, KIND, place) == tree
    assert asked == [
        (("state", 0, "exp_avg"), Slot(0, "float32", (2, 3))),
        (("list", 1, 0), Slot(1, "float32", ())),
    ]


@pytest.mark.parametrize("told", [(False, (), True), (False, (1, 2), True), (True, (), True), (True, (), False)])
def test_where_a_tensor_lay_is_told_if_that_was_no_host(told: tuple[bool, tuple[int, ...], bool]) -> None:
    divided, strides, on_device = told
    kind = KIND._replace(describe=lambda value: ("float32", value.shape, *told))
    payload, _ = flatten({"exp_avg": Tensor(2, 3)}, kind)
    slots = list[Slot]()
    unflatten(payload, kind, lambda _, slot: slots.append(slot))
    assert slots == [Slot(0, "float32", (2, 3), divided, strides, on_device)]


def test_constants_of_the_framework() -> None:
    payload, _ = flatten([Dtype("bfloat16")], KIND)
    assert unflatten(payload, KIND, no_tensor)[0].name == "bfloat16"


@pytest.mark.parametrize(
    ("tree", "path", "what"),
    [
        ({"a": {"b": [1, object()]}}, "a.b.1", "object"),
        ({"f": (lambda: 0)}, "f", "function"),
        ({"s": {1, 2}}, "s", "set"),
        ({"o": np.array([object()])}, "o", "ndarray"),
        ((1, (2, range(3))), "1.1", "range"),
    ],
)
def test_what_cannot_be_carried_is_named(tree: Any, path: str, what: str) -> None:
    with pytest.raises(StateError, match=f"state at '{path}' is a {what}"):
        flatten(tree, NO_TENSORS)


SAMPLE = flatten({"a": [1, 2.5, (1 << 80, b"x")], "n": np.arange(4), "c": 1j, 7: {"t": ()}}, NO_TENSORS)[0]


@given(st.binary())
def test_foreign_bytes(payload: bytes) -> None:
    try:
        unflatten(payload, NO_TENSORS, no_tensor)
    except ProtocolError:
        pass


@example(20, 3)  # a text that is a list
@example(60, 16)  # a dtype that is none
@given(st.integers(0, len(SAMPLE) - 1), st.integers(1, 255))
def test_a_flipped_byte(place: int, flip: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[place] ^= flip
    try:
        unflatten(bytes(damaged), NO_TENSORS, lambda *_: None)
    except ProtocolError:
        pass


@pytest.mark.parametrize("cut", range(len(SAMPLE)))
def test_cut_anywhere(cut: int) -> None:
    with pytest.raises(ProtocolError):
        unflatten(SAMPLE[:cut], NO_TENSORS, no_tensor)


plain = st.recursive(
    st.none() | st.integers(-5, 5) | st.floats() | st.text(max_size=5) | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from("TDPICKN?") | st.text(max_size=2), inner, max_size=2)
    ),
    max_leaves=10,
)


@given(plain)
def test_well_formed_bytes_that_are_no_tree(value: Any) -> None:
    try:
        unflatten(msgspec.msgpack.encode(value), NO_TENSORS, lambda *_: None)
    except ProtocolError:
        pass


def test_depth_is_bounded() -> None:
    with pytest.raises(ProtocolError):
        unflatten(b"\x91" * 100_000 + b"\xc0", NO_TENSORS, no_tensor)
