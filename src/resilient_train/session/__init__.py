"""The loop's view: ``Session``, ``Step``, ``resilient``. See ``session.py``."""

from resilient_train.session.session import Session, resilient
from resilient_train.session.step import Step

__all__ = ["Session", "Step", "resilient"]
