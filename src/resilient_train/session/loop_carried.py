"""What a training loop keeps from one step to the next by its own variables, read from its text.

``ema = 0.9 * ema + 0.1 * loss.item()``: a step reads what the one before has written. A process that takes a rank's
place begins such a variable anew, and a step that runs again changes it twice. Most are counters for people, so nobody
is refused for one: they are told by name, behind the first fault. Tensors that flow into a gradient are looked for, and
refused, elsewhere (``frameworks/torch/flowing.py``).

Compilers call a variable so that an iteration reads before it writes it. This is that analysis, of the loop around
``session.steps()`` and of the user's functions that it calls, as if their text stood in it: of what a function keeps
there are its globals, the variables of functions around it, and attributes of objects that have a name (``self``). A
branch that is never taken counts. Iterators and random number generators are counted too: to use one is to change it;
and tensors and containers that a step changes in place, if it reads anything of them.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from inspect import CO_OPTIMIZED
from itertools import islice
from types import BuiltinMethodType, CodeType, EllipsisType, FrameType
from typing import Any, NamedTuple

from resilient_train.session.static_lookup import (
    FUNCTIONS,
    PROPERTIES,
    UNKNOWN,
    CalledFunction,
    Function,
    Texts,
    all_parts,
    attributes_of,
    cells,
    contents,
    counts_for_itself,
    functions_of,
    held,
    held_behind,
    hooks_of,
    is_class,
    isinstance_past,
    methods_of,
    moves_when_used,
    reached_from,
    steps_of,
    variables,
)

_TOLD = 20
_CALLS_MAX = 500
"""Of functions that are followed; there is no end to what two that call each other do."""
_PLAIN = (int, float, complex, bool, str, bytes, tuple, list, dict, set, frozenset, deque)
"""Of a module's attributes, what its state_dict() has not; nor has it tensors and arrays that are no buffers."""
_STEP = "training_step"
_OF_AUTOGRAD = ("forward", "setup_context", "backward")
"""Of a Lightning module."""
_TENSORS = ("_parameters", "_buffers")
_MODULES = "_modules"
_OF_ARRAYS = ("add_", "__array_interface__")
"""What tensors of torch's, and arrays of NumPy's, have."""
_ELEMENTS = 16
"""Of a list of objects that are called or changed: their classes are few."""
_STATEMENTS_MAX = 5000
"""Behind so many a ``for`` is read once: loops in loops over objects of many classes."""
_LOOKED_AT = 2000
"""Objects in a container: 10 us each."""
_CHANGES = ("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "remove", "discard", "clear",
            "rotate", "reverse", "sort", "put", "itemset", "partition")  # fmt: skip
_CONTAINERS = (list, dict, set, deque)
_ANEW = ("clear", "zero_", "fill_", "copy_", "fill", "normal_", "uniform_", "bernoulli_", "random_",
         "exponential_")  # fmt: skip
"""What was in it before is gone."""
_SEEDS = ("seed", "manual_seed")
"""And so it is of a generator of random numbers."""
_VIEWS = ("data", "T", "mT", "H", "real", "imag", "detach", "view", "view_as", "flatten", "squeeze", "unsqueeze", "t",
          "transpose", "permute", "narrow", "select")  # fmt: skip
"""Of a tensor: what is written there is written to it."""
_ITERABLES = ("list", "tuple", "reversed", "sorted")
_FOR_EACH = ("_foreach_", "_")
"""Functions of torch's that change the tensors of a list begin and end so."""
_IN_PLACE = ("shuffle", "at", "heapify", "heappush", "heappop", "heappushpop", "heapreplace", "insort", "insort_left",
             "insort_right")  # fmt: skip
"""Functions of others that change what they are given first."""
_SETS = ("setattr", "object.__setattr__")
_TAKES = ("pop", "popleft", "popitem", "setdefault")
"""Of containers; those of tensors end with one underscore."""
_READS_ENTRY = ("get", "setdefault", "pop")
Loop = ast.For | ast.AsyncFor | ast.While
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
Settled = Iterable[tuple[object, Collection[str]]]
"""Parts of models, and of each the attributes that a redo and a new process get as they were."""
Key = tuple[int, str]
"""A variable: the object (or the namespace) that holds it, and what it is called there."""
Stored = dict[int, str]
"""Containers and tensors, by id, as they are called."""


class LoopCarried(NamedTuple):
    """Variables as they are written there; ``place`` is FILE:LINE of the loop, or of the body."""

    names: tuple[str, ...]
    place: str

    def told(self) -> str:
        """For people, whose training may not care."""
        some, left = ", ".join(self.names[:_TOLD]), len(self.names[_TOLD:])
        some += f" and {left} more (in events.jsonl)" if left else ""
        return (
            f"the code at {self.place} keeps {some} from step to step, and the Session does not know of it: a process "
            "that takes a rank's place begins anew there, and a step that runs again changes it twice. If the training "
            "depends on it, register it (docs/how-to/load-data.md, What is found of what flows). There may be more: "
            "`resilient-train drill` finds what differs"
        )


