"""The pages of a rank's slots, made beside the training: made when they are first written, they cost ten copies."""

from __future__ import annotations

import threading

from resilient_train.errors import MemoryLimitError
from resilient_train.state.vault.slots import SlotPair


class Backing:
    """Has the kernel make the pages, in a thread that holds no lock of Python's meanwhile."""

    def __init__(self, pair: SlotPair) -> None:
        self._pair = pair
        self._failure: OSError | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rt-backing", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread is to be had (ulimit -u, pids.max): then the training waits for it
            self._run()

    def wait(self) -> None:
        """Until all pages are there. Raises MemoryLimitError if the kernel has none to give."""
        self._join()
        if self._failure is not None:
            rank = self._pair.rank
            raise MemoryLimitError(f"rank {rank}: the kernel gave no pages for its snapshots: {self._failure}")

    def close(self) -> None:
        """Makes no more. To be called before the pair is closed: memory that is being made can't be unmapped."""
        self._closing = True
        self._join()

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._pair.prefault(lambda: not self._closing)
        except OSError as error:  # told by ``wait``, in the training thread
            self._failure = error
