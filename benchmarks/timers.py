"""Times the Session's own calls from inside the process, by putting a stop watch around them for a while.

Own time only: what a timed call spends in another timed call counts for that one. Two clocks: wall time, and the
thread's CPU time, which other users of the machine don't lengthen. A watch costs a few microseconds itself (see
``watch_cost_us``), so the split says where the time goes, and the difference between blocks with and without a Session
says how much it is.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

WATCHED: dict[str, tuple[str, ...]] = {
    "loop": (
        "session.driver:Driver._next",
        "session.driver:Driver.enter",
        "session.driver:Driver.leave",
        "session.driver:Driver.before_update",
        "session.driver:Driver.after_update",
    ),
    "random": ("frameworks.torch.data:random_state",),
    "capture": ("frameworks.torch.rank_state:TorchRankState.packed", "session.redo.loader:Cursor.position"),
    "pack": ("frameworks.torch.data:pack",),
    "publish": ("session.saves.publication:Publication.publish", "session.peers:Peers.publish"),
    "begin": ("frameworks.torch.window:TorchWindow.begin", "frameworks.torch.collectives:TorchCollectives.begin_tail"),
    "machine": ("protocol.rank:Rank.on",),
    "record": ("_native:Page.write", "_native:Page.begin", "_native:Board.set_tail"),
    "arrive": ("_native:Page.arrive",),
    "barrier": ("_native:Page.cross",),
    "interrupt": ("interrupt:Interrupt.arm", "interrupt:Interrupt.disarm"),
    "intact": ("frameworks.torch.collectives:TorchCollectives.intact",),
    "guard": (
        "frameworks.torch.collectives:TorchCollectives.issue",
        "frameworks.torch.communication.guarded_works:GuardedWork.__init__",
        "frameworks.torch.communication.guarded_works:GuardedWork._inner_ended",
    ),
    "gloo": ("frameworks.torch.communication.process_group:ResilientGroup.run",),
}
"""Label -> what is timed under it. Each of them is there: ``tests/pure/test_benchmarks.py``."""

LOOKS: dict[str, tuple[str, ...]] = {
    "watch": (
        "session.driver:Driver.check",
        "session.comparisons.anomaly_reports:AnomalyReports._clipped",
        "session.driver:Driver._is_anomalous",
        "session.comparisons.anomaly_reports:AnomalyReports.write",
        "session.comparisons.anomalies:Anomalies.begin",
        "session.comparisons.anomalies:Anomalies.applied",
        "frameworks.torch.gradients:TorchGradients.kept",
    ),
    "norm": ("frameworks.torch.gradients:TorchGradients.norm",),
    "audit": (
        "session.comparisons.replica_comparison:Comparison.head",
        "session.comparisons.replica_comparison:Comparison.look",
    ),
}
"""The same of what looks at norms and losses (TRE), of a norm that is computed for that, and of what compares replicas.
"""

NOT_OURS = ("gloo",)
"""Timed only to be taken out of its caller: a run without a Session has it too."""
WAITING = ("barrier",)
"""Mostly waiting for the slowest rank, for which the next collective would wait otherwise."""

_OURS = "resilient_train."
_CALIBRATION = 2000


class Ledger:
    """Nanoseconds and calls by label, of all threads (autograd's and gloo's call us, too)."""

    def __init__(self) -> None:
        self.own_ns: dict[str, int] = defaultdict(int)
        self.cpu_ns: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)
        self.each_barrier_ns: list[int] = []
        self._local = threading.local()

    def timed(self, label: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` with a stop watch around it."""

        @functools.wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            stack = self._local.__dict__.setdefault("stack", [])
            inner = [0, 0]
            stack.append(inner)
            begin, begin_cpu = time.perf_counter_ns(), time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took_cpu, took = time.thread_time_ns() - begin_cpu, time.perf_counter_ns() - begin
                stack.pop()
                if stack:
                    stack[-1][0] += took
                    stack[-1][1] += took_cpu
                self.own_ns[label] += took - inner[0]
                self.cpu_ns[label] += took_cpu - inner[1]
                self.calls[label] += 1
                if label == "barrier":
                    self.each_barrier_ns.append(took)

        return run


def watch_cost_us() -> float:
    """What one stop watch adds to the sum of own times, here and now."""
    ledger = Ledger()
    inner = ledger.timed("inner", lambda: None)

    def call_many() -> None:
        for _ in range(_CALIBRATION):
            inner()

    ledger.timed("outer", call_many)()
    return sum(ledger.own_ns.values()) / 1e3 / _CALIBRATION


@contextmanager
def watching(watched: Mapping[str, tuple[str, ...]] = WATCHED) -> Iterator[Ledger]:
    """A ledger that fills while the block runs; afterwards every function is as it was."""
    ledger = Ledger()
    undo: list[tuple[Any, str, Any]] = []
    try:
        for label, places in watched.items():
            for place in places:
                name, _, path = place.partition(":")
                module = importlib.import_module(f"resilient_train.{name}")
                of, _, attribute = path.rpartition(".")
                owner = getattr(module, of) if of else module
                original = vars(owner)[attribute]
                undo.append((owner, attribute, original))
                # A method of a native class does not bind itself any more once it is wrapped, and need not: `run` does.
                setattr(owner, attribute, ledger.timed(label, original))
        yield ledger
    finally:
        for owner, attribute, original in undo:
            setattr(owner, attribute, original)


def python_calls(run: Callable[[], None]) -> int:
    """How many calls of this package's Python functions ``run`` makes on this thread.

    Where a step's own data have washed the caches, each costs microseconds, and what it does nearly nothing. Not seen:
    the one call per bucket on gloo's thread.
    """
    calls = 0

    def count(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_globals.get("__name__", "").startswith(_OURS)

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls
