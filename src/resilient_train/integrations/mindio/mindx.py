"""What MindX (taskd) has registered with ``mindio_ttp``: called by a thread of its own, in the order of events.

A callback may wait, and may give its answer while it is called: so it is never called by the thread that takes answers.
"""

from __future__ import annotations

import inspect
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from resilient_train.integrations.mindio.controller import MindXCall

log = logging.getLogger("resilient_train.mindio")

ACTIONS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")


class MindX:
    """``callbacks``: of each action one. ``wait_s``: how long an answer may take."""

    def __init__(self, callbacks: Mapping[str, Callable[..., Any]], wait_s: float) -> None:
        assert set(callbacks) == set(ACTIONS), "it is asked everything, or nothing"
        self.wait_s = wait_s
        self._callbacks = dict(callbacks)
        self._reports: queue.SimpleQueue[MindXCall | None] = queue.SimpleQueue()

    def start(self, failed: Callable[[str], object]) -> None:
        """From here on callbacks are called. ``failed`` gets a sentence when one has raised."""
        threading.Thread(target=self._run, args=(failed,), name="rt-mindx", daemon=True).start()

    def report(self, report: MindXCall) -> None:
        """Behind those of before."""
        self._reports.put(report)

    def close(self) -> None:
        """Nothing more is reported: what was, is."""
        self._reports.put(None)

    def _run(self, failed: Callable[[str], object]) -> None:
        while (report := self._reports.get()) is not None:
            callback = self._callbacks[report.action]
            log.info("MindX is called: %s%r", *report)
            try:
                callback(*_fitting(callback, report))
            except Exception as error:
                log.exception("MindX's callback %s has failed", report.action)
                failed(f"MindX's callback {report.action} has failed ({error!r})")


def _fitting(callback: Callable[..., Any], report: MindXCall) -> tuple[Any, ...]:
    """Older callbacks for faulty ranks take no error codes."""
    if report.action != "report_fault_ranks":
        return report.arguments
    try:
        inspect.signature(callback).bind(*report.arguments)
    except TypeError:
        return report.arguments[:1]
    except ValueError:  # of C code, which does not say what it takes
        pass
    return report.arguments
