"""Writes the limit of open files that this rank has."""

import os
import resource
from pathlib import Path

folder = Path(os.environ["RESILIENT_RUN_DIR"])
(folder / f"limit_of_rank{os.environ['RANK']}").write_text(str(resource.getrlimit(resource.RLIMIT_NOFILE)))
