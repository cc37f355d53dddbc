"""The end of a rank that can't go on, and whose script is not to blame: the next strategy is a new process (ARF).

That is so where its accelerator does not do what it is told, and where one of its data loader's workers was killed (as
a rule because memory ran out: the kernel chose the worker, and could as well have chosen the rank). It ends by a
signal, because an exit code would say that the user's script had failed, which ends the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from traceback import walk_tb
from typing import Any

from resilient_train.frame_variables import variables
from resilient_train.observe.sinks import say_aside

_KILLED = "is killed by signal"
"""Of a worker, says torch (DataLoader.cpp), which raises RuntimeError wherever the training thread is at that moment.
"""
_GONE = "exited unexpectedly"
"""So says the iterator of workers that nobody told it of: of those that are no children of this process
(``forkserver``), and where the other error went by in a body that a fault has cut.
"""
_FINDS, _FOUND = "_try_get_data", "failed_workers"
"""Where it finds them (torch/utils/data/dataloader.py)."""


def fail_stop(tell: Callable[[str, dict[str, Any]], None], kind: str, reason: str) -> None:
    """Ends this process, after an event and a line on stderr that say why."""
    tell(kind, {"error": reason})
    say_aside(reason)
    os.kill(os.getpid(), signal.SIGKILL)


def lost_worker(error: BaseException | None) -> str:
    """What torch says of a data loader's worker that was killed, if ``error`` comes of that; else empty."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker") and _was_killed(error):
            return str(error).strip()
        error = error.__cause__ or error.__context__
    return ""


def _was_killed(error: RuntimeError) -> bool:
    """And has not left by itself, which is a failure of the script's."""
    if _GONE not in str(error):
        return _KILLED in str(error)
    finding = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == _FINDS)
    codes = [each.exitcode for frame in finding for each in variables(frame).get(_FOUND, ())]
    return bool(codes) and all(code is not None and code < 0 for code in codes)
