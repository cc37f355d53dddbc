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
from resilient_train.testing.checks import require

if TYPE_CHECKING:
    from resilient_train.testing.cluster import World

WORLD = -1
"""The group of all ranks."""


class At(enum.IntEnum):
    """Where the user's program stands."""

    BOOT = 0
    HEAD = 1  # it asks for a step
    BODY = 2  # before the gradients' reduction
    REDUCE = 3  # in it
    REDUCED = 4
    WRITE = 5  # an optimizer writes
    TAIL = 6  # before a collective of the tail, or behind the last
    IN_TAIL = 7  # in it
    LEFT = 8
    DEAD = 9


class Program(NamedTuple):
    """What the user's loop does beside one step an update and one optimizer."""

    accumulate: int = 1
    optimizers: int = 1
    undo: bool = False
    breaks: bool = False
    """It leaves the loop by itself, after the last update."""


VISIBLE = (
    *(fx.Record, fx.Publish, fx.Arrive, fx.ResetLog, fx.Offer, fx.SendStarted, fx.SendTrouble, fx.SendDamaged),
    *(fx.SendJoined, fx.SendDone, fx.SendFinish),
)
"""Effects that others can see. (Snapshots have a simulation of their own, ``tests/sim/test_kept.py``.)"""
_FRAMES: dict[type[fx.Effect], tuple[type[Any], ...]] = {
    fx.AwaitResume: (m.Resume, m.Pull),
    fx.AwaitPlan: (m.Plan, m.SaveLast),
    fx.AwaitFinished: (m.Finished,),
    fx.AwaitEnd: (),
}


