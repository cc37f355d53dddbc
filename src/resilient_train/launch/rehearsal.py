"""A fork that runs the user's script before it is a rank, up to the line where it waits to become one.

Nothing that it does up to there may depend on the rank that it becomes, or harm the job that is running: whoever asks
for a rank's variable or for the group's rank, or is about to overwrite a file or to start a program, is stopped before
it happens, and the agent is told the place in the user's code. The process is gone then: another, that has run nothing,
stands by in its stead. So what is not found out here may be late or twice, and is never taken for another rank's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec

from resilient_train import _native, config, waiting
from resilient_train.environ import EnvironWatch
from resilient_train.errors import ProtocolError
from resilient_train.launch.doors import Doors, place
from resilient_train.launch.preload import Target
from resilient_train.transport import FrameBuffer, encode

_TORCH_ITSELF = frozenset(
    {
        ("distributed_c10d.py", "_update_default_pg"),
        ("distributed_c10d.py", "init_process_group"),
        ("utils.py", "_verify_param_shape_across_processes"),
        ("distributed.py", "_ddp_init_helper"),
    }
)
"""Where torch itself asks for the rank and nothing depends on the answer: DDP's constructor, for log lines and to
compare what the ranks hold (this one is alone), and ``init_process_group``, for what ``_tell_torch`` sets right later.
"""


class Life(msgspec.Struct, tag=True, frozen=True):
    """Of the agent, through the gate, with two descriptors: stdout and stderr. The fork becomes a rank."""

    agent_pid: int
    command: tuple[str, ...]
    target: Target
    environ: dict[str, str]
    cwd: str


class Rehearse(msgspec.Struct, tag=True, frozen=True):
    """Of the agent, through the gate: run the script to where ``depth`` waits. ``attempt``: see ``config.ATTEMPT``."""

    agent_pid: int
    command: tuple[str, ...]
    target: Target
    depth: str
    attempt: str


class Waits(msgspec.Struct, tag=True, frozen=True):
    """Of the fork: it has come to where it waits. ``depth`` may be less than what was asked for."""

    depth: str
    cpu_s: float


class Unready(msgspec.Struct, tag=True, frozen=True):
    """Of the fork, its last word: it can't wait there. ``depth``: how far this script can be run ahead all the same."""

    reason: str
    depth: str


ToFork = Life | Rehearse
FromFork = Waits | Unready


class Rehearsal:
    """The Stage of a process that the agent has told to rehearse."""

    def __init__(self, gate: socket.socket, frames: FrameBuffer, order: Rehearse) -> None:
        self._gate = gate
        self._frames = frames
        self._order = order
        self._pid = os.getpid()
        self._below = "forked"
        self._point = "init_process_group()"
        # The attempt is the same for all ranks; the agent compares it before it makes this process one of them.
        self._watch = EnvironWatch(config.PER_RANK - {config.ATTEMPT}, self._on_variable)
        self._doors = Doors(self._on_door)
        self._over = False

    def begin(self) -> None:
        """From here on the script may run. What it may not use is watched."""
        bind_to(self._order.agent_pid)
        config.take_rank({config.ATTEMPT: self._order.attempt})
        waiting.enter(self)
        self._doors.close()
        self._watch.begin()

    def goes_on(self) -> bool:
        """Whether this process, and not one that the script has forked, is still no rank."""
        return not self._over and os.getpid() == self._pid

    # -- where it waits

    def at_group(self, build: Callable[..., Any], *, late: bool) -> Any:
        """See Stage."""
        if self._order.depth == "idle" or not late or config.init_barrier_wanted():
            self._wait("idle")
            return build()
        group = build(rank=0)
        self._below, self._point = "idle", "rt.standby_point()"
        return group

    def at_point(self) -> None:
        """See Stage."""
        if self._below != "idle":
            if self._order.depth == "built":
                self._refuse(f"{place()} comes to rt.standby_point() without init_process_group()")
            return  # to this depth, that is a line like any other
        self._wait("built")
        with fatal():
            _tell_torch(config.own_rank())

    def rank_asked(self) -> int:
        """See Stage."""
        if not _asked_by_torch():
            self._refuse(f"{place()} asks for the rank")
        return 0

    def failed(self, error: BaseException) -> NoReturn:
        """The script ended, or raised, before it came to where it waits."""
        if isinstance(error, SystemExit):
            told = f"the script ended (exit code {error.code}) before it came to {self._point}"
        else:
            traceback.print_exception(error)
            told = f"the script raised {type(error).__name__} before it came to {self._point}: {error}"
        self._tell_and_end(told)

    def ended(self) -> NoReturn:
        """The script came to its end."""
        self._tell_and_end(f"the script ended before it came to {self._point}")

    # -- what it may not do

    def _on_variable(self, name: str) -> None:
        what = "takes all environment variables, also a rank's own," if " " in name else f"uses {name}"
        if name == "RESILIENT_AGENT" and self._below == "idle":
            what = "opens the Session (or asks for its agent)"
        self._refuse(f"{place()} {what}")

    def _on_door(self, what: str) -> None:
        self._refuse(f"{place()} {what}")

    def _refuse(self, what: str) -> NoReturn:
        self._tell_and_end(f"{what} before {self._point}: move it behind that call")

    def _tell_and_end(self, reason: str) -> NoReturn:
        try:
            self._watch.end()
            self._doors.open()
            with contextlib.suppress(Exception):  # what the script has made of sys.stderr
                print(f"resilient_train: this standby ends, since {reason}", file=sys.stderr)
                traceback.print_stack()
            self._gate.sendall(encode(Unready(reason, self._below)))  # the last: whom the agent hears, it kills
        finally:
            # Whatever the script would do now, or at its end, is not to be done by a process that is no rank. Should
            # the agent not have heard of it, it sees the end.
            os._exit(1)

    # -- and what it becomes

    def _wait(self, depth: str) -> None:
        try:
            life, logs = self._receive_life(depth)
        except Exception as error:
            self._tell_and_end(f"waiting in {self._point} failed: {error!r}")
        self._over = True
        waiting.enter(None)
        self._watch.end()
        self._doors.open()
        with fatal():
            _flush()
            self._gate.close()
            take_streams(logs)
            config.take_rank(life.environ)
            importlib.invalidate_caches()

    def _receive_life(self, depth: str) -> tuple[Life, list[int]]:
        if os.getpid() != self._pid:
            self._tell_and_end(f"a process that the script has forked came to {self._point}")
        started = _children()
        if started:
            self._tell_and_end(
                f"{place()} comes to {self._point} while processes run that the script has started "
                f"({', '.join(map(str, started))}): start them behind that call"
            )
        self._gate.sendall(encode(Waits(depth, time.process_time())))
        life, logs = receive(self._gate, self._frames, ToFork)
        if not isinstance(life, Life):
            os._exit(0)  # nobody needs it any more
        return life, logs


