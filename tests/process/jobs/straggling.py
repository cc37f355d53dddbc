"""A job whose steps last as long as on a device, however busy the machine is: most of each is slept."""

import argparse
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

SLEEP_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--together", type=int, default=1 << 30, help="From this step on all ranks are slower.")
    parser.add_argument("--uneven", type=float, default=1.0, help="Rank 0 takes so many times as long.")
    parser.add_argument("--brisk", action="store_true", help="Nobody sleeps: what is trained is the same.")
    parser.add_argument("--aside", action="store_true", help="Rank 1 also does what is no computing.")
    arguments = parser.parse_args()
    dist.init_process_group()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    sleep_s = 0.0 if arguments.brisk else SLEEP_S * (arguments.uneven if rank == 0 else 1.0)
    with rt.Session(model=model, optimizer=optimizer) as session:
        if arguments.aside:
            session.save_every(steps=10)
        for step in session.steps(arguments.steps):
            aside = arguments.aside and rank == 1 and step.number >= arguments.steps // 2
            with step:
                time.sleep(sleep_s * (2 if step.number >= arguments.together else 1))
                if aside and step.number % 3 == 0:
                    with session.slow("something"):
                        time.sleep(SLEEP_S)
                optimizer.zero_grad()
                model(torch.randn(4, 16)).square().sum().backward()
                optimizer.step()
                if aside:
                    time.sleep(SLEEP_S)
            if aside:
                time.sleep(SLEEP_S)
    dist.destroy_process_group()


main()
