"""Where a rank is, and what it does next: one state machine, the only place that knows.

Pure: events in (``rank_events.py``, frames), effects out (``rank_effects.py``). ``session/driver.py`` performs the
effects in the training thread, ``testing/rank.py`` in the simulation; neither looks at a state.

States in which the user's code runs::

    Setup    before the loop            Update   the optimizer writes (UPDATING)
    Open     between two bodies         Tail     the rest of the body, and what is between steps (APPLIED)
    Body     the body of a step         Drain    code behind a cut body; the step will run again

States in which the library waits for the outcome of one effect::

    Meet     for the first Resume       Build    for process groups
    Verify   for the collectives        Restore  for the state
    Barrier  for the other ranks        Target   for Resume, at the start of the plan's update
    Halt     for the stop of a pause    Finish   for the others, at the end
    Ask      for somebody to say why    Save     for the job's end, its state being saved
    Quiet    until nothing runs         Left     for nothing any more
    Agree    for a plan

What a rank does under a plan::

    it stands                   first        then
    at the target (COMPUTE)     -            takes back what it has begun
    READY one update before     applies      keeps
    APPLIED at the target       its tail     keeps
    without usable state        -            copies

Interrupts are let in in Body (unless an optimizer writes under ``undo``), and as Stopped in the states that wait for
other ranks or the agent. Never in Update, Tail, Drain, Verify, Quiet, Save.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.messages import Finished, Paused, Plan, Pull, Resume, SaveLast
from resilient_train.protocol.standing import Phase, Standing


class At(enum.IntEnum):
    """What stands on the user's stack while the library waits."""

    HEAD = 0
    """The loop asks for a step, or is over."""
    HOOK = 1
    """``optimizer.step()`` has called us."""
    EXIT = 2
    """The ``with`` block's end has."""
    CALL = 3
    """A collective of the tail has."""


class MachineState(msgspec.Struct, frozen=True, tag=True):
    """Base of all."""


class Setup(MachineState, frozen=True):
    """Before the loop."""


class Open(MachineState, frozen=True):
    """Between the bodies of one window."""


class Body(MachineState, frozen=True):
    """``held``: an optimizer writes under ``undo``."""

    held: bool = False


class Update(MachineState, frozen=True):
    """``plan``: that under which a rank applies what it was READY for."""

    plan: Plan | None = None


class Tail(MachineState, frozen=True):
    """``duty``: what is to be done at the next head."""

    duty: Plan | SaveLast | None = None


class Drain(MachineState, frozen=True):
    """``duty``: a plan that waits at the next head. ``stopped``: a stop has cut the body. Else something failed."""

    duty: Plan | None = None
    stopped: bool = False
    text: str = ""


class Meet(MachineState, frozen=True):
    """Waits for the first Resume."""


class Verify(MachineState, frozen=True):
    """Waits for the window's collectives."""

    at: At


class Barrier(MachineState, frozen=True):
    """Waits for all ranks."""

    at: At


class Ask(MachineState, frozen=True):
    """Waits for a stop that explains what failed, or answers an anomaly, or a window that is to be computed again."""

    at: At


class Quiet(MachineState, frozen=True):
    """Waits until nothing runs any more."""

    at: At


class Agree(MachineState, frozen=True):
    """Waits for the plan."""

    at: At


class Build(MachineState, frozen=True):
    """Waits for the process groups."""

    at: At
    plan: Plan


class Restore(MachineState, frozen=True):
    """Waits for the state."""

    plan: Plan


class Target(MachineState, frozen=True):
    """Waits for Resume."""

    plan: Plan


class Halt(MachineState, frozen=True):
    """Waits for the stop that brings all to the head at which it stands."""


class Finish(MachineState, frozen=True):
    """Waits for the other ranks' ends."""


class Save(MachineState, frozen=True):
    """Waits for the end of the process."""

    at: At


class Left(MachineState, frozen=True):
    """Nothing more is to come."""


Effects = tuple[do.Effect, ...]

