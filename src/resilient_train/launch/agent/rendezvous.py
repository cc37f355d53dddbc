"""The store by which torch's process groups find one another: on this node's loopback interface, and nowhere else."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import TCPStore

from resilient_train.errors import ConfigError


def make_store(host: str, port: int) -> TCPStore:
    """A store that listens on ``host`` (torch's own choice would be all interfaces). Port 0: any that is free.

    Raises ConfigError if that is not possible.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a job that has just ended may have had the port
        listener.bind((host, port))
        listener.listen(2048)
        bound = listener.getsockname()[1]
        # The store closes the descriptor when it ends.
        return TCPStore(host, bound, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"the store can't listen on {host}:{port}: {error}") from None
