"""What names in the user's text stand for, found without running a line of theirs.

A property, a proxy's ``__getattr__`` or a metaclass may do anything, so objects are asked past all of them.
"""

from __future__ import annotations

import ast
import functools
import io
import linecache
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import (
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

from resilient_train import script_place
from resilient_train.session.step import Steps

_TEXT_MAX = 300_000
_FOR_S = 1.0
"""Of the thread's time. A trainer that runs handlers of many kinds took 4.5 s."""
UNKNOWN: Any = object()
_DRAWS = ("Random", "Generator", "RandomState", "Queue", "SimpleQueue", "Connection")
_OF_DRAWS = ("random", "numpy", "torch", "queue", "_queue", "multiprocessing", "asyncio", "_random")
"""Python's, NumPy's and torch's own: a user's ``Generator`` makes images."""
_FILES = io.IOBase.__mro__[1]
_ORDER, _HELD, _NAME, _MODULE = (vars(type)[name] for name in ("__mro__", "__dict__", "__name__", "__module__"))
PLAIN = (int, float, complex, bool, str, bytes, tuple, list, dict, set, frozenset, deque)
"""Of a module's attributes, what its state_dict() has not; nor has it tensors and arrays that are no buffers."""
OF_ARRAYS = ("add_", "__array_interface__")
"""What tensors of torch's, and arrays of NumPy's, have."""
_LOOKED_AT = 2000
"""Objects in a container: 10 us each."""
CONTAINERS = (list, dict, set, deque)
_WRAPPED_MAX = 10
_REACHED_MAX, _WIDE = 300, 16
FUNCTIONS = (FunctionType, MethodType)
PROPERTIES = (property, functools.cached_property)
_MODULE_CONTAINERS = "torch.nn.modules.container"
MODULES = "_modules"
"""Where a torch module has the modules in it."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks",
          "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # fmt: skip
_PARAMETERS = "_parameters"
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_STEP_HOOKS = "_optimizer_step_pre_hooks"
_COMM_HOOKS = "_comm_hooks"
Function = ast.FunctionDef | ast.AsyncFunctionDef


class CalledFunction(NamedTuple):
    """A function of the user's text; ``owner`` is what it gets first: the object or the class whose method it is."""

    function: Any  # a FunctionType, which mypy would take for a method of this class
    owner: Any = UNKNOWN


def moves_when_used(value: Any) -> bool:
    """An iterator, a random number generator, a queue, a metric: to use one is to change it."""
    kinds = _ORDER.__get__(type(value))
    if kinds[0] is Steps:
        return False
    if any(each is _FILES for each in kinds):
        return False
    return any("__next__" in _HELD.__get__(each) or _draws(each) for each in kinds) or counts_for_itself(value)


def _draws(kind: type) -> bool:
    return _NAME.__get__(kind) in _DRAWS and str(_MODULE.__get__(kind)).partition(".")[0] in _OF_DRAWS


def counts_for_itself(value: Any) -> bool:
    """A metric of torchmetrics, by what it has: its states as they begin, and which of them ``state_dict()`` gives."""
    own = attributes_of(value)
    begins, gives = own.get("_defaults"), own.get("_persistent")
    return type(begins) is type(gives) is dict and begins.keys() == gives.keys()


def is_module_container(value: Any) -> bool:
    """``torch.nn.Sequential``, ``ModuleList``, ``ParameterDict``, ..."""
    return any(_HELD.__get__(each).get("__module__") == _MODULE_CONTAINERS for each in _ORDER.__get__(type(value)))


def held(value: Any, attribute: str) -> Any:
    """As it lies in the object, or in its class: a method there is a function. UNKNOWN: nothing does."""
    if is_class(value):
        return next((each[attribute] for each in held_by(value) if attribute in each), UNKNOWN)
    of_class = next((each[attribute] for each in held_by(type(value)) if attribute in each), UNKNOWN)
    if type(of_class) is MemberDescriptorType:  # a slot
        try:
            return of_class.__get__(value)
        except AttributeError:
            return UNKNOWN
    own = attributes_of(value)
    if attribute in own and type(of_class) is not property:
        return own[attribute]
    return parts_of(value).get(attribute, UNKNOWN) if of_class is UNKNOWN else of_class


def held_behind(value: Any, kind: Any, attribute: str) -> Any:
    """As it lies in the first class of its that comes behind ``kind`` and has it."""
    kinds = _ORDER.__get__(type(value))
    place = next((number for number, each in enumerate(kinds) if each is kind), len(kinds))
    behind = map(_HELD.__get__, kinds[place + 1 :])
    return next((each[attribute] for each in behind if attribute in each), UNKNOWN)


def isinstance_past(value: Any, kinds: tuple[type, ...]) -> bool:
    """``isinstance``, past what a proxy says of its class."""
    return any(base is kind for base in _ORDER.__get__(type(value)) for kind in kinds)


def is_class(value: Any) -> bool:
    """Whatever a proxy says."""
    return any(each is type for each in _ORDER.__get__(type(value)))


def held_by(kind: type) -> Iterator[Mapping[str, Any]]:
    """What a class and those that it is made of have, its own first."""
    return (_HELD.__get__(each) for each in _ORDER.__get__(kind))


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Those that lie in the object itself."""
    found: Any = next((each["__dict__"] for each in held_by(type(value)) if "__dict__" in each), None)
    if type(found) not in (GetSetDescriptorType, MemberDescriptorType):  # a property of the user's
        return {}
    own: Any = found.__get__(value)
    return own if type(own) is dict else {}


def parts_of(value: Any) -> Mapping[str, Any]:
    """The modules that lie directly in a torch module, by name."""
    found = attributes_of(value).get(MODULES)
    return found if type(found) is dict else {}


def hooks_of(module: Any) -> list[CalledFunction]:
    """What the user has hung on a torch module, its parameters, or an optimizer; a communication hook with the state
    that it gets.
    """
    own = attributes_of(module)
    hung = [hook for name in _HOOKS if type(own.get(name)) in (dict, OrderedDict) for hook in own[name].values()]
    parameters = own.get(_PARAMETERS)
    for parameter in parameters.values() if type(parameters) is dict else ():
        for descriptor in (held(type(parameter), name) for name in _PARAMETER_HOOKS):
            hooks: Any = descriptor.__get__(parameter) if type(descriptor) is GetSetDescriptorType else None
            hung += hooks.values() if isinstance_past(hooks, (dict,)) else ()
    found = [called for hook in hung for called in functions_of(hook)]
    for hook, state in own.get(_COMM_HOOKS, ()):
        found += [
            called if called.owner is not UNKNOWN else called._replace(owner=state) for called in functions_of(hook)
        ]
    return found


def all_parts(value: Any) -> Iterator[Any]:
    """A module, and all that are in it, each once."""
    seen, waiting = set[int](), [value]
    while waiting:
        each = waiting.pop(0)
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += parts_of(each).values()


def reached_from(things: Iterable[Any]) -> list[Any]:
    """What a loader can read (its data set, what collates), as far as is soon told: objects within objects, in lists,
    and what functions are bound to.
    """
    found, seen, waiting = list[Any](), set[int](), deque(things)
    while waiting and len(found) < _REACHED_MAX:
        each = waiting.popleft()
        if id(each) in seen or type(each) in (ModuleType, type):
            continue
        seen.add(id(each))
        found.append(each)
        kind = type(each)
        if kind in (list, tuple):
            waiting += each[:_WIDE]
        elif kind is functools.partial:
            waiting += (each.func, *each.args, *each.keywords.values())
        elif kind is MethodType:
            waiting.append(each.__self__)
        elif kind is FunctionType:
            waiting += (value for _, cell in cells(each) if (value := contents(cell)) is not UNKNOWN)
        else:
            waiting += attributes_of(each).values()
    return found


def functions_of(value: Any, owner: Any = UNKNOWN) -> list[CalledFunction]:
    """Those of the user's text that run when ``value`` is called, what it wraps first; of a module its ``forward``."""
    if type(owner) is ModuleType or any(each is value for each in attributes_of(owner).values()):
        owner = UNKNOWN  # not its method
    if type(value) is MethodType:
        value, owner = value.__func__, value.__self__
    if type(value) is FunctionType and "__wrapped__" in value.__dict__:
        around = [CalledFunction(value, owner)] if script_place.is_users(value.__code__.co_filename) else []
        return [*functions_of(value.__dict__["__wrapped__"], owner), *around]
    value, owner = bare(value, owner)
    if type(value) is FunctionType:
        return [CalledFunction(value, owner)] if script_place.is_users(value.__code__.co_filename) else []
    if value is UNKNOWN or is_class(value):
        return []
    inner = (bare(held(value, name), value)[0] for name in ("__call__", "forward"))
    return [
        CalledFunction(found, value)
        for found in inner
        if type(found) is FunctionType and script_place.is_users(found.__code__.co_filename)
    ]


def bare(value: Any, owner: Any) -> tuple[Any, Any]:
    """Without what has been wrapped around a function."""
    for _ in range(_WRAPPED_MAX):
        kind = type(value)
        if kind is staticmethod:
            value, owner = value.__func__, UNKNOWN
        elif kind is classmethod:
            value = value.__func__
        elif kind is property:
            value = value.fget
        elif kind in (functools.partial, functools.cached_property):
            value = value.func
        elif kind is MethodType:
            value, owner = value.__func__, value.__self__
        elif kind is FunctionType and "__wrapped__" in value.__dict__:
            value = value.__dict__["__wrapped__"]
        else:
            break
    return value, owner


def methods_of(value: Any) -> list[CalledFunction]:
    """Those of the user's that one can call by name."""
    kinds = reversed(_ORDER.__get__(type(value))) if value is not UNKNOWN else ()
    named = {name: each for kind in kinds for name, each in _HELD.__get__(kind).items() if name[:2] != "__"}
    return [called for each in named.values() if type(each) is FunctionType for called in functions_of(each, value)]


def steps_of(value: Any) -> list[CalledFunction]:
    """What of the user's runs when an optimizer steps; none if it is no optimizer."""
    if held(value, _STEP_HOOKS) is UNKNOWN:
        return []
    return [*functions_of(held(value, "step"), value), *hooks_of(value)]


def cells(function: FunctionType) -> list[tuple[str, CellType]]:
    """Those of the variables of functions around it, by name."""
    return [*zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)]


