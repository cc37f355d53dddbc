"""resilient_train: a training job that survives the loss of any of its processes, bit for bit.

::

    import resilient_train as rt

    dist.init_process_group("resilient")
    with rt.Session(model=model, optimizer=optimizer, loader=loader) as session:
        for step in session.steps(10_000):
            with step:
                ...

Start it with ``resilient-run --nproc-per-node 4 train.py``. Importing this package imports no training framework.
"""

from typing import TYPE_CHECKING, Any

from resilient_train._imported import note_import
from resilient_train._register import register_when_imported
from resilient_train.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    HolderLostError,
    HolderSilentError,
    JobEnded,
    MemoryLimitError,
    ProtocolError,
    ResilientError,
    StateError,
    StorageError,
    TrainingInterrupted,
    TransferError,
    UsageError,
    VaultError,
)
from resilient_train.standby_stage import standby_point

if TYPE_CHECKING:
    from resilient_train.session import Carried, Session, Step, resilient

__version__ = "0.1.0"

__all__ = [
    "Carried",
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "HolderLostError",
    "HolderSilentError",
    "JobEnded",
    "MemoryLimitError",
    "ProtocolError",
    "ResilientError",
    "Session",
    "StateError",
    "Step",
    "StorageError",
    "TrainingInterrupted",
    "TransferError",
    "UsageError",
    "VaultError",
    "__version__",
    "resilient",
    "standby_point",
]

_OF_SESSION = ("Carried", "Session", "Step", "resilient")


def __getattr__(name: str) -> Any:
    """The names that need numpy, when they are asked for: small processes of ours import this package too."""
    if name in _OF_SESSION:
        from resilient_train import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register_when_imported()
note_import()
