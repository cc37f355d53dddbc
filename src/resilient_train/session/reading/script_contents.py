"""What the script's objects hold between two steps. Seen twice, it tells what a training keeps by a way that its text
does not show: an attribute of a parameter, ``for h in self.histories: h.append(x)``, ``setattr(self, name, x)``, a
callback behind a list that hands calls on, the closure of a hook.

``flow.py`` reads what a loop writes, and in which order; it knows what each name stands for, and not every way to an
object. Here nothing is known of the order, so what it has seen being written is its alone. Objects are asked past what
their classes have made of them, and no line of the user's runs. Of library's objects nothing is looked at: what their
insides mean nobody knows.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import functools
import io
import itertools
import operator
import os
import random
import sys
import time
from array import array
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from threading import Event
from types import (
    BuiltinFunctionType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import numpy as np

from resilient_train import script_place
from resilient_train.frame_variables import is_function, variables
from resilient_train.session.reading.static_lookup import (
    FUNCTIONS,
    MODULES,
    PROPERTIES,
    UNKNOWN,
    attributes_of,
    cells,
    contents,
    held_by,
    hooks_of,
    is_class,
    parts_of,
)

_VALUES, _OF_MODULES, _OF_ROOT = 20_000, 4_000, 8_000
"""So many are looked at; of modules that don't run, and of one variable: 10 us each, once or twice in a process."""
_OF_MODULES_S, _LIMIT_S = 0.5, 1.0
"""Of this thread's time, so that a look on a busy machine sees as much."""
_WIDE, _ENDS, _NAME_MAX = 256, 32, 80
_BYTES, _SOME = 1 << 16, 64
"""Of one array or text so many are read; of what is larger, or lies apart, so many elements."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_SETS = (set, frozenset)
_DICTS = (dict, OrderedDict)
_CONTAINERS = (*_DICTS, *_SETS, list, tuple, deque)
_PLAIN_OBJECTS = (SimpleNamespace, argparse.Namespace, UserDict, WeakKeyDictionary, WeakValueDictionary, Event)


def _place_of(kind: type) -> tuple[str, str]:
    """Its module, and its name there, whatever a metaclass says."""
    return str(_MODULE.__get__(kind)), str(_NAME.__get__(kind))


_FILE_SYSTEMS_OF_NUMBERS = ("/proc/", "/sys/")
_COMPRESSED = {("gzip", "GzipFile"): "fileobj", ("bz2", "BZ2File"): "_fp", ("lzma", "LZMAFile"): "_fp"}


def _position(file: Any) -> Hashable:
    """Of one that is only read: a training may go through it. In those of the kernel's, nothing is far from a begin.

    It is the kernel's position, so one may read a buffer's length on and not be seen. To ask the buffer (``tell``) is
    not harmless: while another thread reads, it takes that one's bytes for read twice.
    """
    if type(file) is io.TextIOWrapper:
        try:
            file = file.buffer
        except (ValueError, AttributeError):  # it is detached
            return None
    if (within := _COMPRESSED.get(_place_of(type(file)))) is not None:
        file = attributes_of(file).get(within)
    if type(file) is io.BufferedReader:
        file = file.raw
    if type(file) is not io.FileIO or file.closed or file.writable():
        return None
    name = attributes_of(file).get("name")
    if type(name) is str and name.startswith(_FILE_SYSTEMS_OF_NUMBERS):
        return None
    try:
        return os.lseek(file.fileno(), 0, os.SEEK_CUR)
    except (OSError, ValueError):
        return None


def _rows_changed(database: Any) -> Hashable:
    """By the module's own attribute: a class of the user's may have another one of that name."""
    own = next(names["total_changes"] for names in reversed([*held_by(type(database))]) if "total_changes" in names)
    try:
        return int(own.__get__(database))
    except Exception:  # it is closed, and its errors are of a module that need not be imported
        return None


def _wakes(started: Any) -> Hashable:
    """How often the process that it has started has waited for something, and gone on. None: it runs no more."""
    own = attributes_of(started)
    if own.get("returncode") is not None:  # another process may have its number
        return None
    try:
        with open(f"/proc/{own.get('pid')}/status", "rb") as status:  # noqa: PTH123 - in each look
            return next((line for line in status if line.startswith(b"voluntary")), None)
    except OSError:
        return None


def _wakes_if_written_to(started: Any) -> Hashable:
    """Others (a board, a monitor) do not depend on the training."""
    return _wakes(started) if attributes_of(started).get("stdin") is not None else None


def _of_library(key: str) -> Callable[[Any], Hashable]:
    return lambda each: attributes_of(each).get(key)


_MOVES: tuple[tuple[type, Callable[[Any], Hashable]], ...] = (
    (random.Random, lambda each: hash(each.getstate())),
    (np.random.Generator, lambda each: _of_numpys(each.bit_generator.state)),
    (np.random.RandomState, lambda each: _of_numpys(each.get_state(legacy=False))),
    # not by its buffer: while somebody has a view of that, a thread of the script's could not write
    (io.BytesIO, lambda each: None if each.closed else (each.tell(), hash(each.getvalue()[-_BYTES:]))),
    (io.StringIO, lambda each: None if each.closed else each.tell()),
    (range, repr),
    (np.ufunc, repr),
    *((type(each), operator.length_hint) for each in (iter([]), iter(()), iter(range(0)), iter({}))),
    (itertools.count, repr),
    *((each, _position) for each in (io.FileIO, io.BufferedReader, io.TextIOWrapper)),
)
_OTHERS_MOVE: dict[tuple[str, str], Callable[[Any], Hashable]] = {
    ("sqlite3", "Connection"): _rows_changed,
    ("multiprocessing.process", "BaseProcess"): lambda each: _wakes(attributes_of(each).get("_popen")),
    ("subprocess", "Popen"): _wakes_if_written_to,
    ("torch.quasirandom", "SobolEngine"): _of_library("num_generated"),
    ("scipy.stats._qmc", "QMCEngine"): _of_library("num_generated"),
    **dict.fromkeys(_COMPRESSED, _position),
}
"""By module and class, since importing them takes time: also of classes made of them."""
_TENSORS = ("_parameters", "_buffers")
_OTHERWISE = (*_TENSORS, MODULES, "training")
"""Of a torch module, what is looked at otherwise, or by others."""
_MODULE_OF_TORCH = ("torch.nn.modules.module", "Module")
_IS_PARAMETER = "_is_param"
"""torch's own, on a parameter that is a DTensor; a gathered one that stands in its place meanwhile has none."""
_OF_DYNAMO = "_dynamo_"
"""What torch.compile hangs on parameters begins so."""
_OF_TENSORS = ("Tensor", "Parameter", "Buffer")
_OF_OPTIMIZERS = ("param_groups", "state")
_NOT_STATE = (*FUNCTIONS, *PROPERTIES, staticmethod, classmethod, MemberDescriptorType)
"""Of a class."""


