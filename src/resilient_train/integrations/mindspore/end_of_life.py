"""The last state of a training, saved: one rank's part, and when it is whole."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mindspore

from resilient_train.errors import StorageError
from resilient_train.integrations.mindspore import checkpoint_file, resume, ttp_directory
from resilient_train.integrations.mindspore.network_state import State
from resilient_train.integrations.mindspore.replica_groups import Ranks
from resilient_train.integrations.mindspore.ttp_directory import Groups

_POLL_S = 0.02
FileName = Callable[[int, int, int], str]
"""Of a rank's file, by the rank, the epoch and the step in the epoch (both counted from 1)."""


class EndOfLife:
    """One rank's saving, for all its group: see ``ttp_directory.py``. ``tell`` says to people what was saved."""

    def __init__(
        self, folder: Path, ranks: Ranks, groups: Groups, tell: Callable[[str], None], file_name: FileName
    ) -> None:
        self._folder, self._ranks, self._groups, self._tell = folder, ranks, groups, tell
        self._file_name = file_name

    def notes(self, step: int, batches: int, outputs: Any) -> dict[str, Any]:
        """What a file says besides the state: MindSpore's entries, and ours. ``outputs``: what a step has returned."""
        ours = {
            "replica_groups": [list(each) for each in self._groups],
            "data_seed": mindspore.dataset.config.get_seed(),
        }
        notes = {
            "epoch_num": (step - 1) // batches + 1,
            "step_num": step,
            "cur_rank": self._ranks.rank,
            "batch_num": batches,
            resume.NOTE: json.dumps(ours),
        }
        if isinstance(outputs, (tuple, list)) and len(outputs) >= 3:
            notes["loss_scale"] = outputs[2]
        return notes

    def save(self, state: State, notes: Mapping[str, Any]) -> bool:
        """Writes this rank's part; returns whether the checkpoint is whole now. Raises StorageError, OSError."""
        step, rank = notes["step_num"], self._ranks.rank
        name = self._file_name(rank, notes["epoch_num"], (step - 1) % notes["batch_num"] + 1)
        checkpoint_file.write(ttp_directory.make_stage(self._folder, rank) / name, state, notes)
        whole = ttp_directory.deliver(self._folder, step, rank, self._groups)
        final = ttp_directory.directory(self._folder, step)
        self._tell(f"step {step} is saved in {final}" if whole else f"rank {rank}'s part of step {step} is saved")
        return whole

    def save_with_others(
        self, state: State, notes: Mapping[str, Any], limit_s: float, *, all_write: bool = False
    ) -> None:
        """The first rank of each group writes, or each rank does; all wait until it is whole. Raises StorageError,
        OSError.

        Nobody leaves before: launchers end all ranks when one is gone.
        """
        if all_write or self._ranks.rank == next(each[0] for each in self._groups if self._ranks.rank in each):
            self.save(state, notes)
        final = ttp_directory.directory(self._folder, notes["step_num"])
        limit = time.monotonic() + limit_s
        while not final.exists():
            if time.monotonic() > limit:
                raise StorageError(
                    f"rank {self._ranks.rank} has waited {limit_s} s for {final}: other ranks have not written their "
                    "parts; training can be resumed from the checkpoint before it"
                )
            time.sleep(_POLL_S)
