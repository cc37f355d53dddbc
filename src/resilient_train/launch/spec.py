"""What a job is: the command, the world, where it writes and listens. Made from torchrun's own flags in ``run.py``."""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.config import Settings
from resilient_train.protocol.policy import Policy

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its run directory."""
SOCKET = "agent-0.sock"
"""Where its agent listens, in there as well."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A job of one node. ``command`` may hold torchrun's ``${local_rank}`` macro."""

    command: tuple[str, ...]
    world_size: int
    run_dir: Path
    run_id: str
    policy: Policy
    settings: Settings
    role: str = "default"
    host: str = "127.0.0.1"
    port: int = 0
    log_dir: Path
    quiet: frozenset[tuple[int, str]] = frozenset()
    """(local rank, "stdout" or "stderr") that go to their file only."""
    prefixed: frozenset[tuple[int, str]] = frozenset()
    """Streams whose console lines carry ``[role rank]:`` in front, as with torchrun's ``--tee``."""
    shutdown_timeout_s: float = 30.0
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    virtual_local_rank: bool = False
    log_prefix: str = "[${role_name}${rank}]:"