_ORDER, _MODULE, _NAME = (cast("Any", vars(type)[each]) for each in ("__mro__", "__module__", "__name__"))


class HeldPart(NamedTuple):
    """``key``: how it is written behind ``holder``, the object that it lies in: see ``scope.Key``."""

    holder: Any
    key: str
    name: str
    """As one would write it."""
    value: Any


class _Seen(NamedTuple):
    form: Hashable
    around: str
    """The name of what it lies in."""
    kind: tuple[int, str]
    """Of the holder its class, by id, and its key there."""
    of_tensor: bool = False


class ScriptContents(NamedTuple):
    """By name."""

    seen: dict[str, _Seen]
    opened: frozenset[str]
    """Of these objects, what they hold was looked at by that name."""
    settled: frozenset[tuple[int, str]]
    """Attributes of the user's classes that were left out in one of their objects."""
    unread: tuple[str, ...]
    """What could not be looked at, and why."""


def contents_of(frames: Iterable[FrameType], left_out: Callable[[HeldPart], bool]) -> ScriptContents:
    """Of what ``frames`` and the modules of the user's can reach, the outermost first: a variable of a loop is another
    name of something, as a rule. ``left_out``: what lies there is not looked at, nor what it holds.
    """
    running = [*frames]
    spaces = {id(frame.f_globals) for frame in running}  # looked at by their names: ``exec(text, names)``
    walk = _Walk(lambda part: id(part.value) in spaces or left_out(part))
    for root in _variables_of_modules(running):
        walk.follow(root, _OF_MODULES, _OF_MODULES_S)
    for root in _variables_of(running):
        walk.follow(root, _VALUES, _LIMIT_S)
    return ScriptContents(walk.found, frozenset(walk.opened), frozenset(walk.settled), tuple(walk.unread))


