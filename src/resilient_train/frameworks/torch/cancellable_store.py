"""A store whose waits can be given up.

gloo's constructor waits in the store for addresses of peers. When one of them dies before it has written its own, that
wait lasts for the group's whole time-out (30 minutes by default) and no signal ends it. Here it ends as soon as
somebody announces a newer generation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

_POLL_S = 0.0005


class CancellableStore(Store):
    """Hands all calls to ``inner``; what would block there polls here, until ``cancelled``. Never blocks the client
    that it shares with others: a waiting get would make the next set wait behind it.
    """

    def __init__(self, inner: Store, cancelled: threading.Event, note: Callable[[Any], None]) -> None:
        """``note`` is told each value that is written or read."""
        super().__init__()
        self._inner = inner
        self._cancelled = cancelled
        self._note = note

    def set(self, key: str, value: Any) -> None:
        self._note(value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        value = self._inner.get(key)
        self._note(value)
        return value

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        while not self._inner.check(list(keys)):
            if self._cancelled.wait(_POLL_S):
                raise RuntimeError("the build of this process group was given up: a newer generation was announced")

    def check(self, keys: Sequence[str]) -> bool:
        return self._inner.check(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._inner.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._inner.delete_key(key)

    def num_keys(self) -> int:
        return self._inner.num_keys()