_RECORD, _ARRIVE, _RESET_LOG = do.Record(), do.Arrive(), do.ResetLog()
_PUBLISH, _PUBLISH_AHEAD = do.Publish(ahead=False), do.Publish(ahead=True)
_ARM, _DISARM, _MARK, _DRAW, _ROLLBACK = do.Arm(), do.Disarm(), do.Mark(), do.Draw(), do.Rollback()
_SNAPSHOT_BEGIN, _SNAPSHOT_FENCE = do.SnapshotBegin(), do.SnapshotFence()
_COMPARE, _CHECK_UNCHANGED = do.Compare(), do.CheckUnchanged()
_MODE = {mode: do.SetMode(mode) for mode in do.Mode}
_CHECK, _CROSS, _AWAIT_STOP = do.CheckCollectives(), do.Cross(), do.AwaitStop()
_AWAIT_VERDICT = do.AwaitStop(limited=False)
_RETURN, _AGAIN, _STEP, _CUT = do.Return(value=False), do.Return(value=True), do.ReturnStep(), do.Cut()
_COMMITTED, _SYNCHRONIZE, _LEARN = do.Committed(), do.Synchronize(), do.LearnLayout()

_SETUP, _OPEN, _BODY, _UPDATE, _TAIL, _LEFT = Setup(), Open(), Body(), Update(), Tail(), Left()
_VERIFY = {at: Verify(at) for at in At}
_BARRIER = {at: Barrier(at) for at in At}

# What nearly every step does, made once.
_HEAD_NEW = (_PUBLISH, _SNAPSHOT_BEGIN, do.ShowState("head"), _DRAW, _MARK, _STEP)
_HEAD_AGAIN = (_DRAW, _MARK, _STEP)
_HEAD_WITHIN = (_DRAW, _STEP)
_HEAD_AFTER_TAIL = (_RECORD, _MODE[do.Mode.DIRECT], *_HEAD_NEW)
_ENTER = (_ARM, _RETURN)
_VERIFYING = (_DISARM, _CHECK)
_READY = (_SNAPSHOT_FENCE, _LEARN, _PUBLISH_AHEAD, _ARRIVE, _CROSS)
_UPDATING = (_COMPARE, _MODE[do.Mode.UPDATE])
_WITHOUT_UPDATE = (do.DropGradients(), _RETURN)
_APPLIED = (_SYNCHRONIZE, _COMMITTED, _RESET_LOG, _RECORD, _MODE[do.Mode.LOG], _RETURN)
_JUST_RETURN = (_RETURN,)