class _Walk:
    """Each object once, by its shortest name behind the variable that it is found by."""

    def __init__(self, left_out: Callable[[HeldPart], bool]) -> None:
        self._left_out = left_out
        self.found: dict[str, _Seen] = {}
        self.opened, self.settled, self.unread = set[str](), set[tuple[int, str]](), list[str]()
        self._began = time.thread_time()
        self._ids, self._kept = set[int](), list[Any]()
        """What was kept can't be freed, so that no other object gets its id."""

    def follow(self, root: HeldPart, limit: int, limit_s: float) -> None:
        """What can be reached from there, until ``limit`` values have been seen in all, or the time is over."""
        todo = deque([(root.name, root.value)] if not self._left_out(root) else ())
        limit = min(limit, len(self.found) + _OF_ROOT)
        until = self._began + limit_s
        while todo and len(self.found) < limit and time.thread_time() < until:
            name, each = todo.popleft()
            if id(each) in self._ids:
                continue
            self._ids.add(id(each))
            self._kept.append(each)
            try:
                todo += self._open(name, each)
            except Exception as error:  # a class of anybody's; the others are looked at
                self.unread.append(f"{name}: {type(error).__name__}: {error}")

    def _open(self, name: str, each: Any) -> Iterator[tuple[str, Any]]:
        """Notes what it holds; gives what holds something in turn."""
        self._note(name, each, "", (0, ""))
        self.opened.add(name)
        for part in _parts(name, each):
            of = _kind(type(part.holder))
            kind = id(of.of), part.key
            if self._left_out(part):
                self.settled |= {kind} if of.is_users else set()
                continue
            self._note(part.name, part.value, name, kind, of_tensor=of.is_tensor)
            if not _is_scalar(part.value):
                yield part.name, part.value

    def _note(self, name: str, value: Any, around: str, kind: tuple[int, str], *, of_tensor: bool = False) -> None:
        if name not in self.found:
            self.found[name] = _Seen(_form(value), around, kind, of_tensor)


def changed(before: ScriptContents, now: ScriptContents) -> list[str]:
    """What holds something else: of containers their names, and of an attribute of many tensors the first."""
    names, settled, others = dict[str, str](), set[str](), set[str]()
    """``others``: modules in whose places others were, and what lies in them."""
    for name, (form, around, kind, of_tensor) in now.seen.items():
        if kind in now.settled or around in settled:
            settled.add(name)
        elif around in others:
            others.add(name)
        elif before.seen[name].form != form if name in before.seen else around in before.opened and kind[1][:1] != "[":
            others |= {name} if type(form) is tuple and type(form[-1]) is _Itself else set()
            place = _container(name, now)
            names.setdefault(kind[1] if of_tensor else place, place)
    return [*names.values()]


def _container(name: str, now: ScriptContents) -> str:
    """``a.b['c'][0]``: a.b."""
    while now.seen[name].kind[1].startswith("["):
        name = now.seen[name].around
    return name


