"""One rank of plain DDP in NVIDIA's in-process Wrapper, set up like ``optimal_example.py`` of its repository."""

from journal import Journal, arguments  # first: it takes the time of the process's first line

# isort: split
import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from nvidia_resiliency_ext.inprocess.abort import Abort, AbortTorchDistributed
from nvidia_resiliency_ext.inprocess.state import FrozenState
from nvidia_resiliency_ext.inprocess.store import StoreMixin
from training import Checkpoints, Training, train


class HostedStore(dist.TCPStore, StoreMixin):
    """A client of a store that no rank is the host of, so that no rank's death ends the job."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, is_master=False, wait_for_workers=False)


class AbortGloo(Abort):
    """What the library does for NCCL only: whoever waits in a collective leaves it, because its connections are cut."""

    def __init__(self) -> None:
        self._before: set[str] = set()
        self._own: set[str] = set()

    def group_begins(self) -> None:
        self._before = set(_sockets())

    def group_stands(self) -> None:
        self._own = set(_sockets()) - self._before

    def __call__(self, state: FrozenState) -> FrozenState:
        for name, descriptor in _sockets().items():
            if name in self._own:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
                    if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.shutdown(socket.SHUT_RDWR)
        return state


def _sockets() -> dict[str, int]:
    """The sockets of this process: their names, which are never used again, and their descriptors."""
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(descriptor.readlink())
            if name.startswith("socket:"):
                found[name] = int(descriptor.name)
    return found


GIVEN = arguments()
JOURNAL = Journal(GIVEN.folder, int(os.environ["RANK"]))  # a rank may get another number later on, but not another file
ABORT = AbortGloo()


def wrapper() -> inprocess.Wrapper:
    """The Wrapper as it is by itself, apart from what the options name."""
    settings: dict[str, Any] = {"store_kwargs": {"port": int(os.environ["MASTER_PORT"]) + 2}}
    if "store_port" in GIVEN.options:
        settings = {"store_factory": HostedStore, "store_kwargs": {"port": GIVEN.options["store_port"]}}
        # The last one is called first.
        settings["abort"] = inprocess.Compose(AbortTorchDistributed(), ABORT)
    if "active" in GIVEN.options:
        assignment = inprocess.rank_assignment
        settings["rank_assignment"] = inprocess.Compose(
            assignment.MaxActiveWorldSize(GIVEN.options["active"]), assignment.ShiftRanks()
        )
    times = GIVEN.options.get("times_s", {})
    return inprocess.Wrapper(**settings, **{name: timedelta(seconds=each) for name, each in times.items()})


@wrapper()
def run(base_store: dist.Store, training: Training, call_wrapper: inprocess.CallWrapper | None = None) -> None:
    assert call_wrapper is not None
    JOURNAL.mark("entered")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.PrefixStore(str(call_wrapper.iteration), base_store)
    timeout = timedelta(seconds=GIVEN.options.get("group_timeout_s", 10))
    ABORT.group_begins()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    ABORT.group_stands()
    checkpoints = Checkpoints(GIVEN.folder, GIVEN.options["checkpoint_every"])
    train(training, JOURNAL, rank, checkpoints, saving=call_wrapper.atomic)


def main() -> None:
    """What needs no process group is made once, and is there for every restart."""
    if "store_port" in GIVEN.options:
        base_store = dist.TCPStore("127.0.0.1", GIVEN.options["store_port"], wait_for_workers=False)
    else:
        base_store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]) + 1,
            int(os.environ["WORLD_SIZE"]),
            is_master=int(os.environ["RANK"]) == 0,
            multi_tenant=True,
            wait_for_workers=True,
        )
    run(base_store, Training(GIVEN.model, JOURNAL))


if __name__ == "__main__":
    main()