class Rank:
    """One rank. ``on`` takes an event and returns the effects; the rest is to be read only.

    A *window* is the run of steps up to one update: one, or several where gradients are accumulated. ``base`` is the
    number of its first step, ``place`` that of the present one in it, ``drawn`` how many batches it has.
    """

    __slots__ = (
        *("attempt", "base", "copied", "drawn", "generation", "intact", "me", "optimizers", "over", "place", "skips"),
        *("standing", "state", "tolerated", "total", "undo", "written", "joining"),
    )

    def __init__(
        self,
        me: int,
        *,
        generation: int = 0,
        joining: bool = False,
        optimizers: int = 1,
        undo: bool = False,
        skips: bool = False,
    ) -> None:
        self.me = me
        self.joining = joining
        self.optimizers = optimizers
        self.undo = undo
        self.skips = skips
        """What was anomalous is run again without its update."""
        self.generation = -1 if joining else generation
        self.standing = Standing(0, Phase.APPLIED)
        self.intact = not joining
        """Whether the replicated state is usable."""
        self.state: MachineState = _SETUP
        self.total = 0
        self.base = self.place = self.drawn = self.attempt = 0
        self.written: frozenset[int] = frozenset()
        """The optimizers that have written in this window."""
        self.copied = False
        """The state came from elsewhere, in this recovery or one that it has taken the place of."""
        self.over = False
        """The loop is over, or would be: the others' are."""
        self.tolerated: frozenset[int] = frozenset()
        """Steps that were run again for an anomaly: another one there is told, and the step goes on."""

    @property
    def redoable(self) -> bool:
        """Whether a fault would run the user's code again that runs now."""
        return isinstance(self.state, (Body, Drain))

    @property
    def updating(self) -> bool:
        """Whether the user's code runs between the first optimizer's write and the last one's."""
        return isinstance(self.state, Update)

    @property
    def behind_update(self) -> bool:
        """Whether the newest update is applied, and nothing of the next one has begun."""
        return isinstance(self.state, Tail)

    @property
    def leavable(self) -> bool:
        """Whether the loop may end here: no body is cut, and no update half done."""
        return isinstance(self.state, (Open, Tail)) and not self.written

    @property
    def whole(self) -> bool:
        """Whether the state can be saved if the loop is left here by an exception: no update is half done."""
        return isinstance(self.state, (Open, Tail, Drain))

    @property
    def number(self) -> int:
        """The number of the step that runs or comes next."""
        return self.base + self.place

    @property
    def commits(self) -> int:
        """How many updates this rank has applied."""
        return self.standing.commits

    def on(self, event: Any) -> Effects:
        """What to do about it. Raises ProtocolError for what can't happen here."""
        row = TABLE.get((type(self.state), type(event)))
        if row is None:
            raise ProtocolError(f"rank {self.me}: {event} can't happen in {self.state}")
        return row(self, self.state, event)

    def copy(self) -> Rank:
        """An independent one in the same state."""
        new = object.__new__(type(self))
        for name in Rank.__slots__:
            setattr(new, name, getattr(self, name))
        return new

    def key(self) -> tuple[Any, ...]:
        """What tells it from others, hashable."""
        state = self.state
        fields = tuple(_key_of(getattr(state, name)) for name in state.__struct_fields__)
        own = tuple(getattr(self, name) for name in Rank.__slots__ if name not in ("state", "me", "attempt"))
        return (type(state).__name__, fields, own)


Row = Callable[[Rank, Any, Any], Effects]
TABLE: dict[tuple[type[MachineState], type], Row] = {}
"""(state, event) -> what happens."""

R = TypeVar("R", bound=Row)


def _row(states: type[MachineState] | tuple[type[MachineState], ...], *events: type) -> Callable[[R], R]:
    def enter(row: R) -> R:
        for state in states if isinstance(states, tuple) else (states,):
            for event in events:
                assert (state, event) not in TABLE, (state, event)
                TABLE[state, event] = row
        return row

    return enter


def _key_of(value: Any) -> Any:
    if isinstance(value, Plan):
        copies = tuple(sorted(value.copies.items()))
        return (value.generation, value.commits, copies, value.finishers, value.replaced, value.last)
    if isinstance(value, SaveLast):
        return (value.generation, value.commits, value.part, value.shard)
    return value


WAITS_IN_CODE = (Verify, Barrier, Ask, Quiet, Agree, Build, Save)
"""States in which the user's code may stand on the stack: what is raised there goes through that."""


# -- a healthy step


@_row(Setup, on.Begin)
def _begin(rank: Rank, _: Setup, event: on.Begin) -> Effects:
    rank.total, rank.base, rank.standing = event.total, event.number, Standing(event.commits, Phase.APPLIED)
    if rank.joining:
        return _quiet(rank, At.HEAD)
    rank.state = Meet()
    return (_PUBLISH, _RECORD, do.SendStarted(), do.AwaitResume())


@_row(Meet, Resume)
def _met(rank: Rank, _: Meet, resume: Resume) -> Effects:
    rank.tolerated = resume.tolerated
    rank.standing = Standing(rank.standing.commits, Phase.COMPUTE)
    return (_RECORD, *_head(rank, stopped=False))


@_row(Meet, on.Stopped)
def _stopped_before_the_first(rank: Rank, _: Meet, __: on.Stopped) -> Effects:
    rank.standing = Standing(rank.standing.commits, Phase.COMPUTE)
    return (_RECORD, *_quiet(rank, At.HEAD))


@_row(Open, on.Next)
def _next(rank: Rank, _: Open, event: on.Next) -> Effects:
    rank.total = event.total
    return _head(rank, stopped=event.stopped, pauses=event.pauses)


