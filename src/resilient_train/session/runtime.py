"""A Session under an agent: moves one rank through the phases of each update, and through recoveries.

The phases of an update, and who moves the rank there::

    COMPUTE   head of the loop          (interrupts are let in by `with step:` and by nothing else)
    READY     first optimizer.step()    gradients intact, own state published; then the barrier
    UPDATING  after the barrier
    APPLIED   last optimizer.step()     the rest of the body, and what is between steps, is the tail

A *window* is the run of steps up to one update: one step, or several where gradients are accumulated. A redo goes back
to the head of the window, with the same batches.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from typing import Any

from resilient_train import config
from resilient_train._native import allow_readers
from resilient_train.errors import JobEnded, StateError, TrainingInterrupted, UsageError
from resilient_train.events import now
from resilient_train.faults import parse_plan
from resilient_train.frameworks.base import Framework, Objects, Place
from resilient_train.observe.sinks import EVENTS_FILE, JsonLines
from resilient_train.protocol.messages import Refused, SaveLast, Started
from resilient_train.protocol.orders import LISTENING
from resilient_train.protocol.processor import Action, Processor
from resilient_train.protocol.progress import Activity
from resilient_train.protocol.standing import APPLIED, COMPUTE, READY, UPDATING, Phase, Standing
from resilient_train.session.device import Device
from resilient_train.session.fingerprints import Fingerprints
from resilient_train.session.guards import Guards
from resilient_train.session.injection import Injector
from resilient_train.session.link import Link
from resilient_train.session.loader import Cursor, Kept
from resilient_train.session.publication import Publication
from resilient_train.session.pulse import Pulse
from resilient_train.session.recovery import Recovery
from resilient_train.session.saving import Saving
from resilient_train.session.step import Step
from resilient_train.session.window import Window

_PLACES = (Place.TAIL, Place.STEP, Place.STEP, Place.UPDATE)  # by phase


class Runtime:
    """The Body of each step, and the Conductor of the engine."""

    def __init__(
        self,
        agent: config.AgentLink,
        engine: Framework,
        cursor: Cursor,
        objects: Objects,
        replicas: tuple[tuple[int, ...], ...],
        *,
        undo: bool,
    ) -> None:
        self._engine = engine
        self._cursor = cursor
        self._optimizers = len(objects.optimizers)
        self._replicas = replicas
        self._undo = undo
        self._link = Link(agent)
        self._page = self._link.page
        settings = config.read_settings()
        self._sink = JsonLines(f"{agent.run_dir}/{EVENTS_FILE}")
        self._publication = Publication(self._link, engine, cursor)
        self.saving = Saving(self._link, engine, self._publication, agent.run_dir, replicas, self._event)
        plan = parse_plan(settings.faults)
        self._injector = Injector(plan, agent.rank, agent.incarnation, self._sink, engine, self._link.board)
        self._fingerprints = Fingerprints(agent, engine, wanted=settings.fingerprints)
        self._pulse = Pulse(self._link, agent.run_dir, self._event)
        self.slow = self._pulse.slow
        generation = self._link.generation
        self._processor = Processor(agent.rank, generation=-1 if agent.joining else generation, holds=not agent.joining)
        self._recovery = Recovery(self._link, engine, self._processor, settings, self._injector, self._load_published)
        self._device = Device(self._link, engine, self._recovery, self._event, mends=config.read_switches().uce)
        self._guards = Guards(self._link, engine, settings)
        self._interrupt = self._guards.interrupt
        self._recovery.disarm = self._guards.on_stop
        self._recovery.event = self._event
        self._recovery.save_last = self._save_last
        self._recovery.guard = self._guards.watchdog.guard_sockets
        self._joining = agent.joining
        self._begun = self._finished = self._released = False
        atexit.register(self._release)
        self._came_at = -1
        self._window = Window()
        self._interrupted: BaseException | None = None
        self._due: Action | None = None
        self._step: Step | None = None

    # -- the loop

    def steps(self, total: int, start: int) -> Iterator[Step]:
        """See ``Session.steps``."""
        self._total = total
        if not self._begun:
            self._window.begin_at(start)
            self._start()
        while True:
            self._settle_at_head()
            # The others may have left by a `break` that a new process comes too late for.
            over = self._came_at == self._processor.standing.commits and self._link.over_elsewhere(self._came_at)
            if over or self._window.number >= total:
                self._finish()
                return
            step = self._next_step()
            if self._page.stop_raised(self._processor.generation):
                continue
            yield step
            self._step = None
            if not step.entered:
                raise UsageError(f"step {step.number} was not used: write `with step:` around the loop's body")

    def _start(self) -> None:
        """Meets the other ranks for the first time; a replacement meets them in the middle of a recovery."""
        self._begun = True
        allow_readers()
        self._injector.listen(self._engine, lambda: self._window.number, lambda: self._processor.generation)
        self._pulse.open()
        self._engine.attach(self, self._link)
        self._engine.watch_device(self._link.board, self._link.rank)
        self._guards.start()
        self.saving.open()
        if self._joining:
            self._due = self._recovery.take_part()
            return
        if self._link.source is not None:
            self._load_published(self.saving.restore(self._link.source))
            self._processor.standing = Standing(self._link.source.commits, Phase.APPLIED)
        try:
            self._engine.check_state()
        except StateError as error:
            self._link.channel.send(Refused(str(error)))
            raise
        self._publication.publish(self._processor.standing.commits, self._window.number)
        self.saving.begin_at(self._processor.standing.commits)
        self._link.record(self._processor.standing, self._window.number)
        digest, _ = self._engine.digests()
        self._guards.watchdog.guard_sockets(self._engine.sockets())
        self._recovery.meet(Started(digest, self._engine.group_names(), self._replicas, self._window.number))

    def _settle_at_head(self) -> None:
        """Between two steps: the tail is over, and whatever a recovery wants of this rank can be done now."""
        if self._interrupted is not None:
            self._engine.keep_collectives_home(False)
            error, self._interrupted = self._interrupted, None
            if self._due is None:
                self._due = self._after_error(error)
        elif self._processor.standing.phase is Phase.APPLIED and self._due is not Action.COPY:
            if self._injector.clauses:
                self._injector.at("BETWEEN", "start", step=self._window.number)
            self._page.write(self._processor.advance(Phase.COMPUTE).commits, COMPUTE, self._window.number)
        while True:
            if self._due is not None:
                action, self._due = self._due, None
                if self._recovery.last is not None:
                    order, self._recovery.last = self._recovery.last, None
                    self._end_saved(order)
                    self._due = self._recovery.take_part()
                elif self._recovery.settle(action, lambda: self._window.base, begun=bool(self._window.kept)):
                    self._resume(action)
                    if self._processor.leaves and self._window.number < self._total:
                        self._end_saved(None)
                else:
                    self._due = self._recovery.take_part()
            elif self._page.stop_raised(self._processor.generation):
                self._due = self._take_part()
            else:
                return

    def _end_saved(self, order: SaveLast | None) -> None:
        """At the head of a window: saves its start, and ends with the job. Returns if another recovery begins first."""
        if not self._window.kept:
            self._publication.publish(self._processor.standing.commits, self._window.base)
        self._save_last(order)
        self._recovery.await_the_end()

    def _save_last(self, order: SaveLast | None) -> None:
        self.saving.last(self._processor.generation, self._processor.standing.commits, self._window.base, order)

    def _resume(self, action: Action) -> None:
        if action is not Action.FINISH_TAIL and action is not Action.APPLY:
            self._window.go_back(again=action is Action.REDO)
        if action is Action.COPY:
            self._came_at = self._processor.standing.commits
            self._window.kept.clear()
            if missing := self._engine.neutral_contributions():
                self._event("tail_input_missing", detail={"collectives": missing})

    def _after_error(self, error: BaseException) -> Action:
        """A body ended with what looks like a fault: take part in its recovery, or raise the error after all."""
        if not self._recovery.wait_for_stop(f"{type(error).__name__}: {error}"):
            raise error
        return self._take_part()

    def _take_part(self) -> Action:
        self.saving.settle()
        self._device.hear_alarms()
        return self._recovery.take_part()

    def _next_step(self) -> Step:
        commits = self._processor.standing.commits
        place = self._window.number - self._window.base
        if place == 0:
            if not self._window.kept:
                # A redone step's batch is drawn already: what was published before that still is where it starts.
                self._publication.publish(commits, self._window.number)
                self.saving.head(commits, self._window.number)
            self._page.restart()
        if place == len(self._window.kept):
            self._pulse.at(Activity.LOADING)
            batch = self._cursor.next()
            self._pulse.at(Activity.TRAINING)
            self._window.kept.append(Kept(batch, self._engine.random_state() if place else None, self._cursor.place))
        elif (drawn := self._window.kept[place].random) is not None:
            # The batch is kept, so nothing is drawn for it; but drawing it had moved the random numbers.
            self._engine.restore_random_state(drawn)
        batch = self._window.kept[place].batch
        if place == 0:
            self._engine.begin()
        self._fingerprints.take(self._window.number, batch.value, self._window.kept[place].place)
        self._step = Step(self, self._window.number, batch.value, batch.epoch, self._window.attempt)
        return self._step

    def enter(self, step: Step) -> None:
        """The body begins."""
        if self._injector.clauses or self._page.order() != LISTENING:
            self._injector.at("COMPUTE", "start", step=step.number)
        self._interrupt.arm(self._processor.generation)

    def leave(self, step: Step, error: BaseException | None) -> bool:
        """The body ended. True: the step will run again."""
        if self._interrupt.armed:
            self._interrupt.disarm()
        if error is None:
            try:
                self._complete(step)
            except TrainingInterrupted as interrupted:
                error = interrupted
        if error is None:
            self._window.number = step.number + 1
            return False
        if not isinstance(error, TrainingInterrupted) and not self._device.explains(error, self._processor):
            return False
        self._interrupted = error
        # What stands behind the `with` runs now although the step will run again: its collectives must not hang, nor
        # fail.
        self._engine.keep_collectives_home(True)
        return True

    def _complete(self, step: Step) -> None:
        phase = self._processor.standing.phase
        if phase is Phase.UPDATING:
            self._applied()  # not all optimizers had a turn in this step
        elif phase is Phase.COMPUTE and (self._window.stepped or self._window.scaled):
            # `undo`: the whole body was one transaction; or the scaler refused the update, which is an update too.
            self._commit()
            self._applied()
        elif self._injector.clauses:
            self._injector.at("COMPUTE" if phase is Phase.COMPUTE else "APPLIED", "end", step=step.number)

    # -- the update

    def before_update(self, optimizer: Any) -> None:
        """The optimizer is about to write: interrupts are held from here to the head of the loop."""
        self._interrupt.disarm()
        phase = self._processor.standing.phase
        if not self._undo and (id(optimizer) in self._window.stepped or phase is Phase.APPLIED):
            raise UsageError(
                f"optimizer.step() ran twice in step {self._window.number}; give each update its own `with step:`, or "
                "pass Session(undo=True)"
            )
        if self._undo:
            self.saving.fence()
            self._engine.save_undo()
        elif phase is Phase.COMPUTE:
            self._commit()

    def after_update(self, optimizer: Any) -> None:
        """The optimizer has written."""
        self._window.stepped.add(id(optimizer))
        if self._undo:
            self._interrupt.arm(self._processor.generation)
        elif len(self._window.stepped) == self._optimizers:
            self._applied()

    def after_scaler(self) -> None:
        """The scaler was updated; if no optimizer ran it had refused the update."""
        self._window.scaled = True

    def _commit(self) -> None:
        """READY, the barrier, UPDATING. Raises TrainingInterrupted if the update is to be redone instead."""
        number, injector = self._window.number, self._injector
        if injector.clauses:
            injector.at("READY", "before", step=number)
        if not self._engine.collectives_intact():
            raise TrainingInterrupted
        commits = self._processor.standing.commits
        self.saving.fence()
        self._engine.gradients_ready(commits)
        self._publication.publish(commits + 1, number + 1)
        self._processor.advance(Phase.READY)
        self._page.arrive(commits, READY, number)
        if injector.clauses:
            injector.at("READY", "barrier", step=number)
        if not self._page.cross(commits, READY, UPDATING, number, self._processor.generation):
            if not self._recover_at_barrier():
                raise TrainingInterrupted
            self._page.write(commits, UPDATING, number)
        self._processor.advance(Phase.UPDATING)
        if injector.clauses:
            injector.at("UPDATING", "start", step=number)

    def _recover_at_barrier(self) -> bool:
        """Stopped in the barrier. True: everybody was READY after all, the update goes on from where it stands."""
        self._due = self._take_part()
        return self._due is Action.APPLY

    def _applied(self) -> None:
        number = self._window.number
        self._engine.synchronize()
        if self._injector.clauses:
            self._injector.at("UPDATING", "end", step=number)
        commits, _ = self._processor.advance(Phase.APPLIED)
        self._engine.committed()
        if self._link.tail_used:
            self._link.reset_tail()
        self._page.begin(commits, APPLIED, number)
        self._window.close(number)
        if self._injector.clauses:
            self._injector.at("APPLIED", "start", step=number)

    # -- the tail

    def collective(self, *, spans_job: bool) -> Place:
        """A collective is about to be entered."""
        if spans_job:
            self._page.enter()
        return _PLACES[self._processor.standing.phase] if self._begun else Place.STEP

    def survive(self, error: BaseException | None) -> bool:
        """A collective of the tail failed; see ``frameworks/torch/tail``."""
        if not (self._link.stop_raised(self._processor.generation) or self._engine.groups_broken()):
            return False
        if not self._recovery.wait_for_stop(f"{type(error).__name__}: {error}"):
            return False
        self._processor.tail_done = self._engine.tail_completed()
        self._due = self._recovery.take_part()
        return True

    def _load_published(self, payload: bytes) -> None:
        self._window.begin_at(self._publication.take_up(payload))

    # -- the end

    def close(self, *, finish: bool) -> None:
        """Leaves: after all ranks have come to their end, or (``finish`` False) at once."""
        try:
            if finish and self._begun and not self._finished:
                self._finish()
        finally:
            self._release()

    def _release(self) -> None:
        """Gives back all that this Session holds of the process. Idempotent: also called when the interpreter ends."""
        atexit.unregister(self._release)
        if self._released:
            return
        self._released = True
        self._engine.detach()
        self._device.tell()
        self._guards.close()
        self.saving.close()
        self._pulse.close()
        self._fingerprints.close()
        self._sink.close()
        self._injector.close()
        self._link.close()

    def _finish(self) -> None:
        """All ranks come to the end of their loops before any leaves: a rank lost until then needs the others."""
        self.saving.settle()
        self._pulse.at(Activity.FINISHED)
        while not self._finished:
            self._settle_at_head()
            try:
                self._finished = self._recovery.finish()
            except JobEnded as error:
                raise SystemExit(str(error)) from None
        self._fingerprints.take(self._window.number, None, self._cursor.place)
        params, own = self._engine.digests()
        counted = {"commits": self._processor.standing.commits, "redone": self._recovery.redone}
        digests = {"params_digest": params, "rank_digest": own}
        self._event("session_end", detail={**digests, "steps": self._window.number, **counted})

    def _event(self, kind: str, detail: dict[str, Any]) -> None:
        rank, incarnation, generation = self._link.rank, self._link.incarnation, self._processor.generation
        where = {"rank": rank, "incarnation": incarnation, "generation": generation, "step": self._window.number}
        self._sink.write(now(kind, **where, detail=detail))
