"""Performs what the rank machine wants, in the training thread.

Hooks, ``with step:`` and the loop become events; ``drive`` hands one to the machine (``protocol/rank.py``) and performs
the effects that come back, until one of them gives the thread back to the user. Nothing here knows where the rank is.

A DeviceError anywhere means that the device does not do what a recovery needs: the process ends, and is replaced.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from msgspec import structs

from resilient_train import config
from resilient_train._native import allow_readers
from resilient_train.descriptors import RecoveryLimit
from resilient_train.errors import (
    ConfigError,
    DeviceError,
    JobEnded,
    LayoutError,
    StateError,
    TrainingInterrupted,
    TransferError,
    UsageError,
)
from resilient_train.exception_line import describe, short
from resilient_train.faults import parse_plan
from resilient_train.frameworks import set_up_recall
from resilient_train.frameworks.roles import Engine, Objects, StateMark, WrittenEarly, WrittenInTail
from resilient_train.frameworks.set_up_recall import HOW_TO_KEEP
from resilient_train.protocol import messages as m
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.progress import Activity
from resilient_train.session.agent_link import Link, leave
from resilient_train.session.bodies_without_update import BodiesWithoutUpdate
from resilient_train.session.collective_report import CollectiveReport
from resilient_train.session.comparisons.anomalies import AnomalyLimits
from resilient_train.session.comparisons.anomaly_reports import AnomalyReports
from resilient_train.session.comparisons.computed_twice import Compared, Verification
from resilient_train.session.comparisons.nan_watch import NanWatch
from resilient_train.session.comparisons.neighbour_inputs import NeighbourInputs
from resilient_train.session.comparisons.replica_comparison import Comparison
from resilient_train.session.compute_clock import ComputeClock
from resilient_train.session.device_errors import DeviceErrors
from resilient_train.session.drill_records import DrillRecords
from resilient_train.session.explain import RAN_AGAIN, Explainer, asks_for_redo, left_by_an_error
from resilient_train.session.fail_stop import fail_stop, lost_worker
from resilient_train.session.from_replica import FromReplica, LoopsBegin
from resilient_train.session.held_signal import HeldChildSignal
from resilient_train.session.injection import Injector
from resilient_train.session.kept_beside import KeptBeside
from resilient_train.session.liveness import Pulse
from resilient_train.session.loop_head import LoopHead
from resilient_train.session.notices import Notices
from resilient_train.session.pauses import ScriptPauses
from resilient_train.session.rank_trace import RankTrace
from resilient_train.session.rebuild import build_groups, lacks
from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_batches import KeptBatches
from resilient_train.session.redo.kept_calls import BodyCall, KeptCall
from resilient_train.session.redo.loader import Cursor
from resilient_train.session.saves.from_saved import beside
from resilient_train.session.saves.publication import Publication
from resilient_train.session.saves.saving import Saving
from resilient_train.session.step import Step, Steps
from resilient_train.session.stop_delivery import StopDelivery

LOOP_IS_OVER = "this Session's loop is over: one loop for a Session (step.epoch tells passes over the data)"
_WATCHDOG_S = 5.0
_LOOK_MS = 100
_LACK_S = 2.0
_COUNTED_S = 0.5
"""How much of the time since the last look counts: whoever was stopped himself has not waited meanwhile."""
_ENDS_WELL = on.Exit("ok")
_LIKE_A_COLLECTIVE = ("HCCE", "LINK", "STOPPED")


def _failures(steps: Iterable[Callable[[], object]]) -> Iterator[BaseException]:
    """Each step runs, whatever those before it have raised; this comes out."""
    for step in steps:
        try:
            step()
        except BaseException as failure:
            yield failure


class Driver:
    """One rank under an agent: the Body of each step; what the engine's ``Window`` and ``Collectives`` report to."""

    calling = False
    """The loop calls its bodies (``calls.py``), and a fault must bring it back to one that it knows."""
    kept_calls: Sequence[KeptCall] = ()
    """Those of the open window."""
    _step: Step | None = None
    """The step that the user has; None between two."""
    _called = b""
    """What the body of a call gets."""
    _failed = -1
    """The step whose body an exception has left before its update."""
    _left_at: tuple[int, int, int, int] | None = None
    """Where the loop was left; with FINISHED by its last number."""
    _order = m.Resume(0)
    """The newest one: what is to be computed again, and how."""
    _begun = _entered = _told_end = _exits = _released = False
    """The loop has begun; its first body; it is over; it was left by ``sys.exit(0)``; nothing is held any more."""
    _raised = False
    """The script's loop is left by ``_error``, and what the rank holds is to be saved before that goes on."""
    _unlike = False
    """A body has changed registered state where nobody saw it: nothing is to be saved of that."""
    _told_beside = False
    _begun_anew = False
    """A process has taken another one's place, or goes on from what was saved: what is compiled may differ."""
    _recovered = False
    """A process has taken another one's place, or goes on from what was saved, or a step runs again."""
    _answer: Any = None
    _digests = ("", "")
    """Of the state with which this rank has come to its end."""
    _redone = _quiet_since_ns = 0

    def __init__(
        self,
        agent: config.AgentLink,
        engine: Engine,
        cursor: Cursor,
        objects: Objects,
        replicas: tuple[tuple[int, ...], ...],
        *,
        undo: bool,
        limits: AnomalyLimits,
        skips: bool,
    ) -> None:
        self._pid = os.getpid()
        settings, switches = config.read_settings(), config.read_switches()
        self._engine, self._cursor, self._objects, self._replicas = engine, cursor, objects, replicas
        self._link = link = Link(agent)
        self._peers = self._link.peers
        self._verdict_timeout_s = settings.verdict_timeout_s
        self._optimizers = {id(optimizer): index for index, optimizer in enumerate(objects.optimizers)}
        self._trace = RankTrace(agent, wanted=settings.trace)
        self._rank = self._trace.machine(
            agent.rank,
            generation=self._link.generation,
            joining=agent.joining,
            optimizers=len(objects.optimizers),
            undo=undo,
            skips=skips,
        )
        self._notices = notices = Notices(link, self._rank, lambda: self._number)
        self._kept_beside = KeptBeside(notices, objects, cursor, engine.window)
        groups = replicas or (tuple(range(agent.world_size)),)
        state, window = engine.state, engine.window
        self._comparison = Comparison(link, state, engine.gradients, groups, settings.compare_every, self._inputs)
        self._publication = Publication(link, engine.rank_state, engine.data, cursor, self._comparison.replicas)
        self.saving = Saving(
            link, state, window, self._publication, agent.run_dir, groups, notices.event, self._comparison
        )
        self._without_update = BodiesWithoutUpdate(window, engine.gradients, notices.event, tells=notices.is_speaker)
        self._anomalies = self._anomaly_reports(limits, skips=skips, wanted=switches.tre > 0)
        self._nan = NanWatch(link, engine.state, goes_back=self._anomalies is not None)
        self._clock = ComputeClock(engine.collectives.waited_ns, self._peers.add_computed)
        plan, who = parse_plan(settings.faults), (agent.rank, agent.incarnation)
        self._injector = Injector(
            plan, *who, notices.sink, engine.drill, self._peers, self._falsify, self._clock.slow_down
        )
        self._verification = self._second_look(agent, settings, undo=undo)
        self._computes_twice = self._anomalies is not None or settings.verify_every > 0
        self._records = DrillRecords(agent, engine.drill, wanted=settings.drill_records)
        self._pulse = Pulse(self._link, agent.run_dir, notices.event)
        self.slow = self._pulse.slow
        self._pauses = ScriptPauses(agent, engine.drill, engine.data, self.slow, notices.event)
        self.on_pause = self._pauses.add
        self._from_replica = FromReplica(link, state, window, engine.groups, self._publication, settings.transfer)
        self._head = LoopHead(window, engine.between, self._from_replica, agent.attempt)
        self._device = DeviceErrors(self._peers, engine.device, notices.event, mends=switches.uce)
        self._explainer = Explainer(self._peers, engine.groups, self._device, self._from_replica)
        report = CollectiveReport(self._link, self._pulse.folder, engine.groups.recorded)
        self._descriptors = RecoveryLimit()
        self._children = HeldChildSignal()
        self._stop_delivery = StopDelivery(self._peers, self._link.generation, engine.groups.waiters, report, settings)
        order = engine.pass_order if objects.rank_extra else None
        self._batches = KeptBatches(cursor, engine.data, self._pulse, self.outlive, order)
        self._error: BaseException = RuntimeError("no error")
        """What failed last, to be raised if nobody can explain it."""
        self._perform = {**self._performers(), **self._looking_performers(compares=settings.verify_every > 0)}
        atexit.register(self._release)

    def _second_look(self, agent: config.AgentLink, settings: config.Settings, *, undo: bool) -> Verification:
        """Of this rank's own inputs, or of a replica's."""
        engine, mine = self._engine, self._comparison.replicas
        neighbours = None
        if settings.verify_every and settings.verify_inputs == "neighbour":
            neighbours = NeighbourInputs(agent.run_dir, agent.rank, mine, engine.data, engine.rank_state)
        return Verification(
            engine.collectives,
            engine.gradients,
            engine.state,
            every=settings.verify_every,
            undo=undo,
            replicas=[rank for rank in mine if rank != agent.rank],
            neighbours=neighbours,
        )

    def _anomaly_reports(self, limits: AnomalyLimits, *, skips: bool, wanted: bool) -> AnomalyReports | None:
        """``wanted``: ``TRE`` is on."""
        if wanted:
            return AnomalyReports(self._link, self._rank, self._engine.gradients, self._notices, limits, skips=skips)
        if limits.given or skips:
            what = "a threshold for the norm or the loss" if limits.given else "on_anomaly='skip'"
            self._notices.say(f"{what} has no effect: MS_ENABLE_TFT has no TRE:1")
        return None

    # -- what the user's code does

    def steps(self, total: int, start: int) -> Iterator[Step]:
        """See ``Session.steps``."""
        return Steps(self._steps(total, start), self._next_loop)

    def _next_loop(self) -> None:
        self._publication.loops += 1

    def _steps(self, total: int, start: int) -> Iterator[Step]:
        if self._told_end:
            if self._publication.missed_loops:  # the other ranks have had one more, and are through
                self._publication.missed_loops -= 1
                return
            raise UsageError(LOOP_IS_OVER)
        self._next_loop()
        step = self.next_step(total, start)
        while step is not None:
            yield step
            if not step.entered:
                raise UsageError(f"step {step.number} was not used: write `with step:` around the loop's body")
            self.step_made()
            step = self.next_step(total)
        self._ended()

    def step_made(self, call: BodyCall | None = None, again: GivenAgain | None = None) -> None:
        """Called behind each step, by the loop itself or for that ``call``."""
        recovered, self._recovered = self._recovered, False
        self._kept_beside.step_made(call, again, recovered=recovered)

    def look(self, arguments: Any, variables: Sequence[Any], *, plain: bool) -> bytes:
        """A body gets these, and reads those. See ``frameworks/roles.Data``."""
        return self._engine.data.look(arguments, variables, plain=plain)

    def announces(self, look: bytes) -> None:
        """The next body gets these. Tells people if another process had begun its step with other ones."""
        self._called = look
        begun, self._publication.called = self._publication.called, b""
        if begun and self._called != begun:
            self._notices.other_arguments()

    def gets_other_arguments(self) -> None:
        """The body that runs again has written into what it was called with."""
        self._notices.written_arguments()

    def next_step(self, total: int, start: int = 0) -> Step | None:
        """The next step, or the same again; None: the loop is over. With the first one the loop begins."""
        if self._released:
            raise UsageError("session.close() was called in the Session's loop: call it behind the loop, or break")
        if self._failed >= 0:
            raise UsageError(
                f"the body of step {self._failed} was left by an exception before its update, and was caught outside "
                "of `with step:`: what that body has left half-done can't be told from what a redo must bring back; "
                "catch it inside the body, or let it end the job (docs/how-to/loops.md, `except`)"
            )
        self._step = None
        self._step = self._next(total) if self._begun else self._begin(total, start)
        return self._step

    @property
    def _is_fork(self) -> bool:
        """A child that the script has forked in the loop: the rank goes on without it, whatever it comes to."""
        return os.getpid() != self._pid

    @property
    def begun(self) -> bool:
        """This rank has met the others."""
        return self._begun

    @property
    def number(self) -> int:
        """The number of the step that runs or comes next."""
        return self._rank.number

    @property
    def place(self) -> int:
        """Of that step in its window."""
        return self._rank.place

    @property
    def over(self) -> bool:
        """The loop is over."""
        return self._rank.over

    @property
    def window_open(self) -> bool:
        """Whether a fault would bring back a step that has begun."""
        return bool(self._batches)

    @property
    def joined_late(self) -> bool:
        """This process has taken the place of another one in a running job."""
        return self._rank.joining

    def head_begins(self) -> None:
        """A loop of calls knows its first step, and runs on to its first call."""
        self._head.begins(self._rank.commits)

    def head_ends(self) -> None:
        """The first call. Raises UsageError for what can't be put back."""
        self._engine.collectives.end_head()
        if lost := self._head.ends(self._rank.commits):
            raise UsageError(
                f"{lost} was changed between session.position and the first call, by a process that goes on in the "
                "middle of a training: it holds that change already, and it can't be taken back; change it in a body"
            )

    def set_mode(self, mode: do.Mode) -> None:
        """How collectives of the loop's are carried out until its next call."""
        self._engine.collectives.set_mode(mode)

    def _begin(self, total: int, start: int) -> Step | None:
        """Meets the other ranks for the first time; a replacement meets them in the middle of a recovery."""
        self._begun = True
        self._from_replica.loop = total, start
        record = self._end_set_up()
        allow_readers()
        self._injector.open(lambda: self._rank.number, lambda: self._rank.generation)
        self._pulse.open()
        self._engine.window.attach(self)
        if self._anomalies is not None:
            self._anomalies.watch()
        self._engine.collectives.attach(self, self._peers)
        self._engine.device.watch(self._peers.alarm_by)
        self._stop_delivery.start()
        self.saving.open()
        commits, source = 0, self._link.source
        if not self._rank.joining:
            if source is not None:
                payload = self.saving.restore(source)
                with self._engine.collectives.loading():
                    commits, start = source.commits, self._publication.take_up(payload)
                self._from_replica.loops_begin = LoopsBegin(commits, self._publication.headed)
                self._tell_strayed(start)
            try:
                self._engine.state.check(around=not self.calling)
            except StateError as error:
                self._link.channel.send(m.Refused(str(error)))
                raise
            self._begun_anew = source is not None
            self._recovered |= source is not None  # what a loop keeps beside the Session begins anew as well
            self.saving.begin_at(commits)
            self._comparison.begin_at(commits)
            self._without_update.tell_untrained()
            self._link.channel.send(m.SetUp(record))
        step: Step | None = self._drive(on.Begin(total, start, commits))
        return step

    def _end_set_up(self) -> bytes:
        try:
            return self._engine.collectives.end_set_up()
        except ConfigError as error:
            self._link.channel.send(m.Refused(str(error)))
            raise

    def _next(self, total: int) -> Step | None:
        self._pulse.stays()
        number = self._rank.number
        if number >= total:
            self._left_at = (*self._peers.progress()[:3], Activity.FINISHED)
            self._mend_behind_last()
        pauses = self._peers.pause_due(number)
        step: Step | None = self._drive(on.Next(total, self.stopped(), pauses))
        return step

    def enter(self, step: Step) -> None:
        """The body begins."""
        self._entered = True
        try:
            self.saving.body_begins(self._rank.commits)
        except DeviceError as failure:
            self._fail_stop(failure)
        self._injector.listen(step.number)
        self._clock.start()
        self._engine.device.lend()
        self._drive(on.Enter())

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """The body ended. True: the step will run again."""
        if self._is_fork:
            return False
        if self._stop_delivery.interrupt.armed:
            self._stop_delivery.interrupt.disarm()
        self._clock.stop()
        if error is None and self._rank.redoable and self._engine.groups.cut():
            # The body has caught what a fault raised in it, and came to no update, which looks at its collectives: no
            # later one would succeed, and each body could catch that as well, to the end of the loop.
            error = RuntimeError(f"a collective failed in the body of step {self._rank.number}, which went on")
        if error is None:
            place = self._rank.place
            again = bool(self._drive(_ENDS_WELL))
            self._take_back()
            if self.calling and self.window_open and not again:
                self._engine.between.left(place)
            return again
        self._error = error
        try:
            event = self._explained(error)
        except DeviceError as failure:
            self._fail_stop(failure)
        self._take_back()
        if event.how == "error" and step.attempt:
            error.add_note(RAN_AGAIN.format(step=step.number))
        if event.how in ("error", "leaves"):
            self._pulse.leaving()
            self.outlive(error)
        before_update = self._rank.redoable or self._rank.updating
        again = bool(self._drive(event))
        if before_update and event.how in ("error", "leaves") and not self._rank.redoable:
            self._failed = self._rank.number
        if again and self._rank.intact and not self.calling:  # behind a call that is repeated nothing runs
            self._engine.state.cut()
        return again

    def _take_back(self) -> None:
        try:
            self._engine.device.take_back()
        except DeviceError as failure:
            self._fail_stop(failure)

    def _explained(self, error: BaseException) -> on.Exit:
        """Why the body has ended. A step is run once more for an error that asks for it; the next one is the script's.
        Behind the update all go back, if they do, when the script has been left by the error.
        """
        event = self._explainer.exit(
            error, self._rank.standing, self._rank.generation, redoes=self._anomalies is not None
        )
        if event.how == "error":
            self._tell_late(error)
        if event.how != "anomalous":
            return event
        assert self._anomalies is not None
        return self._anomalies.asked_for(event)

    def _tell_late(self, error: BaseException) -> None:
        if self._anomalies is not None and asks_for_redo(error):
            self._anomalies.asked_late(error)

    def close(self, error: BaseException | None) -> None:
        """Leaves: after all ranks have come to their end, or for an exception, when what this rank holds is saved.

        A ``sys.exit(0)`` all ranks may have agreed on, and a ``break`` of who reads the generator that the loop is in.
        """
        if self._is_fork or self._released:
            return
        finish = error is None or (isinstance(error, GeneratorExit) and not left_by_an_error())
        try:
            if isinstance(error, SystemExit) and error.code in (None, 0) and self._rank.leavable:
                finish = self._exits = True
            if finish and self._begun and not self._told_end:
                self._left_at = self._peers.progress()
                self._step = None
                self._mend_behind_last()
                self._drive(on.Over(self.stopped()))
                self._ended()
            elif error is not None and not isinstance(error, (KeyboardInterrupt, GeneratorExit, TrainingInterrupted)):
                self._let_save(error)
        except BaseException:
            self._release(for_another=True)
            raise
        self._release(for_another=not finish)

    def _mend_behind_last(self) -> None:
        """The loop is over. A connection that broke behind its last collective fails nothing in it, and all that the
        script does next: behind the loop nobody repairs it.
        """
        groups = self._engine.groups
        # Without sockets they wait to be built: this rank brings its tail to an end for a recovery.
        if self._rank.behind_update and not self.stopped() and groups.sockets() and groups.cut():
            self.survive(RuntimeError("a connection is gone behind the last collective of the loop"))

    def _let_save(self, error: BaseException) -> None:
        """The script's loop is left by ``error``, which ends the job. Other ranks may fail alike, at the same place:
        what this one holds is kept until it is saved. Then, or where nothing is to be saved, the error goes on.
        """
        if not self._begun or self._told_end or self._unlike or not self._rank.whole:
            return
        if self._device.suspected():
            return  # of memory that has lost data nothing is to be saved
        self._error, self._raised = error, True
        self._tell_late(error)
        code = error.code if isinstance(error, SystemExit) else 1
        text = "" if isinstance(error, SystemExit) else describe(error)
        try:
            self._drive(on.Raised(text, code if isinstance(code, int) else 1))
        except (JobEnded, SystemExit):
            return  # the agent has ended the job
        except Exception as failure:
            self._notices.say_of_rank(f"what it holds can't be saved: {failure}")

    def pause(self, at_step: int | None) -> None:
        """See ``Session.pause``."""
        if self._rank.joining and not self._begun:
            return  # its predecessor has asked
        following = self._rank.number if self._step is None else self._step.number + 1
        if at_step is not None and at_step < following:
            raise UsageError(f"session.pause(at_step={at_step}): step {following - 1} has begun already")
        self._pauses.ask(following if at_step is None else at_step)

    def unpause(self) -> None:
        """See ``Session.resume``."""
        self._pauses.end(self._rank.generation)

    def check(self, loss: Any, norm: Any) -> None:
        """See ``Session.check``."""
        if self._anomalies is not None:
            self._anomalies.check(loss, norm)

    def anomaly(self, step: int, reason: str) -> None:
        """See ``Session.anomaly``."""
        if not 0 <= step <= self._rank.number:
            raise UsageError(f"session.anomaly({step}): the newest step that has begun is {self._rank.number}")
        if self._anomalies is None or self._told_end:
            why = "the loop is over" if self._told_end else "MS_ENABLE_TFT has no TRE:1"
            self._notices.say(f"session.anomaly() has no effect: {why}")
            return
        self._link.channel.send(m.Late(step, short(reason)))

    # -- what the engine reports

    def _falsify(self, what: Any, value: float) -> None:
        """A fault on request."""
        assert self._anomalies is not None, "a plan without TRE was refused"
        self._anomalies.inject(what, value)

    def before_update(self, optimizer: Any) -> None:
        """The optimizer is about to write: interrupts are held from here to the head of the loop."""
        self._stop_delivery.interrupt.insist()
        self._drive(on.UpdateBegins(self._optimizers[id(optimizer)]))

    def after_update(self, optimizer: Any) -> None:
        """The optimizer has written."""
        self._drive(on.UpdateEnds(self._optimizers[id(optimizer)]))

    def given(self) -> Collection[Any] | None:
        """See ``frameworks/roles.Updates``."""
        return None if self.calling else self._batches.given()

    def survive(self, error: BaseException | None) -> bool:
        """A collective of the tail failed, or waits for who has gone. Takes part in the recovery. True: again."""
        stopped = self.stopped()
        if not (stopped or self._engine.groups.broken()):
            return False
        if error is not None:
            self._error = error
        return bool(self._drive(on.TailCut(f"{type(error).__name__}: {error}", stopped)))

    def stopped(self) -> bool:
        """Whether a recovery newer than this rank's generation is under way."""
        return self._peers.stop_raised(self._rank.generation)

    def in_front(self) -> bool:
        """See ``frameworks/roles.Conductor``."""
        return self._step is not None and not self._step.entered and not self.calling

    def give_up_tail(self, why: str) -> None:
        """See ``frameworks/roles.Conductor``."""
        self._link.channel.send(m.Unfinishable(self._rank.generation, why))

    def note(self, kind: str, detail: dict[str, Any]) -> None:
        """Writes an event of this rank."""
        self._notices.event(kind, detail)

    # -- the machine

    def _drive(self, event: Any) -> Any:
        """Hands ``event`` to the machine, and performs what it wants until the thread is the user's again."""
        perform, injector, rank = self._perform, self._injector, self._rank
        self._answer = None
        if injector.clauses:
            injector.asked(event, rank)
        heard = event
        try:
            while heard is not None:
                effects = rank.on(heard)
                heard = None
                for effect in effects:
                    if injector.clauses:
                        injector.before(effect, rank)
                    heard = perform[effect.__class__](effect)
                    if injector.clauses:
                        injector.after(effect, heard, rank)
        except DeviceError as error:
            self._fail_stop(error)
        if injector.clauses:
            injector.answered(event, rank)
        return self._answer

    def _performers(self) -> dict[type[do.Effect], Callable[[Any], Any]]:
        return {
            do.Record: self._record,
            do.Publish: self._publish,
            do.Arrive: self._arrive,
            do.ResetLog: self._reset_log,
            do.SendStarted: self._send_started,
            do.SendTrouble: self._send_trouble,
            do.SendRaised: lambda effect: self._link.channel.send(m.LeftByException(effect.text, effect.code)),
            do.SendDamaged: self._send_damaged,
            do.TellTailFailed: self._tell_tail_failed,
            do.SendAnomaly: self._send_anomaly,
            do.SendJoined: self._send_joined,
            do.SendDone: self._send_done,
            do.SendReached: lambda _: self._link.channel.send(m.Reached(self._rank.generation)),
            do.SendFinish: self._send_finish,
            do.SendOffers: self._offer,
            do.SnapshotBegin: lambda _: self.saving.head(self._rank.commits, self._rank.number),
            do.SnapshotFence: lambda _: self.saving.fence(),
            do.ShowState: self._show_state,
            do.Compare: self._compare,
            do.CheckUnchanged: self._check_unchanged,
            do.Arm: lambda _: self._stop_delivery.interrupt.arm(self._rank.generation),
            do.Disarm: lambda _: self._stop_delivery.interrupt.disarm(),
            do.SetMode: lambda effect: self._engine.collectives.set_mode(effect.mode),
            do.Exchange: self._exchange,
            do.Mark: lambda _: self._engine.window.begin(),
            do.Draw: self._draw,
            do.Rollback: self._rollback,
            do.ForgetBatches: lambda _: self._batches.forget(),
            do.SaveUndo: self._save_undo,
            do.DropGradients: self._drop_gradients,
            do.Committed: self._committed,
            do.Synchronize: lambda _: self._engine.device.synchronize(),
            do.LearnLayout: self._gradients_ready,
            do.RebuildReducer: self._rebuild_reducer,
            do.OnPause: self._on_pause,
            do.CheckCollectives: self._check_collectives,
            do.Cross: self._cross,
            do.AwaitStop: self._await_stop,
            do.Quiesce: self._quiesce,
            do.AwaitResume: self._await_resume,
            do.AwaitPlan: lambda _: self._await(m.Plan, m.SaveLast),
            do.AwaitFinished: self._await_finished,
            do.AwaitEnd: lambda _: self._await(),
            do.BuildGroups: self._build,
            do.Fetch: self._fetch,
            do.Serve: self._serve,
            do.SaveState: self._save,
            do.Return: self._return,
            do.ReturnStep: self._return_step,
            do.ReturnEnd: lambda _: None,
            do.Cut: self._cut,
            do.GiveUp: self._give_up,
            do.Misuse: self._misuse,
        }

    def _looking_performers(self, *, compares: bool) -> dict[type[do.Effect], Callable[[Any], Any]]:
        """In the place of some of those, if anything is looked at: else that costs nothing."""
        found: dict[type[do.Effect], Callable[[Any], Any]] = {}
        if self._anomalies is not None:
            found |= {do.Mark: self._mark_to_look, do.CheckCollectives: self._check_and_look}
            found[do.Committed] = self._committed_and_usual
        if compares:
            found |= {do.Draw: self._draw_to_compare, do.ReturnStep: self._return_step_to_compare}
            found |= {do.Mark: self._mark_to_compare, do.CheckCollectives: self._check_and_compare}
        return found

    # -- what others see

    def _record(self, _: do.Record) -> None:
        self._peers.record(self._rank.standing, self._number)

    def _publish(self, effect: do.Publish) -> None:
        rank, ahead = self._rank, effect.ahead
        called = b"" if ahead else self._called
        commits = rank.commits + ahead
        headed = self.calling and self._head.is_in_state(commits)
        self._publication.publish(commits, rank.number + ahead, called, ahead=ahead, headed=headed)
        if self._begun_anew and self._publication.compiled:
            self._begun_anew = False
            self._notices.compiled_otherwise(self._publication.compiled)

    def _arrive(self, _: do.Arrive) -> None:
        self._peers.arrive(self._rank.standing, self._number)

    def _offer(self, effect: do.SendOffers) -> None:
        rank = self._rank
        self._from_replica.offer(rank.generation, rank.commits, effect.targets, within=self._step is not None)

    def _reset_log(self, _: do.ResetLog) -> None:
        self._peers.reset_log(self._rank.commits)

    def _send_started(self, _: do.SendStarted) -> None:
        digest, groups = self._engine.state.fingerprint().digest(), self._engine.groups
        self._stop_delivery.guard_sockets(groups.sockets())
        self._link.channel.send(m.Started(digest, groups.names(), self._replicas, self._rank.number, self._rank.total))

    def _send_trouble(self, effect: do.SendTrouble) -> None:
        self._link.channel.send(m.Trouble(self._rank.generation, short(effect.text)))

    def _tell_tail_failed(self, _: do.TellTailFailed) -> None:
        if not self._raised:  # nobody else will
            traceback.print_exception(self._error)
        self._notices.event("tail_failed", {"error": f"{type(self._error).__name__}: {self._error}"})

    def _send_damaged(self, effect: do.SendDamaged) -> None:
        self._link.channel.send(m.Damaged(self._rank.generation, short(effect.text)))

    def _send_anomaly(self, effect: do.SendAnomaly) -> None:
        assert self._anomalies is not None
        self._error = self._anomalies.send(again=effect.again) or self._error

    def _send_joined(self, effect: do.SendJoined) -> None:
        rank, names = self._rank, self._engine.groups.names()
        joined = m.Joined(
            rank.generation,
            *rank.standing,
            rank.intact,
            self._peers.completed_of(rank.me),
            names,
            self._quiet_since_ns,
            tail_failed=effect.tail_failed,
            doubts=self._comparison.doubtful,
        )
        self._link.channel.send(joined)

    def _send_done(self, effect: do.SendDone) -> None:
        self._redone += effect.redone
        self._recovered |= effect.redone
        self._link.channel.send(m.Done(self._rank.generation, effect.redone, self._rank.base, self._rank.over))

    def _send_finish(self, _: do.SendFinish) -> None:
        self.saving.wait()
        self._pulse.at(Activity.FINISHED)
        self._link.channel.send(m.LoopOver(self._rank.generation, self._left_at, self._exits))

    def _show_state(self, effect: do.ShowState) -> None:
        commits, comparison = self._rank.commits, self._comparison
        match effect.where:
            case "head":
                if comparison.is_seldom(commits) and (words := self._engine.collectives.messages()):
                    self._link.channel.send(m.BodiesMessages(commits, words))
                if comparison.head(commits, shown=self.saving.will_show):
                    self._nan.look(commits, self._rank.number)
                    self._look_beside()
                    if not comparison.alone:
                        self._look_at_model()
            case "target":
                comparison.write(commits)
            case "copied":
                comparison.forget()
            case "end":
                if self._records.wanted:
                    self._records.take(self._rank.number, None, self._cursor.place)
                self._digests = self._engine.state.fingerprint().digest(), self._publication.digest()
                comparison.write(commits, self._digests[0])
                self._nan.look(commits, self._rank.number)

    def _look_at_model(self) -> None:
        """Tells, once, that no new process could take its state up: a script builds its model in front of its loop."""
        if not self._notices.has_outgrown and (changed := self._engine.window.outgrown()):
            self._notices.outgrown(changed)

    def _look_beside(self) -> None:
        """Tells, once, of what the script trains beside the Session: it is lost with this rank."""
        changed = "" if self._told_beside else beside(self._engine.window.changed_beside())
        if changed:
            self._told_beside = True
            self._link.channel.send(m.Beside(changed))

    def _compare(self, effect: do.Compare) -> None:
        if effect.resumed and not self._order.verifies:
            self._comparison.begin_at(self._rank.commits)
        self._comparison.look()

    # -- what nobody else sees

    def _exchange(self, effect: do.Exchange) -> None:
        self._peers.forget_logs()
        self._engine.collectives.exchange(effect.plan.finishers)

    def _draw(self, _: do.Draw, *, whole: bool = False) -> None:
        place = self._rank.place
        again = self._batches.has(place)
        if self.calling and self._engine.between.begins(place, self._rank.base) and self._computes_twice:
            raise UsageError(
                "gradients, weights or buffers were written between two calls of session.call() for one update, before "
                f"step {self._rank.number}: in a step that runs again they are set as they were, so to compute it once "
                "more (RESILIENT_VERIFY_EVERY, TRE) would not find a wrong result out; write them in the body"
            )
        moves = self._batches.first or (bool(self._objects.extra) and self._cursor.begins_pass())
        looks = moves and not again
        before = self._steady() if looks else {}
        with self._engine.collectives.loading():
            same = self._batches.draw(place, whole=whole)
        if not again and self._cursor.begun:
            self._publication.pass_begun(self._rank.commits, self._cursor.begun)
        if not again and (self._cursor.begun or self._cursor.strayed):
            self._tell_strayed(self._rank.number)
        if not same:
            self._lose(f"the batch of step {self._rank.number}, or state that its loader moves on,", self._rank.number)
        if looks:
            self._check_place(before)

    def _draw_to_compare(self, effect: do.Draw) -> None:
        commits, place = self._rank.commits, self._rank.place
        again = self._batches.has(place)
        self._draw(effect, whole=self._verification.due(commits))
        if not again:
            self._verification.drawn(commits, place, self._batches[place])

    def _steady(self) -> dict[str, StateMark]:
        """Of the shared state. What is never the same (a clock) says nothing."""
        first, again = self._engine.state.marks(), self._engine.state.marks()
        return {name: mark for name, mark in first.items() if again[name].same(mark)}

    def _moved_since(self, before: dict[str, StateMark]) -> str:
        now = self._engine.state.marks() if before else {}
        return next((name for name, was in before.items() if not now[name].same(was)), "")

    def _check_place(self, before: dict[str, StateMark]) -> None:
        """``before``: of the shared state, when the batch had not been drawn. Raises UsageError."""
        moved = self._moved_since(before)
        if moved:
            raise UsageError(
                f"state[{moved!r}] was changed while the batch of step {self._rank.number} was loaded: what tells a "
                "rank's place in its data can't be copied from a replica, which has drawn its batch already; register "
                f"it as the rank's own, Session(rank_state={{{moved!r}: ...}})"
            )

    def _rollback(self, _: do.Rollback) -> None:
        self._engine.between.look()
        for call in self.kept_calls:
            call.cut()
        lost = self._engine.window.rollback(intact=self._rank.intact)
        if lost and self._rank.intact:
            self._lose(lost, self._number)

    def _lose(self, what: str, step: int) -> None:
        """Something is not what it was at the beginning of the window, and can't be brought back."""
        told = (
            f"rank {self._link.rank}: {what} was written before the update of step {step}, for the first time, and has "
            "no copy: the step can't be taken back, and this process ends so that it is replaced "
            "(docs/how-to/loops.md, State that is written before the update)"
        )
        if self._raised:  # an error of the script's is on its way, and is to be seen
            raise StateError(told)
        fail_stop(self._notices.event, "state_lost", told)

    def _gradients_ready(self, _: do.LearnLayout) -> None:
        self._tell_written(self._engine.window.gradients_ready(self._rank.commits))

    def _save_undo(self, _: do.SaveUndo) -> None:
        self._tell_written(self._engine.window.save_undo())

    def _tell_written(self, found: WrittenEarly | None) -> None:
        """What the bodies have written before their update, and will be copied first from now on."""
        if self._batches.look():
            self._notices.batch_written()
        if found is not None:
            self._notices.written_early(found)

    def _drop_gradients(self, _: do.DropGradients) -> None:
        self._engine.gradients.drop()
        if not self._rank.written:  # the second optimizer's turn is told with the first one's
            self._notices.update_left_out()

    def _committed(self, _: do.Committed) -> None:
        self._batches.forget()
        self._engine.window.forget()
        self._engine.collectives.begin_tail(self._rank.commits)

    def _committed_and_usual(self, effect: do.Committed) -> None:
        assert self._anomalies is not None
        self._committed(effect)
        self._anomalies.committed()

    def _check_unchanged(self, _: do.CheckUnchanged) -> None:
        try:
            self._without_update.body_ended(self._number, self._rank.base)
        except UsageError:
            self._unlike = True
            raise

    def _on_pause(self, _: do.OnPause) -> None:
        if problem := self._pauses.stand(self._rank.number):
            self._link.channel.send(m.Refused(problem))
            self._link.wait_for_the_end()

    def _rebuild_reducer(self, effect: do.RebuildReducer) -> None:
        layout = self._from_replica.take_layout() if effect.copied else None
        self._engine.window.rebuild_reducer(layout, self._rank.commits)

    # -- what the rank waits for

    def _check_collectives(self, _: do.CheckCollectives) -> on.RankEvent:
        intact = self._engine.collectives.intact()
        if intact:
            try:
                self._engine.device.synchronize()
            except RuntimeError as error:
                if self._device.kind_of(error) not in _LIKE_A_COLLECTIVE:
                    raise
                intact, self._error = False, error
        self._clock.stop()
        return on.Ok(int(intact))

    def _check_and_look(self, effect: do.CheckCollectives) -> on.RankEvent:
        """With ``TRE``: also at what the bodies have computed, on a device that is at rest."""
        event = self._check_collectives(effect)
        return on.Anomalous() if event == on.Ok() and self._is_anomalous() else event

    def _check_and_compare(self, effect: do.CheckCollectives) -> on.RankEvent:
        """Of a window that is computed twice the agent is told what has come of it, by all ranks: so before any of them
        looks for an anomaly, which may be one rank's alone.
        """
        event = self._check_collectives(effect)
        if event != on.Ok():
            return event
        ended, rank = self._verification.end(calls=self.calling), self._rank
        if ended is not None:
            self._peers.excuse_window()
            self._link.channel.send(self._computed(ended))
            self._recovered |= ended.differs_at >= 0  # as a rule it is what the loop keeps beside the Session
            order = self._order
            if rank.commits != order.verified or order.distance or ended.differs_at >= 0:
                return on.Doubtful()
        return on.Anomalous() if self._is_anomalous() else event

    def _computed(self, ended: Compared) -> m.Computed:
        rank = self._rank
        frame = m.Computed(
            rank.generation,
            rank.commits,
            rank.number,
            ended.differs_at,
            ended.of,
            calls=ended.calls,
            unshared=short(ended.unshared),
        )
        if ended.differs_at < 0:
            return frame
        batch, device = self._inputs()
        return structs.replace(frame, digests=(ended.was, ended.now), batch=batch, device=device)

    def _inputs(self) -> tuple[str, str]:
        """A digest of the window's batches, and where this rank computes."""
        batch = self._called or self._engine.data.look(self._batches.values())
        return batch.hex(), f"{socket.gethostname()} {self._engine.device.name()}"

    def _is_anomalous(self) -> bool:
        return self._anomalies is not None and self._anomalies.look(self._inputs)

    def _mark_to_compare(self, effect: do.Mark) -> None:
        commits, order = self._rank.commits, self._order
        self._mark_to_look(effect, whole=self._verification.due(commits))
        self._verification.begin(commits, order.distance if order.verified == commits else 0)

    def _mark_to_look(self, _: do.Mark, *, whole: bool = False) -> None:
        if self._anomalies is not None:
            self._anomalies.window_begins()
        self._engine.window.begin(whole=whole)

    def _cross(self, _: do.Cross) -> on.RankEvent:
        rank = self._rank
        return on.Ok() if self._peers.cross(rank.standing, self._number, rank.generation) else on.Stopped()

    def _await_stop(self, effect: do.AwaitStop) -> on.RankEvent:
        """Somebody may know why a collective failed; ``Trouble`` has asked. Only time in which both could run counts:
        an agent that is stopped will answer when it is continued, and one that is gone hangs up.
        """
        waited_s, looked = 0.0, time.monotonic()
        if not effect.limited:
            self._pulse.at(Activity.WAITING)
        while not self._peers.wait_stop(self._rank.generation, _LOOK_MS):
            frame = self._link.channel.receive(timeout_s=0)
            if isinstance(frame, m.End):
                leave(frame)
            since_s, looked = time.monotonic() - looked, time.monotonic()
            if effect.limited and not self._link.channel.peer_is_stopped():
                waited_s += min(since_s, _COUNTED_S)
                if waited_s > self._verdict_timeout_s:
                    return on.Failed()
        if not effect.limited:
            self._pulse.at(Activity.TRAINING)
        return on.Ok()

    def _quiesce(self, effect: do.Quiesce) -> on.RankEvent:
        self._children.hold()
        self._descriptors.lift()
        self.saving.wait()
        self._from_replica.forget()
        generation = self._peers.stop_generation
        damage = None if effect.tail else self._device.heard()  # there the alarm stays for the recovery after this one
        self._stop_delivery.notice(generation)
        self._quiet_since_ns = time.time_ns()
        guarded = bool(self._engine.groups.sockets())
        self._engine.groups.close()
        known = damage if damage is not None else self._from_replica.damaged
        self._from_replica.damaged = self._device.confirmed(known)
        if self._from_replica.damaged is not known and effect.tail:
            raise DeviceError(
                f"rank {self._link.rank}: its device lost memory after the update, where a step can't be left "
                "(decision 12); this process ends so that it is replaced"
            )
        if guarded:
            self._await_watchdog(generation)
        return on.Quieted(generation, self._from_replica.damaged.lost)

    def _await_watchdog(self, generation: int) -> None:
        """The watchdog shuts the old group's sockets by number; no new one may be opened before it is done."""
        deadline = time.monotonic() + _WATCHDOG_S
        while not self._peers.watchdog_done(generation) and time.monotonic() < deadline:
            time.sleep(0.0001)

    def _await(self, *kinds: type) -> Any:
        """The next frame of those kinds and of this generation; Stopped if a newer recovery begins before it."""
        generation = self._rank.generation
        while True:
            frame = self._link.receive()
            if isinstance(frame, m.Stop) and frame.generation > generation:
                return on.Stopped()
            if isinstance(frame, kinds) and getattr(frame, "generation", generation) == generation:
                return frame

    def _await_resume(self, _: do.AwaitResume) -> Any:
        frame = self._await(m.Resume, m.Paused, m.Pull)
        if isinstance(frame, m.Resume):
            self._order = frame
            self._descriptors.lower()
            self._children.let()
        return frame

    def _await_finished(self, _: do.AwaitFinished) -> Any:
        try:
            return self._await(m.Finished)
        except JobEnded as error:
            raise SystemExit(str(error)) from None

    def _build(self, effect: do.BuildGroups) -> on.RankEvent:
        self._descriptors.lift()
        generation = effect.plan.generation
        replaced = bool(effect.plan.replaced)
        self._recovered |= replaced
        self._begun_anew |= replaced
        built = build_groups(self._link, self._engine.groups, generation, replaced=replaced)
        if built is None:
            return on.Stopped()
        if isinstance(built, Exception):
            self._error = built
            lack = lacks(built)
            if lack:
                time.sleep(_LACK_S)  # it may be over then; so often is a recovery begun anew, and no more
            return on.Failed(f"building groups: {built}{lack}")
        self._engine.groups.adopt(built, replaced=replaced)
        self._stop_delivery.guard_sockets(self._engine.groups.sockets())
        # A stop that the watchdog handled before it knew of the new sockets would find nothing to shut.
        if self._peers.stop_raised(generation):
            return on.Stopped()
        self._link.channel.send(m.Built(generation))
        return on.Ok()

    def _fetch(self, effect: do.Fetch) -> on.RankEvent:
        offer = self._await(m.Offer)
        if isinstance(offer, on.Stopped):
            return offer
        self._injector.at("RESTORE", "start", generation=effect.plan.generation)
        if offer.changed and self._link.rank in effect.plan.replaced:
            self._check_beside(offer)
        published = self._peers.published(effect.plan.commits)
        try:
            return on.Ok(self._from_replica.take(effect.plan, offer, published, self._take_up))
        except ConfigError as error:
            raise set_up_recall.stray(self._link.agent, str(error)) from None
        except LayoutError as error:  # no other source, and no second try, would do; nor would what is saved
            told = (
                f"rank {self._link.rank} can't be replaced from rank {offer.source}, whose state does not fit: {error}"
            )
            self._link.channel.send(m.Refused(told))
            self._link.wait_for_the_end()
        except (TransferError, RuntimeError, OSError) as error:
            self._error = error
            return on.Failed(f"copying state: {error}")

    def _check_beside(self, offer: m.Offer) -> None:
        """Whether what stands beside the Session in this new process has changed in others. Raises SystemExit."""
        if changed := beside(self._engine.window.changed_beside(elsewhere=offer.changed)):
            told = f"since on rank {offer.source} {changed}, and a new process has it as it was: {HOW_TO_KEEP}"
            raise set_up_recall.stray(self._link.agent, told)

    def _take_up(self, published: bytes, tail: WrittenInTail) -> int:
        with self._engine.collectives.loading():
            number = self._publication.take_up(published, tail)
        if self._publication.behind or self._publication.tail_cut:
            self._notices.tail_lost(number, self._publication.behind, self._publication.given)
        self._tell_strayed(number)
        if self._entered:
            self._publication.called = b""  # it has its own arguments
        if self.calling and self._entered and number != self._rank.base:
            told = (
                f"rank {self._link.rank} can't finish the body of step {self._rank.number}, whose update it has lost "
                "and the other ranks have applied; it is replaced"
            )
            fail_stop(self._notices.event, "body_lost", told)
        return number

    def _tell_strayed(self, number: int) -> None:
        """The loader has been brought to where step ``number`` begins. Is it there? And is the script?"""
        if missed := self._publication.newly_missed():
            self._notices.other_loop(number, self._publication.loops, missed)
        if self._cursor.strayed:
            self._cursor.strayed = False  # it is told
            self._notices.other_batch(number, *self._cursor.place)

    def _serve(self, effect: do.Serve) -> on.RankEvent:
        try:
            self._from_replica.serve(effect.pull)
        except RuntimeError as error:
            self._error = error
            return on.Failed(f"sending state: {error}")
        return on.Ok()

    def _save(self, effect: do.SaveState) -> on.RankEvent:
        rank = self._rank
        self.saving.last(rank.generation, rank.commits, rank.base, effect.order)
        event: on.RankEvent = self._await()
        return event

    # -- the thread is the user's again

    def _return(self, effect: do.Return) -> None:
        self._answer = effect.value

    def _return_step(self, _: do.ReturnStep) -> None:
        drawn, number = self._batches[self._rank.place], self._rank.number
        if self._records.wanted:
            self._records.take(number, drawn.batch.value, drawn.place)
        self._answer = Step(self, number, drawn.batch.value, drawn.batch.epoch, self._rank.attempt)

    def _return_step_to_compare(self, effect: do.ReturnStep) -> None:
        self._return_step(effect)
        if (batch := self._verification.batch(self._rank.place)) is not None:
            self._answer = Step(self, self._rank.number, batch.value, batch.epoch, self._rank.attempt)

    def _cut(self, _: do.Cut) -> NoReturn:
        raise TrainingInterrupted

    def _give_up(self, _: do.GiveUp) -> NoReturn:
        raise self._error

    def _misuse(self, effect: do.Misuse) -> NoReturn:
        raise UsageError(effect.text)

    # -- the end

    def _fail_stop(self, error: DeviceError) -> NoReturn:
        fail_stop(self._notices.event, "device_failed", str(error))
        raise error

    def before_its_update(self) -> bool:
        """Whether the code that runs would run again after a fault."""
        return self._rank.redoable

    def outlive(self, error: BaseException | None) -> None:
        """The script is about to fail with this. If it is not to blame, this process ends in a way that is repaired."""
        if worker := lost_worker(error):
            told = f"rank {self._link.rank} has lost a worker, and is replaced: {worker}"
            fail_stop(self._notices.event, "worker_lost", told)

    def outlive_behind(self, error: BaseException | None) -> None:
        """``outlive`` for what was raised behind the body: one that was cut may not have bound all names, and what
        stands there may be for the device.
        """
        if self._is_fork:
            return
        self.outlive(error)
        if isinstance(error, Exception) and self._begun and not self._told_end and self._device.is_of_one(error):
            try:
                self._device.check_after_update(error)
            except DeviceError as failure:
                self._fail_stop(failure)
        if isinstance(error, NameError) and self._rank.redoable:
            told = (
                f"rank {self._link.rank} is replaced: a fault cut the body of its step, and the code behind it uses "
                f"what the body had not bound yet ({error}): write `if step.done:` in front of that code"
            )
            fail_stop(self._notices.event, "unbound_name", told)

    def _ended(self) -> None:
        """All ranks have come to the end of their loops."""
        if self._told_end or not self._begun:
            return
        self._told_end = True
        if self._anomalies is not None:
            self._anomalies.write(1)
        params, own = self._digests
        detail = {"params_digest": params, "rank_digest": own, "steps": self._rank.number}
        if self._nan.found:
            detail["nan_tensors"] = self._nan.found.tensors
        self._notices.event("session_end", {**detail, "commits": self._rank.commits, "redone": self._redone})
        if self._link.incarnation and not self._entered:
            self._notices.without_steps()

    def _release(self, *, for_another: bool = False) -> None:
        """Gives back all that this Session holds of the process. Idempotent: also called when the interpreter ends.

        ``for_another``: an exception is under way already. What fails here is only told, or it would take its place.
        """
        atexit.unregister(self._release)
        if self._released or self._is_fork:
            return
        self._released = True
        first: BaseException | None = None
        for failure in _failures(self._steps_of_release()):
            # Who wants this process to end (Ctrl-C) has not failed.
            if first is None and not (for_another and isinstance(failure, Exception)):
                first = failure
            else:
                self._notices.say_of_rank(f"the Session is closed, but for {failure!r}")
        if first is not None:
            raise first

    def _steps_of_release(self) -> tuple[Callable[[], object], ...]:
        """In this order; the last one unmaps what the others write to."""
        return (
            self._pulse.leaving,
            self._engine.device.close,
            self._engine.collectives.detach,
            self._engine.window.detach,
            self._engine.gradients.close,
            self._engine.drill.close,
            self._device.tell,
            self._stop_delivery.close,
            self._children.end,
            self.saving.close,
            self._verification.close,
            self._pulse.close,
            self._records.close,
            self._trace.close,
            self._notices.sink.close,
            self._injector.close,
            self._link.close,
        )

    @property
    def _number(self) -> int:
        return self._step.number if self._step is not None else self._rank.number
