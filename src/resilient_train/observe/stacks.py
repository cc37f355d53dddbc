"""A rank's Python stacks, which the hang watch asks for.

They are written by ``faulthandler`` from inside the signal handler: no bytecode runs, no lock is taken, so they come
also out of a loop that never lets go of the GIL, and out of native code. A stopped process writes nothing.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
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
    faulthandler.register(STACKS_SIGNAL, file)
    return file
