"""The form in which a rank publishes its own state."""

from __future__ import annotations

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.frameworks.roles import NOTHING_OF_ITS_OWN, TailsWrite


class Published(msgspec.Struct, array_like=True):
    """Before update ``commits``. What may hold anything is packed by the engine; empty where there is none.

    Random numbers and position are apart from them: they change at every step, and msgspec alone takes a microsecond.
    """

    commits: int
    number: int
    random: bytes
    epoch: int
    taken: int
    epoch_random: bytes
    loader: bytes
    rank: bytes
    skipped: int = 0
    batch: int = 0
    """Samples in a rank's batch, and among how many ranks an epoch is divided: from them a world of another size finds
    its place. 0 where that is not known."""
    replicas: int = 0
    reused: bool = False
    """See ``loader.DataPosition``."""
    called: bytes = b""
    """What the step's body is called with, see ``roles.Data.look``; empty where that is not known yet."""
    last: bytes = b""
    drawn_from: bytes = b""
    """See ``loader.DataPosition``."""
    ahead: bool = False
    """When the update before was not applied yet: what its tail writes is not in here."""
    headed: bool = False
    """Whether the state that goes with it holds what a loop of calls does in front of the step's call."""
    tails_draw: bool = False
    """Whether a tail of this rank's has drawn random numbers: rank 0's alone, say, which evaluates now and then."""
    begun: bytes = b""
    """A look at the first batch of the pass that the update begins, as it was drawn; empty if it begins none, or has
    not drawn it yet.
    """
    loops: int = 0
    """How many of the script's loops over ``session.steps()`` the training has begun; 0: it is one of calls."""
    tails: TailsWrite = NOTHING_OF_ITS_OWN
    """Of this rank's tails."""
    workers: bytes = b""
    """See ``loader.DataPosition``."""
    compiled: str = ""
    """See ``roles.RankState.compiled_for_shapes``; of this process or one before it."""


def read(payload: bytes) -> Published:
    """The inverse of msgpack's encoding. Raises ProtocolError."""
    try:
        return msgspec.msgpack.decode(payload, type=Published)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"what this rank had published can't be read: {error}") from None
