"""The job that the soak hits: that of the process tests, with its record outside of the run directory.

The run directory's file system is filled by some faults. A script that writes there itself would fail by its own fault.
"""

import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "process" / "jobs"))

from train import Job, parser

if __name__ == "__main__":
    asked = parser()
    asked.add_argument("--records", type=Path, required=True)
    asked.set_defaults(save=10)
    arguments = asked.parse_args()
    dist.init_process_group("resilient")
    job = Job(frozenset(arguments.variant.split("+")), "")
    job.records = arguments.records / f"rank{dist.get_rank()}.jsonl"
    job.run(arguments)
    (arguments.records / f"end{dist.get_rank()}").write_text(job.end())
    dist.destroy_process_group()
