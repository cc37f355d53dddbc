"""A rank's Python stacks, which the hang watch asks for.

The main thread's is written by ``faulthandler`` from inside the signal handler: no bytecode runs, no lock is taken, so
it comes also out of a loop that never lets go of the GIL, and out of native code. A stopped process writes nothing.

Other threads' are not written in there: such a one may be running, and ``faulthandler`` reads its frames while they
come and go. Of five processes with a busy thread five died of 22 such writings, by SIGSEGV: the hang watch asks all
ranks, and so killed healthy ones. They are written by a thread of ours, under the GIL, if it comes to that.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from resilient_train.interrupt import STACKS_SIGNAL
from resilient_train.observe.sinks import open_to_append

STACKS_FOLDER = "stacks"


def stacks_file(run_dir: Path, rank: int, incarnation: int) -> Path:
    """Where those of a process are."""
    return run_dir / STACKS_FOLDER / f"rank_{rank}.{incarnation}.txt"


def listen_for_stacks(path: Path) -> IO[str]:
    """From now on this process writes them there when it is asked; the file has to stay open. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.fdopen(open_to_append(path), "a")
    faulthandler.register(STACKS_SIGNAL, file, all_threads=False)
    return file


def append_other_threads(path: Path) -> None:
    """All but the main thread's and the caller's, in the form in which ``faulthandler`` writes. Raises OSError."""
    text = "".join(_others())
    if text:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(path), "a", errors="backslashreplace") as file:  # names of files may be no text
            file.write(text)


def _others() -> Iterator[str]:
    names = {each.ident: each.name for each in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - there is no other way
        if ident in (threading.get_ident(), threading.main_thread().ident):
            continue
        yield f"Thread {names.get(ident, hex(ident))} (most recent call first):\n"
        at: FrameType | None = frame
        while at is not None:
            yield f'  File "{at.f_code.co_filename}", line {at.f_lineno} in {at.f_code.co_name}\n'
            at = at.f_back
        yield "\n"