def loop_carried(
    frame: FrameType,
    known: Iterable[object],
    models: Iterable[object] = (),
    settled: Settled = (),
    loaders: Iterable[object] = (),
    *,
    each: bool = False,
    texts: Texts | None = None,
) -> LoopCarried | None:
    """Of the innermost loop that runs in ``frame`` (of ``each`` one); None if it keeps nothing, or its text can't be
    read. ``known`` objects, and what is written as theirs, are left out; so are ``models``, but for numbers in their
    attributes, which no ``state_dict()`` has, and which are not in ``settled``. ``loaders`` read what they reach.
    """
    found, texts = None, texts or Texts()
    loops, registered = loops_at(frame, texts), _Registered(known, models, settled, loaders)
    for loop in reversed(loops if each else loops[-1:]):
        flow = _Flow(_Scope(frame.f_code, frame.f_globals, variables(frame)), registered, texts)
        flow.behind = _names_behind(loop, frame, texts)
        found = and_also(found, _carried_by(loop, flow, frame.f_code.co_filename))
    return found


def _carried_by(loop: Loop, flow: _Flow, file: str) -> LoopCarried | None:
    return _told_of(flow, lambda: flow.run_loop(loop), f"{file}:{loop.lineno}")


def body_carried(
    body: Callable[..., Any],
    known: Iterable[object],
    models: Iterable[object] = (),
    settled: Settled = (),
    *,
    given: Mapping[str, Any] | None = None,
    texts: Texts | None = None,
) -> LoopCarried | None:
    """The same, of a function that is called for each step; what stands around it runs once. Of a library's trainer it
    is not the user's: then of what the models have for it. ``given``: what its parameters stand for in each call.
    """
    found = functions_of(body)
    for part in (part for model in models for part in all_parts(model)) if not found else ():
        found += [*hooks_of(part), *functions_of(held(part, _STEP), part), *functions_of(part)]
    if not found:
        return None
    code = found[0].function.__code__
    scope, registered = _Scope(code, found[0].function.__globals__, {}), _Registered(known, models, settled)
    flow = _Flow(scope, registered, texts or Texts(), given)
    return _told_of(flow, lambda: flow.follow(found), f"{code.co_filename}:{code.co_firstlineno}")


def and_also(found: LoopCarried | None, more: LoopCarried | None) -> LoopCarried | None:
    """Both, at the place of the first."""
    if found is None or more is None:
        return found or more
    return found._replace(names=tuple(dict.fromkeys((*found.names, *more.names))))


def leaves_out(thing: Any) -> bool:
    """Whether it holds what its ``state_dict()`` has not: a module's is torch's own, and so has no number of its
    attributes, or nothing is in it.
    """
    of_torch = type(held(thing, "_modules")) is dict and not functions_of(held(thing, "state_dict"))
    return of_torch or (held(thing, "state_dict") is not UNKNOWN and not thing.state_dict())


def given_names(thing: Any, texts: Texts) -> frozenset[str] | None:
    """The attributes that the text of its ``state_dict()`` names; None if it is not the user's, or may give others."""
    names = set[str]()
    for function, owner in functions_of(held(thing, "state_dict"), thing):
        code = function.__code__
        text = texts.function(code, function.__globals__)
        if text is None or owner is not thing or not code.co_argcount:
            return None
        itself = [each for each in ast.walk(text) if isinstance(each, ast.Name) and each.id == code.co_varnames[0]]
        found = [each for each in ast.walk(text) if isinstance(each, ast.Attribute) and each.value in itself]
        names |= {each.attr for each in found}
        calls_super = any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(text))
        if calls_super or len(found) < len(itself):  # vars(self)
            return None
    values = [held(thing, each) for each in names]
    odd = any(each is UNKNOWN or type(each) in (*FUNCTIONS, *PROPERTIES) for each in values) or "__dict__" in names
    return None if odd or not names else frozenset(names)


def given_by(thing: Any) -> list[object]:
    """The tensors and arrays that its ``state_dict()`` gives, not copies of them: it has them somewhere within."""
    return [*_arrays_in(thing.state_dict())] if held(thing, "state_dict") is not UNKNOWN else []


def _told_of(flow: _Flow, run: Callable[[], None], place: str) -> LoopCarried | None:
    try:
        run()
    except RecursionError:  # an expression of hundreds of parts
        return None
    names = flow.carried()
    return LoopCarried(tuple(sorted(names)), place) if names else None


def loops_at(frame: FrameType, texts: Texts) -> list[Loop]:
    """The loops that ``frame`` is in, the outermost first; none where its text can't be read."""
    tree = texts.tree(frame.f_code, frame.f_globals)
    if tree is None:
        return []
    scope = texts.function(frame.f_code, frame.f_globals) or tree
    around = [each for each in in_scope(scope) if isinstance(each, Loop) and lasts_at(each, frame.f_lineno or 0)]
    return sorted(around, key=lambda loop: loop.lineno)


def _names_behind(loop: Loop, frame: FrameType, texts: Texts) -> set[str]:
    tree = texts.function(frame.f_code, frame.f_globals) or texts.tree(frame.f_code, frame.f_globals)
    behind = (each for each in in_scope(tree) if getattr(each, "lineno", 0) > (loop.end_lineno or 0)) if tree else ()
    return {name for each in behind if isinstance(getattr(each, "ctx", None), ast.Load) and (name := _name_of(each))}


def in_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """What runs where it runs: without the functions and classes that are defined there."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _SCOPES):
            yield from in_scope(child)


def lasts_at(loop: Loop, line: int) -> bool:
    """Whether it is in the loop."""
    return loop.lineno <= line <= (loop.end_lineno or loop.lineno)


def _name_of(node: ast.AST) -> str:
    """As it is written; empty if it is not the same place each time."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            base = _name_of(node.value)
            return base and f"{base}.{node.attr}"
        case ast.Subscript(slice=(ast.Constant() | ast.Name() | ast.Attribute()) as key):
            return _entry(node.value, key)
        case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
            base = _name_of(of)
            return base and f"{base}.{attribute}"
        case _:
            return ""


