"""What the controller and the processors of ``mindio_ttp`` tell each other. Names and numbers are MindIO's.

A frame goes over TCP: a little-endian length of 4 bytes and msgpack. Each order carries its *round*: every fault begins
a new one, and an answer to an older one counts for nothing.
"""

from __future__ import annotations

import enum

import msgspec


class ReportState(enum.Enum):
    """What a rank reports (``tft_report_error``)."""

    RS_NORMAL = 0
    RS_RETRY = 1
    RS_UCE = 2
    RS_UCE_CORRUPTED = 3
    RS_HCCL_FAILED = 4
    RS_INIT_FINISH = 5
    RS_PREREPAIR_FINISH = 6
    RS_STEP_FINISH = 7
    RS_UNKNOWN = 8


class RepairType(enum.Enum):
    """What a rank is to do to have, or to give, the state."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3
    RT_ROLLBACK = 4
    RT_LOAD_CKPT = 5
    RT_LOAD_REBUILD = 6


class Action(enum.Enum):
    """What ``tft_wait_next_action`` answers."""

    RETRY = 0
    EXIT = 1


class OptimizerType(enum.Enum):
    """The kinds of an optimizer's state: each has replica groups of its own."""

    ATTENTION = 0
    MOE = 1


class FaultKind(enum.IntEnum):
    """What befell a rank, as MindX is told."""

    UCE = 0
    """Its device has lost memory."""
    PROCESS = 1
    """Its process is gone, or of no use any more."""
    NETWORK = 2
    """A collective has failed."""


class ReplicaGroup(msgspec.Struct, frozen=True):
    """Ranks that hold one optimizer state together: ``copies`` times, so with that many replicas of each part."""

    ranks: tuple[int, ...]
    copies: int
    shift: int = 0


# -- from a processor


NOT_WHOLE = 3
"""A rank's answer to an order for which it would need the state, which it has lost in the meantime."""

PASSED = 4
"""A rank's answer to HaltOrder: it has left that place behind already."""

NAMED = 5
"""A rank's answer to RenameOrder: what it was to rename is not there any more, and what it was to become is."""

WORDS = frozenset({NOT_WHOLE, PASSED, NAMED})
"""Of ours, among codes that are handlers': none of those may be taken for one."""


class ProcessorHello(msgspec.Struct, tag="hello", frozen=True):
    """The first frame. ``proof``: see ``wire.py``."""

    rank: int
    world_size: int
    proof: bytes = b""


class Replicas(msgspec.Struct, tag="replicas", frozen=True):
    """In whose company this rank holds its state; one group for each kind of optimizer."""

    groups: tuple[ReplicaGroup, ...]


class Status(msgspec.Struct, tag="status", frozen=True):
    """How far this rank is: so many updates are over, and whether one more is being written."""

    step: int
    updating: bool


class Reported(msgspec.Struct, tag="reported", frozen=True):
    """The training thread has reported, and waits for what is done about it."""

    state: ReportState
    code: str = ""


class Did(msgspec.Struct, tag="did", frozen=True):
    """An order is carried out. ``code``: 0, or the handler's own (2 of clean: the damage was where no state is).

    Of lock 1: this rank does not hold the state behind ``step`` updates.
    """

    round: int
    order: str
    code: int
    step: int
    """How many updates this rank's state has behind it."""


class Bye(msgspec.Struct, tag="bye", frozen=True):
    """The training is over here. The connection's end is no fault any more."""


# -- to a processor


class ProcessorWelcome(msgspec.Struct, tag="welcome", frozen=True):
    """``reborn``: the process before had this rank, and the job goes on."""

    reborn: bool


class TrainingOver(msgspec.Struct, tag="over", frozen=True):
    """The controller's own training is over, and so is it."""


def _word(name: str) -> str:
    return name.removesuffix("Order").lower()


class Order(msgspec.Struct, frozen=True, kw_only=True, tag=_word):
    """Something to do, and to answer with Did."""

    round: int

    @classmethod
    def name(cls) -> str:
        """As it stands in frames."""
        return str(cls.__struct_config__.tag)


class LockOrder(Order, frozen=True, kw_only=True):
    """Go on to the end of update ``limit``, and begin none behind it. Answered when the state stands still."""

    limit: int


class HaltOrder(Order, frozen=True, kw_only=True):
    """The same, where all train: however long it takes to come there."""

    limit: int


class ReleaseOrder(Order, frozen=True, kw_only=True):
    """Nothing has happened: whoever stands goes on. Not answered."""


class StopOrder(Order, frozen=True, kw_only=True):
    """The training thread is to raise out of whatever it does. ``repair``: what comes of it (retry, recover, dump)."""

    repair: str


class CleanOrder(Order, frozen=True, kw_only=True):
    """The device is made ready for more."""

    uce: bool


class RebuildOrder(Order, frozen=True, kw_only=True):
    """Groups are made with those who came back."""

    lost: tuple[int, ...]


class Part(msgspec.Struct, frozen=True):
    """What one rank does for one kind of optimizer: pairs of ``sources`` and ``targets`` that it is in."""

    kind: int
    how: int
    sources: tuple[int, ...]
    targets: tuple[int, ...]


class RepairOrder(Order, frozen=True, kw_only=True):
    """State is sent or taken. ``ranks``: all that send or take any, of whatever kind."""

    step: int
    parts: tuple[Part, ...]
    ranks: tuple[int, ...]


class RollbackOrder(Order, frozen=True, kw_only=True):
    """What is not state (a place in the data) goes to that step."""

    step: int


class GoOrder(Order, frozen=True, kw_only=True):
    """The training thread goes on, from behind ``step`` updates. Not answered."""

    step: int


class Savers(msgspec.Struct, frozen=True):
    """Ranks that hold one optimizer state of this kind together, each part once."""

    kind: int
    ranks: tuple[int, ...]


class SaveOrder(Order, frozen=True, kw_only=True):
    """An end-of-life checkpoint; ``savers``: the states of which this rank writes a part, and with whom."""

    step: int
    savers: tuple[Savers, ...]


class RenameOrder(Order, frozen=True, kw_only=True):
    """All have written. Another rank may have been asked before."""

    step: int


class ExitOrder(Order, frozen=True, kw_only=True):
    """The process is to end. Not answered."""


FromProcessor = ProcessorHello | Replicas | Status | Reported | Did | Bye
AnyOrder = (
    LockOrder
    | HaltOrder
    | ReleaseOrder
    | StopOrder
    | CleanOrder
    | RebuildOrder
    | RepairOrder
    | RollbackOrder
    | GoOrder
    | SaveOrder
    | RenameOrder
    | ExitOrder
)
