"""The newest checkpoint that is whole goes into a network, and its dataset to the sample behind it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mindspore
from mindspore import nn

from resilient_train.errors import CheckpointError, LayoutError, UsageError
from resilient_train.integrations.mindspore import checkpoint_file, ttp_directory
from resilient_train.integrations.mindspore.network_state import put_back, state_of
from resilient_train.integrations.mindspore.replica_groups import Ranks

log = logging.getLogger("resilient_train.mindspore")
NOTE = "resilient_train"
"""The entry in which a file says what MindSpore's own entries do not, as JSON."""


class TrainingPosition(NamedTuple):
    """Where a training is: behind ``step`` steps in all, which are ``epoch`` whole epochs and some more."""

    step: int
    epoch: int


class FoundCheckpoint(NamedTuple):
    step: int
    values: dict[str, Any]


def find(folder: Path, ranks: Ranks, tell: Callable[[str], None]) -> FoundCheckpoint | None:
    """The state of the newest checkpoint that is whole; None where there never was one.

    All files of a checkpoint are read by all ranks, so that all come to the same one. What is damaged is told, and set
    aside. Raises CheckpointError where nothing else was there, OSError for a file that can't be read.
    """
    broken = [str(path) for path in ttp_directory.damaged(folder)]
    for step, path in ttp_directory.complete(folder):
        try:
            return FoundCheckpoint(step, _whole(path, step, ranks))
        except CheckpointError as error:
            tell(f"{error}; the checkpoint before it is taken, and {path.name} gets the ending _damaged")
            broken.append(str(path))
            ttp_directory.set_aside(path)
    if broken:
        raise CheckpointError(
            str(folder),
            f"has checkpoints, and all are damaged ({', '.join(broken)}): training would start from nothing; "
            "move them away if that is meant, or bring one back",
        )
    return None


def _whole(path: Path, step: int, ranks: Ranks) -> dict[str, Any]:
    try:
        read = {rank: checkpoint_file.read(file) for rank, file in ttp_directory.parts(path).items()}
    except FileNotFoundError:
        raise CheckpointError(str(path), "is going: another rank has found it damaged") from None
    for rank, values in read.items():
        if NOTE not in values:
            raise CheckpointError(str(path), f"has in rank_{rank} a file that FaultTolerance has not written")
        said = int(values["step_num"].asnumpy()), int(values["cur_rank"].asnumpy())
        if said != (step, rank):
            raise CheckpointError(str(path), f"has in rank_{rank} what rank {said[1]} saved of step {said[0]}")
    if not read:
        raise CheckpointError(str(path), "has no file")
    groups = note_of(next(iter(read.values())))["replica_groups"]
    if lacking := ttp_directory.lacking(path, groups):
        raise CheckpointError(str(path), f"has no file of rank {lacking[0][0]}")
    world_size = sum(map(len, groups))
    if world_size != ranks.world_size:
        raise UsageError(f"{path} is of {world_size} ranks, and this job has {ranks.world_size}")
    own = next(group for group in groups if ranks.rank in group)
    return read[ranks.rank] if ranks.rank in read else read[next(rank for rank in own if rank in read)]


def note_of(values: Mapping[str, Any]) -> Any:
    """What ``NOTE`` says."""
    return json.loads(values[NOTE])


def fill(network: nn.Cell, dataset: Any, found: FoundCheckpoint) -> TrainingPosition:
    """Nothing is written unless all fits. Raises LayoutError for another model's state, UsageError for other data."""
    batches, seed = dataset.get_dataset_size(), mindspore.dataset.config.get_seed()
    wanted = int(found.values["batch_num"].asnumpy()), note_of(found.values)["data_seed"]
    if (batches, seed) != wanted:
        raise UsageError(
            f"the checkpoint is of a dataset with {wanted[0]} batches an epoch and seed {wanted[1]}, and this one has "
            f"{batches} and {seed}: its next sample would be another"
        )
    network.init_parameters_data()
    state = state_of(network)
    wrong = [name for name in state if name not in found.values] or [
        name
        for name, each in state.items()
        if (each.shape, each.dtype) != (found.values[name].shape, found.values[name].dtype)
    ]
    left = [name for name in found.values if name not in state and name not in (*MINDSPORES_NOTES, NOTE)]
    if wrong or left:
        raise LayoutError(f"the checkpoint is of another model: {', '.join((wrong or left)[:5])} does not fit")
    put_back(state, found.values)
    set_back(dataset, found.step)
    return TrainingPosition(found.step, found.step // batches)


def set_back(dataset: Any, step: int) -> None:
    """The next iterator of ``dataset`` begins behind ``step`` steps, with the samples of a run that has made them."""
    # The fast way leaves out the random transforms of what is skipped, so those behind it would be others.
    mindspore.dataset.config.set_fast_recovery(False)
    dataset.set_init_step(step)


MINDSPORES_NOTES = ("epoch_num", "step_num", "cur_rank", "batch_num", "global_step", "loss_scale")
"""Entries that MindSpore's callback adds to its files, and so do we."""
