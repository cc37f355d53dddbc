"""Process groups of a new generation, built on a helper thread: their constructor listens to nobody."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from resilient_train.frameworks.roles import Groups
from resilient_train.protocol.messages import Address, FromAgent, Stop
from resilient_train.session.agent_link import Link

_LACKS = ("can't start new thread", "Resource temporarily unavailable")


def lacks(error: Exception) -> str:
    """What the system had no more of for this user, for people; empty: the error has another cause."""
    return " (ulimit -u, pids.max)" if any(words in str(error) for words in _LACKS) else ""


def build_groups(link: Link, groups: Groups, generation: int, *, replaced: bool) -> Any:
    """The groups, built but not adopted; the error that ended the building; or None: a newer stop came."""
    # Not a pipe: who writes to one that nobody reads any more is killed, where a script has SIGPIPE at its default.
    wakes = os.eventfd(0, os.EFD_CLOEXEC)
    addresses = AddressExchange(generation, os.dup(wakes))
    outcome: list[Any] = []

    def build() -> None:
        try:
            outcome.append(groups.build(generation, addresses, replaced=replaced))
        except Exception as error:
            outcome.append(error)
        addresses.close()

    link.hear_addresses(generation, addresses.hear)
    try:
        threading.Thread(target=build, name="rt-build-groups", daemon=True).start()
    except RuntimeError as error:  # no thread is to be had (ulimit -u, pids.max)
        outcome.append(error)
        addresses.close()
    try:
        if not _built_before_stop(link, wakes, addresses):
            addresses.give_up()
            return None
    finally:
        os.close(wakes)
    return outcome[0]


def _built_before_stop(link: Link, wakes: int, addresses: AddressExchange) -> bool:
    # A source may be ready with its offer before this rank has noticed that it is built.
    early: list[FromAgent] = []
    try:
        while True:
            if link.channel.wait_either(wakes):
                os.eventfd_read(wakes)
                closed = addresses.closed  # asked first: what is told while other words are sent is to be sent, too
                for each in addresses.take():
                    link.channel.send(each)
                if closed:
                    return True
                continue
            frame = link.receive_one()
            if isinstance(frame, Stop) and frame.generation > addresses.generation:
                return False
            if frame is not None:
                early.append(frame)
    finally:
        link.channel.put_back(early)


class AddressExchange:
    """See ``roles.Addresses``. The training thread, which has the channel, carries what the building one tells."""

    def __init__(self, generation: int, wake: int) -> None:
        """``wake``: an eventfd, which says that there is something to ``take``, or that it is ``closed``."""
        self.generation = generation
        self.closed = False
        """All is built, or nothing will be."""
        self._wake = wake
        self._changed = threading.Condition()
        self._known: dict[str, bytes] = {}
        self._told: list[Address] = []
        self._given_up = False

    def tell(self, key: str, value: bytes, ranks: Sequence[int]) -> None:
        with self._changed:
            self._told.append(Address(self.generation, key, value, tuple(ranks)))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """The building thread's last call."""
        self.closed = True
        os.eventfd_write(self._wake, 1)
        os.close(self._wake)

    def wait_for(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._known or self._given_up)
            if key not in self._known:
                raise RuntimeError("the build of this process group was given up: a newer generation was announced")
            return self._known[key]

    def take(self) -> list[Address]:
        """What is to be sent."""
        with self._changed:
            taken, self._told = self._told, []
        return taken

    def hear(self, frame: Address) -> None:
        """A rank's word, this one's own included."""
        with self._changed:
            self._known[frame.key] = frame.value
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nobody waits for what this is to build."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()
