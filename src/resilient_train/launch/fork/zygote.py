"""The processes that ranks are forked from. Each waits at its gate for what the agent wants of it, see ``frames.py``.

The launcher has imported torch to read torchrun's flags. Before it does anything else it forks the *root*, which stays
as it is. A fork of the root becomes the *zygote*: it imports what a rank imports. Every rank is a fork of the zygote,
the first ones and each replacement; where something is wrong with the zygote, the root makes another.

None of them has a second thread, or calls an operation of torch: what is forked from a process with threads may wait
for one that is not there. None knows a rank. Each ends when its gate closes.

A fork is the agent's child, which adopts its orphans: so the agent reaps it, and it dies with the agent, not with the
process that it was forked from.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train import _native, config
from resilient_train.errors import ProtocolError
from resilient_train.launch.fork.environ_watch import ALL, noted
from resilient_train.launch.fork.frames import (
    Ahead,
    FarGate,
    Fork,
    Forked,
    Gate,
    Import,
    Importing,
    Life,
    Ready,
    Unfit,
    gates,
)
from resilient_train.launch.fork.imports import Script, Wanted, foreign_to_forks, hidden, scan, uncollected
from resilient_train.launch.fork.live import live
from resilient_train.launch.fork.quiet_end import end_quietly

ALWAYS = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch.profiler._cupti_monitor", "numpy"),
    "torch._dynamo",  # DDP's constructor imports it, and with it what fully_shard and AdamW import when first used
    "torch.utils.serialization",
    *(f"resilient_train.frameworks.torch.{name}" for name in ("engine", "communication.late_store")),
    *("resilient_train.session.session", "resilient_train.observe.sinks"),
)
"""What a rank has imported when its first step is committed (measured), and its script need not name. Some torch lack
some of it.
"""
_HARMLESS = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/dev/pts/", "/dev/tty", "/dev/shm/")  # noqa: S108 - not written to


class Born(NamedTuple):
    """A fork that knows what to run. ``begin`` is the last thing that its main module calls."""

    command: tuple[str, ...]
    target: Script
    gate: Gate | None = None
    """Still there where it runs the script ahead, and is no rank yet."""
    attempt: str = ""

    def begin(self) -> None:
        """Runs the script."""
        end_quietly()
        if self.gate is None:
            live(self.command, self.target)
            return
        from resilient_train.launch.fork.prestart import run_ahead

        run_ahead(self.gate, self.attempt, lambda: live(self.command, self.target))


class Root(NamedTuple):
    """The agent's view of the root; None in place of it says that there is none."""

    pid: int
    gate: FarGate
    environ: dict[str, str]
    """With which torch was imported."""


def start_root(log: Path, environ: dict[str, str]) -> Root | Born | str:
    """Forks the root off the launcher, which must have no second thread yet. ``environ``: see Root.

    Returns a Born in each process that is to run the script, and why there is no root where that is so. Output of these
    processes goes to the file ``log``.
    """
    for option in sys.orig_argv[1:]:
        if not option.startswith("-") or option in ("-c", "-m"):
            break
        if option != "-u":
            return f"resilient-run was started with Python's flag {option}, which its forks would have"
    if threads() > 1:
        names = ", ".join(_other_threads())
        return f"the launcher has another thread ({names}): of torch, or of what Python starts with (a .pth file)"
    _native.adopt_orphans()
    ours, theirs = gates()
    agent_pid = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Root(pid, ours, environ)
    with fatal():
        ours.close()
        os.setsid()
        _detach(log, keep=theirs.fileno())
        bind_to(agent_pid)
    return _wait(Gate(theirs.detach()), agent_pid)


