"""The commands' side of a running job: which job is meant, what its agent answers, and whether an order has hit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilient_train.errors import ConfigError, ProtocolError, ResilientError
from resilient_train.events import Event, event_in, from_line
from resilient_train.launch.spec import SOCKET
from resilient_train.observe.sinks import EVENTS_FILE
from resilient_train.protocol.messages import Hello, Inject, Pause, Query, Reply, Unpause
from resilient_train.transport import Channel

RUNS = Path("resilient_runs")
_REPLY_TIMEOUT_S = 10.0
_LOOK_S = 0.02
_BEGIN_S = 30.0
"""How long a launcher that was typed just now may take to have a run directory: it imports torch first."""
_SOON_S = 1.0
"""A wait that is shorter need not be told."""


class NotHitError(ResilientError):
    """A fault was ordered, and did not happen."""


class NoJobError(ConfigError):
    """No job runs there. ``over``: and none is about to, or can."""

    def __init__(self, text: str, *, over: bool = False) -> None:
        super().__init__(text)
        self.over = over


def newest_run() -> Path:
    """The run under ``./resilient_runs`` that was started last, of those that run. Raises ConfigError."""
    # A run lies there itself, or, of a drill or a demonstration, in a folder of its own.
    sockets = [*RUNS.glob(f"*/{SOCKET}"), *RUNS.glob(f"*/*/{SOCKET}")]
    begun = []
    for path in sockets:
        with contextlib.suppress(FileNotFoundError):
            begun.append((path.stat().st_mtime_ns, path))
    if not begun:
        raise NoJobError(f"no job is running in {RUNS}/ here: name the run's directory")
    return max(begun)[1].parent


def ask(run: Path, question: Inject | Pause | Query | Unpause) -> Reply:
    """Asks the agent of a running job. Raises NoJobError if none runs there, ConfigError if it refuses the question."""
    path = run / SOCKET
    if not run.is_dir():
        is_file = run.exists()
        why = "it is a file" if is_file else "there is no such directory"
        raise NoJobError(f"no job is running in {run}: {why}", over=is_file)
    if not path.exists():
        known = (run / EVENTS_FILE).exists()
        why = "the run is over" if known else "it is no run's directory"
        raise NoJobError(f"no job is running in {run}: {why} (there is no {path})", over=_is_over(run))
    try:
        channel = Channel(str(path), timeout_s=_REPLY_TIMEOUT_S)
    except PermissionError:
        raise ConfigError(f"{run}: only the job's own user and root may ask its agent") from None
    except OSError as error:
        raise NoJobError(f"no job is running in {run}: {path}: {error}", over=_is_over(run)) from None
    try:
        channel.send(Hello(role="operator"))
        channel.send(question)
        reply = channel.receive(_REPLY_TIMEOUT_S)
    finally:
        channel.close()
    if reply is None:
        raise ProtocolError(f"the agent at {path} did not answer within {_REPLY_TIMEOUT_S:.0f} s")
    if not isinstance(reply, Reply):
        raise ProtocolError(f"the agent at {path} answered with {type(reply).__name__}, not Reply")
    if reply.error:
        raise ConfigError(f"{run}: the agent refused: {reply.error}")
    return reply


def _is_over(run: Path) -> bool:
    """Whether the launcher that wrote the run's events has ended. One that is alive is about to listen, or has just
    stopped to.
    """
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        with (run / EVENTS_FILE).open("rb") as file:
            first = from_line(file.readline())
        return first.kind != "run_start" or not Path(f"/proc/{first.detail.get('pid')}").exists()
    return False


class AnnouncedWait:
    """A wait that is told (``say``) once, if it is not over soon. ``limit_s``: the longest."""

    def __init__(self, limit_s: float, say: Callable[[str], None]) -> None:
        self.limit_s = limit_s
        self._say = say
        self._said = False
        self._begun = time.monotonic()

    @property
    def waited_s(self) -> float:
        """So far."""
        return time.monotonic() - self._begun

    def wait(self, why: str, limit_s: float) -> None:
        """A little longer."""
        if self.waited_s > _SOON_S and not self._said:
            self._said = True
            self._say(f"{why}: waiting, at most {limit_s:g} s")
        time.sleep(_LOOK_S)


def find(run: Path | None, patience: AnnouncedWait) -> tuple[Path, dict[str, object]]:
    """The directory and the status of a job (None: of the newest), also of one whose launcher has only just begun.

    Raises NoJobError if there is none, and none comes soon.
    """
    limit_s = min(patience.limit_s, _BEGIN_S)
    while True:
        try:
            found = run or newest_run()
            return found, ask(found, Query()).status
        except NoJobError as error:
            if error.over or patience.waited_s >= limit_s:
                raise
            patience.wait(str(error), limit_s)


def wait_until_it_trains(run: Path | None, patience: AnnouncedWait) -> Path:
    """Waits until a job trains, or is past its training. Returns its directory.

    Raises NoJobError if there is no job soon, NotHitError if the job does not train when the time is over.
    """
    while True:
        found, status = find(run, patience)
        unnoticed = status.get("unnoticed")
        if status.get("stage") not in ("STARTING", "RECOVERING", "PAUSED") and not unnoticed:
            return found
        why = f"the job in {found} is {status.get('stage')} (it waits for ranks {status.get('waits_for')})"
        if status.get("stage") == "PAUSED":
            why = f"the job in {found} is PAUSED (`resilient-train resume` has it train; --now does not wait for that)"
        if unnoticed:
            why = f"the job in {found} has not yet noticed that ranks {unnoticed} are lost or stand still"
        if patience.waited_s >= patience.limit_s:
            raise NotHitError(f"{why} after {patience.limit_s:g} s (--limit-s); --now does not wait until it trains")
        patience.wait(why, patience.limit_s)


def ranks(run: Path) -> dict[int, int]:
    """Rank -> process id, of the ranks of a running job that have a process. Raises ConfigError if there is none."""
    listed = ask(run, Query()).status.get("ranks")
    rows = [row for row in listed if isinstance(row, dict)] if isinstance(listed, list) else []
    found = {row["rank"]: row["pid"] for row in rows if isinstance(row.get("rank"), int) and row.get("pid")}
    if not found:
        raise ConfigError(f"{run}: no rank of the job is running now")
    return found


class Ordered(NamedTuple):
    """An order that the agent has passed on to a rank."""

    rank: int
    incarnation: int
    number: int


class Follower:
    """Reads what is appended to a run's events from now on."""

    def __init__(self, run: Path) -> None:
        self._path = run / EVENTS_FILE
        self._offset = self._path.stat().st_size if self._path.exists() else 0
        self._torn = b""

    def read(self) -> list[Event]:
        """The events that came since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *complete, self._torn = (self._torn + data).split(b"\n")
        return [event for event in map(event_in, complete) if event is not None]

    def wait_for(self, order: Ordered, limit_s: float) -> Event:
        """The event of the fault's hitting. Raises NotHitError if the rank goes first, or when the time is over."""
        deadline = time.monotonic() + limit_s
        while True:
            over = time.monotonic() > deadline  # looked at before the events: what came in time counts
            for event in self.read():
                found = _about(event, order)
                if found is not None:
                    return found
            if over:
                raise NotHitError(
                    f"rank {order.rank} has not come to where the fault can hit it within {limit_s:g} s; it stays "
                    "ordered"
                )
            time.sleep(_LOOK_S)

    def wait_for_pause(self, limit_s: float) -> Event:
        """The event that all ranks stand. Raises NotHitError if the job ends first, or when the time is over."""
        deadline = time.monotonic() + limit_s
        while True:
            over = time.monotonic() > deadline
            for event in self.read():
                if event.kind == "paused":
                    return event
                if event.kind in ("finished", "job_end", "pause_withdrawn"):
                    ended = "somebody has taken it back" if event.kind == "pause_withdrawn" else "the job has ended"
                    raise NotHitError(f"the job was not paused: {ended}")
            if over:
                raise NotHitError(
                    f"the job has not come to the head of a step within {limit_s:g} s (--limit-s); the pause stays "
                    "asked for, and `resilient-train resume` takes it back"
                )
            time.sleep(_LOOK_S)


def _about(event: Event, order: Ordered) -> Event | None:
    """``event``, if it tells that the order was carried out. Raises NotHitError if it tells that it will not be."""
    if event.kind == "job_end":
        raise NotHitError(f"the job ended before rank {order.rank} came to where the fault can hit it")
    if event.rank != order.rank:
        return None
    if event.kind == "injected" and event.detail.get("order") == order.number:
        return event
    gone = event.kind == "spawned" and event.incarnation != order.incarnation
    gone |= event.kind in ("exited", "session_end") and event.incarnation == order.incarnation
    if gone:
        raise NotHitError(f"rank {order.rank} was lost, or left its loop, before the fault could hit it")
    return None