def _variables_of_modules(running: list[FrameType]) -> Iterator[HeldPart]:
    """Of those of the user's that are imported, and of which no code runs."""
    modules = [each for each in [*sys.modules.values()] if type(each) is ModuleType and _is_users(each)]
    for module in modules:
        if not any(vars(module) is frame.f_globals for frame in running):
            yield from _variables(vars(module), vars(module), f"{module.__name__}.")


def _variables_of(running: list[FrameType]) -> Iterator[HeldPart]:
    """Of functions that run, and of their modules."""
    for frame in reversed(running):
        yield from _variables(frame.f_globals, frame.f_globals, "")
    for frame in reversed(running):
        if is_function(frame):
            yield from _variables(variables(frame), frame.f_code, "")


def _variables(names: dict[str, Any], holder: Any, before: str) -> Iterator[HeldPart]:
    """Those that hold more than a value."""
    for name, each in [*names.items()]:
        if not (name.startswith("__") or _is_scalar(each) or type(each) is ModuleType):
            yield HeldPart(holder, name, before + name, each)


class _Kind(NamedTuple):
    """Of a class, whatever a metaclass says: that may have an ``__eq__`` and a ``__hash__`` of its own."""

    of: type
    scalar: Any
    """The class of values of Python's that it is, by which it is asked: its own methods may be anything."""
    is_enum: bool
    base: Any
    """The container of Python's that it is; None: it is none."""
    is_tensor: bool
    """One of torch's own classes."""
    is_module: bool
    """It is made of torch's."""
    is_array: bool
    is_numpys_scalar: bool
    is_generator: bool
    """Of random numbers: torch's."""
    moves: Callable[[Any], Hashable] | None
    """It moves when it is used, and this says where it is."""
    is_users: bool
    is_open: bool
    """Its attributes are looked at."""


_KINDS: dict[int, _Kind] = {}


def _kind(kind: type) -> _Kind:
    found = _KINDS.get(id(kind))
    if found is None:
        found = _KINDS[id(kind)] = _kind_of(kind)
    return found


def _kind_of(kind: type) -> _Kind:
    order, (module, name) = _ORDER.__get__(kind), _place_of(kind)
    found = sys.modules.get(module)
    users = _is_users(found) if type(found) is ModuleType else _is_users_class(kind)
    scalar = next((each for each in order if _is_one_of(each, _SCALARS)), None)
    return _Kind(
        of=kind,
        scalar=scalar,
        is_enum=any(each is enum.Enum for each in order),
        base=next((each for each in order if _is_one_of(each, _CONTAINERS)), None),
        is_tensor=module in ("torch", "torch.nn.parameter") and name in _OF_TENSORS,
        is_module=_MODULE_OF_TORCH in map(_place_of, order),
        is_array=kind is np.ndarray,
        is_numpys_scalar=any(each is np.generic for each in order) and not users,
        is_generator=module == "torch._C" and name == "Generator",
        moves=_moves(order),
        is_users=users,
        is_open=users or _is_one_of(kind, _PLAIN_OBJECTS),
    )


def _moves(order: Sequence[type]) -> Callable[[Any], Hashable] | None:
    if (own := next((ask for each, ask in _MOVES if each is order[0]), None)) is not None:
        return own
    return next((_OTHERS_MOVE[each] for each in map(_place_of, order) if each in _OTHERS_MOVE), None)


def _is_one_of(kind: type, kinds: Iterable[type]) -> bool:
    return any(kind is each for each in kinds)


def _is_users(module: ModuleType) -> bool:
    """Whether its text is the user's."""
    own = vars(module)
    file, name = own.get("__file__"), own.get("__name__")
    return (type(name) is str and name == "__main__") or (type(file) is str and script_place.is_users(file))