@_row(Open, on.Enter)
def _enter(rank: Rank, _: Open, __: on.Enter) -> Effects:
    rank.state = _BODY
    return _ENTER


@_row(Body, on.UpdateBegins)
def _update_begins(rank: Rank, _: Body, __: on.UpdateBegins) -> Effects:
    if rank.undo:
        rank.state = Body(held=True)
        return (_DISARM, _SNAPSHOT_FENCE, do.SaveUndo(), *_begun(rank))
    rank.state = _VERIFY[At.HOOK]
    return _VERIFYING


@_row(Verify, on.Ok)
def _verified(rank: Rank, state: Verify, event: on.Ok) -> Effects:
    if not event.value:
        return _cut(rank, state.at, Drain(text="a collective of the step failed"))
    return _ready(rank, state.at)


def _ready(rank: Rank, at: At) -> Effects:
    rank.standing = Standing(rank.standing.commits, Phase.READY)
    rank.state = _BARRIER[at]
    return _READY


@_row(Verify, on.Anomalous)
def _anomalous(rank: Rank, state: Verify, _: on.Anomalous) -> Effects:
    """Nobody is past the barrier, since this rank has not come to it: all can go back before the update."""
    if rank.number in rank.tolerated:
        return (do.SendAnomaly(again=True), *_ready(rank, state.at))
    rank.state = Ask(state.at)
    return (do.SendAnomaly(again=False), _AWAIT_STOP)


@_row(Verify, on.Doubtful)
def _doubtful(rank: Rank, state: Verify, _: on.Doubtful) -> Effects:
    """As with an anomaly. Nobody applies what this rank is not READY for, whoever dies meanwhile."""
    rank.state = Ask(state.at)
    return (_AWAIT_VERDICT,)


@_row(Barrier, on.Ok)
def _crossed(rank: Rank, state: Barrier, _: on.Ok) -> Effects:
    rank.standing = Standing(rank.standing.commits, Phase.UPDATING)
    if state.at is At.EXIT:
        return (_COMPARE, *_applied(rank, None))
    rank.state = _UPDATE
    return (*_UPDATING, *_begun(rank))


def _begun(rank: Rank) -> Effects:
    """The optimizer writes; nothing, where the step's update is to be left out."""
    return _WITHOUT_UPDATE if rank.skips and rank.number in rank.tolerated else _JUST_RETURN


@_row(Update, on.UpdateEnds)
def _update_ends(rank: Rank, state: Update, event: on.UpdateEnds) -> Effects:
    rank.written |= {event.index}
    if len(rank.written) < rank.optimizers:
        return _JUST_RETURN
    return _applied(rank, state.plan)


@_row(Update, on.UpdateBegins)
def _update_goes_on(rank: Rank, _: Update, event: on.UpdateBegins) -> Effects:
    return _twice(rank.number) if event.index in rank.written else _begun(rank)


@_row(Body, on.UpdateEnds)
def _undoable_update_ends(rank: Rank, _: Body, event: on.UpdateEnds) -> Effects:
    rank.written |= {event.index}
    rank.state = _BODY
    return _ENTER


@_row(Body, on.Exit)
def _exit(rank: Rank, _: Body, event: on.Exit) -> Effects:
    if event.how == "ok":
        if rank.written:  # `undo`: the whole body was one transaction
            rank.state = _VERIFY[At.EXIT]
            return _VERIFYING
        rank.state = _OPEN
        rank.place += 1
        return (_DISARM, _CHECK_UNCHANGED, _RETURN)
    if event.how in ("error", "leaves"):
        rank.state = _OPEN
        return (_DISARM, _RETURN)
    if event.how == "anomalous":  # as in Verify: this rank has not come to the barrier
        rank.state = Ask(At.EXIT)
        return (_DISARM, do.SendAnomaly(again=False), _AWAIT_STOP)
    if event.how == "interrupted":
        return (_DISARM, *_cut(rank, At.EXIT, Drain(stopped=True)))
    return (_DISARM, *_told_damage(rank, event), *_cut(rank, At.EXIT, Drain(text=event.text)))


