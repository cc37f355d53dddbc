"""What a training loop keeps from one step to the next by its own variables, read from its text.

``ema = 0.9 * ema + 0.1 * loss.item()``: a step reads what the one before has written. A process that takes a rank's
place begins such a variable anew, and a step that runs again changes it twice. Most are counters for people, so nobody
is refused for one: they are told by name, behind the first fault. Tensors that flow into a gradient are looked for, and
refused, elsewhere (``frameworks/torch/flowing.py``).

Compilers call a variable so that an iteration reads before it writes it. This is that analysis, of the loop around
``session.steps()`` alone: what its functions keep is not seen, and a branch that is never taken counts. Iterators and
random number generators that the loop names are counted too: to use one is to change it.
"""

from __future__ import annotations

import ast
import inspect
import io
import linecache
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, GeneratorType
from typing import Any, NamedTuple

from resilient_train import script_place

_TEXT_MAX = 300_000
_TOLD = 6
_DRAWS = ("Random", "Generator", "RandomState")
"""Python's, NumPy's and torch's own."""
_FILES = io.IOBase.__mro__[1]
_ORDER, _HELD, _NAME = (vars(type)[name] for name in ("__mro__", "__dict__", "__name__"))
_Loop = ast.For | ast.AsyncFor | ast.While
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


class LoopCarried(NamedTuple):
    """Variables as they are written in the loop; ``place`` is FILE:LINE of the loop."""

    names: tuple[str, ...]
    place: str

    def told(self) -> str:
        """For people, whose training may not care."""
        some = ", ".join(self.names[:_TOLD]) + (f" and {len(self.names) - _TOLD} more" if self.names[_TOLD:] else "")
        return (
            f"the loop at {self.place} keeps {some} from step to step, and the Session does not know of it: a process "
            "that takes a rank's place begins anew there, and a step that runs again changes it twice. If the training "
            "depends on it, register it (docs/how-to/load-data.md, What is found of what flows)"
        )


def loop_carried(frame: FrameType, known: Iterable[object]) -> LoopCarried | None:
    """Of the innermost loop that runs in ``frame``; None if it has none, or its text can't be read. ``known`` objects,
    and what is written as theirs, are left out.
    """
    loop = _loop_at(frame)
    if loop is None:
        return None
    flow = _Flow()
    try:
        flow.run_loop(loop)
    except RecursionError:  # an expression of hundreds of parts
        return None
    values, ours = _variables(frame), {id(each) for each in known}
    kept = [name for name in flow.read_first if name in flow.written]
    used = [name for name in flow.read_first if name not in flow.written and _moves_when_used(values.get(name))]
    names = [name for name in dict.fromkeys([*kept, *flow.changed, *used]) if id(values.get(_root(name))) not in ours]
    return LoopCarried(tuple(sorted(names)), f"{frame.f_code.co_filename}:{loop.lineno}") if names else None


def _loop_at(frame: FrameType) -> _Loop | None:
    text = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    if not text or len(text) > _TEXT_MAX:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # Python has told them when it ran the script
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # not Python's text (a notebook's cell), or changed meanwhile
        return None
    scope = next((each for each in ast.walk(tree) if _is_of(frame, each)), tree)
    around = [each for each in _in_scope(scope) if isinstance(each, _Loop) and _lasts_at(each, frame.f_lineno or 0)]
    return max(around, key=lambda loop: loop.lineno, default=None)


def _is_of(frame: FrameType, node: ast.AST) -> bool:
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.name != frame.f_code.co_name:
        return False
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return frame.f_code.co_firstlineno in (first, node.lineno)


def _in_scope(scope: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, _SCOPES):
            yield from _in_scope(child)


def _lasts_at(loop: _Loop, line: int) -> bool:
    return loop.lineno <= line <= (loop.end_lineno or loop.lineno)


def _variables(frame: FrameType) -> dict[str, Any]:
    """A copy: the dictionary that Python makes of a function's, and keeps until it returns, holds on to all of it."""
    found = frame.f_locals
    copy = {**frame.f_globals, **found}
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        found.clear()
    return copy