def _is_users_class(kind: type) -> bool:
    """Of one whose module is none any more (``sys.modules[__name__] = Settings()``), or never was listed."""
    own = [*next(iter(held_by(kind))).values()]
    return any(type(each) is FunctionType and script_place.is_users(each.__code__.co_filename) for each in own)


def _is_scalar(value: Any) -> bool:
    return _kind(type(value)).scalar is not None


# -- what an object holds


def _parts(name: str, value: Any) -> Iterator[HeldPart]:
    kind = type(value)
    if kind is FunctionType:
        if script_place.is_users(value.__code__.co_filename):
            yield from _of_function(value)
    elif kind is MethodType:
        yield HeldPart(value, "", name.rpartition(".")[0] or name, value.__self__)
        yield from _parts(name, value.__func__)
    elif kind is functools.partial:
        yield from _entries(name, value, enumerate((value.func, *value.args)))
        yield from _entries(name, value, value.keywords.items())
    elif type(attributes_of(value).get(MODULES)) is dict:
        yield from _of_module(name, value)
    elif is_class(value):
        if _kind(value).is_users:
            own = [(key, each) for key, each in next(iter(held_by(value))).items() if key[:2] != "__"]
            yield from _attributes(
                name, value, ((key, each) for key, each in own if not _is_one_of(type(each), _NOT_STATE))
            )
    else:
        yield from _in_container(name, value)
        if _kind(kind).is_tensor:
            yield from _attributes(name, value, attributes_of(value).items())
        elif _kind(kind).is_open:
            yield from _attributes(name, value, _of_object(value))


def _attributes(name: str, value: Any, own: Iterable[tuple[str, Any]]) -> Iterator[HeldPart]:
    return (HeldPart(value, key, f"{name}.{key}", each) for key, each in [*own])


def _entries(name: str, value: Any, own: Iterable[tuple[Any, Any]]) -> Iterator[HeldPart]:
    shown = [("..." if key is ... else repr(key), each) for key, each in own]
    return (HeldPart(value, f"[{key}]", f"{name}[{key}]", each) for key, each in shown)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    own = attributes_of(value)
    others = _OF_OPTIMIZERS if _OF_OPTIMIZERS[0] in own else ()
    yield from ((key, each) for key, each in islice([*own.items()], _WIDE) if key not in others)
    slots = [(key, each) for names in held_by(type(value)) for key, each in [*names.items()]]
    for key, slot in slots:
        if type(slot) is MemberDescriptorType and key != "__dict__":
            with contextlib.suppress(AttributeError):  # nothing is in it
                yield key, slot.__get__(value)


def _of_function(function: FunctionType) -> Iterator[HeldPart]:
    where = function.__qualname__.rpartition("<locals>.")[2]
    for key, cell in cells(function):
        if (value := contents(cell)) is not UNKNOWN:
            yield HeldPart(cell, key, f"{key} in {where}", value)
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from (HeldPart(function, "", f"default {at} of {where}", each) for at, each in enumerate(defaults))
    yield from _attributes(where, function, function.__dict__.items())


def _is_torchs(attribute: str) -> bool:
    """Of one of a tensor."""
    return attribute == _IS_PARAMETER or attribute.startswith(_OF_DYNAMO)


def _of_module(name: str, module: Any) -> Iterator[HeldPart]:
    """Of its parameters and buffers only what hangs on them: what they hold is for others to see."""
    own = attributes_of(module)
    for tensors in (own.get(each) for each in _TENSORS):
        for key, tensor in [*tensors.items()] if type(tensors) is dict else ():
            if tensor is not None:
                hung_on = ((at, each) for at, each in attributes_of(tensor).items() if not _is_torchs(at))
                yield from _attributes(f"{name}.{key}", tensor, hung_on)
    yield from _attributes(name, module, parts_of(module).items())
    for called in hooks_of(module):
        yield from _parts(name, called.function)
        if called.owner is not UNKNOWN:
            yield HeldPart(called, "", _NAME.__get__(type(called.owner)), called.owner)
    if _kind(type(module)).is_users:
        yield from _attributes(name, module, ((key, each) for key, each in own.items() if key not in _OTHERWISE))


