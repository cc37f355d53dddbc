"""How large the house is, and how it is divided: counts of ``src``, no times.

``python benchmarks/house.py [COMMIT ...]``; without commits: as it lies here. Lines are those with code in them;
comments, docstrings and empty lines are left out. A function's length is that of its body. A constructor's size is how
many arguments it takes, ``self`` left out.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = "src/resilient_train/"
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


class House(NamedTuple):
    """Of one commit."""

    name: str
    files: int
    lines: Counter[str]
    """By room: a folder of the package, or the package itself."""
    functions: list[int]
    """Their lengths in lines, the shortest first."""
    classes: Counter[str]
    largest_constructor: tuple[int, str]
    largest_role: tuple[int, str]
    """The Protocol with the most verbs."""

    def rows(self) -> Iterator[tuple[str, str]]:
        yield "files", str(self.files)
        for room in sorted(self.lines):
            yield f"lines in {room}", f"{self.lines[room]:,}"
        yield "lines in all", f"{self.lines.total():,}"
        yield "functions", f"{len(self.functions):,}"
        for share in (50, 95):
            yield f"lines of a function, {share} in 100", str(self.functions[len(self.functions) * share // 100])
        yield "lines of the longest function", str(self.functions[-1])
        several = {name: times for name, times in self.classes.items() if times > 1}
        yield "names of classes", f"{len(self.classes):,}"
        yield "of them for several classes", str(len(several))
        yield "most arguments of a constructor", "{} ({})".format(*self.largest_constructor)
        yield "most verbs of a protocol", "{} ({})".format(*self.largest_role)


def main(commits: list[str]) -> None:
    houses = [survey(each, at_commit(each)) for each in commits] or [survey("here", here())]
    tables = [dict(house.rows()) for house in houses]
    rows = dict.fromkeys(name for table in tables for name in table)
    print(f"| | {' | '.join(house.name for house in houses)} |\n|---|{'---|' * len(houses)}")
    for name in sorted(rows, key=lambda name: (not name.startswith("files"), not name.startswith("lines in"))):
        print(f"| {name} | {' | '.join(table.get(name, '') for table in tables)} |")


def here() -> Iterator[tuple[str, bytes]]:
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_bytes()


def at_commit(commit: str) -> Iterator[tuple[str, bytes]]:
    listed = _git("ls-tree", "-r", "--name-only", commit, PACKAGE).decode().splitlines()
    for name in listed:
        if name.endswith(".py"):
            yield name, _git("show", f"{commit}:{name}")


def _git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], stdout=subprocess.PIPE, check=True).stdout


def survey(name: str, files: Iterable[tuple[str, bytes]]) -> House:
    lines, classes, functions, count = Counter[str](), Counter[str](), list[int](), 0
    constructors, roles = [(0, "")], [(0, "")]
    for path, source in files:
        room, _, rest = path.removeprefix(PACKAGE).partition("/")
        lines[room if rest else "the package itself"] += _code_lines(source)
        count += 1
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.end_lineno or 0) - node.body[0].lineno + 1)
            elif isinstance(node, ast.ClassDef):
                classes[node.name] += 1
                own = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
                if "__init__" in own:
                    taken = own["__init__"].args
                    constructors.append((len(taken.args) + len(taken.kwonlyargs) - 1, node.name))
                if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                    roles.append((sum(not verb.startswith("_") for verb in own), node.name))
    return House(name, count, lines, sorted(functions), classes, max(constructors), max(roles))


def _code_lines(source: bytes) -> int:
    """A docstring is a line of its own that is nothing but a string."""
    held: dict[int, bool] = {}
    for token in tokenize.tokenize(BytesIO(source).readline):
        if token.type in _NO_CODE or not token.string:
            continue
        for line in range(token.start[0], token.end[0] + 1):
            held[line] = held.get(line, False) or token.type != tokenize.STRING
    return sum(held.values())


if __name__ == "__main__":
    main(sys.argv[1:])
