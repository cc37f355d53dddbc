"""A loop in a process with many connections of its own: none of them is the library's to shut.

Each rank has pairs of Unix sockets, connections to echo servers of its own (IPv4, IPv6, Unix), connections to the other
ranks at the address that gloo uses, and a thread that opens more of them, also while groups are being built.
``--fixed``: ranks that are never killed; what lies between those has to live. A connection that does not answer ends
the rank with an error.
"""

import argparse
import contextlib
import itertools
import os
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.frameworks.torch.communication import process_group as group_module
from resilient_train.frameworks.torch.communication.transports.gloo import inode

MOST = 200


def serve(listener: socket.socket) -> None:
    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def echo(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := connection.recv(100):
            connection.sendall(data)


class Own:
    """The connections of this process, each with its name."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.held: dict[str, socket.socket] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        # As gloo: it listens at the address of the host's name, or of the loopback interface.
        self.address = "127.0.0.1"
        with contextlib.suppress(OSError):
            self.address = socket.gethostbyname(socket.gethostname())
        self.listeners = [socket.create_server((self.address, 0), backlog=500)]
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):
                self.listeners.append(socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=500))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"\0own-sockets-{os.getpid()}")
        unix.listen(100)
        self.listeners.append(unix)
        for listener in self.listeners:
            serve(listener)
        told = folder / f"own_{rank}_{os.getpid()}"
        told.write_text(str(self.listeners[0].getsockname()[1]))
        told.rename(folder / f"own_{rank}")

    def open(self, when: str) -> None:
        """One more to each server of its own, and a pair."""
        number = next(self._numbers)
        for listener in self.listeners:
            connection = socket.socket(listener.family)
            connection.connect(listener.getsockname())
            self._keep(f"{when} {number} to {listener.getsockname()}", connection)
        ours, theirs = socket.socketpair()
        threading.Thread(target=echo, args=(theirs,), daemon=True).start()
        self._keep(f"{when} {number} pair", ours)

    def open_to(self, other: int, when: str) -> None:
        path = self.folder / f"own_{other}"
        while not path.exists():
            time.sleep(0.005)
        connection = socket.create_connection((self.address, int(path.read_text())))
        self._keep(f"{when} to rank {other}", connection)

    def _keep(self, name: str, connection: socket.socket) -> None:
        connection.settimeout(30)
        with self._lock:
            self.held[name] = connection

    def open_all_the_time(self) -> None:
        while len(self.held) < MOST:
            self.open("any time")
            time.sleep(0.002)

    def connections(self) -> dict[str, socket.socket]:
        """Those of now: others are opened all the time."""
        with self._lock:
            return dict(self.held)

    def check(self) -> None:
        for name, connection in self.connections().items():
            word = os.urandom(8)
            connection.sendall(word)
            answer = connection.recv(100)
            assert answer == word, f"rank {self.rank}: connection {name!r} answers {answer!r}"


def check_taken(own: Own, *, complete: bool) -> None:
    """None of ours is taken for a group's; ``complete``: all of a group's are."""
    taken = [each for group in group_module.groups.values() for each in group.sockets]
    mine = {(connection.fileno(), inode(connection.fileno())) for connection in own.connections().values()}
    assert not mine & set(taken), mine & set(taken)
    expected = sum(group.size() - 1 for group in group_module.groups.values())
    assert len(taken) == expected or not complete, f"{len(taken)} connections are taken for the groups', of {expected}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", nargs="*", type=int, default=[])
    asked = parser.parse_args()
    link = read_link()
    assert link is not None
    own = Own(Path(link.run_dir), link.rank)
    others = [other for other in asked.fixed if link.rank in asked.fixed and other != link.rank]
    own.open("before init")
    for other in others:
        own.open_to(other, "before init")
    opener = threading.Thread(target=own.open_all_the_time, daemon=True)
    opener.start()
    dist.init_process_group("gloo")
    pairs = [dist.new_group([low, low + 1]) for low in range(dist.get_world_size() - 1)]
    own.open("after init")
    for other in others:
        own.open_to(other, "after init")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(12):
            with step:
                model(torch.randn(4, 8)).square().mean().backward()
                for low, pair in enumerate(pairs):
                    if link.rank in (low, low + 1):
                        dist.all_reduce(torch.ones(1), group=pair)
                optimizer.step()
                optimizer.zero_grad()
            if step.done:
                own.check()
                own.open("in the loop")
                check_taken(own, complete=step.number == 0)
    opener.join()
    own.check()
    (own.folder / f"checked_{link.rank}").write_text(str(len(own.held)))
    # Who leaves closes its connections: not before all have looked at theirs.
    while not all((own.folder / f"checked_{rank}").exists() for rank in range(dist.get_world_size())):
        time.sleep(0.005)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
