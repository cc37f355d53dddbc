"""A training script in the order of nanoGPT's: ``init_process_group`` by its name, above ``import resilient_train``."""

import os

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as there

import resilient_train as rt


def train() -> None:
    rank = int(os.environ.get("RANK", "-1"))
    assert rank != -1, "nanoGPT's own test for DDP"
    init_process_group(backend="gloo")
    torch.manual_seed(1337 + rank)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(8):
            with step:
                model(torch.randn(2, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    destroy_process_group()


if __name__ == "__main__":
    train()
