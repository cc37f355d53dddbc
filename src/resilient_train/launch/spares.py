"""The forks that wait to become a rank, as the agent sees them: at their gate, or in the user's script.

A spare that is to wait in the script runs it first, at half of a core: it is stopped and continued by turns, from here.
(A process that has made itself idle or nice can't take that back without privileges.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from resilient_train import config
from resilient_train.errors import ProtocolError
from resilient_train.launch.logs import Streams
from resilient_train.launch.preload import Target
from resilient_train.launch.rehearsal import FromFork, Life, Rehearse, Unready, Waits
from resilient_train.transport import FrameBuffer, encode

ANSWER_S = 1.0
"""A fork takes some 20 ms. A cold start takes longer than this, so waiting as long is worth it, and no longer."""
PAUSE_S = 1.0
ODD = (OSError, ProtocolError, msgspec.MsgspecError)
"""What talking to a process that is not well can raise."""
_TURN_S = 0.01
"""For which a spare runs the script, and then rests."""
_FALLS_MAX = 3
"""Spares in a row that may be killed on their way before the way itself is held to be bad."""
_PAUSE_MAX_S = 600.0

Note = Callable[[str, dict[str, Any]], None]


class ForkedChild:
    """A child that no Popen has started. ``start`` says how far it was when it became a rank."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start = "forked"
        self._code: int | None = None

    def poll(self) -> int | None:
        """See Child."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit code, when it has ended; for one that has been killed."""
        return self._reap(0)

    def _reap(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Spare:
    """A fork that waits at its gate, or is on its way to where it waits (``ready`` is False then)."""

    def __init__(self, child: ForkedChild, gate: socket.socket) -> None:
        self.child = child
        self.gate = gate
        self.frames = FrameBuffer()
        self.attempt = ""
        self.ready = True
        self.begun = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def set_out(self, turns: bool, limit_s: float, on_limit: Callable[[Spare], None]) -> None:
        """It runs the script now, in ``turns`` or all the time, and not for longer than the limit."""
        self.ready, self.begun = False, time.monotonic()
        self._timers["limit"] = asyncio.get_running_loop().call_later(limit_s, on_limit, self)
        if turns:
            self._rest()

    def arrive(self) -> None:
        """It runs no more than others do, from now on."""
        self.ready = True
        self._stop_timers()
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """Kills it, with what the script may have started in it, and reaps it."""
        self._stop_timers()
        self.gate.close()
        self._signal(signal.SIGKILL)
        self.child.wait()

    def _rest(self) -> None:
        self._signal(signal.SIGSTOP)
        self._timers["turn"] = asyncio.get_running_loop().call_later(_TURN_S, self._go_on)

    def _go_on(self) -> None:
        self._signal(signal.SIGCONT)
        self._timers["turn"] = asyncio.get_running_loop().call_later(_TURN_S, self._rest)

    def _stop_timers(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)  # it leads a group, from before it has told that it is there


class Spares:
    """All of a node. ``restock(delay_s)`` asks for a call of whoever makes new ones."""

    def __init__(
        self, command: tuple[str, ...], settings: config.Settings, note: Note, restock: Callable[[float], None]
    ) -> None:
        self._command = command
        self._settings = settings
        self._note = note
        self._restock = restock
        self._all: list[Spare] = []
        self._depth = settings.standby_depth
        self._attempt = ""
        self._falls = 0
        self._deaths = 0

    def __len__(self) -> int:
        return len(self._all)

    def pids(self) -> set[int]:
        """Those that nobody else reaps."""
        return {spare.child.pid for spare in self._all}

    def describe(self) -> list[dict[str, Any]]:
        """For an operator."""
        return [
            {"pid": pid, "depth": each.child.start, "ready": each.ready, "own_bytes": own_bytes(pid)}
            for each in self._all
            for pid in (each.child.pid,)
        ]

    def begin(self, environ: Mapping[str, str]) -> None:
        """The job trains. ``environ``: a rank's."""
        self._attempt = environ.get(config.ATTEMPT, "")
        if any("${" in part for part in self._command):
            self._lower("forked", "the command line holds ${local_rank}, so each rank runs another")

    def add(self, child: ForkedChild, gate: socket.socket) -> None:
        """A new one, which waits at its gate."""
        self._all.append(Spare(child, gate))

    def send_on(self, target: Target) -> None:
        """One that waits at its gate goes on to where it is to wait, if none is on its way: the job needs its cores."""
        if not all(spare.ready for spare in self._all):
            return
        for spare in self._all.copy():
            if self._depth == "forked" or spare.child.start != "forked" or not spare.ready:
                continue
            order = Rehearse(os.getpid(), self._command, target, self._depth, self._attempt)
            try:
                spare.gate.settimeout(ANSWER_S)
                spare.gate.sendall(encode(order))
            except OSError as error:
                self._drop(spare)
                self._note("standby_lost", {"reason": f"a spare did not take its orders: {error!r}"})
                self._restock(PAUSE_S)
                continue
            spare.child.start, spare.attempt = self._depth, self._attempt
            asyncio.get_running_loop().add_reader(spare.gate.fileno(), self._on_gate, spare)
            spare.set_out(self._settings.standby_delay_s > 0, self._settings.standby_limit_s, self._on_limit)
            return

    def take(self, environ: Mapping[str, str]) -> Spare | None:
        """The one that is furthest, of those that live and wait. It is the caller's from now on."""
        waiting = [spare for spare in self._all if spare.ready]
        for spare in sorted(waiting, key=lambda each: config.DEPTHS.index(each.child.start), reverse=True):
            stale = spare.child.start != "forked" and spare.attempt != environ.get(config.ATTEMPT, "")
            if spare.child.poll() is not None or stale:
                self._drop(spare)
                continue
            self._all.remove(spare)
            self._deaths = 0
            return spare
        return None

    def bury(self, pid: int) -> bool:
        """One of them has ended. False: that was none."""
        for spare in self._all:
            if spare.child.pid == pid:
                self._on_death(spare)
                return True
        return False

    def close(self) -> None:
        """No more of them."""
        for spare in self._all.copy():
            self._drop(spare)

    # -- on their way

    def _on_gate(self, spare: Spare) -> None:
        if spare not in self._all:
            return  # it was given up in this very moment
        try:
            data = spare.gate.recv(1 << 16)
            frames = [msgspec.msgpack.decode(body, type=FromFork) for body in spare.frames.feed(data)]
        except BlockingIOError:
            return
        except ODD:
            data, frames = b"", []
        if not data:
            self._on_death(spare)
        for frame in frames:
            match frame:
                case Waits():
                    self._on_waits(spare, frame)
                case Unready(reason=reason, depth=depth):
                    self._drop(spare)
                    self._lower(depth, reason)

    def _on_waits(self, spare: Spare, frame: Waits) -> None:
        asyncio.get_running_loop().remove_reader(spare.gate.fileno())
        spare.arrive()
        spare.child.start = frame.depth
        self._falls = 0
        self._restock(0)
        took_s = time.monotonic() - spare.begun
        pid, times = spare.child.pid, {"took_s": round(took_s, 3), "cpu_s": round(frame.cpu_s, 3)}
        self._note("standby_waits", {"pid": pid, "depth": frame.depth, **times, "own_bytes": own_bytes(pid)})

    def _on_limit(self, spare: Spare) -> None:
        self._drop(spare)
        limit = f"{self._settings.standby_limit_s:g} s (RESILIENT_STANDBY_LIMIT_S)"
        self._lower("forked", f"the script took longer than {limit} to come to where a standby waits")

    def _on_death(self, spare: Spare) -> None:
        on_its_way = not spare.ready
        self._drop(spare)
        where = " on its way through the script" if on_its_way else ""
        told = f"a spare ended with code {spare.child.poll()}{where}"
        self._note("standby_lost", {"reason": told})
        self._falls += on_its_way
        if self._falls >= _FALLS_MAX:
            self._lower("forked", f"{told}, as {_FALLS_MAX - 1} did before it")
            return
        # Each costs a run of the script: where something kills them all the time, they become rare.
        self._deaths += spare.child.start != "forked"
        self._restock(min(PAUSE_S * 2 ** min(self._deaths, 30), _PAUSE_MAX_S))

    def _lower(self, depth: str, reason: str) -> None:
        if config.DEPTHS.index(depth) < config.DEPTHS.index(self._depth):
            self._depth = depth
            self._tell_of_depth(reason)
        self._falls = 0
        self._restock(0)

    def _tell_of_depth(self, reason: str) -> None:
        self._note("standby_shallow", {"asked": self._settings.standby_depth, "depth": self._depth, "reason": reason})

    def _drop(self, spare: Spare) -> None:
        self._all.remove(spare)
        if spare.gate.fileno() >= 0 and not spare.ready:
            asyncio.get_running_loop().remove_reader(spare.gate.fileno())
        spare.end()


def give_life(spare: Spare, command: tuple[str, ...], target: Target, environ: Mapping[str, str], to: Streams) -> None:
    """The spare becomes a rank. Raises OSError if it does not take its orders."""
    life = encode(Life(os.getpid(), command, target, dict(environ), str(Path.cwd())))
    spare.gate.settimeout(ANSWER_S)
    # The descriptors go with the first byte; behind the last, the fork has closed its gate already.
    socket.send_fds(spare.gate, [life[:1]], [to.out, to.err])
    spare.gate.sendall(life[1:])
    spare.gate.close()


def own_bytes(pid: int, *, lends: bool = False) -> int:
    """Memory that is there for this process alone, or (``lends``) for it and its forks; 0 if it can't be told."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    counted = "Anonymous:" if lends else "Private_"
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(counted))
