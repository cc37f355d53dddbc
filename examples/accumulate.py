"""Two backward passes per update, clipped gradients, a schedule, an averaged model and a logged mean loss.

Try::

    resilient-run --nproc-per-node 2 --faults "kill rank=0 step=20 phase=COMPUTE at=backward" examples/accumulate.py
"""

import contextlib

import torch
import torch.distributed as dist
from minimal import join_group, make_data, make_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler

import resilient_train as rt

STEPS = 60  # micro-steps: 30 updates
ACCUMULATE = 2


def main() -> None:
    join_group()
    torch.manual_seed(0)
    data = make_data()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    model = DistributedDataParallel(make_model())
    averaged = make_model()
    averaged.load_state_dict(model.module.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = CosineAnnealingLR(optimizer, STEPS // ACCUMULATE)
    torch.manual_seed(1000 + dist.get_rank())

    with rt.Session(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, state={"averaged": averaged}
    ) as session:
        for step in session.steps(STEPS):
            with step:
                points, classes = step.batch
                last = step.number % ACCUMULATE == ACCUMULATE - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.cross_entropy(model(points), classes) / ACCUMULATE
                    loss.backward()
                if last:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    # From here on is the tail: it runs once for each update, on every rank that lives to run it.
                    optimizer.zero_grad()
                    scheduler.step()
                    with torch.no_grad():
                        for slow, fast in zip(averaged.parameters(), model.module.parameters(), strict=True):
                            slow.lerp_(fast, 0.1)
                    mean = loss.detach().clone()
                    dist.all_reduce(mean)  # repeated for a rank that a fault cut off from its result
                    if dist.get_rank() == 0 and step.number % 20 == 19:
                        loss_now = mean.item() * ACCUMULATE / dist.get_world_size()
                        print(f"step {step.number + 1}: loss {loss_now:.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
