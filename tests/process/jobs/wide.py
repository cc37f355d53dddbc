"""Ten million parameters, which are worth some milliseconds of copying, saved as often as costs least."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

WIDTH, LAYERS, BATCH = 1000, 10, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    dist.init_process_group("resilient")
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters())
    with rt.Session(model=model, optimizer=optimizer) as session:
        session.save_every("auto")
        for step in session.steps(steps):
            with step:
                model(torch.randn(BATCH, WIDTH)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
