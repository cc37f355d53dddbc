"""MindSpore's ``Model.train`` on any device target: saved when it ends too early, and resumed bit for bit.

What is here is imported when it is asked for: the parts that need no MindSpore can be had without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resilient_train.integrations.mindspore.exception_checkpoint import ExceptionCheckpoint
    from resilient_train.integrations.mindspore.fault_tolerance import FaultTolerance
    from resilient_train.integrations.mindspore.resume import TrainingPosition

__all__ = ["ExceptionCheckpoint", "FaultTolerance", "TrainingPosition"]
_WHERE = {
    "ExceptionCheckpoint": "exception_checkpoint",
    "FaultTolerance": "fault_tolerance",
    "TrainingPosition": "resume",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
