"""The agent's side of the nursery (see ``nursery.py``): starts it, asks it for forks, does without it when it must.

Whatever is odd about the nursery, its answer or a fork's environment, a replacement is started cold: slower, and never
wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from resilient_train import _native, config
from resilient_train.errors import ProtocolError
from resilient_train.launch.logs import Streams
from resilient_train.launch.nursery import BOOT, Fork, Forked, FromNursery, Importing, Order, Ready, Unfit
from resilient_train.launch.preload import target_of
from resilient_train.launch.spares import ANSWER_S, ODD, PAUSE_S, ForkedChild, Note, Spare, Spares, give_life, own_bytes
from resilient_train.transport import FrameBuffer, encode

_IMPORT_S = 60.0
_LOSSES_MAX = 4
"""Times that the nursery may end or hang before it is not started again; each time after twice the pause."""


class Child(Protocol):
    """A process that this one has to reap."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        ...


class Standby:
    """One nursery at a time, and ``settings.standby`` spares (``spares.py``). ``note`` writes an event."""

    def __init__(self, command: tuple[str, ...], log_dir: Path, settings: config.Settings, note: Note) -> None:
        self._command = command
        self._log_dir = log_dir
        self._settings = settings
        self._note = note
        self._environ: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._frames = FrameBuffer()
        self._gates: list[socket.socket] = []
        """Of the forks that the nursery was asked for, oldest first."""
        self._spares = Spares(command, settings, note, self._restock)
        self._skip: set[str] = set()
        self._losses = 0
        self._ready = False
        self._closed = False
        self._importing = ""
        self._timer: asyncio.TimerHandle | None = None
        self._orphans_come_here = False

    def begin(self, environs: Sequence[Mapping[str, str]]) -> None:
        """Starts the nursery when the job has trained for a while. ``environs``: those of all ranks."""
        if not self._settings.standby or self._environ:
            return
        self._environ = config.shared_environ(environs[0])
        for environ in environs:
            others = config.shared_environ(environ)
            if others != self._environ:
                names = sorted({name for name, _ in others.items() ^ self._environ.items()})
                self._give_up(f"the ranks' environments differ in {', '.join(names)}")
                return
        self._spares.begin(environs[0])
        self._after(self._settings.standby_delay_s, self._start)

    def pids(self) -> set[int]:
        """The processes that nobody but this object reaps."""
        nursery = {self._process.pid} if self._process is not None else set()
        return nursery | self._spares.pids()

    def describe(self) -> list[dict[str, Any]]:
        """What stands by, for an operator."""
        nursery = []
        if self._process is not None:
            pid = self._process.pid
            nursery = [{"pid": pid, "depth": "nursery", "ready": self._ready, "own_bytes": own_bytes(pid, lends=True)}]
        return nursery + self._spares.describe()

    def bury(self, pid: int) -> None:
        """A process of ``pids`` has ended. That the nursery has is seen by its channel."""
        self._spares.bury(pid)

    def close(self) -> None:
        """No more of it."""
        self._closed = True
        self._end()
        self._spares.close()

    def become(self, command: tuple[str, ...], environ: Mapping[str, str], streams: Streams) -> ForkedChild | None:
        """A process that runs the command with this environment, or None if a cold start must do."""
        target = target_of(command)
        if isinstance(target, str) or config.shared_environ(environ) != self._environ:
            return None
        spare = self._take(environ)
        if spare is None:
            return None
        try:
            give_life(spare, command, target, environ, streams)
        except OSError as error:
            spare.end()
            self._note("standby_lost", {"reason": f"a spare did not take its orders: {error!r}"})
            return None
        finally:
            self._restock(PAUSE_S)  # not in the middle of a recovery
        return spare.child

    # -- its forks

    def _take(self, environ: Mapping[str, str]) -> Spare | None:
        """A spare that lives: one that waits already, or, for a while, one that the nursery is asked for now."""
        deadline = time.monotonic() + ANSWER_S
        while True:
            spare = self._spares.take(environ)
            if spare is not None or not self._ready or time.monotonic() > deadline:
                return spare
            try:
                if not self._gates:
                    self._ask()
                for frame in self._receive(max(0.001, deadline - time.monotonic())):
                    self._take_in(frame)
            except ODD as error:
                self._lose(f"no fork: {error!r}")
                return None

    def _restock(self, delay_s: float) -> None:
        self._later(delay_s, self._stock_up)

    def _stock_up(self) -> None:
        target = target_of(self._command)
        if self._closed or isinstance(target, str):
            return
        self._spares.send_on(target)
        try:
            while self._ready and len(self._spares) + len(self._gates) < self._settings.standby:
                self._ask()
        except OSError as error:
            self._lose(f"no fork: {error!r}")

    def _ask(self) -> None:
        assert self._channel is not None
        ours, theirs = socket.socketpair()
        with theirs:
            self._gates.append(ours)
            self._channel.settimeout(ANSWER_S)
            socket.send_fds(self._channel, [encode(Fork())], [theirs.fileno()])

    def _take_in(self, frame: FromNursery) -> None:
        if not isinstance(frame, Forked) or not frame.pid or not self._gates:
            raise ProtocolError(f"unexpected {frame}")
        # Raises ChildProcessError for a process that is not ours to reap.
        os.waitid(os.P_PID, frame.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        self._spares.add(ForkedChild(frame.pid), self._gates.pop(0))

    # -- its life

    def _start(self) -> None:
        target = target_of(self._command)
        if isinstance(target, str):
            self._give_up(target)
            return
        if not self._orphans_come_here:
            _native.adopt_orphans()
            self._orphans_come_here = True
        try:
            self._channel, self._frames, self._importing = self._launch(), FrameBuffer(), ""
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self._on_frames)
            order = Order(target, tuple(sorted(self._skip)), paced=self._settings.standby_delay_s > 0)
            self._channel.settimeout(ANSWER_S)
            self._channel.sendall(encode(order))
        except OSError as error:
            self._lose(f"it can't be started: {error}")
            return
        self._after(_IMPORT_S, self._on_slow_import)

    def _launch(self) -> socket.socket:
        """Starts the process; returns the agent's end of its channel."""
        self._log_dir.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        with theirs, (self._log_dir / "standby.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._command[0], "-u", "-c", BOOT, str(theirs.fileno()), *self._command[2:]],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                preexec_fn=die_with_agent,  # noqa: PLW1509 - one prctl; the agent runs no Python thread
            )
        return ours

    def _on_frames(self) -> None:
        try:
            for frame in self._receive(0):
                self._on_frame(frame)
        except BlockingIOError:
            return  # a replacement was in need of it, and has taken it already
        except ODD as error:
            self._lose(str(error))

    def _on_frame(self, frame: FromNursery) -> None:
        match frame:
            case Importing(module=module):
                self._importing = module
                self._after(_IMPORT_S, self._on_slow_import)
            case Ready():
                self._after(0, None)
                self._ready = True
                assert self._process is not None
                self._note("standby_ready", {"pid": self._process.pid, **msgspec.structs.asdict(frame)})
                self._stock_up()
            case Unfit(reason=reason, culprit=culprit):
                self._end()
                self._without(culprit, reason)
            case _:
                self._take_in(frame)
                self._stock_up()

    def _on_slow_import(self) -> None:
        culprit, reason = self._importing, f"importing {self._importing} took longer than {_IMPORT_S:.0f} s"
        self._end()
        self._without(culprit, reason)

    def _without(self, culprit: str, reason: str) -> None:
        """Tries again without the module that is to blame, if there is one that can be left out."""
        if not culprit or culprit in self._skip:
            self._give_up(reason)
            return
        self._skip.add(culprit)
        self._note("standby_skips", {"module": culprit, "reason": reason})
        self._after(0, self._start)

    def _receive(self, timeout_s: float) -> list[FromNursery]:
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        data = self._channel.recv(1 << 16)
        if not data:
            raise ProtocolError("it ended")
        return [msgspec.msgpack.decode(body, type=FromNursery) for body in self._frames.feed(data)]

    def _lose(self, reason: str) -> None:
        self._end()
        self._losses += 1
        self._note("standby_lost", {"reason": reason})
        if self._losses >= _LOSSES_MAX:
            self._give_up(f"it was lost {self._losses} times, at last because {reason}")
        else:
            self._after(PAUSE_S * 2**self._losses, self._start)

    def _give_up(self, reason: str) -> None:
        self._closed = True
        self._note("standby_off", {"reason": reason})

    def _end(self) -> None:
        """Whatever state it is in: afterwards there is no nursery. Spares that wait already need none."""
        self._ready = False
        while self._gates:
            self._gates.pop().close()
        self._after(0, None)
        if self._channel is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._channel.close()
            self._channel = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _after(self, delay_s: float, call: Callable[[], None] | None) -> None:
        """One timer: what it was to do before is off."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if call is not None and not self._closed:
            self._timer = self._later(delay_s, call)

    def _later(self, delay_s: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, call)


def die_with_agent() -> None:
    """For a new process of the agent's, before it runs anything."""
    _native.die_with_parent(signal.SIGKILL)
