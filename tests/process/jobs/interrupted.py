"""Takes interrupts at random moments, as a rank does, and counts what becomes of each. Arguments: how many, seed.

A second process raises the stop word a random time after the last stop was acknowledged, so that the signal comes
anywhere: Python code, a sleep, a lock, a queue, a finalizer, an ``__enter__``, an ``__exit__``, a ``finally``, an
import, a log call, numpy, between two steps. After each step the locks must be free and the queues must work.
"""

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import json
import logging
import multiprocessing
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path

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

counts = {
    "caught": 0,
    "seen_at_the_edge": 0,
    "steps": 0,
    "half_done": 0,
    "in_finalizer": 0,
    "twice": 0,
    "half_imported": 0,
    "modes_left": 0,
    "locks_left": 0,
    "waiters_left": 0,
}


class Mode:
    """Like ``torch.no_grad``: a switch for the whole process, set by calls of ``__enter__`` and ``__exit__``."""

    entered = 0

    def __enter__(self) -> None:
        for _ in range(20):
            setattr(Mode, "entered", Mode.entered + 1)  # noqa: B010 - a call, after which a signal may be handled

    def __exit__(self, *_: object) -> None:
        for _ in range(20):
            setattr(Mode, "entered", Mode.entered - 1)  # noqa: B010 - the same


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
full: queue.Queue[int] = queue.Queue()
shared: "multiprocessing.Queue[int]" = multiprocessing.Queue()
reentrant = threading.Condition()
log = logging.getLogger("interrupted")
log.addHandler(logging.FileHandler(os.devnull))


def lock_things() -> None:
    """Takes and gives back what two threads would share, in all the ways that the standard library has."""
    for number in range(10):
        full.put(number)
        full.get(timeout=1)
        with reentrant:
            reentrant.wait(timeout=0.0001)
        log.warning("step %d", number)
    with contextlib.suppress(queue.Empty):
        shared.get(timeout=0.0005)


def import_things() -> None:
    """Imports a module anew; cut in the middle, what it registers would be registered in part."""
    sys.modules.pop("registering", None)
    importlib.import_module("registering")


with tempfile.TemporaryDirectory() as folder:
    Path(folder, "registering.py").write_text(
        "import builtins\nbuiltins.half_imported = True\nfor _ in range(500): pass\nbuiltins.half_imported = False\n"
    )
    sys.path.insert(0, folder)
    import_things()  # and its bytes are in the cache
    compiled = sys.modules["registering"].__spec__.loader.get_code("registering")  # type: ignore[union-attr]
    sys.path.remove(folder)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds the module without its file."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name == "registering" else None

    def get_code(self, _name: str) -> types.CodeType:
        return compiled

    def get_source(self, _name: str) -> None:
        return None


sys.meta_path.insert(0, Finder())


def check_left_behind() -> None:
    """Nobody is in these now: what is still taken will be for ever."""
    counts["modes_left"] += Mode.entered != 0
    Mode.entered = 0
    for each in (full.mutex, empty.mutex, lock):
        counts["locks_left"] += each.locked()
    free = shared._rlock.acquire(timeout=0)  # type: ignore[attr-defined]
    counts["locks_left"] += not free
    if free:
        shared._rlock.release()  # type: ignore[attr-defined]
    others_turn.set()
    counts["locks_left"] += not others_done.wait(timeout=10)
    others_done.clear()
    waiters = (full.not_empty, empty.not_empty, reentrant)
    counts["waiters_left"] += sum(len(each._waiters) for each in waiters)  # type: ignore[attr-defined]
    while not full.empty():
        full.get()


def other_thread() -> None:
    """Finds out about locks that their own thread could take again."""
    while others_turn.wait():
        others_turn.clear()
        with reentrant:
            pass
        log.warning("and the other thread")
        others_done.set()


others_turn, others_done = threading.Event(), threading.Event()
threading.Thread(target=other_thread, daemon=True).start()


def compute(chance: random.Random) -> None:
    """One of the things that a body does."""
    kind = chance.randrange(9)
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
            with Tidy(), Mode():
                pass
    elif kind == 6:
        lock_things()
    elif kind == 7:
        import_things()
    else:
        for _ in range(2_000):
            Step(Body(), 0)


class Body:
    """Arms and disarms as ``session/driver.py`` does."""

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
            board.set_identity(0, generation, 0, os.getpid())
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
        counts["half_imported"] += builtins.half_imported
        builtins.half_imported = False
        check_left_behind()
finally:
    raiser.kill()
    raiser.wait()
    interrupt.remove()
    watchdog.stop()
assert isinstance(signal.getsignal(SIGNAL), types.FunctionType), "the user's own handler is not back"
print(json.dumps({**counts, "stops": generation, "unraisable": len(unraisable), "foreign": len(foreign)}))
