"""The callback of ``mindx_elastic.terminating_message``, with its arguments and file names, over ``FaultTolerance``.

That one saves in the signal's handler, in the middle of a step, each rank for itself. Here a signal only asks: the
step is finished by all ranks, saved, verified, and gets its name when all parts of it are there.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, ClassVar

from mindspore.train import CheckpointConfig

from resilient_train.errors import ConfigError
from resilient_train.integrations.mindspore.fault_tolerance import FaultTolerance
from resilient_train.integrations.mindspore.preemption import SIGNALS

_COUNTED = ("epoch_num", "step_num")
"""What ``append_info`` may name: these are written in any case."""


class ExceptionCheckpoint(FaultTolerance):
    """Saves what a training that is told to end has come to: ``PREFIX-EPOCH_STEP_breakpoint.ckpt``.

    ``directory``: by default the working directory. One for all ranks, other than in mindx_elastic: each rank's file is
    in ``ttp_saved_checkpoints-step_N/rank_R`` of it. ``config`` may not ask for what is not done here. Which ranks save
    for others is found, or given as ``replica_groups``: ``partial_save`` and ``replicas`` are refused.

    ``options``, what is saved when, and what is raised: see ``FaultTolerance``. SIGINT asks as SIGTERM does; MindSpore
    makes SIGTERM of it, once it has compiled something.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = (*SIGNALS, signal.SIGINT)

    def __init__(
        self,
        prefix: str = "Exception",
        directory: str | Path | None = None,
        config: CheckpointConfig | None = None,
        partial_save: bool = False,
        replicas: int = 1,
        **options: Any,
    ) -> None:
        if not isinstance(prefix, str) or not prefix or "/" in prefix:
            raise ValueError(f"ExceptionCheckpoint: prefix must be a name without '/', not {prefix!r}")
        if partial_save or replicas != 1:
            raise ConfigError(
                "ExceptionCheckpoint: leave partial_save and replicas out; replica_groups=[[0, 1], ...] says which "
                "ranks hold the same, and one of each group saves"
            )
        if config is not None:
            _check(config)
        super().__init__(Path.cwd() if directory is None else directory, **options)
        self._prefix = prefix

    def _file_name(self, rank: int, epoch: int, step: int) -> str:  # noqa: ARG002 - its directory says the rank
        return f"{self._prefix}-{epoch}_{step}_breakpoint.ckpt"


def _check(config: CheckpointConfig) -> None:
    """Raises TypeError for no ``CheckpointConfig``, ConfigError for one that asks for another file."""
    if not isinstance(config, CheckpointConfig):
        raise TypeError(f"ExceptionCheckpoint: config must be a CheckpointConfig, not {type(config).__name__}")
    more = [name for name in config.append_dict or {} if name not in _COUNTED]
    wrong = {
        "saved_network": (config.saved_network is not None, "the network that trains is saved"),
        "async_save": (config.async_save, "nobody would wait for a thread's file when the process ends"),
        "enc_key": (config.enc_key is not None, "files are not encrypted"),
        "append_info": (more, f"{', '.join(more)} would not be resumed; keep it in a parameter of the network"),
    }
    for name, (asked, why) in wrong.items():
        if asked:
            raise ConfigError(f"ExceptionCheckpoint: leave {name} out of the CheckpointConfig: {why}")
