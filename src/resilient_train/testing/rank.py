"""One simulated rank: the production rank machine, its effects performed on a model of a process, a user's program.

There is no knowledge of the protocol here: what a rank does next is in ``protocol/rank.py``, as in a real job. An
effect that others can see is a transition of its own, so that a kill can come before and behind it; what nobody else
sees is done along with it. Where the machine waits, the possible outcomes are the transitions; where the user's code
runs, its next call.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from resilient_train.protocol import messages as m
from resilient_train.protocol import rank_effects as fx
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.rank import Rank
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.testing import values
from resilient_train.testing.checks import ViolationError, require

if TYPE_CHECKING:
    from resilient_train.testing.cluster import World

WORLD = -1
"""The group of all ranks."""


class ProgramAt(enum.IntEnum):
    """Where the user's program stands."""

    BOOT = 0
    HEAD = 1  # it asks for a step
    BODY = 2  # before the gradients' reduction
    REDUCE = 3  # in it
    REDUCED = 4
    WRITE = 5  # an optimizer writes
    END = 6  # of a body with whose end the update is over
    TAIL = 7  # before a collective of the tail, or behind the last
    IN_TAIL = 8  # in it
    LEFT = 9
    DEAD = 10


class Program(NamedTuple):
    """What the user's loop does beside one step an update and one optimizer."""

    accumulate: int = 1
    optimizers: int = 1
    undo: bool = False
    breaks: bool = False
    """It leaves the loop by itself, after the last update."""
    skips: bool = False
    """What was anomalous is run again without its update."""
    swallows: bool = False
    """It goes on in a body that the hook of an optimizer has left."""
    partial: bool = False
    """Of each two updates the second leaves the last optimizer out."""
    talks: bool = False
    """Its optimizers call collectives, under ``undo``."""
    rest: int = 0
    """So many bodies behind the last update, too few for another one."""
    misuse: str = ""
    """One of MISUSES, done from the last update but one on: the job ends with an error."""

    def writers(self, update: int) -> int:
        """How many optimizers write in that update."""
        return self.optimizers - update % 2 if self.partial else self.optimizers


STEPS_OUTSIDE, CHANGES_UNSEEN = "steps outside", "changes unseen"
MISUSES: dict[str, tuple[ProgramAt, bool, on.RankEvent]] = {
    "steps twice": (ProgramAt.REDUCED, True, on.UpdateBegins()),
    "steps twice in the tail": (ProgramAt.TAIL, True, on.UpdateBegins()),
    STEPS_OUTSIDE: (ProgramAt.DEAD, False, on.UpdateBegins()),
    "enters twice": (ProgramAt.BODY, False, on.Enter()),
    "enters twice in the update": (ProgramAt.REDUCED, True, on.Enter()),
    "enters twice in the tail": (ProgramAt.TAIL, True, on.Enter()),
    "enters twice behind a cut": (ProgramAt.HEAD, False, on.Enter()),
    "leaves behind a cut": (ProgramAt.HEAD, False, on.Over()),
    CHANGES_UNSEEN: (ProgramAt.BODY, False, on.Exit()),
    "fails": (ProgramAt.BODY, False, on.Exit("error", "the script's")),
    "fails in the update": (ProgramAt.REDUCED, True, on.Exit("error", "the script's")),
    "fails in the tail": (ProgramAt.TAIL, True, on.Exit("error", "the script's")),
    "fails as it writes": (ProgramAt.WRITE, False, on.Exit("error", "the script's")),
    "leaves its body": (ProgramAt.BODY, False, on.Exit("leaves")),
    "leaves in the update": (ProgramAt.REDUCED, True, on.Exit("leaves")),
}
"""Where each is done, whether an optimizer has written by then, and what the session sees of it: what the documentation
forbids, and a script's own errors.
"""


VISIBLE = (
    *(fx.Record, fx.Publish, fx.Arrive, fx.ResetLog, fx.SendOffers, fx.SendStarted, fx.SendTrouble, fx.SendDamaged),
    *(fx.SendAnomaly, fx.SendJoined, fx.SendDone, fx.SendReached, fx.SendFinish, fx.SendRaised),
)
"""Effects that others can see. (Snapshots have a simulation of their own, ``tests/sim/test_kept.py``.)"""
_FRAMES: dict[type[fx.Effect], tuple[type[Any], ...]] = {
    fx.AwaitResume: (m.Resume, m.Pull, m.Paused),
    fx.AwaitPlan: (m.Plan, m.SaveLast),
    fx.AwaitFinished: (m.Finished,),
    fx.AwaitEnd: (),
}
_ENDS = frozenset((
    *(fx.CheckCollectives, fx.Cross, fx.AwaitStop, fx.Quiesce, fx.AwaitResume, fx.AwaitPlan, fx.AwaitFinished),
    *(fx.AwaitEnd, fx.BuildGroups, fx.Fetch, fx.Serve, fx.SaveState),
    *(fx.Return, fx.ReturnStep, fx.ReturnEnd, fx.Cut, fx.GiveUp, fx.Misuse),
))  # fmt: skip
"""With one of these a list ends: the rank waits, or the thread is the user's again."""
_IN_A_BODY = frozenset((fx.Disarm, fx.Return, fx.Misuse))
"""What is done with interrupts let in."""
_NEXT_CALL = {
    ProgramAt.BOOT: "connects",
    ProgramAt.HEAD: "asks for a step",
    ProgramAt.REDUCED: "updates",
    ProgramAt.WRITE: "has written",
    ProgramAt.END: "ends the body",
    ProgramAt.TAIL: "goes on in the tail",
}
"""What the user's program does next, where that does not depend on others."""
_HEAD, _HOOK, _EXIT, _CALL, _OTHER = range(5)
"""Which of the session's functions the user's code has called last: each has answers of its own."""
_NOTHING, _COPIED, _SILENT = -1, -2, -3
"""Nothing is shown that was not looked at; this rank holds a copy, its words are older; it holds one, and says nothing.
"""


