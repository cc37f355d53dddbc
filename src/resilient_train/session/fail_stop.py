"""The end of a rank that can't go on, and whose script is not to blame: the next strategy is a new process (ARF).

That is so where its accelerator does not do what it is told, and where one of its data loader's workers was killed (as
a rule because memory ran out: the kernel chose the worker, and could as well have chosen the rank). It ends by a
signal, because an exit code would say that the user's script had failed, which ends the job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from resilient_train.observe.sinks import say_aside

_KILLED = "is killed by signal"
"""Of a worker, says torch (DataLoader.cpp), which raises RuntimeError wherever the training thread is at that moment.
"""


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
        if isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker") and _KILLED in str(error):
            return str(error).strip()
        error = error.__cause__ or error.__context__
    return ""
