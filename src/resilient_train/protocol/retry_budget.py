"""How often things went wrong without a committed update in between, for the policy to say when it is enough."""

from __future__ import annotations

from resilient_train.protocol.policy import Policy


class RetryBudget:
    """What fails again and again at the same update is not cured by doing the same once more."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.furthest = 0
        """Updates that were committed, as far as anybody has said."""
        self._deaths: dict[int, int] = {}
        self._failures = 0
        self._failed_at = -1
        self._repairs: list[int] = []

    def reached(self, commits: int) -> None:
        """So many updates are committed."""
        if commits > self.furthest:
            self.furthest = commits
            self._deaths.clear()

    def died(self, rank: int) -> None:
        """One more death of the rank."""
        self._deaths[rank] = self.deaths(rank) + 1

    def deaths(self, rank: int) -> int:
        """How often it has died in a row."""
        return self._deaths.get(rank, 0)

    def failed(self) -> bool:
        """One more failure that cost no process. True: too many, in a row or lately."""
        self._failures = 1 if self.furthest > self._failed_at else self._failures + 1
        self._failed_at = self.furthest
        self._repairs = [commits for commits in self._repairs if commits > self.furthest - self._policy.repairs_window]
        self._repairs.append(self.furthest)
        return self._failures >= self._policy.max_stuck or len(self._repairs) > self._policy.max_repairs

    def start_again(self) -> None:
        """The job has gone back to a saved state."""
        self.furthest = 0
        self._deaths.clear()

    def copy(self) -> RetryBudget:
        """An independent one in the same state."""
        new = RetryBudget(self._policy)
        new.__dict__.update(self.__dict__)
        new._deaths, new._repairs = dict(self._deaths), list(self._repairs)
        return new
