"""Everything of the simulated cluster that is not a rank: shared memory, collectives, channels, the agent.

``World.moves`` lists the transitions that could happen next, ``World.step`` lets one happen. All parts are copied when
they are written (``World.copy`` is shallow), so that an exploration can branch cheaply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.protocol import messages as m
from resilient_train.protocol.commands import Command, EndJob, Kill, Note, RaiseStop, Send, SetPause, Spawn
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.holders import Holders
from resilient_train.protocol.job import Stage
from resilient_train.protocol.neighbours import Round
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.rank import Rank
from resilient_train.protocol.rank_effects import Mode
from resilient_train.protocol.replicas import ReplicaTable
from resilient_train.protocol.savers import Leaving
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.strategies import tsp, ttp
from resilient_train.testing import checks, values
from resilient_train.testing.checks import ViolationError
from resilient_train.testing.rank import WORLD, Program, ProgramAt, SimRank
from resilient_train.testing.values import Chains


class Layout(NamedTuple):
    """A job. ``tails`` has, for each update, the collectives after it: how many of all ranks, or the members of each.
    ``replicas``: see Session.
    """

    world_size: int
    tails: tuple[int | tuple[tuple[int, ...], ...], ...]
    replicas: tuple[tuple[int, ...], ...] = ()
    program: Program = Program()
    begun: int = 0
    """The job goes on from what was saved before that update."""
    pulls: bool = False
    """No rank can read another's memory: state is sent over the group."""
    known: tuple[int, ...] = ()
    """Steps that were anomalous in an earlier run of the job."""
    twice: int = 0
    """The last of so many updates is computed twice."""
    neighbours: bool = False
    """And in between from a replica's inputs."""
    replaces: bool = True
    """Lost ranks are replaced. Else the job ends, and who is left saves its state."""
    saves: bool = False
    """What all ranks hold is saved now and then. Where state is lost, or wrong, all go back to it."""

    def computes_twice(self, update: int) -> bool:
        """Whether that update is computed twice before it is applied."""
        return bool(self.twice) and update % self.twice == self.twice - 1

    def calls(self, update: int) -> tuple[tuple[int, ...], ...]:
        """The members of each collective in the tail of that update."""
        tail = self.tails[update]
        return (tuple(range(self.world_size)),) * tail if isinstance(tail, int) else tail


class Faults(NamedTuple):
    """How many of each kind may hit the job."""

    kills: int = 0
    cuts: int = 0
    """A rank's update fails half-way and leaves torn state."""
    glitches: int = 0
    """A collective fails although nobody died."""
    damages: int = 0
    """A rank's memory loses data in the middle of a step (UCE)."""
    scratches: int = 0
    """The same, where no state is."""
    heard: int = 0
    """A rank hears of lost data when its device comes to rest."""
    fences: int = 0
    """A phase of a recovery takes too long. Whoever is silent may only be slow."""
    hangs: int = 0
    """Some ranks are taken for hung, rightly or not, in a step or in a recovery."""
    failures: int = 0
    """A group can't be built, or state not be copied, although nobody died."""
    asked: int = 0
    """Somebody asks the job to end."""
    stops: int = 0
    """The job is ended at once, wherever its ranks are."""
    pauses: int = 0
    """Somebody wants the job to stand still, at once or before some step."""
    withdrawn: int = 0
    """Who wanted it does not any more, before all stand."""
    anomalies: int = 0
    """A rank's norm or loss can't be right."""
    asks: int = 0
    """The script asks for its step once more, by an error in a body."""
    deviations: int = 0
    """A rank that computes an update for the second time comes to something else."""
    errors: int = 0
    """The script fails by itself on a rank. What that rank holds is whole, as a rule, and is saved before it ends."""
    lates: int = 0
    """A rank's script finds out that all is wrong since the step before."""
    differences: int = 0
    """Replicas find that they do not hold the same."""


class DrivenParts(NamedTuple):
    """The parts that are driven, so that tests can put wrong ones in and see them caught."""

    controller: type[Controller] = Controller
    rank: type[Rank] = Rank
    barrier_over_replicas: bool = False
    two_witnesses: bool = True
    """A death is told by the futex and by the pidfd, in either order; False: by the futex alone."""
    silent_when_over: bool = False
    """A rank whose collective of the tail is over does not publish that, nor the result."""