class SimRank:
    """The process of one rank, from its start to its death."""

    def __init__(self, rank: int, incarnation: int, machine: Rank) -> None:
        self.rank, self.incarnation, self.machine = rank, incarnation, machine
        self.at = ProgramAt.BOOT
        self.alive, self.connected = True, False
        self.todo: tuple[fx.Effect, ...] = ()
        self.pending: fx.Effect | None = None
        self.mode = fx.Mode.DIRECT
        self.model = self.base = values.TORN
        self.undo: int | None = None
        self.own = 0
        self.tails = 0
        """What the tails have changed in the rank's own state: so many it has run to their ends."""
        self.missed = 0
        """So many it has not: they went with a process, or a state, that had not come to the next head."""
        self.start: int | None = None
        self.batches: tuple[int, ...] = ()
        self.grad = 0
        """What this rank's backward passes have accumulated."""
        self.grads: tuple[int, ...] = ()
        """What the ranks of the shard have reduced."""
        self.calls: dict[int, int] = {}
        self.step = self.tail_index = self.writer = 0
        self.offer: m.Offer | None = None
        self.armed = self.copying = self.cut = False
        """A stop interrupts the user's code; a snapshot is copied; a backward pass was cut, its reducer not reset."""
        self.breaks = False
        """The loop is being left by itself."""
        self.layout = -1
        """The update whose backward passes have decided the layout of the reducer."""
        self.laid = False
        """It is laid out so. The first backward pass behind that update does it, in a collective of its own."""
        self.listens = self.entered = False
        """To the backward passes, for their order. This rank has called a collective of the window."""
        self.saved = -1
        """The update from before which the last snapshot was begun."""
        self.shown = _NOTHING
        """The update from before which this rank has shown what it holds, and not yet looked at its replicas."""
        self.busy = self.untold = self.unseen = False
        """The device has not done all; memory lost data, and nobody was told; parameters have changed unasked."""
        self.behind_cut = self.swallowed = self.outside = self.pulled = False
        """The body was cut, or goes on although its optimizer's hook has left it; the tail runs between two bodies;
        the source was asked to send its state.
        """
        self.heard = False
        """The device tells of lost memory at the end of what a stop has cut."""
        self.called = _OTHER
        self.told_to_pause = False
        """It has asked for a step before which all are to stand."""
        self.built = -1
        """The generation whose groups this process has."""
        self.tries = 0
        """How often the window was begun again."""
        self.wrong = False
        """The script has failed by itself: where its code would go on, its process ends."""
        self.failed_tail = self.failed_alone = self.told_failed = False
        """The script has failed behind an update, or when it ended that tail without the others; people are told."""
        self.verified = -1
        """The update for which all compute a second time."""
        self.distance = 0
        """How far behind this rank the replica stands from whose inputs it does so."""
        self.deviated = -1
        """The generation in which this rank came to something else than before."""
        self._key: int | None = None

    def copy(self) -> SimRank:
        """An independent rank in the same state."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.machine = self.machine.copy()
        new._key = None
        return new

    def key(self) -> int:
        """The state as a number."""
        if self._key is None:
            self._key = hash((
                self.at, self.alive, self.incarnation, self.connected, self.mode, self.model, self.base, self.undo,
                self.own, self.armed, self.copying, self.cut, self.laid, self.layout, self.listens, self.entered,
                self.breaks, self.start, self.batches, self.grad, self.grads, tuple(self.calls.items()), self.saved,
                self.tail_index, self.tails, self.missed, self.writer, self.shown, self.busy, self.untold, self.unseen,
                self.behind_cut, self.swallowed, self.outside, self.pulled, self.heard, self.called, self.told_to_pause,
                self.verified, self.distance, self.deviated, self.failed_tail, self.failed_alone, self.told_failed,
                tuple(map(_effect_key, self.todo)), _effect_key(self.pending),
                self.offer.source if self.offer else -1, self.machine.key(),
            ))  # fmt: skip
        return self._key

    def prepare(self, world: World) -> None:
        """A first process starts with the initial state; a replacement has none that counts."""
        if not self.machine.joining:
            self.built = self.machine.generation
            begun = world.source
            self.model = world.chains.model[world.shard[self.rank]][begun]
            self.own, self.tails = world.chains.own[self.rank][begun], begun
            self.layout, self.laid = (0, True) if begun else (-1, False)
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)

    def die(self) -> None:
        """What this process alone knew is gone."""
        self.alive = self.connected = False
        self.at = ProgramAt.DEAD
        self.todo, self.pending, self.offer, self.undo, self.start = (), None, None, None, None
        self.model = self.base = self.own = self.grad = 0
        self.grads, self.batches, self.calls = (), (), {}
        self.saved, self.shown = -1, _NOTHING

    def stopped(self, world: World) -> bool:
        """Whether a stop newer than the rank's generation is raised."""
        return world.stop_generation > self.machine.generation

    @property
    def idle(self) -> bool:
        """Whether the user's code runs."""
        return not self.todo and self.pending is None

    @property
    def in_collective(self) -> bool:
        """Whether a collective that this rank is in, or that it waits for, may fail."""
        if self.in_check:
            return True
        return self.idle and self.at in (ProgramAt.REDUCE, ProgramAt.IN_TAIL) and self.mode is not fx.Mode.LOOPBACK

    @property
    def in_check(self) -> bool:
        """Whether this rank looks at what the window's bodies have computed."""
        return isinstance(self.pending, fx.CheckCollectives) and not self.todo

    @property
    def can_fail(self) -> bool:
        """Whether what this rank waits for may fail although nobody died."""
        waits = isinstance(self.pending, (fx.BuildGroups, fx.Fetch, fx.Serve)) or self.pending == fx.AwaitStop()
        return (waits and not self.todo) or self._misled

    def may_be_anomalous(self, world: World) -> bool:
        """Whether it looks for an anomaly now: not in the first run of what is computed twice."""
        commits = self.machine.standing.commits
        again = self.verified == commits and not self.distance
        return self.in_check and (not world.layout.computes_twice(commits) or again)

    def can_deviate(self, world: World) -> bool:
        """Whether it may come to something else than when it computed this for the first time."""
        commits = self.machine.standing.commits
        return self.in_check and world.layout.computes_twice(commits) and self.verified == commits

    @property
    def _misled(self) -> bool:
        """Whether the rest of a body gets this rank's own values for everybody's, and may not like them."""
        return self.idle and self.at is ProgramAt.TAIL and self.mode is fx.Mode.LOOPBACK and not self.outside

    @property
    def in_body(self) -> bool:
        """Whether its memory may be damaged in the body of a step."""
        return self.idle and self.at in (ProgramAt.BODY, ProgramAt.REDUCED, ProgramAt.END)

    @property
    def at_rest(self) -> bool:
        """Whether lost memory is heard of when the device comes to rest, and the step can be left."""
        waits = not self.todo and isinstance(self.pending, fx.Quiesce) and not self.pending.tail
        return waits and self.machine.intact and not self.heard

    @property
    def may_find_out(self) -> bool:
        """Whether the script may say that what was trained is wrong: it runs, and has trained something."""
        between = self.at in (ProgramAt.HEAD, ProgramAt.BODY, ProgramAt.TAIL)
        return self.connected and self.idle and between and self.machine.standing.commits > 0 and not self.wrong

    def may_raise(self, world: World) -> bool:
        """Whether the script may fail here by itself, and a fault does not explain it."""
        if not self.idle or self.wrong or self.swallowed:
            return False
        in_body = self.at in (ProgramAt.BODY, ProgramAt.REDUCED, ProgramAt.END) and not (
            self.stopped(world) and self.armed
        )
        return in_body or self.at is ProgramAt.TAIL or (self.at is ProgramAt.HEAD and not self.breaks)

    def may_ask_again(self, world: World) -> bool:
        """Whether the script may ask here for its step once more, and it has not been run again for that already."""
        explained = self.stopped(world) and self.armed
        in_body = (
            self.idle and self.at in (ProgramAt.BODY, ProgramAt.REDUCED, ProgramAt.END) and self._may_be_left(world)
        )
        return in_body and not (self.wrong or explained or self.machine.number in self.machine.tolerated)

    def _may_be_left(self, world: World) -> bool:
        """Whether the user's code that runs now is a body of which nothing has to stay."""
        in_body = self.at in (ProgramAt.BODY, ProgramAt.REDUCE, ProgramAt.REDUCED, ProgramAt.END) and not self.swallowed
        return in_body and (world.program.undo or not self.writer)

    # -- which transitions there are

    def moves(self, world: World) -> list[str]:
        """What this rank may do next."""
        if not self.alive or self.at is ProgramAt.LEFT:
            return []
        if self.todo:
            return [f"does {type(self.todo[0]).__name__}"]
        if self.pending is not None:
            return self._outcomes(world, self.pending)
        return self._calls(world)

    def do(self, world: World, name: str) -> None:
        """One transition."""
        if self.todo:
            self._perform(world, self.todo[0])
            self._run(world, self.todo[1:])
        elif self.pending is not None:
            self._receive(world, name)
        else:
            self._CALLS[name](self, world)

    def feed(self, world: World, event: Any) -> None:
        """The machine is told; what nobody else sees is done at once."""
        world.visited.add((type(self.machine.state).__name__, type(event).__name__))
        effects = self.machine.on(event)
        ends = [type(effect) in _ENDS for effect in effects]
        if ends[-1:] != [True] or sum(ends) != 1:
            raise ViolationError(f"rank {self.rank}: {effects} must have one end")
        self._run(world, effects)

    def _run(self, world: World, effects: tuple[fx.Effect, ...]) -> None:
        self.todo = ()
        for index, effect in enumerate(effects):
            if isinstance(effect, VISIBLE):
                self.todo = effects[index:]
                return
            if type(effect) in self._WAITING:
                self.pending = effect
                self._WAITING[type(effect)](self, world)
            else:
                self._perform(world, effect)  # the last of a list may feed the machine again
            if not self.alive:
                return
        told, stands = world.standings[self.rank], self.machine.standing
        if told != stands and self.alive and self.machine.intact:
            raise ViolationError(f"the record of rank {self.rank} says {told}, and it stands at {stands}")

    # -- effects

    def _perform(self, world: World, effect: fx.Effect) -> None:
        if self.armed and type(effect) not in _IN_A_BODY:
            raise ViolationError(f"rank {self.rank} may be interrupted in {type(effect).__name__}")
        self._PERFORM[type(effect)](self, world, effect)

    def _record(self, world: World, _: fx.Effect) -> None:
        require(not self.busy, f"rank {self.rank} says how far it is before its device is")
        world.standings[self.rank] = self.machine.standing

    def _publish(self, world: World, effect: fx.Publish) -> None:
        commits, number = self.machine.standing.commits, self.machine.number
        # The last one may have failed, and people are told: what it has changed by then is saved.
        ran = self.tails + self.missed
        text = f"rank {self.rank} has run {ran} tails to their ends behind {commits} updates"
        require(ran == commits or (self.told_failed and ran == commits - 1), text)
        world.publish(self.rank, commits + effect.ahead, (self.own, number + effect.ahead, self.tails))

    def _reset_log(self, world: World, _: fx.Effect) -> None:
        world.logs[self.rank] = (self.machine.standing.commits, ())

    def _send_started(self, world: World, _: fx.Effect) -> None:
        world.send(self, m.Started(str(self.model), ("world",), world.layout.replicas))

    def _send_trouble(self, world: World, effect: fx.SendTrouble) -> None:
        require(not self.untold, f"rank {self.rank} asks why, and knows that its memory lost data")
        world.send(self, m.Trouble(self.machine.generation, effect.text))

    def _send_damaged(self, world: World, effect: fx.SendDamaged) -> None:
        self.untold = False
        world.send(self, m.Damaged(self.machine.generation, effect.text))

    def _send_raised(self, world: World, effect: fx.SendRaised) -> None:
        world.send(self, m.LeftByException(effect.text, effect.code))

    def _tell_tail_failed(self, world: World, _: fx.Effect) -> None:
        """Who was cut in that tail and can end it is asked first."""
        require(self.wrong, f"rank {self.rank} tells of a tail that has not failed")
        self.told_failed = True
        stands = Standing(self.machine.standing.commits, Phase.APPLIED)
        others = [world.ranks[each] for each in world.table.peers(self.rank) if each != self.rank]
        able = [
            each.rank
            for each in others
            if each.alive
            and not each.failed_tail
            and each.machine.intact
            and each.machine.standing == stands
            and isinstance(each.pending, fx.AwaitEnd)
        ]
        require(not self.failed_tail or not able, f"rank {self.rank} saves a tail that has failed; {able} could end it")

    def _send_anomaly(self, world: World, effect: fx.SendAnomaly) -> None:
        generation, number, job = self.machine.generation, self.machine.number, world.controller.job
        known = ("norm", number) in job.anomalies
        if effect.again:
            require(known, f"rank {self.rank} goes on with an anomaly that nobody has run step {number} again for")
        else:
            told = known and job.generation == generation
            require(not told, f"rank {self.rank} has step {number} run again a second time for an anomaly")
        world.send(self, m.Anomaly(generation, number, "norm", 45.7, 44.0, effect.again, self.machine.skips))

    def _send_joined(self, world: World, effect: fx.SendJoined) -> None:
        machine, (commits, phase), failed = self.machine, self.machine.standing, effect.tail_failed
        world.send(
            self, m.Joined(machine.generation, commits, phase, machine.intact, 0, ("world",), tail_failed=failed)
        )

    def _send_done(self, world: World, effect: fx.SendDone) -> None:
        self._has_groups()
        self._has_shown("stands at the plan's target")
        self.told_to_pause = False
        world.send(self, m.Done(self.machine.generation, effect.redone, self.machine.base, self.machine.over))

    def _send_reached(self, world: World, _: fx.Effect) -> None:
        require(self.told_to_pause, f"rank {self.rank} stands before a step at which nobody wants it to")
        self.told_to_pause = False
        world.send(self, m.Reached(self.machine.generation))

    def _on_pause(self, world: World, _: fx.Effect) -> None:
        """What the script does then may take long, and read all that is registered."""
        commits = self.machine.standing.commits
        require(not self.busy, f"rank {self.rank} pauses, and its device has not done all")
        require(self.mode is fx.Mode.PAUSED, f"rank {self.rank} lets collectives run in a pause")
        own = (self.own if self.start is None else self.start, self.machine.base, self.tails)
        kept = self.start is not None or [each for each in world.published[self.rank] if each == (commits, own)]
        require(bool(kept), f"rank {self.rank} pauses, and would lose what its tail has changed")

    def _send_finish(self, world: World, _: fx.Effect) -> None:
        self._has_shown("comes to its end")
        self.copying = False
        world.send(self, m.LoopOver(self.machine.generation))

    def _offer(self, world: World, effect: fx.SendOffers) -> None:
        commits = self.machine.standing.commits
        require(
            self.model == world.chains.model[world.shard[self.rank]][commits], f"rank {self.rank} offers a wrong state"
        )
        generation = self.machine.generation
        offers = [m.Offer(generation, self.rank, to, self.incarnation, b"", str(self.model)) for to in effect.targets]
        world.send(self, *offers)

    def _show_state(self, world: World, effect: fx.ShowState) -> None:
        """As ``replica_comparison.py`` has it, but for that each head is one at which a comparison is due."""
        commits = self.machine.standing.commits
        even, odd = world.words[self.rank]
        if effect.where == "copied":
            require(self.shown == _COPIED, f"rank {self.rank} says that it holds a copy")
            self.shown, world.words[self.rank] = _SILENT, (None, None)
            return
        require(self.shown != _COPIED, f"rank {self.rank} shows a copy")
        if effect.where != "target" and self.shown != commits:  # behind a rest that was the end it shows the same
            self._has_looked("shows the next")
        self.shown, word = commits, (commits, self.model)
        world.words[self.rank] = (even, word) if commits % 2 else (word, odd)

    def _compare(self, world: World, _: fx.Compare) -> None:
        commits, self.shown = self.shown, _NOTHING
        require(commits != _COPIED, f"rank {self.rank} compares a copy by what it has shown before")
        if commits < 0:
            return
        words = [world.words[each][commits % 2] for each in world.table.peers(self.rank)]
        held = {word[1] for word in words if word is not None and word[0] == commits}
        require(len(held) == 1, f"replicas of rank {self.rank} show different things before update {commits}")

    def _check_unchanged(self, world: World, _: fx.CheckUnchanged) -> None:
        if self.unseen:
            world.leave_with_error(self)

    def _has_looked(self, what: str) -> None:
        require(self.shown == _NOTHING, f"rank {self.rank} {what}, and has not looked at what its replicas have shown")

    def _has_shown(self, what: str) -> None:
        shown = self.shown in (self.machine.standing.commits, _SILENT)
        require(shown, f"rank {self.rank} {what}, and has not shown what it holds")

    def _exchange(self, _: World, __: fx.Exchange) -> None:
        self.mode = fx.Mode.EXCHANGE

    def _set_mode(self, _: World, effect: fx.SetMode) -> None:
        self.mode = effect.mode

    def _draw(self, _: World, __: fx.Effect) -> None:
        place, commits = self.machine.place, self.machine.standing.commits
        if not place:
            self.entered = False
        if place < len(self.batches):
            self.tries += not place
            if place:  # what the batch before has drawn is taken back along with its body
                self.own = self.batches[place]
            else:
                self._has_looked("begins an update again")
            return
        if not place:
            self.tries = 0
            self._has_shown("begins an update")
            require(self.saved == commits, f"rank {self.rank} begins update {commits} without a snapshot")
        self.own = values.drawn(self.own)
        self.batches = (*self.batches, self.own)

    def _arm(self, _: World, __: fx.Effect) -> None:
        self.armed = True

    def _disarm(self, _: World, __: fx.Effect) -> None:
        self.armed = False

    def _snapshot_begin(self, world: World, _: fx.Effect) -> None:
        """Each head is one at which a snapshot is due."""
        commits = self.machine.standing.commits
        require(not self.copying, f"rank {self.rank} begins a snapshot, and the one before is not complete")
        published = world.published[self.rank][-1:] == ((commits, (self.own, self.machine.number, self.tails)),)
        require(published, f"rank {self.rank} begins a snapshot of what it has not published")
        self.copying, self.saved = True, commits

    def _snapshot_fence(self, _: World, __: fx.Effect) -> None:
        self.copying = False

    def _learn_layout(self, _: World, __: fx.Effect) -> None:
        if self.layout < 0 and self.listens:
            self.layout = self.machine.standing.commits

    def _rebuild_reducer(self, _: World, effect: fx.RebuildReducer) -> None:
        self.cut = False
        commits = self.machine.standing.commits
        if effect.copied or self.layout >= commits:
            self.layout = 0 if commits else -1
        self.laid = commits > 0
        self.listens = False

    def _mark(self, _: World, __: fx.Effect) -> None:
        self.start = self.own
        self.listens = True

    def _rollback(self, _: World, __: fx.Effect) -> None:
        if self.start is not None:
            self.own = self.start
            self.grad, self.grads = 0, ()
            if self.undo is not None:
                self.model, self.undo = self.undo, None

    def _forget_batches(self, _: World, __: fx.Effect) -> None:
        self.batches = ()

    def _save_undo(self, _: World, __: fx.Effect) -> None:
        if self.undo is None:
            self.undo = self.model

    def _drop_gradients(self, _: World, __: fx.Effect) -> None:
        self.grads = ()

    def _synchronize(self, _: World, __: fx.Effect) -> None:
        self.busy = False

    def _committed(self, world: World, __: fx.Effect) -> None:
        require(not self.busy, f"rank {self.rank} drops what it could go back to before its device is done")
        require(not self.copying, f"rank {self.rank} is over with an update, and its snapshot is not complete")
        self._has_looked("is over with an update")
        self.start = self.undo = None
        self.batches = self.grads = ()
        self.grad = 0  # the user's program sets its gradients to zero
        world.high_water = max(world.high_water, self.machine.standing.commits)

    def _return(self, world: World, effect: fx.Return) -> None:
        """The user's code goes on."""
        if self.wrong:
            require(not effect.value, f"rank {self.rank} is to run again what has failed by itself")
            self._leaves_the_session(world)
            return
        program = world.program
        wanted = (_EXIT, _CALL) if effect.value else (_HOOK, _EXIT, _OTHER)
        require(self.called in wanted, f"rank {self.rank} is answered what it has not asked")
        if self.mode is not fx.Mode.LOOPBACK:
            self._has_groups()
        if effect.value and self.at is ProgramAt.IN_TAIL:  # the collective is called again
            self.at = ProgramAt.TAIL
            require(self.mode is not fx.Mode.LOG, f"rank {self.rank} calls a collective of a group that is gone")
        elif effect.value:
            self._goes_on_behind_a_cut()
        elif self.at is ProgramAt.HEAD:
            self.at = ProgramAt.BODY
        elif self.at is ProgramAt.BODY:  # a micro-step's end
            self.at = ProgramAt.HEAD
        elif self.at is ProgramAt.REDUCED:
            self.at = ProgramAt.WRITE
            require(not self.copying, f"rank {self.rank} writes while a snapshot is copied")
            mode = fx.Mode.DIRECT if program.undo else fx.Mode.UPDATE
            require(self.mode is mode, f"rank {self.rank} writes in mode {self.mode}")
            if not program.undo:
                self._has_looked("writes")
            if self.model != values.TORN:
                self.base, self.model = self.model, values.TORN
        elif self.at is ProgramAt.WRITE:
            self.writer += 1
            self._to_the_next_write(world)
        elif self.at is ProgramAt.END:
            self.outside = True
            self._tail_begins()
        elif self.at is ProgramAt.TAIL:
            self._leaves_the_body(world)
        self._check_armed(world)

    def _has_groups(self) -> None:
        built = self.built == self.machine.generation
        require(built, f"rank {self.rank} goes on without the groups of generation {self.machine.generation}")

    def _to_the_next_write(self, world: World) -> None:
        program = world.program
        writers = self._writers(world)
        if self.writer < writers:
            self.at = ProgramAt.REDUCED
        elif program.undo or self.swallowed or writers < program.optimizers:
            self.at = ProgramAt.END
        else:
            self._tail_begins()

    def _writers(self, world: World) -> int:
        return world.program.writers(self.step // world.program.accumulate)

    def _tail_begins(self) -> None:
        self.at, self.tail_index = ProgramAt.TAIL, 0
        require(self.mode not in (fx.Mode.DIRECT, fx.Mode.UPDATE), f"rank {self.rank} has a tail in mode {self.mode}")

    def _leaves_the_body(self, world: World) -> None:
        self.tails += 1
        self.at = ProgramAt.HEAD
        self.breaks = world.program.breaks and self.machine.standing.commits == len(world.layout.tails)

    def _goes_on_behind_a_cut(self) -> None:
        self.at, self.behind_cut = ProgramAt.HEAD, True
        require(self.mode is fx.Mode.LOOPBACK, f"rank {self.rank} goes on behind a cut body in mode {self.mode}")

    def _leaves_the_session(self, world: World) -> None:
        """The script's own exception has come as far. What this rank holds is saved before it goes on."""
        undisturbed = world.chains.model[world.shard[self.rank]][self.machine.standing.commits]
        holds = undisturbed in (self.model, self.undo)
        if self.machine.whole:
            right = holds or not self.machine.intact
            require(right, f"rank {self.rank} fails, and stays for a state that is not whole")
            world.raised |= {(self.rank, self.incarnation)}
            self.called = _OTHER
            self.feed(world, on.Raised("the script's"))
            return
        lost = not holds or world.ended is not None
        require(lost, f"rank {self.rank} fails with a whole state, and keeps nothing of it for those who save")
        world.leave_with_error(self)

    def _check_armed(self, world: World) -> None:
        if self.armed is not self._may_be_left(world):
            raise ViolationError(f"rank {self.rank} is {'' if self.armed else 'not '}armed at {self.at.name}")

    def _return_step(self, world: World, _: fx.Effect) -> None:
        require(self.called == _HEAD, f"rank {self.rank} is given a step that it has not asked for")
        self.at, self.writer = ProgramAt.HEAD, 0
        self.behind_cut = self.swallowed = self.outside = False
        self.step = self.machine.number
        commits = self.machine.standing.commits
        rest = self.machine.place < world.program.rest
        require(commits < len(world.layout.tails) or rest, f"rank {self.rank} begins a step that no other rank runs")
        require(not self.told_to_pause, f"rank {self.rank} is given a step before which all are to stand")
        require(not self.unseen, f"rank {self.rank} trains on with a change that nobody has seen")
        counted = (self.tries > 0) is (self.machine.attempt > 0)
        require(counted, f"rank {self.rank} is told attempt {self.machine.attempt}, and has tried {self.tries} times")
        again = f"rank {self.rank} tells the hang detector of collectives of another window"
        require(self.machine.place > 0 or not self.entered, again)
        if self.machine.place == 0:
            expected = world.chains.own[self.rank][commits]
            require(self.batches[0] == values.drawn(expected), f"rank {self.rank} starts {commits} elsewhere")
            require(
                self.start == self.own == self.batches[0], f"rank {self.rank} can't go back to the start of {commits}"
            )
        self._check_armed(world)
        if world.program.misuse == STEPS_OUTSIDE and self._late(world):
            self._misuse_step(world)
        else:
            self.called = _OTHER
            self.feed(world, on.Enter())

    def _return_end(self, world: World, _: fx.Effect) -> None:
        require(self.called == _HEAD, f"rank {self.rank} leaves its loop from within")
        self._has_looked("ends")
        require(self.mode is fx.Mode.DIRECT, f"rank {self.rank} is behind its loop in mode {self.mode}")
        if world.program.breaks and not self.breaks:  # it was told, and says so itself all the same
            self.breaks = True
            self.feed(world, on.Over(self.stopped(world)))
        self.at, self.connected = ProgramAt.LEFT, False

    def _cut(self, world: World, _: fx.Effect) -> None:
        """Raised in the hook of an optimizer."""
        require(not self.armed, f"rank {self.rank} may be interrupted in a hook")
        require(self.called == _HOOK, f"rank {self.rank} raises what nobody expects")
        self.called = _EXIT
        if not world.program.swallows:
            self.feed(world, on.Exit("interrupted"))
            return
        self.swallowed = True
        self.writer += 1
        self._to_the_next_write(world)

    def _give_up(self, world: World, _: fx.Effect) -> None:
        world.leave_with_error(self)

    def _misuse(self, world: World, effect: fx.Misuse) -> None:
        require(bool(world.program.misuse), effect.text)
        self.raises(world)

    # -- what the machine waits for

    def _outcomes(self, world: World, effect: fx.Effect) -> list[str]:
        stopped = self.stopped(world)
        kind = type(effect)
        if kind in _FRAMES:
            return ["receives"] if self._relevant(world) is not None else []
        if kind is fx.CheckCollectives:
            return ["has checked"]
        if kind is fx.Quiesce or kind is fx.AwaitStop:
            return ["sees the stop"] if stopped else []
        if kind is fx.SaveState:
            return ["is stopped"] * stopped
        if kind is fx.Cross:
            ready = world.all_reached(self.rank, Standing(self.machine.standing.commits, Phase.READY))
            return ["passes"] * ready + ["is stopped"] * stopped
        if kind is fx.BuildGroups:
            # What was built before a stop is not used after it.
            return ["is stopped"] if stopped else ["has built"] * world.complete(self, WORLD)
        if isinstance(effect, fx.Serve):
            if (self.machine.generation, self.rank, effect.pull.target) in world.handed_over:
                return ["has served"]
            return ["fails"] * (stopped or not world.ranks[effect.pull.target].alive)
        assert kind is fx.Fetch
        if self.offer is None:
            return ["receives"] if self._relevant(world) is not None else []
        source = world.ranks[self.offer.source]
        if not source.alive or source.incarnation != self.offer.pid:
            return ["fails"]
        if not world.layout.pulls:
            return ["copies"]
        if not self.pulled:
            return ["pulls"]
        serving = isinstance(source.pending, fx.Serve) and source.pending.pull.target == self.rank
        return ["copies"] * serving + ["fails"] * stopped

    def _receive(self, world: World, name: str) -> None:
        effect, event = self.pending, None
        assert effect is not None
        match name:
            case "receives":
                event = self._frame(world)
            case "is stopped":
                event = on.Stopped()
            case "sees the stop" if type(effect) is fx.Quiesce:
                event = on.Quieted(world.stop_generation, self.heard)
                self.heard = False
            case "pulls":
                assert self.offer is not None
                self.pulled = True
                world.send(self, m.Pull(self.machine.generation, self.offer.source, self.rank))
            case "copies":
                event = self._copies(world)
            case "has built":
                self.built = self.machine.generation
                world.leave(self, WORLD)
                event = on.Ok()
            case "has checked":
                self.busy = False
                event = self._has_computed(world)
            case "passes":
                self._may_apply(world)
                world.standings[self.rank] = Standing(self.machine.standing.commits, Phase.UPDATING)
                event = on.Ok()
            case "fails":
                event = on.Failed("failed")
            case "finds them failed":
                event = on.Ok(0)
            case _:
                event = on.Ok()
        if event is not None:
            self.pending = None
            self.feed(world, event)

    def _relevant(self, world: World) -> int | None:
        """Index of the first frame that this rank waits for."""
        generation = self.machine.generation
        assert self.pending is not None
        wanted = (m.Offer,) if type(self.pending) is fx.Fetch else _FRAMES[type(self.pending)]
        for index, frame in enumerate(world.down[self.rank]):
            if isinstance(frame, m.Stop) and frame.generation > generation:
                return index
            if isinstance(frame, m.Finished) and m.Finished in wanted:
                return index
            if isinstance(frame, wanted) and _generation_of(frame) == generation:
                return index
        return None

    def _frame(self, world: World) -> Any:
        index = self._relevant(world)
        assert index is not None
        frame = world.down[self.rank][index]
        # An offer may come while others are waited for; it is put back. All else that was passed over is stale.
        kept = tuple(f for f in world.down[self.rank][:index] if isinstance(f, m.Offer))
        world.down[self.rank] = kept + world.down[self.rank][index + 1 :]
        if isinstance(frame, m.Offer):
            self.offer = frame
            return None
        if isinstance(frame, m.Stop):
            return on.Stopped()
        if isinstance(frame, m.Resume):
            self.verified, self.distance = frame.verified, frame.distance
            world.resumed_generation = max(world.resumed_generation, frame.generation)
        return frame

    def _begins_to_save(self, world: World) -> None:
        effect = self.pending
        assert isinstance(effect, fx.SaveState)
        commits = self.machine.standing.commits
        whole = self.model == world.chains.model[world.shard[self.rank]][commits]
        require(whole, f"rank {self.rank} saves a wrong state")
        told = self.told_failed or not (self.failed_tail or self.failed_alone)
        require(told, f"rank {self.rank} saves a tail that has failed, and tells nobody")
        over = self.machine.standing.phase is not Phase.APPLIED
        require(over, f"rank {self.rank} saves in the middle of a tail")
        published = [state for of, state in world.published[self.rank] if of == commits]
        own = (world.chains.own[self.rank][commits], self.machine.base, self.tails)
        require(published[-1:] == [own], f"rank {self.rank} saves update {commits}, and has not published its start")
        require(not self.copying, f"rank {self.rank} saves, and the snapshot before is not complete")
        order = effect.order
        if order is None:
            self._has_looked("saves")
        require(
            order is None or order.commits == commits, f"rank {self.rank} saves update {commits}, asked for another"
        )
        world.send(self, m.Captured(commits, self.machine.base, 0, store=True, last=self.machine.generation))

    def _begins_to_quiesce(self, world: World) -> None:
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)
        self.offer = None
        self.copying = self.busy = self.pulled = self.told_to_pause = False
        require(not self.armed, f"rank {self.rank} may be interrupted in a recovery")
        require(not self.untold, f"rank {self.rank} has lost memory, and has not said so")

    def _begins_to_build(self, world: World) -> None:
        # Frames of older recoveries would be skipped one by one.
        generation = self.machine.generation
        queue = world.down[self.rank]
        world.down[self.rank] = tuple(f for f in queue if _generation_of(f) >= generation + isinstance(f, m.Stop))
        world.enter(self, WORLD, ("build",), 0)

    def _copies(self, world: World) -> on.Ok | on.Failed:
        effect = self.pending
        assert self.offer is not None
        assert isinstance(effect, fx.Fetch)
        source, commits = world.ranks[self.offer.source], effect.plan.commits
        if source.model == values.TORN:
            return on.Failed("the digest is another one: the source's memory has lost data meanwhile")
        intact = str(source.model) == self.offer.digest
        require(intact, f"source {source.rank} changed before its copy was acknowledged")
        states = [state for of, state in world.published[self.rank] if of == commits]
        require(bool(states), f"rank {self.rank} had published nothing from which update {commits} starts")
        self.model, (self.own, number, self.tails) = source.model, states[-1]
        self.missed = commits - self.tails
        self.start = self.undo = None
        self.shown = _COPIED
        self.offer = None
        world.handed_over |= {(self.machine.generation, source.rank, self.rank)}
        return on.Ok(number)

    # -- the user's program

    def _calls(self, world: World) -> list[str]:
        names = self._next_calls(world, stopped=self.stopped(world))
        return names + ["is interrupted"] * (self.armed and self.stopped(world))

    def _next_calls(self, world: World, *, stopped: bool) -> list[str]:
        if world.program.misuse and self._misuses(world):
            return ["misuses the step"]
        if self.at is ProgramAt.REDUCE:
            return ["has reduced"] * world.complete(self, world.shard[self.rank])
        if self.at is ProgramAt.IN_TAIL:
            return self._in_tail(world, stopped=stopped)
        if self.at is ProgramAt.BODY:
            last = self.machine.place == world.program.accumulate - 1
            return ["reduces" if last else "ends the body"]
        return [_NEXT_CALL[self.at]]

    def _misuses(self, world: World) -> bool:
        at, written, event = MISUSES[world.program.misuse]
        where = self.behind_cut if at is ProgramAt.HEAD else written == (self.writer > 0)
        redone = at is ProgramAt.BODY or (at is ProgramAt.WRITE and world.program.undo)
        explained = redone and isinstance(event, on.Exit) and event.how == "error" and self.stopped(world)
        return self.at is at and where and not self.outside and self._late(world) and not explained

    def _late(self, world: World) -> bool:
        return self.machine.standing.commits >= len(world.layout.tails) - 1

    def _misuse_step(self, world: World) -> None:
        """What the documentation forbids: whoever does it is told."""
        kind = world.program.misuse
        self.called = _OTHER
        self.unseen = kind == CHANGES_UNSEEN
        event = MISUSES[kind][2]
        if isinstance(event, on.Exit) and event.how != "ok":
            self._goes_wrong()
        self.feed(world, event)
        require(not self.alive or self.wrong, f"rank {self.rank} {kind}, and nobody has told it")

    def _connect(self, world: World) -> None:
        self.at, self.connected, self.called = ProgramAt.HEAD, True, _HEAD
        world.greet(self)
        begun = world.source
        self.feed(world, on.Begin(self._total(world), begun * world.program.accumulate, begun))

    def _ask_for_step(self, world: World) -> None:
        stopped = self.stopped(world)
        self.called = _HEAD
        pauses = world.pause_at is not None and self.machine.number >= world.pause_at
        self.told_to_pause = pauses and self.machine.place == 0
        self.feed(world, on.Over(stopped) if self.breaks else on.Next(self._total(world), stopped, pauses))

    def _total(self, world: World) -> int:
        return (len(world.layout.tails) + world.program.breaks) * world.program.accumulate + world.program.rest

    def _interrupted(self, world: World) -> None:
        require(self._may_be_left(world), f"rank {self.rank} is interrupted at {self.at.name}")
        self.cut, self.called = True, _EXIT
        self.feed(world, on.Exit("interrupted"))

    def _reduce(self, world: World) -> None:
        commits, shard = self.machine.standing.commits, world.shard[self.rank]
        require(not self.cut, f"rank {self.rank} reduces with a reducer that was cut")
        require(self.layout == (0 if commits else -1), f"rank {self.rank} reduces with another layout")
        require(self.mode is fx.Mode.DIRECT, f"rank {self.rank} reduces in mode {self.mode}")
        self._compute()
        self.entered = True
        world.enter(self, shard, ("grad", commits, self.laid), self.grad)
        self.laid = commits > 0
        self.at = ProgramAt.REDUCE

    def _compute(self) -> None:
        """The body's forward and backward pass."""
        batch = self.batches[self.machine.place]
        self.grad = values.gradient(self.rank, self.grad, batch, self.own)
        self.own = values.used(self.own)

    def _reduced(self, world: World) -> None:
        self.grads = tuple(value for _, value in world.leave(self, world.shard[self.rank]))
        self._to_the_next_write(world)

    def _update(self, world: World) -> None:
        self.called = _HOOK
        self.feed(world, on.UpdateBegins(self.writer))

    def _written(self, world: World) -> None:
        self.called = _OTHER
        self.busy = True
        if self.writer == self._writers(world) - 1:
            self.model = values.updated(self.base, self.grads)
        self.feed(world, on.UpdateEnds(self.writer))

    def _end_body(self, world: World) -> None:
        if self.at is ProgramAt.BODY:
            self._compute()
        self.called = _EXIT
        self.feed(world, on.Exit())

    def _tail(self, world: World) -> None:
        """The next collective of the tail that this rank is in, or the body's end."""
        commits = self.machine.standing.commits
        calls = world.layout.calls(commits - 1)
        while self.tail_index < len(calls) and self.rank not in calls[self.tail_index]:
            self.tail_index += 1
        if self.tail_index >= len(calls):
            if self.outside:
                self._leaves_the_body(world)
            else:
                self.called = _EXIT
                self.feed(world, on.Exit())
            return
        index = self.tail_index
        if self.mode in (fx.Mode.LOG, fx.Mode.EXCHANGE):
            world.log(self.rank, commits, index, values.logged(self.rank, commits, index))
        if self.mode is fx.Mode.LOG:
            world.enter_tail(self, commits, index)
        self.at = ProgramAt.IN_TAIL

    def _in_tail(self, world: World, *, stopped: bool) -> list[str]:
        commits, index = self.machine.standing.commits, self.tail_index
        if self.mode is fx.Mode.LOOPBACK:
            return ["has the result"]
        if self.mode is fx.Mode.LOG:
            done = world.tail_complete(self, commits, index)
        else:
            done = world.exchanged(self, commits, index) is not None
        return ["has the result"] * done + ["sees its collective cut"] * stopped

    def _has_result(self, world: World) -> None:
        commits, index = self.machine.standing.commits, self.tail_index
        if self.mode is fx.Mode.LOG:
            world.take_result(self, commits, index, world.leave_tail(self, commits, index))
        elif self.mode is fx.Mode.EXCHANGE:
            result = world.exchanged(self, commits, index)
            assert result is not None
            world.take_result(self, commits, index, result)
        self.tail_index += 1
        self.at = ProgramAt.TAIL

    def _tail_cut(self, world: World) -> None:
        self.called = _CALL
        self.feed(world, on.TailCut(stopped=self.stopped(world)))

    # -- faults

    def raises(self, world: World) -> None:
        """The script fails on this rank by itself: in a body, behind its update, or between two bodies."""
        self._goes_wrong()
        if self.at is ProgramAt.HEAD or self.outside:
            self._leaves_the_session(world)
        else:
            self.called = _EXIT
            self.feed(world, on.Exit("error", "the script's"))

    def _goes_wrong(self) -> None:
        self.wrong = True
        alone = isinstance(getattr(self.machine.state, "duty", None), m.SaveLast)
        behind = self.machine.standing.phase is Phase.APPLIED
        self.failed_tail, self.failed_alone = behind and not alone, behind and alone

    def fail(self, world: World) -> None:
        """A collective failed, the update was cut, or what the rank waits for."""
        if isinstance(self.pending, (fx.BuildGroups, fx.Fetch, fx.Serve, fx.AwaitStop)):
            self._receive(world, "fails")
        elif self._misled:
            self._goes_wrong()
            self.called = _EXIT
            self.feed(world, on.Exit("error", "this one is missing"))
        elif self.at is ProgramAt.IN_TAIL:
            self._tail_cut(world)
        elif isinstance(self.pending, fx.CheckCollectives):
            self._receive(world, "finds them failed")
        else:
            self.cut, self.called = True, _EXIT
            self.untold = self.at is ProgramAt.WRITE and not world.program.talks
            self.feed(world, on.Exit("fault", "failed", damaged=self.untold, lost=self.untold))

    def finds_an_anomaly(self, world: World) -> None:
        """All collectives have succeeded, and the norm can't be right. What is computed twice has been told before."""
        self.pending, self.busy = None, False
        assert self._has_computed(world) == on.Ok()
        self.feed(world, on.Anomalous())
        tells = any(isinstance(effect, fx.SendAnomaly) for effect in self.todo)
        require(tells, f"rank {self.rank} finds an anomaly, and tells nobody")

    def asks_again(self, world: World) -> None:
        """The script leaves its body by an error that asks for the step once more."""
        self.cut, self.called = True, _EXIT
        self.feed(world, on.Exit("anomalous", "once more"))
        tells = any(isinstance(effect, fx.SendAnomaly) for effect in self.todo)
        require(tells, f"rank {self.rank} is asked for its step once more, and tells nobody")

    def computes_otherwise(self, world: World) -> None:
        """All collectives have succeeded, and this rank comes to something else than before."""
        self.pending, self.busy = None, False
        self.deviated = self.machine.generation
        self.feed(world, self._has_computed(world))

    def _has_computed(self, world: World) -> on.Ok | on.Doubtful:
        machine = self.machine
        commits, deviates = machine.standing.commits, self.deviated == machine.generation
        if not world.layout.computes_twice(commits):
            return on.Ok()
        world.send(self, m.Computed(machine.generation, commits, machine.number, 0 if deviates else -1, 1))
        return on.Doubtful() if deviates or self.distance or commits != self.verified else on.Ok()

    def _may_apply(self, world: World) -> None:
        machine = self.machine
        twice = not world.layout.computes_twice(machine.standing.commits) or self.verified == machine.standing.commits
        require(twice, f"rank {self.rank} applies what was computed once only")
        own = not (self.distance and self.verified == machine.standing.commits)
        require(own, f"rank {self.rank} applies what it has computed from another rank's inputs")
        odd = [rank.rank for rank in world.ranks if rank.alive and rank.deviated == machine.generation]
        require(not odd, f"rank {self.rank} goes on to its update, and ranks {odd} have come to something else")

    def lose_data(self, world: World, *, state: bool = True) -> None:
        """Memory of this rank's is damaged; where ``state`` is False none of the replicated state was in it."""
        if not state:
            self.untold = self.cut = True
            self.called = _EXIT
            self.feed(world, on.Exit("fault", "lost data", damaged=True))
            return
        self.model = values.TORN
        if self.pending is not None:
            self.heard = True
            return
        self.untold = self.cut = True
        self.called = _EXIT
        self.feed(world, on.Exit("fault", "lost data", damaged=True, lost=True))

    def hear_of_the_end(self, world: World) -> None:
        """The job ends: what this rank waits for in the user's code raises, and that goes through the user's code.

        SystemExit, if it is told; JobEnded, if its agent is gone.
        """
        if self.pending is not None and not self.todo and self.called in (_HOOK, _CALL):
            self.pending, self.wrong, self.called = None, True, _OTHER
            self.feed(world, on.Exit("leaves" if self.rank % 2 else "error"))

    def _nothing(self, world: World) -> None:
        pass

    _PERFORM: ClassVar[dict[type[fx.Effect], Callable[..., None]]] = {
        fx.Record: _record,
        fx.Arrive: _record,
        fx.Publish: _publish,
        fx.ResetLog: _reset_log,
        fx.SendStarted: _send_started,
        fx.SendTrouble: _send_trouble,
        fx.SendDamaged: _send_damaged,
        fx.SendRaised: _send_raised,
        fx.TellTailFailed: _tell_tail_failed,
        fx.SendAnomaly: _send_anomaly,
        fx.SendJoined: _send_joined,
        fx.SendDone: _send_done,
        fx.SendFinish: _send_finish,
        fx.SendReached: _send_reached,
        fx.OnPause: _on_pause,
        fx.SendOffers: _offer,
        fx.Arm: _arm,
        fx.Disarm: _disarm,
        fx.SnapshotBegin: _snapshot_begin,
        fx.SnapshotFence: _snapshot_fence,
        fx.LearnLayout: _learn_layout,
        fx.RebuildReducer: _rebuild_reducer,
        fx.ShowState: _show_state,
        fx.Compare: _compare,
        fx.CheckUnchanged: _check_unchanged,
        fx.Synchronize: _synchronize,
        fx.SetMode: _set_mode,
        fx.Exchange: _exchange,
        fx.Draw: _draw,
        fx.Mark: _mark,
        fx.Rollback: _rollback,
        fx.ForgetBatches: _forget_batches,
        fx.SaveUndo: _save_undo,
        fx.DropGradients: _drop_gradients,
        fx.Committed: _committed,
        fx.Return: _return,
        fx.ReturnStep: _return_step,
        fx.ReturnEnd: _return_end,
        fx.Cut: _cut,
        fx.GiveUp: _give_up,
        fx.Misuse: _misuse,
    }
    _WAITING: ClassVar[dict[type[fx.Effect], Callable[..., None]]] = {
        **dict.fromkeys((fx.CheckCollectives, fx.Cross, fx.AwaitStop, fx.AwaitResume, fx.AwaitPlan), _nothing),
        **dict.fromkeys((fx.AwaitFinished, fx.AwaitEnd, fx.Fetch, fx.Serve), _nothing),
        fx.Quiesce: _begins_to_quiesce,
        fx.BuildGroups: _begins_to_build,
        fx.SaveState: _begins_to_save,
    }
    _CALLS: ClassVar[dict[str, Callable[..., None]]] = {
        "connects": _connect,
        "asks for a step": _ask_for_step,
        "is interrupted": _interrupted,
        "reduces": _reduce,
        "has reduced": _reduced,
        "misuses the step": _misuse_step,
        "updates": _update,
        "has written": _written,
        "ends the body": _end_body,
        "goes on in the tail": _tail,
        "has the result": _has_result,
        "sees its collective cut": _tail_cut,
    }


def _effect_key(effect: fx.Effect | None) -> Any:
    if isinstance(effect, (fx.BuildGroups, fx.Fetch, fx.Exchange)):
        return (type(effect).__name__, effect.plan.generation)
    if isinstance(effect, fx.SaveState):
        return ("Save", effect.order and (effect.order.generation, effect.order.part))
    return effect


def _generation_of(frame: m.FromAgent) -> int:
    return getattr(frame, "generation", -1)
