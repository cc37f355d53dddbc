"""What both benchmarks need: cases, jobs that leave nothing behind, medians, tables. Light: imports no torch."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.child_job import clean_environ, running

HERE = Path(__file__).parent
MODELS = ("tiny", "10m", "21m", "deep")
USUAL_MODELS = MODELS[:2]
"""What is measured unless asked otherwise."""
_LOG_TAIL = 3000


class BenchmarkError(Exception):
    """A job did not do what it was started for; the text holds the end of its log."""


class Case(NamedTuple):
    """One row of a result."""

    ranks: int
    model: str

    def describe(self) -> str:
        return f"{self.ranks} ranks, {self.model}"


class Table(NamedTuple):
    """A table for people; the JSON has the same numbers and more."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


def launcher(kind: str, ranks: int, run_dir: Path) -> list[str]:
    """The command of ``resilient-run`` or ``torchrun``, to which a script and its arguments are appended."""
    if kind == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [
        *(sys.executable, "-m", "resilient_train.launch.cli.run"),
        *("--nproc-per-node", str(ranks), "--run-dir", str(run_dir)),
    ]  # fmt: skip


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own; at the end of the block, whatever ends it, nothing of it is left.

    ``more`` is added to its environment.
    """
    # Switches that the user exported are meant for other jobs. One thread each: ranks outnumber cores already.
    environ = {**clean_environ(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(more or {})}
    with running(command, log, environ) as process:
        yield process


def finish(process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
    """Waits for a job's good end. Raises BenchmarkError for any other, and for none."""
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"the job did not end within {timeout_s:.0f} s\n{log_tail(log)}") from None
    if code:
        raise BenchmarkError(f"the job ended with exit code {code}\n{log_tail(log)}")


def log_tail(log: Path) -> str:
    return log.read_text(errors="replace")[-_LOG_TAIL:] if log.exists() else "(no log)"


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median with quartiles and extremes; a mean says little on a machine that others use as well."""
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    cuts = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    numbers = {"median": cuts[1], "p25": cuts[0], "p75": cuts[2], "min": ordered[0], "max": ordered[-1]}
    return {"n": len(ordered), **{name: round(value, 4) for name, value in numbers.items()}}


def about() -> dict[str, Any]:
    """What a reader of the JSON must know to compare it with another."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": [round(each, 2) for each in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "argv": sys.argv,
    }


def _commit() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False, timeout=10
    )
    return told.stdout.strip() or "unknown"


def show(table: Table) -> None:
    """Prints with rich where it is installed, and plainly where it is not."""
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        _show_plain(table)
        return
    drawn = RichTable(title=table.title, title_justify="left")
    for index, name in enumerate(table.columns):
        drawn.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    # In a file or a pipe there is no width to fit into, and a cut number is no number.
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(drawn)


def _show_plain(table: Table) -> None:
    lines = [table.columns, *table.rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    print(table.title)
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))]
        print("  ".join(cells))


def write_json(path: str | None, result: dict[str, Any], tables: Sequence[Table] = ()) -> None:
    """``tables``: as they are shown, for ``markdown.py``."""
    if path:
        shown = {"tables": [table._asdict() for table in tables]} if tables else {}
        Path(path).write_text(json.dumps({"about": about(), **result, **shown}, indent=1) + "\n")
