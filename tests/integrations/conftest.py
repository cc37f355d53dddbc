"""These tests need libraries that the development environment does not have: ``make test-integrations`` makes one."""

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

collect_ignore = [
    f"test_{library}.py"
    for library in ("lightning", "accelerate", "transformers")
    if importlib.util.find_spec(library) is None
]
