"""How a variable, an attribute or an entry is written in a text, and which loops a line of it is in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from types import EllipsisType, FrameType

from resilient_train.session.reading.static_lookup import Texts

Loop = ast.For | ast.AsyncFor | ast.While
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def loops_at(frame: FrameType, texts: Texts) -> list[Loop]:
    """The loops that ``frame`` is in, the outermost first; none where its text can't be read."""
    tree = texts.tree(frame.f_code, frame.f_globals)
    if tree is None:
        return []
    scope = texts.function(frame.f_code, frame.f_globals) or tree
    around = [each for each in in_scope(scope) if isinstance(each, Loop) and lasts_at(each, frame.f_lineno or 0)]
    return sorted(around, key=lambda loop: loop.lineno)


def names_behind(loop: Loop, frame: FrameType, texts: Texts) -> set[str]:
    """What the code behind it reads, in the same function."""
    tree = texts.function(frame.f_code, frame.f_globals) or texts.tree(frame.f_code, frame.f_globals)
    behind = (each for each in in_scope(tree) if getattr(each, "lineno", 0) > (loop.end_lineno or 0)) if tree else ()
    return {name for each in behind if isinstance(getattr(each, "ctx", None), ast.Load) and (name := name_of(each))}


def in_scope(scope: ast.AST) -> Iterator[ast.AST]:
    """What runs where it runs: without the functions and classes that are defined there."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from in_scope(child)


def lasts_at(loop: Loop, line: int) -> bool:
    """Whether it is in the loop."""
    return loop.lineno <= line <= (loop.end_lineno or loop.lineno)


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


def split_name(name: str) -> list[str]:
    """``a.b['c'].d``: a, b, ['c'], d."""
    return [each for each in re.split(r"\.(?![^\[]*\])|(?=\[)", name) if each]


def is_all(part: ast.expr) -> bool:
    """``[:]`` and ``[...]``."""
    match part:
        case ast.Slice(lower=None, upper=None, step=None) | ast.Constant(value=EllipsisType()):
            return True
    return False


def container_of(name: str) -> str:
    """``a.b[k].c``: a.b."""
    return name.partition("[")[0]


def prefixes(name: str) -> list[str]:
    """``a.b[0]``: a, a.b, a.b[0]."""
    found = ""
    every = []
    for part in split_name(name):
        found += part if not found or part.startswith("[") else f".{part}"
        every.append(found)
    return every
