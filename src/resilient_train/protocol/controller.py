"""The controller: decides, for the whole job, what happens after a fault.

A pure state machine. The agent calls one method per thing that happened and carries out the commands it gets back;
the simulation does the same in virtual time. The controller is never on the path of a healthy step.

Stages::

    STARTING --all Started--> RUNNING --fault--> RECOVERING --all Done--> RUNNING --all Finish--> FINISHED
                                          ^          | fault: next generation
                                          +----------+
    any --give up, user error--> LEAVING --saved, or there is nothing to save--> ENDED
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence

from resilient_train.errors import ConfigError
from resilient_train.protocol.commands import Command, EndJob, Kill, Note, RaiseStop, Send, Spawn
from resilient_train.protocol.disagreement import sentence
from resilient_train.protocol.holders import Holders
from resilient_train.protocol.leaving import Leaving, choose, why_none
from resilient_train.protocol.messages import Differs, End, Finished, Joined, Plan, Resume, Started, Stop
from resilient_train.protocol.patience import Patience
from resilient_train.protocol.policy import Policy, why_give_up
from resilient_train.protocol.replicas import ReplicaTable, agreed
from resilient_train.protocol.standing import Standing, standing_of
from resilient_train.protocol.verdict import Account, decide

_NOBODY_LEFT = "no living rank holds a replica of its state, so it cannot be rebuilt"
EXIT_UNRECOVERABLE = 75
"""The job could not go on after a fault: EX_TEMPFAIL, "try again later", which schedulers may requeue."""


class Stage(enum.StrEnum):
    """Where the job as a whole stands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    FINISHED = "FINISHED"
    LEAVING = "LEAVING"
    ENDED = "ENDED"


