"""Trees of state (what ``state_dict()`` returns) as bytes plus a list of tensors; never pickle.

Leaves may be None, bool, int, float, complex, str, bytes, numpy arrays and scalars, and whatever the framework calls a
tensor; nodes are dict, OrderedDict (as dict), list, tuple. Anything else raises StateError with the path to it, at the
start of the training and not in the middle of the first recovery.

The elements of arrays and tensors come in the order of their indices. They are laid out there as they were here: what
adds up a column of a matrix may do so in another order where that lies otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from resilient_train.errors import ProtocolError, StateError

Path = tuple[Any, ...]


class Slot(NamedTuple):
    """A tensor's place in a tree: the ``number``-th of the list, its dtype as the framework names it, its shape.

    ``divided``: that is its global shape, and each rank holds a part of it. ``strides``: in elements, unless it lies in
    the order of its indices. ``on_device``: it lay in the memory of an accelerator.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    divided: bool = False
    strides: tuple[int, ...] = ()
    on_device: bool = False


class TensorKind(NamedTuple):
    """What a framework tells this module about its tensors."""

    is_tensor: Callable[[Any], bool]
    describe: Callable[[Any], tuple[str, tuple[int, ...], bool, tuple[int, ...], bool]]
    """As a Slot has it: its dtype, its shape, whether it is divided, its strides, whether a device has it."""
    is_constant: Callable[[Any], bool]
    """Other leaf values of the framework's own (a dtype, a device) ..."""
    name_constant: Callable[[Any], str]
    constant: Callable[[str], Any]


_AS_IT_IS = frozenset((type(None), bool, float, bytes))
_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))
"""In names of files that are not UTF-8 (PEP 383), which msgpack does not take."""
_INT64 = range(-(1 << 63), 1 << 63)


def flatten(tree: Any, kind: TensorKind) -> tuple[bytes, dict[Path, Any]]:
    """The tree as bytes, and its tensors by path in the order of their slots. Raises StateError."""
    tensors: dict[Path, Any] = {}

    def encode(value: Any, path: Path) -> Any:
        known = type(value)
        if known in _AS_IT_IS or (known is str and value.isascii()):
            return value
        if known is dict:  # nearly all nodes, of thousands: others are looked at below
            return {"D": [[encode(key, path), encode(item, (*path, key))] for key, item in value.items()]}
        if kind.is_tensor(value):
            dtype, shape, divided, strides, on_device = kind.describe(value)
            tensors[path] = value
            more = [divided, list(strides)] if strides or on_device else [True] if divided else []
            more += [True] if on_device else []
            return {"T": [len(tensors) - 1, dtype, list(shape), *more]}
        if isinstance(value, int) and not isinstance(value, bool) and value not in _INT64:
            return {"I": hex(int(value))}
        if type(value) is str and not value.isascii() and any(map(_SURROGATES.__contains__, value)):
            return {"S": value.encode(errors="surrogatepass")}
        if known is int or known is str:
            return value
        if isinstance(value, Mapping):
            return {"D": [[encode(key, path), encode(item, (*path, key))] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"P": [encode(item, (*path, i)) for i, item in enumerate(value)]}
        if isinstance(value, list):
            return [encode(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, complex):
            return {"C": [value.real, value.imag]}
        if (isinstance(value, np.generic) or type(value) in _ARRAYS) and value.dtype.hasobject is False:
            return {"N": _array_told(value)}
        if kind.is_constant(value):
            return {"K": kind.name_constant(value)}
        where = ".".join(map(str, path))
        raise StateError(
            f"state at {where!r} is a {type(value).__qualname__}, which cannot be carried to another process"
        )

    return msgspec.msgpack.encode(encode(tree, ())), tensors


def leaves_of(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """All that is neither a mapping nor a sequence, with where it is."""
    if type(value) is dict or isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves_of(item, (*path, key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves_of(item, (*path, index))
    else:
        yield path, value


_ARRAYS = (np.ndarray, np.memmap)
"""Others (a masked array, a matrix) are more than their elements."""


def _array_told(value: Any) -> list[Any]:
    """Its dtype, shape and bytes, whether it is a scalar; and, if it does not lie in the order of its indices, in which
    order of axes it does.
    """
    array = np.asarray(value)
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    others = not array.flags.c_contiguous and array.transpose(axes).flags.c_contiguous
    data = (array.transpose(axes) if others else array).tobytes()
    dtype = array.dtype.str if array.dtype.names is None else np.lib.format.dtype_to_descr(array.dtype)
    return [dtype, list(array.shape), data, isinstance(value, np.generic), *([axes] if others else [])]


def _array_of(dtype: Any, shape: list[int], data: bytes, scalar: bool, axes: list[int] | None = None) -> Any:
    found = np.frombuffer(bytearray(data), dtype=np.lib.format.descr_to_dtype(_fields(dtype)))
    if axes is not None:
        return found.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))
    return found.reshape(shape)[()] if scalar else found.reshape(shape)


def _fields(dtype: Any) -> Any:
    """Of a dtype with fields: as NumPy wants them, lists of tuples."""
    if isinstance(dtype, str):
        return dtype
    return [(_field_name(name), _fields(of), *map(tuple, shape)) for name, of, *shape in dtype]


def _field_name(name: Any) -> Any:
    return name if isinstance(name, str) else tuple(name)


def _checked(strides: list[int], shape: list[int]) -> tuple[int, ...]:
    """Raises ValueError for what nobody has sent."""
    if not are_kept(strides, shape):
        raise ValueError(f"strides {strides} of shape {shape}")
    return tuple(strides)


def are_kept(strides: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a tensor lies elsewhere as it does here: each element at a place of its own, and no two of three places
    left free.
    """
    places = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride < places:
            return False
        places += stride * max(0, size - 1)
    return places <= 2 * math.prod(shape) and min(strides, default=0) >= 0


_OF_DAMAGED_BYTES = (
    *(msgspec.MsgspecError, ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError),
    SyntaxError,  # numpy's, of a dtype
)


def unflatten(payload: bytes, kind: TensorKind, place: Callable[[Path, Slot], Any]) -> Any:
    """The inverse; ``place(path, slot)`` gives the tensor for each slot. Raises ProtocolError for bytes that aren't a
    tree.
    """

    def decode(value: Any, path: Path) -> Any:
        if isinstance(value, list):
            return [decode(item, (*path, i)) for i, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        ((tag, body),) = value.items()
        if tag == "T":
            number, dtype, shape, *more = body
            strides = _checked(more[1], shape) if more[1:] and more[1] else ()
            return place(path, Slot(number, dtype, tuple(shape), more[:1] == [True], strides, more[2:] == [True]))
        if tag == "D":
            pairs = [(decode(key, path), item) for key, item in body]
            return {key: decode(item, (*path, key)) for key, item in pairs}
        if tag == "P":
            return tuple(decode(item, (*path, i)) for i, item in enumerate(body))
        if tag == "S":
            return body.decode(errors="surrogatepass")
        if tag == "I":
            return int(body, 16)
        if tag == "C":
            return complex(*body)
        if tag == "K":
            return kind.constant(body)
        return _array_of(*body)

    try:
        return decode(msgspec.msgpack.decode(payload), ())
    except _OF_DAMAGED_BYTES as error:
        raise ProtocolError(f"not a state tree: {error}") from None