def _entry(node: ast.AST, key: ast.AST) -> str:
    base = _name_of(node)
    return base and f"{base}[{ast.unparse(key)}]"


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or any(held(value, verb) is not UNKNOWN for verb in _OF_ARRAYS)


def _is_array(value: object) -> bool:
    return any(held(value, verb) is not UNKNOWN for verb in _OF_ARRAYS)


def _can_change(value: object) -> bool:
    return type(value) in _CONTAINERS or _is_array(value)


def _arrays_in(value: Any) -> Iterator[object]:
    """Tensors and arrays; of containers those in them, three deep, as far as is soon told: they may hold millions."""
    todo, left = deque([(value, 3)]), _LOOKED_AT
    while todo and left:
        each, depth = todo.popleft()
        left -= 1
        if type(each) not in _PLAIN and _is_array(each):
            yield each
        elif depth and isinstance_past(each, (dict,)):
            todo.extend((item, depth - 1) for item in islice(dict.values(each), left))
        elif depth and type(each) in (list, tuple):
            todo.extend((item, depth - 1) for item in islice(each, left))


class _Registered:
    """What the Session carries, and what it leaves to the script. ``loaders``: what they reach is read each step."""

    def __init__(
        self, known: Iterable[object], models: Iterable[object], settled: Settled, loaders: Iterable[object] = ()
    ) -> None:
        known, settled = [*known], [*settled]
        # What a registered object holds is its own, also where the loop has another name for it.
        known += [part for each in known for part in attributes_of(each).values() if _can_change(part)]
        # And what of an object comes back is its own, all of it.
        given = [each for part, names in settled for each in (held(part, name) for name in names)]
        known += [each for each in given if _can_change(each) or _is_object(each)]
        dicts = [each for each in given if isinstance_past(each, (dict,))]
        known += [value for each in dicts for value in dict.values(each) if _is_object(value)]
        self._kept = [*known, *(part for part, _ in settled)]  # or an id may become another's
        self.read = set[int]()
        """Elsewhere."""
        self.add_loaders(loaders)
        self._settled = {id(part): names for part, names in settled}
        self._known = {id(each) for each in known}
        self._parts = set[int]()
        for part in (part for model in models for part in all_parts(model)):
            (self._known if self._gives_itself(part) else self._parts).add(id(part))
            for tensors in (held(part, name) for name in _TENSORS):
                if type(tensors) is dict:
                    self._kept += tensors.values()
                    self._known |= {id(each) for each in tensors.values() if each is not None}

    def _gives_itself(self, part: Any) -> bool:
        """Whether a module publishes something of which nobody can tell what it is; else what it is, is settled."""
        if not functions_of(held(part, "get_extra_state")):
            return False
        given = part.get_extra_state()
        if not isinstance(given, Mapping):  # the attributes that it is made of are settled, if that can be told
            return not (type(given) in (tuple, list) or _is_array(given))
        self._settled[id(part)] = {*self._settled.get(id(part), ()), *map(str, given)}
        values = [each for each in given.values() if _can_change(each)]
        self._kept += values
        self._known |= set(map(id, values))
        return False

    def add_loaders(self, loaders: Iterable[object]) -> None:
        reached = reached_from(loaders)
        self._kept += reached
        self.read |= set(map(id, reached))

    def has(self, path: Sequence[Any], name: str) -> bool:
        """``path``: an object, what its attribute is, and so on, as far as they are known; ``name``: of all of it."""
        if len(path) > 1 and _parts(name)[len(path) - 1] in self._settled.get(id(path[-2]), ()):
            return True
        if any(id(each) in self._known for each in path):
            return True
        of_models = any(id(each) in self._parts for each in path)
        return of_models and not (_is_plain(path[-1]) or moves_when_used(path[-1]) or any(map(counts_for_itself, path)))


class _Scope:
    """Where names are looked up: in the loop's own function, or in one that it calls."""

    def __init__(self, code: CodeType, names: dict[str, Any], values: dict[str, Any]) -> None:
        self.globals, self.values, self.where = names, values, ""
        self.first = code.co_varnames[0] if code.co_argcount else ""
        its_own = (*code.co_varnames, *code.co_cellvars, *code.co_freevars) if code.co_flags & CO_OPTIMIZED else ()
        self._holders = dict.fromkeys(its_own, id(self))

    @classmethod
    def of_call(cls, called: CalledFunction, given: Mapping[str, Any], around: _Scope) -> _Scope:
        """``given``: what parameters stand for, as far as that is known."""
        function, code = called.function, called.function.__code__
        values = {**function.__globals__, **dict.fromkeys((*code.co_varnames, *code.co_cellvars), UNKNOWN), **given}
        made = cls(code, function.__globals__, values)
        made.where = f" in {function.__qualname__.rpartition('<locals>.')[2]}"
        for name, cell in cells(function):
            values[name] = value = contents(cell)
            # A variable of the loop's own function is the same one in a function within it.
            same = name in around._holders and around.values.get(name, UNKNOWN) is value
            made._holders[name] = around._holders[name] if same else id(cell)
        return made

    def path(self, name: str) -> list[Any]:
        """What the name stands for, attribute by attribute, as far as that is known."""
        found, (first, *others) = list[Any](), _parts(name)
        value = self.values.get(first, UNKNOWN)
        while value is not UNKNOWN:
            found.append(value)
            if not others:
                break
            part = others.pop(0)
            value = _at(value, part) if part.startswith("[") else held(value, part)
        return found

    def key(self, name: str) -> Key:
        """By the object that holds it, so that two names of one variable have one."""
        first, *others = _parts(name)
        known = self.path(name)[: len(others)]
        if not known:
            return self._holders.get(first, id(self.globals)), name
        return id(known[-1]), ".".join(others[len(known) - 1 :])

    def of_bases(self, verb: str) -> list[CalledFunction]:
        """What ``super().verb`` is in this method."""
        owner, kind = self.values.get(self.first, UNKNOWN), self.values.get("__class__", UNKNOWN)
        return functions_of(held_behind(owner, kind, verb), owner)

    def is_whole(self, name: str) -> bool:
        """Whether it is known what the whole name stands for."""
        return len(self.path(name)) == len(_parts(name))


