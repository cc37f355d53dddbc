"""``libttp_c_api.so``: what it exports, who may call it and when, and what a rank makes of a mark out of C code."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from resilient_train.integrations.mindio import c_api, frames, wire
from resilient_train.integrations.mindio.processor import Processor
from resilient_train.transport import FrameBuffer, encode

DONE, NOT_DONE, NOBODY = 0, 1, 2
FRAMEWORK = c_api.directory() / "framework_ttp/libttp_framework.so"
LIBRARY = c_api.directory() / "mindspore_api/libttp_c_api.so"
UPDATING, FINISHED = "MindioTtpSetOptimStatusUpdating", "MindioTtpSetOptimStatusFinished"
SOURCE = Path(__file__).with_name("native_caller.c")


def loaded(kind: type[ctypes.CDLL] = ctypes.CDLL) -> ctypes.CDLL:
    """As MindSpore does it: the framework first."""
    ctypes.CDLL(str(FRAMEWORK))
    library = kind(str(LIBRARY))
    for name in (UPDATING, FINISHED):
        getattr(library, name).argtypes = [ctypes.c_int64]
    return library


def call_in_native_thread(name: str, step: int) -> int:
    """A thread that is made without Python, and has no GIL. What the function returns is its result."""
    libc = ctypes.CDLL(None)
    thread, result = ctypes.c_ulong(), ctypes.c_void_p()
    function = ctypes.cast(getattr(loaded(), name), ctypes.c_void_p)
    assert libc.pthread_create(ctypes.byref(thread), None, function, ctypes.c_void_p(step)) == 0
    assert libc.pthread_join(thread, ctypes.byref(result)) == 0
    return (result.value or 0) & 0xFFFFFFFF


CALLERS: dict[str, Callable[[str, int], int]] = {
    "native thread": call_in_native_thread,
    "without the GIL": lambda name, step: getattr(loaded(), name)(step),
    "with the GIL": lambda name, step: getattr(loaded(ctypes.PyDLL), name)(step),
}


@pytest.fixture(autouse=True)
def disconnected() -> Iterator[None]:
    yield
    c_api.disconnect()


def exports(path: Path) -> set[str]:
    listed = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout
    return {line.split(maxsplit=1)[1] for line in listed.splitlines()}


def test_nothing_but_the_contract_is_exported() -> None:
    assert exports(LIBRARY) == {f"T {UPDATING}", f"T {FINISHED}"}
    assert {each.removeprefix("T resilient_ttp_") for each in exports(FRAMEWORK)} == {"connect", "updating", "finished"}


@pytest.mark.parametrize("caller", CALLERS)
def test_marks_come_to_who_is_connected(caller: str) -> None:
    call, seen = CALLERS[caller], []
    assert (call(UPDATING, -1), call(FINISHED, 1)) == (NOBODY, NOBODY)
    c_api.connect(lambda: seen.append("updating") or True, seen.append)
    assert (call(UPDATING, -1), call(FINISHED, 1 << 40)) == (DONE, DONE)
    assert seen == ["updating", 1 << 40]
    c_api.connect(lambda: False, seen.append)
    assert call(UPDATING, -1) == NOT_DONE
    c_api.disconnect()
    assert (call(UPDATING, -1), call(FINISHED, 2)) == (NOBODY, NOBODY)
    assert len(seen) == 2


def test_what_is_raised_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: int) -> bool:
        raise ValueError("step 0: the first update is 1")

    c_api.connect(refuse, refuse)
    with caplog.at_level(logging.ERROR):
        assert call_in_native_thread(UPDATING, -1) == NOT_DONE
        assert call_in_native_thread(FINISHED, 0) == NOT_DONE
    assert [each.getMessage() for each in caplog.records] == [
        "C code says that an update begins, and it can't be told",
        "C code says that update 0 is over, and it can't be told",
    ]


def test_other_threads_run_meanwhile() -> None:
    """Both while a call is under way, and while who disconnects waits for its end."""
    inside, go_on, answers = threading.Event(), threading.Event(), []
    c_api.connect(lambda: inside.set() or go_on.wait(20), lambda step: None)
    callers = [threading.Thread(target=lambda: answers.append(call_in_native_thread(UPDATING, -1)))]
    callers.append(threading.Thread(target=lambda: (c_api.disconnect(), answers.append("disconnected"))))
    callers[0].start()
    assert inside.wait(20)
    callers[1].start()
    callers[1].join(0.2)
    assert answers == []
    go_on.set()
    for each in callers:
        each.join(20)
    assert sorted(map(str, answers)) == ["0", "disconnected"]


@pytest.fixture(scope="module")
def native_caller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("native") / "caller.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["cc", *flags, "-o", path, SOURCE], check=True, timeout=60)
    return path


@pytest.mark.parametrize("code", [0, 3])
def test_marks_while_python_ends(native_caller: Path, code: int) -> None:
    """Threads that call all the time, through the end of the interpreter and beyond."""
    script = f"""
