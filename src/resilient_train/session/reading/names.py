"""How a variable, an attribute or an entry is written in a text, and which loops a line of it is in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from types import EllipsisType, FrameType

from resilient_train.session.reading.static_lookup import Texts

Loop = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_NAMES = 2000
"""Of one look at a text, which comes to most of them a hundred times."""


def loops_at(frame: FrameType, texts: Texts) -> list[Loop]:
    """The loops that ``frame`` is in, the outermost first; none where its text can't be read."""
    tree = texts.tree(frame.f_code, frame.f_globals)
    if tree is None:
        return []
    scope = texts.function(frame.f_code, frame.f_globals) or tree
    around = [each for each in in_scope(scope) if isinstance(each, Loop) and lasts_at(each, frame.f_lineno or 0)]
    return sorted(around, key=lambda loop: loop.lineno)


def statement_at(frame: FrameType, texts: Texts) -> list[Loop]:
    """The simple statement that runs there, as the body of a loop; none where its text can't be read."""
    scope = texts.function(frame.f_code, frame.f_globals) or texts.tree(frame.f_code, frame.f_globals)
    line, found = frame.f_lineno or 0, list[Loop]()
    for each in in_scope(scope) if scope is not None else ():
        if isinstance(each, ast.stmt) and not hasattr(each, "body") and lasts_at(each, line):
            found = [ast.copy_location(ast.While(test=ast.Constant(True), body=[each], orelse=[]), each)]
    return found


def names_behind(loop: Loop, frame: FrameType, texts: Texts) -> set[str]:
    """What the code behind it reads, in the same function, before that code has written it."""
    tree = texts.function(frame.f_code, frame.f_globals) or texts.tree(frame.f_code, frame.f_globals)
    behind = _Reading()
    for each in _outermost_behind(tree, loop.end_lineno or 0) if tree else ():
        behind.come_to(each)
    return behind.read


def _outermost_behind(node: ast.AST, line: int) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", 0) > line:
            yield child
        elif not isinstance(child, SCOPES):
            yield from _outermost_behind(child, line)


class _Reading:
    """Of statements, in their order: a variable of a loop or a comprehension may have the name of one of before."""

    def __init__(self) -> None:
        self.read = set[str]()
        self._written = set[str]()

    def come_to(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if isinstance(node, ast.Lambda):
                self.come_to(*node.args.defaults, *node.args.kw_defaults)
                self._perhaps(node.args, node.body)
            elif node is not None and not isinstance(node, SCOPES):
                self._come_to(node)

    def _come_to(self, node: ast.AST) -> None:
        match node:
            case ast.Assign():
                self.come_to(node.value, *node.targets)
            case ast.AnnAssign() | ast.NamedExpr():
                self.come_to(node.value, node.target)
            case ast.AugAssign():
                self.come_to(node.value)
                self._reads(name_of(node.target))
                self.come_to(*ast.iter_child_nodes(node.target))
            case ast.For() | ast.AsyncFor():
                self.come_to(node.iter, node.target)
                self._perhaps(*node.body, *node.orelse)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                self._perhaps(*node.generators, node.elt)
            case ast.DictComp():
                self._perhaps(*node.generators, node.key, node.value)
            case ast.comprehension():
                self.come_to(node.iter, node.target, *node.ifs)
            case ast.If() | ast.While():
                self.come_to(node.test)
                self._perhaps(*node.body)
                self._perhaps(*node.orelse)
            case ast.Try() | ast.TryStar() | ast.Match() | ast.IfExp() | ast.BoolOp():
                self._perhaps(*ast.iter_child_nodes(node))
            case ast.arg():
                self._written.add(node.arg)
            case _:
                self._come_to_parts(node)

    def _come_to_parts(self, node: ast.AST) -> None:
        self.come_to(*ast.iter_child_nodes(node))
        name, context = name_of(node), getattr(node, "ctx", None)
        if name and isinstance(context, ast.Store):
            self._written.add(name)
        elif isinstance(context, ast.Load):
            self._reads(name)

    def _reads(self, name: str) -> None:
        if name and self._written.isdisjoint(prefixes(name)):
            self.read.add(name)

    def _perhaps(self, *nodes: ast.AST) -> None:
        """What is written there may not be behind it."""
        before = set(self._written)
        self.come_to(*nodes)
        self._written = before


def in_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """What runs where it runs: without the functions and classes that are defined there."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from in_scope(child)


def lasts_at(node: ast.stmt, line: int) -> bool:
    """Whether it is in that loop, or other statement."""
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def name_of(node: ast.AST) -> str:
    """As it is written; empty if it is not the same place each time."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            base = name_of(node.value)
            return base and f"{base}.{node.attr}"
        case ast.Subscript(slice=(ast.Constant() | ast.Name() | ast.Attribute()) as key):
            return entry_of(node.value, key)
        case ast.Call(func=ast.Name(id="getattr"), args=[of, ast.Constant(value=str(attribute)), *_]):
            base = name_of(of)
            return base and f"{base}.{attribute}"
        case _:
            return ""


def entry_of(node: ast.AST, key: ast.AST) -> str:
    """As ``a[key]`` is written."""
    base = name_of(node)
    return base and f"{base}[{ast.unparse(key)}]"


@lru_cache(_NAMES)
def split_name(name: str) -> tuple[str, ...]:
    """``a.b['c'].d``: a, b, ['c'], d."""
    return tuple(filter(None, re.split(r"\.(?![^\[]*\])|(?=\[)", name)))


def is_all(part: ast.expr) -> bool:
    """``[:]`` and ``[...]``."""
    match part:
        case ast.Slice(lower=None, upper=None, step=None) | ast.Constant(value=EllipsisType()):
            return True
    return False


def container_of(name: str) -> str:
    """``a.b[k].c``: a.b."""
    return name.partition("[")[0]


@lru_cache(_NAMES)
def prefixes(name: str) -> tuple[str, ...]:
    """``a.b[0]``: a, a.b, a.b[0]."""
    found = ""
    every = []
    for part in split_name(name):
        found += part if not found or part.startswith("[") else f".{part}"
        every.append(found)
    return tuple(every)
