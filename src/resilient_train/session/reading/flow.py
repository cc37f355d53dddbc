"""One pass over the text of a loop's body: what it reads before it writes it, and what it changes in place."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from types import BuiltinMethodType, CodeType, MethodType
from typing import Any

from resilient_train.session.reading.known_objects import KnownObjects
from resilient_train.session.reading.names import (
    SCOPES,
    Loop,
    container_of,
    entry_of,
    is_all,
    name_of,
    prefixes,
    split_name,
)
from resilient_train.session.reading.scope import Key, Scope
from resilient_train.session.reading.static_lookup import (
    CONTAINERS,
    FUNCTIONS,
    MODULES,
    OF_ARRAYS,
    PROPERTIES,
    UNKNOWN,
    CalledFunction,
    Function,
    Texts,
    all_parts,
    arrays_in,
    functions_of,
    held,
    hooks_of,
    is_array,
    is_class,
    is_module_container,
    is_object,
    isinstance_past,
    kind_of,
    methods_of,
    moves_when_used,
    steps_of,
)
from resilient_train.session.step import Step, Steps

_CALLS_MAX = 500
"""Of functions that are followed; there is no end to what two that call each other do."""
_OF_AUTOGRAD = ("forward", "setup_context", "backward")
_ELEMENTS = 16
"""Of a list of objects that are called or changed: their classes are few."""
_MANY = 10_000
"""No model has so many parameters: what has more entries is not looked at, each by each."""
_STATEMENTS_MAX = 5000
"""Behind so many a ``for`` is read once: loops in loops over objects of many classes."""
_CHANGES = ("append", "appendleft", "extend", "extendleft", "insert", "add", "update", "remove", "discard", "clear",
            "move_to_end", "rotate", "reverse", "sort", "put", "itemset", "partition")  # fmt: skip
_MODULE_CHANGES = ("append", "extend", "insert", "pop", "update", "clear", "add_module", "register_module")
"""Of torch's modules that hold others, or parameters."""
_ANEW = ("clear", "zero_", "fill_", "copy_", "fill", "normal_", "uniform_", "bernoulli_", "random_",
         "exponential_")  # fmt: skip
"""What was in it before is gone."""
_SEEDS = ("seed", "manual_seed")
"""And so it is of a generator of random numbers."""
_VIEWS = ("data", "T", "mT", "H", "real", "imag", "detach", "view", "view_as", "flatten", "squeeze", "unsqueeze", "t",
          "transpose", "permute", "narrow", "select")  # fmt: skip
"""Of a tensor: what is written there is written to it."""
_PARTS = ("real", "imag", "narrow", "select")
"""And not to all of it."""
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
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MAPS = ("map", "filter", "starmap", "takewhile", "dropwhile", "filterfalse", "accumulate")
"""In the head of a loop these call what they are given once for each pass."""
_EACH = "[each]"
"""All tensors of a container: a key of what is sure."""
Stored = dict[int, str]
"""Containers and tensors, by id, as they are called."""