class Move(NamedTuple):
    """One transition: of a rank, the agent, an operator, storage, or a fault. ``about`` is the rank (or a complaint's
    place; for "hang" a bit for each rank that is named; for "pause" a step; for "saves" an update; for
    "difference" a shard).
    """

    actor: str
    about: int
    name: str
    incarnation: int = 0

    def __str__(self) -> str:
        return f"{self.actor} {self.about}: {self.name}"


class Collective(NamedTuple):
    """One collective of one group in one generation: what is called, who has entered with what, who has the result."""

    what: tuple[Any, ...]
    inputs: tuple[tuple[int, int], ...]
    left: frozenset[int] = frozenset()


Own = tuple[int, int, int]
"""A rank's own state, the number of the step that comes next, and how many tails have changed that state."""
Word = tuple[int, int] | None
"""Before which update, and what."""
OVER = "over"
Log = tuple[int, tuple[tuple[int, int, int | str | None], ...]]
"""Of which update's tail, and its collectives by index: input, and the result where it was published; or OVER."""
BUDGETS = {
    "kill": "kills", "cut": "cuts", "glitch": "glitches", "damage": "damages", "scratch": "scratches",
    "loss": "heard", "fence": "fences", "hang": "hangs", "failure": "failures", "asked to end": "asked",
    "stop": "stops", "pause": "pauses", "withdrawal": "withdrawn", "anomaly": "anomalies",
    "deviation": "deviations", "error": "errors", "asks again": "asks",
    "late": "lates", "difference": "differences",
}  # fmt: skip
_POLICY = Policy(max_restarts=1000, max_stuck=1000, max_repairs=1000)


