"""What a drill compares: digests of a rank's state at the begin of each step, named part by part, in a file.

One file for each process, one line of JSON for each record. The names stand in the first line, and again where they
change; the digests of a record are in their order.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from resilient_train.config import AgentLink
from resilient_train.frameworks.roles import Drill

FOLDER = "drill_records"


class Names(msgspec.Struct, frozen=True, tag="names"):
    """What the digests of the records that follow are of."""

    names: list[str]


class DrillRecord(msgspec.Struct, frozen=True, tag="record"):
    """As ``step`` begins: the batch is drawn, the body has not begun. Behind the last step, one more."""

    step: int
    digests: list[str]


def path_of(run_dir: Path, rank: int, incarnation: int) -> Path:
    """The file of one process."""
    return run_dir / FOLDER / f"rank_{rank}.{incarnation}.jsonl"


class DrillRecords:
    """Raises OSError where the file can't be written: a drill would compare nothing."""

    def __init__(self, agent: AgentLink, drill: Drill, *, wanted: bool) -> None:
        self._drill = drill
        self._names: list[str] = []
        self._encoder = msgspec.json.Encoder()
        self._descriptor = -1
        self.wanted = wanted
        """Whether records are written: ``take`` need not be called otherwise."""
        if wanted:
            path = path_of(Path(agent.run_dir), agent.rank, agent.incarnation)
            path.parent.mkdir(exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def take(self, step: int, batch: Any, place: tuple[int, int]) -> None:
        """Writes a record of the present state; ``place``: in the data, behind the batch."""
        found = self._drill.parts({"batch": batch, "loader": place})
        names = list(found)
        if names != self._names:
            self._names = names
            self._write(Names(names))
        self._write(DrillRecord(step, list(found.values())))

    def _write(self, line: Names | DrillRecord) -> None:
        os.write(self._descriptor, self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
