"""The nursery: a process that has imported what a rank imports, and from which replacements are forked.

It has one thread and calls no torch operation: what is forked from a process with threads may wait for one that is not
there. It knows no rank. A fork waits at its gate, a socket that ends at the agent, and is told there what it becomes,
or to run the script up to where it waits (``rehearsal.py``). It ends when its gate closes.

A fork is the agent's child: the process between it and the nursery has ended by then, and the agent adopts its orphans
(PR_SET_CHILD_SUBREAPER). So the agent reaps it, and it dies with the agent, not with the nursery.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import os
import runpy
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any, NamedTuple

import msgspec

from resilient_train import _register, config
from resilient_train.environ import reads_noted
from resilient_train.launch.preload import Import, Target, hidden, scan
from resilient_train.launch.rehearsal import Life, Rehearsal, Rehearse, ToFork, bind_to, fatal, receive, take_streams
from resilient_train.transport import FrameBuffer, encode

BOOT = (
    "import sys\n"
    "early = frozenset(sys.modules)\n"
    "if not sys.flags.safe_path: del sys.path[0]\n"
    "from resilient_train.launch.nursery import serve\n"
    "born = serve(int(sys.argv[1]), early)\n"
    "if born is not None: born.live()\n"
)
"""What the nursery runs with ``python -c``. A fork returns from ``serve`` before it lives: it has little beneath it."""

ALWAYS = (
    *("torch", "torch.distributed", "torch.nn.parallel", "torch.profiler._cupti_monitor", "numpy"),
    "torch._dynamo",  # DDP's constructor imports it
    *(f"resilient_train.frameworks.torch.{name}" for name in ("engine", "group")),
    *("resilient_train.session.session", "resilient_train.observe.sinks"),
)
"""What a rank has imported when its first step is committed (measured), and its script need not name."""
_SHARE = 0.5
"""Of one core: the job that it serves is training meanwhile."""
_PACE_S = 0.005


class Order(msgspec.Struct, tag=True, frozen=True):
    """First frame of the agent: for what command this nursery is, and what it must not import."""

    target: Target
    skip: tuple[str, ...] = ()
    paced: bool = True


class Fork(msgspec.Struct, tag=True, frozen=True):
    """Of the agent, with one descriptor: the fork's end of its gate."""


class Importing(msgspec.Struct, tag=True, frozen=True):
    """Of the nursery: sign of life."""

    module: str


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Of the nursery: it can be forked from now on. ``failed``: imports that did not work, and why."""

    modules: int
    failed: dict[str, str]
    cpu_s: float
    rss_bytes: int


class Unfit(msgspec.Struct, tag=True, frozen=True):
    """Of the nursery: it must not be forked. Without ``culprit`` among its imports it might have been."""

    reason: str
    culprit: str = ""


class Forked(msgspec.Struct, tag=True, frozen=True):
    """Of the nursery: the fork waits at its gate; 0: it could not be made."""

    pid: int


FromAgent = Order | Fork
FromNursery = Importing | Ready | Unfit | Forked


class Born(NamedTuple):
    """A fork that knows what to run. ``live`` is the last thing that its main module calls."""

    command: tuple[str, ...]
    target: Target
    rehearsal: Rehearsal | None = None
    """None: it is a rank."""

    def live(self) -> None:
        """Runs the script as ``python SCRIPT`` or ``python -m MODULE`` would."""
        target, rehearsal = self.target, self.rehearsal
        main = ModuleType("__main__")
        main.__dict__.update(__annotations__={}, __builtins__=builtins)
        sys.modules["__main__"] = main
        sys.orig_argv[:] = self.command
        folder = target.folder()
        if folder:
            sys.path.insert(0, folder)
        sys.argv[:] = [target.script or "-m", *target.arguments]
        try:
            if rehearsal is not None:
                rehearsal.begin()
            if target.module:
                runpy._run_module_as_main(target.module)  # type: ignore[attr-defined] # noqa: SLF001 - what -m itself calls
            else:
                exec(_compiled(target.script, main), main.__dict__)  # noqa: S102 - what this process is for
            if rehearsal is not None and rehearsal.goes_on():
                rehearsal.ended()
        except BaseException as error:
            if rehearsal is not None and rehearsal.goes_on():
                rehearsal.failed(error)
            if not isinstance(error, SystemExit):
                sys.excepthook = _Hook(sys.excepthook)
            raise


def _compiled(script: str, main: ModuleType) -> CodeType:
    path = script if os.path.isabs(script) else f"{Path.cwd()}/{script}"  # noqa: PTH117 - not normalized, like Python's
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    return compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)


class _Hook:
    """The hook that was there, told of the script's frames only."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = self._hook
        while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", __file__):
            trace = trace.tb_next
        sys.last_traceback = trace
        self._hook(kind, error.with_traceback(trace), trace)