@_row(Update, on.Exit)
def _exit_in_update(rank: Rank, state: Update, event: on.Exit) -> Effects:
    if event.how == "ok":
        return _applied(rank, state.plan)  # not all optimizers had a turn in this step
    if event.how == "fault":
        rank.intact = False
        return (*_told_damage(rank, event), *_cut(rank, At.EXIT, Drain(text=event.text)))
    return _JUST_RETURN


def _applied(rank: Rank, plan: Plan | None) -> Effects:
    rank.standing = Standing(rank.standing.commits + 1, Phase.APPLIED)
    rank.base, rank.place, rank.drawn, rank.attempt = rank.number + 1, 0, 0, 0
    rank.written = frozenset()
    if plan is None:
        rank.state = _TAIL
        return _APPLIED
    rank.state = Tail(plan)
    return (_SYNCHRONIZE, _COMMITTED, _RESET_LOG, _RECORD, do.Exchange(plan), _RETURN)


@_row(Tail, on.Exit)
def _exit_in_tail(rank: Rank, state: Tail, event: on.Exit) -> Effects:
    if event.how != "error" or not isinstance(state.duty, SaveLast):
        return _JUST_RETURN
    # The user's code was given this rank's own values for everybody's, and did not like them. The update is whole.
    return _save_failed_tail(rank, state.duty)


def _save_failed_tail(rank: Rank, order: SaveLast) -> Effects:
    return (do.TellTailFailed(), *_save_behind_tail(rank, order))


def _save_behind_tail(rank: Rank, order: SaveLast) -> Effects:
    rank.standing = Standing(rank.standing.commits, Phase.COMPUTE)
    rank.state = Save(At.HEAD)
    return (_RECORD, _PUBLISH, do.SaveState(order))


@_row(Tail, on.UpdateBegins)
def _update_in_tail(rank: Rank, _: Tail, __: on.UpdateBegins) -> Effects:
    return _twice(rank.number - 1)


@_row(Tail, on.UpdateEnds)
def _hook_in_tail(_: Rank, __: Tail, ___: Any) -> Effects:
    return _JUST_RETURN


@_row(Tail, on.Next, on.Over)
def _tail_over(rank: Rank, state: Tail, event: on.Next | on.Over) -> Effects:
    _asked(rank, event)
    if isinstance(state.duty, SaveLast):
        return _save_behind_tail(rank, state.duty)
    rank.standing = Standing(rank.standing.commits, Phase.COMPUTE)
    if isinstance(state.duty, Plan):
        return _target(rank, state.duty, copied=False, redone=False)
    pauses = isinstance(event, on.Next) and event.pauses
    if not event.stopped and not pauses and not rank.over and rank.number < rank.total:
        rank.state, rank.drawn = _OPEN, 1
        return _HEAD_AFTER_TAIL
    return (_RECORD, _MODE[do.Mode.DIRECT], *_head(rank, stopped=event.stopped, pauses=pauses))


@_row(Open, on.Over)
def _over(rank: Rank, _: Open, event: on.Over) -> Effects:
    rank.over = True
    return _head(rank, stopped=event.stopped)


def _asked(rank: Rank, event: on.Next | on.Over) -> None:
    if isinstance(event, on.Next):
        rank.total = event.total
    else:
        rank.over = True


def _head(rank: Rank, *, stopped: bool, pauses: bool = False) -> Effects:
    """The head of the loop, with nothing left to do."""
    if stopped:
        return _quiet(rank, At.HEAD)
    if rank.over or rank.number >= rank.total:  # not over by its number: a recovery may take the last bodies back
        rank.state = Finish()
        return (do.ShowState("end"), do.SendFinish(), do.AwaitFinished())
    if pauses and rank.place == 0:
        rank.state = Halt()
        return (do.SendReached(), do.AwaitEnd())
    rank.state = _OPEN
    new, first = rank.drawn == 0, rank.place == 0
    rank.drawn = max(rank.drawn, rank.place + 1)
    # A redone step's batch is drawn already: what was published before that still is where it starts.
    return _HEAD_NEW if new else _HEAD_AGAIN if first else _HEAD_WITHIN


