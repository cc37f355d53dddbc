"""Writes down what MindSpore says to ``mindio_ttp``, and what it is told.

In a job: ``begin(path)``, before MindSpore asks for the functions. By hand: ``python recorder.py`` runs the jobs, and
writes ``tests/pure/mindspore_calls.json`` anew, which ``tests/pure/test_mindspore_calls.py`` replays.

An event is a line ``[thread, what, name, ...]``. ``thread``: "main", or the handler it is in. ``what``: "call", with
the arguments; "returned", with the result; "told", with the arguments of a handler; "did", with its result; "raised".
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT = Path(__file__).parents[1] / "pure/mindspore_calls.json"
STEPS = 6
RS_UNKNOWN = 8
JOBS = [
    ("hcce:1:2 uce:1:3 low:0:5", "{TTP:1,UCE:1,HCCE:1,ARF:1}"),
    ("kill:1:3 hcce:0:5", "{TTP:1,UCE:1,HCCE:1,ARF:1}"),
    ("raise:1:3", "{TTP:1}"),
]
"""Faults and switches, of two ranks each."""


def begin(path: Path) -> None:
    from mindio_ttp import controller_ttp, framework_ttp

    lock = threading.RLock()
    where = threading.local()

    def write(what: str, name: str, *values: object) -> None:
        with lock, path.open("a") as file:
            file.write(json.dumps([getattr(where, "handler", "main"), what, name, *map(plain, values)]) + "\n")

    def handler(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            where.handler = name
            write("told", name, args)
            try:
                result = function(*args)
            except Exception as error:
                write("raised", name, type(error).__name__)
                raise
            write("did", name, result)
            return result

        return told

    def call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def said(*args: Any, **kwargs: Any) -> Any:
            write("call", name, args, kwargs)
            if name.startswith("tft_register_") and name.endswith("_handler"):
                args = (handler(name.removeprefix("tft_register_").removesuffix("_handler"), args[0]), *args[1:])
            result = function(*args, **kwargs)
            write("returned", name, result)
            return result

        return said

    for module in (framework_ttp, controller_ttp):
        for name, function in list(vars(module).items()):
            if name.startswith("tft_"):
                setattr(module, name, call(name, function))


def plain(value: object) -> object:
    """What is no plain data is its type's name: MindSpore's parameters of a callback are a dict with all in it."""
    if type(value) in (list, tuple):
        return [plain(each) for each in value]
    if type(value) is dict:
        return {str(key): plain(each) for key, each in value.items()}
    return value if value is None or type(value) in (bool, int, str) else f"<{type(value).__name__}>"


def read(folder: Path) -> list[dict[str, Any]]:
    """What the processes of a job have said, in the order in which they began."""
    found = []
    for path in sorted(folder.glob("recorded*")):
        rank, _ = path.name.removeprefix("recorded").split(".")
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for _, what, name, *values in events:
            if what == "call" and name.startswith("tft_start_"):
                values[0][1] = 0  # the port, another each time
        found.append({"rank": int(rank), "events": events})
    return found


def text(jobs: list[dict[str, Any]]) -> str:
    """As it is kept: a line for each event."""
    told = []
    for job in jobs:
        processes = []
        for process in job["processes"]:
            lines = ",\n".join(json.dumps(event) for event in process["events"])
            processes.append(f'{{"rank": {process["rank"]}, "events": [\n{lines}\n]}}')
        head = f'{{"plan": {json.dumps(job["plan"])}, "switches": {json.dumps(job["switches"])}, "processes": ['
        told.append(head + ",\n".join(processes) + "]}")
    return "[" + ",\n".join(told) + "]\n"


def record(folder: Path, run: Callable[[Path, str, str], object]) -> list[dict[str, Any]]:
    """All jobs, as they are kept."""
    jobs = []
    for number, (plan, switches) in enumerate(JOBS):
        where = folder / str(number)
        where.mkdir()
        run(where, f"{plan} record:0:0", switches)
        jobs.append({"plan": plan, "switches": switches, "processes": read(where)})
    return jobs


def of_each_thread(jobs: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """What is the same each time. A stop that MindSpore refuses is ordered again, some number of times; one may come
    when its rank is in ``tft_pause_train`` still. Whose script has failed is ended some time behind its report.
    """
    found = []
    for process in (process for job in jobs for process in job["processes"]):
        threads: dict[str, list[Any]] = {}
        for event in process["events"]:
            mine = threads.setdefault(event[0], [])
            failed = mine and mine[-1][1:4] == ["call", "tft_report_error", [RS_UNKNOWN]]
            if event[1:3] != ["returned", "tft_pause_train"] and not failed:
                mine.append(event)
            if event[1] == "raised":
                del mine[max(index for index, (_, what, *_) in enumerate(mine) if what == "told") :]
        found.append(threads)
    return found


def main() -> None:
    from test_mindspore import run

    with tempfile.TemporaryDirectory() as folder:
        jobs = record(Path(folder), lambda where, plan, switches: run(where, plan, 2, switches, STEPS))
    KEPT.write_text(text(jobs))


if __name__ == "__main__":
    main()
