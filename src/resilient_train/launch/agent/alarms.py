"""The agent's ear for device errors: reads the bits that the probes' native threads set in the step records.

A rank whose Python is stuck (a loop that holds the GIL, a call into a driver that does not return) can't report what
its probes have found; its bits can be read all the same. What each kind leads to:

    UCE       memory lost data at known addresses: all stop, the rank finds the owners and fetches them from a replica
    HCCE LINK a collective, or the way to a peer, failed: all rebuild their groups and redo the step
    DEVICE    the device failed, or lost data nobody knows where: the process is killed and replaced, if another one
              has its state
    DISABLED  the probe was given up: told, nothing else
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from resilient_train._native import Board
from resilient_train.protocol.job import Job, Stage


class AlarmHearer(Protocol):
    """What an alarm may lead to: implemented by the agent."""

    def fence(self, ranks: Collection[int], reason: str) -> None:
        """Has the ranks' processes killed, as far as that may be; their deaths will be told with ``reason``."""
        ...

    def mend(self, rank: int, detail: str) -> None:
        """The rank's memory lost data: all are to stop, the rank will know more."""
        ...

    def give_up_collective(self, detail: str, *, culprit: int) -> None:
        """Collectives of the job can't end, says the device of ``culprit``: all ranks are to rebuild."""
        ...

    def note(self, kind: str, rank: int, detail: dict[str, object]) -> None:
        """Writes an event."""
        ...


class Alarms:
    """``look`` is called some twenty times a second; one load per rank while all is well."""

    def __init__(self, board: Board, job: Job) -> None:
        self._board = board
        self._job = job
        self._seen: set[tuple[int, int, str, str]] = set()
        """(rank, incarnation, probe, kind) that were told; acting on them is another matter."""

    def look(self, hearer: AlarmHearer) -> None:
        """Acts on at most one alarm: whatever is done, a recovery follows, and what is left is found after it."""
        if self._job.stage not in (Stage.RUNNING, Stage.PAUSED):
            return
        for rank in range(self._board.world_size):
            alarms = self._board.alarms(rank)
            for probe, kind in alarms:
                self._tell(rank, probe, kind, hearer)
            if any(self._act(rank, probe, kind, hearer) for probe, kind in alarms):
                return

    def _tell(self, rank: int, probe: str, kind: str, hearer: AlarmHearer) -> None:
        told = (rank, self._job.incarnations[rank], probe, kind)
        if told not in self._seen:
            self._seen.add(told)
            hearer.note("probe_disabled" if kind == "DISABLED" else "alarm", rank, {"probe": probe, "kind": kind})

    def _act(self, rank: int, probe: str, kind: str, hearer: AlarmHearer) -> bool:
        if kind == "DEVICE":
            hearer.fence([rank], f"its device failed, says {probe}")
        elif kind == "UCE" and self._job.policy.mend:
            hearer.mend(rank, f"uncorrectable memory error, says {probe}")
        elif kind in ("HCCE", "LINK") and self._job.policy.rebuild:
            self._board.clear_alarms(rank)  # the rank has nothing to add; if it persists, it comes as an error
            hearer.give_up_collective(f"rank {rank}: {kind} from {probe}", culprit=rank)
        else:
            return False
        return True
