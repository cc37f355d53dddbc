"""Torch's store in a process that takes a rank's place: it connects when somebody first uses it.

A recovery needs nothing that is in the store (``address_store.py``), so it needs no connection either: any process of
this machine can take all that there are. What the script itself wants of the store waits for one, as in any rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import PrefixStore, Store

_OWN_PREFIX = "default_pg"
"""Of ``init_process_group``, around the store that it has made itself."""
_kept: list[LateStore] = []
"""Torch's C++ holds these, and would lose what they do without their Python halves."""


class LateStore(Store):
    """The store that ``connect`` makes. C++ calls the same verbs, but for those of queues and ``list_keys``."""

    timeout: timedelta

    def __init__(self, connect: Callable[[], Store]) -> None:
        super().__init__()
        self._connect = connect
        self._lock = threading.Lock()
        self._store: Any = None  # torch's stub of a store lacks verbs
        _kept.append(self)

    def connected(self) -> Any:
        """The store itself. Raises what torch raises where there is no connection to be had."""
        with self._lock:
            if self._store is None:
                self._store = self._connect()
            self._store.set_timeout(self.timeout)  # C++ may have set another one here
            return self._store

    def prefixed(self, prefix: str) -> LateStore:
        """What a PrefixStore of this one would be."""
        store = LateStore(lambda: PrefixStore(prefix, self.connected()))
        store.set_timeout(self.timeout)
        return store

    def set(self, key: str, value: Any) -> None:
        self.connected().set(key, value)

    def get(self, key: str) -> bytes:
        return cast("bytes", self.connected().get(key))

    def add(self, key: str, value: int) -> int:
        return cast("int", self.connected().add(key, value))

    def check(self, keys: list[str]) -> bool:
        return cast("bool", self.connected().check(keys))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return cast("bytes", self.connected().compare_set(key, expected, desired))

    def append(self, key: str, value: Any) -> None:
        self.connected().append(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return cast("list[bytes]", self.connected().multi_get(keys))

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        self.connected().multi_set(keys, values)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.connected().wait(keys, *timeout)

    def has_extended_api(self) -> bool:
        return True  # asked before anything is wanted; a TCPStore has it

    def clone(self) -> Store:
        return cast("Store", self.connected().clone())

    def delete_key(self, key: str) -> bool:
        return cast("bool", self.connected().delete_key(key))

    def num_keys(self) -> int:
        return cast("int", self.connected().num_keys())

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - by these names C++ calls them

    def list_keys(self) -> list[str]:
        return cast("list[str]", self.connected().list_keys())

    def queue_push(self, key: str, value: Any) -> None:
        self.connected().queue_push(key, value)

    def queue_pop(self, key: str, *block: bool) -> bytes:
        return cast("bytes", self.connected().queue_pop(key, *block))

    def queue_len(self, key: str) -> int:
        return cast("int", self.connected().queue_len(key))


def behind(store: Store) -> LateStore | None:
    """What ``init_process_group``, or a later ``new_group``, hands on as a group's store; None if it is connected."""
    if isinstance(store, LateStore):
        return store
    inner = store.underlying_store if isinstance(store, PrefixStore) else None
    return inner.prefixed(_OWN_PREFIX) if isinstance(inner, LateStore) else None
