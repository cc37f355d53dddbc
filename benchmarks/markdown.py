"""Prints the tables of a benchmark's JSON as Markdown, for the README: ``python benchmarks/markdown.py FILE.json ...``.

Of the benchmarks that keep their tables in it (``common.write_json``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def lines(result: dict[str, Any]) -> list[str]:
    told = result["about"]
    found = [f"<!-- {told['time']}, {told['commit']}, load {told['load_average']}: {' '.join(told['argv'])} -->"]
    for table in result["tables"]:
        found += ["", f"{table['title']}:", "", line(table["columns"]), "|" + "---|" * len(table["columns"])]
        found += map(line, table["rows"])
    return found


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join(lines(json.loads(Path(name).read_text()))), end="\n\n")
