"""The processes of the ranks: start, watch, kill. Each leads a process group of its own, so that what it started (data
loader workers) goes with it; each dies with the agent (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from resilient_train import _native, config
from resilient_train.descriptors import Limit, restore_limit
from resilient_train.launch.agent import compile_caches
from resilient_train.launch.agent.logs import Logs, Streams
from resilient_train.launch.fork.imports import script_of
from resilient_train.launch.fork.live import cold
from resilient_train.launch.fork.standby_pool import Pool, Standby
from resilient_train.launch.spec import JobSpec
from resilient_train.protocol.hang import RunState

_PF_EXITING = 0x4
"""linux/sched.h; part of what ``/proc`` tells since 2.6."""
_DEATHS = frozenset((signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS))
"""Signals that kill a process from outside, or that are its machine's fault as often as its own."""
_LOCAL_RANK_MACRO = "${local_rank}"


class Child(Protocol):
    """A process that this one has to reap."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...


class RankProcess:
    """One incarnation of a rank. ``pidfd`` becomes readable when the process has ended.

    ``start`` is "cold" for a new interpreter, "forked" for a fork of the zygote, "built" for one that had run the
    script up to its standby point. ``wraps``: the command is no script of Python's, which may be what it starts.

    It is reaped by ``close`` and by nothing else: until then its number, and that of its group, are nobody else's.
    """

    def __init__(self, rank: int, incarnation: int, child: Child, *, start: str, wraps: bool) -> None:
        self.rank = rank
        self.incarnation = incarnation
        self.start = start
        self.pid = child.pid
        self.pidfd = os.pidfd_open(child.pid)
        self.begun = time.monotonic()
        self._child = child
        self._wraps = wraps
        self._code: int | None = None
        self._closed = False
        self.reported = False
        self.greeted = False
        self.spotless = False
        """Ended by us, and neither it nor another fork had done anything to deserve it: it may be forked again."""
        self._killed = False

    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self._code is None and not self._closed:
            ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                self._code = self._meant(ended.si_status) if ended.si_code == os.CLD_EXITED else -ended.si_status
        return self._code

    def _meant(self, status: int) -> int:
        """A shell tells of the death of what it has run by exiting with 128 and the signal's number. What has died is
        the rank, and a fault; it must not be taken for the script's own decision.
        """
        return 128 - status if self._wraps and status - 128 in _DEATHS else status

    def owns(self, pid: int) -> bool:
        """Whether the process with this number speaks for the rank. 0: it is of another namespace."""
        return pid == self.pid or (self._wraps and (pid == 0 or _belongs_to(pid, self.pid)))

    def state(self) -> RunState:
        """What the kernel says of the process: ``/proc/PID/stat``, third field (proc_pid_stat(5))."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return RunState.RUNNING  # it is just ending: others tell of that
        return {"T": RunState.STOPPED, "t": RunState.TRACED}.get(letter, RunState.RUNNING)

    def ends(self) -> bool:
        """Whether the process has ended, or is about to: it exits, or was killed (PF_EXITING in ``/proc/PID/stat``).

        A process whose sockets were closed by its end is seen here: the kernel sets the flag first.
        """
        try:
            flags = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[6])
        except (OSError, IndexError):
            return True
        return bool(flags & _PF_EXITING)

    def is_unnoticed(self) -> bool:
        """Whether it is lost, or stands still, and the job has not been told so yet."""
        # The kernel marks a killed process as ending only when it next runs: what we did ourselves is known before.
        return not self.reported and (self._killed or self.ends() or self.state() is RunState.STOPPED)

    def signal_group(self, number: int) -> None:
        """Signals the process and all that it started."""
        if not self._closed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def is_ungreeted_fork(self) -> bool:
        """Whether it is a fork that no Session has greeted from: one that ended so may be a fork that can't work."""
        return self.start != "cold" and not self.greeted and not self.spotless

    def signal(self, number: int) -> None:
        """Signals the process alone."""
        self._killed |= number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """It has ended: kills what it may have left behind in its group, and reaps it."""
        self.signal_group(signal.SIGKILL)
        self.exit_code()
        self._closed = True
        self._child.poll()
        os.close(self.pidfd)


