"""The job that the soak hits: that of the process tests, with its record outside of the run directory.

The run directory's file system is filled by some faults. A script that writes there itself would fail by its own fault.
"""

import hashlib
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent / "process" / "jobs"))

from train import Job, parser


def digest(*parts: Any) -> str:
    """Of all tensors and values in ``parts``, by other code than the library's own."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(parts)
    return found.hexdigest()


def end_of(job: Job) -> str:
    """What this rank has at its end: all that the job trains, and its random numbers."""
    stateful = [job.model.module, job.ema, *job.optimizers, *job.schedulers, *([job.scaler] if job.scaler else [])]
    return digest([each.state_dict() for each in stateful], torch.get_rng_state(), random.getstate())


if __name__ == "__main__":
    asked = parser()
    asked.add_argument("--records", type=Path, required=True)
    asked.set_defaults(save=10)
    arguments = asked.parse_args()
    dist.init_process_group("resilient")
    job = Job(frozenset(arguments.variant.split("+")), "")
    job.records = arguments.records / f"rank{dist.get_rank()}.jsonl"
    job.run(arguments)
    (arguments.records / f"end{dist.get_rank()}").write_text(end_of(job))
    dist.destroy_process_group()
