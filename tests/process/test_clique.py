"""A collective that is worked out from logs, in one process, gives bit for bit what its members get as processes."""

import json
import sys
from pathlib import Path

import pytest
from running import JOBS, start


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("sizes", "extent"),
    [
        ([3, 8], "short"),
        pytest.param([2, 4], "short", marks=pytest.mark.long),
        *(pytest.param([size], "long", marks=pytest.mark.long) for size in (2, 3, 4, 8)),
    ],
)
def test_from_logs_as_by_processes(tmp_path: Path, sizes: list[int], extent: str) -> None:
    """Every day a number of members that is a power of two, and one that is not."""
    told = ",".join(map(str, sizes))
    with start([sys.executable, str(JOBS / "clique.py"), told, str(tmp_path), extent]) as process:
        out, err = process.communicate(timeout=1170)
    assert process.returncode == 0, err
    for found in json.loads(out):
        assert found["cases"] > 300, found
        assert not found["different"], (len(found["different"]), found["different"][:20])
