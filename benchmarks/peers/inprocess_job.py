"""One rank of plain DDP in NVIDIA's in-process Wrapper, set up like ``basic_example.py`` of its repository."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.store import StoreMixin
from training import Checkpoints, Training, train

GIVEN = arguments()
JOURNAL = Journal(GIVEN.folder, int(os.environ["RANK"]))  # a rank may get another number later on, but not another file


class HostedStore(dist.TCPStore, StoreMixin):
    """A client of a store that no rank is the host of, so that no rank's death ends the job."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, is_master=False, wait_for_workers=False)


def wrapper() -> inprocess.Wrapper:
    """The Wrapper, with time-outs and the like where the options name any."""
    settings: dict[str, Any] = {"store_kwargs": {"port": int(os.environ["MASTER_PORT"]) + 2}}
    if "store_port" in GIVEN.options:
        settings = {"store_factory": HostedStore, "store_kwargs": {"port": GIVEN.options["store_port"]}}
    if "active" in GIVEN.options:
        assignment = inprocess.rank_assignment
        settings["rank_assignment"] = inprocess.Compose(
            assignment.MaxActiveWorldSize(GIVEN.options["active"]), assignment.ShiftRanks()
        )
    times = GIVEN.options.get("times_s", {})
    return inprocess.Wrapper(**settings, **{name: timedelta(seconds=each) for name, each in times.items()})


@wrapper()
def main(call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    JOURNAL.mark("entered")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]) + 1,
        world,
        is_master=rank == 0,
        multi_tenant=True,
        wait_for_workers=True,
    )
    timeout = timedelta(seconds=GIVEN.options.get("group_timeout_s", 10))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    checkpoints = Checkpoints(GIVEN.folder, GIVEN.options["checkpoint_every"])
    train(Training(GIVEN.model, JOURNAL), JOURNAL, rank, checkpoints, saving=call_wrapper.atomic)


if __name__ == "__main__":
    main()
