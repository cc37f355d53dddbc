"""Copies of the state into an image that go on behind the training's back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from resilient_train._native import Copier
from resilient_train.errors import TransferError

COPY_TIMEOUT_MS = 600_000


class Capture(Protocol):
    """One copy that is under way. Every method is the training thread's."""

    def fence(self) -> None:
        """Returns when what is copied may be overwritten. Raises TransferError if there will be no copy of it."""
        ...

    @property
    def done(self) -> bool:
        """Whether ``finish`` need not wait."""
        ...

    def finish(self) -> bytes:
        """Returns when the image is complete: xxh3_128 of each 4 MiB of it, joined. Raises TransferError."""
        ...

    def abort(self) -> None:
        """Returns when nothing is written to the image any more. What lies there is rubbish."""
        ...


class HostCapture:
    """Of memory of this process: what is copied is free when the image is complete, and not before."""

    def __init__(
        self, pieces: Sequence[tuple[int, int, int]], owner: object, memory: memoryview, copier: Copier
    ) -> None:
        """Begins. ``pieces`` are (address, bytes, offset in the image ``memory``); ``owner`` stays alive meanwhile."""
        self._copier = copier
        self._bytes = memory.nbytes
        copier.gather(memory, pieces, owner=owner)

    def fence(self) -> None:
        try:
            in_time = self._copier.wait(COPY_TIMEOUT_MS)
        except OSError as error:
            raise TransferError(f"copying {self._bytes} bytes within memory has failed: {error}") from error
        if not in_time:
            self._copier.abort()
            raise TransferError(f"copying {self._bytes} bytes within memory took over {COPY_TIMEOUT_MS} ms")

    @property
    def done(self) -> bool:
        return self._copier.done

    def finish(self) -> bytes:
        self.fence()
        return self._copier.digests()

    def abort(self) -> None:
        self._copier.abort()
