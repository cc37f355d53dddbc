"""The controller: hears what happens to the job, and says what is done about it.

A pure state machine. The agent calls one method per thing that happened and carries out the commands it gets back;
the simulation does the same in virtual time. The controller is never on the path of a healthy step.

Stages::

    STARTING --all Started--> RUNNING --fault--> RECOVERING --all Done--> RUNNING --all Finish--> FINISHED
                                          ^          | fault: next generation
                                          +----------+
    RECOVERING, STARTING --all there, and a pause is wanted--> PAUSED --it ends--> RUNNING
    any --give up, user error--> LEAVING --saved, or there is nothing to save--> ENDED

What happened becomes a ``Fault``, and a strategy takes it (``strategies/``). Where all refuse, the job ends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from resilient_train.errors import ConfigError
from resilient_train.protocol.commands import Command, Note, Spawn
from resilient_train.protocol.difference_report import Doubt, alone, evidence, sentence
from resilient_train.protocol.holders import Holders
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, NOBODY_LEFT, Job, Stage
from resilient_train.protocol.messages import (
    Anomaly,
    Computed,
    Differs,
    Finished,
    Held,
    HoldsNan,
    Joined,
    Late,
    MessageChannel,
    Plan,
    Started,
)
from resilient_train.protocol.neighbours import Judgement, Round, judge
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.replicas import agreed
from resilient_train.protocol.standing import Standing, standing_of
from resilient_train.protocol.verdict import Account, decide
from resilient_train.strategies import LADDER, rsc, tre, tsp, ttp
from resilient_train.strategies.base import Fault, Kind

_RUNS = (Stage.RUNNING, Stage.RECOVERING, Stage.PAUSED)


def _came_again(values: Sequence[float]) -> bool:
    """A norm or a loss was no number when its step was run again."""
    return len(values) > 1 and not math.isfinite(values[-1])


class Controller:
    """See the module's text. Methods return the commands to carry out, in order. ``job`` is to be read only."""

    def __init__(self, world_size: int, policy: Policy | None = None) -> None:
        self.job = Job(world_size, policy)
        self._differing: dict[int, tuple[int, Differs]] = {}
        """With the attempt in which it was said."""

    # -- the beginning

    def launch(self) -> list[Command]:
        """The job begins: every rank is started."""
        return [Spawn(rank, 0, joining=False, attempt=0) for rank in range(self.job.world_size)]

    def greeted(self, rank: int, incarnation: int) -> list[Command]:
        """A rank said Hello, at its Session or when it imported this library: its script uses it."""
        if self.job.current(rank, incarnation):
            self.job.aware = True
        return []

    def is_plain(self, rank: int, incarnation: int, reason: str) -> list[Command]:
        """This rank's Session is a plain loop."""
        if not self.job.current(rank, incarnation) or self.job.plain:
            return []
        self.job.plain = True
        told = Note("plain_loop", rank=rank, detail={"reason": reason})
        return [told, *self._mixed(rank)] if self.job.started else [told]

    def _mixed(self, rank: int) -> list[Command]:
        """``rank`` has said what its Session is, and another has said otherwise: each would wait for the other."""
        return self.stop(
            2, f"the Session of some ranks is a plain loop, and that of others is not (rank {rank} came last)"
        )

    def _without_one(self) -> list[Command]:
        """Some ranks have ended well without a first step. Scripts without a Session do; others wait there for them."""
        gone = self.job.never_started
        waiting = sorted(self.job.started.keys() - gone)
        if not (gone and waiting):
            return []
        text = f"ranks {sorted(gone)} exited with code 0 before the first step, and ranks {waiting} wait there"
        return self.stop(1, text)

    def started(self, rank: int, incarnation: int, message: Started) -> list[Command]:
        """A rank is ready for its first step."""
        job = self.job
        if not job.current(rank, incarnation) or job.stage is not Stage.STARTING:
            return []
        job.started[rank] = message
        if job.plain:
            return self._mixed(rank)
        if ends := self._without_one():
            return ends
        if len(job.started) < job.world_size:
            return []
        try:
            job.replicas = agreed(job.started)
        except ConfigError as error:
            return self.stop(2, str(error))
        if unequal := _unequal(job.started):
            return self.stop(2, unequal)
        job.holders = Holders(job.replicas.groups)
        job.step = message.step
        detail: dict[str, object] = {"world_size": job.world_size, "step": message.step}
        if len(job.replicas.groups) > 1:
            detail["replicas"] = [list(group) for group in job.replicas.groups]
        note = Note("started", detail=detail)
        if tsp.due(job):
            return [note, *tsp.stand(job)]
        job.stage = Stage.RUNNING
        return [note, *job.resume()]

    # -- faults

    def _fault(self, fault: Fault) -> list[Command]:
        """Down the ladder, to the first strategy that takes it."""
        commands: list[Command] = []
        if self.job.carries and fault.kind not in (Kind.AT_START, Kind.OWN):
            fault = Fault(Kind.OWN, fault.detail, fault.rank, f"{fault.detail}, and {self.job.carries}", 2)
        for strategy in LADDER:
            if fault.kind not in strategy.KINDS:
                continue
            reason = strategy.refuses(fault, self.job)
            if not reason:
                return [*commands, *strategy.begin(fault, self.job)]
            commands.append(Note("escalated", rank=fault.rank, detail={"strategy": strategy.NAME, "reason": reason}))
            fault = fault._replace(reason=reason)
        leaving = self.job.leaving
        return [*commands, *self.job.end(leaving.code if leaving else fault.code, fault.reason)]

    def lost(
        self, rank: int, incarnation: int, reason: str, standings: Sequence[Standing], *, code: int = EXIT_UNRECOVERABLE
    ) -> list[Command]:
        """A rank's process died. ``standings`` are all ranks' step records at that moment; ``code`` is the job's exit
        code if it ends by that before its first step. Behind that it is the same, whoever saw the death first.
        """
        job = self.job
        if not job.current(rank, incarnation) or job.stage in (Stage.ENDED, Stage.FINISHED):
            return []
        if job.stage is Stage.LEAVING:
            return ttp.lose(job, rank)
        if job.stage is Stage.STARTING:
            when = "" if job.plain else " before the first step"
            return self._fault(Fault(Kind.AT_START, reason, rank, f"rank {rank} {reason}{when}", code))
        job.evidence[rank] = standings[rank]
        job.retries.reached(max(standing.commits for standing in standings))
        job.retries.died(rank)
        job.holders.lost(rank)
        return self._fault(Fault(Kind.LOST, reason, rank))

    def exited(
        self, rank: int, incarnation: int, code: int, standings: Sequence[Standing], how: str = ""
    ) -> list[Command]:
        """A rank's process ended; ``code`` is negative for a signal, as in ``subprocess``. ``how`` it failed, if it is
        known, stands behind "rank N failed".
        """
        job = self.job
        if job.stage is Stage.ENDED:
            return []
        if not job.current(rank, incarnation):
            # The rank was taken for lost and replaced, but it had left by os._exit(code): a decision, not a fault. Not
            # so where all were started again: what the others' ends were then does not count.
            by_itself = code >= 0 and incarnation == job.incarnations[rank] - 1
            if not by_itself or job.stage in (Stage.LEAVING, Stage.STARTING):
                return []
            job.retries.reached(max((standing.commits for standing in standings), default=0))
            return self._fault(Fault(Kind.OWN, how, reason=_left(rank, code, how), code=code or 1))
        if job.stage is Stage.LEAVING:
            return ttp.lose(job, rank)
        if code < 0 and job.stage is not Stage.FINISHED:
            return self.lost(rank, incarnation, f"was killed by signal {-code}", standings, code=128 - code)
        if code == 0 and job.stage is Stage.STARTING:
            job.never_started.add(rank)
            return self._without_one()
        if code == 0 and job.stage is Stage.FINISHED:
            return []
        if code and job.stage is Stage.STARTING and job.policy.restart_on_error:
            told = f"rank {rank} exited with code {code} before the first step"
            return self._fault(Fault(Kind.AT_START, how, rank, told, code))
        job.retries.reached(max((standing.commits for standing in standings), default=0))
        when = " after the training" if job.stage is Stage.FINISHED else ""
        return self._ends(rank, 128 - code if code < 0 else code or 1, _left(rank, code, how, when))

    def _ends(self, rank: int, code: int, reason: str) -> list[Command]:
        """A rank's own end, or one that a new process of it would come to as well."""
        self.job.holders.lost(rank)
        return self._fault(Fault(Kind.OWN, reason, rank, reason, code))

    def raised(
        self, rank: int, incarnation: int, code: int, standings: Sequence[Standing], how: str = ""
    ) -> list[Command]:
        """A rank's script has failed, and the rank stays until what it holds is saved; ``how``: see ``exited``.

        Others may say the same, or fail by what this does to them: the first one counts.
        """
        job = self.job
        if not job.current(rank, incarnation) or job.stage not in _RUNS:
            return []
        job.retries.reached(max(standing.commits for standing in standings))
        reason = _left(rank, code, how)
        return self._fault(Fault(Kind.OWN, reason, rank, reason, code))

    def strayed(self, rank: int, incarnation: int, text: str) -> list[Command]:
        """The process that takes the rank's place does not do before its loop what the first one did. Another would not
        either.
        """
        if not self.job.current(rank, incarnation) or self.job.stage is not Stage.RECOVERING:
            return []
        return self._ends(rank, 2, text)

    def failed_collective(
        self, generation: int, detail: str, standings: Sequence[Standing] = (), *, culprit: int = -1
    ) -> list[Command]:
        """A rank's collective failed and no death explained it in time.

        It may have been a collective of the recovery itself (a repetition in the tail, the building of a group): then
        nobody else would ever end that recovery. ``culprit``: whose device says so; -1 where nobody knows.
        """
        if generation != self.job.generation or self.job.stage not in _RUNS:
            return []
        return self._fault(Fault(Kind.COLLECTIVE, detail, culprit, again=self._fails_again(standings)))

    def damaged(
        self, rank: int, incarnation: int, generation: int, detail: str, standings: Sequence[Standing] = ()
    ) -> list[Command]:
        """A rank's memory lost data (UCE)."""
        if not self.job.current(rank, incarnation) or generation != self.job.generation:
            return []  # a newer recovery is under way, in which the rank says itself what it still holds
        if self.job.stage not in _RUNS:
            return []
        self.job.holders.damaged(rank)
        return self._fault(Fault(Kind.MEMORY, detail, rank, again=self._fails_again(standings)))

    def anomaly(self, rank: int, incarnation: int, message: Anomaly) -> list[Command]:
        """A rank's norm or loss can't be right. Nobody has applied that update: the rank has not come to the barrier.

        Where another recovery has begun meanwhile, its redo is the one that counts.
        """
        job = self.job
        if not job.current(rank, incarnation) or job.stage is Stage.ENDED:
            return []
        commands = tre.write_down(rank, message, job)
        if message.again or message.generation != job.generation or job.stage is not Stage.RUNNING:
            return commands
        return [*commands, *self._fault(Fault(Kind.ANOMALY, tre.sentence(rank, message), rank))]

    def late(self, rank: int, incarnation: int, message: Late) -> list[Command]:
        """All is wrong since a step, as a rank has found out behind its update: all go back to a state from before it.

        Once for each step: what is found again was made by the script, and the machine is not to blame.
        """
        job, step = self.job, message.step
        if not job.current(rank, incarnation) or job.stage not in _RUNS:
            return []
        text = tre.late_sentence(rank, message)
        fault = Fault(Kind.LATE_ANOMALY, text, rank, reason=text, code=2)
        why_not = self._stays(message, fault)
        told_already = (job.attempt, step) in job.late_told
        commands: list[Command] = []
        if message.seen is not None and (not why_not or (message.seen.what, step) in job.anomalies):
            commands += tre.keep(message.seen, job)
        if why_not and told_already:
            return commands
        what = message.seen.what if message.seen is not None else ""
        detail: dict[str, object] = {"step": step, "what": what, "reason": message.reason, "goes_back": not why_not}
        commands.append(Note("late_anomaly", rank=rank, detail={**detail, "told": why_not or text}))
        if why_not:
            job.late_told.add((job.attempt, step))
            return commands
        job.gone_back_to.add(step)
        job.gone_back_until = max(job.gone_back_until, message.until)
        return [*commands, *self._fault(fault)]

    def holds_nan(self, rank: int, incarnation: int, message: HoldsNan) -> list[Command]:
        """A rank's state has become NaN. All go back if that is wanted; the others tell the same of theirs."""
        job = self.job
        if not job.current(rank, incarnation) or job.stage not in _RUNS:
            return []
        detail: dict[str, object] = {"commits": message.commits, "told": f"rank {rank} holds {message.told}"}
        detail |= {"without": message.without, "first": job.nan_told != job.attempt, "may_go_back": message.since >= 0}
        job.nan_told = job.attempt
        note = Note("holds_nan", rank=rank, detail=detail)
        if message.since < 0:
            return [note]
        saved = job.newest_without_nan()  # a state from before what has made it NaN, and perhaps a newer one
        since = saved if message.since < saved < message.step else message.since
        return [note, *self.late(rank, incarnation, Late(since, f"it holds {message.told}", until=message.step))]

    def _stays(self, message: Late, fault: Fault) -> str:
        """Why nobody goes back for that; empty if all do."""
        job, step = self.job, message.step
        if step in job.gone_back_to or (message.until >= 0 and step < job.gone_back_until):
            return f"{fault.detail}; all have gone back for that already"
        if message.seen is not None and (message.seen.what, step) in job.anomalies:  # also in an earlier run of the job
            return f"{fault.detail}; the step has been run again for that already"
        if any(step <= seen < message.until and _came_again(each) for (_, seen), each in job.anomalies.items()):
            return f"{fault.detail}; a step since then has been run again for it already"
        nothing = f"{fault.detail}; nothing of before is saved"
        if not job.can_go_back():
            return nothing
        return rsc.refuses(fault, job) or ("" if job.saved_before(step) else nothing)

    def carried(self, channel: MessageChannel) -> list[Command]:
        """Bodies send messages there that are received in those of other steps. From now on no step can run again."""
        if self.job.carries:
            return []
        them = f"messages from rank {channel.source} to rank {channel.target} ({channel.where})"
        self.job.carries = (
            f"{them} that are sent in the body of one step are received in that of another: what was on its way is "
            "lost, and nothing could bring it back"
        )
        told = (
            f"{them} are sent in the body of one step and received in that of another: a fault would lose them, so the "
            "next one ends the job (docs/how-to/after-the-update.md, Receive in the step that sends)"
        )
        detail = {"source": channel.source, "target": channel.target, "where": channel.where, "told": told}
        return [Note("message_carried", rank=channel.source, detail=detail)]

    def computed(self, rank: int, incarnation: int, message: Computed) -> list[Command]:
        """A rank has computed a window that is computed twice. When all have: again, or what has come of it."""
        job = self.job
        if not job.current(rank, incarnation) or message.generation != job.generation or job.stage is not Stage.RUNNING:
            return []
        job.computed[message.commits, rank] = message  # one rank may be a window ahead of what is heard of another
        told = {whose: each for (commits, whose), each in job.computed.items() if commits == message.commits}
        if len(told) < job.world_size:
            return []
        if message.commits != job.verified:
            return self._computed_once(message, told)
        for whose in told:
            del job.computed[message.commits, whose]
        return self._computed_of_others(message, told) if job.distance else self._verified(message, told)

    def _computed_once(self, message: Computed, told: Mapping[int, Computed]) -> list[Command]:
        """What comes next is from the inputs of a replica, where that is wanted and possible."""
        job = self.job
        if not job.policy.neighbours or max(map(len, job.replicas.groups)) == 1:
            return tre.compute_again(message, job)
        why_not = [each.unshared for each in told.values() if each.unshared]
        return [*self._unshared(why_not), *tre.compute_again(message, job, distance=0 if why_not else 1)]

    def _unshared(self, why_not: Sequence[str]) -> list[Command]:
        """Told once: each rank then computes twice from its own inputs, and no more."""
        if not why_not or self.job.unshared_told:
            return []
        self.job.unshared_told = True
        return [Note("unshared", detail={"reason": why_not[0]})]

    def _computed_of_others(self, message: Computed, told: Mapping[int, Computed]) -> list[Command]:
        """All have computed from the inputs of a replica. Who was wrong is asked when they have done so from their own:
        what comes to something else there has done so for another reason.
        """
        job = self.job
        if why_not := [each.unshared for each in told.values() if each.unshared]:
            return [*self._unshared(why_not), *tre.compute_again(message, job)]
        differ = tre.first_of_each_part(told, job.replicas.groups)
        rounds = (*job.rounds, Round(job.distance, differ))
        again = 2 if differ and len(rounds) == 1 else 0
        return tre.compute_again(message, job, distance=again, rounds=rounds)

    def _verified(self, message: Computed, told: Mapping[int, Computed]) -> list[Command]:
        job, found = self.job, tre.deviants(told)
        ranks = found.ranks
        detail: dict[str, object] = {"step": message.step, "ranks": ranks}
        commands: list[Command] = [Note("verified", detail=detail)]
        if not ranks:
            detail |= self._once_only(message.commits)
            return [*commands, *self._beside_neighbours(message, detail)]
        text = tre.deviation(found, told)
        detail |= {"reason": text, **tre.evidence(ranks, told)}
        commands.append(Note("deviates", rank=ranks[0] if found.located else -1, detail=detail))
        alone = found.located and len(ranks) < job.world_size
        if alone and set(ranks) <= set(job.given_up_at.get(message.commits, ranks)):
            job.given_up_at = {message.commits: ranks}
            return [*commands, *self._give_up_deviants(ranks, told, text)]
        # All of them, or one after the other: less likely machines than a script that does not compute the same, where
        # some came to the same once by chance. Who is new has one run only, so the others would be replaced in turns.
        if job.deviated_at != message.commits:  # it may have been machines all the same: the next run decides
            job.deviated_at = message.commits
            job.deviated_everywhere = found.located and not alone
            return [*commands, *tre.compute_again(message, job)]
        return [*commands, *self._all_back(text, message.commits)]

    def _once_only(self, commits: int) -> dict[str, object]:
        """For people, once: the first two runs differed on every rank, and the third one is like one of them."""
        job = self.job
        if job.deviated_at != commits or not job.deviated_everywhere or job.once_only_told:
            return {}
        job.once_only_told = True
        return {"everywhere": True}

    def _beside_neighbours(self, message: Computed, detail: dict[str, object]) -> list[Command]:
        """Each has come to the same twice. Have its replicas, from its inputs?

        What was trained is in doubt since they last had: it is not saved, and what was saved meanwhile is not to be
        gone on from, if there is something older. Where they never had, the script is the nearer guess.
        """
        job, rounds = self.job, self.job.rounds
        if not rounds:
            return []
        found = judge(job.replicas.groups, rounds)
        if not all(tre.deviants(each.differ).located for each in rounds):
            found = Judgement({}, tuple(sorted({rank for each in rounds for rank in each.differ})))
        told = {rank: frame for each in rounds for rank, frame in each.differ.items()}
        detail["beside"] = len(rounds)
        if not (found.wrong or found.unclear):
            job.neighbours_agreed = message.commits
            detail |= {"agreed": True, "commits": message.commits}
            return []
        ranks = sorted(found.unclear or found.wrong)
        text, why = tre.beside_neighbours(found, message.step)
        told_of = {"step": message.step, "ranks": ranks, "reason": text, **tre.evidence(ranks, told)}
        told_of |= {"beside_replicas": True}
        note = Note("deviates", rank=-1 if found.unclear else ranks[0], detail=told_of)
        if not found.unclear and max(found.wrong.values()) == 1 and all(rank in told for rank in ranks):
            return [note, *self._give_up_deviants(ranks, told, text)]
        if found.unclear and job.neighbours_agreed < 0:
            return [note, *self.stop(2, why)]
        since = "the beginning" if job.neighbours_agreed < 0 else f"update {job.neighbours_agreed}"
        doubt = f"{why}. What was trained since {since} is in doubt, and not saved: go on from a checkpoint of before"
        if not job.can_go_back():
            return [note, *self.stop(EXIT_UNRECOVERABLE, doubt)]
        trusted = job.agreed_step()
        note = Note("deviates", rank=note.rank, detail={**told_of, "trusted_until": trusted})
        if trusted >= 0:
            return [note, *self.stop(EXIT_UNRECOVERABLE, doubt)]
        # Nobody should start it again as it is.
        return [note, *self.stop(2, f"{doubt}. All that this job has saved is from behind that")]

    def _give_up_deviants(self, ranks: Sequence[int], told: Mapping[int, Computed], text: str) -> list[Command]:
        """Their processes are replaced. Where a device has done so too often the job ends instead, its state saved."""
        job = self.job
        for rank in ranks:
            job.count_deviation(rank, told[rank].device)
        kept = job.holders.last(ranks) & job.condemned.keys()
        if kept:  # who has the state can't be killed before it is saved
            return self.leave(EXIT_UNRECOVERABLE, f"rank {min(kept)} {text}, and {job.condemned[min(kept)]}")
        return self.fence(ranks, text)

    def unfinishable(self, generation: int, reason: str) -> list[Command]:
        """The tail that a fault has cut needs what only a dead rank knew."""
        job = self.job
        if generation != job.generation or job.stage is not Stage.RECOVERING or job.plan is None:
            return []
        job.retries.reached(job.plan.commits)
        return self._fault(Fault(Kind.TAIL, reason, reason=reason))

    def start_again(self, rank: int, incarnation: int, reason: str) -> list[Command]:
        """What the ranks were to start from is not usable; the agent knows another source, or none."""
        if not self.job.current(rank, incarnation) or self.job.stage is not Stage.STARTING:
            return []
        return self._fault(Fault(Kind.AT_START, reason, rank, f"what was saved can't be taken up: {reason}"))

    def fence(self, ranks: Collection[int], reason: str, standings: Sequence[Standing] = ()) -> list[Command]:
        """Gives up processes that may still run: they are killed, and lost when their death is seen.

        Never the last one that has the state of a replica group. Where only such are named, a recovery without a loss
        begins, which they may hear; one that is under way goes on waiting for them. Before the first step nobody has a
        state of its own.
        """
        job = self.job
        if job.stage is Stage.STARTING:
            return job.kill(set(ranks), reason)
        if job.stage not in (*_RUNS, Stage.LEAVING):
            return []
        spared = job.holders.last(ranks)
        commands = job.kill(set(ranks) - spared, reason)
        if not spared:
            return commands
        named = ", ".join(map(str, sorted(spared)))
        only = f"rank {named} {reason}; nobody else has its state"
        detail: dict[str, object] = {"ranks": sorted(spared), "reason": reason}
        if (saved := job.newest_saved()) >= 0:
            detail["saved"] = saved
        commands.append(Note("spared", rank=min(spared), detail=detail))
        if job.stage in (Stage.RECOVERING, Stage.LEAVING) or len(spared) < len(set(ranks)):
            return commands  # others are lost, or a recovery is under way: it is asked there
        return [*commands, *self._fault(Fault(Kind.LATE, only, reason=only, again=self._fails_again(standings)))]

    def hold_up(self, ranks: Collection[int], reason: str, standings: Sequence[Standing]) -> list[Command]:
        """Ranks have not moved for long, and the others wait for them.

        As a rule they are given up. Not where another one has broken off its loop after as many updates: they may wait
        for it where nobody can see that (a socket of the user's), and their new processes would hear that the loops are
        over, as if all had made their steps.
        """
        alone = [
            rank
            for rank, left in self.job.left.items()
            if left.activity is not Activity.FINISHED
            and any(standings[each].commits == left.commits and not self._given_since(each, left) for each in ranks)
        ]
        if not alone or self.job.stage is not Stage.RUNNING:
            return self.fence(ranks, reason, standings)
        return self._fault(self._left_alone(min(alone), f"; rank {', '.join(map(str, ranks))} {reason}"))

    def expired(
        self, generation: int, standings: Sequence[Standing], limit_s: float, stopped: Collection[int] = ()
    ) -> list[Command]:
        """A phase of a recovery has lasted so long. ``stopped``: ranks whose process does not run, and may be
        continued.

        Before the plan: who has not joined is fenced. After it all are asked anew; who does not come is fenced then.
        """
        job = self.job
        if generation != job.generation or job.stage not in (Stage.RECOVERING, Stage.LEAVING):
            return []
        silent = set(job.waits_for())
        if job.plan is not None:
            told = f"ranks {sorted(silent)} did not come to the start of update {job.plan.commits} within {limit_s:g} s"
            keep, again = f"recoveries keep failing: {told}", self._fails_again(standings)
            return self._fault(Fault(Kind.LATE, told, reason=keep, again=again))
        late = f"did not join the recovery within {limit_s:g} s"
        commands = self.fence(silent, late)
        holding = job.holders.last(silent)
        if job.stage is Stage.LEAVING or not holding or holding.issubset(stopped) or holding < silent:
            return commands
        told = f"ranks {sorted(holding)} {late}; {NOBODY_LEFT}"
        return self._fault(Fault(Kind.STATE_GONE, late, min(holding), told))

    def outwaited(self, generation: int, limit_s: float) -> list[Command]:
        """Who alone has the state of its group was waited for as long as it takes to do again what is not saved of it.

        Whoever comes now would come too late for it to have been worth it. Where nothing is saved, or not all may be
        started again, it is waited for on.
        """
        job = self.job
        if generation != job.generation or job.stage is not Stage.RECOVERING or job.newest_saved() < 0:
            return []
        holding = job.holders.last(job.awaited())
        if not holding:
            return []
        late = f"did not join the recovery within {limit_s:.0f} s; what is not saved of its state is done again sooner"
        told = f"rank {', '.join(map(str, sorted(holding)))} {late}"
        fault = Fault(Kind.STATE_GONE, late, min(holding), told)
        return [] if rsc.refuses(fault, job) else self._fault(fault)

    def _fails_again(self, standings: Sequence[Standing]) -> bool:
        self.job.retries.reached(max((standing.commits for standing in standings), default=0))
        return self.job.retries.failed()

    # -- a recovery

    def joined(self, rank: int, incarnation: int, message: Joined) -> list[Command]:
        """A rank takes part in the recovery. The last one to join triggers the plan."""
        job = self.job
        if not job.current(rank, incarnation) or job.stage not in (Stage.RECOVERING, Stage.LEAVING):
            return []
        if message.generation != job.generation or rank in job.left_out():
            return []
        job.holders.joined(rank, holds=message.holds)
        job.joined[rank] = message
        if job.stage is Stage.LEAVING:
            return ttp.order(job)
        return self._agree() if len(job.joined) == job.world_size else []

    def _agree(self) -> list[Command]:
        job = self.job
        accounts = {rank: Account(standing_of((j.commits, j.phase)), j.holds) for rank, j in job.joined.items()}
        groups = {j.groups for j in job.joined.values()}
        verdict = decide(accounts, job.evidence)
        copies = job.replicas.assign_sources(verdict.empty, verdict.holders)
        uncovered = sorted(set(verdict.empty) - set(copies))
        if uncovered:
            told = f"ranks {uncovered} have no state; {NOBODY_LEFT}"
            return self._fault(Fault(Kind.STATE_GONE, told, uncovered[0], told))
        doubting = [rank for rank, j in job.joined.items() if j.doubts]
        if doubted := [target for target in copies if set(doubting) & set(job.replicas.peers(target))]:
            return self._never_compared(doubted[0], doubting[0], verdict.commits)
        job.plan = Plan(
            generation=job.generation,
            commits=verdict.commits,
            copies=copies,
            finishers=tuple(verdict.finishers),
            replaced=tuple(sorted(job.evidence)),
            last=job.leaving is not None,
        )
        detail: dict[str, object] = {
            "commits": verdict.commits,
            "copies": {str(target): source for target, source in copies.items()},
            "rolled_forward": verdict.forward,
            "redone": verdict.redone,
            "groups": len(groups),
        }
        return [Note("plan", detail=detail), *job.to_all(job.plan)]

    def _never_compared(self, lost: int, doubting: int, commits: int) -> list[Command]:
        """A rank is to be copied from a replica that did not seem to hold the same. Which of them was right is lost."""
        group = self.job.replicas.peers(lost)
        text = (
            f"rank {lost} has lost its state when it and rank {doubting} did not seem to hold the same bits (update "
            f"{commits}), before ranks {list(group)} could compare"
        )
        return [Note("replicas_differ", detail={"ranks": list(group), "reason": text}), *self._all_back(text, commits)]

    def done(self, rank: int, incarnation: int, generation: int, *, step: int = 0, over: bool = False) -> list[Command]:
        """A rank stands where the plan wants it, before ``step``. The last one lets everybody go, unless a pause is
        wanted. ``over``: see ``messages.Done``.
        """
        job = self.job
        if not job.current(rank, incarnation) or generation != job.generation or job.plan is None:
            return []
        job.done.add(rank)
        job.holders.done(rank)
        job.over = job.over or over
        job.step = step
        if len(job.done) < job.world_size or job.stage is not Stage.RECOVERING:
            return []
        job.evidence.clear()
        job.retries.reached(job.plan.commits)
        if tsp.due(job):
            return tsp.stand(job)
        job.stage = Stage.RUNNING
        detail: dict[str, object] = {"commits": job.plan.commits}
        if job.verifying:
            detail["verifies"] = True
        return [Note("resumed", detail=detail), *job.resume()]

    # -- a pause

    def pause(self, step: int, by: str) -> list[Command]:
        """All are to stop before ``step``. To be asked of ``tsp.refuses`` first."""
        return tsp.ask(self.job, step, by)

    def reached(self, rank: int, incarnation: int, generation: int) -> list[Command]:
        """A rank has come to the head before which all are to stop, and waits there."""
        job = self.job
        if not job.current(rank, incarnation) or generation != job.generation or job.stage is not Stage.RUNNING:
            return []
        return tsp.reached(job)

    def unpause(self) -> list[Command]:
        """The pause ends, or does not begin. To be asked of ``tsp.refuses_to_end`` first."""
        return tsp.end(self.job)

    # -- the end

    def finish(
        self, rank: int, incarnation: int, generation: int, left_at: Progress | None = None, *, exits: bool = False
    ) -> list[Command]:
        """A rank's loop is over. The last one lets everybody leave.

        ``left_at``: where it was left, by its number (FINISHED) or before (a ``break``). That is an end if nobody goes
        on (``progressed``). ``exits``: by ``sys.exit(0)``, which is an end only if all do so; a process that has taken
        another one's place has only heard that the loops are over.
        """
        job = self.job
        if not job.current(rank, incarnation) or generation != job.generation or job.stage is not Stage.RUNNING:
            return []
        job.finished.add(rank)
        if left_at is not None:
            job.left[rank] = left_at
        if exits:
            job.exited.add(rank)
        if len(job.finished) < job.world_size or job.holders.dying():
            return []  # who was killed may have said so before: all say it again when another has taken its place
        if job.exited and job.exited != job.finished:
            return self._fault(self._left_alone(min(job.exited)))
        job.stage = Stage.FINISHED
        detail: dict[str, object] = {"pause_at": job.pause_at} if job.pause_at is not None else {}
        return [Note("finished", detail=detail), *job.to_all(Finished())]

    def progressed(self, ranks: Sequence[Progress]) -> list[Command]:
        """Where all ranks are. One that goes on where another has left its loop waits for it as a rule: nobody else
        would ever end that, or it would be taken for hung, and its new process hear that the loops are over.
        """
        job = self.job
        if not job.left or job.stage is not Stage.RUNNING:
            return []
        alone = [
            rank
            for rank, left in job.left.items()
            if any(now.gone_on(left) and not self._given_since(other, left) for other, now in enumerate(ranks))
        ]
        return self._fault(self._left_alone(min(alone))) if alone else []

    def _given_since(self, rank: int, left: Progress) -> bool:
        """Whether the rank's process has its state from behind the update in whose tail another one has left its loop.

        Then it has not seen why, and goes on. It leaves when it has been taken for hung.
        """
        plan = self.job.plan
        return plan is not None and rank in plan.copies and plan.commits == left.commits and not self.job.exited

    def _left_alone(self, rank: int, others: str = "") -> Fault:
        left = self.job.left[rank]
        commits = left.commits
        self.job.retries.reached(commits)
        reason = _left(rank, 0, "")
        if left.activity is Activity.FINISHED:
            reason = f"rank {rank} has made all its steps, {commits} updates, and another one goes on{_ALIKE}"
        elif rank not in self.job.exited:
            reason = (
                f"rank {rank} left its loop after {commits} updates while the others were still training{_TO_END_EARLY}"
            )
        reason += others
        return Fault(Kind.OWN, reason, rank, reason, 1)

    def differs(self, rank: int, incarnation: int, message: Differs) -> list[Command]:
        """A rank does not hold what its replicas hold. When all of them have said what they do hold, all go back."""
        if not self.job.current(rank, incarnation) or self.job.stage is Stage.ENDED:
            return []
        self._differing[rank] = self.job.attempt, message
        everybody = self._told().keys() >= set(self.job.replicas.peers(rank))
        return self.disagreed(self.job.attempt) if everybody else []

    def _told(self) -> dict[int, Differs]:
        """What was said before all ranks were started again tells nothing."""
        return {rank: said for rank, (attempt, said) in self._differing.items() if attempt == self.job.attempt}

    def disagreed(self, attempt: int) -> list[Command]:
        """Replicas differ, and who has not said by now what it holds will not."""
        job, told = self.job, self._told()
        if job.stage is Stage.ENDED or job.attempt != attempt or not told:
            return []
        self._differing = {}
        group = job.replicas.peers(next(iter(told)))
        replaced = [rank for rank in group if job.incarnations[rank]]
        text, commits = sentence(group, told, replaced), max(each.commits for each in told.values())
        detail: dict[str, object] = {"ranks": list(group), "alone": alone(told), "commits": commits, "reason": text}
        detail |= evidence(told)
        said = next(iter(told.values()))
        unnamed = said.held and not detail["alone"]
        job.doubt = Doubt(said.since, dict(zip(group, said.held, strict=True)), replaced) if unnamed else None
        return [Note("replicas_differ", detail=detail), *self._all_back(text, commits)]

    def held(self, rank: int, incarnation: int, message: Held) -> list[Command]:
        """What a rank holds where its replicas had held different things."""
        job, doubt = self.job, self.job.doubt
        if not job.current(rank, incarnation) or doubt is None or message.commits != doubt.commits:
            return []
        wrong = doubt.hear(rank, message.held)
        if wrong is None:
            return []
        job.doubt = None
        detail = {"commits": doubt.commits, "ranks": wrong, "anew": list(doubt.anew)}
        return [Note("held_wrong", rank=wrong[0], detail=detail)] if wrong else []

    def _all_back(self, text: str, commits: int) -> list[Command]:
        """Nobody knows what is right since before update ``commits``, or long before it."""
        job = self.job
        if job.leaving or job.stage not in _RUNS:  # it is about to end
            return self.stop(2, text)
        commands = self._fault(Fault(Kind.DIFFERS, text, reason=text, code=2))
        job.differed_at = commits
        return commands

    def leave(self, code: int, reason: str) -> list[Command]:
        """Somebody wants the job to end and its state to be saved. Asked twice: to end at once."""
        return ttp.leave(self.job, code, reason)

    def hurry(self) -> list[Command]:
        """Half of the time is gone that a job has which was asked to end."""
        return ttp.hurry(self.job)

    def saved_last(self, outcome: str) -> list[Command]:
        """The end-of-life checkpoint is there, or it failed; ``outcome`` tells people."""
        return ttp.saved(self.job, outcome)

    def stop(self, code: int, reason: str) -> list[Command]:
        """The operator, the machine, or a Session that is wrong (2) wants the job to end: now."""
        return self.job.end(code, reason)

    def copy(self) -> Controller:
        """An independent one in the same state."""
        new = object.__new__(type(self))
        new.job, new._differing = self.job.copy(), dict(self._differing)
        return new


_ALIKE = ": all ranks make the same steps, with the same collectives (for data of unequal length: the smallest number)"
_TO_END_EARLY = " (to end early, all ranks leave the Session at the same step)"


def _unequal(started: Mapping[int, Started]) -> str:
    """Names two ranks that are to make other steps than each other; empty if there are none."""
    first = started[0]
    for rank, other in started.items():
        if (other.step, other.total) != (first.step, first.total):
            steps = f"steps {first.step} to {first.total - 1} and rank {rank} steps {other.step} to {other.total - 1}"
            return f"rank 0 is to make {steps}{_ALIKE}"
    return ""


def _left(rank: int, code: int, how: str, when: str = "") -> str:
    if code == 0:
        return f"rank {rank} left with exit code 0 while the others were still training{_TO_END_EARLY}"
    return f"rank {rank} failed{when}{how or f' with exit code {code}'}"
