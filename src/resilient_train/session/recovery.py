"""A rank's part in a recovery, in its training thread: leave the step, rebuild, take state over, wait for the others.

``take_part`` goes from STOP to REBUILD and returns the rank's Action; the caller brings the loop to where that action
can be carried out (the end of the tail, or the head of the loop), and calls ``settle`` for RESTORE and RESUME. A newer
generation may be announced at any moment; then either returns early, and the caller begins again.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

from resilient_train.config import Settings
from resilient_train.errors import DeviceError, ProtocolError, TransferError
from resilient_train.frameworks.base import Damage, Framework, Sources
from resilient_train.protocol.messages import (
    Built,
    Damaged,
    Done,
    End,
    Fetched,
    Finish,
    Finished,
    FromAgent,
    Offer,
    Plan,
    Pull,
    Resume,
    SaveLast,
    Started,
    Stop,
    Trouble,
)
from resilient_train.protocol.processor import Action, Processor
from resilient_train.protocol.standing import Phase
from resilient_train.session.ghost import tail_entries
from resilient_train.session.injection import Injector
from resilient_train.session.link import Link, leave
from resilient_train.session.surrender import surrenders
from resilient_train.state.transfer import Span, read_from

NOTHING_DAMAGED = Damage(frozenset(), (), 0)


def _short(text: str) -> str:
    return textwrap.shorten(text, 200, placeholder=" ...")


class Recovery:
    """Drives the processor of one rank. ``load_published`` puts a publication of the rank's own state back."""

    def __init__(
        self,
        link: Link,
        engine: Framework,
        processor: Processor,
        settings: Settings,
        injector: Injector,
        load_published: Callable[[bytes], None],
    ) -> None:
        self._link = link
        self._engine = engine
        self._processor = processor
        self._settings = settings
        self._injector = injector
        self._load_published = load_published
        self.disarm: Callable[[int], None] = lambda _: None
        self.guard: Callable[[list[tuple[int, int]]], None] = lambda _: None
        self.event: Callable[[str, dict[str, Any]], None] = lambda *_: None
        self.save_last: Callable[[SaveLast], None] = lambda _: None
        self.last: SaveLast | None = None
        """What is to be saved once the tail is over."""
        self.redone = 0
        self._damaged = NOTHING_DAMAGED

    # -- first and last

    def meet(self, started: Started) -> None:
        """Tells the agent that this rank is ready for its first step, and waits until all ranks are."""
        self._link.channel.send(started)
        while not isinstance(self._link.receive(), Resume):
            pass

    def finish(self) -> bool:
        """Tells the agent that this rank's loop is over. True: all ranks' are. False: a recovery wants this rank."""
        self._link.channel.send(Finish(self._processor.generation))
        while True:
            frame = self._link.receive()
            if isinstance(frame, Finished):
                return True
            if isinstance(frame, Stop) and frame.generation > self._processor.generation:
                return False

    def lose_memory(self, ranges: list[Span]) -> dict[str, Any]:
        """Device memory of this rank lost data: finds out whose it was, tells the agent. Returns the event's detail."""
        self._damaged = self._engine.assess(ranges)
        if self._damaged.lost:
            self._processor.damage()
        names = self._damaged.names()
        size = sum(span.size for span in ranges)
        text = f"uncorrectable memory error in {size} bytes ({', '.join(names) or 'no state'})"
        self._link.channel.send(Damaged(self._processor.generation, _short(text)))
        return {"ranges": [list(span) for span in ranges], "tensors": names}

    # -- STOP, REPLACE, REBUILD, AGREE

    def wait_for_stop(self, detail: str) -> bool:
        """A collective failed and nobody has said why: ask, and wait. False if no answer came in time."""
        generation = self._processor.generation
        if self._link.stop_raised(generation):
            return True
        self._link.channel.send(Trouble(generation, _short(detail)))
        deadline = time.monotonic() + self._settings.verdict_timeout_s
        while not self._link.board.wait_stop(generation, 100):
            frame = self._link.channel.receive(timeout_s=0)
            if isinstance(frame, End):
                leave(frame)
            if time.monotonic() > deadline:
                return False
        return True

    @surrenders
    def take_part(self) -> Action:
        """From the raised stop word to rebuilt groups. Returns what this rank is to do. SystemExit: the job ends."""
        while True:
            generation = self._link.board.stop_generation
            assert generation > self._processor.generation, "take_part without a stop"
            self.disarm(generation)
            stopped_ns = time.time_ns()
            self._injector.at("STOP", "start", generation=generation)
            guarded = bool(self._engine.sockets())
            self._engine.close_groups()
            self._confirm_damage()
            if guarded:
                self._wait_for_watchdog(generation)
            joined = self._processor.join(generation, self._engine.group_names(), stopped_ns)
            self._link.channel.send(joined)
            plan = self._await_plan(generation)
            if isinstance(plan, SaveLast):
                if self._processor.standing.phase is Phase.APPLIED and plan.part >= 0:
                    self._engine.keep_collectives_home(True)  # the rest of the tail: nobody is there to answer
                    self.last = plan
                    return Action.FINISH_TAIL
                self._save_here(plan)
                continue
            if plan is None:
                continue
            action = self._processor.accept(plan)
            if self._rebuild(plan) and self._replay(plan, action):
                return action

    def _confirm_damage(self) -> None:
        """The device may know of more than the rank was told, and forgets it when it is restarted."""
        known, self._damaged = self._damaged, self._engine.confirm(self._damaged)
        if self._damaged is not known:
            if self._processor.standing.phase is Phase.APPLIED:
                raise DeviceError(
                    f"rank {self._link.rank}: its device lost memory after the update, where a step can't be left "
                    "(decision 12); this process ends so that it is replaced"
                )
            self.event("uce", {"ranges": [], "tensors": self._damaged.names()})
            self._processor.damage()

    def _wait_for_watchdog(self, generation: int) -> None:
        """The watchdog shuts the old group's sockets by number; no new one may be opened before it is done."""
        deadline = time.monotonic() + 5
        while self._link.board.stopped_generation(self._link.rank) < generation and time.monotonic() < deadline:
            time.sleep(0.0001)

    def _save_here(self, order: SaveLast) -> None:
        """The job ends; what this rank holds is whole, wherever in the step it was stopped. Returns if superseded."""
        if order.part >= 0:
            self._engine.rollback()
            self.save_last(order)
        self.await_the_end()

    def await_the_end(self) -> None:
        """Until the agent ends this process (SystemExit), or another recovery begins."""
        while not isinstance(frame := self._link.receive(), Stop) or frame.generation <= self._processor.generation:
            pass

    def _await_plan(self, generation: int) -> Plan | SaveLast | None:
        while True:
            frame = self._link.receive()
            if isinstance(frame, Stop) and frame.generation > generation:
                return None
            if isinstance(frame, (Plan, SaveLast)) and frame.generation == generation:
                return frame

    def _rebuild(self, plan: Plan) -> bool:
        """Builds the groups on a helper thread, because the constructor listens to nobody. False: superseded."""
        generation = plan.generation
        self._injector.at("REBUILD", "start", generation=generation)
        readable, writable = os.pipe2(os.O_CLOEXEC)
        cancelled = threading.Event()
        outcome: list[Any] = []

        def build() -> None:
            try:
                outcome.append(self._engine.build_groups(generation, self._link.attempt, cancelled))
            except Exception as error:
                outcome.append(error)
            finally:
                os.close(writable)

        threading.Thread(target=build, name="rt-build-groups", daemon=True).start()
        try:
            if not self._built_before_stop(readable, generation):
                cancelled.set()
                return False
        finally:
            os.close(readable)
        if isinstance(outcome[0], Exception):
            # A peer died while the groups were being built; its death is announced soon, or was not seen at all.
            if self.wait_for_stop(f"building groups: {outcome[0]}"):
                return False
            raise outcome[0]
        self._engine.adopt_groups(outcome[0], replaced=bool(plan.replaced))
        self.guard(self._engine.sockets())
        self._injector.at("REBUILD", "end", generation=generation)
        # A stop that the watchdog handled before it knew of the new sockets would find nothing to shut.
        if self._link.stop_raised(generation):
            return False
        self._link.channel.send(Built(generation))
        return True

    def _built_before_stop(self, readable: int, generation: int) -> bool:
        # A source may be ready with its offer before this rank has noticed that it is built.
        early: list[FromAgent] = []
        try:
            while not self._link.channel.wait_either(readable):
                frame = self._link.receive()
                if isinstance(frame, Stop) and frame.generation > generation:
                    return False
                early.append(frame)
            return True
        finally:
            self._link.channel.put_back(early)

    def _replay(self, plan: Plan, action: Action) -> bool:
        """Repeats the collectives of the tail that others still lack. False: superseded while at it."""
        if plan.tail_from < 0 or action in (Action.COPY, Action.APPLY):
            return True
        try:
            self._engine.tail_replay(plan.tail_from)
        except RuntimeError as error:
            if self.wait_for_stop(f"repeating a collective: {error}"):
                return False
            raise
        return True

    # -- RESTORE, RESUME

    @surrenders
    def settle(self, action: Action, step: Callable[[], int], *, begun: bool) -> bool:
        """Brings this rank to the start of the plan's update and waits for the others. False: superseded.

        ``step`` tells the number of the step that comes next, ``begun`` whether the rank had begun that update (so that
        REDO takes something back).
        """
        plan = self._processor.plan
        assert plan is not None
        if self._link.stop_raised(plan.generation):
            return False
        manifest: bytes | None = None
        if action is Action.REDO:
            self._engine.rollback()
            self.redone += begun
        elif action is Action.COPY:
            self._engine.rollback()  # in a new process there is nothing to take back
            offer = self._copy(plan)
            if offer is None:
                return False
            manifest = offer.manifest
            payload = self._link.arena.published(plan.commits)
            if payload is None:
                raise TransferError(
                    f"rank {self._link.rank} had published nothing from which update {plan.commits} starts"
                )
            self._load_published(payload)
        self._link.record(self._processor.settle(), step())
        sources = self._offer(plan)  # first of all: others wait for it
        self._engine.settle(manifest, plan.commits)
        self._injector.at("RESTORE", "end", generation=plan.generation)
        self._link.channel.send(Done(plan.generation, action is Action.REDO and begun, step()))
        return self._await_resume(plan.generation, sources)

    def _offer(self, plan: Plan) -> Sources | None:
        """Describes this rank's state to each rank that is to copy it. Held unchanged until Resume."""
        targets = self._processor.sources_for
        if not targets:
            return None
        sources = self._engine.sources()
        for target in targets:
            offer = Offer(plan.generation, self._link.rank, target, os.getpid(), sources.manifest, sources.digest)
            self._link.channel.send(offer)
        return sources

    def _await_resume(self, generation: int, sources: Sources | None) -> bool:
        while True:
            frame = self._link.receive()
            if isinstance(frame, Resume) and frame.generation == generation:
                return True
            if isinstance(frame, Stop) and frame.generation > generation:
                return False
            if isinstance(frame, Pull) and frame.generation == generation and sources is not None:
                try:
                    self._engine.send_over_group(sources, frame.target)
                except RuntimeError as error:
                    if not self.wait_for_stop(f"sending state: {error}"):
                        raise
                    return False

    def _copy(self, plan: Plan) -> Offer | None:
        """Stands in for this rank in the tail, then takes a replica's state over. None: superseded."""
        if plan.tail_from >= 0 and not self._ghost(plan):
            return None
        offer = self._await_offer(plan.generation)
        if offer is None:
            return None
        self._injector.at("RESTORE", "start", generation=plan.generation)
        begun_ns = time.monotonic_ns()
        try:
            size, way = self._receive_state(offer)
        except (TransferError, RuntimeError, OSError) as error:
            # The source may have died under the copy: then a newer generation names another one.
            if self.wait_for_stop(f"copying state: {error}"):
                return None
            raise
        took_ns = time.monotonic_ns() - begun_ns
        self._link.channel.send(Fetched(plan.generation, offer.source, size, took_ns, way))
        return offer

    def _receive_state(self, offer: Offer) -> tuple[int, str]:
        remote = self._engine.remote_spans(offer.manifest)

        def read_memory(local: list[Span]) -> None:
            wanted = [Span(r.address, min(r.size, here.size)) for r, here in zip(remote, local, strict=True)]
            read_from(offer.pid, wanted, local)

        damaged, self._damaged = self._damaged, NOTHING_DAMAGED
        if self._settings.transfer != "group":
            try:
                if damaged.lost:
                    with contextlib.suppress(TransferError):  # an update was begun: then all of it is fetched
                        return self._engine.mend(offer.manifest, read_memory, offer.digest, damaged), "memory"
                return self._engine.receive(offer.manifest, read_memory, offer.digest), "memory"
            except PermissionError:
                if self._settings.transfer == "memory":
                    raise
        self._link.channel.send(Pull(offer.generation, offer.source, self._link.rank))
        fetch = self._engine.fetch_over_group(offer.source)
        return self._engine.receive(offer.manifest, fetch, offer.digest), "group"

    def _await_offer(self, generation: int) -> Offer | None:
        while True:
            frame = self._link.receive()
            if isinstance(frame, Stop) and frame.generation > generation:
                return None
            if isinstance(frame, Offer) and frame.generation == generation:
                return frame

    def _ghost(self, plan: Plan) -> bool:
        try:
            self._engine.tail_ghost(plan.tail_from, tail_entries(self._link, plan))
        except (RuntimeError, ProtocolError) as error:
            if not self.wait_for_stop(f"standing in for rank {self._link.rank}: {error}"):
                raise
            return False
        return not self._link.stop_raised(plan.generation)
