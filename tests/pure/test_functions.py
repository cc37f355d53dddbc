"""Functions fit a screen (CONTRIBUTING.md, Style)."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
LINES = 70


def test_functions_are_below_70_lines() -> None:
    long = [
        f"{path}:{node.lineno} {node.name}: {lines}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (lines := (node.end_lineno or 0) - node.lineno + 1) >= LINES
    ]
    assert not long
