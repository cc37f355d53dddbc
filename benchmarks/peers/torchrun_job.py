"""Plain DDP under torchrun, with checkpoints: when one rank is lost, torchrun starts all of them again."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import os
from datetime import timedelta

import torch.distributed as dist
from training import Checkpoints, Training, train


def main() -> None:
    given = arguments()
    rank = int(os.environ["RANK"])
    journal = Journal(given.folder, rank)
    timeout_s = given.options.get("group_timeout_s")
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s) if timeout_s else None)
    checkpoints = Checkpoints(given.folder, given.options["checkpoint_every"])
    train(Training(given.model, journal), journal, rank, checkpoints)


if __name__ == "__main__":
    main()