def _belongs_to(pid: int, leader: int) -> bool:
    """Whether a process is a descendant of another one, or of its session."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        if os.getsid(pid) == leader:
            return True
        while pid > 1 and pid != leader:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        return pid == leader
    return False  # it has just ended


class Processes:
    """The living and the not yet reaped processes of a node."""

    def __init__(
        self, job: JobSpec, logs: Logs, pool: Pool, socket_path: Path, port: int, token: str, limit: Limit | None = None
    ) -> None:
        """``limit``: how many descriptors the user lets a process have; None: no other than this one has."""
        self._job = job
        self._logs = logs
        self._pool = pool
        self._socket_path = socket_path
        self._port = port
        self._token = token
        self._limit = limit
        # Without restarts nothing is compiled twice: then the user's own places are as good.
        self._caches = compile_caches.given(job.run_dir, config.environ_copy()) if job.policy.max_restarts > 0 else {}
        self.current: dict[int, RankProcess] = {}

    def begin(self) -> None:
        """The job starts: has the zygote made."""
        self._pool.begin([self._environ(rank, 0, 0, joining=False) for rank in range(self._job.world_size)])

    def start(
        self,
        rank: int,
        incarnation: int,
        attempt: int,
        *,
        joining: bool,
        started: Callable[[RankProcess | OSError], None],
        wanted: Callable[[], bool],
    ) -> None:
        """Starts a process for ``rank``. ``started`` gets it, now or soon, or why the command can't be run.

        Nothing is started if ``wanted()`` is not true any more by then.
        """
        command = tuple(part.replace(_LOCAL_RANK_MACRO, str(rank)) for part in self._job.command)
        environ = self._environ(rank, incarnation, attempt, joining=joining)

        def begin(waiting: Standby | None) -> None:
            try:
                process = self._begin(rank, incarnation, command, environ, waiting)
            except OSError as error:
                started(error)
            else:
                started(process)

        before = self.current.get(rank)
        if before is not None and before.is_ungreeted_fork():
            begin(None)  # a fork that ended before its Session came about is not tried twice
        else:
            self._pool.take(environ, begin, wanted)

    def _begin(
        self, rank: int, incarnation: int, command: tuple[str, ...], environ: dict[str, str], waiting: Standby | None
    ) -> RankProcess:
        streams = self._logs.open(rank, incarnation)
        try:
            if waiting is not None and self._pool.give_life(waiting, command, environ, streams):
                child: Child = waiting.child
                start = waiting.child.start
            else:
                child, start = start_cold(command, environ, streams, self._limit), "cold"
        finally:
            os.close(streams.out)
            os.close(streams.err)
        try:
            return RankProcess(rank, incarnation, child, start=start, wraps=isinstance(script_of(command), str))
        except OSError:  # no descriptor for it: it must not run on unseen
            os.killpg(child.pid, signal.SIGKILL)
            raise

    def supersede(self, processes: Collection[RankProcess]) -> None:
        """Others take their places: ends them, and nothing that they do or say counts any more."""
        # A script that no fork can run must not cost one restart of all for each rank: one that fell speaks for all.
        forks = (process for process in self.current.values() if process.is_ungreeted_fork())
        fell = any(fork.reported or fork.exit_code() is not None for fork in forks)
        for process in processes:
            process.spotless |= not fell and not process.reported
            process.reported = True
            process.signal_group(signal.SIGKILL)

    def train(self, attempt: int) -> None:
        """The ranks train."""
        self._pool.train(str(attempt))

    def standbys(self) -> list[dict[str, Any]]:
        """The processes that stand by, for an operator."""
        return self._pool.describe()

    def reap_strays(self, pids: Collection[int]) -> None:
        """Lets go of ended processes that are not these ranks': a rank's orphans come to us."""
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in pids:
                    return  # whoever waits for it will come first; strays behind it, at the next call
                if not self._pool.reap(ended.si_pid):
                    os.waitpid(ended.si_pid, 0)

    def _environ(self, rank: int, incarnation: int, attempt: int, *, joining: bool) -> dict[str, str]:
        job, world = self._job, str(self._job.world_size)
        environ = {**self._caches, **config.environ_copy()}
        link = config.AgentLink(
            socket=str(self._socket_path),
            rank=rank,
            world_size=job.world_size,
            incarnation=incarnation,
            joining=joining,
            run_dir=str(job.run_dir),
            token=self._token,
        )
        environ.update(config.link_environ(link))
        environ.update(
            {
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "ROLE_RANK": str(rank),
                "ROLE_NAME": job.role,
                "LOCAL_WORLD_SIZE": world,
                "GROUP_WORLD_SIZE": "1",
                "ROLE_WORLD_SIZE": world,
                "MASTER_ADDR": job.host,
                "MASTER_PORT": str(self._port),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(job.policy.max_restarts),
                "TORCHELASTIC_RUN_ID": job.run_id,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(job.signals),
                "TORCHELASTIC_ERROR_FILE": str(self._logs.folder(rank) / f"{incarnation}.error.json"),
                "RESILIENT_FAULTS": job.settings.faults,
            }
        )
        environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
        # One node: name the interface, or gloo looks the host name up, which can take seconds (docs/facts.md).
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if job.virtual_local_rank:
            environ["LOCAL_RANK"] = "0"
            visible = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environ["CUDA_VISIBLE_DEVICES"] = visible[rank] if rank < len(visible) and visible[rank] else str(rank)
        return environ

    def living(self) -> Iterator[RankProcess]:
        """The current processes that still run."""
        return (process for process in list(self.current.values()) if process.exit_code() is None)


def start_cold(
    command: tuple[str, ...], environ: dict[str, str], streams: Streams, limit: Limit | None = None
) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        _native.die_with_parent(signal.SIGKILL)
        if limit is not None:
            restore_limit(limit)

    return subprocess.Popen(
        cold(command),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=streams.out,
        stderr=streams.err,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - two system calls; the agent runs no Python thread
    )
