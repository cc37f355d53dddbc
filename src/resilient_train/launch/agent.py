"""The agent: starts the ranks of a node, sees them die, owns the memory that outlives them, hosts the store.

One thread, one event loop. What happens after a fault is the controller's decision; the agent feeds it what it sees and
carries out what it says.
"""

from __future__ import annotations

import asyncio
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from resilient_train._native import Board, DeathWatch
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.launch.alarms import Alarms
from resilient_train.launch.connections import Connection, Listener
from resilient_train.launch.departure import Departure
from resilient_train.launch.fork.pool import Pool
from resilient_train.launch.fork.zygote import Root
from resilient_train.launch.job import Job
from resilient_train.launch.last_words import how_it_failed
from resilient_train.launch.logs import Logs
from resilient_train.launch.lookout import LOOK_S, Lookout
from resilient_train.launch.operators import Operators
from resilient_train.launch.processes import Processes, RankProcess
from resilient_train.launch.saves import Saves
from resilient_train.launch.telling import end_of, line, told
from resilient_train.launch.waiting import Waiting, speaks_of_sessions
from resilient_train.observe.sinks import Sink
from resilient_train.protocol import messages as m
from resilient_train.protocol import orders
from resilient_train.protocol.commands import Command, EndJob, Kill, Note, RaiseStop, Send, Spawn
from resilient_train.protocol.controller import EXIT_UNRECOVERABLE, Controller
from resilient_train.protocol.hang import Finding, Verdict
from resilient_train.protocol.standing import Standing, standing_of
from resilient_train.session.pulse import STACKS_FOLDER
from resilient_train.state.arena import DEFAULT_SLOT_BYTES, Arena

LOG_POLL_S = 0.05
_LEAVING_GRACES = 30
"""So many times ``TROUBLE_GRACE_S`` a rank that has closed its Session may take to end before that is a fault."""
TROUBLE_GRACE_S = 1.0
"""How long a collective may have failed before it counts as a fault of its own. A death explains most failures, and is
seen within milliseconds; but a rank that leaves with an error of the user's takes a while to exit: 0.2 s was too short.
"""