# -- a fault


def _quiet(rank: Rank, at: At) -> Effects:
    rank.state = Quiet(at)
    return (do.Quiesce(tail=at is At.CALL),)


def _cut(rank: Rank, at: At, drain: Drain) -> Effects:
    """The body is left. What stands behind the ``with`` runs all the same: its collectives must not hang, nor fail."""
    rank.state = drain
    return (_MODE[do.Mode.LOOPBACK], _CUT if at is At.HOOK else _AGAIN)


def _told_damage(rank: Rank, event: on.Exit) -> Effects:
    rank.intact = rank.intact and not event.lost
    return (do.SendDamaged(event.text),) if event.damaged else ()


def _twice(number: int) -> Effects:
    return (
        do.Misuse(
            f"optimizer.step() ran twice in step {number}; give each update its own `with step:`, or pass "
            "Session(undo=True)"
        ),
    )


@_row(Open, on.UpdateBegins)
def _update_outside(rank: Rank, _: Open, __: on.UpdateBegins) -> Effects:
    return (do.Misuse(f"optimizer.step() was called outside `with step:` (step {rank.number})"),)


@_row(Drain, on.UpdateBegins)
def _update_in_drain(_: Rank, __: Drain, ___: on.UpdateBegins) -> Effects:
    return (_CUT,)


@_row(Drain, on.UpdateEnds)
def _hook_in_drain(_: Rank, __: Drain, ___: Any) -> Effects:
    return _JUST_RETURN


@_row(Drain, on.Exit)
def _exit_in_drain(rank: Rank, _: Drain, event: on.Exit) -> Effects:
    if event.how == "leaves":
        return _JUST_RETURN
    if event.lost:
        rank.state = Drain(text=event.text)  # no part in a plan that counts on this rank's state
    return (*_told_damage(rank, event), _AGAIN)


@_row(WAITS_IN_CODE, on.Exit)
def _thrown_out(rank: Rank, _: MachineState, __: on.Exit) -> Effects:
    # What it waited for has raised: the job's end, as a rule. That goes through the user's code, and ends the process.
    rank.state = _LEFT
    return _JUST_RETURN


@_row((Body, Tail, Update, Drain), on.Enter)
def _enter_again(rank: Rank, _: MachineState, __: on.Enter) -> Effects:
    return (do.Misuse(f"step {rank.number} was used twice: one `with step:` for each step of the loop"),)


@_row(Drain, on.Over)
def _left_behind_a_cut(rank: Rank, _: Drain, __: on.Over) -> Effects:
    return (
        do.Misuse(
            f"the loop was left behind a `with step:` that a fault has cut, and before step {rank.number} ran again: "
            "write `if step.done:` before what decides that it is over"
        ),
    )


@_row(Drain, on.Next)
def _drained(rank: Rank, state: Drain, event: on.Next) -> Effects:
    rank.total = event.total
    if event.stopped or state.stopped:
        return _quiet(rank, At.HEAD)
    return _part(rank, state.duty) if state.duty is not None else _ask(rank, At.HEAD, state.text)


@_row(Tail, on.TailCut)
def _tail_cut(rank: Rank, _: Tail, event: on.TailCut) -> Effects:
    return _quiet(rank, At.CALL) if event.stopped else _ask(rank, At.CALL, event.text)


def _ask(rank: Rank, at: At, text: str) -> Effects:
    rank.state = Ask(at)
    return (do.SendTrouble(text), _AWAIT_STOP)


@_row((Open, Tail, Drain), on.Raised)
def _raised(rank: Rank, state: Open | Tail | Drain, event: on.Raised) -> Effects:
    """The job ends by it. The others may fail by the same: then what this rank holds is all there is, so it stays."""
    if isinstance(state, Tail) and isinstance(state.duty, SaveLast):
        return _save_failed_tail(rank, state.duty)
    rank.state = Ask(At.HEAD)
    return (do.SendRaised(event.text, event.code), _AWAIT_VERDICT)


@_row(Ask, on.Ok)
def _answered(rank: Rank, state: Ask, _: on.Ok) -> Effects:
    return _quiet(rank, state.at)


