"""Messages between two ranks (``send``, ``recv`` and their like) of the bodies of steps: are both ends in one step?

A body that runs again sends and receives all its messages again, over new connections. One that was sent in one step
and is received in a later one is lost with a fault in between, and the next is taken for it. So both ends say, for
each channel, how many messages there were after each update; as one word, which changes with any of them.
"""

from __future__ import annotations

from typing import Any

import xxhash

from resilient_train.frameworks.torch.communication.process_group import ResilientGroup
from resilient_train.protocol.messages import MessageChannel

_BITS = 63


class BodyMessages:
    """Of one rank, since the connections are what they are."""

    def __init__(self) -> None:
        self._counts: dict[MessageChannel, int] = {}
        self._changed: set[MessageChannel] = set()
        self._words: dict[MessageChannel, int] = {}
        self._of_anybody = False
        """A receive took what came first: nobody knows of which channel."""

    def begin(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        """A message is sent, or a receive is begun."""
        if verb == "recv_anysource":
            self._of_anybody = True
            return
        me, peer = group.global_ranks[group.getRank()], group.global_ranks[args[1]]
        source, target = (me, peer) if verb == "send" else (peer, me)
        channel = MessageChannel(source, target, f"{group.group_name}, tag {args[2]}")
        self._counts[channel] = self._counts.get(channel, 0) + 1
        self._changed.add(channel)

    def commit(self, commits: int) -> None:
        """The bodies are over, with update ``commits``."""
        for channel in self._changed:
            text = f"{self._words.get(channel, 0)} {commits} {self._counts[channel]}"
            self._words[channel] = xxhash.xxh3_64_intdigest(text.encode()) >> (64 - _BITS)
        self._changed.clear()

    def forget(self) -> None:
        """The connections are new ones."""
        for memory in (self._counts, self._changed, self._words):
            memory.clear()
        self._of_anybody = False

    def words(self) -> list[tuple[MessageChannel, int]]:
        """Of each channel of this rank's, as of the last update; none where they are not known."""
        return [] if self._of_anybody else [*self._words.items()]
