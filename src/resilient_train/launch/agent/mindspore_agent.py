"""The agent of a MindSpore job: starts its scheduler and its ranks, hosts the controller of ``mindio_ttp``, and starts
ranks that were lost once more.

What is done about a fault is that controller's decision (``integrations/mindio/controller.py``). Here it is decided who
gets a new process: a rank that was killed, as long as it does not die over and over. A rank that *exits* was not lost.

Where no rank has come to that controller (MindSpore's own collectives, which nobody can mend), the others of one that
was killed are asked to end. If one of them says by its exit code that it has saved its state, all start again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.events import Event
from resilient_train.integrations.mindio import finder
from resilient_train.integrations.mindio.controller import MindioStage, Notice, Recoveries, TrainingEnded, outcome
from resilient_train.integrations.mindio.hub import Hub
from resilient_train.integrations.mindio.wire import read_secret
from resilient_train.integrations.mindspore.rank_folder import NOBODY, AgentFolder
from resilient_train.launch.agent.console_text import end_of, line, pause_told, told
from resilient_train.launch.agent.event_loop import BackgroundTasks, add_signal_handlers
from resilient_train.launch.agent.how_it_failed import how_it_failed
from resilient_train.launch.agent.logs import SCHEDULER, SHOW_EVERY_S, Logs
from resilient_train.launch.agent.mindspore_hang_watch import LOOK_S, MindSporeHangWatch
from resilient_train.launch.agent.mindspore_operators import MindSporeOperators
from resilient_train.launch.agent.processes import RankProcess, start_cold
from resilient_train.launch.agent.repeated_signal import RepeatedSignal
from resilient_train.launch.agent.uncontrolled_job import UncontrolledJob
from resilient_train.launch.exit_codes import EXIT_BUG, EXIT_SAVED
from resilient_train.launch.spec import SOCKET, JobSpec
from resilient_train.observe.sinks import Sink
from resilient_train.observe.stacks import STACKS_FOLDER, stacks_file
from resilient_train.protocol.hang import Stall, Suspicion
from resilient_train.protocol.job import EXIT_UNRECOVERABLE
from resilient_train.protocol.policy import why_give_up
from resilient_train.protocol.retry_budget import RetryBudget
from resilient_train.transport import listen
from resilient_train.unix_listener import Listener

_LAST_WORDS_S = 1.0
"""How long what a rank has sent before its end may take to be read. A process that it has left may hold its socket."""
_KILLED_S = 10.0
"""A process that was killed and has not ended by then waits in the kernel for something that does not come."""
_CONNECTIONS_MAX = 256
_RANKS = "ranks"
_SECRET = "tft-secret"  # noqa: S105 - a file's name


class MindSporeAgent:
    """``run`` returns the job's exit code. The arguments: see ``launch/cli/msrun.py``."""

    def __init__(self, spec: JobSpec, environ: Mapping[str, str], controller: tuple[str, int], sink: Sink) -> None:
        """Raises ConfigError where the controller can't listen."""
        self._spec, self._sink = spec, sink
        self._logs = Logs(spec)
        of_job = spec.policy
        policy = Recoveries(
            uce=of_job.mend, hcce=of_job.rebuild, arf=of_job.replace, pause=of_job.replace or of_job.pause
        )
        secret = spec.settings.tft_secret_file or _write_secret(spec.run_dir / _SECRET)
        if theirs := finder.of_mindio():
            self._say(f"mindio_ttp is installed ({theirs}): faults are MindIO's business, and no rank is replaced here")
            controller = ("127.0.0.1", 0)  # what the ranks know is for theirs
        self._hub = Hub(*controller, spec.world_size, policy, read_secret(secret), self._on_told)
        hosted = {} if theirs else config.hosted_environ(controller[0], self._hub.port, secret)
        self._own = AgentFolder(spec.run_dir / _RANKS, spec.world_size)
        self._environ = {**environ, **hosted, **config.ranks_environ(str(spec.run_dir / _RANKS))}
        self._budget = RetryBudget(spec.policy)
        self._replaced = 0
        self._running: dict[int, RankProcess] = {}
        """By rank; and the scheduler."""
        self._codes: dict[int, int] = {}
        """How each rank's newest process has ended, of those that have."""
        self._background = BackgroundTasks()
        self._over = asyncio.Event()
        self._ended: TrainingEnded | None = None
        self._code: int | None = None
        """The exit code of a job that can't end well any more."""
        self._reason = "it was ended"
        self._repeated = RepeatedSignal()
        self._hurry = asyncio.Event()
        """All have ended, or somebody does not want to wait for them."""
        self._lost: tuple[int, str] | None = None
        """Who was killed, and how, where all start again if its state is saved."""
        self._fault_ns = 0
        self._redo: list[int] = []
        """Who runs the step that a fault has cut once more."""
        self._operators = MindSporeOperators(self._hub, self._own, self._running, self._announce)
        self._hang_watches = [
            MindSporeHangWatch(job, self._running, spec.world_size, spec.settings)
            for job in (self._hub.controller, UncontrolledJob(self._own))
        ]

    async def run(self) -> int:
        """Runs the job to its end."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_bug)
        await self._hub.open()
        path = self._spec.run_dir / SOCKET
        try:
            listener = Listener(path, self._operators, listen(path), _CONNECTIONS_MAX)
        except OSError as error:
            raise ConfigError(f"the agent can't listen at {path}: {error}") from None
        add_signal_handlers(self._spec.signals, self._on_signal)
        beside = [self._background.begin(each) for each in (self._show_logs(), self._watch_for_pauses())]
        if self._spec.settings.hang:
            beside.append(self._background.begin(self._watch_for_hangs()))
        try:
            attempt = 0
            while attempt == 0 or await self._can_start_again(attempt):
                self._own.begin_life()
                self._start(SCHEDULER, attempt)
                for rank in range(self._spec.world_size):
                    self._start(rank, attempt)
                await self._over.wait()
                await self._ask_to_end()
                attempt += 1
        finally:
            for task in beside:
                task.cancel()
            listener.close()
            self._kill_all()
            await self._hub.close()
            self._logs.finish()
        return self._end()

    # -- processes

    def _start(self, rank: int, incarnation: int, *, joins: bool = False) -> None:
        """Ends the job where the command can't be run. ``joins``: others have a state and train."""
        streams = self._logs.open(rank, incarnation)
        stacks = stacks_file(self._spec.run_dir, rank, incarnation)
        environ = {**self._environ, **_role(rank), **config.stacks_environ(str(stacks))}
        try:
            child = start_cold(self._spec.command, environ, streams)
            process = RankProcess(rank, incarnation, child, start="cold", wraps=False)
        except OSError as error:
            self._fail(2, f"rank {rank} can't be started: {error}")
            return
        finally:
            os.close(streams.out)
            os.close(streams.err)
        self._running[rank] = process
        self._codes.pop(rank, None)
        self._loop.add_reader(process.pidfd, self._on_exit, process)
        if rank != SCHEDULER:
            detail = {"pid": process.pid, "joining": joins, "start": "cold"}
            self._note("spawned", rank=rank, incarnation=incarnation, detail=detail)

    def _on_exit(self, process: RankProcess) -> None:
        code = process.exit_code()
        if code is None:
            return
        self._loop.remove_reader(process.pidfd)
        process.close()
        self._logs.close(process.rank, process.incarnation)
        del self._running[process.rank]
        if process.rank == SCHEDULER:
            if code and not self._over.is_set():
                self._say(f"MindSpore's scheduler {end_of(code)}; its log: {self._logs.folder(SCHEDULER)}")
            return
        self._note("exited", rank=process.rank, incarnation=process.incarnation, detail={"code": code})
        self._background.begin(self._bury(process, code))

    async def _bury(self, process: RankProcess, code: int) -> None:
        """Behind the last that the rank has said, what is to be done about its end is known."""
        rank = process.rank
        stands = max((seat.step for seat in self._hub.controller.seats), default=0)
        at_its_end = await self._hub.hear_out(rank, _LAST_WORDS_S)
        self._codes[rank] = code
        self._budget.reached(stands)
        if self._ended is None and not (code == 0 and at_its_end):
            self._consider(process, code, at_its_end=at_its_end)
        elif self._ended is not None and rank in self._hub.controller.lost:  # it was missed before its end was seen
            self._say(f"rank {rank} {end_of(code)}")
        if len(self._codes) == self._spec.world_size:
            self._over.set()
            self._hurry.set()

    def _consider(self, process: RankProcess, code: int, *, at_its_end: bool) -> None:
        """What becomes of a rank that has ended otherwise than it should."""
        rank = process.rank
        if self._lost is not None:
            return  # they end for that
        if code > 0:
            log = self._logs.folder(rank) / f"{process.incarnation}.err"
            self._fail(code, f"rank {rank} failed{how_it_failed(log, code)}")
            return
        how = f"rank {rank} {end_of(code)}"
        self._budget.died(rank)
        if code == 0:
            self._fail(1, f"{how} before its training was over")
        elif not self._hub.known:
            how = f"{how}, and no rank has come to a controller that could have it replaced"
            self._start_all_again(rank, how, 128 - code)
        elif self._hub.controller.stage is MindioStage.STARTING:
            self._fail(128 - code, f"{how} before all ranks had come to their training")
        elif at_its_end:
            self._fail(128 - code, f"{how}, behind its training")
        elif why := self._why_give_up(rank):
            self._fail(EXIT_UNRECOVERABLE, f"{how}, and {why}")
        elif self._code is None and not self._hub.controller.hopeless:
            self._replaced += 1
            self._start(rank, process.incarnation + 1, joins=True)

    def _start_all_again(self, rank: int, how: str, code: int) -> None:
        """If there is a state from which they can; else the job ends."""
        # In how many steps a rank has died nobody knows here, so it may die as often as torchrun's would.
        why = why_give_up(self._spec.policy, used=self._replaced, lost=1, stuck=0)
        if self._code is None and not why:
            self._lost = rank, how
        self._fail(code, f"{how}; {why}" if why else how)

    def _why_give_up(self, rank: int) -> str:
        stuck = self._budget.deaths(rank)
        return why_give_up(self._spec.policy, used=self._replaced, lost=1, stuck=stuck)

    async def _ask_to_end(self) -> None:
        """Ranks that know no controller may have a state to save by themselves: they are told, and have time to."""
        left = [process for rank, process in self._running.items() if rank != SCHEDULER and not self._hub.known]
        for process in left:
            process.signal(signal.SIGTERM)
        if left:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), self._spec.shutdown_timeout_s)

    async def _can_start_again(self, attempt: int) -> bool:
        """Whether one has saved its state behind another's death. Then nothing of them runs any more, or counts."""
        lost = self._lost
        if lost is None or not set(self._codes.values()) & set(EXIT_SAVED.values()):
            return False
        for process in list(self._running.values()):
            process.signal_group(signal.SIGKILL)
        deadline = self._loop.time() + _KILLED_S
        while self._running or len(self._codes) < self._spec.world_size:
            if self._loop.time() > deadline:
                self._reason = f"{self._reason}; all were to start again, but one that was killed does not end"
                return False
            await asyncio.sleep(0.01)
        if self._lost is None:
            return False  # somebody wants the job to end
        rank, reason = lost
        self._lost, self._code = None, None
        self._codes.clear()
        self._over.clear()
        self._hurry.clear()
        self._replaced += 1
        detail = {"reason": reason, "attempt": attempt, "state_lost": False}
        self._note("restart_all", rank=rank, detail=detail)
        for text in told("restart_all", 0, 0.0, detail):
            self._say(text)
        return True

    def _kill_all(self) -> None:
        for process in list(self._running.values()):
            process.signal_group(signal.SIGKILL)
            self._loop.remove_reader(process.pidfd)
            self._logs.close(process.rank, process.incarnation)

    # -- the end

    def _on_signal(self, number: int) -> None:
        if self._repeated.is_one(number):
            return
        told, leaves = signal.Signals(number), self._code is not None
        self._lost = None
        reason = f"resilient-run got {told.name}"
        if leaves or told not in EXIT_SAVED:
            self._hurry.set()
        if told not in EXIT_SAVED or leaves:
            self._code, self._reason = 128 + number, reason
            self._over.set()
            return
        self._loop.call_later(self._spec.settings.exit_grace_s, self._give_up, "the time to save is over")
        self._fail(EXIT_SAVED[told], reason)

    def _fail(self, code: int, reason: str) -> None:
        """The job ends, behind a checkpoint if there can be one."""
        if self._code is None:
            self._code, self._reason = code, reason
        if self._hub.controller.stage is MindioStage.STARTING:
            self._over.set()  # nothing is trained yet
        elif self._ended is None:
            self._say(f"{reason}. The state is saved if all of it is there, then the job ends")
            self._hub.leave(reason)

    def _give_up(self, reason: str) -> None:
        if not self._over.is_set():
            self._say(f"{reason}: what is left of the job is killed")
            self._over.set()

    def _end(self) -> int:
        """The exit code, when nothing runs any more."""
        ended = self._ended
        failed = self._codes.get(ended.failed, 0) if ended is not None else 0
        if [*self._codes.values()] == [0] * self._spec.world_size:
            code, reason = 0, "all ranks have come to their end"
        else:
            code = failed if failed > 0 else self._code or EXIT_UNRECOVERABLE
            reason = ended.reason if ended is not None else self._reason
        if state := self._what_is_saved():
            reason = f"{reason}; {state}"
        commits = max((seat.step for seat in self._hub.controller.seats), default=0)
        detail = {"code": code, "reason": reason, "commits": max(commits, self._budget.furthest)}
        self._note("finished" if code == 0 else "job_end", detail=detail)
        if not self._hub.known and config.given_switches(self._environ):
            self._say("no rank has come to the controller: TrainFaultTolerance does so on an Ascend device only")
        if code:
            self._say(f"the job ends: {reason}")
        return code

    def _what_is_saved(self) -> str:
        if self._ended is not None:
            return outcome(self._ended.saved, self._ended.unnamed)
        job = self._hub.controller  # it was killed before it had come to its end
        if job.stage is MindioStage.SAVING:
            return "nothing is saved: not every part of its state was written by then"
        return outcome(-1, job.target) if job.stage is MindioStage.RENAMING else ""

    # -- what the controller says

    def _on_told(self, event: Notice | TrainingEnded) -> None:
        if isinstance(event, TrainingEnded):
            self._ended = event
            self._loop.call_later(self._spec.shutdown_timeout_s, self._give_up, "not all ranks have ended")
            if len(self._codes) == self._spec.world_size:
                self._over.set()
            return
        if event.kind == "fault":
            self._fault_ns = time.monotonic_ns()
            lost = sorted(self._hub.controller.lost)
            strategy = "ARF" if lost else "UCE" if "RS_UCE" in event.text else "HCCE"
            reason = f"rank {event.rank}: {event.text}" if event.rank >= 0 else event.text
            detail: dict[str, Any] = {"lost": lost, "reason": reason, "strategy": strategy}
        else:
            detail = {"reason": event.text, **event.detail}
        if event.kind == "plan":
            self._redo = detail["redone"]
        elif event.kind == "resumed" and "commits" in detail:
            for rank in self._redo:
                self._note("done", rank=rank, detail={"redone": True})
        elif event.kind == "resumed":
            detail["paused_s"] = self._operators.stood_s()
        elif event.kind == "paused":
            self._operators.paused()
        self._announce(event.kind, rank=event.rank, detail=detail)

    def _announce(self, kind: str, *, detail: dict[str, Any], **fields: Any) -> None:
        """Writes an event, and says it to people if it is one for them."""
        self._note(kind, detail=detail, **fields)
        if kind in ("fault", "resumed", "paused", "pause_withdrawn"):
            took_ms = (time.monotonic_ns() - self._fault_ns) / 1e6
            for text in told(kind, self._hub.controller.round, took_ms, detail):
                self._say(text)

    async def _watch_for_pauses(self) -> None:
        """Of ranks that come to stand by themselves."""
        stood = NOBODY
        while True:
            stands = self._own.stand_behind()
            if stands not in (NOBODY, stood):
                self._operators.paused()
                self._announce("paused", detail={"reason": "all stand", "step": stands})
            stood = stands
            await asyncio.sleep(SHOW_EVERY_S)

    # -- the hang watch's keeper

    async def _watch_for_hangs(self) -> None:
        while True:
            self._hang_watches[not self._hub.known].look(self)
            await asyncio.sleep(LOOK_S)

    def give_up(self, ranks: Collection[int], reason: str) -> None:
        job, detail = self._hub.controller, {"ranks": [*ranks], "reason": reason}
        if self._hub.known and not job.can_do_without(ranks):
            self._note("spared", detail=detail)
            for text in told("spared", job.round, 0, detail):
                self._say(text)
            return
        for rank in ranks:
            if (process := self._running.get(rank)) is not None:
                self._note("fenced", rank=rank, incarnation=process.incarnation, detail={"reason": reason})
                self._say(f"rank {rank} {reason}; it is killed")
                process.signal_group(signal.SIGKILL)

    def give_up_step(self, reason: str) -> None:
        if self._hub.known:
            self._hub.give_up_step(reason)
        else:
            self._start_all_again(NOBODY, f"the ranks hang: {reason}", EXIT_UNRECOVERABLE)

    def tell(self, finding: Stall, detail: dict[str, Any]) -> None:
        self._note(finding.verdict.value, rank=finding.ranks[0] if finding.ranks else -1, detail=detail)
        if finding.verdict is Suspicion.SUSPECT:
            ranks = ", ".join(map(str, finding.ranks))
            self._say(
                f"rank {ranks} has stood still for {finding.stalled_ms / 1000:.1f} s and is given up after "
                f"{finding.limit_ms / 1000:.1f} s, if it does not use a processor, read or write: {finding.why} "
                f"(stacks: {self._spec.run_dir / STACKS_FOLDER})"
            )

    def tell_pause(self, paused_s: float, stopped: Collection[int]) -> None:
        self._note("stood_still", detail={"paused_s": round(paused_s, 1), "stopped": [*stopped]})
        self._say(pause_told(paused_s, [self._running[rank].pid for rank in stopped]))

    # -- the rest

    async def _show_logs(self) -> None:
        while True:
            self._logs.show_new()
            await asyncio.sleep(SHOW_EVERY_S)

    def _on_bug(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug of ours. A job that nobody looks after any more must not go on."""
        error = context.get("exception")
        self._logs.say("".join(traceback.format_exception(error)) if error else context["message"])
        self._say(f"the job ends: internal error of the agent: {error!r} (please report it)")
        self._code = EXIT_BUG
        self._over.set()

    def _note(self, kind: str, **fields: Any) -> None:
        self._sink.write(Event(kind=kind, time_ns=time.time_ns(), generation=self._hub.controller.round, **fields))

    def _say(self, text: str) -> None:
        self._logs.say(line(text))


def _role(rank: int) -> dict[str, str]:
    """What msrun tells a process about itself."""
    if rank == SCHEDULER:
        return {"MS_ROLE": "MS_SCHED", "RANK_ID": "0"}
    own = str(rank)
    return {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": own, "RANK_ID": own, "DEVICE_ID": own}


def _write_secret(path: Path) -> str:
    """Returns the path. Raises ConfigError where nothing can be written there."""
    try:
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the run directory can't be written: {path}: {error.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return str(path)