def _in_container(name: str, value: Any) -> Iterator[HeldPart]:
    """Of a sequence, what is no value: those are in its form."""
    base = _kind(type(value)).base
    if base in _DICTS:
        entries = [*islice(base.items(value), _WIDE)]
        yield from _entries(name, value, ((key if _can_be_named(key) else ..., each) for key, each in entries))
    elif base is not None and base not in _SETS:
        inner = [*enumerate(islice(base.__iter__(value), _WIDE))]
        yield from _entries(name, value, ((at, each) for at, each in inner if not _is_scalar(each)))


def _can_be_named(key: Any) -> bool:
    kind = type(key)
    if kind is str or kind is bytes:
        return len(key) < _NAME_MAX
    return (kind is int or kind is bool) and abs(key) < 1 << 64


# -- what it is made of


def _form(value: Any) -> Hashable:
    """Two that differ have another value; of a device's tensors, another memory or version."""
    kind = _kind(type(value))
    if kind.is_tensor:
        try:
            return _tensor_form(value)
        except RuntimeError:  # made in inference mode, sparse, ...
            return "tensor"
    if kind.scalar is not None or kind.base is None:
        return _value_form(value, kind)
    length, each = kind.base.__len__(value), kind.base.__iter__(value)
    if kind.base in _SETS:
        return "set", length, *sorted(repr(one) for one in islice(each, _WIDE) if _can_be_named(one))
    if kind.base in _DICTS:  # their order is a state: of what was used last
        ends = *islice(each, _ENDS), *islice(kind.base.__reversed__(value), _ENDS)
        return "dict", length, *(key for key in ends if _can_be_named(key))
    if kind.base is deque:
        last: Iterable[Any] = islice(deque.__reversed__(value), _ENDS)
    else:
        last = kind.base.__getitem__(value, slice(-_ENDS, None))
    inner = ((one, _kind(type(one))) for one in (*islice(each, _ENDS), *last))
    return kind.base.__name__, length, *(_value_form(one, of) for one, of in inner if of.scalar is not None)


def _value_form(value: Any, kind: _Kind) -> Hashable:
    """Of classes of Python's, NumPy's and torch's own; of others their names."""
    name = str(_NAME.__get__(kind.of))
    if kind.is_enum:
        return name, str(attributes_of(value).get("_name_"))
    if kind.is_numpys_scalar:
        return _numpys_form(value)
    if kind.scalar is not None:
        return _scalar_form(value, kind)
    if kind.of is bytearray or kind.of is array:
        return name, len(value), hash((bytes(value[:_BYTES]), bytes(value[-_BYTES:])))
    if kind.is_array:
        return _array_form(value)
    if kind.is_generator:
        return hash(value.get_state().numpy().tobytes())
    if is_class(value):
        return _place_of(value)
    if kind.of is FunctionType or kind.of is MethodType:  # which one of several that take turns
        return name, value.__code__.co_filename, value.__code__.co_firstlineno
    if kind.of is BuiltinFunctionType:
        return name, value.__qualname__
    if kind.is_module and _has_tensors(value):
        return name, _Itself(ref(value))
    return name, "" if kind.moves is None else kind.moves(value)


class _Itself:
    """Which object it is: another one has other values, though it is of the same class. Nothing is kept alive."""

    def __init__(self, held: ref[Any]) -> None:
        self._held = held

    def __eq__(self, other: object) -> bool:
        own = self._held()
        return own is not None and type(other) is _Itself and own is other._held()

    def __hash__(self) -> int:
        return 0