import ctypes, sys, threading, time
from resilient_train.integrations.mindio import c_api
c_api.connect(lambda: time.sleep(0.0001) or True, lambda step: None)
caller = ctypes.CDLL({str(native_caller)!r})
threading.Thread(target=lambda: [time.sleep(0) for _ in iter(int, 1)], daemon=True).start()
caller.start(ctypes.CDLL({str(LIBRARY)!r}).{UPDATING}, 3)
while caller.answered(0) < 100:
    time.sleep(0.001)
sys.exit({code})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "others 0, and some were taken\n", "")


def test_a_forked_child_ends_whatever_its_parent_was_at() -> None:
    """The library's lock is in the child as it was: held, where a call was under way."""
    inside, go_on = threading.Event(), threading.Event()
    c_api.connect(lambda: inside.set() or go_on.wait(20), lambda step: None)
    caller = threading.Thread(target=call_in_native_thread, args=(UPDATING, -1))
    caller.start()
    assert inside.wait(20)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        c_api.disconnect()  # as at the end of the interpreter
        os._exit(0)
    try:
        assert os.waitpid(child, 0)[1] == 0
    finally:
        go_on.set()
        caller.join(20)


# -- the rank


class Scripted:
    """A controller that does what a test says."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._buffer = FrameBuffer(wire.FRAME_BYTES)
        self._said: list[Any] = []

    def seat(self) -> Processor:
        """The processor of rank 0, which has connected."""
        rank = Processor(0, 2, end=lambda code: None)
        starting = threading.Thread(target=rank.start, args=self._server.getsockname(), daemon=True)
        starting.start()
        self._rank, _ = self._server.accept()
        self._rank.settimeout(20)
        self._rank.sendall(encode(wire.Challenge(b"n" * 32)))
        self.hear(frames.ProcessorHello)
        self._rank.sendall(encode(frames.ProcessorWelcome(reborn=False)))
        starting.join(20)
        return rank

    def order(self, order: frames.AnyOrder) -> None:
        self._rank.sendall(encode(order))

    def hear(self, kind: type) -> Any:
        """The next frame, which is of that kind."""
        while not self._said:
            data = self._rank.recv(1 << 16)
            assert data
            self._said += [msgspec.msgpack.decode(each, type=frames.FromProcessor) for each in self._buffer.feed(data)]
        frame = self._said.pop(0)
        assert isinstance(frame, kind), frame
        return frame

    def close(self) -> None:
        self._rank.close()
        self._server.close()


@pytest.fixture
def controller() -> Iterator[Scripted]:
    made = Scripted()
    yield made
    made.close()


@pytest.fixture
def rank(controller: Scripted) -> Iterator[Processor]:
    rank = controller.seat()
    for name in ("stop", "clean", "repair", "rollback", "save_ckpt"):
        rank.handlers[name] = (lambda *_: 0, None)
    c_api.connect(rank.mark_updating, rank.end_updating)
    yield rank
    rank.close()


def test_an_update_is_told(controller: Scripted, rank: Processor) -> None:
    for step in (1, 2):
        assert call_in_native_thread(UPDATING, -1) == DONE
        assert controller.hear(frames.Status) == frames.Status(step - 1, updating=True)
        assert call_in_native_thread(FINISHED, step) == DONE
        assert controller.hear(frames.Status) == frames.Status(step, updating=False)
    assert call_in_native_thread(FINISHED, 1) == NOT_DONE


def lock(controller: Scripted, rank: Processor) -> None:
    rank.end_updating(1)
    controller.hear(frames.Status)
    controller.order(frames.LockOrder(round=1, limit=1))
    assert controller.hear(frames.Did) == frames.Did(1, "lock", 0, 1)


ORDERS = {
    "repair": frames.RepairOrder(
        round=1,
        step=1,
        parts=(frames.Part(0, frames.RepairType.RT_SEND.value, (0,), (1,)),),
        ranks=(0, 1),
    ),
    "rollback": frames.RollbackOrder(round=1, step=1),
    "save": frames.SaveOrder(round=1, step=1, savers=(frames.Savers(0, (0,)),)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_device_does_not_wait_for_a_lock(controller: Scripted, rank: Processor, name: str) -> None:
    """It writes already when it is told: what the rank was locked at is neither given, kept nor saved."""
    lock(controller, rank)
    assert call_in_native_thread(UPDATING, -1) == NOT_DONE
    assert controller.hear(frames.Status) == frames.Status(1, updating=True)
    controller.order(ORDERS[name])
    assert controller.hear(frames.Did).code == frames.NOT_WHOLE


@pytest.mark.parametrize("name", ORDERS)
def test_nor_is_the_update_behind_it_taken_for_it(controller: Scripted, rank: Processor, name: str) -> None:
    lock(controller, rank)
    call_in_native_thread(UPDATING, -1)
    call_in_native_thread(FINISHED, 2)
    assert [controller.hear(frames.Status).step for _ in range(2)] == [1, 2]
    controller.order(ORDERS[name])
    assert controller.hear(frames.Did).code == frames.NOT_WHOLE
    controller.order(frames.LockOrder(round=2, limit=2))
    assert controller.hear(frames.Did) == frames.Did(2, "lock", 0, 2)


@pytest.mark.parametrize("name", ORDERS)
def test_a_rank_that_stands_does_as_it_is_told(controller: Scripted, rank: Processor, name: str) -> None:
    lock(controller, rank)
    controller.order(ORDERS[name])
    assert controller.hear(frames.Did).code == 0


# -- where MindSpore looks


def script(text: str, *, path: str = "") -> str:
    code = f"from resilient_train.integrations.mindio import finder; finder.install()\n{text}"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout.strip()


LOOKS = f"""
import ctypes, mindio_ttp
place = list(mindio_ttp.__path__)[0]
ctypes.CDLL(place + "/framework_ttp/libttp_framework.so")
print(ctypes.CDLL(place + "/mindspore_api/libttp_c_api.so").{UPDATING}(-1))
"""


def test_mindspore_finds_the_libraries() -> None:
    assert script(LOOKS) == str(NOBODY)


IN_FORKS = """
import importlib, os
for name, text in {cases}:
    child = os.fork()
    if not child:
        exec(text)
        print(name, importlib.import_module("mindio_ttp." + name), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, text
"""


def test_folders_of_libraries_are_no_modules() -> None:
    """Whatever was imported before, and in whichever form."""
    names = ("framework_ttp", "controller_ttp", "utils", "mindspore_api")
    cases = [
        (name, text)
        for name in names
        for text in (
            f"import mindio_ttp.{name} as m",
            f"from mindio_ttp import {name} as m",
            f"import mindio_ttp; {LOOKS}",
        )
    ]
    told = script(IN_FORKS.format(cases=cases)).splitlines()
    for name in names:
        ours = rf"{name} <module 'mindio_ttp\.{name}' \(<resilient_train\.\S*finder"
        assert sum(re.match(ours, line) is not None for line in told) == 3, told


def test_no_module_of_ours_is_put_into_an_older_mindio(tmp_path: Path) -> None:
    (tmp_path / "mindio_ttp").mkdir()
    (tmp_path / "mindio_ttp/__init__.py").touch()
    text = "import importlib.util; print(importlib.util.find_spec('mindio_ttp.framework_ttp'))"
    assert script(text, path=str(tmp_path)) == "None"
