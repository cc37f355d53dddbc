"""The end of a rank whose accelerator does not do what it is told: the next strategy is a new process (ARF).

It ends by a signal, because an exit code would say that the user's script had failed, which ends the job.
"""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from resilient_train.errors import DeviceError
from resilient_train.observe.sinks import say_aside

P = ParamSpec("P")
R = TypeVar("R")


class Reporter(Protocol):
    """Whose methods may surrender."""

    event: Callable[[str, dict[str, Any]], None]


S = TypeVar("S", bound=Reporter)


def surrenders(part: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method in which a DeviceError ends the process, after an event and a line on stderr that say why."""

    @functools.wraps(part)
    def with_surrender(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return part(self, *args, **kwargs)
        except DeviceError as error:
            self.event("device_failed", {"error": str(error)})
            say_aside(str(error))
            os.kill(os.getpid(), signal.SIGKILL)
            raise

    return with_surrender
