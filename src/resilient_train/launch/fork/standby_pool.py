"""The agent's side of this room: has the zygote made, and hands out its forks; does without where it must.

Whatever is odd about these processes or their answers, a rank is started cold: slower, and never wrong. Nothing here
waits: an order is sent, and its answer is an event. The agent has one thread, and a process may be in a state in which
not even SIGKILL ends it (D: on storage that is gone).

    root     zygote      a fork that is asked for
    -        -           none: cold, told once (``standby_off``)
    there    importing   as soon as the imports are done
    there    ready       from the spares, or made now
    there    lost        from the spares, else cold, until there is another zygote
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train import config
from resilient_train.errors import ProtocolError
from resilient_train.launch.agent.logs import Streams
from resilient_train.launch.fork.frames import (
    Ahead,
    Answer,
    Command,
    FarGate,
    Fork,
    Forked,
    Import,
    Importing,
    Life,
    Order,
    Ready,
    Unfit,
    Unready,
    Waits,
    gates,
)
from resilient_train.launch.fork.imports import current_folder, target_of
from resilient_train.launch.fork.zygote import Root

_ANSWER_S = 1.0
"""A fork takes some 10 ms. A cold start takes longer than this, so waiting as long is worth it, and no longer."""
_IMPORT_S = 60.0
_PAUSE_S = 1.0
_PAUSE_MAX_S = 600.0
_AGAIN_S = (0.0, 4.0, 8.0)
"""How long after each loss of the zygote another is made: at once the first time, which may have been an accident.
After one more loss than stand here none is made; what kills it would do so for ever.
"""
_FALLS_MAX = 3
"""Spares in a row that may end on their way through the script before the way itself is held to be bad."""
_ADDED = frozenset(
    {
        *("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "GLOO_SOCKET_IFNAME"),
    }
)
"""What the agent adds to a rank's environment. The launcher has imported torch and numpy without it, and neither reads
one of these, or of the prefixes below, before it is used (looked at with a traced ``getenv``)."""
_ADDED_PREFIXES = (
    *("RESILIENT_", "MS_", "TORCHELASTIC_"),
    *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ASCEND_CACHE_PATH", "ASCEND_MAX_OP_CACHE_SIZE"),
)

Note = Callable[[str, dict[str, Any]], None]


class ForkedChild:
    """A child that no Popen has started. ``start`` says how far it was when it became a rank."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.start = "forked"
        self._code: int | None = None

    def poll(self) -> int | None:
        """See Child."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class Standby:
    """A process that waits at its gate, or is busy with what it was told last (``ready`` is False then)."""

    def __init__(self, pid: int, gate: FarGate) -> None:
        self.child = ForkedChild(pid)
        self.gate = gate
        self.ready = True
        self.attempt = ""
        self._timer: asyncio.TimerHandle | None = None

    def listen(self, on_answers: Callable[[Standby], None]) -> None:
        """``on_answers`` is called when there is something to read at the gate."""
        asyncio.get_running_loop().add_reader(self.gate.fileno(), on_answers, self)

    def limit(self, seconds: float | None, on_limit: Callable[[], None]) -> None:
        """Calls ``on_limit`` unless this is called again in time; None: no limit any more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, on_limit)

    def let_go(self) -> None:
        """The agent's end is closed. The process ends by itself, unless it is a rank now."""
        self.limit(None, lambda: None)
        if self.gate.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.gate.fileno())
            self.gate.close()

    def end(self) -> None:
        """Kills it, with what the script may have started in it. Its end is seen, and it is reaped, by the agent."""
        self.let_go()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)  # it leads a group, from before it has told that it is there


