"""What CONTRIBUTING.md (Style) asks of the sources, and no linter sees."""

from __future__ import annotations

import ast
from collections import defaultdict
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


def test_no_two_classes_have_one_name() -> None:
    """Private ones are their modules' own."""
    found: defaultdict[str, list[Path]] = defaultdict(list)
    for path in SOURCES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path)
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
