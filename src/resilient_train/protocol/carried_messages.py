"""Whether messages that bodies send are received in the same step: the agent hears it of both ends."""

from __future__ import annotations

from resilient_train.protocol.messages import BodiesMessages, MessageChannel

_KEPT = 8
"""Updates of which it is remembered what ranks have said: they are heard one after the other."""


class CarriedMessages:
    """What ranks have said. One channel is told, once."""

    def __init__(self) -> None:
        self._of = (-1, -1)
        self._said: dict[int, dict[int, dict[MessageChannel, int]]] = {}
        """By update and rank."""
        self._told = False

    def heard(self, rank: int, said: BodiesMessages, of: tuple[int, int]) -> MessageChannel | None:
        """A channel whose ends have counted otherwise. ``of``: the attempt and the generation; what was said in others
        counts for nothing.
        """
        if of != self._of:
            self._of, self._said = of, {}
        words = dict(said.words)
        of_update = self._said.setdefault(said.commits, {})
        of_update[rank] = words
        for old in sorted(self._said)[:-_KEPT]:
            del self._said[old]
        for channel in words if not self._told else ():
            other = of_update.get(channel.source if rank == channel.target else channel.target)
            if other is not None and other.get(channel) != words[channel]:
                self._told = True
                return channel
        return None