class Controller:
    """See the module's text. Methods return the commands to carry out, in order."""

    def __init__(self, world_size: int, policy: Policy | None = None) -> None:
        assert world_size >= 1
        self.world_size = world_size
        self.policy = policy or Policy()
        self.stage = Stage.STARTING
        self.generation = 0
        self.attempt = 0
        self.restarts = 0
        self.aware = False
        self.can_go_back: Callable[[], bool] = lambda: False
        """Whether all ranks could start again from a saved state, or the loss of theirs costs nothing that was ever to
        be kept. Asked only where nothing else is left.
        """
        self.uses_us: Callable[[], bool] = lambda: False
        """Whether the script imports this library, as far as its text tells. Asked where no rank has said Hello yet."""
        self.incarnations = [0] * world_size
        self.replicas = ReplicaTable(world_size)
        self.plan: Plan | None = None
        self.leaving: Leaving | None = None
        self._started: dict[int, Started] = {}
        self._joined: dict[int, Joined] = {}
        self._done: set[int] = set()
        self._finished: set[int] = set()
        self._evidence: dict[int, Standing] = {}
        self._patience = Patience(self.policy)
        self._holders = Holders(self.replicas.groups)
        self._over = False
        """Some rank's loop has ended, see ``messages.Resume``."""
        self._differing: dict[int, Differs] = {}

    def launch(self) -> list[Command]:
        """The job begins: every rank is started."""
        return [Spawn(rank, 0, joining=False, attempt=0) for rank in range(self.world_size)]

    def greeted(self, rank: int, incarnation: int) -> list[Command]:
        """A rank said Hello: its script uses this library."""
        if self._current(rank, incarnation):
            self.aware = True
        return []

    def started(self, rank: int, incarnation: int, message: Started) -> list[Command]:
        """A rank is ready for its first step."""
        if not self._current(rank, incarnation) or self.stage is not Stage.STARTING:
            return []
        self._started[rank] = message
        if len(self._started) < self.world_size:
            return []
        try:
            self.replicas = agreed(self._started)
        except ConfigError as error:
            return self.refuse(str(error))
        self._holders = Holders(self.replicas.groups)
        self.stage = Stage.RUNNING
        note = Note("started", detail={"world_size": self.world_size, "step": message.step})
        return [note, *self._to_all(Resume(self.generation))]

    def lost(
        self, rank: int, incarnation: int, reason: str, standings: Sequence[Standing], *, code: int = EXIT_UNRECOVERABLE
    ) -> list[Command]:
        """A rank's process died. ``standings`` are all ranks' step records at that moment."""
        if not self._current(rank, incarnation) or self.stage in (Stage.ENDED, Stage.FINISHED):
            return []
        if self.stage is Stage.STARTING:
            return self._restart_all(rank, f"rank {rank} {reason} before the first step", code)
        if self.stage is Stage.LEAVING:
            return self._gone(rank)
        self._evidence[rank] = standings[rank]
        self._patience.reached(max(standing.commits for standing in standings))
        give_up = why_give_up(self.policy, restarts=self.restarts, lost=1, stuck=self._patience.died(rank))
        if give_up:
            return self._give_up(code, f"rank {rank} was lost ({reason}), and {give_up}", lost=rank)
        self._holders.lost(rank)
        if self._holders.gone():
            return self._go_back(rank, f"rank {rank} was lost ({reason}); {_NOBODY_LEFT}")
        self.restarts += 1
        self.incarnations[rank] += 1
        # The fork comes last: it takes the agent longer than all the rest, and the survivors have work to do meanwhile.
        spawn = Spawn(rank, self.incarnations[rank], joining=True, attempt=self.attempt)
        return [*self._begin((rank,), f"rank {rank} {reason}"), spawn]

    def _begin(self, lost: tuple[int, ...], reason: str, *, kind: str = "fault") -> list[Command]:
        self.generation += 1
        self.stage = Stage.RECOVERING
        self.plan = None
        self._joined.clear()
        self._done.clear()
        self._over = False
        self._finished.clear()
        stop = Stop(self.generation, lost, reason)
        return [
            RaiseStop(self.generation),
            Note(kind, rank=lost[0] if lost else -1, detail={"lost": list(lost), "reason": reason}),
            *self._to_all(stop),
        ]

    def start_again(self, rank: int, incarnation: int, reason: str) -> list[Command]:
        """What the ranks were to start from is not usable; the agent knows another source, or none."""
        if not self._current(rank, incarnation) or self.stage is not Stage.STARTING:
            return []
        return self._restart_all(rank, f"what was saved can't be taken up: {reason}", EXIT_UNRECOVERABLE)

    def _go_back(self, rank: int, reason: str) -> list[Command]:
        """The job's present state is lost. All ranks start again from a saved one, if there is any."""
        if self.leaving is not None or not self.can_go_back():
            return self._end(self.leaving.code if self.leaving else EXIT_UNRECOVERABLE, reason)
        self.stage = Stage.STARTING
        self.plan = None
        self._patience.start_again()
        for memory in (self._joined, self._done, self._finished, self._evidence):
            memory.clear()
        return self._restart_all(rank, reason, EXIT_UNRECOVERABLE, state_lost=True)

    def _restart_all(self, rank: int, reason: str, code: int, *, state_lost: bool = False) -> list[Command]:
        give_up = why_give_up(self.policy, restarts=self.restarts, lost=1, stuck=0)
        if not (self.policy.restart_on_error or self.aware or self.uses_us()):
            give_up = "its script has no Session, or that is switched off (--max-restarts N would restart it)"
        if give_up:
            return self._end(code, f"{reason}, and {give_up}")
        self.restarts += 1
        self.attempt += 1
        self._started.clear()
        self.incarnations = [incarnation + 1 for incarnation in self.incarnations]
        detail = {"reason": reason, "attempt": self.attempt, "state_lost": state_lost}
        note = Note("restart_all", rank=rank, detail=detail)
        spawns = [Spawn(r, self.incarnations[r], joining=False, attempt=self.attempt) for r in range(self.world_size)]
        return [note, *spawns]

    def exited(
        self, rank: int, incarnation: int, code: int, standings: Sequence[Standing], how: str = ""
    ) -> list[Command]:
        """A rank's process ended; ``code`` is negative for a signal, as in ``subprocess``. ``how`` it failed, if it is
        known, stands behind "rank N failed".
        """
        if self.stage is Stage.ENDED:
            return []
        if not self._current(rank, incarnation):
            # The rank was taken for lost and replaced, but it had left by os._exit(code): a decision, not a fault. Not
            # so where all were started again: what the others' ends were then does not count.
            by_itself = code >= 0 and incarnation == self.incarnations[rank] - 1
            if not by_itself or self.stage in (Stage.LEAVING, Stage.STARTING):
                return []
            return self._give_up(code or 1, _left(rank, code, how))
        if self.stage is Stage.LEAVING:
            return self._gone(rank)
        if code < 0 and self.stage is not Stage.FINISHED:
            return self.lost(rank, incarnation, f"was killed by signal {-code}", standings, code=128 - code)
        if code == 0 and self.stage in (Stage.STARTING, Stage.FINISHED):
            return []
        if code == 0:
            return self._give_up(1, _left(rank, code, how), lost=rank)
        if self.stage is Stage.STARTING and self.policy.restart_on_error:
            return self._restart_all(rank, f"rank {rank} exited with code {code} before the first step", code)
        self._patience.reached(max((standing.commits for standing in standings), default=0))
        when = " after the training" if self.stage is Stage.FINISHED else ""
        return self._give_up(code if code > 0 else 128 - code, _left(rank, code, how, when), lost=rank)

    def failed_collective(
        self, generation: int, detail: str, standings: Sequence[Standing] = (), *, culprit: int = -1
    ) -> list[Command]:
        """A rank's collective failed and no death explained it in time: everyone rebuilds and redoes the step.

        It may have been a collective of the recovery itself (a repetition in the tail, the building of a group): then
        nobody else would ever end that recovery. ``culprit``: whose device says so; -1 where nobody knows.
        """
        if generation != self.generation or self.stage not in (Stage.RUNNING, Stage.RECOVERING):
            return []
        if not self.policy.rebuild and self.stage is Stage.RUNNING:
            off = "rebuilding process groups is switched off (MS_ENABLE_TFT has no HCCE:1)"
            return self._give_up(EXIT_UNRECOVERABLE, f"a collective failed ({detail}), and {off}")
        if self._fails_again(standings):
            if culprit >= 0 and not self._holders.last({culprit}):
                return self.fence({culprit}, detail)
            return self._give_up(EXIT_UNRECOVERABLE, f"collectives keep failing: {detail}")
        return self._begin((), f"a collective failed: {detail}")

    def unfinishable(self, generation: int, reason: str) -> list[Command]:
        """The tail that a fault has cut needs what only a dead rank knew: the job ends with its state saved."""
        if generation != self.generation or self.stage is not Stage.RECOVERING or self.plan is None:
            return []
        self._patience.reached(self.plan.commits)
        return self._give_up(EXIT_UNRECOVERABLE, reason)

    def damaged(
        self, rank: int, incarnation: int, generation: int, detail: str, standings: Sequence[Standing] = ()
    ) -> list[Command]:
        """A rank's memory lost data (UCE): it copies what it lost from a replica, or all redo the step.

        Where that happens again and again without a committed update in between, its process is replaced.
        """
        if not self._current(rank, incarnation) or generation != self.generation:
            return []  # a newer recovery is under way, in which the rank says itself what it still holds
        if self.stage not in (Stage.RUNNING, Stage.RECOVERING):
            return []
        if self._fails_again(standings):
            if self._holders.last({rank}):
                return self._give_up(EXIT_UNRECOVERABLE, f"rank {rank} keeps losing memory: {detail}")
            return self.fence({rank}, detail)
        return self._begin((), f"rank {rank}: {detail}")

    def fence(self, ranks: Collection[int], reason: str, standings: Sequence[Standing] = ()) -> list[Command]:
        """Gives up processes that may still run: they are killed, and lost when their death is seen. Nobody else
        decides that.

        Never the last one that has the state of a replica group. Where only such are named, a recovery without a loss
        begins, which they may hear; one that is under way goes on waiting for them.
        """
        if self.stage not in (Stage.RUNNING, Stage.RECOVERING, Stage.LEAVING):
            return []
        spared = self._holders.last(ranks)
        commands: list[Command] = []
        for rank in sorted(set(ranks) - spared):
            self._holders.killed(rank)
            commands += [Note("fenced", rank=rank, detail={"reason": reason}), Kill(rank, reason)]
        if not spared:
            return commands
        named = ", ".join(map(str, sorted(spared)))
        only = f"rank {named} {reason}; nobody else has its state"
        commands.append(Note("spared", rank=min(spared), detail={"ranks": sorted(spared), "reason": reason}))
        if self.stage is not Stage.RUNNING or len(spared) < len(set(ranks)):
            return commands  # others are lost, or a recovery is under way: it is asked there
        if self._fails_again(standings):
            return [*commands, *self._give_up(EXIT_UNRECOVERABLE, only)]
        return [*commands, *self._begin((), only)]

    def _fails_again(self, standings: Sequence[Standing]) -> bool:
        self._patience.reached(max((standing.commits for standing in standings), default=0))
        return self._patience.failed()

    def joined(self, rank: int, incarnation: int, message: Joined) -> list[Command]:
        """A rank takes part in the recovery. The last one to join triggers the plan."""
        if not self._current(rank, incarnation) or self.stage not in (Stage.RECOVERING, Stage.LEAVING):
            return []
        if message.generation != self.generation or rank in self._left_out():
            return []
        self._holders.joined(rank, holds=message.holds)
        self._joined[rank] = message
        if self.stage is Stage.LEAVING:
            return self._save_last()
        return self._agree() if len(self._joined) == self.world_size else []

    def _agree(self) -> list[Command]:
        accounts = {rank: Account(standing_of((j.commits, j.phase)), j.holds) for rank, j in self._joined.items()}
        groups = {j.groups for j in self._joined.values()}
        verdict = decide(accounts, self._evidence)
        copies = self.replicas.assign_sources(verdict.empty, verdict.holders)
        uncovered = sorted(set(verdict.empty) - set(copies))
        if uncovered:
            return self._go_back(uncovered[0], f"ranks {uncovered} have no state; {_NOBODY_LEFT}")
        self.plan = Plan(
            generation=self.generation,
            commits=verdict.commits,
            copies=copies,
            finishers=tuple(verdict.finishers),
            replaced=tuple(sorted(self._evidence)),
            last=self.leaving is not None,
        )
        detail: dict[str, object] = {
            "commits": verdict.commits,
            "copies": {str(target): source for target, source in copies.items()},
            "rolled_forward": verdict.forward,
            "redone": verdict.redone,
            "groups": len(groups),
        }
        return [Note("plan", detail=detail), *self._to_all(self.plan)]

    def waits_for(self) -> list[int]:
        """The ranks that the present stage waits for."""
        everybody = set(range(self.world_size)) - self._left_out()
        if self.stage is Stage.STARTING:
            return sorted(everybody - self._started.keys())
        if self.stage in (Stage.RECOVERING, Stage.LEAVING):
            return sorted(everybody - (self._done if self.plan is not None else self._joined.keys()))
        return sorted(everybody - self._finished) if self.stage is Stage.RUNNING and self._finished else []

    def on_its_way(self, rank: int) -> str:
        """What a process does that has not come to its loop; empty if it has."""
        if self.stage is Stage.STARTING:
            return "" if rank in self._started else "STARTING"
        return "JOINING" if rank in self._holders.absent else ""

    def awaited(self) -> list[int]:
        """Survivors that a recovery waits for: they have heard of it, or should have, and have not joined."""
        if self.stage not in (Stage.RECOVERING, Stage.LEAVING) or self.plan is not None:
            return []
        return [rank for rank in self.waits_for() if rank not in self._holders.absent]

    def done(self, rank: int, incarnation: int, generation: int, *, over: bool = False) -> list[Command]:
        """A rank stands where the plan wants it. The last one lets everybody go. ``over``: see ``messages.Done``."""
        if not self._current(rank, incarnation) or generation != self.generation or self.plan is None:
            return []
        self._done.add(rank)
        self._holders.done(rank)
        self._over = self._over or over
        if len(self._done) < self.world_size or self.stage is not Stage.RECOVERING:
            return []
        self.stage = Stage.RUNNING
        self._evidence.clear()
        self._patience.reached(self.plan.commits)
        return [
            Note("resumed", detail={"commits": self.plan.commits}),
            *self._to_all(Resume(self.generation, self._over)),
        ]

    def finish(self, rank: int, incarnation: int, generation: int) -> list[Command]:
        """A rank's loop is over. The last one lets everybody leave."""
        if not self._current(rank, incarnation) or generation != self.generation or self.stage is not Stage.RUNNING:
            return []
        self._finished.add(rank)
        if len(self._finished) < self.world_size:
            return []
        self.stage = Stage.FINISHED
        return [Note("finished"), *self._to_all(Finished())]

    def expired(
        self, generation: int, standings: Sequence[Standing], limit_s: float, stopped: Collection[int] = ()
    ) -> list[Command]:
        """A phase of a recovery has lasted so long. ``stopped``: ranks whose process does not run, and may be
        continued.

        Before the plan: who has not joined is fenced. After it all are asked anew; who does not come is fenced then.
        """
        if generation != self.generation or self.stage not in (Stage.RECOVERING, Stage.LEAVING):
            return []
        if self.plan is not None:
            told = (
                f"ranks {self.waits_for()} did not come to the start of update {self.plan.commits} within {limit_s:g} s"
            )
            if self._fails_again(standings):
                return self._give_up(EXIT_UNRECOVERABLE, f"recoveries keep failing: {told}")
            return self._begin((), told)
        silent = set(self.waits_for())
        late = f"did not join the recovery within {limit_s:g} s"
        commands = self.fence(silent, late)
        holding = self._holders.last(silent)
        if self.stage is Stage.LEAVING or not holding or holding.issubset(stopped) or holding < silent:
            return commands
        return self._go_back(min(holding), f"ranks {sorted(holding)} {late}; {_NOBODY_LEFT}")

    def differs(self, rank: int, incarnation: int, message: Differs) -> list[Command]:
        """A rank does not hold what its replicas hold. When all of them have said what they do hold, the job ends."""
        if not self._current(rank, incarnation) or self.stage is Stage.ENDED:
            return []
        self._differing[rank] = message
        return self.disagreed() if self._differing.keys() >= set(self.replicas.peers(rank)) else []

    def disagreed(self) -> list[Command]:
        """Replicas differ, and who has not said by now what it holds will not."""
        if self.stage is Stage.ENDED:
            return []
        group = self.replicas.peers(next(iter(self._differing)))
        text = sentence(group, self._differing)
        return [Note("replicas_differ", detail={"ranks": list(group), "reason": text}), *self.stop(2, text)]

    def strayed(self, rank: int, incarnation: int, text: str) -> list[Command]:
        """The process that takes the rank's place does not make its collectives. Another would not either."""
        if not self._current(rank, incarnation) or self.stage is not Stage.RECOVERING:
            return []
        return self._give_up(2, text, lost=rank)

    def refuse(self, text: str) -> list[Command]:
        """The user's Session is wrong: end with exit code 2."""
        return self.stop(2, text)

    def leave(self, code: int, reason: str) -> list[Command]:
        """Somebody wants the job to end and its state to be saved. Asked twice: to end at once."""
        if self.stage not in (Stage.RUNNING, Stage.RECOVERING) or self.leaving or not self.policy.save_last:
            return self.stop(code, reason)
        self.leaving = Leaving(code, reason, alone=False)
        return self._begin((), reason, kind="leaving")

    def hurry(self) -> list[Command]:
        """Half of the time is gone that a job has which was asked to end: its state is saved without the ranks that
        have not come, if the others have all of it.
        """
        leaving = self.leaving
        if leaving is None or leaving.alone or self.stage is not Stage.RECOVERING or self.plan is not None:
            return []
        missing = set(range(self.world_size)) - set(self._joined)
        if not missing or choose(self._joined, self.replicas.groups) is None:
            return []
        self.leaving = Leaving(leaving.code, leaving.reason, alone=True)
        self.leaving.gone = missing
        named = ", ".join(map(str, sorted(missing)))
        return self._survive((), f"{leaving.reason}, and rank {named} has not come in half of the time that there is")

    def _give_up(self, code: int, reason: str, *, lost: int = -1) -> list[Command]:
        """Nothing brings the job back. Whoever lives saves the state, unless nothing was trained."""
        if lost >= 0:
            self._holders.lost(lost)
        covered = not self._holders.gone()
        trained = self.stage in (Stage.RUNNING, Stage.RECOVERING) and self._patience.furthest > 0
        if not (trained and covered and self.policy.save_last):
            return self._end(code, reason)
        first = self.leaving  # asked to leave, and then something went wrong: the answer stays what was asked for
        self.leaving = Leaving(first.code if first else code, first.reason if first else reason, alone=True)
        self.leaving.gone = set(self._holders.absent)
        return self._survive((lost,) if lost >= 0 else (), reason)

    def _survive(self, lost: tuple[int, ...], reason: str) -> list[Command]:
        commands = self._begin(lost, reason, kind="leaving")
        self.stage = Stage.LEAVING
        return commands

    def _gone(self, rank: int) -> list[Command]:
        """One more is lost while the survivors save: without it, if that is still possible."""
        if self.leaving is None or rank in self.leaving.gone:
            return []
        self.leaving.gone.add(rank)
        self._holders.lost(rank)
        uncovered = [group for group in self.replicas.groups if self.leaving.gone.issuperset(group)]
        if uncovered:
            told = f"{self.leaving.reason}; then rank {rank} was lost, and {why_none({}, uncovered)}"
            return self._end(self.leaving.code, told)
        if self.leaving.choice is None:
            self._joined.pop(rank, None)
            return self._save_last()
        self.leaving.choice = None
        return self._survive((rank,), f"rank {rank} was lost while the state was being saved")

    def _save_last(self) -> list[Command]:
        """All survivors have joined: who saves what. Nobody, if no whole state is left."""
        leaving = self.leaving
        if leaving is None or len(self._joined) + len(leaving.gone) < self.world_size:
            return []
        choice = choose(self._joined, self.replicas.groups)
        if choice is None:
            why = why_none(self._joined, self.replicas.groups)
            return self._end(leaving.code, f"{leaving.reason}; {why}")
        orders = leaving.orders(self.generation, choice, self.world_size)
        detail: dict[str, object] = {"commits": choice.commits, "savers": choice.savers, "exact": choice.exact}
        return [Note("save_last", detail=detail), *(Send(rank, order) for rank, order in orders.items())]

    def _left_out(self) -> set[int]:
        return self.leaving.gone if self.leaving else set()

    def savers(self, generation: int) -> tuple[tuple[int, ...], ...]:
        """Who writes the end-of-life checkpoint of ``generation``, by replica group; () if nobody does, or others."""
        if self.leaving is None or generation != self.generation or self.stage is Stage.ENDED:
            return ()
        if self.leaving.alone:
            return self.leaving.choice.savers if self.leaving.choice else ()
        return self.replicas.groups

    def saved_last(self, outcome: str) -> list[Command]:
        """The end-of-life checkpoint is there, or it failed; ``outcome`` tells people."""
        if self.leaving is None or self.stage is Stage.ENDED:
            return []
        return self._end(self.leaving.code, f"{self.leaving.reason}; {outcome}")

    def stop(self, code: int, reason: str) -> list[Command]:
        """The operator, or the machine, wants the job to end."""
        return [] if self.stage is Stage.ENDED else self._end(code, reason)

    def _end(self, code: int, reason: str) -> list[Command]:
        self.stage = Stage.ENDED
        return [
            Note("job_end", detail={"code": code, "reason": reason}),
            *self._to_all(End(code, reason)),
            EndJob(code, reason),
        ]

    def _current(self, rank: int, incarnation: int) -> bool:
        """Messages of a dead incarnation are dropped: they may arrive after the death that they were sent before."""
        return self.incarnations[rank] == incarnation

    def _to_all(self, message: Stop | Plan | Resume | Finished | End) -> list[Send]:
        return [Send(rank, message) for rank in range(self.world_size)]


def _left(rank: int, code: int, how: str, when: str = "") -> str:
    if code == 0:
        return f"rank {rank} left with exit code 0 while the others were still training"
    return f"rank {rank} failed{when}{how or f' with exit code {code}'}"