@contextlib.contextmanager
def fatal() -> Iterator[None]:
    """An error inside is not the script's, and an exit code would be taken for its own: a death is repaired."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def bind_to(agent_pid: int) -> None:
    """This process ends when the agent does. Raises ProtocolError if it has ended already."""
    _native.die_with_parent(signal.SIGKILL)
    if os.getppid() != agent_pid:
        raise ProtocolError("the agent ended before this process was bound to it")


def take_streams(logs: list[int]) -> None:
    """Stdout and stderr are the rank's log files from now on."""
    for source, target in zip(logs, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)


def _flush() -> None:
    """What was written for nobody's log must not end up in the rank's."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _children() -> list[int]:
    """Processes that this one has started, but for Python's own that only holds names of shared memory."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            found.update(map(int, (task / "children").read_text().split()))
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    found.discard(getattr(getattr(tracker, "_resource_tracker", None), "_pid", None) or 0)
    return sorted(filter(_runs, found))


def _runs(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def _asked_by_torch() -> bool:
    frame: FrameType | None = sys._getframe(3)  # noqa: SLF001 - who has called getRank
    if frame is not None and frame.f_code.co_name == "get_rank":
        frame = frame.f_back
        return frame is not None and _named(frame) == ("distributed_c10d.py", "init_process_group")
    return frame is not None and _named(frame) in _TORCH_ITSELF


def _named(frame: FrameType) -> tuple[str, str]:
    return os.path.basename(frame.f_code.co_filename), frame.f_code.co_name  # noqa: PTH119 - of text


def _tell_torch(rank: int) -> None:
    """Sets right what ``init_process_group`` has derived from the assumed rank: its groups', log lines, tracebacks."""
    from torch._C._distributed_c10d import _set_global_rank

    from resilient_train.frameworks.torch.group import groups

    for group in groups.values():
        group.learn_rank(rank)
    _set_global_rank(rank)
    hook = sys.excepthook
    if getattr(hook, "__name__", "") == "_distributed_excepthook":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        cells["excepthook_prefix"].cell_contents = f"[rank{rank}]"


def receive(channel: socket.socket, frames: FrameBuffer, of: Any) -> tuple[Any, list[int]]:
    """The next frame of the agent, one of the types ``of``, and what came with it; None at the end. It sends one at a
    time.
    """
    descriptors: list[int] = []
    while True:
        data, fresh, _, _ = socket.recv_fds(channel, 1 << 16, 3)
        descriptors += fresh
        for body in frames.feed(data):
            return msgspec.msgpack.decode(body, type=of), descriptors
        if not data:
            return None, descriptors
