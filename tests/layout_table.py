"""Writes ``docs/reference/layouts.md``: what becomes of a job by how its model is divided, and by what happens to it.

    python tests/layout_table.py

A cell is what tests say of themselves: ``@pytest.mark.shows(LAYOUT, FAULT, OUTCOME)``. A cell that no test shows is
empty.
"""

from __future__ import annotations

import contextlib
import io
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference" / "layouts.md"
WHERE = ("tests/process", "tests/pure")
LAYOUTS = (
    *("DDP", "HSDP", "FSDP", "HSDP, blocks compiled", "HSDP, blocks computed twice"),
    *("TP, replicated", "TP, sharded", "PP, replicated", "PP, sharded", "PP, plain stages"),
    *("PP, stages of DDP", "TP within DDP", "FSDP1", "ZeRO-1"),
)
FAULTS = ("killed", "hangs", "connections cut", "memory damaged", "no holder left", "started again", "divided anew")
OUTCOMES = {
    "in place": "the others keep their state",
    "back": "all go back to the newest saved state",
    "goes on": "",
    "refused": "when the Session is made, in one sentence",
}


HEAD = """\
# What becomes of a job, by how its model is divided

Written by `tests/layout_table.py` from what tests say that they show; what no test shows is empty. All of it on torch
2.13.0, on CPUs (gloo), with two to four ranks. Each of these tests ends with the bits of the undisturbed run, but where
the cell says *refused*. [How to train each of them](../how-to/sharded.md).
"""
WORDS = """\
*No holder left*: all ranks that have the same part are lost. *Started again*: the job was ended, its state saved, and a
new launcher goes on from storage. *Divided anew*: it goes on with another mesh, or another number of ranks.
"""


class Shown(NamedTuple):
    layout: str
    fault: str
    outcome: str
    test: str


class Collector:
    """A plugin of pytest's."""

    def __init__(self) -> None:
        self.shown: list[Shown] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            test = item.nodeid.rpartition("/")[2].partition("[")[0]
            self.shown += [Shown(*mark.args, test) for mark in item.iter_markers("shows")]


def collected() -> list[Shown]:
    """Of all tests, the long ones too."""
    collector, said = Collector(), io.StringIO()
    found = [path for where in WHERE for path in sorted((ROOT / where).glob("test_*.py"))]
    files = [str(path) for path in found if "shows(" in path.read_text()]  # to collect the others too takes long
    command = ["--collect-only", "-q", "-m", "", "-p", "no:cacheprovider", *files]
    with contextlib.redirect_stdout(said), contextlib.chdir(ROOT):
        code = pytest.main(command, plugins=[collector])
    assert code == 0, said.getvalue()
    return collector.shown


def page(shown: list[Shown]) -> str:
    cells: dict[tuple[str, str], set[str]] = defaultdict(set)
    tests: dict[str, set[str]] = defaultdict(set)
    for each in shown:
        assert each.layout in LAYOUTS, each
        assert each.outcome in OUTCOMES, each
        for fault in FAULTS if each.outcome == "refused" else (each.fault,):
            assert fault in FAULTS, each
            cells[each.layout, fault].add(each.outcome)
        tests[each.layout].add(f"`{each.test}`")
    rows = [[layout, *(", ".join(sorted(cells[layout, fault])) for fault in FAULTS)] for layout in LAYOUTS]
    table = [["", *FAULTS], ["---"] * (len(FAULTS) + 1), *rows]
    meant = "\n".join(f"* *{outcome}*: {words}" for outcome, words in OUTCOMES.items() if words)
    held = "\n".join(f"* {layout}: {', '.join(sorted(tests[layout]))}" for layout in LAYOUTS)
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{HEAD}\n{lines}\n\n{meant}\n\n{WORDS}\n## Which tests\n\n{held}\n"


if __name__ == "__main__":
    PAGE.write_text(page(collected()))
