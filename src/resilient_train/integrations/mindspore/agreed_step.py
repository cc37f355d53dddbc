"""At which step all ranks stop, agreed upon in a folder: empty files whose names say what a rank has asked for.

Ranks wait for each other in each step, by its collectives. Who asks at the end of step n, before its step n + 1, asks
for n + 1: nobody can be through that step without it, so all see the file at the latest at the end of it. The folder
must show a new file to whoever lists it afterwards: a local file system does, NFS may need to be mounted with ``noac``.
"""

from __future__ import annotations

from pathlib import Path

from resilient_train.errors import UsageError


class AgreedStep:
    """One rank's view. The folder is made, and what this rank asked for in an earlier life is forgotten."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank = folder / ".ttp_stop", rank
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("step_*"):
            whose = int(path.name.rpartition("_")[2])
            if whose == rank or (rank == 0 and whose >= world_size):
                path.unlink(missing_ok=True)

    def ask(self, step: int) -> None:
        """All are to stop at the end of ``step``."""
        (self._folder / f"step_{step}_rank_{self._rank}").touch()

    def reached(self, step: int) -> bool | None:
        """Whether all stop at the end of ``step``, which this rank has just finished; None: nobody has asked yet.

        Raises UsageError where it is too late.
        """
        asked = [int(path.name.split("_")[1]) for path in self._folder.glob("step_*")]
        if not asked:
            return None
        if min(asked) < step:
            raise UsageError(
                f"rank {self._rank} has finished step {step}, and the ranks were to stop at step {min(asked)}: "
                "they don't wait for each other in each step, or the folder does not show new files at once; "
                "nothing was saved by this rank"
            )
        return min(asked) == step
