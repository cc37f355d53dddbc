"""At which step all ranks do something, agreed upon in a folder: empty files whose names say what a rank asks for.

Ranks wait for each other in each step, by its collectives. Who asks at the end of step n, before its step n + 1, asks
for n + 1: nobody can be through that step without it, so all see the file at the latest at the end of it. The folder
must show a new file to whoever lists it afterwards: a local file system does, NFS may need to be mounted with ``noac``.

Each rank leaves a file before its first step, by the same reasoning: who has finished that step sees those of all, or
the folder is not the same for all.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from resilient_train.errors import UsageError

STOP = -1
"""In the place of a step to go back to: training ends. What is below it: a pause, see ``pause``."""


def pause(number: int) -> int:
    """In the place of a step to go back to: all stand still, for that pause; and the number again from that."""
    return STOP - 1 - number


class Asked(NamedTuple):
    """At the end of ``step`` all go back to the end of ``back_to``, or stop, or stand still. The smallest step to go
    back to is done; else a stop; else the first pause.
    """

    step: int
    back_to: int

    @property
    def is_pause(self) -> bool:
        return self.back_to < STOP


class AgreedStep:
    """One rank's view. The folder is made, and what this rank asked for in an earlier life is forgotten."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder / ".ttp_asked", rank, world_size
        self._turn = 0
        self._sees_all = False
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / f"here_{rank}").touch()
        for path in self._folder.glob("turn_*"):
            whose = int(path.name.rpartition("_")[2])
            if whose == rank or (rank == 0 and whose >= world_size):
                path.unlink(missing_ok=True)

    def ask(self, asked: Asked) -> None:
        """All are to do so."""
        (self._folder / f"turn_{self._turn}_{asked.step}_{asked.back_to}_{self._rank}").touch()

    def look(self, step: int) -> Asked | None:
        """What is asked for, by whom ever. This rank has just finished ``step``.

        Raises UsageError where it is too late, or where another rank has another folder.
        """
        if not self._sees_all:
            self._look_for_all(step)
        names = [path.name.split("_") for path in self._folder.glob(f"turn_{self._turn}_*")]
        if not names:
            return None
        first = min(int(name[2]) for name in names)
        if first < step:
            raise UsageError(
                f"rank {self._rank} has finished step {step}, and something was to be done by all at the end of "
                f"{first}: ranks don't wait for each other in each step, or the folder does not show new files at once"
            )
        targets = [int(name[3]) for name in names if int(name[2]) == first]
        return Asked(first, min((each for each in targets if each > STOP), default=max(targets)))

    def _look_for_all(self, step: int) -> None:
        for other in range(self._world_size):
            if not (self._folder / f"here_{other}").exists():
                raise UsageError(
                    f"rank {self._rank} has finished step {step}, and rank {other} has left no sign in {self._folder}: "
                    "all ranks need one and the same folder, and one that shows new files at once"
                )
        self._sees_all = True

    def next_turn(self) -> None:
        """All have gone back, or go on behind a pause: what was asked for until then is done."""
        self._turn += 1
