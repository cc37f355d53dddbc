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

from resilient_train._register import register_when_imported
from resilient_train.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    JobEnded,
    ProtocolError,
    ResilientError,
    StateError,
    StorageError,
    TrainingInterrupted,
    TransferError,
    UsageError,
)
from resilient_train.session import Session, Step, resilient
from resilient_train.waiting import standby_point

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DeviceError",
    "JobEnded",
    "ProtocolError",
    "ResilientError",
    "Session",
    "StateError",
    "Step",
    "StorageError",
    "TrainingInterrupted",
    "TransferError",
    "UsageError",
    "__version__",
    "resilient",
    "standby_point",
]

register_when_imported()
