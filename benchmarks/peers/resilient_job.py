"""The same training in a Session of resilient_train."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from training import Training

import resilient_train as rt

_STEPS = 100_000_000


def main() -> None:
    given = arguments()
    rank = int(os.environ["RANK"])
    journal = Journal(given.folder, rank)
    dist.init_process_group("resilient")
    training = Training(given.model, journal)
    model = DistributedDataParallel(training.model)
    optimizer = training.optimizer
    with rt.Session(model=model, optimizer=optimizer) as session:
        journal.mark("ready")
        for step in session.steps(_STEPS):
            with step:
                training.loss(model, step.number, rank).backward()
                optimizer.step()
                training.committed(step.number)
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
