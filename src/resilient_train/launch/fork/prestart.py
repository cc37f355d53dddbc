"""Runs the user's script in a process that is no rank yet, up to ``rt.standby_point()``, where it waits to become one.

Nothing above that line may depend on the rank that it becomes. Whoever asks for a rank's variable or for the group's
rank is stopped before it has an answer, and the agent is told the place in the user's code: the process is gone then,
and a fork that has run nothing stands by in its stead. What the script *does* above the line (files, programs,
connections) is done once for each standby, while the job runs: ``docs/how-to/standbys.md`` has the rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from resilient_train import config, standby_stage
from resilient_train.launch.fork import kept_code
from resilient_train.launch.fork.environ_watch import ALL, EnvironWatch
from resilient_train.launch.fork.frames import Gate, Life, Unready, Waits
from resilient_train.launch.fork.zygote import fatal, take_streams
from resilient_train.script_place import place

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


def run_ahead(gate: Gate, attempt: str, script: Callable[[], None]) -> None:
    """Runs ``script``; returns, or raises, what it does, if it becomes a rank on its way."""
    watcher = _Watcher(gate)
    # The attempt is the same for all ranks; the agent compares it before it makes this process one of them.
    config.take_rank({config.ATTEMPT: attempt})
    watcher.begin()
    try:
        script()
    except BaseException as error:
        if watcher.goes_on():
            watcher.failed(error)
        raise
    if watcher.goes_on():
        watcher.refuse(f"the script ended before it came to {standby_stage.NAME}")


class _Watcher:
    """The Stage of a process that runs the script ahead."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._pid = os.getpid()
        self._watch = EnvironWatch(config.PER_RANK - {config.ATTEMPT}, self._on_variable)
        self._over = False
        self.wraps = config.wraps_backend()

    def begin(self) -> None:
        """From here on the script may run."""
        standby_stage.enter(self)
        self._watch.begin()

    def goes_on(self) -> bool:
        """Whether this process, and not one that the script has forked, is still no rank."""
        return not self._over and os.getpid() == self._pid

    def at_point(self) -> None:
        """See Stage."""
        if os.getpid() != self._pid:
            self.refuse(f"a process that the script has forked came to {standby_stage.NAME}")
        if started := _children():
            self.refuse(
                f"{place()} comes to {standby_stage.NAME} while processes run that the script has started "
                f"({', '.join(map(str, started))}): start them behind that line"
            )
        life, logs = self._receive_life()
        self._over = True
        standby_stage.enter(None)
        self._watch.end()
        with fatal():
            _flush()
            self._gate.close()
            take_streams(logs)
            config.take_rank(life.run.environ)
            kept_code.take_place()
            importlib.invalidate_caches()
            _tell_torch(config.own_rank())

    def rank_asked(self) -> int:
        """See Stage."""
        if not _asked_by_torch():
            self.needs_rank("asks for the rank")
        return 0

    def needs_rank(self, what: str) -> NoReturn:
        """See Stage."""
        self.refuse(f"{place()} {what} before {standby_stage.NAME}: move it behind that line")

    def _on_variable(self, name: str) -> None:
        what = "takes all environment variables, also a rank's own," if name == ALL else f"uses {name}"
        self.needs_rank(what)

    def failed(self, error: BaseException) -> NoReturn:
        """The script raised before it came to where it waits."""
        if isinstance(error, SystemExit):
            self.refuse(f"the script ended (exit code {error.code}) before it came to {standby_stage.NAME}")
        traceback.print_exception(error)
        self.refuse(f"the script raised {type(error).__name__} before it came to {standby_stage.NAME}: {error}")

    def refuse(self, reason: str) -> NoReturn:
        """Tells the agent, and ends this process: whatever the script would do now is not for one that is no rank."""
        try:
            self._watch.end()
            with contextlib.suppress(Exception):  # what the script has made of sys.stderr
                print(f"resilient_train: this standby ends, since {reason}", file=sys.stderr)
                traceback.print_stack()
            self._gate.send(Unready(reason))  # the last: whom the agent hears, it kills
        finally:
            os._exit(1)  # should the agent not have heard of it, it sees the end

    def _receive_life(self) -> tuple[Life, list[int]]:
        try:
            self._gate.send(Waits(time.process_time()))
            life, logs = self._gate.next()
        except Exception as error:
            self.refuse(f"waiting in {standby_stage.NAME} failed: {error!r}")
        if not isinstance(life, Life):
            os._exit(0)  # nobody needs it any more
        return life, logs


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
    if "torch" not in sys.modules:
        return
    from torch._C._distributed_c10d import _set_global_rank

    from resilient_train.frameworks.torch.communication.process_group import groups

    for group in groups.values():
        group.learn_rank(rank)
    _set_global_rank(rank)
    hook = sys.excepthook
    if getattr(hook, "__name__", "") == "_distributed_excepthook":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        cells["excepthook_prefix"].cell_contents = f"[rank{rank}]"
