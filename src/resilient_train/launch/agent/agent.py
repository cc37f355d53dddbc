"""The agent: starts the ranks of a node, sees them die, owns the memory that outlives them, hosts the store.

One thread, one event loop. What happens after a fault is the controller's decision; the agent feeds it what it sees and
carries out what it says.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import shlex
import signal
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

from resilient_train._native import Board, DeathWatch
from resilient_train.config import read_switches
from resilient_train.descriptors import raise_limit
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.launch.agent.alarms import Alarms
from resilient_train.launch.agent.anomaly_files import AnomalyFiles
from resilient_train.launch.agent.collective_reports import CollectiveReports, Newest
from resilient_train.launch.agent.console_text import end_of, line, newest_told, pause_told, told
from resilient_train.launch.agent.credentials import Admission, RankConnection, new_token
from resilient_train.launch.agent.event_loop import BackgroundTasks, add_signal_handlers
from resilient_train.launch.agent.hang_watch import LOOK_S, HangWatch
from resilient_train.launch.agent.how_it_failed import how_it_failed, how_it_fails
from resilient_train.launch.agent.last_save import LastSave
from resilient_train.launch.agent.logs import SHOW_EVERY_S, Logs
from resilient_train.launch.agent.operators import Operators
from resilient_train.launch.agent.pauses import Pauses
from resilient_train.launch.agent.processes import Processes, RankProcess
from resilient_train.launch.agent.rendezvous import make_store
from resilient_train.launch.agent.saves import Saves
from resilient_train.launch.agent.straggler_watch import StragglerWatch
from resilient_train.launch.agent.waiting import Waiting
from resilient_train.launch.exit_codes import EXIT_AT_ONCE, EXIT_BUG, EXIT_WRONG_INPUT
from resilient_train.launch.fork.imports import target_of, uses_us
from resilient_train.launch.fork.standby_pool import Pool
from resilient_train.launch.fork.zygote import Root
from resilient_train.launch.spec import SOCKET, JobSpec
from resilient_train.observe.deviations import count_deviations, last_agreement
from resilient_train.observe.history import events_of
from resilient_train.observe.sinks import Sink
from resilient_train.observe.stacks import STACKS_FOLDER
from resilient_train.protocol import messages as m
from resilient_train.protocol import orders
from resilient_train.protocol.carried_messages import CarriedMessages
from resilient_train.protocol.commands import (
    Command,
    EndJob,
    KeepAnomalies,
    Kill,
    Note,
    RaiseStop,
    Send,
    SetPause,
    Spawn,
)
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.difference_report import SharedObjects, rule
from resilient_train.protocol.hang import Stall, Suspicion
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, Stage
from resilient_train.protocol.progress import Activity, progress_of
from resilient_train.protocol.standing import Standing, standing_of
from resilient_train.state import abnormal
from resilient_train.state.arena import DEFAULT_SLOT_BYTES, Arena
from resilient_train.transport import listen
from resilient_train.unix_listener import Listener

_SHORT_OF = frozenset((errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM))
"""Descriptors, processes or memory: there may be some again soon."""
_SHORT_S = 1.0
_TRIES = 10
_UNKILLABLE_S = 10.0
"""A process that was killed and has not ended by then waits in the kernel for something that does not come (storage
that is gone). It never runs a line of its program again, so it is as good as dead.
"""
_LEAVING_S = 30.0
"""How long a rank that is leaving explains that collectives fail; then it is a fault that it has not ended."""
_LEAVING_POLL_S = 0.02

DIFFER_GRACE_S = 2.0
"""How long a rank whose replicas differ is heard alone, before the job ends without what the others would have said."""


class Agent:
    """``run`` returns the job's exit code. ``root``: what ranks are forked from, or why they can't be."""

    def __init__(self, spec: JobSpec, sink: Sink, root: Root | str) -> None:
        self._spec = spec
        self._sink = sink
        limit = raise_limit()
        self._controller = Controller(spec.world_size, spec.policy)
        self._job = self._controller.job
        try:
            self._board = Board.create(spec.world_size)
        except OSError as error:
            raise ConfigError(f"shared memory for the ranks can't be had: {error} (ulimit -f)") from None
        self._deaths = DeathWatch(self._board)
        self._logs = Logs(spec)
        self._arenas = [Arena.create(DEFAULT_SLOT_BYTES, spec.settings.tail_log_bytes) for _ in range(spec.world_size)]
        self._store = make_store(spec.host, spec.port)
        self._socket_path = spec.run_dir / SOCKET
        self._pool = Pool(root, spec.command, spec.settings, self._on_standby)
        token = new_token()
        self._processes = Processes(spec, self._logs, self._pool, self._socket_path, self._store.port, token, limit)
        self._reaping: set[RankProcess] = set()
        self._set_ups: dict[int, m.SetUp] = {}
        """What the ranks were given before their loops, for who takes their places."""
        self._background = BackgroundTasks()
        self._unborn: dict[int, Spawn] = {}
        """Ranks whose process is asked for, and not there yet."""
        self._fenced: dict[RankProcess, str] = {}
        self._failed: set[RankProcess] = set()
        """They end by an exception of the script's, when the state is saved."""
        reports = CollectiveReports(self._board, Path(spec.run_dir) / STACKS_FOLDER)
        self._hang_watch = HangWatch(self._board, self._job, self._processes, reports, spec.settings)
        self._straggler_watch = StragglerWatch(self._board, self._job, spec.settings)
        self._shared_objects = SharedObjects()
        self._carried_messages = CarriedMessages()
        self._alarms = Alarms(self._board, self._job)
        self._waiting = Waiting(self._board, self._job, self._processes, self._say)
        self._pauses = Pauses(self._board, self._controller)
        slower = self._straggler_watch
        operators = Operators(self._board, self._job, self._processes, self._waiting, self._pauses, slower, self._note)
        self._admission = Admission(token, self._job, self._processes, operators, self, self._note)
        keep = spec.settings.keep_checkpoints
        self._saves = Saves(
            spec.run_dir, spec.world_size, keep, self._note, self._say, self._board.settle, self._background.begin
        )
        known = abnormal.read(spec.run_dir) if read_switches().tre else {}
        self._job.know_anomalies(known)
        self._anomaly_files = AnomalyFiles(spec.run_dir, known, self._background.begin, self._say)
        if spec.policy.max_deviations:
            self._job.deviations.update(count_deviations(events_of(spec.run_dir)))
        self._job.can_go_back = self._saves.can_go_back
        self._job.newest_saved = lambda: self._saves.states.newest
        self._job.saved_before = self._saves.saved_before
        self._job.agreed_step = self._saves.agreed_step
        if spec.policy.neighbours:
            self._saves.states.agreed(*last_agreement(events_of(spec.run_dir)))
        self._job.newest_without_nan = lambda: self._saves.states.newest_without_nan
        self._job.uses_us = functools.cache(functools.partial(uses_us, target_of(spec.command)))
        self._last_save = LastSave(self._board, self._controller, self._saves, self._arenas, spec.settings)
        self._ending: EndJob | None = None
        self._doubtful = ""
        """What is to be said of the newest saved state beside, if it is not to be trusted."""
        self._ended = asyncio.Event()
        self._choosing = False
        """All ranks are to be started, and it is not known yet from what."""
        self._fault_ns = 0

    async def run(self) -> int:
        """Runs the job to its end. Raises ConfigError if it can't begin."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_bug)
        self._last_save.carry_out = self._pauses.carry_out = self._carry_out
        try:
            connections_max = 4 * self._spec.world_size + 256
            self._listener = Listener(self._socket_path, self._admission, listen(self._socket_path), connections_max)
        except OSError as error:
            raise ConfigError(f"the agent can't listen at {self._socket_path}: {error}") from None
        self._loop.add_reader(self._deaths.fd, self._on_deaths)
        add_signal_handlers(self._spec.signals, self._on_signal)
        logs = self._background.begin(self._show_logs())
        self._loop.call_soon(self._look_out)
        try:
            self._processes.begin()
            self._begin_start(self._controller.launch())
            await self._ended.wait()
            self._pool.close()
            if self._ending is not None:
                await self._stop_ranks()
            failed = self._ending is not None and self._ending.code != 0
            at_once = self._ending is not None and self._ending.code in EXIT_AT_ONCE
            timeout_s = self._spec.shutdown_timeout_s
            saved = self._saves.finish(timeout_s, failed=failed, at_once=at_once)
            await asyncio.gather(saved, self._anomaly_files.finish(timeout_s))
            if self._ending is not None and self._ending.code and (left := await self._saves.start.left()):
                first = "once that is mended and it is started" if self._ending.code == EXIT_WRONG_INPUT else "started"
                where = shlex.quote(str(self._spec.run_dir))
                self._say(f"{first} again with --run-dir {where}, the job goes on from {left}{self._doubtful}")
        finally:
            logs.cancel()
            self._pool.close()
            self._kill_ranks()
            self._logs.finish()
            self._listener.close()
            self._loop.remove_reader(self._deaths.fd)
            self._deaths.close()
        return self._ending.code if self._ending is not None else 0

    # -- what is seen

    def _on_deaths(self) -> None:
        for rank, seen_ns in self._deaths.take():
            process = self._processes.current.get(rank)
            if process is not None and not process.reported:
                by = "fenced" if process in self._fenced else "futex"
                self._note("death_seen", rank=rank, time_ns=seen_ns, detail={"by": by})
                process.reported = True
                process.signal_group(signal.SIGKILL)  # its watchdog is gone: whatever is left must not train on
                reason = self._fenced.pop(process, end_of(process.exit_code()))
                self._carry_out(self._controller.lost(rank, process.incarnation, reason, self._standings()))

    def _on_exit(self, process: RankProcess) -> None:
        code = process.exit_code()
        if code is None:
            return
        self._loop.remove_reader(process.pidfd)
        self._reaping.discard(process)
        self._on_deaths()  # a death that both ways have seen is told once, by the faster one
        self._logs.close(process.rank, process.incarnation)
        process.close()
        self._note("exited", rank=process.rank, incarnation=process.incarnation, detail={"code": code})
        if not process.reported and code != 0:
            self._note("death_seen", rank=process.rank, detail={"by": "pidfd"})
        process.reported = True
        reason = self._fenced.pop(process, "")
        if reason:
            self._carry_out(self._controller.lost(process.rank, process.incarnation, reason, self._standings()))
        how = how_it_failed(self._log(process), code, self._other_logs(process)) if code > 0 else ""
        self._carry_out(self._controller.exited(process.rank, process.incarnation, code, self._standings(), how))
        # Predecessors that can't be killed are not waited for.
        present = [each for each in self._reaping if each is self._processes.current.get(each.rank)]
        if not present and not self._unborn and not self._choosing and self._ending is None:
            self._end_well()

    def _end_well(self) -> None:
        """Nobody is left, and nobody has said why. Raises RuntimeError unless all ranks have exited with 0."""
        current = self._processes.current
        codes = {rank: current[rank].exit_code() if rank in current else None for rank in range(self._spec.world_size)}
        if any(code != 0 for code in codes.values()):
            raise RuntimeError(f"no process is left, the job has not ended, and the ranks' exit codes are {codes}")
        self._ended.set()

    def _log(self, process: RankProcess) -> Path:
        return self._logs.folder(process.rank) / f"{process.incarnation}.err"

    def _other_logs(self, process: RankProcess) -> dict[int, Path]:
        return {each.rank: self._log(each) for each in self._processes.living() if each is not process}

    def _on_standby(self, kind: str, detail: dict[str, Any]) -> None:
        self._note(kind, detail=detail)
        self._tell(kind, detail)

    def _on_signal(self, number: int) -> None:
        self._last_save.asked("resilient-run", number)

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug of ours. A job that nobody looks after any more must not go on."""
        error = context.get("exception")
        self._logs.say("".join(traceback.format_exception(error)) if error else context["message"])
        end = EndJob(EXIT_BUG, f"internal error of the agent: {error!r} (please report it)")
        try:
            self._carry_out(self._controller.stop(end.code, end.reason))
        finally:
            if self._ending is None:  # the mistake is in how that is carried out
                self._say(f"the job ends: {end.reason}")
                self._carry_out([end])

    def _standings(self) -> list[Standing]:
        return [standing_of(self._board.standing(rank)) for rank in range(self._spec.world_size)]

    # -- the HangKeeper and StragglerKeeper

    def _look_out(self) -> None:
        self._alarms.look(self)
        self._last_save.look()
        self._waiting.look()
        self._hang_watch.look(self)
        if self._job.left:
            ranks = range(self._spec.world_size)
            self._carry_out(self._controller.progressed([progress_of(self._board.progress(rank)) for rank in ranks]))
        self._straggler_watch.look(self)
        self._loop.call_later(LOOK_S, self._look_out)

    def fence(self, ranks: Collection[int], reason: str) -> None:
        self._carry_out(self._controller.fence(ranks, reason, self._standings()))

    def hold_up(self, ranks: Collection[int], reason: str) -> None:
        self._carry_out(self._controller.hold_up(ranks, reason, self._standings()))

    def expire(self, limit_s: float, stopped: Collection[int]) -> None:
        standings = self._standings()
        self._carry_out(self._controller.expired(self._job.generation, standings, limit_s, stopped))

    def outwait(self, limit_s: float) -> None:
        self._carry_out(self._controller.outwaited(self._job.generation, limit_s))

    def tell_newest(self, newest: Newest) -> None:
        by_rank = {str(rank): told for rank, told in newest.told.items()}
        self._note("collectives", detail={"newest": by_rank, "silent": newest.silent})
        self._say(newest_told(newest.told, newest.silent))

    def tell_pause(self, paused_s: float, stopped: Collection[int]) -> None:
        pids = [self._processes.current[rank].pid for rank in stopped]
        self._note("stood_still", detail={"paused_s": round(paused_s, 1), "stopped": list(stopped)})
        self._say(pause_told(paused_s, pids))

    def give_up_collective(self, detail: str, *, culprit: int = -1) -> None:
        self._on_unexplained(self._job.generation, detail, culprit)

    def mend(self, rank: int, detail: str) -> None:
        generation, incarnation = self._job.generation, self._job.incarnations[rank]
        self._carry_out(self._controller.damaged(rank, incarnation, generation, detail, self._standings()))

    def note(self, kind: str, rank: int, detail: dict[str, Any]) -> None:
        self._note(kind, rank=rank, detail=detail)

    def tell(self, finding: Stall, detail: dict[str, Any]) -> None:
        ranks = ", ".join(map(str, finding.ranks))
        self._note(finding.verdict.value, rank=finding.ranks[0] if finding.ranks else -1, detail=detail)
        if finding.verdict is Suspicion.SUSPECT:
            self._say(
                f"rank {ranks} has stood still for {finding.stalled_ms / 1000:.1f} s and is given up after "
                f"{finding.limit_ms / 1000:.1f} s: {finding.why} (stacks: {self._spec.run_dir}/{STACKS_FOLDER}; work "
                "that takes its time belongs in `with session.slow(...)`)"
            )

    # -- the ranks' Hearer

    def greet(self, rank: int, hello: m.Hello, connection: RankConnection) -> None:
        self._processes.current[rank].greeted = True
        self._board.set_identity(rank, self._job.generation, hello.incarnation, hello.pid)
        connection.send(
            m.Welcome(self._job.generation, self._job.attempt, self._saves.start.source, self._look_at()),
            [self._board.fd, self._arenas[rank].fd],
        )
        self._carry_out(self._controller.greeted(rank, hello.incarnation))

    def _look_at(self) -> int:
        return self._job.doubt.commits if self._job.doubt is not None else -1

    def imports_us(self, rank: int, incarnation: int) -> None:
        self._carry_out(self._controller.greeted(rank, incarnation))

    def set_up_of(self, rank: int) -> m.SetUp:
        return self._set_ups.get(rank, m.SetUp(b""))

    def _note_set_up(self, rank: int, told: m.SetUp | m.Beside) -> None:
        """What has changed since is said for the first rank: as a rule it is the same on all."""
        if isinstance(told, m.SetUp):
            self._set_ups[rank] = told
            return
        changed = told.text
        self._note("unregistered", rank=rank, detail={"what": changed})
        if not any(each.changed for each in self._set_ups.values()):
            self._say(
                f"{changed} on rank {rank}: a process that takes the rank's place would have it as it was at the "
                "beginning, so the job ends if the rank is lost: register it too (docs/reference/session.md, "
                "What is not registered)"
            )
        self._set_ups[rank] = m.SetUp(self.set_up_of(rank).record, changed)

    def hear(self, rank: int, incarnation: int, frame: m.FromRank, connection: RankConnection) -> None:
        match frame:
            case m.Reserve(slot_bytes=slot_bytes):
                self._grow(rank, slot_bytes, connection)
            case m.Borrow(rank=lender) if 0 <= lender < self._spec.world_size:
                connection.send(m.ArenaFrame(lender), [self._arenas[lender].fd])
            case m.Address(ranks=ranks):
                if frame.generation == self._job.generation:
                    self._carry_out([Send(other, frame) for other in ranks if 0 <= other < self._spec.world_size])
            case m.OpenVault():
                self._background.begin(self._open_vault(connection))
            case m.Offer(target=other) | m.Pull(source=other) if frame.generation == self._job.generation:
                self._carry_out([Send(other, frame)])
            case _:
                self._on_report(rank, incarnation, frame)

    def tell_slower(self, kind: str, rank: int, step: int, detail: dict[str, Any]) -> None:
        self._note(kind, rank=rank, step=step, detail=detail)
        for text in told(kind, self._job.generation, 0.0, {"rank": rank, **detail}):
            self._say(text)

    def disown(self, rank: int, why: str) -> None:
        self.fence([rank], f"does not speak with the agent any more: {why}")

    def shut_out(self, error: OSError) -> None:
        """Ends a job that can't begin, as where no process can be started. In a recovery who does not come is replaced,
        and where no Session is to come it may be an operator that stands outside.
        """
        ranks = sorted(rank for rank, process in self._processes.current.items() if not process.greeted)
        if ranks and self._job.stage is Stage.STARTING and self._job.uses_a_session():
            text = f"ranks {ranks} can't connect to the agent, which has too few descriptors (ulimit -n): {error}"
            self._carry_out(self._controller.stop(2, text))

    def _grow(self, rank: int, slot_bytes: int, connection: RankConnection) -> None:
        if connection.closed:
            return
        arena = self._arenas[rank]
        try:
            self._arenas[rank] = arena.grown(slot_bytes)
        except ConfigError as error:
            self._carry_out(self._controller.stop(2, str(error)))
            return
        except OSError as error:
            if error.errno not in _SHORT_OF:
                raise
            self._loop.call_later(_SHORT_S, self._grow, rank, slot_bytes, connection)
            return
        arena.close()
        connection.send(m.ArenaFrame(rank), [self._arenas[rank].fd])

    def _on_compared(self, rank: int, frame: m.Shared | m.BodiesMessages) -> None:
        """What a rank says of its own, which others say of theirs."""
        if isinstance(frame, m.BodiesMessages):
            of = self._job.attempt, self._job.generation
            if channel := self._carried_messages.heard(rank, frame, of):
                self._carry_out(self._controller.carried(channel))
            return
        group = next((group for group in self._job.replicas.groups if rank in group), (rank,))
        for name, parties in self._shared_objects.heard(rank, frame, group, self._job.attempt):
            self._note("state_differs", rank=rank, detail={"name": name, "commits": frame.commits, "ranks": parties})
            ranks = " and ".join(map(str, parties))
            self._say(f"{name} is not the same on ranks {ranks}, but {rule(name)}")

    async def _open_vault(self, connection: RankConnection) -> None:
        connection.send(await self._saves.open())

    def _on_report(self, rank: int, incarnation: int, frame: m.FromRank) -> None:
        controller = self._controller
        match frame:
            case m.Started():
                self._deaths.add(rank)
                self._carry_out(controller.started(rank, incarnation, frame))
            case m.Joined():
                self._deaths.add(rank)
                self._note_joined(rank, incarnation, frame)
                self._carry_out(controller.joined(rank, incarnation, frame))
            case m.Built(generation=generation):
                self._note("built", rank=rank, incarnation=incarnation, generation=generation)
            case m.Fetched():
                self._note_fetched(rank, incarnation, frame)
            case m.Done(generation=generation, redone=redone, step=step, over=over):
                whose = {"rank": rank, "incarnation": incarnation, "step": step}
                self._note("done", generation=generation, detail={"redone": redone}, **whose)
                self._carry_out(controller.done(rank, incarnation, generation, step=step, over=over))
            case m.Reached(generation=generation):
                self._carry_out(controller.reached(rank, incarnation, generation))
            case m.Trouble(generation=generation, detail=text):
                of = generation, self._job.attempt
                self._on_trouble(of, f"rank {rank}: {text}", time.monotonic() + _LEAVING_S)
            case m.LeftByException():
                self._on_raised(rank, incarnation, frame)
            case m.Unfinishable(generation=generation, reason=text):
                self._carry_out(controller.unfinishable(generation, text))
            case m.Damaged(generation=generation, detail=text):
                self._carry_out(controller.damaged(rank, incarnation, generation, text, self._standings()))
            case m.Anomaly():
                self._carry_out(controller.anomaly(rank, incarnation, frame))
            case m.Late():
                self._carry_out(controller.late(rank, incarnation, frame))
            case m.HoldsNan():
                self._carry_out(controller.holds_nan(rank, incarnation, frame))
            case m.Computed():
                self._carry_out(controller.computed(rank, incarnation, frame))
            case m.LoopOver(generation=generation, left_at=left_at, exits=exits):
                left = progress_of(left_at) if left_at is not None else None
                self._carry_out(controller.finish(rank, incarnation, generation, left, exits=exits))
            case m.Differs():
                attempt = self._job.attempt
                self._loop.call_later(DIFFER_GRACE_S, lambda: self._carry_out(controller.disagreed(attempt)))
                self._carry_out(controller.differs(rank, incarnation, frame))
            case m.Held():
                self._carry_out(controller.held(rank, incarnation, frame))
            case m.Shared() | m.BodiesMessages():
                self._on_compared(rank, frame)
            case m.Captured(last=generation) if generation >= 0:
                self._last_save.captured(rank, frame)
            case m.Unsaved(generation=generation, reason=text):
                self._last_save.failed(generation, text)
            case m.Captured():
                self._saves.captured(rank, frame, self._job.replicas.groups)
            case m.Skipped():
                self._saves.skipped(rank, frame, self._job.replicas.groups)
            case m.Unrestorable(source=source, reason=text, whole=whole, passing=passing):
                self._saves.states.refuse(source, whole=whole, passing=passing, attempt=self._job.attempt)
                self._carry_out(controller.start_again(rank, incarnation, text))
            case m.SetUp() | m.Beside():
                self._note_set_up(rank, frame)
            case m.Strayed(text=text):
                self._carry_out(controller.strayed(rank, incarnation, text))
            case m.Plain(reason=reason):
                self._carry_out(controller.is_plain(rank, incarnation, reason))
            case m.Refused(text=text):
                self._carry_out(controller.stop(2, text))
            case _:
                self._note("foreign_frame", rank=rank, detail={"text": type(frame).__name__})

    def _note_joined(self, rank: int, incarnation: int, frame: m.Joined) -> None:
        detail = {
            "commits": frame.commits,
            "phase": frame.phase,
            "holds": frame.holds,
            "stopped_ns": frame.stopped_ns,
        }
        self._note("joined", rank=rank, incarnation=incarnation, generation=frame.generation, detail=detail)

    def _note_fetched(self, rank: int, incarnation: int, frame: m.Fetched) -> None:
        detail = {
            "source": frame.source,
            "bytes": frame.bytes_copied,
            "duration_ns": frame.duration_ns,
            "way": frame.way,
        }
        self._note("fetched", rank=rank, incarnation=incarnation, generation=frame.generation, detail=detail)

    def _on_raised(self, rank: int, incarnation: int, frame: m.LeftByException) -> None:
        process = self._processes.current[rank]
        if process.incarnation == incarnation:
            self._failed.add(process)
        how = how_it_fails(frame.text, frame.code, self._log(process))
        self._carry_out(self._controller.raised(rank, incarnation, frame.code, self._standings(), how))

    def _on_trouble(self, of: tuple[int, int], detail: str, deadline: float) -> None:
        """A collective has failed, ``of`` this generation and attempt: where all start again, the generation stays. If
        a rank dies or leaves, that is why, and its end says more.
        """
        if of != (self._job.generation, self._job.attempt):
            return
        if time.monotonic() < deadline and any(map(self._goes, self._processes.current.values())):
            self._loop.call_later(_LEAVING_POLL_S, self._on_trouble, of, detail, deadline)
        else:
            self._on_unexplained(of[0], detail)

    def _goes(self, process: RankProcess) -> bool:
        activity = progress_of(self._board.progress(process.rank)).activity
        return process in self._fenced or process.ends() or activity is Activity.LEAVING

    def _on_unexplained(self, generation: int, detail: str, culprit: int = -1) -> None:
        standings = self._standings()
        self._carry_out(self._controller.failed_collective(generation, detail, standings, culprit=culprit))

    # -- what is done

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RaiseStop(generation=generation):
                    self._board.raise_stop(generation)
                case SetPause(step=step):
                    self._board.set_pause(step + 1)
                case Spawn():
                    self._spawn(command)
                case Kill(rank=rank) if rank in self._unborn:
                    unborn = self._unborn.pop(rank)
                    told = "was not started in time"
                    self._carry_out(self._controller.lost(rank, unborn.incarnation, told, self._standings()))
                case Kill(rank=rank, reason=reason):
                    self._kill(self._processes.current[rank], reason)
                case Send(rank=rank, message=message):
                    if rank in self._admission.connections:
                        self._admission.connections[rank].send(self._last_save.completed(message))
                case Note(kind="restart_all"):
                    self._pauses.noted("restart_all")
                    self._kill_ranks_for_good()
                    self._begin_start(commands[commands.index(command) + 1 :], command)
                    return
                case Note(kind=kind, rank=rank, detail=detail):
                    if kind == "job_end":
                        detail = self._with_commits(detail)
                    detail = {**detail, **self._pauses.noted(kind)}
                    self._note(kind, rank=rank, detail=detail)
                    if kind in ("finished", "leaving") and (usual := self._straggler_watch.usual()):
                        self._note("compute", detail={"ranks": usual})
                    self._tell(kind, detail)
                    if kind == "leaving":
                        self._last_save.begin()
                    if kind == "verified" and detail.get("agreed"):
                        commits, window = detail["commits"], detail["step"]
                        assert isinstance(commits, int)
                        assert isinstance(window, int)
                        self._saves.states.agreed(commits, window)
                    if kind == "replicas_differ":
                        self._saves.doubt()
                    if kind == "late_anomaly" and detail["goes_back"]:
                        assert isinstance(detail["step"], int)
                        self._saves.distrust(detail["step"])
                    if kind == "deviates" and "trusted_until" in detail:
                        assert isinstance(detail["trusted_until"], int)
                        if detail["trusted_until"] >= 0:
                            self._saves.distrust(detail["trusted_until"])
                        else:
                            self._doubtful = ", which is in doubt"
                    if kind == "started" and self._spec.policy.replace:
                        self._processes.train(self._job.attempt)
                case KeepAnomalies(what=what, step=step, values=values):
                    self._anomaly_files.keep(what, step, values)
                case EndJob():
                    if self._ending is None:
                        self._ending = command
                        self._ended.set()

    def _begin_start(self, spawns: list[Command], again: Note | None = None) -> None:
        """Starts all ranks, when it is known from what. ``again``: why they are started once more."""
        # Not in the task, which begins later: a job without a process must not be taken for one that is over.
        self._choosing = True
        self._background.begin(self._start_all(spawns, again))

    async def _start_all(self, spawns: list[Command], again: Note | None) -> None:
        blind = await self._saves.choose(needed=again is not None and bool(again.detail["state_lost"]))
        self._choosing = False
        # That of a run before this one, or from before what all go on from.
        self._job.neighbours_agreed = max(self._job.neighbours_agreed, self._saves.states.agreed_commits)
        if self._ending is not None:
            return
        if blind and again is not None:  # they must not begin anew beside what may be saved
            code = 2 if self._saves.states.doubted or self._saves.states.others else EXIT_UNRECOVERABLE
            self._carry_out(self._controller.stop(code, f"{again.detail['reason']}, and {blind}"))
            return
        if blind:
            self._carry_out(self._controller.stop(2, blind))
            return
        if again is not None:
            detail = self._with_commits(again.detail)
            self._note(again.kind, rank=again.rank, detail=detail)
            self._tell(again.kind, detail)
            self._store_anew()
            for rank in range(self._spec.world_size):  # a rank may die before it has a tail, and so a log, of its own
                self._board.set_tail(rank, 0, 0)
        self._saves.start.tell_source()
        self._carry_out(spawns)

    def _store_anew(self) -> None:
        """As torch expects it each time that all ranks start: its groups would find the addresses of the dead."""
        for key in self._store.list_keys():
            self._store.delete_key(key)

    def _with_commits(self, detail: dict[str, object]) -> dict[str, object]:
        """What a report counts the lost updates from."""
        return {**detail, "commits": max(standing.commits for standing in self._standings())}

    def _kill_ranks_for_good(self) -> None:
        """They will be started anew."""
        self._unborn.clear()
        self._set_ups.clear()
        self._processes.supersede(self._reaping)

    def _spawn(self, command: Spawn) -> None:
        rank = command.rank
        self._deaths.remove(rank)
        old = self._processes.current.get(rank)
        if old is not None and old in self._reaping:
            self._processes.supersede([old])
        stale = self._admission.forget(rank)
        if stale is not None:
            self._listener.drop(stale)
        try:
            self._listener.restore()
        except OSError as error:
            self._say(f"{self._socket_path} is gone, and can't be made anew: {error}")
        self._board.set_order(rank, orders.NOBODY)  # an order to its predecessor died with it
        self._board.set_asked(rank, 0)
        self._unborn[rank] = command
        self._start(command)

    def _start(self, command: Spawn, tries: int = 1) -> None:
        if not self._is_wanted(command):
            return
        self._processes.start(
            command.rank,
            command.incarnation,
            command.attempt,
            joining=command.joining,
            started=lambda process: self._on_started(command, process, tries),
            wanted=lambda: self._is_wanted(command),
        )

    def _is_wanted(self, command: Spawn) -> bool:
        return self._unborn.get(command.rank) is command and self._ending is None

    def _on_started(self, command: Spawn, process: RankProcess | OSError, tries: int) -> None:
        rank = command.rank
        if isinstance(process, OSError):
            self._on_no_process(command, process, tries)
            return
        del self._unborn[rank]
        self._processes.current[rank] = process
        self._reaping.add(process)
        self._loop.add_reader(process.pidfd, self._on_exit, process)
        detail = {"pid": process.pid, "joining": command.joining, "start": process.start}
        self._note("spawned", rank=rank, incarnation=command.incarnation, detail=detail)

    def _on_no_process(self, command: Spawn, error: OSError, tries: int) -> None:
        """Where it takes a lost one's place, others have a state: what is short is waited for as long as the recovery's
        own limit lets us, anything else may be mended soon (a file that is just written anew), and what can't be helped
        is taken for the rank's own end, so that the survivors save.
        """
        rank, short = command.rank, error.errno in _SHORT_OF
        if tries >= _TRIES and command.joining and not short:
            del self._unborn[rank]
            how = f": its process can't be started: {error}"
            self._carry_out(self._controller.exited(rank, command.incarnation, 2, self._standings(), how))
            return
        if not command.joining and (tries >= _TRIES or not short):
            del self._unborn[rank]
            self._carry_out(self._controller.stop(2, f"rank {rank} can't be started: {error}"))
            return
        if tries == 1:
            self._say(f"rank {rank} can't be started now ({error}): it is tried again")
        self._loop.call_later(_SHORT_S, self._start, command, tries + 1)

    def _kill(self, process: RankProcess, reason: str) -> None:
        self._fenced[process] = reason
        process.signal_group(signal.SIGKILL)
        self._loop.call_later(_UNKILLABLE_S, self._on_unkillable, process)

    def _on_unkillable(self, process: RankProcess) -> None:
        if process.reported or process is not self._processes.current.get(process.rank):
            return
        process.reported = True
        reason = f"{self._fenced.pop(process, 'was killed')}; it does not end, and is given up"
        self._carry_out(self._controller.lost(process.rank, process.incarnation, reason, self._standings()))

    async def _stop_ranks(self) -> None:
        """SIGTERM, time to go, SIGKILL. Who ends by an exception of its own has the first half of the time to do so."""
        half_s = self._spec.shutdown_timeout_s / 2
        self._terminate([process for process in self._processes.living() if process not in self._failed])
        await self._none_lives(half_s)
        self._terminate([process for process in self._processes.living() if process in self._failed])
        await self._none_lives(half_s)

    def _terminate(self, processes: Collection[RankProcess]) -> None:
        for process in processes:
            self._board.set_asked(process.rank, signal.SIGTERM)  # a rank that would only write it down ends now
            process.signal_group(signal.SIGTERM)
            process.signal(signal.SIGCONT)

    async def _none_lives(self, limit_s: float) -> None:
        deadline = self._loop.time() + limit_s
        while any(True for _ in self._processes.living()) and self._loop.time() < deadline:  # noqa: ASYNC110 - nothing tells it
            await asyncio.sleep(0.01)

    def _kill_ranks(self) -> None:
        for process in list(self._reaping):
            process.signal_group(signal.SIGKILL)
            self._loop.remove_reader(process.pidfd)
            self._logs.close(process.rank, process.incarnation)

    async def _show_logs(self) -> None:
        while True:
            self._logs.show_new()
            self._processes.reap_strays({process.pid for process in self._reaping})
            await asyncio.sleep(SHOW_EVERY_S)

    # -- what is said

    def _note(self, kind: str, *, time_ns: int = 0, generation: int = -1, **fields: Any) -> None:
        generation = self._job.generation if generation < 0 else generation
        self._sink.write(Event(kind=kind, time_ns=time_ns or time.time_ns(), generation=generation, **fields))

    def _tell(self, kind: str, detail: dict[str, Any]) -> None:
        if kind in ("fault", "leaving", "pausing", "verifying"):
            self._fault_ns = time.monotonic_ns()
        kind = "assembled" if kind == "resumed" and self._job.leaving else kind
        for text in told(kind, self._job.generation, (time.monotonic_ns() - self._fault_ns) / 1e6, detail):
            self._say(text)

    def _say(self, text: str) -> None:
        self._logs.say(line(text))