def contents(cell: CellType) -> Any:
    """UNKNOWN: it has no value."""
    try:
        return cell.cell_contents
    except ValueError:
        return UNKNOWN


class Texts:
    """Trees of files, each parsed once, for one look at the script's text: it ends in time, for its rank stands still
    meanwhile, and all others may wait for it.
    """

    def __init__(self) -> None:
        self._until = time.thread_time() + _FOR_S
        self._trees: dict[str, ast.Module | None] = {}
        self._functions: dict[str, list[Function]] = {}

    def in_time(self) -> bool:
        """Whether further functions may be read."""
        return time.thread_time() < self._until

    def tree(self, code: CodeType, names: Mapping[str, Any]) -> ast.Module | None:
        """Of the file of that code, whose globals are ``names``. None: there is none, or it is too long."""
        path = code.co_filename
        if path not in self._trees:
            self._trees[path] = _parse("".join(linecache.getlines(path, dict(names))))
        return self._trees[path]

    def function(self, code: CodeType, names: Mapping[str, Any]) -> Function | None:
        """The definition of that function. None: it is no function, or its text is not to be found."""
        tree, path = self.tree(code, names), code.co_filename
        if code.co_name == "<lambda>":
            return _lambda_at(tree, code.co_firstlineno) if tree is not None else None
        if path not in self._functions:
            every: Iterable[ast.AST] = ast.walk(tree) if tree is not None else ()
            self._functions[path] = [each for each in every if isinstance(each, Function)]
        return next((each for each in self._functions[path] if _is_of(code, each)), None)


