"""Takes interrupts at random moments, as a rank does, and counts what becomes of each. Arguments: how many, seed.

A second process raises the stop word a random time after the last stop was acknowledged, so that the signal comes
anywhere: Python code, a sleep, a lock, a queue, a finalizer, an ``__exit__``, a ``finally``, numpy, between two steps.
"""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator

import numpy as np

from resilient_train._native import Board, Watchdog
from resilient_train.errors import TrainingInterrupted
from resilient_train.interrupt import SIGNAL, Interrupt
from resilient_train.session.step import Step

RAISER = """
import random, sys, time
from resilient_train._native import Board, die_with_parent
import signal
die_with_parent(signal.SIGKILL)
board, count, chance = Board.attach(int(sys.argv[1])), int(sys.argv[2]), random.Random(int(sys.argv[3]))
for generation in range(1, count + 1):
    while board.identity(0)[0] < generation - 1:
        time.sleep(0.00002)
    end = time.perf_counter() + chance.random() * 0.003
    while time.perf_counter() < end:
        pass
    board.raise_stop(generation)
"""

counts = {"caught": 0, "seen_at_the_edge": 0, "steps": 0, "half_done": 0, "in_finalizer": 0, "twice": 0}


class Tidy:
    """Leaves a mark if its ``__exit__`` was cut."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        marks.append(self)
        self.whole = False
        for _ in range(50):
            self.whole = False
        self.whole = True


class Finalized:
    """Counts if its finalizer was cut."""

    def __del__(self) -> None:
        ended = False
        try:
            for _ in range(500):
                ended = False
            ended = True
        finally:
            counts["in_finalizer"] += not ended


marks: list[Tidy] = []
lock = threading.Lock()
empty: queue.Queue[int] = queue.Queue()


def compute(chance: random.Random) -> None:
    """One of the things that a body does."""
    kind = chance.randrange(7)
    if kind == 0:
        sum(range(20_000))
    elif kind == 1:
        time.sleep(0.001)
    elif kind == 2:
        with lock, contextlib.suppress(queue.Empty):
            empty.get(timeout=0.001)
    elif kind == 3:
        np.linalg.norm(np.ones((60, 60)) @ np.ones((60, 60)))
    elif kind == 4:
        try:
            for _ in range(2_000):
                pass
        finally:
            time.sleep(0.001)  # longer than the watchdog waits before it signals again
    elif kind == 5:
        for _ in range(20):
            Finalized()
            with Tidy():
                pass
    else:
        for _ in range(2_000):
            Step(Body(), 0)


class Body:
    """Arms and disarms as ``session/runtime.py`` does."""

    def enter(self, _step: Step) -> None:
        interrupt.arm(generation)

    def leave(self, _step: Step, error: BaseException | None) -> bool:
        global generation
        interrupt.disarm()
        if error is not None and not isinstance(error, TrainingInterrupted):
            return False
        counts["twice"] += error is not None and isinstance(error.__context__, TrainingInterrupted)
        if board.stop_generation > generation:
            counts["caught" if error is not None else "seen_at_the_edge"] += 1
            generation = board.stop_generation
            while board.stopped_generation(0) < generation:
                time.sleep(0.0001)
            watchdog.acknowledge(generation)
            board.set_generation(0, generation)
        else:
            assert error is None, "an interrupt without a stop"
        return error is not None


def steps() -> Iterator[Step]:
    while generation < wanted:
        counts["steps"] += 1
        yield Step(Body(), counts["steps"])


wanted, seed = int(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
board = Board.create(1)
generation = 0
foreign: list[int] = []
signal.signal(SIGNAL, lambda number, _frame: foreign.append(number))
watchdog = Watchdog(board, 0, beat_ms=20, grace_ms=0, signal_number=int(SIGNAL))
interrupt = Interrupt(watchdog)
watchdog.start(0)
interrupt.install()
os.set_inheritable(board.fd, True)
raiser = subprocess.Popen([sys.executable, "-c", RAISER, str(board.fd), str(wanted), str(seed)], close_fds=False)
unraisable: list[object] = []
sys.unraisablehook = unraisable.append
try:
    for step in steps():
        with step:
            for _ in range(chance.randrange(1, 4)):
                compute(chance)
        counts["half_done"] += sum(not mark.whole for mark in marks)
        marks.clear()
finally:
    raiser.kill()
    raiser.wait()
    interrupt.remove()
    watchdog.stop()
assert isinstance(signal.getsignal(SIGNAL), types.FunctionType), "the user's own handler is not back"
print(json.dumps({**counts, "stops": generation, "unraisable": len(unraisable), "foreign": len(foreign)}))
