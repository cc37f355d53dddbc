"""What benchmarks take for granted of the library; who runs one finds that it runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from timers import LOOKS, WATCHED, watching

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("watched", [WATCHED, LOOKS], ids=["watched", "looks"])
def test_what_is_timed_is_there(watched: dict[str, tuple[str, ...]]) -> None:
    with watching(watched) as ledger:
        assert ledger.calls == {}
