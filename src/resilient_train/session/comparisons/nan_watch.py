"""Whether a rank's state has become NaN, and what was a training is none any more.

Replicas do not see that: a moment whose sign has flipped makes a parameter NaN, that all gradients, and with them all
replicas alike, long before they compare. So each rank looks for itself, where replicas compare and at the end, and
tells the agent once. ``TRE`` finds it earlier where the script gives it the norm or the loss of a step; where not, all
go back for what is seen here.
"""

from __future__ import annotations

from resilient_train.frameworks.roles import State
from resilient_train.protocol.messages import HoldsNan
from resilient_train.session.agent_link import Link
from resilient_train.state.nan import NanFound


class NanWatch:
    """One rank's. ``goes_back``: whether all are to go back to where there was none yet."""

    def __init__(self, link: Link, state: State, *, goes_back: bool) -> None:
        self._link = link
        self._state = state
        self._goes_back = goes_back
        self._without = self._since = -1
        self.found: NanFound | None = None
        """The last time that it looked."""

    def look(self, commits: int, step: int) -> None:
        """Before update ``commits`` and step ``step``, or behind the last ones."""
        before, self.found = self.found, self._state.nan()
        if self.found is None:
            self._without, self._since = commits, step if self._goes_back else -1
        elif before is None:
            self._link.channel.send(HoldsNan(commits, step, str(self.found), self._without, self._since))
