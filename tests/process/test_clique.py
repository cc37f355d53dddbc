"""A collective that is worked out from logs, in one process, gives bit for bit what its members get as processes."""

import json
import sys
from pathlib import Path

import pytest
from running import JOBS, start

SIZES = [2, 3, 4, 8]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("size", "extent"),
    [*((size, "short") for size in SIZES), *(pytest.param(size, "long", marks=pytest.mark.long) for size in SIZES)],
)
def test_from_logs_as_by_processes(tmp_path: Path, size: int, extent: str) -> None:
    with start([sys.executable, str(JOBS / "clique.py"), str(size), str(tmp_path), extent]) as process:
        out, err = process.communicate(timeout=1170)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert found["cases"] > 300, found
    assert not found["different"], (len(found["different"]), found["different"][:20])