class SimRank:
    """The process of one rank, from its start to its death."""

    __slots__ = (
        *("_key", "alive", "armed", "at", "base", "batches", "breaks", "calls", "connected", "copying", "cut", "grads"),
        *("incarnation", "layout", "machine", "mode", "model", "offer", "own", "pending", "rank", "start", "step"),
        *("tail_index", "todo", "undo", "writer"),
    )

    def __init__(self, rank: int, incarnation: int, machine: Rank) -> None:
        self.rank, self.incarnation, self.machine = rank, incarnation, machine
        self.at = At.BOOT
        self.alive, self.connected = True, False
        self.todo: tuple[fx.Effect, ...] = ()
        self.pending: fx.Effect | None = None
        self.mode = fx.Mode.DIRECT
        self.model = self.base = values.TORN
        self.undo: int | None = None
        self.own = 0
        self.start: int | None = None
        self.batches: tuple[int, ...] = ()
        self.grads: tuple[int, ...] = ()
        self.calls: dict[int, int] = {}
        self.step = self.tail_index = self.writer = 0
        self.offer: m.Offer | None = None
        self.armed = self.copying = self.cut = False
        """A stop interrupts the user's code; a snapshot is copied; a backward pass was cut, its reducer not reset."""
        self.breaks = self.layout = False
        """The loop is being left by itself. The reducer has the layout that the job's first update has decided."""
        self._key: int | None = None

    def copy(self) -> SimRank:
        """An independent rank in the same state."""
        new = object.__new__(type(self))
        for name in SimRank.__slots__:
            setattr(new, name, getattr(self, name))
        new.machine = self.machine.copy()
        new._key = None
        return new

    def key(self) -> int:
        """The state as a number."""
        if self._key is None:
            self._key = hash((
                self.at, self.alive, self.incarnation, self.connected, self.mode, self.model, self.base, self.undo,
                self.own, self.armed, self.copying, self.cut, self.layout, self.breaks, self.start, self.batches,
                self.grads, tuple(self.calls.items()), self.tail_index, self.writer,
                tuple(map(_effect_key, self.todo)), _effect_key(self.pending),
                self.offer.source if self.offer else -1, self.machine.key(),
            ))  # fmt: skip
        return self._key

    def prepare(self, world: World) -> None:
        """A first process starts with the initial state; a replacement has none that counts."""
        if not self.machine.joining:
            self.model = values.first_model(world.shard[self.rank])
            self.own = values.first_own(self.rank)
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)

    def die(self) -> None:
        """What this process alone knew is gone."""
        self.alive = self.connected = False
        self.at = At.DEAD
        self.todo, self.pending, self.offer, self.undo, self.start = (), None, None, None, None
        self.model = self.base = self.own = 0
        self.grads, self.batches, self.calls = (), (), {}

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
        if isinstance(self.pending, fx.CheckCollectives):
            return not self.todo
        return self.idle and self.at in (At.REDUCE, At.IN_TAIL) and self.mode is not fx.Mode.LOOPBACK

    @property
    def can_fail(self) -> bool:
        """Whether what this rank waits for may fail although nobody died."""
        return not self.todo and isinstance(self.pending, (fx.Build, fx.Fetch))

    @property
    def in_body(self) -> bool:
        """Whether its memory may be damaged in the body of a step."""
        return self.idle and self.at in (At.BODY, At.REDUCED)

    # -- which transitions there are

    def moves(self, world: World) -> list[str]:
        """What this rank may do next."""
        if not self.alive or self.at is At.LEFT:
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
        world.visited.add((_state_name(self.machine), type(event).__name__))
        self._run(world, self.machine.on(event))

    def _run(self, world: World, effects: tuple[fx.Effect, ...]) -> None:
        self.todo = ()
        for index, effect in enumerate(effects):
            if isinstance(effect, VISIBLE):
                self.todo = effects[index:]
                return
            if type(effect) in self._WAITING:
                assert index == len(effects) - 1, f"{effect} is not the last of its list"
                self.pending = effect
                self._WAITING[type(effect)](self, world)
                return
            self._perform(world, effect)  # the last of a list may feed the machine again

    # -- effects

    def _perform(self, world: World, effect: fx.Effect) -> None:
        perform = self._PERFORM.get(type(effect))
        if perform is not None:
            perform(self, world, effect)

    def _record(self, world: World, _: fx.Effect) -> None:
        world.standings[self.rank] = self.machine.standing

    def _publish(self, world: World, effect: fx.Publish) -> None:
        commits, number = self.machine.standing.commits, self.machine.number
        world.publish(self.rank, commits + effect.ahead, (self.own, number + effect.ahead))

    def _reset_log(self, world: World, _: fx.Effect) -> None:
        world.logs[self.rank] = (self.machine.standing.commits, ())

    def _send_started(self, world: World, _: fx.Effect) -> None:
        world.send(self, m.Started(str(self.model), ("world",), world.layout.replicas))

    def _send_trouble(self, world: World, effect: fx.SendTrouble) -> None:
        world.send(self, m.Trouble(self.machine.generation, effect.text))

    def _send_damaged(self, world: World, effect: fx.SendDamaged) -> None:
        world.send(self, m.Damaged(self.machine.generation, effect.text))

    def _send_joined(self, world: World, _: fx.Effect) -> None:
        commits, phase = self.machine.standing
        world.send(self, m.Joined(self.machine.generation, commits, phase, self.machine.intact, 0, ("world",)))

    def _send_done(self, world: World, effect: fx.SendDone) -> None:
        world.send(self, m.Done(self.machine.generation, effect.redone, self.machine.number, self.machine.over))

    def _send_finish(self, world: World, _: fx.Effect) -> None:
        world.send(self, m.Finish(self.machine.generation))

    def _offer(self, world: World, effect: fx.Offer) -> None:
        commits = self.machine.standing.commits
        require(
            self.model == world.chains.model[world.shard[self.rank]][commits], f"rank {self.rank} offers a wrong state"
        )
        generation = self.machine.generation
        offers = [m.Offer(generation, self.rank, to, self.incarnation, b"", str(self.model)) for to in effect.targets]
        world.send(self, *offers)

    def _exchange(self, _: World, __: fx.Exchange) -> None:
        self.mode = fx.Mode.EXCHANGE

    def _set_mode(self, _: World, effect: fx.SetMode) -> None:
        self.mode = effect.mode

    def _draw(self, _: World, __: fx.Effect) -> None:
        place = self.machine.place
        if place == len(self.batches):
            self.own = values.drawn(self.own)
            self.batches = (*self.batches, self.own)
        else:
            self.own = self.batches[place]

    def _arm(self, _: World, __: fx.Effect) -> None:
        self.armed = True

    def _disarm(self, _: World, __: fx.Effect) -> None:
        self.armed = False

    def _snapshot_begin(self, _: World, __: fx.Effect) -> None:
        self.copying = True

    def _snapshot_fence(self, _: World, __: fx.Effect) -> None:
        self.copying = False

    def _learn_layout(self, _: World, __: fx.Effect) -> None:
        self.layout = True

    def _rebuild_reducer(self, _: World, effect: fx.RebuildReducer) -> None:
        self.cut = False
        if effect.copied:
            self.layout = self.machine.standing.commits > 0

    def _mark(self, _: World, __: fx.Effect) -> None:
        self.start = self.own

    def _rollback(self, _: World, __: fx.Effect) -> None:
        if self.start is not None:
            self.own = self.start
            self.grads = ()
            if self.undo is not None:
                self.model, self.undo = self.undo, None

    def _rewind(self, _: World, effect: fx.Rewind) -> None:
        if not effect.again:
            self.batches = ()

    def _save_undo(self, _: World, __: fx.Effect) -> None:
        if self.undo is None:
            self.undo = self.model

    def _committed(self, world: World, __: fx.Effect) -> None:
        self.start = self.undo = None
        self.batches = self.grads = ()
        world.high_water = max(world.high_water, self.machine.standing.commits)

    def _return(self, world: World, effect: fx.Return) -> None:
        """The user's code goes on."""
        program = world.program
        if effect.value:  # a cut body, or a collective that is called again
            self.at = At.TAIL if self.at is At.IN_TAIL else At.HEAD
            return
        if self.at is At.HEAD:
            self.at = At.BODY
        elif self.at is At.BODY:  # a micro-step's end
            self.at = At.HEAD
        elif self.at is At.REDUCED:
            self.at = At.WRITE
            require(not self.copying, f"rank {self.rank} writes while a snapshot is copied")
            if self.model != values.TORN:
                self.base, self.model = self.model, values.TORN
        elif self.at is At.WRITE:
            self.writer += 1
            if self.writer < program.optimizers:
                self.at = At.REDUCED
            elif not program.undo:
                self._tail_begins()
        elif self.at is At.TAIL:  # the body's end
            self.at = At.HEAD
            self.breaks = program.breaks and self.machine.standing.commits == len(world.layout.tails)

    def _return_step(self, world: World, _: fx.Effect) -> None:
        self.at, self.writer = At.HEAD, 0
        self.step = self.machine.number
        commits = self.machine.standing.commits
        require(commits < len(world.layout.tails), f"rank {self.rank} begins a step that no other rank runs")
        if self.machine.place == 0:
            expected = world.chains.own[self.rank][commits]
            require(self.batches[0] == values.drawn(expected), f"rank {self.rank} starts {commits} elsewhere")
        self.feed(world, on.Enter())

    def _return_end(self, _: World, __: fx.Effect) -> None:
        self.at, self.connected = At.LEFT, False

    def _cut(self, world: World, _: fx.Effect) -> None:
        self.feed(world, on.Exit("interrupted"))

    def _give_up(self, world: World, _: fx.Effect) -> None:
        world.leave_with_error(self)

    def _misuse(self, _: World, effect: fx.Misuse) -> None:
        require(condition=False, text=effect.text)

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
        if kind is fx.Save:
            return ["is stopped"] * stopped
        if kind is fx.Cross:
            ready = world.all_reached(self.rank, Standing(self.machine.standing.commits, Phase.READY))
            return ["passes"] * ready + ["is stopped"] * stopped
        if kind is fx.Build:
            # What was built before a stop is not used after it.
            return ["is stopped"] if stopped else ["has built"] * world.complete(self, WORLD)
        assert kind is fx.Fetch
        if self.offer is None:
            return ["receives"] if self._relevant(world) is not None else []
        source = world.ranks[self.offer.source]
        names = ["copies"] if source.alive and source.incarnation == self.offer.pid else []
        return names + ["is stopped"] * (stopped and not names)

    def _receive(self, world: World, name: str) -> None:
        effect, event = self.pending, None
        assert effect is not None
        match name:
            case "receives":
                event = self._frame(world)
            case "is stopped":
                event = on.Stopped()
            case "sees the stop" if type(effect) is fx.Quiesce:
                event = on.Quieted(world.stop_generation)
            case "copies":
                event = self._copies(world)
            case "has built":
                world.leave(self, WORLD)
                event = on.Ok()
            case "passes":
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
            world.resumed_generation = max(world.resumed_generation, frame.generation)
        return frame

    def _begins_to_save(self, world: World) -> None:
        effect = self.pending
        assert isinstance(effect, fx.Save)
        commits = self.machine.standing.commits
        whole = self.model == world.chains.model[world.shard[self.rank]][commits]
        require(whole, f"rank {self.rank} saves a wrong state")
        order = effect.order
        require(
            order is None or order.commits == commits, f"rank {self.rank} saves update {commits}, asked for another"
        )
        world.send(self, m.Captured(commits, self.machine.number, 0, store=True, last=self.machine.generation))

    def _begins_to_quiesce(self, world: World) -> None:
        self.calls = dict.fromkeys((WORLD, world.shard[self.rank]), 0)
        self.offer = None
        self.copying = self.armed = False

    def _begins_to_build(self, world: World) -> None:
        # Frames of older recoveries would be skipped one by one.
        generation = self.machine.generation
        queue = world.down[self.rank]
        world.down[self.rank] = tuple(f for f in queue if _generation_of(f) >= generation + isinstance(f, m.Stop))
        world.enter(self, WORLD, ("build",), 0)

    def _copies(self, world: World) -> on.Ok:
        effect = self.pending
        assert self.offer is not None
        assert isinstance(effect, fx.Fetch)
        source, commits = world.ranks[self.offer.source], effect.plan.commits
        intact = str(source.model) == self.offer.digest
        require(intact, f"source {source.rank} changed before its copy was acknowledged")
        states = [state for of, state in world.published[self.rank] if of == commits]
        require(bool(states), f"rank {self.rank} had published nothing from which update {commits} starts")
        self.model, (self.own, number) = source.model, states[-1]
        self.start = None
        self.offer = None
        return on.Ok(number)

    # -- the user's program

    def _calls(self, world: World) -> list[str]:
        names = self._next_calls(world, stopped=self.stopped(world))
        return names + ["is interrupted"] * (self.armed and self.stopped(world))

    def _next_calls(self, world: World, *, stopped: bool) -> list[str]:
        if self.at is At.BOOT:
            return ["connects"]
        if self.at is At.HEAD:
            return ["asks for a step"]
        if self.at is At.BODY:
            last = self.machine.place == world.program.accumulate - 1
            return ["reduces" if last else "ends the body"]
        if self.at is At.REDUCE:
            return ["has reduced"] * world.complete(self, world.shard[self.rank])
        if self.at is At.REDUCED:
            return ["updates"]
        if self.at is At.WRITE:
            return ["has written"]
        if self.at is At.TAIL:
            return ["goes on in the tail"]
        return self._in_tail(world, stopped=stopped)

    def _connect(self, world: World) -> None:
        self.at, self.connected = At.HEAD, True
        world.greet(self)
        self.feed(world, on.Begin(self._total(world), 0))

    def _ask_for_step(self, world: World) -> None:
        stopped = self.stopped(world)
        self.feed(world, on.Over(stopped) if self.breaks else on.Next(self._total(world), stopped))

    def _total(self, world: World) -> int:
        return (len(world.layout.tails) + world.program.breaks) * world.program.accumulate

    def _interrupted(self, world: World) -> None:
        self.cut = True
        self.feed(world, on.Exit("interrupted"))

    def _reduce(self, world: World) -> None:
        commits, shard = self.machine.standing.commits, world.shard[self.rank]
        require(not self.cut, f"rank {self.rank} reduces with a reducer that was cut")
        require(self.layout or not commits, f"rank {self.rank} reduces with another layout")
        require(self.mode is fx.Mode.DIRECT, f"rank {self.rank} reduces in mode {self.mode}")
        world.enter(self, shard, ("grad", commits), values.gradient(self.rank, self.batches))
        self.at = At.REDUCE

    def _reduced(self, world: World) -> None:
        self.grads = tuple(value for _, value in world.leave(self, world.shard[self.rank]))
        self.at = At.REDUCED

    def _update(self, world: World) -> None:
        self.feed(world, on.UpdateBegins(self.writer))

    def _written(self, world: World) -> None:
        last = self.writer == world.program.optimizers - 1
        if last:
            self.model = values.updated(self.base, self.grads)
        self.feed(world, on.UpdateEnds(self.writer))
        if last and world.program.undo:
            self._tail_begins()

    def _tail_begins(self) -> None:
        self.at, self.tail_index = At.TAIL, 0

    def _end_body(self, world: World) -> None:
        self.feed(world, on.Exit())

    def _tail(self, world: World) -> None:
        """The next collective of the tail that this rank is in, or the body's end."""
        commits = self.machine.standing.commits
        calls = world.layout.calls(commits - 1) if self.machine.standing.phase is Phase.APPLIED else ()
        while self.tail_index < len(calls) and self.rank not in calls[self.tail_index]:
            self.tail_index += 1
        if self.tail_index >= len(calls):
            self.feed(world, on.Exit())
            return
        index = self.tail_index
        if self.mode in (fx.Mode.LOG, fx.Mode.EXCHANGE):
            world.log(self.rank, commits, index, values.logged(self.rank, commits, index))
        if self.mode is fx.Mode.LOG:
            world.enter_tail(self, commits, index)
        self.at = At.IN_TAIL

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
        self.at = At.TAIL

    def _tail_cut(self, world: World) -> None:
        self.feed(world, on.TailCut(stopped=self.stopped(world)))

    # -- faults

    def fail(self, world: World) -> None:
        """A collective failed, the update was cut, or what the rank waits for."""
        if isinstance(self.pending, (fx.Build, fx.Fetch, fx.AwaitStop)):
            self._receive(world, "fails")
        elif self.at is At.IN_TAIL:
            self.feed(world, on.TailCut(stopped=self.stopped(world)))
        elif isinstance(self.pending, fx.CheckCollectives):
            self._receive(world, "finds them failed")
        else:
            self.cut = True
            self.feed(world, on.Exit("fault", "failed", damaged=self.at is At.WRITE, lost=self.at is At.WRITE))

    def lose_data(self, world: World) -> None:
        """Memory of this rank's is damaged."""
        self.model = values.TORN
        self.feed(world, on.Exit("fault", "lost data", damaged=True, lost=True))

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
        fx.SendJoined: _send_joined,
        fx.SendDone: _send_done,
        fx.SendFinish: _send_finish,
        fx.Offer: _offer,
        fx.Arm: _arm,
        fx.Disarm: _disarm,
        fx.SnapshotBegin: _snapshot_begin,
        fx.SnapshotFence: _snapshot_fence,
        fx.LearnLayout: _learn_layout,
        fx.RebuildReducer: _rebuild_reducer,
        fx.SetMode: _set_mode,
        fx.Exchange: _exchange,
        fx.Draw: _draw,
        fx.Mark: _mark,
        fx.Rollback: _rollback,
        fx.Rewind: _rewind,
        fx.SaveUndo: _save_undo,
        fx.Committed: _committed,
        fx.Return: _return,
        fx.ReturnStep: _return_step,
        fx.ReturnEnd: _return_end,
        fx.Cut: _cut,
        fx.GiveUp: _give_up,
        fx.Misuse: _misuse,
    }
    """What is not here has nothing to do in a process that is a model."""

    _WAITING: ClassVar[dict[type[fx.Effect], Callable[..., None]]] = {
        **dict.fromkeys((fx.CheckCollectives, fx.Cross, fx.AwaitStop, fx.AwaitResume, fx.AwaitPlan), _nothing),
        **dict.fromkeys((fx.AwaitFinished, fx.AwaitEnd, fx.Fetch), _nothing),
        fx.Quiesce: _begins_to_quiesce,
        fx.Build: _begins_to_build,
        fx.Save: _begins_to_save,
    }
    _CALLS: ClassVar[dict[str, Callable[..., None]]] = {
        "connects": _connect,
        "asks for a step": _ask_for_step,
        "is interrupted": _interrupted,
        "reduces": _reduce,
        "has reduced": _reduced,
        "updates": _update,
        "has written": _written,
        "ends the body": _end_body,
        "goes on in the tail": _tail,
        "has the result": _has_result,
        "sees its collective cut": _tail_cut,
    }


def _state_name(machine: Rank) -> str:
    state = machine.state
    at = getattr(state, "at", None)
    return f"{type(state).__name__}({at.name})" if at is not None else type(state).__name__


def _effect_key(effect: fx.Effect | None) -> Any:
    if isinstance(effect, (fx.Build, fx.Fetch, fx.Exchange)):
        return (type(effect).__name__, effect.plan.generation)
    return effect


def _generation_of(frame: m.FromAgent) -> int:
    return getattr(frame, "generation", -1)
