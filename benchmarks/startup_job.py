"""The job of ``startup.py``: one step, plain or in a Session; each rank then writes when it was done."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import make, train_once


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    work = make("tiny")
    if kind == "torchrun":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(work.model)
        train_once(model, torch.optim.AdamW(model.parameters()), work)
    else:
        import resilient_train as rt

        dist.init_process_group("resilient")
        model = DistributedDataParallel(work.model)
        optimizer = torch.optim.AdamW(model.parameters())
        with rt.Session(model=model, optimizer=optimizer) as session:
            for step in session.steps(1):
                with step:
                    train_once(model, optimizer, work)
    (folder / f"rank{dist.get_rank()}").write_text(str(time.time_ns()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