@_row(Ask, on.Failed)
def _unanswered(rank: Rank, _: Ask, __: on.Failed) -> Effects:
    rank.state = _LEFT
    return (do.GiveUp(),)


@_row((Barrier, Agree, Build, Save), on.Stopped)
def _stopped(rank: Rank, state: Barrier | Agree | Build | Save, _: on.Stopped) -> Effects:
    return _quiet(rank, state.at)


@_row((Restore, Target, Halt, Finish), on.Stopped)
def _stopped_at_head(rank: Rank, _: MachineState, __: on.Stopped) -> Effects:
    return _quiet(rank, At.HEAD)


# -- a recovery


@_row(Quiet, on.Quieted)
def _join(rank: Rank, state: Quiet, event: on.Quieted) -> Effects:
    rank.generation = event.generation
    if event.damaged or rank.standing.phase is Phase.UPDATING:
        rank.intact = False  # an update that was cut half-way leaves no usable state behind
    rank.state = Agree(state.at)
    return (do.SendJoined(_tail_failed(rank, state.at)), do.AwaitPlan())


def _tail_failed(rank: Rank, at: At) -> bool:
    """Where a tail is over the standing is COMPUTE; at the head it is APPLIED if an exception has left it."""
    return at is At.HEAD and rank.standing.phase is Phase.APPLIED


@_row(Agree, Plan)
def _agreed(rank: Rank, state: Agree, plan: Plan) -> Effects:
    rank.state = Build(state.at, plan)
    return (do.BuildGroups(plan),)


@_row(Agree, SaveLast)
def _save_last(rank: Rank, state: Agree, order: SaveLast) -> Effects:
    if order.part < 0:
        rank.state = Save(state.at)
        return (do.AwaitEnd(),)
    if state.at is At.CALL:  # its state is whole when the tail is over; nobody is there to answer its collectives
        rank.state = Tail(order)
        return (_MODE[do.Mode.LOOPBACK], _AGAIN)
    if _tail_failed(rank, state.at):
        return _save_failed_tail(rank, order)
    rank.state = Save(state.at)
    # Between the end of its tail and the next head: what the tail has changed of its own is not published yet.
    publish = () if rank.drawn else (_PUBLISH,)
    return (_ROLLBACK, *publish, do.SaveState(order))


@_row(Build, on.Ok)
def _built(rank: Rank, state: Build, _: on.Ok) -> Effects:
    plan, at = state.plan, state.at
    if at is At.HEAD:
        return _part(rank, plan)
    if at is At.CALL:
        if not rank.intact or rank.standing != Standing(plan.commits, Phase.APPLIED):
            raise ProtocolError(f"rank {rank.me} stands at {rank.standing} in a tail; the plan is for {plan.commits}")
        rank.state = Tail(plan)
        return (do.Exchange(plan), _AGAIN)
    if rank.intact and rank.standing == Standing(plan.commits - 1, Phase.READY):
        if at is At.EXIT:
            return (_COMPARE, *_applied(rank, plan))
        rank.standing = Standing(plan.commits - 1, Phase.UPDATING)
        rank.state = Update(plan)
        return (_RECORD, *_UPDATING, *_begun(rank))
    if not rank.intact:  # others may apply the update that this rank was READY for: its record stays
        return _cut(rank, at, Drain(plan))
    # The gradients go with the body.
    rank.standing = Standing(rank.standing.commits, Phase.COMPUTE)
    return (_RECORD, *_cut(rank, at, Drain(plan)))


@_row(Build, on.Failed)
def _not_built(rank: Rank, state: Build, event: on.Failed) -> Effects:
    # A peer died while the groups were being built; its death is announced soon, or was not seen at all.
    return _ask(rank, state.at, event.text)


