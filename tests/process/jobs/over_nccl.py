"""``over_nccl.py SCRIPT ...``: one of the scripts here, over the NCCL without a GPU (``on_cuda/nccl_on_cpu.py``)."""

import runpy
import sys
from pathlib import Path

import nccl_on_cpu  # noqa: F401 - it takes NCCL's place
import torch.distributed as dist

init = dist.init_process_group
dist.init_process_group = lambda _: init("nccl")
sys.argv[:] = [str(Path(__file__).with_name(sys.argv[1])), *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
