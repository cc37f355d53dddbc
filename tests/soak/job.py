"""The job that the soak hits: that of the process tests, with its record outside of the run directory.

The run directory's file system is filled by some faults. A script that writes there itself would fail by its own fault.
"""

import argparse
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "process" / "jobs"))

from train import Job

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--variant", required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--save", type=int, default=10)
    arguments = parser.parse_args()
    later = {"save_mode": "", "show_start": False, "pace": "", "standby_at": [], "leave_at": -1, "between": False}
    dist.init_process_group("resilient")
    job = Job(frozenset(arguments.variant.split("+")), "")
    job.records = arguments.records / f"rank{dist.get_rank()}.jsonl"
    job.run(argparse.Namespace(**vars(arguments), **later))
    dist.destroy_process_group()