def _at(value: Any, entry: str) -> Any:
    """``entry``: ``['c']``. UNKNOWN: it has none, or which one is not written there."""
    try:
        key = ast.literal_eval(entry[1:-1])
        if isinstance_past(value, (dict,)):
            return dict.get(value, key, UNKNOWN)
        return value[key] if type(value) in (list, tuple) and type(key) is int else UNKNOWN
    except (ValueError, SyntaxError, TypeError, IndexError):
        return UNKNOWN


def _parts(name: str) -> list[str]:
    """``a.b['c'].d``: a, b, ['c'], d."""
    return [each for each in re.split(r"\.(?![^\[]*\])|(?=\[)", name) if each]


class _Flow:
    """One pass over the loop's body, from its begin to its end, and over that of what it calls."""

    def __init__(
        self, scope: _Scope, registered: _Registered, texts: Texts, handed: Mapping[str, Any] | None = None
    ) -> None:
        self._scope, self._registered, self._texts = scope, registered, texts
        self._handed = handed or {}
        """To the outermost function."""
        self._statements = 0
        """Read so far."""
        self.behind: set[str] = set()
        """Names that are read when the loop is over."""
        self._first: dict[Key, str] = {}
        """In order, what is read where this pass may not have written it; as it is called there."""
        self._written = set[Key]()
        self._changed: dict[Key, str] = {}
        """Parts of objects of before, by ``+=``; and what moves when it is used."""
        self._filled: dict[int, str] = {}
        """Containers and tensors of before, by id, that it changes in place."""
        self._used = set[int]()
        """Objects of which it reads something."""
        self._sure = set[Key]()
        """What this pass has written, on each way to here."""
        self._called: list[_Scope] = []
        """Of all functions so far: their ids are in keys."""
        self._running: list[CodeType] = []
        self._ends = list[set[Key]]()
        """What was sure at each ``return`` of the function that runs."""
        self._stands_for: dict[Key, Stored] = {}
        """Variables of this pass that are tensors of before, or in containers of before."""
        self._bound = set[Key]()
        """Variables of this pass that are other objects of before, which their scope has."""
        self._may_be: dict[Key, list[Any]] = {}
        """Variables of this pass that are one of these."""
        self._set: dict[Key, str] = {}
        """Attributes that it sets, of objects that others read: torch's own modules, and what a loader reaches."""

    def carried(self) -> list[str]:
        """What this pass reads before it writes it, and what it changes; what grows and nobody reads is for people."""
        inner = {id(each) for each in self._called}
        kept = {key: name for key, name in self._first.items() if key in self._written}
        names = [name for key, name in {**self._changed, **kept}.items() if key[0] not in inner]
        entries = {each.partition("[")[0] + each.rpartition("]")[2] for each in names if "[" in each}
        read = self._used | self._registered.read | self._read_behind()
        filled = [each for key, each in self._filled.items() if key in read and each not in entries]
        now_and_then = [each for key, each in self._set.items() if key not in self._sure]
        return list(dict.fromkeys([*names, *filled, *now_and_then]))

    def _read_behind(self) -> set[int]:
        """Containers that it fills with tensors or arrays, and whose names are read behind the loop."""
        paths = (self._scope.path(name) for name in self.behind)
        return {id(path[-1]) for path in paths if path and next(_arrays_in(path[-1]), None) is not None}

    def run_loop(self, loop: Loop) -> None:
        if isinstance(loop, ast.While):
            self._read(loop.test)
        else:
            names = filter(None, map(_name_of, ast.walk(loop.iter)))
            through = [self._scope.path(name)[-1] for name in names if self._scope.is_whole(name)]
            self._registered.add_loaders(each for each in through if held(each, "dataset") is not UNKNOWN)
            self._write(loop.target)
        self._run(loop.body)

    def _run(self, body: Sequence[ast.stmt]) -> bool:
        """False: it does not come to its end."""
        return all(self._statement(each) for each in body)

    def _statement(self, node: ast.stmt) -> bool:
        self._statements += 1
        match node:
            case ast.Assign():
                self._read(node.value)
                self._assign(node.targets, node.value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._read(node.value)
                    self._write(node.target)
            case ast.AugAssign():
                self._read(node.value)
                self._change(node.target)
            case ast.For() | ast.AsyncFor():
                self._read(node.iter)
                self._assign([node.target], node.iter)
                self._for_each(node.target, node.iter, lambda: self._run(node.body))
                self._branches(node.orelse, [])
            case ast.While():
                self._read(node.test)
                self._branches(node.body, [])
                self._branches(node.orelse, [])
            case ast.If():
                self._read(node.test)
                return self._branches(node.body, node.orelse)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._read(item.context_expr)
                    self._enter(item.context_expr)
                    self._write(*filter(None, [item.optional_vars]))
                return self._run(node.body)
            case ast.Try() | ast.TryStar():
                ways = [[*node.body, *node.orelse], *(handler.body for handler in node.handlers)]
                comes = self._branches(*ways)
                return self._run(node.finalbody) and comes
            case ast.Match():
                self._read(node.subject)
                return self._branches(*(case.body for case in node.cases), [])
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self._wrote(node.name)
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self._wrote(alias.asname or alias.name.partition(".")[0])
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Subscript) and _is_whole(target.slice) and _name_of(target.value):
                        self._sure.add(self._scope.key(_name_of(target.value)))
            case ast.Return():
                self._read(node)
                self._ends.append(self._sure)
                return False
            case _:
                self._read(node)
                return not isinstance(node, (ast.Raise, ast.Break, ast.Continue))
        return True

    def _enter(self, node: ast.AST) -> None:
        """Objects of before may count how often they are entered."""
        name = _name_of(node)
        if name and self._scope.is_whole(name) and not self._is_sure(name):
            value = self._scope.path(name)[-1]
            for verb in ("__enter__", "__exit__"):
                self.follow(functions_of(held(value, verb), value))

    def _branches(self, *ways: Sequence[ast.stmt]) -> bool:
        """Sure is behind them what all have written that come to their end."""
        before, ends = self._sure, list[set[Key]]()
        for way in ways:
            self._sure = set(before)
            if self._run(way):
                ends.append(self._sure)
        self._sure = set.intersection(*ends) if ends else before
        return bool(ends)

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.NamedExpr):
            self._read(node.value)
            self._write(node.target)
            return
        if isinstance(node, _SCOPES):
            return
        if isinstance(node, _COMPREHENSIONS):
            self._read_comprehension(node)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._begins_anew(node.func):
            for child in (*node.args, *node.keywords):
                self._read(child)
            self._wrote(self._written_by(node.func.value))
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._fills(node.func):
            named = self._written_by(node.func.value)
            for child in (*([] if named else [node.func.value]), *node.args, *node.keywords):
                self._read(child)
            return
        if name := _name_of(node):
            self._reads(name)
        match node:
            case ast.Call(args=[of, ast.Constant(value=str(attribute)), value]) if _name_of(node.func) in _SETS:
                self._read(value)
                self._write(ast.Attribute(of, attribute))
                return
        whole, part = _written_arguments(node) if isinstance(node, ast.Call) else (None, None)
        for child in ast.iter_child_nodes(node):
            if child is not whole and (not name or (isinstance(node, ast.Subscript) and child is node.slice)):
                self._read(child)
        if isinstance(node, ast.Call):
            self._call(node)
        if whole is not None:
            name = self._written_by(whole.value if isinstance(whole, ast.keyword) else whole)
            if name and not self._stored(name):
                self._wrote(name)
        if part is not None and self._kept_in(name := self._written_by(part)):
            self._fill(name, of_tensor=True)

    def _read_comprehension(self, node: ast.AST) -> None:
        """Its own variables are new each time."""
        targets = [
            part for each in ast.walk(node) if isinstance(each, ast.comprehension) for part in ast.walk(each.target)
        ]
        before = set(self._sure)
        self._sure |= {self._scope.key(each.id) for each in targets if isinstance(each, ast.Name)}
        for each in ast.walk(node):
            if isinstance(each, ast.comprehension):
                self._stands_for.update(self._standing(each.target, each.iter))
        first = next(each for each in ast.walk(node) if isinstance(each, ast.comprehension))
        self._for_each(first.target, first.iter, lambda: self._read_parts(node))
        self._sure = before

    def _read_parts(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._read(child)

    def _for_each(self, target: ast.AST, iterable: ast.AST, run: Callable[[], object]) -> None:
        """What a ``for`` does: once for each kind of object that it is known to go through, else once."""
        known = [bound for row in self._rows(iterable) if (bound := _bindings(target, row))]
        kinds = {tuple(map(_kind, bound.values())): bound for bound in known}
        if not kinds or self._statements > _STATEMENTS_MAX:
            run()  # once at least: parts of a batch, as a rule
            return
        before = {name: self._scope.values.get(name, UNKNOWN) for bound in kinds.values() for name in bound}
        for bound in kinds.values():
            self._bind(bound)
            run()
        self._scope.values.update(before)
        self._bound -= {self._scope.key(name) for name in before}

    def _bind(self, variables: Mapping[str, Any]) -> None:
        self._scope.values.update(variables)
        self._bound |= {self._scope.key(name) for name in variables}

    def _rows(self, iterable: ast.AST) -> list[Any]:
        """What a loop over it goes through, as far as that is known; UNKNOWN for what is not."""
        match iterable:
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]):
                return [(UNKNOWN, row) for row in self._rows(of)]
            case ast.Call(func=ast.Name(id="zip"), args=each):
                columns = [self._rows(one) for one in each]
                length = max(map(len, columns), default=0)
                return [*zip(*(column or [UNKNOWN] * length for column in columns), strict=False)]
            case ast.Call(func=ast.Attribute(value=of, attr="items")):
                return [(UNKNOWN, value) for value in self._held_in(of)]
            case ast.Call(func=ast.Attribute(value=of, attr="values")):
                return self._held_in(of)
            case ast.Call(func=ast.Name(id=kind), args=[of, *_]) if kind in _ITERABLES:
                return self._rows(of)
            case ast.Subscript(value=of) | ast.Call(func=ast.Attribute(value=of, attr="get")):  # of handlers, by event
                lists = [each for each in self._held_in(of) if type(each) in (list, tuple)]
                return [value for each in lists for value in each][:_ELEMENTS] or self._held_in(iterable, dicts=False)
        return self._held_in(iterable, dicts=False)

    def _held_in(self, node: ast.AST, *, dicts: bool = True) -> list[Any]:
        """What a list, a tuple or a dict of before has in it."""
        name = _name_of(node)
        path = self._scope.path(name) if name else []
        if not path or len(path) < len(_parts(name)) or self._is_sure(name) or self._registered.has(path, name):
            return []
        if isinstance_past(path[-1], (dict,)):
            return [*islice(dict.values(path[-1]), _ELEMENTS)] if dicts else []
        return [*islice(path[-1], _ELEMENTS)] if type(path[-1]) in (list, tuple, set, deque) else []

    def _objects_in(self, node: ast.AST) -> list[Any]:
        """The objects of the user's among it, one of each kind."""
        return [*{_kind(each): each for each in self._held_in(node) if _is_object(each)}.values()]

    def _reads(self, name: str) -> None:
        """``a.b`` reads ``a`` as well."""
        if self._is_sure(name):
            return
        path = self._scope.path(name)
        self._used.update(map(id, path))
        for length, each in enumerate(_prefixes(name), 1):
            if not self._registered.has(path[:length], each) and self._scope.key(each) not in self._bound:
                self._first.setdefault(self._scope.key(each), each + self._scope.where)
                if length <= len(path) and moves_when_used(path[length - 1]):
                    self._changed.setdefault(self._scope.key(each), each + self._scope.where)
        if len(path) > 1 and type(path[-1]) in PROPERTIES:
            self.follow(functions_of(path[-1], path[-2]))

    def _is_sure(self, name: str) -> bool:
        keys = map(self._scope.key, _prefixes(name))
        return any(key in self._sure and key not in self._bound for key in keys)

    def _assign(self, targets: Iterable[ast.AST], value: ast.AST) -> None:
        """And what they stand for then."""
        standing = {key: each for target in targets for key, each in self._standing(target, value).items()}
        one, some = self._known(value), self._one_of(value)
        self._write(*targets)
        self._stands_for.update(standing)
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if one is not UNKNOWN:
            self._bind(dict.fromkeys(names, one))
        elif some:
            self._may_be.update({self._scope.key(name): some for name in names})

    def _known(self, node: ast.AST) -> Any:
        """The object of before that an expression is."""
        name = _name_of(node)
        path = self._scope.path(name) if name and not self._is_sure(name) and self._scope.is_whole(name) else []
        return path[-1] if path and _is_object(path[-1]) else UNKNOWN

    def _one_of(self, node: ast.AST) -> list[Any]:
        """The objects of before of which an expression is one."""
        match node:
            case ast.IfExp(body=one, orelse=other):
                return [each for each in map(self._known, (one, other)) if each is not UNKNOWN]
            case ast.Subscript(value=of) | ast.Call(func=ast.Attribute(value=of, attr="get")):
                return self._objects_in(of)
            case ast.Name(id=name):
                return self._may_be.get(self._scope.key(name), [])
        return []

    def _standing(self, target: ast.AST, value: ast.AST) -> dict[Key, Stored]:
        """Variables that are what ``value`` is, or something in it, if that is an array, or holds some."""
        pairs: list[tuple[ast.AST, ast.AST]]
        match target, value:
            case ast.Tuple(elts=parts), ast.Call(func=ast.Name(id="zip"), args=each):
                pairs = [*zip(parts, each, strict=False)]
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]):
                pairs = [(part, of)]
            case ast.Tuple(elts=[_, part]), ast.Call(func=ast.Attribute(value=of, attr="items")):
                pairs = [(part, of)]
            case _, ast.Call(func=ast.Attribute(value=of, attr="values")):
                pairs = [(target, of)]
            case _, ast.Call(func=ast.Name(id=kind), args=[of, *_]) if kind in _ITERABLES:
                pairs = [(target, of)]
            case ast.Tuple(elts=parts), ast.Tuple(elts=each):
                pairs = [*zip(parts, each, strict=False)]
            case ast.Tuple(elts=parts), _:
                pairs = [(part, value) for part in parts]
            case ast.Name(id=name), _:
                stored = self._stored_by(value)
                return {self._scope.key(name): stored} if stored else {}
            case _:
                return {}
        return {key: each for pair in pairs for key, each in self._standing(*pair).items()}

    def _stored_by(self, node: ast.AST) -> Stored:
        """The tensor or the container of before that an expression is, or has it from; empty: none that is known."""
        while isinstance(node, ast.Subscript):
            node = node.value
        name = self._written_by(node)
        if not name or self._stored(name):
            return self._stored(name)
        container = _container(name)
        path = self._scope.path(container)
        if self._is_sure(container) or len(path) < len(_parts(container)) or self._registered.has(path, container):
            return {}
        loose = any(not self._registered.has([each], container) for each in _arrays_in(path[-1]))
        return {id(path[-1]): container + self._scope.where} if loose else {}

    def _stored(self, name: str) -> Stored:
        """What a variable of this pass stands for, and what is in it."""
        return self._stands_for.get(self._scope.key(_parts(name)[0]), {}) if name else {}

    def _written_by(self, node: ast.AST) -> str:
        """The name of what is changed where ``node`` is changed in place: of a view, what that is a view of."""
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr=verb)) if verb in _VIEWS:
                return self._written_by(of)
            case ast.Attribute(value=of, attr=part) if part in _VIEWS and self._kept_in(inner := self._written_by(of)):
                return inner
        return _name_of(node)

    def _write(self, *targets: ast.AST) -> None:
        for target in targets:
            match target:
                case ast.Subscript(value=of) if stored := self._stored(_name_of(of)):
                    self._read(target.slice)
                    if not _is_whole(target.slice):
                        self._filled = {**stored, **self._filled}
                case ast.Tuple() | ast.List():
                    self._write(*target.elts)
                case ast.Starred():
                    self._write(target.value)
                case ast.Subscript() if _is_whole(target.slice) and (name := _name_of(target.value)):
                    self._wrote(name)
                case ast.Subscript() if not isinstance(target.slice, ast.Constant) and _name_of(target.value):
                    self._read(target.slice)
                    self._fill(_name_of(target.value))
                    if name := _name_of(target):
                        self._wrote(name)
                case _ if name := _name_of(target):
                    self._wrote(name)
                case _:
                    self._read(target)

    def _wrote(self, name: str) -> None:
        key = self._scope.key(name)
        if "." in name and not self._is_sure(name) and self._is_read_by_others(name):
            self._set.setdefault(key, name + self._scope.where)
        self._written.add(key)
        self._sure.add(key)
        self._bound.discard(key)
        self._may_be.pop(key, None)
        self._stands_for.pop(key, None)

    def _is_read_by_others(self, attribute: str) -> bool:
        """Whether it is one of an object whose text is not the user's, or that a loader reaches."""
        *path, last = _parts(attribute)
        owner = self._scope.path(".".join(path).replace(".[", "["))
        if len(owner) < len(path) or last.startswith("["):
            return False
        of_library = type(held(owner[-1], _MODULES)) is dict and not functions_of(owner[-1])
        if not of_library and id(owner[-1]) not in self._registered.read:
            return False
        return not self._registered.has([*owner, held(owner[-1], last)], attribute)

    def _change(self, target: ast.AST) -> None:
        """``target += ...``."""
        name = _name_of(target)
        if self._stored(name):
            self._fill(name, of_tensor=True)
            return
        if isinstance(target, ast.Name):
            self._reads(name)
            self._wrote(name)
            return
        told = name or ast.unparse(target)
        if not self._is_sure(told):
            self._read(target)
            if not self._registered.has(self._scope.path(told), told):
                self._changed.setdefault(self._scope.key(told), told + self._scope.where)

    def _kept_in(self, name: str) -> list[Any]:
        """The path to the container or the tensor that it stands for, or is in; empty: it is none, or not known."""
        if stored := self._stored(name):
            return [*stored]
        path = self._scope.path(_container(name)) if name else []
        if not path or len(path) < len(_parts(_container(name))):
            return []
        array = any(held(path[-1], verb) is not UNKNOWN for verb in _OF_ARRAYS)
        return path if array or isinstance_past(path[-1], _CONTAINERS) else []

    def _begins_anew(self, method: ast.Attribute) -> bool:
        name = self._written_by(method.value)
        if method.attr in _SEEDS:
            path = self._scope.path(name) if name else []
            return bool(path) and len(path) == len(_parts(name)) and moves_when_used(path[-1])
        return method.attr in _ANEW and "[" not in name and bool(self._kept_in(name))

    def _fills(self, method: ast.Attribute) -> bool:
        """Whether a call of it changes something in place, and gives nothing of it."""
        name, verb = self._written_by(method.value), method.attr
        if isinstance(method.value, ast.Subscript) and self._objects_in(method.value.value):
            return False
        of_tensor = verb.endswith("_") and not verb.startswith("_")
        if not self._kept_in(name) or not (of_tensor or verb in _CHANGES or verb in _TAKES):
            return False
        if of_tensor or not self._stored(name):
            self._fill(name, of_tensor=of_tensor)
        return verb not in _TAKES

    def _fill(self, name: str, *, of_tensor: bool = False) -> None:
        """What that name stands for, or the container that has it, is changed in place. ``of_tensor``: it is no list
        for people, so it is read behind the loop, if not in it.
        """
        filled = self._stored(name)
        container = _container(name)
        path = self._scope.path(container)
        whole = len(path) == len(_parts(container))
        if not filled and whole and not self._is_sure(name) and not self._registered.has(path, container):
            filled = {id(path[-1]): container + self._scope.where}
        self._filled = {**filled, **self._filled}
        self._used.update(filled if of_tensor else ())

    # -- what is called

    def _call(self, node: ast.Call) -> None:
        name, scope = _name_of(node.func), self._scope
        match node:
            case ast.Call(func=ast.Attribute(value=held_by, attr=verb), args=[key, *_]) if verb in _READS_ENTRY:
                if entry := _entry(held_by, key):
                    self._reads(entry)
        known = bool(name) and scope.is_whole(name)
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr=verb):
                self.follow(scope.of_bases(verb), node)
            case ast.Call(func=ast.Name(id="getattr"), args=[of, *_]) if not known:
                self.follow(methods_of(self._known(of)))
            case ast.Attribute(value=of, attr=verb) if not known or self._is_sure(name):
                for each in self._one_of(of):
                    self.follow(functions_of(held(each, verb), each), node)
            case ast.Name() | ast.Subscript() if not known or self._is_sure(name):
                for each in self._one_of(node.func):
                    self.follow(functions_of(each), node)
        if known:
            *around, value = scope.path(name)
            owner = around[-1] if around else UNKNOWN
            if isinstance(node.func, ast.Name) and type(value) is BuiltinMethodType and value.__name__ in _CHANGES:
                self._filled.setdefault(id(value.__self__), name + scope.where)  # push = losses.append
            called = functions_of(value, owner)
            if self._is_sure(name):  # by now it is another object, of the same class
                called = [CalledFunction(each.function) for each in called]
            self.follow(called, node)
            if name.endswith(".apply") and is_class(owner):  # autograd's functions
                self.follow(each for verb in _OF_AUTOGRAD for each in functions_of(held(owner, verb)))
            for part in all_parts(value):
                self.follow([*hooks_of(part), *(functions_of(part) if part is not value else ())])
            if name.endswith(".step"):
                self.follow(hooks_of(owner))
        for argument in (*node.args, *(each.value for each in node.keywords)):  # an optimizer's closure, for instance
            given = _name_of(argument)
            if given and scope.is_whole(given):
                *around, value = scope.path(given)
                owner = around[-1] if around else UNKNOWN
                self.follow(functions_of(value, owner) if type(value) in FUNCTIONS else ())
                self.follow(steps_of(value) if name.endswith(".step") else ())  # a scaler's

    def follow(self, called: Iterable[CalledFunction], node: ast.Call | None = None) -> None:
        """As if their texts stood here; ``node`` calls them, or it is not known how they are called."""
        for each in called:
            code = each.function.__code__
            found = self._texts.function(code, each.function.__globals__)
            if found is not None and code not in self._running and len(self._called) < _CALLS_MAX:
                self._run_function(each, found, node)

    def _run_function(self, called: CalledFunction, text: Function, node: ast.Call | None) -> None:
        code, before = called.function.__code__, (self._scope, self._ends)
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = self._given(called, code, node)
        self._scope, self._ends = _Scope.of_call(called, given, self._scope), []
        self._called.append(self._scope)
        self._running.append(code)
        self._sure |= {self._scope.key(each) for each in parameters if each not in given}
        if self._run(text.body):
            self._ends.append(self._sure)
        if self._ends:
            self._sure = set.intersection(*self._ends)
        self._running.pop()
        self._scope, self._ends = before

    def _given(self, called: CalledFunction, code: CodeType, node: ast.Call | None) -> dict[str, Any]:
        """What its parameters stand for, where an object with a name is handed over."""
        names = list(code.co_varnames[: code.co_argcount])
        defaults = called.function.__defaults__ or ()
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        given |= called.function.__kwdefaults__ or {}
        if called.owner is not UNKNOWN and names:
            given[names.pop(0)] = called.owner
        if node is None:
            return given if self._running else {**given, **self._handed}
        handed = [*zip(names, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
        for parameter, argument in handed:
            name = _name_of(argument)
            if not parameter:  # **settings
                continue
            given.pop(parameter, None)
            if name and self._scope.is_whole(name) and not self._is_sure(name):
                given[parameter] = self._scope.path(name)[-1]
        return given


def _bindings(target: ast.AST, value: Any) -> dict[str, Any]:
    """The variables of ``target`` that are objects of the user's, where it is given ``value``."""
    match target:
        case ast.Name(id=name) if _is_object(value):
            return {name: value}
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if type(value) in (tuple, list) and len(value) == len(parts):
            return {key: each for pair in zip(parts, value, strict=True) for key, each in _bindings(*pair).items()}
    return {}


def _is_object(value: Any) -> bool:
    return value is not None and value is not UNKNOWN and not _is_plain(value)


def _kind(value: Any) -> object:
    """Two of one kind run the same text."""
    return type(value), *(each.function.__code__ for each in functions_of(value))


def _is_whole(part: ast.expr) -> bool:
    """``[:]`` and ``[...]``."""
    match part:
        case ast.Slice(lower=None, upper=None, step=None) | ast.Constant(value=EllipsisType()):
            return True
    return False


def _written_arguments(node: ast.Call) -> tuple[ast.AST | None, ast.AST | None]:
    """What a function writes to: all of it (``out=``), and in place each tensor of it."""
    verb, first = _name_of(node.func).rpartition(".")[2], next(iter(node.args), None)
    begin, end = _FOR_EACH
    out = next((each for each in node.keywords if each.arg == "out"), None)
    part = verb in _IN_PLACE or (verb.startswith(begin) and verb.endswith(end))
    return out or (first if verb == "copyto" else None), first if part else None


def _container(name: str) -> str:
    """``a.b[k].c``: a.b."""
    return name.partition("[")[0]


def _prefixes(name: str) -> list[str]:
    """``a.b[0]``: a, a.b, a.b[0]."""
    found = ""
    every = []
    for part in _parts(name):
        found += part if not found or part.startswith("[") else f".{part}"
        every.append(found)
    return every
