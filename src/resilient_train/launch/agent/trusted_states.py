"""Which of the states that are saved a job may go on from, as far as its agent knows. No I/O.

Three things take trust from what is saved: replicas have differed (``doubt``), the script says that all is wrong since
a step (``distrust``), a rank could not take a source up (``refuse``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

from resilient_train.protocol.messages import Source
from resilient_train.state.checkpoint.manifest import parse_name
from resilient_train.state.vault.client import common_commits
from resilient_train.state.vault.frames import Store
from resilient_train.state.vault.slots import SLOTS

_TRIES = 3
"""Of taking up a state that can't be reached."""


class TrustedStates:
    """See the module's text."""

    def __init__(self, world_size: int, keep: int) -> None:
        """``keep``: so many checkpoints stay on storage."""
        self._world_size = world_size
        self.newest = self.newest_without_nan = -1
        """The update before the newest equal state that is saved; the step of the newest one stored without NaN."""
        self.agreed_commits = self.agreed_step = -1
        """The newest update before which all came to the same from each other's inputs, and the step that led to it:
        the newest checkpoint of no later step stays. Also in the runs before this one in the same directory.
        """
        self._newest_agreed = -1
        """Its step, as far as this run knows."""
        self.doubted = False
        """Replicas have differed: what memory holds is used as far as it was complete and equal, see ``newest``; and
        the ranks do not begin anew, which may cost more than a look at the machine.
        """
        self.others = False
        """What is in memory is of ranks that held other parts of the model."""
        self.wrong_since: int | None = None
        """The step since which the script says that all is wrong, while wrong states may lie in memory. Else None."""
        self.wrong_stored: int | None = None
        """The same of storage. Nothing new is written before that is set aside: nobody could tell the two apart."""
        self.going_back = False
        """The script has said so, and it is not chosen yet from what all ranks begin: what they still say of snapshots
        is of the history that is left.
        """
        self._kept_steps: deque[int] = deque(maxlen=SLOTS)
        """Of the newest snapshots in memory that were equal in all replicas. They may have been overwritten since."""
        self._stored_steps: deque[int] = deque(maxlen=keep)
        """Of the newest checkpoints that this run has written, or begun with."""
        self._refused: set[Source] = set()
        self._failed: dict[Source, set[int]] = {}
        """What could not be taken up for a reason that may pass, and in which attempts since the newest state."""
        self._kept_step: dict[int, int] = {}
        """The steps of what memory holds, by update."""

    # -- what is saved

    def equal(self, commits: int, step: int) -> None:
        """All ranks have a new snapshot, and replicas the same."""
        self.newest = max(self.newest, commits)
        self._kept_steps.append(step)
        self._failed.clear()
        self.memory_clean()

    def memory_clean(self) -> None:
        """Nothing that is wrong is in memory any more."""
        self.wrong_since = None

    def stored(self, step: int, *, nan: bool) -> None:
        """A checkpoint was written."""
        if self.wrong_since is None or step <= self.wrong_since:
            self._stored_steps.append(step)
            self.newest_without_nan = self.newest_without_nan if nan else step
            if step <= self.agreed_step:
                self._newest_agreed = step

    def agreed(self, commits: int, step: int) -> None:
        """Before that update all have come to the same from each other's inputs. What was saved before is trusted."""
        self.agreed_commits, self.agreed_step = commits, step
        self._newest_agreed = max((each for each in self._stored_steps if each <= step), default=self._newest_agreed)

    def memory_lost(self) -> None:
        """The holder is gone."""
        self._kept_steps.clear()

    def begun_with(self, source: Source | None, stored_steps: Iterable[int] = ()) -> None:
        """All ranks start from it; None: from the script's own state. ``stored_steps``: of all that lie on storage."""
        self.newest = source.commits if source is not None else -1
        step = _step_of(source) if source is not None else -1
        if step >= 0 and step not in self._stored_steps:
            self._stored_steps.append(step)
        kept = self._kept_step.get(self.newest, -1) if source is not None and source.kind == "memory" else -1
        if kept >= 0 and kept not in self._kept_steps:
            self._kept_steps.append(kept)
        if self.newest < self.agreed_commits:  # what was agreed on behind that is of a history that is left
            self.agreed_commits, self.agreed_step = (self.newest, step) if step >= 0 else (-1, -1)
        self._newest_agreed = max((each for each in stored_steps if each <= self.agreed_step), default=-1)

    # -- what is not trusted any more

    def refuse(self, source: Source, *, whole: bool, passing: bool, attempt: int) -> None:
        """A rank could not take this source up. ``whole``: it could, if the model were divided as it was. ``passing``:
        that says nothing of the source, so it is tried ``_TRIES`` times.
        """
        failed = self._failed.setdefault(source, set())
        failed.add(attempt)
        if passing and len(failed) < _TRIES:
            return
        self._refused.add(source)
        self.others = self.others or whole
        if (step := _step_of(source)) in self._stored_steps:
            self._stored_steps.remove(step)
        if step == self.newest_without_nan:
            self.newest_without_nan = -1
        if step == self._newest_agreed:
            self._newest_agreed = -1

    def doubt(self) -> None:
        """Replicas were found to differ, nobody knows since when."""
        self.doubted = True

    def distrust(self, step: int) -> None:
        """What was saved behind that step is wrong."""
        self.wrong_since, self.going_back = step, True
        self.wrong_stored = step if self.wrong_stored is None else min(step, self.wrong_stored)
        self._stored_steps = deque((each for each in self._stored_steps if each <= step), self._stored_steps.maxlen)
        self._kept_steps = deque((each for each in self._kept_steps if each <= step), self._kept_steps.maxlen)
        if self.newest_without_nan > step:
            self.newest_without_nan = -1
        if self._newest_agreed > step:
            self._newest_agreed = -1

    def recall(self, in_memory: int | None, on_storage: int | None) -> None:
        """What the launcher before this one knew to be wrong, and had not done away with."""
        self.wrong_since, self.wrong_stored = in_memory, on_storage

    # -- what is left

    def stored_before(self, step: int, *, one_more: bool = False) -> bool:
        """Whether a state from before that step, or an older one, is known to be on storage, and to stay there.
        ``one_more``: another one is being written, for which the oldest is deleted.
        """
        stored = [*self._stored_steps, self.newest_without_nan]
        if one_more:
            stored = stored[len(self._stored_steps) == self._stored_steps.maxlen : -1]
        stored.append(self._newest_agreed)
        return any(0 <= each <= step for each in stored)

    def kept_before(self, step: int) -> int:
        """The step of the newest snapshot from before that step which memory may still hold; -1: of none."""
        return next((each for each in reversed(self._kept_steps) if each <= step), -1)

    @property
    def refused_paths(self) -> list[Path]:
        """Of checkpoints."""
        return [Path(source.path) for source in self._refused if source.kind == "storage"]

    def newest_of(self, stores: Iterable[Store]) -> Source | None:
        """The newest state in these that all ranks hold, and may go on from."""
        stores = [*stores]
        self._kept_step = {held.commits: held.step for store in stores for held in store.snapshots}
        commits = common_commits(stores, self._world_size)
        if self.wrong_since is not None:
            commits = [each for each in commits if self._kept_step[each] <= self.wrong_since]
        if self.doubted:
            commits = [each for each in commits if each <= self.newest]
        usable = (Source("memory", each) for each in commits)
        return next((each for each in usable if each not in self._refused), None)

    def why_not_anew(self) -> str:
        """Why the ranks must not begin anew, where there is nothing to go on from; empty: they may."""
        if self.others:
            return (
                "nothing of it is on storage: start the job as it was and end it by SIGTERM, which saves it there, or "
                "choose another --run-dir"
            )
        if self.doubted:
            return "no saved state is left in which they were equal"
        since = self.wrong_stored if self.wrong_since is None else self.wrong_since
        if since is not None:
            return (
                f"no saved state is left that is from before step {since}: take the checkpoints from behind it away to "
                "begin anew, or choose another --run-dir"
            )
        return ""


def _step_of(source: Source) -> int:
    """Of a checkpoint; -1: it is none."""
    name = parse_name(Path(source.path).name)
    return name.step if name is not None else -1
