"""What a rank does: the output of the rank machine (``rank.py``), performed by ``session/driver.py`` and by the
simulation (``testing/rank.py``), each in its own way.

Effects without arguments read the machine's ``standing`` and window when they are performed, and exist once. A list of
them ends with one that waits (its outcome is the machine's next event) or with one that gives the thread back.
"""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

from resilient_train.protocol.messages import Plan, Pull, SaveLast


class Effect(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


class Mode(enum.StrEnum):
    """How a collective of the user's is carried out."""

    DIRECT = "direct"
    """Over the group."""
    UPDATE = "update"
    """It is refused: it could neither be redone nor repeated."""
    LOG = "log"
    """Over the group, its inputs and results being published."""
    EXCHANGE = "exchange"
    """From what its members have published; the group is not used."""
    BETWEEN = "between"
    """It is refused: two calls of ``session.call`` stand on either side, and one update comes after both of them."""
    PAUSED = "paused"
    """It is refused: the ranks stand still, and may go on between two of them."""
    LOOPBACK = "loopback"
    """As if this rank were alone: the step will run again, or nobody is left."""


# -- seen by others: a rank that is killed before differs from one that is killed behind


class Record(Effect, frozen=True):
    """Writes the standing into the step record."""


class Publish(Effect, frozen=True):
    """Publishes the rank's own state. ``ahead``: that from which the *next* update starts; else the present one."""

    ahead: bool


class Arrive(Effect, frozen=True):
    """Writes the standing into the step record, and wakes who waits for it."""


class ResetLog(Effect, frozen=True):
    """Empties the log of the tail."""


class SendStarted(Effect, frozen=True):
    """Tells the agent: ready for the first step."""


class SendTrouble(Effect, frozen=True):
    """Tells the agent: a collective failed, and nobody has said why."""

    text: str


class SendDamaged(Effect, frozen=True):
    """Tells the agent: registered memory lost data."""

    text: str


class SendAnomaly(Effect, frozen=True):
    """Tells the agent: the norm or the loss can't be right, or the script asks for its step once more. ``again``: it
    was so before, and this rank goes on.
    """

    again: bool


class SendRaised(Effect, frozen=True):
    """Tells the agent: the script has failed here, and this rank stays until what it holds is saved."""

    text: str
    code: int


class TellTailFailed(Effect, frozen=True):
    """Tells people: the rest of a tail has failed, of the script's or because it ran without the others, and the state
    is saved as it is.
    """


class SendJoined(Effect, frozen=True):
    """Tells the agent how far this rank has come. ``tail_failed``: an exception of the script's has left its tail."""

    tail_failed: bool = False


class SendDone(Effect, frozen=True):
    """Tells the agent: at the start of the plan's update. ``redone``: something was taken back for it."""

    redone: bool


class SendReached(Effect, frozen=True):
    """Tells the agent: at the head before which all are to pause."""


class SendFinish(Effect, frozen=True):
    """Tells the agent: the loop is over."""


class SendOffers(Effect, frozen=True):
    """Describes the state to each rank that is to copy it. It stays unchanged until Resume."""

    targets: tuple[int, ...]


class SnapshotBegin(Effect, frozen=True):
    """Begins a snapshot, if one is due."""


class ShowState(Effect, frozen=True):
    """Says to the replicas what this rank holds, for their ``Compare``: a word that is read behind the next barrier.

    At the head of the loop only where a comparison is due; a copy says nothing that its source does not.
    """

    where: Literal["head", "target", "copied", "end"]


class Compare(Effect, frozen=True):
    """Behind a barrier, if a comparison was due in front of it: ends the job if replicas hold different things.

    ``resumed``: the barrier was that of a recovery, with which the rhythm of the comparisons begins anew.
    """

    resumed: bool = False


class CheckUnchanged(Effect, frozen=True):
    """A body is over without an update: UsageError if parameters have changed all the same."""


class SnapshotFence(Effect, frozen=True):
    """Waits until what the snapshot is a copy of may be overwritten. Never fails: a snapshot may be given up."""


# -- seen by nobody else


class Arm(Effect, frozen=True):
    """From now on a stop interrupts this thread."""


class Disarm(Effect, frozen=True):
    """From now on nothing does."""


class SetMode(Effect, frozen=True):
    """How collectives of the user's are carried out from now on."""

    mode: Mode


class Exchange(Effect, frozen=True):
    """``SetMode(EXCHANGE)``, under this plan."""

    plan: Plan


class Mark(Effect, frozen=True):
    """Remembers what a redo of the window goes back to."""


class Draw(Effect, frozen=True):
    """The batch of the next step: a new one, or the one that was drawn for it before."""


class Rollback(Effect, frozen=True):
    """Back to ``Mark``, if nothing was committed or fetched since. The batches that were drawn are kept."""


class ForgetBatches(Effect, frozen=True):
    """The loop stands at the head of another window: what was drawn for this one is not drawn again."""


class SaveUndo(Effect, frozen=True):
    """Keeps a copy of the replicated state, so that Rollback can take an update back."""


class OnPause(Effect, frozen=True):
    """Calls what the script wants called while all stand still. Nothing of the training may change by it."""


class DropGradients(Effect, frozen=True):
    """The update that begins is one without gradients: it changes nothing."""


class Committed(Effect, frozen=True):
    """The update is applied: nothing before it can be rolled back."""


class Synchronize(Effect, frozen=True):
    """Waits until the device has done all that it was given."""


class LearnLayout(Effect, frozen=True):
    """All backward passes of the update are over: their order decides about DDP's buckets."""


class RebuildReducer(Effect, frozen=True):
    """Makes DDP's buckets as if nothing had happened. ``copied``: with the layout that came from the replica."""

    copied: bool


# -- the rank waits; the outcome is its next event


class CheckCollectives(Effect, frozen=True):
    """Waits for all collectives of the window. Ok: 1 if they succeeded, 0 if not. Anomalous. Doubtful."""


class Cross(Effect, frozen=True):
    """Waits until all ranks have arrived, and records UPDATING. Ok or Stopped."""


class AwaitStop(Effect, frozen=True):
    """Waits for a stop. Ok, or Failed: none came in time. ``limited`` False: it comes when all ranks have computed."""

    limited: bool = True


class Quiesce(Effect, frozen=True):
    """Leaves what the stop has cut: groups closed, device at rest, the watchdog done. Quieted.

    ``tail``: behind the update, where memory that lost data can't be put back (decision 12).
    """

    tail: bool


class AwaitResume(Effect, frozen=True):
    """A Resume, a Paused or a Pull of this generation; or Stopped."""


class AwaitPlan(Effect, frozen=True):
    """A Plan or a SaveLast of this generation; or Stopped."""


class AwaitFinished(Effect, frozen=True):
    """Finished; or Stopped."""


class AwaitEnd(Effect, frozen=True):
    """Stopped, or nothing: the agent ends this process."""


class BuildGroups(Effect, frozen=True):
    """Builds the groups of the generation. Ok, Failed or Stopped."""

    plan: Plan


class Fetch(Effect, frozen=True):
    """Copies the state from ``source``, and takes up what this rank had published; with that ``Mark`` is forgotten.
    Ok(number of the next step), Failed or Stopped.
    """

    plan: Plan
    source: int


class Serve(Effect, frozen=True):
    """Sends the state to a rank that can't read it. Ok or Failed."""

    pull: Pull


class SaveState(Effect, frozen=True):
    """Takes the snapshot with which the job ends, and waits for the end. Stopped, or nothing: the process ends.

    ``order``: this rank's part, where not all ranks are left.
    """

    order: SaveLast | None


# -- the thread is the user's again


class Return(Effect, frozen=True):
    """With ``value``: whether to run again (Exit, TailCut); else nothing."""

    value: bool = False


class ReturnStep(Effect, frozen=True):
    """With the step that was drawn."""


class ReturnEnd(Effect, frozen=True):
    """The loop is over."""


class Cut(Effect, frozen=True):
    """Raises TrainingInterrupted in the hook."""


class GiveUp(Effect, frozen=True):
    """Raises the error that nobody could explain."""


class Misuse(Effect, frozen=True):
    """Raises UsageError."""

    text: str
