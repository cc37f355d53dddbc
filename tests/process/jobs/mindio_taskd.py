"""A stand-in of MindX: ``mindio_taskd.py FOLDER STEPS PLAN`` has the controller of ``mindio_ttp``, starts the ranks of
``mindio_loop.py`` and decides about their faults, as taskd and ClusterD do. What it was called for is in FOLDER/mindx.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from resilient_train.integrations.mindio import finder

finder.install()

from mindio_ttp import controller_ttp  # noqa: E402 - it is found from here on

FOLDER, WORLD = Path(sys.argv[1]), int(os.environ["MS_WORKER_NUM"])
START = "from resilient_train.integrations.mindio import finder; finder.install(); import runpy, sys; del sys.argv[0]; "
START += "runpy.run_path(sys.argv[0], run_name='__main__')"
LOOP = str(Path(__file__).with_name("mindio_loop.py"))
NETWORK = 2
running: dict[int, subprocess.Popen] = {}
over = threading.Event()
reports: "queue.SimpleQueue[tuple[Any, ...]]" = queue.SimpleQueue()


def start(rank: int) -> None:
    environ = {**os.environ, "MS_NODE_ID": str(rank), "MINDX_TASK_ID": "task"}
    running[rank] = subprocess.Popen([sys.executable, "-c", START, LOOP, *sys.argv[1:]], env=environ)


def replace(ranks: list[int]) -> None:
    for rank in ranks:
        running[rank].kill()
        running[rank].wait()
        start(rank)


def choose(faults: dict[int, int], strategies: list[str]) -> None:
    """What was lost, processes or memory, comes in a new process."""
    lost = [rank for rank, kind in faults.items() if kind != NETWORK]
    strategy = "recover" if lost and "recover" in strategies else strategies[-1]
    assert controller_ttp.tft_notify_controller_change_strategy(strategy, "") == 0
    if strategy == "recover":
        replace(lost)


def answer(action: str, *given: Any) -> None:
    match (action, *given):
        case "report_fault_ranks", faults, _:
            assert controller_ttp.tft_notify_controller_stop_train(faults, "stop") == 0
        case "report_stop_complete", 0, _, faults:
            assert controller_ttp.tft_notify_controller_on_global_rank(faults) == 0
        case "report_strategies", faults, strategies:
            choose(faults, strategies)
        case "report_result", 405, _, faults, _:
            choose(faults, ["recover"])
        case "report_result", _, _, _, "dump":
            over.set()


def answering() -> None:
    """As ClusterD's signals come, in another thread than taskd is called in."""
    try:
        while True:
            answer(*reports.get())
    finally:  # an answer was refused
        for each in running.values():
            each.kill()
        over.set()


def register(action: str) -> None:
    def called(*given: Any) -> None:
        with (FOLDER / "mindx").open("a") as file:
            file.write(json.dumps([action, *given]) + "\n")
        reports.put((action, *given))

    callback: Callable[..., None] = called
    assert controller_ttp.tft_register_mindx_callback(action, callback) == 0


for action in ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result"):
    register(action)
controller_ttp.tft_init_controller(-1, WORLD, False, True, False)
controller_ttp.tft_start_controller(os.environ["MS_TFT_IP"], int(os.environ["MS_TFT_PORT"]), False, "")
for rank in range(WORLD):
    start(rank)
threading.Thread(target=answering, daemon=True).start()
while not over.wait(0.02):
    if all(process.poll() == 0 for process in running.values()):
        sys.exit(0)
sys.exit(max(process.wait() for process in running.values()))
