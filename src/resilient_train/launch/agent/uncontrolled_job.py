"""What the hang watch wants to know of a MindSpore job whose ranks know no controller, and have our own callback."""

from __future__ import annotations

from collections.abc import Sequence

from resilient_train.integrations.mindio.controller import MindioStage
from resilient_train.integrations.mindspore.rank_folder import NOBODY, AgentFolder, RankStands


class UncontrolledJob:
    """See ``mindspore_hang_watch.WatchedJob``. It has no recoveries: where one is lost, all start again."""

    round = 0

    def __init__(self, folder: AgentFolder) -> None:
        self._folder = folder

    @property
    def stage(self) -> MindioStage:
        """What the watch tells apart."""
        if self._folder.stand_behind() != NOBODY:
            return MindioStage.PAUSED
        return MindioStage.TRAINING if self._folder.ranks() else MindioStage.STARTING

    @property
    def seats(self) -> Sequence[RankStands]:
        """How far all are."""
        return self._folder.ranks()

    def awaited(self) -> frozenset[int]:
        """Nobody: there is nothing that is waited for."""
        return frozenset()

    def steady(self) -> Sequence[int]:
        """Nobody, likewise."""
        return ()