def _part(rank: Rank, plan: Plan) -> Effects:
    """This rank's part, at the head of the loop: takes back what it has begun, or copies."""
    if not rank.intact:
        rank.state = Restore(plan)
        return (_ROLLBACK, do.Fetch(plan, plan.copies[rank.me]))
    if rank.standing.commits != plan.commits or rank.standing.phase not in (Phase.COMPUTE, Phase.READY):
        raise ProtocolError(f"rank {rank.me} stands at {rank.standing}; no part in a plan for {plan.commits} commits")
    begun = rank.drawn > 0
    rank.place, rank.written = 0, frozenset()
    rank.attempt += begun
    return (_ROLLBACK, *_target(rank, plan, copied=False, redone=begun))


@_row(Restore, on.Ok)
def _restored(rank: Rank, state: Restore, event: on.Ok) -> Effects:
    rank.base, rank.place, rank.drawn, rank.attempt = event.value, 0, 0, 0
    rank.written = frozenset()
    return (do.ForgetBatches(), *_target(rank, state.plan, copied=True, redone=False))


@_row((Restore, Target), on.Failed)
def _not_restored(rank: Rank, _: MachineState, event: on.Failed) -> Effects:
    # The source may have died under the copy: then a newer generation names another one.
    return _ask(rank, At.HEAD, event.text)


def _target(rank: Rank, plan: Plan, *, copied: bool, redone: bool) -> Effects:
    rank.standing, rank.intact = Standing(plan.commits, Phase.COMPUTE), True
    rank.copied = rank.copied or copied
    rank.state = Target(plan)
    targets = tuple(target for target, source in sorted(plan.copies.items()) if source == rank.me)
    offer = (do.SendOffers(targets),) if targets else ()  # first of all: others wait for it
    shown = do.ShowState("copied" if copied else "target")
    done = (shown, do.RebuildReducer(copied), do.SendDone(redone), do.AwaitResume())
    return (_RECORD, *offer, *done)


@_row(Target, Pull)
def _pulled(_: Rank, __: Target, pull: Pull) -> Effects:
    return (do.Serve(pull),)


@_row(Target, on.Ok)
def _served(_: Rank, __: Target, ___: on.Ok) -> Effects:
    return (do.AwaitResume(),)


@_row(Target, Resume)
def _resumed(rank: Rank, state: Target, resume: Resume) -> Effects:
    # The others may have left by a `break` in a body whose update this rank has copied instead.
    rank.over = rank.over or (resume.over and rank.copied)
    rank.copied, rank.tolerated = False, resume.tolerated
    direct = (do.Compare(resumed=True), _MODE[do.Mode.DIRECT])
    if state.plan.last and not rank.over and rank.number < rank.total:
        rank.state = Save(At.HEAD)
        publish = () if rank.drawn else (_PUBLISH,)
        return (*direct, *publish, do.SaveState(None))
    return (*direct, *_head(rank, stopped=False))


# -- a pause: a Resume that does not come


@_row(Target, Paused)
def _paused(rank: Rank, _: Target, __: Paused) -> Effects:
    # A pause may be long: what the tail has changed of the rank's own must outlive this process.
    publish = () if rank.drawn else (_PUBLISH,)
    return (_SYNCHRONIZE, *publish, _MODE[do.Mode.PAUSED], do.OnPause(), do.AwaitResume())


@_row(Meet, Paused)
def _paused_before_the_first(_: Rank, __: Meet, ___: Paused) -> Effects:
    return (_MODE[do.Mode.PAUSED], do.OnPause(), _MODE[do.Mode.DIRECT], do.AwaitResume())


# -- the end


@_row(Finish, Finished)
def _finished(rank: Rank, _: Finish, __: Finished) -> Effects:
    rank.state = _LEFT
    return (_COMPARE, do.ReturnEnd())


@_row((Setup, Left), on.Over)
@_row(Left, on.Next)
def _gone(_: Rank, __: MachineState, ___: Any) -> Effects:
    return (do.ReturnEnd(),)


@_row(Left, on.Exit, on.UpdateBegins, on.UpdateEnds, on.Enter)
def _after_all(_: Rank, __: Left, ___: Any) -> Effects:
    return _JUST_RETURN


@_row(Left, on.TailCut)
def _cut_after_all(_: Rank, __: Left, ___: on.TailCut) -> Effects:
    return (do.GiveUp(),)
