"""What this rank lets the agent's hang watch see of its progress, and its Python stacks on request."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from resilient_train.interrupt import STACKS_SIGNAL
from resilient_train.observe.sinks import say_aside
from resilient_train.observe.stacks import listen_for_stacks, stacks_file
from resilient_train.protocol.progress import Activity
from resilient_train.session.agent_link import Link


class Pulse:
    """The step record's finer words. A store of a few nanoseconds each; nobody is woken."""

    def __init__(self, link: Link, run_dir: str, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._link = link
        self._tell = tell
        self._path = stacks_file(Path(run_dir), link.rank, link.incarnation)
        self.folder = self._path.parent
        self._file: IO[str] | None = None
        self._activity = Activity.TRAINING

    def open(self) -> None:
        """From now on the hang watch may ask for stacks."""
        try:
            self._file = listen_for_stacks(self._path)
        except OSError as error:  # a full disk is no reason not to train
            say_aside(f"rank {self._link.rank} can't write stacks: {error}")
        self.at(Activity.TRAINING)

    def close(self) -> None:
        """Idempotent. An empty file is taken away."""
        if self._file is None:
            return
        faulthandler.unregister(STACKS_SIGNAL)
        empty = os.fstat(self._file.fileno()).st_size == 0
        self._file.close()
        self._file = None
        if empty:
            with contextlib.suppress(OSError):  # somebody else has tidied up
                self._path.unlink()

    def at(self, activity: Activity) -> None:
        """What this rank is at from now on."""
        self._activity = activity
        self._link.peers.set_activity(activity)

    def leaving(self) -> None:
        """What comes next is the end, as a rule: a collective of the others that fails now has that for a reason."""
        if self._activity is not Activity.FINISHED:
            self.at(Activity.LEAVING)

    def stays(self) -> None:
        """The error was caught: the training goes on."""
        if self._activity is Activity.LEAVING:
            self.at(Activity.TRAINING)

    @contextlib.contextmanager
    def slow(self, what: str) -> Iterator[None]:
        """While in here, nobody is taken for hung."""
        before, begun_ns = self._activity, time.monotonic_ns()
        self.at(Activity.SLOW)
        try:
            yield
        finally:
            self.at(before)
            self._link.peers.excuse_window()
            self._tell("slow", {"what": what, "duration_ns": time.monotonic_ns() - begun_ns})
