"""A rank's newest collectives, written beside its Python stacks when the agent's hang watch asks for them; and the
stacks of other threads than the main one.

The framework's recorder is asked under the GIL, and the file may lie on storage that is gone. So each answer is given
by a thread of its own, for which nothing waits: a rank in which one hangs answers no more, and trains on.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from resilient_train.observe.collectives import failure_of, file_of, report_of
from resilient_train.observe.sinks import say_aside
from resilient_train.observe.stacks import append_other_threads, stacks_file
from resilient_train.session.agent_link import Link

_CLOSE_S = 1.0


class CollectiveReport:
    """``recorded``: what the framework's recorder has (``Groups.recorded``); may block, and may raise anything."""

    def __init__(self, link: Link, folder: Path, recorded: Callable[[], bytes]) -> None:
        self._peers = link.peers
        self._rank, self._incarnation = link.rank, link.incarnation
        self._path = file_of(folder, link.rank, link.incarnation)
        self._stacks = stacks_file(folder.parent, link.rank, link.incarnation)
        self._recorded = recorded
        self._asked = self._peers.report_asked
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Answers if somebody has asked. Quick; called on one thread, again and again."""
        asked = self._peers.report_asked
        if asked == self._asked or (self._thread is not None and self._thread.is_alive()):
            return
        self._asked = asked
        thread = threading.Thread(target=self._answer, args=(asked,), name="rt-report", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread to be had: then there is no answer
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Gives an answer that is being written the time to come to its end."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _answer(self, asked: int) -> None:
        try:
            append_other_threads(self._stacks)
            self._write(self._content())
        except OSError as error:
            say_aside(f"rank {self._rank} can't write its newest collectives: {error}")
        else:
            with contextlib.suppress(ValueError):  # the Session is over
                self._peers.set_reported(asked)

    def _content(self) -> bytes:
        try:
            return report_of(self._recorded(), self._rank, self._incarnation)
        except Exception as error:  # what a recorder raises must not matter to the training; the file says it
            return failure_of(error, self._rank, self._incarnation)

    def _write(self, content: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
