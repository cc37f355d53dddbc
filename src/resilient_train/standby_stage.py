"""Where a process that runs the user's script, and is no rank yet, waits to become one.

A rank waits nowhere: ``stage`` is None in it. In a standby (``launch/fork/prestart.py``) it is what its agent told it.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

NAME = "rt.standby_point()"


class StandbyStage(Protocol):
    """A process without a rank, between the script's first line and the point where it waits.

    ``wraps``: see ``config.wraps_backend``. Who asks for it there would be taken for the script.
    """

    wraps: bool

    def at_point(self) -> None:
        """``standby_point`` was called, or a Session was made without it."""
        ...

    def needs_rank(self, what: str) -> NoReturn:
        """The script does ``what``, which gives each rank something else."""
        ...

    def rank_asked(self) -> int:
        """Torch or the script asks the process group for a rank that nobody knows. May not return."""
        ...


stage: StandbyStage | None = None


def enter(entered: StandbyStage | None) -> None:
    """From now on this process waits there; None: it has become a rank."""
    global stage
    stage = entered


def standby_point() -> None:
    """Marks the line of a script up to which a standby may run it ahead; does nothing in a rank.

    With ``resilient-run --standby-depth built`` a standby builds what stands above this line (model, DDP wrapper,
    optimizer) and waits in it until a rank is lost. Nothing above it may depend on the rank: the sampler, the loader
    and the ``Session`` belong below. Whatever else the script does above it is done once more for each standby, while
    the job runs. Without a call of this the Session is the point. See ``docs/how-to/standbys.md``.
    """
    if stage is not None:
        stage.at_point()
