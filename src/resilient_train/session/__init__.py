"""The loop's view: ``Session``, ``Step``, ``Carried``, ``resilient``. See ``session.py``."""

from resilient_train.session.carried import Carried
from resilient_train.session.session import Session, resilient
from resilient_train.session.step import Step

__all__ = ["Carried", "Session", "Step", "resilient"]