def serve(descriptor: int, early: frozenset[str]) -> Born | None:
    """Imports, then forks on request until the agent hangs up. Returns a Born in each fork, None in the nursery."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    frames = FrameBuffer()
    _register.wrap_for_forks()
    order, _ = receive(channel, frames, FromAgent)
    if not isinstance(order, Order):
        return None
    told = _prepare(channel, order, early)
    channel.sendall(encode(told))
    if isinstance(told, Unfit):
        return None
    while True:
        request, gates = receive(channel, frames, FromAgent)
        if not isinstance(request, Fork) or len(gates) != 1:
            return None
        pid = _fork()
        if pid is None:
            channel.close()
            return _wait_at_gate(gates[0])
        os.close(gates[0])
        channel.sendall(encode(Forked(pid)))


def _prepare(channel: socket.socket, order: Order, early: frozenset[str]) -> Ready | Unfit:
    folder = order.target.folder()
    plan = scan(order.target, folder)
    if plan.refusal:
        return Unfit(plan.refusal)
    if _threads() > 1:
        return Unfit("Python itself starts with another thread (sitecustomize, a .pth file)")
    failed: dict[str, str] = {}
    with _paced() if order.paced else contextlib.nullcontext():
        # The script's own come first: so they are imported in its order, as far as there is one.
        for each in [*plan.imports, *map(Import, ALWAYS)]:
            if each.module in order.skip:
                continue
            channel.sendall(encode(Importing(each.module)))
            culprit = each.module if each.module not in ALWAYS else ""
            with reads_noted(config.PER_RANK) as asked:
                try:
                    __import__(each.module, fromlist=each.names)
                except (Exception, SystemExit) as error:
                    failed[each.module] = repr(error)
            if asked - {"RESILIENT_AGENT"}:  # ours asks whether it has an agent: there is none yet
                return Unfit(f"importing {each.module} reads {', '.join(sorted(asked))}", culprit)
            if _threads() > 1:
                return Unfit(f"importing {each.module} starts a thread", culprit)
    if _has_children():
        return Unfit("an import has started a process")
    shadow = hidden(folder, [name for name in sys.modules if name not in early and name != "__main__"])
    if shadow:
        return Unfit(shadow)
    gc.collect()
    gc.freeze()  # what a fork's collector does not look at it need not copy
    return Ready(len(sys.modules), failed, time.process_time(), _rss_bytes())


@contextlib.contextmanager
def _paced() -> Iterator[None]:
    """Inside the block, importing takes no more than its share of a core."""
    pace = _Pace()
    sys.meta_path.insert(0, pace)
    try:
        yield
    finally:
        sys.meta_path.remove(pace)


class _Pace:
    """Finds no module, and rests for as long as the imports since the last rest deserve.

    Not niceness: a process that has made itself nice can't take that back for its children.
    """

    def __init__(self) -> None:
        self._rested_s = time.process_time()

    def find_spec(
        self, _name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        worked_s = time.process_time() - self._rested_s
        if worked_s > _PACE_S:
            time.sleep(worked_s * (1 / _SHARE - 1))
            self._rested_s = time.process_time()
        return None


def _threads() -> int:
    """How many threads a fork would lack, and this one. OpenBLAS ends its own before every fork, so one is tried."""
    if len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - names are what is counted
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208 - likewise


def _has_children() -> bool:
    return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip())


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _fork() -> int | None:
    """The pid of a fork that nobody but the agent will be the parent of; 0: there is none. None in the fork."""
    ours, theirs = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            if os.fork() == 0:
                os.setsid()
                os.write(theirs, str(os.getpid()).encode())
                os.close(ours)
                os.close(theirs)
                return None
        except OSError:
            os._exit(1)
        os._exit(0)
    os.close(theirs)
    os.waitpid(between, 0)
    told = os.read(ours, 32)
    os.close(ours)
    return int(told or 0)


def _wait_at_gate(gate: int) -> Born:
    """In the fork: learns what it becomes, and becomes it."""
    _draw_anew()  # ahead: it is part of no recovery then
    channel, frames = socket.socket(fileno=gate), FrameBuffer()
    channel.set_inheritable(False)
    order, logs = receive(channel, frames, ToFork)
    if isinstance(order, Rehearse):
        return Born(order.command, order.target, Rehearsal(channel, frames, order))
    channel.close()
    if not isinstance(order, Life):
        os._exit(0)  # nobody needs it any more
    with fatal():
        _become(order, logs)
    return Born(order.command, order.target)


def _become(life: Life, logs: list[int]) -> None:
    bind_to(life.agent_pid)
    take_streams(logs)
    config.replace_environ(life.environ)
    os.chdir(life.cwd)
    importlib.invalidate_caches()


def _draw_anew() -> None:
    """What a new process takes from the system's entropy. Python's own generator does so by itself after a fork."""
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "multiprocessing.process" in modules:
        modules["multiprocessing.process"].current_process().authkey = os.urandom(32)
