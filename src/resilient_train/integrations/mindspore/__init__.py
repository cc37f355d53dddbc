"""MindSpore's ``Model.train`` on any device target: saved when it ends too early, and resumed bit for bit."""

from resilient_train.integrations.mindspore.fault_tolerance import FaultTolerance
from resilient_train.integrations.mindspore.resume import Position

__all__ = ["FaultTolerance", "Position"]
