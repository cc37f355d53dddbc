"""Prints the variables that a launcher gives its workers; then it runs the script that is named, if one is."""

import json
import os
import runpy
import sys

NAMES = ("RANK", "WORLD_SIZE", "GROUP_", "ROLE_", "LOCAL_", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC", "OMP_")
NAMES += ("MS_COMPILER_", "ASCEND_", "TORCHINDUCTOR_")
line = json.dumps({key: value for key, value in os.environ.items() if key.startswith(NAMES)}) + "\n"
# One write, newline included: all ranks share the pipe, and print() writes twice where PYTHONUNBUFFERED is set.
sys.stdout.write(line)
sys.stdout.flush()
if sys.argv[1:]:
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