def _moves_when_used(value: Any) -> bool:
    """Its classes are asked past what a metaclass of the user's has made of them."""
    if type(value) is GeneratorType and value.gi_code.co_filename.startswith(script_place.PACKAGE):
        return False  # session.steps()
    kinds = _ORDER.__get__(type(value))
    if any(each is _FILES for each in kinds):
        return False
    return any("__next__" in _HELD.__get__(each) or _NAME.__get__(each) in _DRAWS for each in kinds)


def _root(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def _name_of(node: ast.AST) -> str:
    """As it is written; empty if it is not the same place each time."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            held = _name_of(node.value)
            return held and f"{held}.{node.attr}"
        case ast.Subscript(slice=ast.Constant(value=key)):
            held = _name_of(node.value)
            return held and f"{held}[{key!r}]"
        case _:
            return ""


class _Flow:
    """One pass over the loop's body, from its begin to its end."""

    def __init__(self) -> None:
        self.read_first: dict[str, None] = {}
        """In order, what is read where this pass may not have written it."""
        self.written = set[str]()
        self.changed: dict[str, None] = {}
        """Parts of objects of before, by ``+=``."""
        self._sure = set[str]()
        """What this pass has written, on each way to here."""

    def run_loop(self, loop: _Loop) -> None:
        if isinstance(loop, ast.While):
            self._read(loop.test)
        else:
            self._write(loop.target)
        self._run(loop.body)

    def _run(self, body: Sequence[ast.stmt]) -> bool:
        """False: it does not come to its end."""
        return all(self._statement(each) for each in body)

    def _statement(self, node: ast.stmt) -> bool:
        match node:
            case ast.Assign():
                self._read(node.value)
                self._write(*node.targets)
            case ast.AnnAssign():
                if node.value is not None:
                    self._read(node.value)
                    self._write(node.target)
            case ast.AugAssign():
                self._read(node.value)
                self._change(node.target)
            case ast.For() | ast.AsyncFor():
                self._read(node.iter)
                self._write(node.target)
                self._run(node.body)  # once at least: parts of a batch, as a rule
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
                pass
            case _:
                self._read(node)
                return not isinstance(node, (ast.Return, ast.Raise, ast.Break, ast.Continue))
        return True

    def _branches(self, *ways: Sequence[ast.stmt]) -> bool:
        """Sure is behind them what all have written that come to their end."""
        before, ends = self._sure, list[set[str]]()
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
        if name := _name_of(node):
            self._reads(name)
        for child in ast.iter_child_nodes(node):
            if not (name and isinstance(node, ast.Attribute)):
                self._read(child)

    def _read_comprehension(self, node: ast.AST) -> None:
        """Its own variables are new each time."""
        targets = [
            part for each in ast.walk(node) if isinstance(each, ast.comprehension) for part in ast.walk(each.target)
        ]
        before = set(self._sure)
        self._sure |= {each.id for each in targets if isinstance(each, ast.Name)}
        for child in ast.iter_child_nodes(node):
            self._read(child)
        self._sure = before

    def _reads(self, name: str) -> None:
        """``a.b`` reads ``a`` as well."""
        if _root(name) not in self._sure and name not in self._sure:
            self.read_first.setdefault(name)
            self.read_first.setdefault(_root(name))

    def _write(self, *targets: ast.AST) -> None:
        for target in targets:
            match target:
                case ast.Tuple() | ast.List():
                    self._write(*target.elts)
                case ast.Starred():
                    self._write(target.value)
                case _ if name := _name_of(target):
                    self._wrote(name)
                case _:
                    self._read(target)

    def _wrote(self, name: str) -> None:
        self.written.add(name)
        self._sure.add(name)

    def _change(self, target: ast.AST) -> None:
        """``target += ...``."""
        name = _name_of(target)
        if isinstance(target, ast.Name):
            self._reads(name)
            self._wrote(name)
        elif not name or (_root(name) not in self._sure and name not in self._sure):
            self._read(target)
            self.changed.setdefault(name or ast.unparse(target))
