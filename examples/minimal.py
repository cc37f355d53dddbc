"""The smallest training loop that survives the loss of a rank. A CPU is enough; about 20 seconds.

Kill rank 1 on the way, or run it as a plain loop, with torchrun or as one process::

    resilient-run --nproc-per-node 2 --faults "kill rank=1 step=30" examples/minimal.py
    torchrun --nproc-per-node 2 examples/minimal.py
    python examples/minimal.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resilient_train as rt

STEPS = 60


def make_data() -> TensorDataset:
    """512 points in 16 dimensions, in 4 classes; the same on every rank."""
    points = torch.randn(512, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points[:, :4].argmax(dim=1))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))


def join_group() -> None:
    """Under a launcher the environment says who we are; under plain python this process is the whole world."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    join_group()
    torch.manual_seed(dist.get_rank())  # each rank draws its own dropout
    data = make_data()
    loader = DataLoader(data, batch_size=16, sampler=DistributedSampler(data))
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with rt.Session(model=model, optimizer=optimizer, loader=loader) as session:
        for step in session.steps(STEPS):
            with step:
                points, classes = step.batch
                loss = nn.functional.cross_entropy(model(points), classes)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0 and step.number % 10 == 9:
                print(f"step {step.number + 1}: loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
