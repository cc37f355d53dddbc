"""A pause that an operator asks for, of ranks that have no other way to hear of it: files in a folder of the job's.

``resilient-run`` makes one for each pause, with a number of its own, and removes it when the pause is over. Ranks look
for one at the end of each step, and agree at which they stand (``agreed_step.py``); each leaves a file there, and waits
until that very pause is over: one that wakes late must not take the next pause for this one.
"""

from __future__ import annotations

from pathlib import Path

from resilient_train.errors import ConfigError

NOBODY = -1


class PauseFolder:
    """What ranks do with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def come(self, rank: int) -> None:
        """This rank looks here from now on."""
        (self._folder / f"here_{rank}").touch()

    def wanted(self) -> int:
        """The number of the pause that is wanted, or NOBODY."""
        return next((int(path.name.removeprefix("pause_")) for path in self._folder.glob("pause_*")), NOBODY)

    def stand(self, rank: int, number: int, step: int) -> None:
        """This rank stands behind ``step``, for that pause."""
        (self._folder / f"stands_{number}_{rank}_{step}").touch()

    def goes_on(self, number: int) -> bool:
        """That pause is over."""
        return not (self._folder / f"pause_{number}").exists()


class PauseDesk:
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

    @property
    def attended(self) -> bool:
        """All ranks look here."""
        return all((self._folder / f"here_{rank}").exists() for rank in range(self._world_size))

    @property
    def asked(self) -> bool:
        """A pause is wanted."""
        return self._pause.exists()

    def ask(self) -> None:
        """All are to stand at the end of a step."""
        self._number += 1
        self._pause.touch()

    def stand_behind(self) -> int:
        """The step behind which all ranks stand; NOBODY: not all do."""
        steps = {path.name.rpartition("_")[0]: path for path in self._folder.glob(f"stands_{self._number}_*")}
        if not self.asked or len(steps) < self._world_size:
            return NOBODY
        return max(int(path.name.rpartition("_")[2]) for path in steps.values())

    def end(self) -> None:
        """All go on."""
        self._pause.unlink(missing_ok=True)

    @property
    def _pause(self) -> Path:
        return self._folder / f"pause_{self._number}"