class Pool:
    """One zygote at a time, and ``settings.standby`` spares. ``note`` writes an event."""

    def __init__(self, root: Root | str, command: tuple[str, ...], settings: config.Settings, note: Note) -> None:
        self._root = Standby(root.pid, root.gate) if isinstance(root, Root) else None
        self._imported_with = root.environ if isinstance(root, Root) else {}
        self._off = root if isinstance(root, str) else ""
        self._command = command
        self._settings = settings
        self._note = note
        self._runs = False
        """The ranks run a script that can be run in forks."""
        self._environ: dict[str, str] = {}
        self._zygote: Standby | None = None
        self._making = False
        """A zygote was asked for, or is at its imports."""
        self._fits = False
        """The zygote has done its imports."""
        self._was_fit = False
        self._skip: set[str] = set()
        self._importing = ""
        self._losses = 0
        self._coming: deque[FarGate] = deque()
        """The gates of the forks that the root, for a zygote, or the zygote was asked for, oldest first."""
        self._spares: list[Standby] = []
        self._asked: list[_Request] = []
        self._ending: dict[int, ForkedChild] = {}
        self._depth = settings.standby_depth
        self._attempt: str | None = None
        self._falls = self._deaths = 0
        self._closed = False

    # -- what the agent asks for

    def begin(self, environs: Sequence[Mapping[str, str]]) -> None:
        """The job starts. ``environs``: those of all ranks."""
        self._environ = config.shared_environ(environs[0])
        target = target_of(self._command)
        if isinstance(target, str):
            self._off = target
        elif any(config.shared_environ(each) != self._environ for each in environs):
            self._off = f"the ranks' environments differ in {', '.join(_differing(environs))}"
        elif self._root is not None and (late := self._late_variables()):
            self._off = f"torch was imported before {', '.join(late)} was set"
        elif self._root is not None:
            self._runs = True
            self._root.listen(self._on_root)
            if any("${" in part for part in self._command):
                self._lower("the command line holds ${local_rank}, so each rank runs another")
            self._make_zygote()
        if self._off:
            self._give_up(self._off)

    def take(
        self, environ: Mapping[str, str], give: Callable[[Standby | None], None], wanted: Callable[[], bool]
    ) -> None:
        """Asks for a process that can become a rank; ``give`` gets it, now or soon, or None if a cold start must do.

        It gets nothing if ``wanted()`` is not true any more by then.
        """
        fits = config.shared_environ(environ) == self._environ
        # Only the job's start waits for imports: later they take longer than a cold start, which does without.
        soon = self._spares or self._fits or (self._making and not self._was_fit)
        if self._closed or self._off or not fits or not soon:
            give(None)
            return
        self._asked.append(_Request(environ.get(config.ATTEMPT, ""), give, wanted))
        self._serve()
        self._stock()

    def give_life(
        self, waiting: Standby, command: tuple[str, ...], environ: Mapping[str, str], streams: Streams
    ) -> bool:
        """The process becomes a rank that runs ``command``. False: it did not take its orders, and is killed."""
        life = Life(Command.of(command, environ), os.fsencode(current_folder()))
        try:
            waiting.gate.tell(life, streams)
        except OSError as error:
            self._end(waiting)
            self._note("standby_lost", {"reason": f"a spare did not take its orders: {error!r}"})
            return False
        waiting.let_go()
        return True

    def train(self, attempt: str) -> None:
        """The job trains: spares may run the script ahead from now on."""
        self._attempt = attempt
        self._send_ahead()

    def processes(self) -> list[Standby]:
        """All that nobody but the agent reaps."""
        return [each for each in (self._root, self._zygote, *self._spares) if each is not None]

    def describe(self) -> list[dict[str, Any]]:
        """What stands by, for an operator."""
        found = []
        for depth, each, ready in (("root", self._root, True), ("zygote", self._zygote, self._fits)):
            if each is not None:
                pid = each.child.pid
                found.append({"pid": pid, "depth": depth, "ready": ready, "own_bytes": own_bytes(pid, lends=True)})
        return found + [
            {"pid": pid, "depth": each.child.start, "ready": each.ready, "own_bytes": own_bytes(pid)}
            for each in self._spares
            for pid in (each.child.pid,)
        ]

    def reap(self, pid: int) -> bool:
        """A child of the agent's has ended; it is reaped if it was one of these. False: it is none."""
        if (ended := self._ending.pop(pid, None)) is not None:
            ended.poll()
            return True
        for each in self.processes():
            if each.child.pid == pid:
                self._on_gone(each)  # kills what it has left behind, while its number is still its own
                self._ending.pop(pid, None)
                each.child.poll()
                return True
        return False

    def close(self) -> None:
        """No more of them."""
        self._closed = True
        self._asked.clear()
        for each in (*self._spares, self._zygote, self._root):
            if each is not None:
                self._end(each)
        self._spares.clear()
        self._zygote = self._root = None

    # -- the zygote

    def _late_variables(self) -> list[str]:
        """Variables of the ranks that libraries may have read, with another value, when the launcher imported torch."""
        changed = {name for name, _ in self._environ.items() ^ self._imported_with.items()}
        return sorted(n for n in changed if n not in _ADDED and not n.startswith(_ADDED_PREFIXES))

    def _make_zygote(self) -> None:
        if self._closed or self._root is None:
            return
        self._making = True
        try:
            # A root that is slow (the machine is busy, was stopped) is worth waiting for: nobody waits with us, see
            # ``take``, and without it all starts are cold for the rest of the job.
            self._ask(self._root, _IMPORT_S)
        except OSError as error:
            self._lose(f"the root of all forks does not take orders: {error!r}")

    def _ask(self, parent: Standby, limit_s: float = _ANSWER_S) -> None:
        ours, theirs = gates()
        with theirs:
            try:
                parent.gate.tell(Fork(), [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        self._coming.append(ours)
        parent.limit(limit_s, lambda: self._on_silence(parent))

    def _on_root(self, root: Standby) -> None:
        for answer in self._answers(root):
            if not isinstance(answer, Forked) or self._zygote is not None or not self._runs:
                self._on_odd(root, answer)
                return
            root.limit(None, lambda: None)
            zygote = self._arrived(answer)
            if zygote is None:
                self._lose("the root could not make a fork")
                return
            self._zygote = zygote
            zygote.listen(self._on_zygote)
            try:
                zygote.gate.tell(Import(Command.of(self._command, self._environ), tuple(sorted(self._skip))))
            except OSError as error:
                self._lose(f"it does not take orders: {error!r}")
                return
            zygote.limit(_IMPORT_S, self._on_slow_import)

    def _on_zygote(self, zygote: Standby) -> None:
        for answer in self._answers(zygote):
            if zygote is not self._zygote:
                return
            match answer:
                case Importing(module=module):
                    self._importing = module
                    zygote.limit(_IMPORT_S, self._on_slow_import)
                case Ready():
                    zygote.limit(None, lambda: None)
                    self._making, self._fits, self._was_fit = False, True, True
                    self._note("standby_ready", {"pid": zygote.child.pid, **msgspec.structs.asdict(answer)})
                    self._stock()
                case Unfit(reason=reason, culprit=culprit):
                    self._without(culprit, reason)
                case Forked():
                    zygote.limit(_ANSWER_S if len(self._coming) > 1 else None, lambda: self._on_silence(zygote))
                    spare = self._arrived(answer)
                    if spare is None:
                        self._lose("it could not make a fork")
                        return
                    spare.listen(self._on_spare)
                    self._spares.append(spare)
                    self._serve()
                    self._stock()
                case _:
                    self._on_odd(zygote, answer)

    def _arrived(self, answer: Forked) -> Standby | None:
        if not self._coming:
            return None
        gate = self._coming.popleft()
        if answer.pid:
            with contextlib.suppress(ChildProcessError):  # a process that is not ours to reap is none of ours
                os.waitid(os.P_PID, answer.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                return Standby(answer.pid, gate)
        gate.close()
        return None

    def _on_slow_import(self) -> None:
        self._without(self._importing, f"importing {self._importing} took longer than {_IMPORT_S:.0f} s")

    def _without(self, culprit: str, reason: str) -> None:
        """Tries again without the module that is to blame, if there is one that can be left out."""
        self._drop_zygote()
        if not culprit or culprit in self._skip:
            self._give_up(reason)
            return
        self._skip.add(culprit)
        self._note("standby_skips", {"module": culprit, "reason": reason})
        self._make_zygote()

    def _on_silence(self, parent: Standby) -> None:
        self._on_gone(parent, "it does not answer")

    def _on_odd(self, waiting: Standby, answer: object) -> None:
        self._on_gone(waiting, f"unexpected {answer}")

    def _on_gone(self, waiting: Standby, reason: str = "it ended") -> None:
        if waiting is self._root:
            self._end(waiting)
            self._root = None
            self._note("standby_lost", {"reason": f"the root of all forks is gone: {reason}"})
            if self._zygote is None:
                self._give_up("the root of all forks is gone")
        elif waiting is self._zygote:
            self._lose(reason)
        elif waiting in self._spares:
            self._on_spare_gone(waiting)

    def _lose(self, reason: str) -> None:
        self._drop_zygote()
        self._losses += 1
        self._note("standby_lost", {"reason": reason})
        if self._root is None or self._losses > len(_AGAIN_S):
            times = "" if self._losses == 1 else f" {self._losses} times, at last"
            self._give_up(f"it was lost{times} because {reason}")
        else:
            asyncio.get_running_loop().call_later(_AGAIN_S[self._losses - 1], self._make_zygote)
            self._refuse_all()

    def _drop_zygote(self) -> None:
        """Whatever state it is in. Spares that wait already need none."""
        self._making = self._fits = False
        while self._coming:
            self._coming.popleft().close()
        if self._zygote is not None:
            self._end(self._zygote)
            self._zygote = None

    def _give_up(self, reason: str) -> None:
        self._off = reason
        if self._settings.standby:  # else it is what the user wants
            self._note("standby_off", {"reason": reason})
        self._refuse_all()
        self._drop_zygote()
        if self._root is not None:
            self._end(self._root)
            self._root = None

    def _refuse_all(self) -> None:
        asked, self._asked = self._asked, []
        for request in asked:
            if request.wanted():
                request.give(None)

    def _end(self, waiting: Standby) -> None:
        waiting.end()
        self._ending[waiting.child.pid] = waiting.child

    # -- its forks

    def _serve(self) -> None:
        """Spares for those who have asked, the one that is furthest first."""
        while self._asked:
            request = self._asked[0]
            if request.wanted():
                spare = self._furthest(request.attempt)
                if spare is None:
                    return
                self._spares.remove(spare)
                self._deaths = 0
                self._asked.pop(0)
                request.give(spare)
            else:
                self._asked.pop(0)

    def _furthest(self, attempt: str) -> Standby | None:
        for spare in [each for each in self._spares if each.ready and each.child.start == "built"]:
            if spare.attempt == attempt:
                return spare
            self._spares.remove(spare)  # it has met ranks that are no more
            self._end(spare)
        return next((each for each in self._spares if each.ready and each.child.start == "forked"), None)

    def _stock(self) -> None:
        """Has forks made for those who have asked, and then as many as are to stand by."""
        if self._closed or self._off or not self._fits or self._zygote is None:
            return
        wanted = len(self._asked) + self._settings.standby - len(self._spares) - len(self._coming)
        try:
            for _ in range(wanted):
                self._ask(self._zygote)
        except OSError as error:
            self._lose(f"no fork: {error!r}")
            return
        self._send_ahead()

    def _restock(self, delay_s: float) -> None:
        asyncio.get_running_loop().call_later(delay_s, self._stock)

    # -- spares that run the script ahead

    def _send_ahead(self) -> None:
        """One at a time runs the script: the job needs its cores."""
        if self._depth == "forked" or self._attempt is None or self._closed or not self._runs:
            return
        if not all(spare.ready for spare in self._spares):
            return
        spare = next((each for each in self._spares if each.child.start == "forked"), None)
        if spare is None or self._asked:
            return
        order: Order = Ahead(Command.of(self._command, {}), self._attempt)
        try:
            spare.gate.tell(order)
        except OSError as error:
            self._spares.remove(spare)
            self._end(spare)
            self._note("standby_lost", {"reason": f"a spare did not take its orders: {error!r}"})
            self._restock(_PAUSE_S)
            return
        spare.child.start, spare.attempt, spare.ready = "built", self._attempt, False
        limit_s = self._settings.standby_limit_s
        limit = f"{limit_s:g} s (RESILIENT_STANDBY_LIMIT_S)"
        reason = f"the script took longer than {limit} to come to where a standby waits"
        spare.limit(limit_s, lambda: self._on_unready(spare, reason))

    def _on_spare(self, spare: Standby) -> None:
        for answer in self._answers(spare):
            match answer:
                case Waits(cpu_s=cpu_s):
                    self._on_waits(spare, cpu_s)
                case Unready(reason=reason):
                    self._on_unready(spare, reason)
                case _:
                    self._on_odd(spare, answer)

    def _on_waits(self, spare: Standby, cpu_s: float) -> None:
        spare.limit(None, lambda: None)
        spare.ready = True
        self._falls = 0
        pid = spare.child.pid
        detail = {"pid": pid, "depth": "built", "cpu_s": round(cpu_s, 3), "own_bytes": own_bytes(pid)}
        self._note("standby_waits", detail)
        self._serve()
        self._stock()

    def _on_unready(self, spare: Standby, reason: str) -> None:
        if spare in self._spares:
            self._spares.remove(spare)
            self._end(spare)
        self._lower(reason)

    def _on_spare_gone(self, spare: Standby) -> None:
        self._spares.remove(spare)
        self._end(spare)
        on_its_way = not spare.ready
        told = f"a spare ended{' on its way through the script' if on_its_way else ''}"
        self._note("standby_lost", {"reason": told})
        self._falls += on_its_way
        if self._falls >= _FALLS_MAX:
            self._lower(f"{told}, as {_FALLS_MAX - 1} did before it")
            return
        # Each costs a run of the script: where something kills them all the time, they become rare.
        self._deaths += spare.child.start != "forked"
        self._restock(min(_PAUSE_S * 2 ** min(self._deaths, 30), _PAUSE_MAX_S))

    def _lower(self, reason: str) -> None:
        if self._depth != "forked":
            self._note("standby_shallow", {"asked": self._depth, "depth": "forked", "reason": reason})
            self._depth = "forked"
        self._restock(0)

    # -- answers

    def _answers(self, waiting: Standby) -> list[Answer]:
        try:
            answers = waiting.gate.receive()
        except (ProtocolError, msgspec.MsgspecError) as error:
            self._on_gone(waiting, str(error))
            return []
        if answers is None:
            self._on_gone(waiting)
            return []
        return answers


class _Request(NamedTuple):
    """Somebody waits for a process, see ``Pool.take``."""

    attempt: str
    give: Callable[[Standby | None], None]
    wanted: Callable[[], bool]


def _differing(environs: Sequence[Mapping[str, str]]) -> list[str]:
    first = config.shared_environ(environs[0]).items()
    return sorted({name for each in environs for name, _ in config.shared_environ(each).items() ^ first})


def own_bytes(pid: int, *, lends: bool = False) -> int:
    """Memory that is there for this process alone, or (``lends``) for it and its forks; 0 if it can't be told."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    counted = "Anonymous:" if lends else "Private_"
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(counted))