def _lambda_at(tree: ast.Module, line: int) -> Function | None:
    """As a function that returns what it says; None where the line has several."""
    there = [each for each in ast.walk(tree) if isinstance(each, ast.Lambda) and each.lineno == line]
    if len(there) != 1:
        return None
    body: list[ast.stmt] = [ast.Return(value=there[0].body)]
    return ast.FunctionDef(name="<lambda>", args=there[0].args, body=body, decorator_list=[])


def _parse(text: str) -> ast.Module | None:
    if not text or len(text) > _TEXT_MAX:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # Python has told them when it ran the script
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # not Python's text (a notebook's cell), or changed meanwhile
        return None


def _is_of(code: CodeType, node: Function) -> bool:
    if node.name != code.co_name:
        return False
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return code.co_firstlineno in (first, node.lineno)


def is_plain(value: object) -> bool:
    """Whether it is a value, and no object that may have attributes: a number, a container, a tensor."""
    return type(value) in PLAIN or any(held(value, verb) is not UNKNOWN for verb in OF_ARRAYS)


def is_array(value: object) -> bool:
    """A tensor of torch's, or an array of NumPy's."""
    return any(held(value, verb) is not UNKNOWN for verb in OF_ARRAYS)


def can_change(value: object) -> bool:
    """Whether it can be changed in place, by whoever has another name for it."""
    return type(value) in CONTAINERS or is_array(value)


def arrays_in(value: Any) -> Iterator[object]:
    """Tensors and arrays; of containers those in them, three deep, as far as is soon told: they may hold millions."""
    todo, left = deque([(value, 3)]), _LOOKED_AT
    while todo and left:
        each, depth = todo.popleft()
        left -= 1
        if type(each) not in PLAIN and is_array(each):
            yield each
        elif depth and isinstance_past(each, (dict,)):
            todo.extend((item, depth - 1) for item in islice(dict.values(each), left))
        elif depth and type(each) in (list, tuple, deque):
            todo.extend((item, depth - 1) for item in islice(each, left))


def is_object(value: Any) -> bool:
    """Whether it is known, and may have attributes."""
    return value is not None and value is not UNKNOWN and not is_plain(value)


def kind_of(value: Any) -> object:
    """Two of one kind run the same text."""
    return type(value), *(each.function.__code__ for each in functions_of(value))
