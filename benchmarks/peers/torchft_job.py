"""One replica group (of one rank) of torchft's fault tolerant DDP, set up like ``train_ddp.py`` of its repository."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import os
from datetime import timedelta
from typing import Any

import torch
import torchft
from torchft.checkpointing import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport
from training import Training


class DataParallel(torchft.DistributedDataParallel):
    """torchft's own, patched for gloo.

    Its hook reads the future of an all-reduce also after that has failed, when there is none: an AssertionError in all
    survivors. (With NCCL, waiting does not fail.) The failure has been reported to the manager by then; so the buffer
    as it is will do, for this step is not committed.
    """

    @staticmethod
    def _comm_hook(state: torchft.Manager, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    given = arguments()
    group = int(os.environ["REPLICA_GROUP_ID"])
    journal = Journal(given.folder, group)
    training = Training(given.model, journal)

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    timeout = timedelta(seconds=given.options.get("timeout_s", 30))
    group_timeout = timedelta(seconds=given.options.get("group_timeout_s", 5))
    process_group = torchft.ProcessGroupGloo(timeout=group_timeout)
    manager = torchft.Manager(
        pg=process_group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{group}",
        timeout=timeout,
        checkpoint_transport=HTTPTransport(timeout=timeout, num_chunks=0)
        if given.options.get("http")
        else PGTransport(process_group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = DataParallel(manager, training.model)
    optimizer = torchft.Optimizer(manager, training.optimizer)
    journal.mark("ready")
    while True:
        before = manager.current_step()
        optimizer.zero_grad()  # asks for the quorum of this step
        training.loss(model, before, group).backward()
        optimizer.step()  # does nothing if the step failed; then it is done again, with the same batch
        if manager.current_step() > before:
            training.committed(manager.current_step() - 1)


if __name__ == "__main__":
    main()