class World:
    """The whole cluster at one instant of virtual time."""

    def __init__(self, layout: Layout, faults: Faults | None = None, driver: DrivenParts | None = None) -> None:
        size = layout.world_size
        self.layout, self.driver = layout, driver or DrivenParts()
        self.budget = faults or Faults()
        self.table = ReplicaTable(size, layout.replicas)
        self.groups = self.table.groups
        self.shard = [next(i for i, group in enumerate(self.groups) if rank in group) for rank in range(size)]
        self.program = layout.program
        policy = msgspec.structs.replace(_POLICY, replace=layout.replaces, neighbours=layout.neighbours)
        self.controller = self.driver.controller(size, policy)
        self.controller.job.know_anomalies({("norm", step): (45.7,) for step in layout.known})
        self.chains = self._chains()
        self.stop_generation = 0
        self.pause_at: int | None = None
        self.standings = [Standing(0, Phase.APPLIED)] * size
        self.logs: list[Log] = [(0, ())] * size
        self.published: list[tuple[tuple[int, Own], ...]] = [()] * size
        self.words: list[tuple[Word, Word]] = [(None, None)] * size
        """What each rank shows of the state that it holds before an even and an odd update."""
        self.handed_over: frozenset[tuple[int, int, int]] = frozenset()
        """(generation, source, target) of states that were sent over the group."""
        self.ranks = [SimRank(rank, -1, Rank(rank)) for rank in range(size)]
        self.up: dict[tuple[int, int], tuple[m.FromRank, ...]] = {}
        self.down: list[tuple[m.FromAgent, ...]] = [()] * size
        self.collectives: dict[tuple[int, int, int], Collective] = {}
        self.troubles: tuple[tuple[int, m.Trouble], ...] = ()
        """Of which attempt each of them is."""
        self.unseen: tuple[tuple[int, int], ...] = ()
        self.unreaped: tuple[tuple[int, int], ...] = ()
        self.fenced: frozenset[tuple[int, int]] = frozenset()
        """(rank, incarnation) that the controller has had killed: it knows of these deaths before it sees them."""
        self.left: frozenset[tuple[int, int]] = frozenset()
        """(rank, incarnation) that have ended with an error of the script's."""
        self.raised: frozenset[tuple[int, int]] = frozenset()
        """(rank, incarnation) whose loop such an error has left, and which stay until what they hold is saved."""
        self.tail_calls: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {}
        self.tail_results: dict[tuple[int, int], int] = {}
        self.missing: frozenset[tuple[int, int]] = frozenset()
        """Collectives of a tail to which some dead rank's input was not there."""
        self.captured: frozenset[tuple[int, int]] = frozenset()
        self.visited: set[tuple[str, str]] = set()
        """(state, event) of the rank machines; shared by all copies."""
        self.source = layout.begun
        """The update from before which the state is that all ranks have started from."""
        self.saved: tuple[int, ...] = (layout.begun,) if layout.saves and layout.begun else ()
        """The updates from before which states are saved, the newest first."""
        self.differed = False
        """Replicas have, as they think. Nobody knows what is right then."""
        self.high_water = 0
        self.resumed_generation = 0
        self.ended: EndJob | None = None
        self._controller_key: tuple[Any, ...] | None = None
        self._tell_what_is_saved()
        self.carry_out(self.controller.launch())

    def _chains(self) -> Chains:
        """Without the updates that are left out by now."""
        program, steps = self.program, {step for _, step in self.controller.job.anomalies}
        left_out = frozenset(step // program.accumulate for step in steps) if program.skips else frozenset()
        return Chains(self.groups, len(self.layout.tails), program.accumulate, left_out)

    # -- transitions

    @property
    def final(self) -> bool:
        """Every rank has left, or the job has ended for want of a replica. A rank may die after all have finished."""
        if self.controller.job.stage is Stage.FINISHED:
            return all(rank.at is ProgramAt.LEFT or not rank.alive for rank in self.ranks)
        return self.ended is not None

    def moves(self) -> list[Move]:
        """The transitions that are possible now, without the faults."""
        if self.ended is not None:
            return []
        found = [Move("rank", rank.rank, name) for rank in self.ranks for name in rank.moves(self)]
        found += [Move("agent", rank, "reads", incarnation) for (rank, incarnation), queue in self.up.items() if queue]
        found += [Move("agent", index, "loses patience") for index in range(len(self.troubles))]
        if self.controller.job.stage is Stage.PAUSED:
            found.append(Move("operator", 0, "ends the pause"))
        if (newest := self._savable()) > max((0, *self.saved)):
            found.append(Move("storage", newest, "saves"))
        if self.controller.job.stage is Stage.FINISHED:
            return found  # a death is nobody's loss any more; the real job then ends with an exit code of its own
        found += [Move("agent", rank, "sees the death", incarnation) for rank, incarnation in self.unseen]
        if self.driver.two_witnesses or self.left:
            found += [Move("agent", rank, "reaps", incarnation) for rank, incarnation in (*self.unseen, *self.unreaped)]
        return found

    def faults(self) -> list[Move]:
        """The faults that may happen now."""
        if self.ended is not None or self.controller.job.stage is Stage.FINISHED or not self.controller.job.aware:
            return []  # before the first Hello the agent can't know that the job wants to be recovered
        alive = [rank for rank in self.ranks if rank.alive]
        found = [Move("fault", rank.rank, "kill") for rank in alive] if self.budget.kills else []
        if self.budget.cuts:
            found += [Move("fault", rank.rank, "cut") for rank in alive if rank.at is ProgramAt.WRITE and rank.idle]
        if self.budget.glitches:
            found += [Move("fault", rank.rank, "glitch") for rank in alive if rank.in_collective]
            talking = [rank for rank in alive if rank.at is ProgramAt.WRITE and rank.idle] if self.program.talks else []
            found += [Move("fault", rank.rank, "glitch") for rank in talking]
        if self.budget.failures:
            found += [Move("fault", rank.rank, "failure") for rank in alive if rank.can_fail]
        if self.budget.damages:
            found += [Move("fault", rank.rank, "damage") for rank in alive if rank.in_body]
        if self.budget.scratches:
            found += [Move("fault", rank.rank, "scratch") for rank in alive if rank.in_body]
        if self.budget.heard:
            found += [Move("fault", rank.rank, "loss") for rank in alive if rank.at_rest]
        runs = self.controller.job.stage in (Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED)
        if self.budget.anomalies:
            found += [Move("fault", rank.rank, "anomaly") for rank in alive if rank.may_be_anomalous(self)]
        if self.budget.asks:
            found += [Move("fault", rank.rank, "asks again") for rank in alive if rank.may_ask_again(self)]
        if self.budget.deviations:
            found += [Move("fault", rank.rank, "deviation") for rank in alive if rank.can_deviate(self)]
        if self.budget.errors:
            found += [Move("fault", rank.rank, "error") for rank in alive if rank.may_raise(self)]
        if self.budget.lates and runs:
            found += [Move("fault", rank.rank, "late") for rank in alive if rank.may_find_out]
        if self.budget.differences and runs:
            found += [Move("fault", shard, "difference") for shard, group in enumerate(self.groups) if len(group) > 1]
        if self.budget.asked and runs:
            found.append(Move("fault", 0, "asked to end"))
        if self.budget.stops and runs:
            found.append(Move("fault", 0, "stop"))
        if self.budget.pauses:
            wanted = [step for step in range(len(self.layout.tails) + 1) if not tsp.refuses(self.controller.job, step)]
            found += [Move("fault", step, "pause") for step in wanted]
        early = self.controller.job.stage is not Stage.PAUSED and not tsp.refuses_to_end(self.controller.job)
        if self.budget.withdrawn and early:
            found.append(Move("fault", 0, "withdrawal"))
        if self.budget.fences and self.controller.job.stage is Stage.RECOVERING:
            found.append(Move("fault", 0, "fence"))
        if self.budget.hangs and runs:
            found += [Move("fault", members, "hang") for members in range(1, 1 << self.layout.world_size)]
        return found

    def step(self, move: Move) -> None:
        """Lets one transition happen. Raises ViolationError if the promise is broken by it."""
        try:
            if move.actor == "rank":
                self.writable(move.about).do(self, move.name)
            elif move.actor == "agent":
                self._agent(move)
            elif move.actor == "operator":
                self.carry_out(self._own_controller().unpause())
            elif move.actor == "storage":
                self.saved = (move.about, *self.saved[:1])
            else:
                self._fault(move)
        except (ProtocolError, AssertionError) as error:
            raise ViolationError(f"{type(error).__name__}: {error}") from error
        checks.check(self)

    def _fault(self, move: Move) -> None:
        name = BUDGETS[move.name]
        self.budget = self.budget._replace(**{name: getattr(self.budget, name) - 1})
        if move.name == "kill":
            self.kill(move.about)
        elif move.name == "fence":
            self._own_controller()
            everybody = range(self.layout.world_size)
            self.carry_out(self.controller.expired(self.controller.job.generation, self.standings, 1.0, everybody))
        elif move.name == "hang":
            named = [rank for rank in range(self.layout.world_size) if move.about >> rank & 1]
            self.carry_out(self._own_controller().fence(named, "hung", self.standings))
        elif move.name == "asked to end":
            self.carry_out(self._own_controller().leave(143, "asked"))
        elif move.name == "stop":
            self.carry_out(self._own_controller().stop(143, "stopped"))
        elif move.name == "pause":
            self.carry_out(self._own_controller().pause(move.about, "asked"))
        elif move.name == "withdrawal":
            self.carry_out(self._own_controller().unpause())
        elif move.name == "anomaly":
            self.writable(move.about).finds_an_anomaly(self)
        elif move.name == "asks again":
            self.writable(move.about).asks_again(self)
        elif move.name == "error":
            self.writable(move.about).raises(self)
        elif move.name == "deviation":
            self.writable(move.about).computes_otherwise(self)
        elif move.name == "difference":
            self.differed = True
            told = [rank for rank in self.ranks if rank.connected and self.shard[rank.rank] == move.about]
            for rank in told:  # each waits for the end then, in a real job; here it may be slow to do so
                self.send(rank, m.Differs(rank.machine.standing.commits, [("weight", str(rank.rank))], averages=True))
        elif move.name == "late":
            finder = self.ranks[move.about]
            self.send(finder, m.Late(max(0, finder.machine.number - 1), "the evaluation says so"))
        elif move.name in ("damage", "loss", "scratch"):
            self.writable(move.about).lose_data(self, state=move.name != "scratch")
        else:
            self.writable(move.about).fail(self)

    def kill(self, rank: int) -> None:
        """SIGKILL: what the rank has written to shared memory and sent stays."""
        victim = self.writable(rank)
        if victim.alive:
            self._gone(victim)

    def _gone(self, victim: SimRank) -> None:
        victim.die()
        self.down[victim.rank] = ()
        self.unseen += ((victim.rank, victim.incarnation),)

    # -- the agent

    def _agent(self, move: Move) -> None:
        self._own_controller()
        rank, incarnation = move.about, move.incarnation
        if move.name == "sees the death":
            self.unseen = tuple(pair for pair in self.unseen if pair != (rank, incarnation))
            if self.driver.two_witnesses or self.left:
                self.unreaped += ((rank, incarnation),)
            self.carry_out(self.controller.lost(rank, incarnation, "died", self.standings))
        elif move.name == "reaps":
            self.unseen = tuple(pair for pair in self.unseen if pair != (rank, incarnation))
            self.unreaped = tuple(pair for pair in self.unreaped if pair != (rank, incarnation))
            code = 1 if (rank, incarnation) in self.left else -9
            self.carry_out(self.controller.exited(rank, incarnation, code, self.standings))
        elif move.name == "loses patience":
            attempt, trouble = self.troubles[move.about]
            self.troubles = self.troubles[: move.about] + self.troubles[move.about + 1 :]
            if attempt == self.controller.job.attempt:
                self.carry_out(self.controller.failed_collective(trouble.generation, trouble.detail, self.standings))
        else:
            queue = self.up[rank, incarnation]
            self.up = {**self.up, (rank, incarnation): queue[1:]}
            if not queue[1:]:
                del self.up[rank, incarnation]
            self._on_frame(rank, incarnation, queue[0])

    def _on_frame(self, rank: int, incarnation: int, frame: m.FromRank) -> None:
        controller = self.controller
        match frame:
            case m.Started():
                self.carry_out(controller.started(rank, incarnation, frame))
            case m.Joined():
                self.carry_out(controller.joined(rank, incarnation, frame))
            case m.Done(generation=generation, step=step, over=over):
                self.carry_out(controller.done(rank, incarnation, generation, step=step, over=over))
            case m.Reached(generation=generation):
                self.carry_out(controller.reached(rank, incarnation, generation))
            case m.LoopOver(generation=generation):
                self.carry_out(controller.finish(rank, incarnation, generation))
            case m.Trouble():
                self.troubles += ((self.controller.job.attempt, frame),)
            case m.LeftByException(code=code):
                self.carry_out(controller.raised(rank, incarnation, code, self.standings))
            case m.Damaged(generation=generation, detail=detail):
                self.carry_out(controller.damaged(rank, incarnation, generation, detail, self.standings))
            case m.Anomaly():
                self.carry_out(controller.anomaly(rank, incarnation, frame))
                self.chains = self._chains() if self.program.skips else self.chains
            case m.Computed():
                self.carry_out(controller.computed(rank, incarnation, frame))
            case m.Differs():
                self.carry_out(controller.differs(rank, incarnation, frame))
            case m.Late():
                self.carry_out(controller.late(rank, incarnation, frame))
            case m.Captured(last=generation):
                self._captured(rank, generation)
            case m.Offer(target=other) | m.Pull(source=other):
                if frame.generation == controller.job.generation and controller.job.incarnations[rank] == incarnation:
                    self.carry_out([Send(other, frame)])
            case _:
                raise ViolationError(f"rank {rank} sent {type(frame).__name__}, which the simulation does not know")

    def _captured(self, rank: int, generation: int) -> None:
        """As ``launch/agent/last_save.py`` has it."""
        savers = ttp.savers(self.controller.job, generation)
        self.captured |= {(generation, rank)}
        if savers and {r for g, r in self.captured if g == generation} == {r for group in savers for r in group}:
            self.carry_out(self.controller.saved_last("saved"))

    # -- what is saved

    def _savable(self) -> int:
        """The newest update that all ranks were READY for: their snapshots of what they began it with are whole."""
        if not self.layout.saves or self.controller.job.stage not in (Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED):
            return -1
        return min(commits - (phase < Phase.READY) for commits, phase in self.standings)

    def _tell_what_is_saved(self) -> None:
        """As the agent does, see ``launch/agent/saves.py``."""
        if not self.layout.saves:
            return
        job, accumulate = self.controller.job, self.program.accumulate
        job.can_go_back = lambda: bool(self.saved)
        job.newest_saved = lambda: max(self.saved, default=-1)
        job.saved_before = lambda step: any(commits * accumulate <= step for commits in self.saved)

    def _all_start_again(self, detail: Mapping[str, object]) -> None:
        """What they knew is gone. Their records stay until the new ones write theirs."""
        if detail["state_lost"]:
            checks.require(bool(self.saved), "all start again, and nothing is saved")
            self.source = self.saved[0]
        self.high_water = min(self.high_water, self.source)
        size = self.layout.world_size
        self.logs, self.published = [(0, ())] * size, [()] * size
        self.collectives, self.tail_calls = {}, {}
        self.tail_results = {key: result for key, result in self.tail_results.items() if key[0] <= self.source}
        self.missing = frozenset(key for key in self.missing if key[0] <= self.source)

    def carry_out(self, commands: Sequence[Command]) -> None:
        """Does what the controller says, as the agent does."""
        wrong = False
        for command in commands:
            match command:
                case Note(kind="replicas_differ"):
                    wrong = True
                case Note(kind="late_anomaly", detail=detail) if detail["goes_back"]:
                    wrong, since = True, detail["step"]
                    assert isinstance(since, int)
                    self.saved = tuple(commits for commits in self.saved if commits * self.program.accumulate <= since)
                case Note(kind="restart_all", detail=detail):
                    if detail["state_lost"] and not wrong:
                        checks.check_going_back(self)
                    self._all_start_again(detail)
                case RaiseStop(generation=generation):
                    assert generation > self.stop_generation
                    self.stop_generation = generation
                case SetPause(step=step):
                    self.pause_at = step if step >= 0 else None
                case Send(rank=rank, message=message):
                    if self.ranks[rank].alive and self.ranks[rank].connected:
                        self.down[rank] += (message,)
                        if isinstance(message, m.Plan):
                            checks.check_plan(self, message)
                case Spawn():
                    self._spawn(command)
                case Kill(rank=rank):
                    checks.check_kill(self, rank)
                    self.kill(rank)
                    self.fenced |= {(rank, self.ranks[rank].incarnation)}
                case EndJob():
                    self.ended = command
                    checks.check_end(self)
                    for rank in range(self.layout.world_size):
                        self.writable(rank).hear_of_the_end(self)
                case _:
                    pass

    def _spawn(self, command: Spawn) -> None:
        rank, old = command.rank, self.ranks[command.rank]
        if command.joining and old.alive:
            raise ViolationError(f"rank {rank} is alive and was replaced")
        if old.alive and old.incarnation >= 0 and self.driver.two_witnesses:
            self.unreaped += ((rank, old.incarnation),)
        self.unseen = tuple(pair for pair in self.unseen if pair[0] != rank)
        self.down[rank] = ()
        program = self.program
        machine = self.driver.rank(
            rank,
            generation=self.controller.job.generation,
            joining=command.joining,
            optimizers=program.optimizers,
            undo=program.undo,
            skips=program.skips,
        )
        self.ranks[rank] = SimRank(rank, command.incarnation, machine)
        self.ranks[rank].prepare(self)

    # -- what ranks see of the world

    def greet(self, sender: SimRank) -> None:
        """The agent gets a Hello; it answers at once, so that this is one transition."""
        if not self.controller.job.aware:
            self._own_controller()
        self.carry_out(self.controller.greeted(sender.rank, sender.incarnation))

    def send(self, sender: SimRank, *frames: m.FromRank) -> None:
        """Puts frames on their way to the agent, in order."""
        key = sender.rank, sender.incarnation
        self.up = {**self.up, key: (*self.up.get(key, ()), *frames)}

    def all_reached(self, rank: int, target: Standing) -> bool:
        """Whether the barrier at ``target`` is open for ``rank``."""
        members = self.table.peers(rank) if self.driver.barrier_over_replicas else range(self.layout.world_size)
        return all(self.standings[member] >= target for member in members)

    def publish(self, rank: int, commits: int, own: Own) -> None:
        """Writes into the rank's arena; the last four publications are kept."""
        pair = (commits, own)
        if pair not in self.published[rank][-1:]:
            self.published[rank] = (*self.published[rank], pair)[-4:]

    def enter(self, who: SimRank, group: int, what: tuple[Any, ...], value: int) -> None:
        """``who`` calls a collective. The n-th call of a group in a generation must be the same one on all members."""
        key = (who.machine.generation, group, who.calls[group])
        present = self.collectives.get(key)
        if present is None:
            present = Collective(what, ())
        if present.what != what:
            raise ViolationError(f"rank {who.rank} calls {what} where the others call {present.what}")
        inputs = tuple(sorted((*present.inputs, (who.rank, value))))
        self.collectives = {**self.collectives, key: present._replace(inputs=inputs)}

    def complete(self, who: SimRank, group: int) -> bool:
        """Whether all members have entered the collective in which ``who`` waits."""
        present = self.collectives.get((who.machine.generation, group, who.calls[group]))
        return present is not None and len(present.inputs) == len(self.members(group))

    def leave(self, who: SimRank, group: int) -> tuple[tuple[int, int], ...]:
        """The inputs of all members, in the order of ranks; ``who`` goes on."""
        key = (who.machine.generation, group, who.calls[group])
        present = self.collectives[key]
        who.calls = {**who.calls, group: who.calls[group] + 1}
        self.collectives = dict(self.collectives)
        left = present.left | {who.rank}
        if len(left) == len(present.inputs):
            del self.collectives[key]
        else:
            self.collectives[key] = present._replace(left=left)
        return present.inputs

    # -- the tail

    def log(self, rank: int, commits: int, index: int, value: int) -> None:
        """Publishes the input of one more collective of the tail, unless it is published."""
        of, entries = self.logs[rank]
        checks.require(of == commits, f"rank {rank} logs for the tail of {commits}, and its log is of {of}")
        if all(entry[0] != index for entry in entries):
            self.logs[rank] = (of, (*entries, (index, value, None)))

    def enter_tail(self, who: SimRank, commits: int, index: int) -> None:
        """``who`` calls a collective of the tail over the group."""
        key = (who.machine.generation, commits, index)
        inputs = dict(self.tail_calls.get(key, ())) | {who.rank: values.logged(who.rank, commits, index)}
        self.tail_calls = {**self.tail_calls, key: tuple(sorted(inputs.items()))}

    def tail_complete(self, who: SimRank, commits: int, index: int) -> bool:
        """Whether all members have entered it."""
        inputs = self.tail_calls.get((who.machine.generation, commits, index), ())
        return len(inputs) == len(self.layout.calls(commits - 1)[index])

    def leave_tail(self, who: SimRank, commits: int, index: int) -> int:
        """Its result."""
        return sum(value for _, value in self.tail_calls[who.machine.generation, commits, index])

    def exchanged(self, who: SimRank, commits: int, index: int) -> int | None:
        """The result of a collective by what its members have published, see ``tail_collectives.py``.
        None: it is not there yet.
        """
        members = self.layout.calls(commits - 1)[index]
        found = {rank: entry for rank in members if (entry := self._logged(rank, commits, index)) is not None}
        finishers, adder = self._finishers(who, members), self._adder(who, members)
        if who.rank != adder:
            told = found[adder][2] if adder in found else None
            if not isinstance(told, str):
                return told
        if any(rank not in found for rank in finishers):
            return None
        return sum(found[rank][1] if rank in found else values.NEUTRAL for rank in members)

    def _finishers(self, who: SimRank, members: Sequence[int]) -> list[int]:
        plan = getattr(who.machine.state, "duty", None)
        assert isinstance(plan, m.Plan)
        return [rank for rank in members if rank in plan.finishers]

    def _adder(self, who: SimRank, members: Sequence[int]) -> int:
        return self._finishers(who, members)[0]

    def take_result(self, who: SimRank, commits: int, index: int, result: int) -> None:
        """``who`` has the result. It publishes that, if it came from the logs, and else that it has one."""
        members = self.layout.calls(commits - 1)[index]
        if any(self._logged(rank, commits, index) is None for rank in members):
            self.missing |= {(commits, index)}
        known = self.tail_results.get((commits, index), result)
        text = f"collective {index} after update {commits} gave rank {who.rank} another result"
        checks.require(known == result, text)
        undisturbed = sum(values.logged(rank, commits, index) for rank in members)
        checks.require(result == undisturbed or (commits, index) in self.missing, text + " than an undisturbed run")
        self.tail_results = {**self.tail_results, (commits, index): result}
        of, entries = self.logs[who.rank]
        over = None if self.driver.silent_when_over else OVER
        told = result if who.mode is Mode.EXCHANGE and who.rank == self._adder(who, members) else over
        self.logs[who.rank] = (of, tuple((i, v, told if i == index else r) for i, v, r in entries))

    def _logged(self, rank: int, commits: int, index: int) -> tuple[int, int, int | str | None] | None:
        of, entries = self.logs[rank]
        return next((entry for entry in entries if entry[0] == index), None) if of == commits else None

    def leave_with_error(self, who: SimRank) -> None:
        """The process ends with an error: nobody could explain a fault, or the user's program is wrong."""
        self.left |= {(who.rank, who.incarnation)}
        self._gone(who)

    def members(self, group: int) -> Sequence[int]:
        """The ranks of a group; -1 is the world."""
        return range(self.layout.world_size) if group == WORLD else self.groups[group]

    def writable(self, rank: int) -> SimRank:
        """The rank, as this world's own copy."""
        self.ranks[rank] = self.ranks[rank].copy()
        return self.ranks[rank]

    # -- branching

    def _own_controller(self) -> Controller:
        """The controller, as this world's own copy."""
        self.controller, self._controller_key = self.controller.copy(), None
        self._tell_what_is_saved()
        return self.controller

    def copy(self) -> World:
        """An independent world in the same state."""
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        for name in ("standings", "logs", "published", "words", "ranks", "down"):
            setattr(new, name, list(getattr(self, name)))
        return new

    def key(self) -> int:
        """Equal for two worlds exactly if the same can happen in them (up to collisions of 64-bit hashes)."""
        if self._controller_key is None:
            self._controller_key = controller_key(self.controller)
        live = {rank.machine.generation for rank in self.ranks if rank.alive}
        calls = frozenset((key, call) for key, call in self.collectives.items() if key[0] in live)
        parts = (
            self.budget, self.stop_generation, self.pause_at, tuple(self.standings), tuple(self.logs),
            tuple(self.published), tuple(self.words), self.left, self.raised,
            frozenset(each for each in self.handed_over if each[0] in live),
            tuple(rank.key() for rank in self.ranks),
            frozenset((k, tuple(map(frame_key, q))) for k, q in self.up.items()),
            tuple(tuple(map(frame_key, queue)) for queue in self.down),
            calls, frozenset((key, call) for key, call in self.tail_calls.items() if key[0] in live), self.missing,
            self.captured, self.troubles, frozenset(self.unseen), frozenset(self.unreaped), self.high_water,
            self.resumed_generation, self.ended is None, self.source, self.saved, self.differed,
            self._controller_key,
        )  # fmt: skip
        return hash(parts)


def frame_key(frame: Any) -> Any:
    """The frame as something hashable."""
    if isinstance(frame, m.Plan):
        copies = tuple(sorted(frame.copies.items()))
        return ("Plan", frame.generation, frame.commits, copies, frame.finishers, frame.replaced, frame.last)
    return (type(frame).__name__, *map(_hashable, msgspec.structs.astuple(frame)))


_POLICY_ONLY = frozenset(("policy", "replacements", "retries"))
"""Counters that decide nothing but when to give up, which no simulated job comes near."""
_FIXED = frozenset((
    "world_size", "replicas", "aware", "plain", "attempt", "can_go_back", "newest_saved", "saved_before", "uses_us",
))  # fmt: skip


def controller_key(controller: Controller) -> tuple[Any, ...]:
    """What decides the controller's behaviour, without the counters of its policy."""
    state = controller.job.__dict__
    return tuple(_hashable(state[name]) for name in state if name not in _POLICY_ONLY and name not in _FIXED)


def _hashable(value: Any) -> Any:
    kind = type(value)
    if kind is tuple and value and type(value[0]) is Round:
        return tuple(map(_hashable, value))
    if kind in _PLAIN:  # first, and for speed: most are
        return value
    if kind is dict:
        return frozenset((key, _hashable(item)) for key, item in value.items())
    if kind is set:
        return frozenset(value)
    if kind is list:
        return tuple(value)
    if kind is Round:
        return value.distance, _hashable(value.differ)
    if isinstance(value, msgspec.Struct):
        return frame_key(value)
    return value.key() if kind in (Holders, Leaving) else value


_PLAIN = frozenset((int, str, bool, tuple, type(None)))
