"""A store for gloo's constructor, which asks in it for the addresses of its peers.

Not torch's own store, but for the groups that a job begins with: that one takes words from any process of the machine,
and a wait in it for a peer that has died lasts for the group's whole time-out (30 minutes by default).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

from torch._C._distributed_c10d import Store

from resilient_train.frameworks.roles import Addresses


class AddressStore(Store):
    """What gloo calls of a store, on top of ``addresses``. ``note`` is told each value that is written or read."""

    def __init__(
        self, addresses: Addresses, name: str, members: Sequence[int], note: Callable[[bytes], object]
    ) -> None:
        """``name``: the group's; ``members``: its ranks in the job."""
        super().__init__()
        self._addresses = addresses
        self._name = name
        self._members = members
        self._note = note

    def set(self, key: str, value: Any) -> None:  # bytes; torch's stub says str
        self._note(value)
        self._addresses.tell(f"{self._name}/{key}", value, self._members)

    def get(self, key: str) -> bytes:
        value = self._addresses.wait_for(f"{self._name}/{key}")
        self._note(value)
        return value

    def wait(self, keys: Sequence[str], _timeout: timedelta | None = None) -> None:
        for key in keys:
            self._addresses.wait_for(f"{self._name}/{key}")


class FirstAddresses:
    """See ``roles.Addresses``: where no agent passes words on yet, by torch's store."""

    def __init__(self, store: Store, attempt: int) -> None:
        self._store = store
        # When all start again the agent empties the store; a word of the dead may still be on its way to it.
        self._prefix = f"resilient/{attempt}"

    def tell(self, key: str, value: bytes, ranks: Sequence[int]) -> None:  # noqa: ARG002 - all ranks read the store
        self._store.set(f"{self._prefix}/{key}", cast("Any", value))  # likewise

    def wait_for(self, key: str) -> bytes:
        return self._store.get(f"{self._prefix}/{key}")