class Agent:
    """``run`` returns the job's exit code. ``root``: what ranks are forked from, or why they can't be."""

    def __init__(self, job: Job, sink: Sink, root: Root | str) -> None:
        self._job = job
        self._sink = sink
        self._controller = Controller(job.world_size, job.policy)
        self._board = Board.create(job.world_size)
        self._deaths = DeathWatch(self._board)
        self._logs = Logs(job)
        self._arenas = [Arena.create(DEFAULT_SLOT_BYTES, job.settings.tail_log_bytes) for _ in range(job.world_size)]
        try:
            self._store = TCPStore(job.host, job.port, is_master=True, wait_for_workers=False)
        except dist.DistError as error:
            raise ConfigError(f"the store can't listen on {job.host}:{job.port}: {error}") from None
        self._socket_path = job.run_dir / "agent-0.sock"
        self._pool = Pool(root, job.command, job.settings, self._on_standby)
        self._processes = Processes(job, self._logs, self._pool, self._socket_path, self._store.port)
        self._connections: dict[int, Connection] = {}
        self._reaping: set[RankProcess] = set()
        self._unborn: dict[int, Spawn] = {}
        """Ranks whose process is asked for, and not there yet."""
        self._fenced: dict[RankProcess, str] = {}
        self._lookout = Lookout(self._board, self._controller, self._processes, job.settings)
        self._alarms = Alarms(self._board, self._controller)
        expected = speaks_of_sessions(job.command)
        self._waiting = Waiting(self._board, self._controller, self._processes, self._say, expected=expected)
        self._operators = Operators(self._board, self._controller, self._processes, self._waiting, self._note)
        keep = job.settings.keep_checkpoints
        self._saves = Saves(job.run_dir, job.world_size, keep, self._note, self._say, self._board.settle)
        if blind := self._saves.choose():
            raise ConfigError(blind)
        self._saves.tell_source()
        self._controller.can_go_back = self._saves.can_go_back
        self._departure = Departure(self._board, self._controller, self._saves, self._arenas, job.settings)
        self._ending: EndJob | None = None
        self._ended = asyncio.Event()
        self._begun_ns = time.time_ns()
        self._fault_ns = 0

    async def run(self) -> int:
        """Runs the job to its end."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_bug)
        self._departure.carry_out = self._carry_out
        listener = Listener(
            self._socket_path, self._on_frame, lambda text: self._note("foreign_frame", detail={"text": text})
        )
        self._loop.add_reader(self._deaths.fd, self._on_deaths)
        for number in {signal.SIGUSR1, *(getattr(signal, name) for name in self._job.signals)}:
            self._loop.add_signal_handler(number, self._on_signal, number)
        logs = self._loop.create_task(self._show_logs())
        self._loop.call_soon(self._look_out)
        try:
            self._processes.begin()
            self._carry_out(self._controller.launch())
            await self._ended.wait()
            self._pool.close()
            if self._ending is not None:
                await self._stop_ranks()
            await self._saves.finish(self._job.shutdown_timeout_s)
            if self._ending is not None and self._ending.code and (left := self._saves.left()):
                self._say(f"started again with --run-dir {self._job.run_dir}, the job goes on from {left}")
        finally:
            logs.cancel()
            self._pool.close()
            self._kill_ranks()
            self._logs.finish()
            listener.close()
            self._loop.remove_reader(self._deaths.fd)
            self._deaths.close()
        return self._ending.code if self._ending is not None else 0

    # -- what is seen

    def _on_deaths(self) -> None:
        for rank, seen_ns in self._deaths.take():
            process = self._processes.current.get(rank)
            if process is not None and not process.reported:
                by = "look-out" if process in self._fenced else "futex"
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
        if not self._reaping and not self._unborn and self._ending is None:
            self._ended.set()

    def _log(self, process: RankProcess) -> Path:
        return self._logs.folder(process.rank) / f"{process.incarnation}.err"

    def _other_logs(self, process: RankProcess) -> dict[int, Path]:
        return {each.rank: self._log(each) for each in self._processes.living() if each is not process}

    def _on_standby(self, kind: str, detail: dict[str, Any]) -> None:
        self._note(kind, detail=detail)
        self._tell(kind, -1, detail)

    def _on_signal(self, number: int) -> None:
        self._departure.asked("resilient-run", number)

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug of ours. A job that nobody looks after any more must not go on."""
        error = context.get("exception")
        self._logs.say("".join(traceback.format_exception(error)) if error else context["message"])
        self._carry_out(self._controller.stop(70, f"internal error of the agent: {error!r} (please report it)"))

    def _standings(self) -> list[Standing]:
        return [standing_of(self._board.standing(rank)) for rank in range(self._job.world_size)]

    # -- the look-out's Keeper

    def _look_out(self) -> None:
        self._alarms.look(self)
        self._departure.look()
        self._waiting.look()
        if self._job.settings.hang:
            self._lookout.look(self)
        self._loop.call_later(LOOK_S, self._look_out)

    def fence(self, rank: int, reason: str) -> None:
        process = self._processes.current[rank]
        self._fenced[process] = reason
        process.signal_group(signal.SIGKILL)

    def give_up_collective(self, detail: str, *, culprit: int = -1) -> None:
        self._on_unexplained(self._controller.generation, detail, culprit)

    def mend(self, rank: int, detail: str) -> None:
        generation, incarnation = self._controller.generation, self._controller.incarnations[rank]
        self._carry_out(self._controller.damaged(rank, incarnation, generation, detail, self._standings()))

    def note(self, kind: str, rank: int, detail: dict[str, Any]) -> None:
        self._note(kind, rank=rank, detail=detail)

    def tell(self, finding: Finding, detail: dict[str, Any]) -> None:
        ranks = ", ".join(map(str, finding.ranks))
        self._note(finding.verdict.value, rank=finding.ranks[0] if finding.ranks else -1, detail=detail)
        if finding.verdict is Verdict.SUSPECT:
            self._say(
                f"rank {ranks} has stood still for {finding.stalled_ms / 1000:.1f} s and is replaced after "
                f"{finding.limit_ms / 1000:.1f} s: {finding.why} (stacks: {self._job.run_dir}/{STACKS_FOLDER}; work "
                "that takes its time belongs in `with session.slow(...)`)"
            )

    # -- frames

    def _on_frame(self, connection: Connection, frame: m.FromRank) -> None:
        hello = connection.hello
        assert hello is not None
        if hello.role == "operator":
            self._operators.answer(connection, frame)
            return
        rank, incarnation = hello.rank, hello.incarnation
        if not 0 <= rank < self._job.world_size or self._controller.incarnations[rank] != incarnation:
            return
        match frame:
            case m.Hello():
                self._on_hello(connection, frame)
            case m.Reserve(slot_bytes=slot_bytes):
                self._arenas[rank] = self._arenas[rank].grown(slot_bytes)
                connection.send(m.Arena(rank), [self._arenas[rank].fd])
            case m.Borrow(rank=lender) if 0 <= lender < self._job.world_size:
                connection.send(m.Arena(lender), [self._arenas[lender].fd])
            case m.Offer(target=other) | m.Pull(source=other) if frame.generation == self._controller.generation:
                self._carry_out([Send(other, frame)])
            case _:
                self._on_report(rank, incarnation, frame)

    def _on_hello(self, connection: Connection, hello: m.Hello) -> None:
        rank = hello.rank
        known = self._connections.get(rank)
        if known is not None and not known.closed:
            # The rank's own says a last word on a second connection (``link.refuse``); whoever it is gets no answers.
            self._note("foreign_frame", rank=rank, detail={"text": "a second connection says that it is this rank"})
            return
        self._connections[rank] = connection
        self._processes.current[rank].greeted = True
        self._board.set_identity(rank, self._controller.generation, hello.incarnation, hello.pid)
        connection.send(
            m.Welcome(self._controller.generation, self._controller.attempt, self._saves.source),
            [self._board.fd, self._arenas[rank].fd],
        )
        self._carry_out(self._controller.greeted(rank, hello.incarnation))

    def _on_report(self, rank: int, incarnation: int, frame: m.FromRank) -> None:
        controller = self._controller
        match frame:
            case m.Started():
                self._deaths.add(rank)
                self._carry_out(controller.started(rank, incarnation, frame))
            case m.Joined():
                self._deaths.add(rank)
                detail: dict[str, Any] = {
                    "commits": frame.commits,
                    "phase": frame.phase,
                    "holds": frame.holds,
                    "stopped_ns": frame.stopped_ns,
                }
                self._note("joined", rank=rank, incarnation=incarnation, generation=frame.generation, detail=detail)
                self._carry_out(controller.joined(rank, incarnation, frame))
            case m.Built(generation=generation):
                self._note("built", rank=rank, incarnation=incarnation, generation=generation)
            case m.Fetched():
                detail = {
                    "source": frame.source,
                    "bytes": frame.bytes_copied,
                    "duration_ns": frame.duration_ns,
                    "way": frame.way,
                }
                self._note("fetched", rank=rank, incarnation=incarnation, generation=frame.generation, detail=detail)
            case m.Done(generation=generation, redone=redone, step=step):
                whose = {"rank": rank, "incarnation": incarnation, "step": step}
                self._note("done", generation=generation, detail={"redone": redone}, **whose)
                self._carry_out(controller.done(rank, incarnation, generation))
            case m.Trouble(generation=generation, detail=text):
                self._loop.call_later(TROUBLE_GRACE_S, self._on_unexplained, generation, f"rank {rank}: {text}")
            case m.Damaged(generation=generation, detail=text):
                self._carry_out(controller.damaged(rank, incarnation, generation, text, self._standings()))
            case m.Finish(generation=generation):
                self._carry_out(controller.finish(rank, incarnation, generation))
            case m.OpenVault():
                self._connections[rank].send(m.VaultOpened(self._saves.open(self._loop)))
            case m.Captured(last=generation) if generation >= 0:
                self._departure.captured(rank, frame)
            case m.Unsaved(generation=generation, reason=text):
                self._departure.failed(generation, text)
            case m.Captured():
                self._saves.captured(rank, frame, controller.replicas.groups)
            case m.Skipped():
                self._saves.skipped(rank, frame, controller.replicas.groups)
            case m.Unrestorable(source=source, reason=text):
                self._saves.refuse(source)
                self._carry_out(controller.start_again(rank, incarnation, text))
            case m.Refused(text=text):
                self._carry_out(controller.refuse(text))
            case _:
                self._note("foreign_frame", rank=rank, detail={"text": type(frame).__name__})

    def _on_unexplained(self, generation: int, detail: str, culprit: int = -1, asked: int = 0) -> None:
        if culprit < 0 and asked < _LEAVING_GRACES and self._is_left():
            self._loop.call_later(TROUBLE_GRACE_S, self._on_unexplained, generation, detail, culprit, asked + 1)
            return
        standings = self._standings()
        self._carry_out(self._controller.failed_collective(generation, detail, standings, culprit=culprit))

    def _is_left(self) -> bool:
        """Whether a rank has closed its Session (an error of the user's went through it), and its process lives on."""
        hung_up = [rank for rank, connection in self._connections.items() if connection.closed]
        return any(self._processes.current[rank].exit_code() is None for rank in hung_up)

    # -- what is done

    def _carry_out(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case RaiseStop(generation=generation):
                    self._board.raise_stop(generation)
                    self._loop.call_later(self._job.settings.join_timeout_s, self._expire, generation)
                case Spawn():
                    self._spawn(command)
                case Kill(rank=rank) if rank in self._unborn:
                    unborn = self._unborn.pop(rank)
                    told = "was not started in time"
                    self._carry_out(self._controller.lost(rank, unborn.incarnation, told, self._standings()))
                case Kill(rank=rank):
                    if rank in self._processes.current:
                        self._processes.current[rank].signal(signal.SIGKILL)
                case Send(rank=rank, message=message):
                    if rank in self._connections:
                        self._connections[rank].send(self._departure.completed(message))
                case Note(kind="restart_all", detail=detail) if blind := self._saves.choose():
                    # What follows would start the ranks, anew beside what may be saved.
                    self._carry_out(self._controller.stop(EXIT_UNRECOVERABLE, f"{detail['reason']}, and {blind}"))
                    return
                case Note(kind=kind, rank=rank, detail=detail):
                    if kind in {"restart_all", "job_end"}:  # what a report counts the lost updates from
                        detail = {**detail, "commits": max(standing.commits for standing in self._standings())}
                    self._note(kind, rank=rank, detail=detail)
                    self._tell(kind, rank, detail)
                    if kind == "restart_all":
                        self._saves.tell_source()
                    if kind == "leaving":
                        self._departure.begin()
                    if kind == "started" and self._job.policy.replace:
                        self._processes.train(self._controller.attempt)
                case EndJob():
                    if self._ending is None:
                        self._ending = command
                        self._ended.set()

    def _spawn(self, command: Spawn) -> None:
        rank = command.rank
        self._deaths.remove(rank)
        old = self._processes.current.get(rank)
        if old is not None and old in self._reaping:
            old.reported = True
            old.signal_group(signal.SIGKILL)
        stale = self._connections.pop(rank, None)
        if stale is not None:
            stale.close()
        self._board.set_order(rank, orders.NOBODY)  # an order to its predecessor died with it
        self._board.set_asked(rank, 0)
        self._unborn[rank] = command
        self._processes.start(
            rank,
            command.incarnation,
            command.attempt,
            joining=command.joining,
            started=lambda process: self._on_started(command, process),
            wanted=lambda: self._unborn.get(rank) is command and self._ending is None,
        )

    def _on_started(self, command: Spawn, process: RankProcess | OSError) -> None:
        rank = command.rank
        del self._unborn[rank]
        if isinstance(process, OSError):
            self._carry_out([EndJob(2, f"rank {rank} can't be started: {process}")])
            return
        self._processes.current[rank] = process
        self._reaping.add(process)
        self._loop.add_reader(process.pidfd, self._on_exit, process)
        detail = {"pid": process.pid, "joining": command.joining, "start": process.start}
        self._note("spawned", rank=rank, incarnation=command.incarnation, detail=detail)

    def _expire(self, generation: int) -> None:
        self._carry_out(self._controller.expired(generation))

    async def _stop_ranks(self) -> None:
        """SIGTERM, time to go, SIGKILL."""
        for process in self._processes.living():
            self._board.set_asked(process.rank, signal.SIGTERM)  # a rank that would only write it down ends now
            process.signal_group(signal.SIGTERM)
            process.signal(signal.SIGCONT)
        deadline = self._loop.time() + self._job.shutdown_timeout_s
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
            await asyncio.sleep(LOG_POLL_S)

    # -- what is said

    def _note(self, kind: str, *, time_ns: int = 0, generation: int = -1, **fields: Any) -> None:
        generation = self._controller.generation if generation < 0 else generation
        self._sink.write(Event(kind=kind, time_ns=time_ns or time.time_ns(), generation=generation, **fields))

    def _tell(self, kind: str, rank: int, detail: dict[str, Any]) -> None:
        if kind in ("fault", "leaving"):
            self._fault_ns = time.monotonic_ns()
        kind = "assembled" if kind == "resumed" and self._controller.leaving else kind
        for text in told(kind, rank, self._controller.generation, (time.monotonic_ns() - self._fault_ns) / 1e6, detail):
            self._say(text)

    def _say(self, text: str) -> None:
        self._logs.say(line(text))