def _has_tensors(module: Any) -> bool:
    """Whether it has a parameter or a buffer, or a module in it has."""
    todo, seen = [module], set[int]()
    while todo:
        own = attributes_of(each := todo.pop())
        if id(each) in seen or type(own.get(MODULES)) is not dict:
            continue
        seen.add(id(each))
        tensors = (one for names in map(own.get, _TENSORS) if type(names) is dict for one in [*names.values()])
        if any(one is not None for one in tensors):
            return True
        todo += own[MODULES].values()
    return False


def _scalar_form(value: Any, kind: _Kind) -> Hashable:
    if kind.scalar is str or kind.scalar is bytes:
        ends = (kind.scalar.__getitem__(value, each) for each in (slice(_BYTES), slice(-_BYTES, None)))
        return kind.scalar.__name__, kind.scalar.__len__(value), hash((*ends,))
    if kind.scalar is kind.of and kind.of is not float and kind.of is not complex:
        return (value,)
    return str(kind.scalar.__repr__(value))  # NaN is what it was


def _numpys_form(value: Any) -> Hashable:
    if value.dtype.hasobject:
        return str(value.dtype)
    return repr(value) if value.nbytes <= _NAME_MAX and value.dtype.fields is None else hash(value.tobytes())


def _of_numpys(state: Any) -> Hashable:
    """Of a generator's: dictionaries of numbers, names and arrays."""
    if type(state) is dict:
        return tuple((key, _of_numpys(each)) for key, each in state.items())
    return hash(state.tobytes()) if type(state) is np.ndarray else repr(state)


def _array_form(value: Any) -> Hashable:
    """Of a large one some elements: it may be a file, and longer than the memory."""
    if value.dtype.hasobject:
        return value.shape, ""
    address, item = value.__array_interface__["data"][0], value.itemsize
    if value.nbytes <= _BYTES and (value.flags.c_contiguous or value.flags.f_contiguous):
        return value.shape, hash(_memory(address, value.nbytes))
    some = range(0, value.size, -(-value.size // _SOME))
    return value.shape, hash(_elements(address, item, value.shape, value.strides, some))


def _tensor_form(tensor: Any) -> Hashable:
    on_host, count, item = tensor.device.type == "cpu", tensor.numel(), tensor.element_size()
    form = (str(tensor.dtype), tuple(tensor.shape), 0 if on_host and count <= 2 * _ENDS else tensor._version)  # noqa: SLF001
    if not on_host or tensor.untyped_storage().nbytes() < count * item:
        return *form, tensor.data_ptr()
    shape, strides = tuple(tensor.shape), [each * item for each in tensor.stride()]
    spread = sum((each - 1) * stride for each, stride in zip(shape, strides, strict=True))
    if count and spread == (count - 1) * item:  # nothing else is among it, in whatever order
        address, ends = tensor.data_ptr(), min(count, _ENDS) * item
        return *form, hash((_memory(address, ends), _memory(address + count * item - ends, ends)))
    some = sorted({*range(min(count, _ENDS)), *range(max(count - _ENDS, 0), count)})
    return *form, hash(_elements(tensor.data_ptr(), item, shape, strides, some))


def _elements(address: int, item: int, shape: Sequence[int], strides: Sequence[int], some: Iterable[int]) -> Hashable:
    """Of an array that lies there its elements of these numbers."""
    found = list[bytes]()
    for each in some:
        at, rest = address, each
        for length, stride in zip(reversed(shape), reversed(strides), strict=True):
            rest, step = divmod(rest, length)
            at += step * stride
        found.append(_memory(at, item))
    return tuple(found)


def _memory(address: int, count: int) -> bytes:
    """What lies there. Empty: nothing can be read there, as where a mapped file has become shorter: to touch it ends
    the process.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)  # of a parent's, if it was kept over a fork
    except OSError:
        return b""
    try:
        return os.pread(memory, count, address)
    except (OSError, OverflowError):
        return b""
    finally:
        os.close(memory)
