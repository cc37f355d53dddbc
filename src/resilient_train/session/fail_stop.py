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
_FINDS, _ALL, _FOUND = "_try_get_data", "_workers", "failed_workers"
"""The iterator's function that finds a worker gone of whom nobody told it (torch/utils/data/dataloader.py), those that
it has, and a variable there: those that it has found. They are no children of this process (``forkserver``), or the
other error went by in a body that a fault has cut. What a worker was about to hand over fails before that.
"""
_HANDED_OVER = (OSError, EOFError)
_ENDS_S = 1.0
"""A process that has closed all its files has not ended yet."""


def fail_stop(tell: Callable[[str, dict[str, Any]], None], kind: str, reason: str) -> None:
    """Ends this process, after an event and a line on stderr that say why."""
    tell(kind, {"error": reason})
    say_aside(reason)
    os.kill(os.getpid(), signal.SIGKILL)


def lost_worker(error: BaseException | None) -> str:
    """What there is to say of a data loader's worker that was killed, if ``error`` comes of that; else empty."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker") and _KILLED in str(error):
            return str(error).strip()
        if pids := _killed(error):
            return f"DataLoader worker (pid {', '.join(map(str, pids))}) {_KILLED}"
        error = error.__cause__ or error.__context__
    return ""


def _killed(error: BaseException) -> list[int]:
    """Those that the iterator misses. One that has left by itself is a failure of the script's."""
    found = (variables(frame) for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == _FINDS)
    for names in found:
        gone = names.get(_FOUND) or []
        if not gone and isinstance(error, _HANDED_OVER):
            workers = getattr(names.get("self"), _ALL, [])
            for each in workers:
                each.join(_ENDS_S / len(workers))
            gone = [each for each in workers if each.exitcode]
        if gone:
            return [each.pid for each in gone] if all(each.exitcode and each.exitcode < 0 for each in gone) else []
    return []
