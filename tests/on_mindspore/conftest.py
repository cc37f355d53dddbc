"""Without MindSpore there is nothing to test here."""

import importlib.util
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # the tests' own modules; other folders' come first
collect_ignore_glob = [] if importlib.util.find_spec("mindspore") else ["test_*.py"]