class Flow:
    """One pass over the loop's body, from its begin to its end, and over that of what it calls."""

    def __init__(
        self, scope: Scope, registered: KnownObjects, texts: Texts, handed: Mapping[str, Any] | None = None
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
        self._in_part = set[int]()
        """Tensors of before of which a variable of this pass is a part."""
        self._anew: Stored = {}
        """Containers of before in which it has written a tensor as a whole, by another name of that."""
        self._anew_first = set[int]()
        """Those of which it is so before this pass does anything else."""
        self._has_begun = False
        self._comes_to_each = False
        """The innermost loop in which it is goes through all of what it goes through."""
        self._touched = set[int]()
        """Containers of before of whose tensors it reads something where it may not have written all of them so."""
        self._late = set[int]()
        """Containers of before that a call is given, of which no text has told yet what is read of them."""
        self._used = set[int]()
        """Objects of which it reads something."""
        self._sure = set[Key]()
        """What this pass has written, on each way to here."""
        self._called: list[Scope] = []
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
        again = {key: each for key, each in self._anew.items() if key in self._touched}
        filled = [each for key, each in {**self._filled, **again}.items() if key in read and each not in entries]
        now_and_then = [each for key, each in self._set.items() if key not in self._sure]
        unknown = (each for each in sorted(self.behind) if not self._registered.has(self._scope.path(each), each))
        behind = {self._scope.key(each): each for each in unknown}
        now_and_then += [each for key, each in behind.items() if key in self._written and key not in self._sure]
        return list(dict.fromkeys([*names, *filled, *now_and_then]))

    def seen(self) -> set[Key]:
        """What this pass has seen to be written, in the order of the text; of a container its id alone.

        Those whose tensors it writes as a whole count where a step begins so: else somebody may read them first whom
        this text does not name (a function in a function, another name of one of them).
        """
        keys = {*self._written, *self._changed, *self._set}
        code = id(self._scope.code)
        own = {(code if holder == id(self._scope) else holder, name) for holder, name in keys}
        return own | {(container, "") for container in (*self._filled, *self._anew_first)}

    def _read_behind(self) -> set[int]:
        """Containers whose names are read behind the loop."""
        return {id(path[-1]) for path in map(self._scope.path, self.behind) if path}

    def run_loop(self, loop: Loop) -> None:
        if isinstance(loop, ast.While):
            self._read(loop.test)
        else:
            self._go_through(loop.iter)
            self._write(loop.target)
        self._run(loop.body)

    def _go_through(self, iterable: ast.AST) -> None:
        """What stands in the head of the loop: loaders reach what a step reads, and of iterators it takes one."""
        names = list(dict.fromkeys(filter(self._scope.is_whole, filter(None, map(name_of, ast.walk(iterable))))))
        through = {name: self._scope.path(name)[-1] for name in names}
        self._registered.add_loaders(each for each in through.values() if held(each, "dataset") is not UNKNOWN)
        for call in ast.walk(iterable):
            if isinstance(call, ast.Call) and name_of(call.func).rpartition(".")[2] in _MAPS:
                self._follow_given(call)
            if isinstance(call, ast.Call) and name_of(call.func) == "zip" and any(map(self._is_steps, call.args)):
                beside = [each for each in call.args if not (self._is_steps(each) or self._is_known(each))]
                self._changed |= {(id(each), ""): ast.unparse(each) for each in beside if not _repeats(each)}

    def _is_step(self, node: ast.AST) -> bool:
        path = self._scope.path(name) if (name := name_of(node)) else []
        return bool(path) and type(path[-1]) is Step

    def _is_known(self, node: ast.AST) -> bool:
        path = self._scope.path(name) if (name := name_of(node)) else []
        return self._registered.is_registered(path)

    def _is_steps(self, node: ast.AST) -> bool:
        found = [self._scope.path(each.id) for each in ast.walk(node) if isinstance(each, ast.Name)]
        called = any(isinstance(each, ast.Attribute) and each.attr == "steps" for each in ast.walk(node))
        return called or any(type(path[-1]) is Steps for path in found if path)

    def _run(self, body: Sequence[ast.stmt]) -> bool:
        """False: it does not come to its end."""
        return all(self._statement(each) for each in body)

    def _statement(self, node: ast.stmt) -> bool:
        self._statements += 1
        goes_on = self._run_statement(node)
        self._has_begun |= not (isinstance(node, (ast.For, ast.With)) or _sets_anew(node))
        return goes_on

    def _run_statement(self, node: ast.stmt) -> bool:
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
                touched, through = set(self._touched), self._standing(node.target, node.iter)
                self._read(node.iter)
                self._touched -= {each for stored in through.values() for each in stored if each not in touched}
                self._assign([node.target], node.iter)
                around, self._comes_to_each = self._comes_to_each, _comes_to_each(node)
                self._for_each(node.target, node.iter, lambda: self._run(node.body))
                self._comes_to_each = around
                self._branches(node.orelse, [])
            case ast.While():
                self._read(node.test)
                self._branches(node.body, [])
                self._branches(node.orelse, [])
            case ast.If(test=ast.Attribute(value=of, attr="done"), orelse=[]) if self._is_step(of):
                self._read(node.test)
                return self._run(node.body)  # as the last time that it runs
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
                    if isinstance(target, ast.Subscript) and is_all(target.slice) and name_of(target.value):
                        self._sure.add(self._scope.key(name_of(target.value)))
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
        name = name_of(node)
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
        if isinstance(node, SCOPES):
            return
        if isinstance(node, _COMPREHENSIONS):
            self._read_comprehension(node)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._begins_anew(node.func):
            for child in (*node.args, *node.keywords):
                self._read(child)
            name = self._written_by(node.func.value)
            self._begin_anew(self._stored(name))
            self._wrote(name)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._fills(node.func):
            named = self._written_by(node.func.value)
            for child in (*([] if named else [node.func.value]), *node.args, *node.keywords):
                self._read(child)
            return
        if name := name_of(node):
            self._reads(name)
        match node:
            case ast.Call(args=[of, ast.Constant(value=str(attribute)), value]) if name_of(node.func) in _SETS:
                self._read(value)
                self._write(ast.Attribute(of, attribute))
                return
        whole, part, before = None, None, self._touched
        if isinstance(node, ast.Call):
            (whole, part), before = self._written_arguments(node), set(self._touched)
        for child in ast.iter_child_nodes(node):
            inner = child.value if isinstance(child, ast.keyword) else child
            if inner is not whole and (not name or (isinstance(node, ast.Subscript) and child is node.slice)):
                self._read(child)
        if isinstance(node, ast.Call):
            self._call_with(node, self._touched - before)
        if whole is not None:
            name = self._written_by(whole)
            if name and not self._stored(name):
                self._wrote(name)
        if part is not None and self._kept_in(name := self._written_by(part)):
            self._fill(name, of_tensor=True)

    def _begin_anew(self, stored: Stored) -> None:
        self._anew = {**stored, **self._anew}
        self._anew_first |= set() if self._has_begun or not self._comes_to_each else {*stored}
        self._sure |= {(each, _EACH) for each in stored} if self._comes_to_each else set()

    def _touch(self, containers: Iterable[int]) -> None:
        self._touched.update(each for each in containers if (each, _EACH) not in self._sure)

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
        kinds = {tuple(map(kind_of, bound.values())): bound for bound in known}
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
        name = name_of(node)
        path = self._scope.path(name) if name else []
        if not path or len(path) < len(split_name(name)) or self._is_sure(name) or self._registered.has(path, name):
            return []
        return _entries(path[-1], _ELEMENTS) if dicts or not isinstance_past(path[-1], (dict,)) else []

    def _objects_in(self, node: ast.AST) -> list[Any]:
        """The objects of the user's among it, one of each kind."""
        return [*{kind_of(each): each for each in self._held_in(node) if is_object(each)}.values()]

    def _reads(self, name: str) -> None:
        """``a.b`` reads ``a`` as well."""
        self._touch(self._stored(name))
        if self._is_sure(name):
            return
        path = self._scope.path(name)
        self._touch(map(id, path))
        self._used.update(map(id, path))
        for length, each in enumerate(prefixes(name), 1):
            if not self._has(path[:length], each) and self._scope.key(each) not in self._bound:
                self._first.setdefault(self._scope.key(each), each + self._scope.where)
                if length <= len(path) and moves_when_used(path[length - 1]):
                    self._changed.setdefault(self._scope.key(each), each + self._scope.where)
        if len(path) > 1 and type(path[-1]) in PROPERTIES:
            self.follow(functions_of(path[-1], path[-2]))

    def _has(self, path: Sequence[Any], name: str) -> bool:
        """As KnownObjects; and where it is one entry of many, which one is not written there, whether all are."""
        if self._registered.has(path, name):
            return True
        parts = split_name(name)
        if not path or len(path) == len(parts) or not parts[len(path)].startswith("["):
            return False
        within = _entries(path[-1], _MANY)
        known = all(is_array(each) and self._registered.has([each], name) for each in within)
        return known and 0 < len(within) < _MANY

    def _is_sure(self, name: str) -> bool:
        keys = map(self._scope.key, prefixes(name))
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
        name = name_of(node)
        path = self._scope.path(name) if name and not self._is_sure(name) and self._scope.is_whole(name) else []
        return path[-1] if path and is_object(path[-1]) else UNKNOWN

    def _one_of(self, node: ast.AST) -> list[Any]:
        """The objects of before of which an expression is one."""
        match node:
            case ast.IfExp(body=one, orelse=other):
                return [each for each in map(self._known, (one, other)) if each is not UNKNOWN]
            case ast.Subscript(value=of) | ast.Call(func=ast.Attribute(value=of, attr="get")):
                return self._objects_in(of)
            case ast.Call(func=ast.Name(id="getattr"), args=[of, *_]):
                return [MethodType(each.function, each.owner) for each in methods_of(self._known(of))]
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
        in_part = isinstance(node, ast.Subscript) or self._is_of_part(node)
        while isinstance(node, ast.Subscript):
            node = node.value
        name = self._written_by(node)
        if not name or self._stored(name):
            return self._stored(name)
        container = container_of(name)
        path = self._scope.path(container)
        if self._is_sure(container) or len(path) < len(split_name(container)) or self._registered.has(path, container):
            return {}
        loose = any(not self._registered.has([each], container) for each in arrays_in(path[-1]))
        if in_part and is_array(path[-1]):
            self._in_part.add(id(path[-1]))
        return {id(path[-1]): container + self._scope.where} if loose else {}

    def _stored(self, name: str) -> Stored:
        """What a variable of this pass stands for, and what is in it."""
        return self._stands_for.get(self._scope.key(split_name(name)[0]), {}) if name else {}

    def _written_by(self, node: ast.AST) -> str:
        """The name of what is changed where ``node`` is changed in place: of a view, what that is a view of."""
        match node:
            case ast.Call(func=ast.Attribute(value=of, attr=verb)) if verb in _VIEWS:
                return self._written_by(of)
            case ast.Attribute(value=of, attr=part) if part in _VIEWS and self._kept_in(inner := self._written_by(of)):
                return inner
        return name_of(node)

    def _is_of_part(self, view: ast.AST) -> bool:
        """``x.narrow(0, at, 4)``, ``z.real``: a view of some of a tensor."""
        while isinstance(view, (ast.Call, ast.Attribute)):
            part = view.func if isinstance(view, ast.Call) else view
            if not isinstance(part, ast.Attribute):
                return False
            if part.attr in _PARTS and (part is not view or self._kept_in(self._written_by(part.value))):
                return True
            view = part.value
        return False

    def _written_arguments(self, node: ast.Call) -> tuple[ast.AST | None, ast.AST | None]:
        """What a function writes to: all of it (``out=``); and what it changes in place, or writes some of
        (``where=``).
        """
        verb, first = name_of(node.func).rpartition(".")[2], next(iter(node.args), None)
        begin, end = _FOR_EACH
        out = next((each.value for each in node.keywords if each.arg == "out"), first if verb == "copyto" else None)
        if out is not None:
            some = any(each.arg == "where" for each in node.keywords) or self._is_of_part(out)
            return (None, out) if some else (out, None)
        part = verb in _IN_PLACE or (verb.startswith(begin) and verb.endswith(end))
        return None, first if part else None

    def _write(self, *targets: ast.AST) -> None:
        for target in targets:
            match target:
                case ast.Subscript(value=of) if stored := self._stored(name_of(of)):
                    self._read(target.slice)
                    if is_all(target.slice):
                        self._begin_anew(stored)
                    else:
                        self._filled = {**stored, **self._filled}
                case ast.Tuple() | ast.List():
                    self._write(*target.elts)
                case ast.Starred():
                    self._write(target.value)
                case ast.Subscript() if is_all(target.slice) and (name := name_of(target.value)):
                    self._wrote(name)
                case ast.Subscript() if not isinstance(target.slice, ast.Constant) and name_of(target.value):
                    self._read(target.slice)
                    self._fill(name_of(target.value))
                    if name := name_of(target):
                        self._wrote(name)
                case _ if name := name_of(target):
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
        *path, last = split_name(attribute)
        owner = self._scope.path(".".join(path).replace(".[", "["))
        if len(owner) < len(path) or last.startswith("["):
            return False
        of_library = type(held(owner[-1], MODULES)) is dict and not functions_of(owner[-1])
        if not of_library and id(owner[-1]) not in self._registered.read:
            return False
        return not self._registered.has([*owner, held(owner[-1], last)], attribute)

    def _change(self, target: ast.AST) -> None:
        """``target += ...``."""
        name = name_of(target)
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
            if not self._has(self._scope.path(told), told):
                self._changed.setdefault(self._scope.key(told), told + self._scope.where)

    def _kept_in(self, name: str) -> list[Any]:
        """The path to the container or the tensor that it stands for, or is in; empty: it is none, or not known."""
        if stored := self._stored(name):
            return [*stored]
        path = self._scope.path(container_of(name)) if name else []
        if not path or len(path) < len(split_name(container_of(name))):
            return []
        array = any(held(path[-1], verb) is not UNKNOWN for verb in OF_ARRAYS)
        return path if array or isinstance_past(path[-1], CONTAINERS) else []

    def _holds_modules(self, name: str) -> bool:
        return bool(name) and self._scope.is_whole(name) and is_module_container(self._scope.path(name)[-1])

    def _begins_anew(self, method: ast.Attribute) -> bool:
        name = self._written_by(method.value)
        if method.attr in _SEEDS:
            path = self._scope.path(name) if name else []
            return bool(path) and len(path) == len(split_name(name)) and moves_when_used(path[-1])
        in_part = "[" in name or self._is_part(name, method.value)
        return method.attr in _ANEW and bool(self._kept_in(name)) and not in_part

    def _is_part(self, name: str, view: ast.AST) -> bool:
        return self._is_of_part(view) or not self._in_part.isdisjoint(self._stored(name))

    def _fills(self, method: ast.Attribute) -> bool:
        """Whether a call of it changes something in place, and gives nothing of it."""
        name, verb = self._written_by(method.value), method.attr
        if isinstance(method.value, ast.Subscript) and self._objects_in(method.value.value):
            return False
        of_tensor = (verb.endswith("_") and not verb.startswith("_")) or (
            verb in _ANEW and self._is_part(name, method.value)
        )
        if verb in _MODULE_CHANGES and self._holds_modules(name):
            self._fill(name)
            return True
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
        container = container_of(name)
        path = self._scope.path(container)
        whole = len(path) == len(split_name(container))
        if not filled and whole and not self._is_sure(name) and not self._has(path, name if of_tensor else container):
            filled = {id(path[-1]): container + self._scope.where}
        self._filled = {**filled, **self._filled}
        self._used.update(filled if of_tensor else ())

    # -- what is called

    def _call_with(self, node: ast.Call, containers: set[int]) -> None:
        """What it reads of these its text tells, where it is given one of them and can be read."""
        names = [name for each in (*node.args, *(each.value for each in node.keywords)) if (name := name_of(each))]
        given = {id(self._scope.path(name)[-1]) for name in names if self._scope.is_whole(name)}
        around, self._late = self._late, given & containers
        self._touched -= self._late
        self._call(node)
        self._touched |= self._late
        self._late = around

    def _call(self, node: ast.Call) -> None:
        name, scope = name_of(node.func), self._scope
        match node:
            case ast.Call(func=ast.Attribute(value=held_by, attr=verb), args=[key, *_]) if verb in _READS_ENTRY:
                if entry := entry_of(held_by, key):
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
        self._follow_given(node)

    def _follow_given(self, node: ast.Call) -> None:
        """An optimizer's closure, for instance."""
        is_step = name_of(node.func).endswith(".step")
        for argument in (*node.args, *(each.value for each in node.keywords)):
            given = name_of(argument)
            if given and self._scope.is_whole(given):
                *around, value = self._scope.path(given)
                owner = around[-1] if around else UNKNOWN
                self.follow(functions_of(value, owner) if type(value) in FUNCTIONS else ())
                self.follow(steps_of(value) if is_step else ())  # a scaler's

    def follow(self, called: Iterable[CalledFunction], node: ast.Call | None = None) -> None:
        """As if their texts stood here; ``node`` calls them, or it is not known how they are called."""
        for each in called:
            code = each.function.__code__
            if code in self._running or len(self._called) >= _CALLS_MAX or not self._texts.in_time():
                continue
            if (found := self._texts.function(code, each.function.__globals__)) is not None:
                self._run_function(each, found, node)

    def _run_function(self, called: CalledFunction, text: Function, node: ast.Call | None) -> None:
        code, before = called.function.__code__, (self._scope, self._ends)
        parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        given = self._given(called, code, node)
        self._scope, self._ends = Scope.of_call(called, given, self._scope), []
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
            name = name_of(argument)
            if not parameter:  # **settings
                continue
            given.pop(parameter, None)
            if name and self._scope.is_whole(name) and not self._is_sure(name):
                given[parameter] = self._scope.path(name)[-1]
                self._late.discard(id(given[parameter]))
        return given


def _bindings(target: ast.AST, value: Any) -> dict[str, Any]:
    """The variables of ``target`` that are objects of the user's, where it is given ``value``."""
    match target:
        case ast.Name(id=name) if is_object(value):
            return {name: value}
        case ast.Tuple(elts=parts) | ast.List(elts=parts) if type(value) in (tuple, list) and len(value) == len(parts):
            return {key: each for pair in zip(parts, value, strict=True) for key, each in _bindings(*pair).items()}
    return {}


def _entries(value: Any, most: int) -> list[Any]:
    """What a dict, a list or the like has in it, so many of it; of other things nothing."""
    if isinstance_past(value, (dict,)):
        return [*islice(dict.values(value), most)]
    return [*islice(value, most)] if type(value) in (list, tuple, set, deque) else []


def _sets_anew(node: ast.stmt) -> bool:
    """``x.zero_()``: it reads nothing."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(), attr=verb), args=[])):
            return verb in _ANEW
    return False


def _comes_to_each(node: ast.For | ast.AsyncFor) -> bool:
    inner = (each for part in node.body for each in ast.walk(part))
    leaves = any(isinstance(each, (ast.Continue, ast.Break, ast.Return)) for each in inner)
    return not (leaves or any(isinstance(each, (ast.Subscript, ast.IfExp)) for each in ast.walk(node.iter)))


def _repeats(node: ast.expr) -> bool:
    """``itertools.repeat(x)`` gives each step the same."""
    return isinstance(node, ast.Call) and name_of(node.func).rpartition(".")[2] == "repeat"