def _detach(log: Path, *, keep: int) -> None:
    """Keeps one descriptor of the launcher's, and gets the streams of a ``python -u`` without a console."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(int(name))
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(written)
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        before = getattr(sys, f"__{name}__")
        raw: Any = open(descriptor, f"{mode}b", buffering=-1 if mode == "r" else 0, closefd=False)  # noqa: SIM115 - it stays
        getattr(raw, "raw", raw).name = f"<{name}>"
        newline = None if mode == "r" else "\n"
        stream: Any = io.TextIOWrapper(raw, before.encoding, before.errors, newline, write_through=mode == "w")
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if not sys.flags.safe_path:
        del sys.path[0]  # what Python has put there for the launcher's own script


def _wait(gate: Gate, agent_pid: int) -> Born:
    """Does what it is told, until it is told to run the script. Ends the process when the gate closes."""
    while True:
        order, descriptors = gate.next()
        match order:
            case Fork():
                pid = _fork()
                if pid is None:
                    gate.close()
                    gate = Gate(descriptors[0])
                    _draw_anew()  # ahead: it is part of no recovery then
                else:
                    os.close(descriptors[0])
                    gate.send(Forked(pid))
            case Import():
                bind_to(agent_pid)
                gate.send(_import(gate, order))
            case Life():
                gate.close()
                with fatal():
                    bind_to(agent_pid)
                    take_streams(descriptors)
                    config.take_life(order.run.environ)
                    if order.cwd:
                        os.chdir(order.cwd)
                    importlib.invalidate_caches()
                return Born(order.run.command, order.run.target)
            case Ahead():
                bind_to(agent_pid)
                return Born(order.run.command, order.run.target, gate, order.attempt)
            case None:
                os._exit(0)  # nobody needs it any more


def _import(gate: Gate, order: Import) -> Ready | Unfit:
    config.replace_environ(order.run.environ)
    target = order.run.target
    folder = target.folder()
    plan = scan(target, folder)
    if plan.refusal:
        return Unfit(plan.refusal)
    failed: dict[str, str] = {}
    # The script's own come first: so they are imported in its order, as far as there is one.
    for each in [*plan.imports, *map(Wanted, ALWAYS)]:
        if each.module in order.skip or foreign_to_forks(each.module) or is_of_another_torch(each.module):
            continue
        gate.send(Importing(each.module))
        culprit = each.module if each.module not in ALWAYS else ""
        before = dict(os.environ)
        with noted(config.PER_RANK) as asked:
            try:
                # The script's own imports may say how garbage is collected; and what they collect now, nobody has then.
                with contextlib.nullcontext() if culprit else uncollected():
                    __import__(each.module, fromlist=each.names)
            except (Exception, SystemExit) as error:
                failed[each.module] = repr(error)
        if each.module in ALWAYS and dict(os.environ) != before:
            config.replace_environ(before)  # a new interpreter has what the script's own imports set, and no more
        asked.discard("RESILIENT_AGENT")  # ours asks whether it has an agent: there is none yet
        if each.module in ALWAYS:
            asked.discard(ALL)  # looked at: no copy is kept
        if asked:
            return Unfit(f"importing {each.module} reads {', '.join(sorted(asked))}", culprit)
        if odd := _unfit_for_forks():
            return Unfit(f"importing {each.module} {odd}", culprit)
    if shadow := hidden(folder):
        return Unfit(shadow)
    if "resilient_train.frameworks" in sys.modules:
        sys.modules["resilient_train.frameworks"].installed()  # or each fork would look for them
    gc.collect()
    gc.freeze()  # what a fork's collector does not look at it need not copy
    return Ready(len(sys.modules), failed, time.process_time(), _rss_bytes())


def is_of_another_torch(module: str) -> bool:
    """One of ``ALWAYS`` that is not there. Its package is imported."""
    return module in ALWAYS and module.startswith("torch.") and importlib.util.find_spec(module) is None


def _unfit_for_forks() -> str:
    """What has happened to this process that its forks could not live with; empty: nothing."""
    if threads() > 1:
        return "starts a thread"
    if Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip():
        return "starts a process"
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are what is wanted
        with contextlib.suppress(OSError):
            device = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - likewise
            if device.startswith("/dev/") and not device.startswith(_HARMLESS):
                return f"opens the device {device}"
    for name in ("cuda", "xpu", "npu"):
        device_module = sys.modules.get(f"torch.{name}") or sys.modules.get(f"torch_{name}.{name}")
        if getattr(device_module, "is_initialized", lambda: False)():
            return f"initialises {name} devices"
    return ""


def threads() -> int:
    """How many threads a fork would lack, and this one. OpenBLAS ends its own before every fork, so one is tried."""
    if _count_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return _count_threads()


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - names are what is counted


def _other_threads() -> list[str]:
    """Their names; the first of all is this one."""
    numbers = sorted(int(name) for name in os.listdir("/proc/self/task"))  # noqa: PTH208 - likewise
    found = (Path(f"/proc/self/task/{number}/comm") for number in numbers if number != os.getpid())
    return [path.read_text().strip() for path in found if path.exists()]


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fork() -> int | None:
    """The pid of a fork whose parent is the agent; 0: there is none. None in the fork."""
    try:
        return _native.fork_orphan() or None
    except OSError:
        return 0


def _draw_anew() -> None:
    """What a new process takes from the system's entropy. Python's own generator does so by itself after a fork."""
    modules: Mapping[str, Any] = sys.modules  # a copy would write to the memory of each: 10 ms in a fork
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


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


def take_streams(logs: Sequence[int]) -> None:
    """Stdout and stderr are the rank's log files from now on."""
    for source, target in zip(logs, (1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
