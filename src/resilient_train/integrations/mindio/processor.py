"""A rank's side of ``mindio_ttp``: what its training thread says and waits for, and the handlers that orders call.

Three kinds of threads. The *training thread* says how far it is (``start_updating``, ``end_updating``), reports errors
and waits. A *reader* takes the controller's orders. Each order is carried out by a thread of its own, since a handler
may hang for ever (it copies from a device that is gone): handlers run one after the other, but a stop and an exit come
at once, so that a stop can cut what hangs.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from resilient_train.errors import ProtocolError, ResilientError
from resilient_train.integrations.mindio import wire
from resilient_train.integrations.mindio.frames import (
    NAMED,
    NOT_WHOLE,
    PASSED,
    WORDS,
    Action,
    AnyOrder,
    Bye,
    CleanOrder,
    Did,
    ExitOrder,
    FromProcessor,
    GoOrder,
    HaltOrder,
    LockOrder,
    Part,
    ProcessorHello,
    ProcessorWelcome,
    RebuildOrder,
    ReleaseOrder,
    RenameOrder,
    RepairOrder,
    RepairType,
    ReplicaGroup,
    Replicas,
    Reported,
    ReportState,
    RollbackOrder,
    SaveOrder,
    Status,
    StopOrder,
    TrainingOver,
)
from resilient_train.integrations.mindio.mindspore_loop import MindSporeLoop
from resilient_train.transport import FrameBuffer, decode, encode

log = logging.getLogger("resilient_train.mindio")

FORCE_STOP = "FORCE STOP. ForceStopError: the controller has stopped the training of this step"
"""PyTorch's adaptors look for the first words, MindSpore for the second."""
_SETTLE_S = 3.0
"""A rank behind the others may come to where they are; when nothing moves for so long, it stands."""
_POLL_S = 0.05
_STOP_S = 180.0
"""How long a training thread may take to leave its loop before it is saved without that. As MindIO's."""
_EXIT_CODE = 2
_RETRY_S = 1.0
_AT_ONCE = (LockOrder, HaltOrder, ReleaseOrder, StopOrder, ExitOrder, GoOrder)
_MADE_ANEW = (RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_LOAD_REBUILD.value)
"""Repairs before which model and optimizer are to be made anew, in memory that is not damaged."""

Handler = Callable[..., Any]
End = Callable[[int], object]
"""Ends the process."""


class ControllerLostError(ResilientError):
    """There is no controller (any more)."""


