"""These tests need libraries that the development environment does not have: ``make test-integrations`` makes one."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import traced

sys.path.insert(0, str(Path(__file__).parent))

NEEDS = {"lightning": "lightning", "fabric": "lightning", "accelerate": "accelerate", "transformers": "transformers"}
collect_ignore = [f"test_{name}.py" for name, library in NEEDS.items() if importlib.util.find_spec(library) is None]


@pytest.fixture(autouse=True)
def machines(request: pytest.FixtureRequest) -> Iterator[None]:
    """As in ``tests/process``: the loops of these libraries come to no answer that the simulation does not know."""
    yield
    traced.check(request.node.name)
