"""A holder of memory snapshots that is there and never answers, as one whose process is stopped."""

import contextlib
import socket
from collections.abc import Iterator

from resilient_train.errors import HolderLostError
from resilient_train.state.vault import client
from resilient_train.state.vault.client import Vault
from resilient_train.transport import Wire


@contextlib.contextmanager
def silent_holder() -> Iterator[Vault]:
    """The connection of who has already entered."""
    mine, theirs = socket.socketpair()
    vault = Vault(Wire(mine, client._decoder, HolderLostError), reply_timeout_s=0.01)
    with theirs, contextlib.closing(vault):
        yield vault