class Processor:
    """One rank. Made once in a process."""

    def __init__(self, rank: int, world_size: int, secret: bytes = b"", *, end: End = os._exit) -> None:
        self.rank, self.world_size = rank, world_size
        self.args: Any = None
        """What the script has given for its handlers."""
        self.handlers: dict[str, tuple[Handler, Any]] = {}
        """By name: the handler, and the context it was registered with."""
        self.reborn = False
        self.repairs_devices = True
        """Errors of a device are reported as such (``enable_uce``); else they are the script's."""
        self.cleans_before_save = False
        """The device is stopped and cleaned before an end-of-life checkpoint: what it hangs in would hold that up."""
        self.repair_type = "unknow"  # MindIO's spelling
        self.repair_step = 0
        self._repaired = False
        """The loop has not begun again yet behind a repair."""
        self._loop = MindSporeLoop()
        self._went_back_with: int | None = None
        """The updates that were in what the loop has loaded, until the next one is over."""
        self._astray = False
        """Updates write what nobody sees: nothing here is to be saved, or given to others."""
        self._marks = self._usual_marks = 0
        """How often was told that an update begins since the last one was over, and how often it is told for one."""
        self._secret, self._end = secret, end
        self._to_own_device = _device_setter()
        self._changed = threading.Condition()
        self._handling = threading.Lock()
        self._round = 0
        self._step = 0
        self._whole = True
        """Its memory holds the state behind ``_step`` updates."""
        self._passed = -1
        """Behind which update it did not stand: it is on the way to the next one."""
        self._updating = False
        self._tells_of_updates = False
        """With TSP alone MindSpore's callback does not, and only stands still behind each."""
        self._torn = False
        """It left its loop in the middle of an update: no answer of a handler makes that whole."""
        self._moved_s = 0.0
        self._limit: int | None = None
        self._stopped = False
        self._waits = False
        """The training thread has reported, and is out of its loop."""
        self._action: Action | None = None
        """What it is told, until it hears it."""
        self._alone = False
        """There is no controller any more: EXIT is the answer to all that is reported from now on."""
        self._over = False
        self._socket: socket.socket | None = None
        self._sending = threading.Lock()

    # -- beginning and end

    def start(self, address: str, port: int, retries: int = 10) -> None:
        """Connects. Raises ControllerLostError when nobody answers, or this rank is not let in."""
        for attempt in range(retries):
            try:
                self._socket = socket.create_connection((address, port), timeout=10)
                break
            except OSError as error:
                if attempt + 1 == retries:
                    raise ControllerLostError(f"no controller answers at {address}:{port}: {error}") from None
                time.sleep(_RETRY_S)
        assert self._socket is not None
        wire.notice_silence(self._socket)
        frames = self._frames(self._socket)
        challenge = next(frames, None)
        if isinstance(challenge, wire.Challenge):
            proof = wire.proof(self._secret, challenge.number, self.rank, self.world_size)
            self._send(ProcessorHello(self.rank, self.world_size, proof))
        welcome = next(frames, None)
        if not isinstance(welcome, ProcessorWelcome):
            raise ControllerLostError(f"the controller at {address}:{port} does not let rank {self.rank} in")
        self.reborn = welcome.reborn
        self._whole = not self.reborn
        self._socket.settimeout(None)
        threading.Thread(target=self._read, args=(frames,), name="rt-mindio", daemon=True).start()

    def close(self) -> None:
        """The training is over: nobody is told, nothing is handled any more. Again: nothing. RuntimeError if it came to
        its end before it could be stopped, and has trained nothing of what is here.
        """
        was_over, self._over = self._over, True
        if self._socket is not None and not was_over:
            self._send(Bye())
            self._socket.close()
        if self._astray and not was_over:
            raise RuntimeError(self._not_loaded())

    # -- the training thread

    def start_updating(self) -> None:
        """An update is about to be written. Raises RuntimeError where it must not."""
        with self._changed:
            if self._limit is not None and self._step >= self._limit:
                raise RuntimeError(FORCE_STOP)
            self._updating = self._tells_of_updates = True
            self._tell()

    def mark_updating(self) -> bool:
        """An update begins, whether it may or not. Returns whether it may.

        What MindSpore's C++ code tells, with an answer that it does not look at. To wait here would hold nothing: a
        device sends the mark through a queue, and goes on to the kernels of the update. Nor may it be held where it
        could be: all ranks have passed the collective that sets MindSpore's flag, and its handlers refuse to stop and
        to save until the update is over and the flag is off. So the update is told, and what this rank was locked at
        it does not hold any more (``_holds``).
        """
        with self._changed:
            allowed = self._limit is None or self._step < self._limit
            self._updating = self._tells_of_updates = True
            self._marks += 1
            if self._went_back_with is not None and self._marks > 2 * self._usual_marks > 0:
                self._went_back_with = None  # and the callback, whose flag is such a one too, sees no end of any
                self._astray = True
                log.error("%s", self._not_loaded())
                self._send(Reported(ReportState.RS_UNKNOWN, "what was loaded is not what is trained"))
            if self._astray:
                self._tear()
            self._tell()
            if self._waits:  # the mark comes late: its thread is out of the loop
                self._tear()
            return allowed

    def _tear(self) -> None:
        self._updating, self._whole, self._torn = False, False, True

    def end_updating(self, step: int) -> None:
        """Update ``step`` is over. RuntimeError for a number that was there already: a later repair would go on from a
        wrong step.

        MindIO waits here where ranks are to stand behind the update. MindSpore's callback marks its parameters as
        consistent when this has returned, and refuses to be stopped before: so it is ``pause`` that waits, and
        ``start_updating`` that lets nobody through.
        """
        with self._changed:
            if step <= self._step:
                raise RuntimeError(
                    f"rank {self.rank}: the loop says that update {step} is over, behind update {self._step}: it "
                    f"counts anew, and would be repaired to a wrong step. Count updates from the job's beginning"
                )
            self._check_what_was_loaded()
            if step > self._step + 1:
                log.warning("rank %d: update %d follows %d; none between was told of", self.rank, step, self._step)
            self._step, self._updating, self._tells_of_updates = step, False, True
            self._usual_marks, self._marks = max(self._usual_marks, self._marks), 0
            self._tell()

    def pause(self, step: int) -> None:
        """Waits while the ranks are to stand behind that update. RuntimeError when they are stopped."""
        with self._changed:
            if not self._tells_of_updates:
                step = self._step = max(step, self._step + 1)  # a second training counts from 1 again
                self._tell()
            self._changed.wait_for(lambda: self._limit is None or step < self._limit or self._stopped or self._over)
            if self._stopped:
                raise RuntimeError(FORCE_STOP)
            self._passed = step

    def set_args(self, args: Any) -> None:
        """What handlers get as ``args``: the loop is about to begin, or to go on, behind a repair or (MindSpore's TRE)
        where it has gone back to by itself; then this rank holds the state of there from now on.
        """
        self.args = args
        _, callback = self.handlers.get("stop", (None, None))
        self._loop = MindSporeLoop(args, callback)
        back_at = self._loop.back_at()
        with self._changed:
            repaired, self._repaired, self._went_back_with = self._repaired, False, None
            if repaired:
                self._loop.count_from(self.repair_step)
            elif back_at is not None and back_at <= self._step:
                self._step, self._updating, self._whole, self._torn = back_at, False, True, False
                self._loop.count_from(back_at)
                self._went_back_with, self._marks = self._loop.updates_held(), 0
                self._tell()

    def _check_what_was_loaded(self) -> None:
        """It was, if the first update behind it has changed it. Raises RuntimeError."""
        before, self._went_back_with = self._went_back_with, None
        if before is not None and self._loop.updates_held() == before:
            self._astray = True
            self._tear()
            raise RuntimeError(self._not_loaded())

    def _not_loaded(self) -> str:
        return (
            f"rank {self.rank}: the loop went back to update {self._step} by TRE, and the first update behind it has "
            "not changed the parameters that were loaded: what MindSpore has compiled writes on into others "
            "(load_param_into_net leaves it there). Write them in ckpt_load_fn, with copy_, and return None in the "
            "place of remove_redundancy (docs/how-to/mindspore.md)"
        )

    def set_replicas(self, groups: tuple[ReplicaGroup, ...]) -> None:
        """In whose company this rank holds its state."""
        self._send(Replicas(groups))

    def report(self, state: ReportState, code: str = "", limit_s: float = 180.0) -> None:
        """Says why the training thread has left its loop. Behind RS_UNKNOWN only the end comes: it is waited for."""
        with self._changed:
            if state is not ReportState.RS_INIT_FINISH:
                self._waits = True
            if self._updating:
                self._tear()
            if state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED):
                self._whole = False
            self._changed.notify_all()
        self._send(Reported(state, code))
        if state is ReportState.RS_UNKNOWN:
            with self._changed:
                self._changed.wait_for(lambda: self._action is Action.EXIT or self._alone or self._over, limit_s)

    def wait_next_action(self) -> Action:
        """Waits for what becomes of what was reported."""
        with self._changed:
            self._changed.wait_for(lambda: self._action is not None or self._alone)
            action, self._action = self._action, None
            return action if action is not None else Action.EXIT

    def reset_limit(self) -> None:
        """The training thread may update again."""
        with self._changed:
            self._limit = None
            self._changed.notify_all()

    def _tell(self) -> None:
        self._moved_s = time.monotonic()
        self._changed.notify_all()
        self._send(Status(self._step, self._updating))

    # -- orders

    def _read(self, frames: Any) -> None:
        try:
            for frame in frames:
                if isinstance(frame, TrainingOver):
                    self._let_go()
                    return
                assert not isinstance(frame, wire.Challenge | ProcessorWelcome)
                if isinstance(frame, GoOrder | ReleaseOrder):  # what comes behind it counts from there
                    self._carry_out(frame)
                    continue
                threading.Thread(
                    target=self._carry_out, args=(frame,), name=f"rt-mindio-{frame.name()}", daemon=True
                ).start()
        except (OSError, ProtocolError) as error:
            log.warning("rank %d loses its controller: %s", self.rank, error)
        if not self._over:
            self._lose_controller()

    def _frames(self, endpoint: socket.socket) -> Any:
        buffer = FrameBuffer(wire.FRAME_BYTES)
        while data := endpoint.recv(1 << 16):
            for body in buffer.feed(data):
                yield decode(body, wire.from_controller)

    def _lose_controller(self) -> None:
        """Nobody would repair anything any more. The training goes on; who waits for an answer is let go with EXIT."""
        log.error("rank %d has lost the controller: a fault ends the job from here on", self.rank)
        self._let_go()

    def _let_go(self) -> None:
        with self._changed:
            self._limit, self._alone = None, True
            self._changed.notify_all()

    def _carry_out(self, order: AnyOrder) -> None:
        with self._changed:
            if order.round < self._round:
                return
            self._round = order.round
        if isinstance(order, _AT_ONCE):
            code = self._do(order)
        else:
            with self._handling:
                code = self._do(order) if order.round == self._round else -1
        if not isinstance(order, GoOrder | ReleaseOrder | ExitOrder):
            self._send(Did(order.round, order.name(), code, self._step))

    def _do(self, order: AnyOrder) -> int:
        """What the order says. Returns 0, or the handler's code."""
        try:
            return self._DO[type(order)](self, order) or 0
        except Exception:
            log.exception("rank %d can't %s", self.rank, order.name())
            return 1

    def _halt(self, order: HaltOrder) -> int:
        with self._changed:
            # Together with the lock's own beginning: in between the training thread could pass that place.
            return PASSED if self._passed >= order.limit else self._lock(order)

    def _lock(self, order: LockOrder | HaltOrder) -> int:
        with self._changed:
            self._limit = order.limit
            self._changed.notify_all()  # who stood at a lower one goes on
            while order.round == self._round and (self._updating or not self._stands(order)):
                self._changed.wait(_POLL_S)
            if order.round != self._round:
                return -1
            # Where it stands now it stays: the controller may have its state overwritten.
            self._limit = self._step
            return 0 if self._whole else 1

    def _stands(self, order: LockOrder | HaltOrder) -> bool:
        if isinstance(order, LockOrder) and time.monotonic() - self._moved_s > _SETTLE_S:
            return True
        return not self._handling.locked() and (self._step >= order.limit or self._waits)

    def _stop(self, order: StopOrder) -> Any:
        self.repair_type = order.repair
        return self._stop_training()

    def _stop_training(self) -> Any:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        # MindSpore's handler refuses while an update's mark stands; its callback takes it off right behind the report.
        deadline_s = time.monotonic() + _SETTLE_S
        while True:
            try:
                return self._call("stop", self.args)
            except RuntimeError:
                if time.monotonic() > deadline_s:
                    raise
            time.sleep(_POLL_S)

    def _clean(self, order: CleanOrder) -> Any:
        code = self._call("clean", order.uce, self.args)
        self._whole = self._whole or (code == 2 and not self._torn)
        free_cached_memory()
        return code

    def _rebuild(self, order: RebuildOrder) -> Any:
        return self._call("rebuild_group", list(order.lost), self.args)

    def _repair(self, order: RepairOrder) -> int:
        sends = any(part.how == RepairType.RT_SEND.value for part in order.parts)
        if sends and not self._holds(order.step):
            return NOT_WHOLE
        gets = any(part.sources and part.how != RepairType.RT_SEND.value for part in order.parts)
        with self._changed:
            self._moved_s = time.monotonic()
            self._whole = self._whole and not gets
        for how in dict.fromkeys(part.how for part in order.parts):
            told = _repair_info(how, [part for part in order.parts if part.how == how], order.ranks)
            self._call("repair", order.step, how in _MADE_ANEW, [*told["dst"]], told, self.args)
        with self._changed:
            self._step, self._whole, self._torn = order.step, True, False
        return 0

    def _rollback(self, order: RollbackOrder) -> Any:
        if not self._holds(order.step):
            return NOT_WHOLE
        return self._call("rollback", order.step, self.args) if "rollback" in self.handlers else 0

    def _release(self, _: ReleaseOrder) -> None:
        self.reset_limit()

    def _go(self, order: GoOrder) -> None:
        with self._changed:
            self.repair_step = order.step
            if self._waits:  # else it is new, and has no state yet
                self._step, self._whole, self._repaired = order.step, True, True
            self._passed = self._step
            self._limit, self._stopped, self._waits, self._action = None, False, False, Action.RETRY
            self._changed.notify_all()

    def _save(self, order: SaveOrder) -> Any:
        self.repair_type = "dump"
        if self.cleans_before_save:
            self._free_device()
        if not self._holds(order.step):
            return NOT_WHOLE
        told = [{"type": savers.kind, "ranks": list(savers.ranks)} for savers in order.savers]
        return self._call("save_ckpt", order.step, told, self.args)

    def _free_device(self) -> None:
        """Stops it and cleans it. What fails is logged: the checkpoint may come about all the same."""
        try:
            self._stop_training()
            with self._changed:
                if not self._changed.wait_for(lambda: self._waits, _STOP_S):
                    log.error(
                        "rank %d: its training thread does not leave its loop; it is saved as it stands", self.rank
                    )
            if code := self._call("clean", False, self.args):
                log.error("rank %d: clean says %s before the end-of-life checkpoint", self.rank, code)
        except Exception:
            log.exception("rank %d can't free its device before the end-of-life checkpoint", self.rank)

    def _rename(self, order: RenameOrder) -> Any:
        handler, context = self._handler("rename")
        try:
            # MindSpore's takes its context here, the others' the arguments of the step.
            return self._code("rename", handler(order.step, self.args if context is None else context))
        except FileNotFoundError as error:
            if error.filename2 is None or not Path(error.filename2).exists():
                raise
            log.warning("rank %d: %s is gone, and %s is there", self.rank, error.filename, error.filename2)
            return NAMED

    def _exit(self, _: ExitOrder) -> None:
        with self._changed:
            self._action = Action.EXIT
            self._changed.notify_all()
        if "exit" in self.handlers:
            self._call("exit")
        self._end(_EXIT_CODE)

    def _holds(self, step: int) -> bool:
        """Its memory holds the state behind that many updates, and no update was begun on it."""
        with self._changed:
            return self._whole and not self._updating and self._step == step

    def _call(self, name: str, *arguments: Any) -> Any:
        handler, context = self._handler(name)
        self._to_own_device()
        return self._code(name, handler(*arguments, context))

    def _code(self, name: str, returned: Any) -> Any:
        """What a handler has returned. One that is also a word of ours is told, and is a failure like any other."""
        if returned not in WORDS:
            return returned
        log.error("rank %d: its %s handler returned %s", self.rank, name, returned)
        return 1

    def _handler(self, name: str) -> tuple[Handler, Any]:
        if name not in self.handlers:
            raise LookupError(f"no {name} handler is registered")
        return self.handlers[name]

    def _send(self, frame: FromProcessor) -> None:
        assert self._socket is not None, "start comes first"
        try:
            with self._sending:
                self._socket.sendall(encode(frame))
        except OSError:
            log.debug("rank %d has no controller to tell", self.rank, exc_info=True)

    _DO: ClassVar[dict[type[AnyOrder], Callable[[Any, Any], Any]]] = {
        LockOrder: _lock,
        HaltOrder: _halt,
        ReleaseOrder: _release,
        StopOrder: _stop,
        CleanOrder: _clean,
        RebuildOrder: _rebuild,
        RepairOrder: _repair,
        RollbackOrder: _rollback,
        GoOrder: _go,
        SaveOrder: _save,
        RenameOrder: _rename,
        ExitOrder: _exit,
    }


def _repair_info(how: int, parts: Sequence[Part], ranks: tuple[int, ...]) -> dict[str, Any]:
    """As a repair handler gets it: lists side by side, with an entry for each transfer. MindSpeed-LLM sorts them."""
    return {
        "type": [part.kind for part in parts for _ in part.targets],
        "repair_type": how,
        "src": [source for part in parts for source in part.sources],
        "dst": [target for part in parts for target in part.targets],
        "rank_list": [*ranks],
    }


def _device_setter() -> Callable[[], object]:
    """What gives a thread the device of the one that calls this: a new thread begins with the first one."""
    if (module := sys.modules.get("torch_npu")) is None:
        return lambda: None
    device = module.npu.current_device()
    return lambda: module.npu.set_device(device)


def free_cached_memory() -> None:
    """What a training thread has left is of no use to who comes next, and room is scarce in a repair."""
    if (module := sys.modules.get("torch_npu")) is None:
        return
    gc.collect()
    try:
        module.npu.empty_cache()
    except RuntimeError:
        log.exception("the cached memory of the device can't be freed")
