"""Tells the agent that a rank's script imports this package: from then on the rank is one that can be started again.

A script says so itself only at its Session, and until then it imports, loads data and builds a model: it may be killed
in any of these. In a fork, and in an interpreter that runs the script behind ``BOOT``, the package is imported before
the script begins. There the script's own import is seen by what every import asks of a module that is there already.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import FrameType, ModuleType
from typing import Any

from resilient_train import config, standby_stage
from resilient_train.errors import ConfigError, JobEnded, ProtocolError

BOOT = "from resilient_train.launch.fork.live import begin; begin()"
"""What a new interpreter runs with ``python -u -c``, see ``launch/fork/live.py``."""
ROLE = "import"
"""Of the connection, see ``messages.Hello``."""
_ANSWER_S = 1.0
"""How long an import may wait for an agent that is stopped. What was sent is read when it goes on."""


class _Unasked(ModuleType):
    """This package, until the script imports it."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__spec__" and not _is_ours(sys._getframe(1)):  # noqa: SLF001 - who imports it
            self.__class__ = ModuleType  # type: ignore[assignment] # as it was
            _tell()
        return ModuleType.__getattribute__(self, name)  # not super(): it may be of that class already


def note_import() -> None:
    """The package is being imported: by the script, unless this interpreter did it first."""
    if BOOT not in sys.orig_argv[:4]:
        _tell()


def watch() -> None:
    """The package is imported, and the script begins."""
    if _is_rank():
        sys.modules["resilient_train"].__class__ = _Unasked


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the import is one of this package's own."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "importlib":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "resilient_train"


def _is_rank() -> bool:
    """Not where the job runs already, so that its agent knows; nor in a process that has no rank yet."""
    if standby_stage.stage is not None:
        return False
    link = _link()
    return link is not None and not link.joining


def _link() -> config.AgentLink | None:
    try:
        return config.read_link()
    except ConfigError:  # the Session says so, where there is one
        return None


def _tell() -> None:
    """Never fails: an agent that is gone, or takes this process for none of its ranks, is the Session's business."""
    link = _link() if _is_rank() else None
    if link is None:
        return
    from resilient_train.protocol.messages import Hello
    from resilient_train.transport import Channel

    try:
        with contextlib.closing(Channel(link.socket, _ANSWER_S)) as channel:
            channel.send(Hello(ROLE, link.rank, link.incarnation, os.getpid(), token=link.token))
            channel.receive(_ANSWER_S)  # or the end of this process might be seen first
    except (OSError, JobEnded, ProtocolError):
        return
