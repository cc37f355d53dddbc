"""Trees of state (what ``state_dict()`` returns) as bytes plus a list of tensors; never pickle.

Leaves may be None, bool, int, float, complex, str, bytes, numpy arrays and scalars, and whatever the framework calls a
tensor; nodes are dict, OrderedDict (as dict), list, tuple. Anything else raises StateError with the path to it, at the
start of the training and not in the middle of the first recovery.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from resilient_train.errors import ProtocolError, StateError

Path = tuple[Any, ...]


class Slot(NamedTuple):
    """A tensor's place in a tree: the ``number``-th of the list, its dtype as the framework names it, its shape.

    ``divided``: that is its global shape, and each rank holds a part of it.
    """

    number: int
    dtype: str
    shape: tuple[int, ...]
    divided: bool = False


class TensorKind(NamedTuple):
    """What a framework tells this module about its tensors."""

    is_tensor: Callable[[Any], bool]
    describe: Callable[[Any], tuple[str, tuple[int, ...], bool]]
    """Its dtype, shape, and whether it is divided."""
    is_constant: Callable[[Any], bool]
    """Other leaf values of the framework's own (a dtype, a device) ..."""
    name_constant: Callable[[Any], str]
    constant: Callable[[str], Any]


_PLAIN = (type(None), bool, int, float, str, bytes)
_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))
"""In names of files that are not UTF-8 (PEP 383), which msgpack does not take."""
_INT64 = range(-(1 << 63), 1 << 63)


def flatten(tree: Any, kind: TensorKind) -> tuple[bytes, dict[Path, Any]]:
    """The tree as bytes, and its tensors by path in the order of their slots. Raises StateError."""
    tensors: dict[Path, Any] = {}

    def encode(value: Any, path: Path) -> Any:
        if kind.is_tensor(value):
            dtype, shape, divided = kind.describe(value)
            tensors[path] = value
            return {"T": [len(tensors) - 1, dtype, list(shape), *([True] if divided else [])]}
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool) and int(value) not in _INT64:
            return {"I": hex(int(value))}
        if type(value) is str and not value.isascii() and any(map(_SURROGATES.__contains__, value)):
            return {"S": value.encode(errors="surrogatepass")}
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Mapping):
            return {"D": [[encode(key, path), encode(item, (*path, key))] for key, item in value.items()]}
        if isinstance(value, tuple):
            return {"P": [encode(item, (*path, i)) for i, item in enumerate(value)]}
        if isinstance(value, list):
            return [encode(item, (*path, i)) for i, item in enumerate(value)]
        if isinstance(value, complex):
            return {"C": [value.real, value.imag]}
        if isinstance(value, np.generic | np.ndarray) and value.dtype.hasobject is False:
            return {"N": [value.dtype.str, list(value.shape), value.tobytes(), isinstance(value, np.generic)]}
        if kind.is_constant(value):
            return {"K": kind.name_constant(value)}
        where = ".".join(map(str, path))
        raise StateError(
            f"state at {where!r} is a {type(value).__qualname__}, which cannot be carried to another process"
        )

    return msgspec.msgpack.encode(encode(tree, ())), tensors


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
            number, dtype, shape, *divided = body
            return place(path, Slot(number, dtype, tuple(shape), divided == [True]))
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
        dtype, shape, data, scalar = body
        array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
        return array[()] if scalar else array

    try:
        return decode(msgspec.msgpack.decode(payload), ())
    except _OF_DAMAGED_BYTES as error:
        raise ProtocolError(f"not a state tree: {error}") from None
