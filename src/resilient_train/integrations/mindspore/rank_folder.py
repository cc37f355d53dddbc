"""What ``resilient-run`` and ranks that know no controller (they have our own callback) tell each other: by files.

Each rank has one in which it says which step it has ended. Before a pause ``resilient-run`` makes one, with a number of
its own, and removes it when the pause is over. Ranks look for it at the end of each step, and agree at which they stand
(``agreed_step.py``); each leaves a file there, and waits until that very pause is over: one that wakes late must not
take the next pause for this one.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from resilient_train.errors import ConfigError

NOBODY = -1
_STANDING = struct.Struct("<q?")


class RankStands(NamedTuple):
    """The last step that a rank has ended; whether its training is over."""

    step: int = 0
    left: bool = False
    updating: bool = False
    """Nobody says so here."""


class RankFolder:
    """What a rank does with it. The arguments: where it is, and which rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._file = -1

    def tell(self, step: int, *, left: bool = False) -> None:
        """This rank looks here, and has ended that step. Takes some 2 us."""
        if self._file < 0:
            self._file = os.open(self._folder / f"at_{self._rank}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        os.pwrite(self._file, _STANDING.pack(step, left), 0)

    def wanted(self) -> int:
        """The number of the pause that is wanted, or NOBODY."""
        return next((int(path.name.removeprefix("pause_")) for path in self._folder.glob("pause_*")), NOBODY)

    def stand(self, number: int, step: int) -> None:
        """This rank stands behind ``step``, for that pause."""
        (self._folder / f"stands_{number}_{self._rank}_{step}").touch()

    def goes_on(self, number: int) -> bool:
        """That pause is over."""
        return not (self._folder / f"pause_{number}").exists()


class AgentFolder:
    """What ``resilient-run`` does with it. The folder is made. Raises ConfigError where it can't be."""

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world_size = folder, world_size
        self._number = 0
        try:
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
        except OSError as error:
            raise ConfigError(f"the run directory can't be written: {folder}: {error.strerror}") from None

    def begin_life(self) -> None:
        """All ranks are started. What those before them have left does not count; a pause that is wanted does."""
        for path in self._folder.iterdir():
            if not path.name.startswith("pause_"):
                path.unlink()

    def ranks(self) -> list[RankStands]:
        """Where all stand; empty: not all have come yet."""
        found = []
        for rank in range(self._world_size):
            try:
                found.append(RankStands(*_STANDING.unpack((self._folder / f"at_{rank}").read_bytes())))
            except (OSError, struct.error):
                return []
        return found

    @property
    def asked(self) -> bool:
        """A pause is wanted."""
        return self._pause.exists()

    def pause(self) -> None:
        """All are to stand at the end of a step."""
        self._number += 1
        self._pause.touch()

    def stand_behind(self) -> int:
        """The step behind which all ranks stand; NOBODY: not all do."""
        steps = {path.name.rpartition("_")[0]: path for path in self._folder.glob(f"stands_{self._number}_*")}
        if not self.asked or len(steps) < self._world_size:
            return NOBODY
        return max(int(path.name.rpartition("_")[2]) for path in steps.values())

    def unpause(self) -> None:
        """All go on."""
        self._pause.unlink(missing_ok=True)

    @property
    def _pause(self) -> Path:
        return self._folder / f"pause_{self._number}"
