"""Whether ranks that are to hold the same bits do: the one place where replicas are compared.

Each rank writes a fingerprint of its parameters and optimizer state into its record of the board, in front of something
that no rank passes before all have come to it, and reads those of its replicas behind it. All of them find a difference
at the same place, tell the agent what they hold, and go no further.

When: with each snapshot (a checkpoint is put together from parts of all replicas), when a recovery is over (before
anybody trains on what a replica gave), at the end, and before the updates that are 1, 2, 4, 8, ... behind the last of
these beginnings: a gradient that nobody averages shows in the first one, unless its learning rate is still 0. And every
so many updates: what changes a bit without a sign may do so at any time. Also before those that are 3, 7, 15, 31, ...
behind a beginning: ranks that train apart and average their parameters each second, fourth or tenth update are the same
before all the others.

Objects of the user's (``state=``), schedulers and plain attributes of modules are not in the fingerprint: one that
differs (a clock, a running mean of the rank's own losses) need not be wrong, until a new process gets that of another
rank. The agent is told of them before the updates that are 1, 2, 4, 8, ... behind a beginning, and tells of a
difference once.

The fingerprint of a snapshot is made behind its copy, beside the step. That may say nothing: a script may have used
other weights meanwhile, for an evaluation. So where those differ, all compare before
the next update, and no snapshot takes the place of the older one before they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resilient_train.frameworks.roles import Gradients, State
from resilient_train.protocol.messages import Differs, Held, Shared
from resilient_train.protocol.replicas import alike
from resilient_train.session.agent_link import Link


class Comparison:
    """One rank's part. ``groups`` are the replica groups. ``every``: so many updates at most are not looked at; 0: any
    number. ``inputs``: a digest of the window's batches, and the device.
    """

    def __init__(
        self,
        link: Link,
        state: State,
        gradients: Gradients,
        groups: Sequence[Sequence[int]],
        every: int,
        inputs: Callable[[], tuple[str, str]],
    ) -> None:
        self._link = link
        self._state = state
        self._gradients = gradients
        self._every = every
        self._inputs = inputs
        self._groups = groups
        self.replicas = next((group for group in groups if link.rank in group), (link.rank,))
        """The ranks that hold what this one holds, itself included."""
        self._origin = 0
        self._written = -1
        self._sure = True
        """What is written was read where nobody can have changed it."""
        self.doubtful = False
        """What was not sure, before the last barrier, was not the same."""
        self.doubted = False
        """Or was not in another replica group: a snapshot is one of all, so none takes an older one's place then."""
        self._since: tuple[int, tuple[int, ...]] = (-1, ())
        """Since what update it is doubtful, and what its replicas held then."""
        self._left_out = -1
        """The update before which all would have compared, and a snapshot was to show it."""
        self.forget()

    @property
    def alone(self) -> bool:
        """Whether there is nobody to compare with."""
        return len(self.replicas) == 1

    def begin_at(self, commits: int) -> None:
        """All ranks begin, or go on together, before this update."""
        self._origin = commits

    def head(self, commits: int, *, shown: bool) -> bool:
        """A window begins, and nothing of it was done yet. ``shown``: a snapshot will show what it begins with.

        Whether it is one of those updates.
        """
        since, seldom = commits - self._origin, self.is_seldom(commits)
        usual = seldom or (since > 0 and self._every > 0 and since % self._every == 0)
        if seldom and not self.alone:
            self._link.channel.send(Shared(commits, self._state.rows(extra=True)))
        compares = usual or (since > 1 and not since & (since + 1))
        self._left_out = commits if compares and shown else -1
        asked = commits == self._link.look_at and not self.alone
        if (compares and not shown) or self.doubted or asked:
            held = self.write(commits)
            if asked:
                self._link.channel.send(Held(commits, held))
        return usual

    def is_seldom(self, commits: int) -> bool:
        """Whether it is one of the updates that are 1, 2, 4, 8, ... behind a beginning."""
        since = commits - self._origin
        return since > 0 and since & (since - 1) == 0

    def not_shown(self, commits: int) -> None:
        """No snapshot shows what the window begins with, and no body has begun."""
        if self._left_out == commits:
            self.write(commits)

    def write(self, commits: int, digest: str = "") -> int:
        """Writes what this rank holds before update ``commits``: to be read behind a barrier, see ``look``.

        Returns the fingerprint; 0 if there is nobody to compare with. ``digest``: what was just made of it.
        """
        if self.alone:
            return 0
        if self._written != commits or not self._sure or digest:
            held = fingerprint(digest or self._state.fingerprint().digest())
            self._link.peers.set_fingerprint(commits, held)
            self._written, self._sure = commits, True
        return self._link.peers.fingerprint(self._link.rank, commits)

    def show(self, commits: int, held: int) -> None:
        """Writes the fingerprint of a snapshot in memory, if there is one; nothing if more is known already."""
        if held and not self.alone and self._written != commits:
            self._link.peers.set_fingerprint(commits, held)
            self._written, self._sure = commits, False

    def forget(self) -> None:
        """What this rank holds is a copy: it says nothing that its source does not."""
        for commits in (0, 1):
            self._link.peers.set_fingerprint(commits, 0)
        self._written, self.doubtful, self.doubted = -1, False, False

    def look(self) -> None:
        """Behind the barrier: compares, if anything was written before it. Does not return if replicas differ."""
        commits, self._written = self._written, -1
        if commits < 0:
            return
        was, self.doubtful = self.doubtful, not self._same(self.replicas, commits)
        if self.doubtful and not was:
            self._since = commits, tuple(self._link.peers.fingerprint(rank, commits) for rank in self.replicas)
        self.doubted = self.doubtful or not all(self._same(group, commits) for group in self._groups)
        if self.doubtful and self._sure:
            averages, rows = self._gradients.averages(), self._state.rows()
            self._link.channel.send(Differs(commits, rows, averages, *self._since, *self._inputs()))
            self._link.wait_for_the_end()

    def _same(self, group: Sequence[int], commits: int) -> bool:
        return alike(self._link.peers.fingerprint(rank, commits) for rank in group)


def fingerprint(digest: str) -> int:
    """A digest as one word of 63 bits, never 0."""
    return int(digest[:16], 16) >> 1 or 1
