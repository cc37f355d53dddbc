"""Why a body ended with an error: a fault, or the user's own doing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import CO_GENERATOR, currentframe
from itertools import dropwhile, islice
from opcode import opname
from types import FrameType, TracebackType

from resilient_train.errors import TrainingInterrupted
from resilient_train.frameworks.roles import Groups
from resilient_train.protocol.rank_events import Exit
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session.device_errors import DeviceErrors
from resilient_train.session.from_replica import FromReplica
from resilient_train.session.peers import Peers

LEAVING = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""By these a script is left on purpose. All else is an error, also what is no Exception: torch's CheckpointException is
none.
"""
RAN_AGAIN = (
    "resilient_train: the body of step {step} ran again, since a fault had cut it: what it had written by then outside "
    "of what is registered (variables, files, groups) was as the cut had left it (docs/how-to/loops.md)"
)
"""A note at the user's error: it may come of that, and neither the traceback nor the script shows it. One cut between
``out, hidden = model(x, hidden)`` and ``hidden = hidden.detach()`` leaves a tensor with a graph that no backward pass
can go through any more.
"""


class Explainer:
    """What is damaged goes to ``from_replica``."""

    def __init__(self, peers: Peers, groups: Groups, device: DeviceErrors, from_replica: FromReplica) -> None:
        self._peers = peers
        self._groups = groups
        self._device = device
        self._from_replica = from_replica

    def exit(self, error: BaseException, standing: Standing, generation: int, *, redoes: bool) -> Exit:
        """An ordinary exception is the user's, unless a recovery is under way, memory lost data, or a peer hung up.

        After the update it is: what a fault does to a collective there is repaired inside the call. Raises DeviceError
        if memory lost data there. ``redoes``: a step is run again for an error that asks for it.
        """
        if isinstance(error, TrainingInterrupted):
            return Exit("interrupted")
        if isinstance(error, LEAVING):
            return Exit("leaves")
        text = f"{type(error).__name__}: {error}"
        kind = self._device.kind_of(error)
        if standing.phase is Phase.APPLIED:
            self._device.check_after_update(error)
            return Exit("error", text)
        if standing.phase is Phase.COMPUTE and self._peers.stop_raised(generation):
            return Exit("fault", text)  # and the device is not waited for
        damage = self._device.asked(wait=True)
        if damage is not None:
            self._from_replica.damaged = damage
            names = ", ".join(damage.names()) or "no state"
            return Exit("fault", f"uncorrectable memory error ({names})", damaged=True, lost=damage.lost)
        if kind == "UCE":  # at no address that is known: the check will say what it has hit, see Device.confirm
            return Exit("fault", text, damaged=True)
        if kind == "DEVICE" or (kind and standing.phase is not Phase.COMPUTE):
            raise self._device.failed(text)
        if standing.phase is Phase.COMPUTE and (kind or self._groups.broken()):
            return Exit("fault", text)
        if standing.phase is Phase.COMPUTE and redoes and asks_for_redo(error):
            return Exit("anomalous", text)
        return Exit("error", text)


_IN_ORDER = frozenset(("POP_TOP", "YIELD_VALUE", "RESUME", "SEND"))
"""Where code stands that has left a loop by ``break`` or ``return``, and a generator that is closed: at no error."""


def left_by_an_error() -> bool:
    """Whether an error is on its way through the code that reads the generator which is being closed. Python closes it
    by GeneratorExit for a ``break`` there too, and puts the error aside meanwhile: nothing in the generator tells. But
    a traceback has the frame of that code already, and it stands where errors are raised. (A traceback alone may be an
    old one that is kept.) Between the two there may be other generators.
    """
    for frame in islice(dropwhile(lambda each: not _is_generators(each), _outwards(currentframe())), 1, None):
        at = opname[frame.f_code.co_code[frame.f_lasti]]
        if at not in _IN_ORDER and any(isinstance(each, TracebackType) for each in gc.get_referrers(frame)):
            return True
        if not _is_generators(frame):
            break
    return False


def _is_generators(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & CO_GENERATOR)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def asks_for_redo(error: BaseException) -> bool:
    """As MindSpore has it: by a word in the text."""
    return isinstance(error, RuntimeError) and "TREError" in str(error)
