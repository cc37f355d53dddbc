"""What is done about a fault: one file for each way, and the order in which they are tried.

A new one is a file with ``NAME``, ``KINDS``, ``refuses`` and ``begin`` (``base.Strategy``), and its place in LADDER.
"""

from __future__ import annotations

from resilient_train.strategies import arf, hcce, rsc, tre, ttp, uce
from resilient_train.strategies.base import Strategy

LADDER: tuple[Strategy, ...] = (tre, hcce, uce, arf, rsc, ttp)
"""The first costs least."""
