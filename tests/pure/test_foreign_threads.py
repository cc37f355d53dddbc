"""Threads that C++ has made keep their place in Python between two calls, and give it back when they end."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from resilient_train._native import keep_thread_state

_ROUTINE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_THREADS = 20
WAIT_S = 10


def thread_states() -> int:
    """How many threads the interpreter keeps a state for."""
    api = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(api, name).restype = ctypes.c_void_p
    api.PyInterpreterState_ThreadHead.argtypes = api.PyThreadState_Next.argtypes = (ctypes.c_void_p,)
    count, each = 0, api.PyInterpreterState_ThreadHead(api.PyInterpreterState_Get())
    while each is not None:
        count, each = count + 1, api.PyThreadState_Next(each)
    return count


def in_a_foreign_thread(call: Callable[[Any], object]) -> None:
    """``call`` is the outermost Python function in a thread of C's; its return value is ignored."""
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    routine = _ROUTINE(call)
    assert libc.pthread_create(ctypes.byref(thread), None, routine, None) == 0
    assert libc.pthread_join(thread, None) == 0


def keep(_: Any = None) -> None:
    keep_thread_state()


def test_the_states_of_threads_that_have_ended_are_freed() -> None:
    in_a_foreign_thread(keep)  # the newest one's stays until there is another
    before = thread_states()
    for _ in range(_THREADS):
        in_a_foreign_thread(keep)
        assert thread_states() == before


def test_threads_of_pythons_own_are_left_alone() -> None:
    in_a_foreign_thread(keep)
    before = thread_states()
    keep()
    for _ in range(_THREADS):
        thread = threading.Thread(target=keep)
        thread.start()
        thread.join(WAIT_S)
    in_a_foreign_thread(keep)
    assert thread_states() == before


def test_a_fork_has_nothing_to_free() -> None:
    """What the parent's threads have left behind is gone in the child, and must not be freed there once more."""
    in_a_foreign_thread(keep)
    child = os.fork()
    if child == 0:
        in_a_foreign_thread(keep)
        os._exit(0 if thread_states() == 2 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_thread_of_gloos_keeps() -> None:
    torch = pytest.importorskip("torch")
    c10d = torch.distributed
    store = c10d.HashStore()

    def build(rank: int) -> Any:
        return c10d.ProcessGroupGloo(store, rank, 2, timedelta(seconds=WAIT_S))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build, range(2))
    mine, calls = threading.local(), []

    def ended(_: object) -> None:
        keep_thread_state()
        mine.calls = getattr(mine, "calls", 0) + 1
        calls.append(mine.calls)

    for _ in range(10):
        work = first.allreduce([torch.ones(1)])
        work.get_future().add_done_callback(ended)  # not over yet: the other rank has not begun
        second.allreduce([torch.ones(1)]).wait()
        work.wait()
    # Two threads take turns, and what they had of their own is still theirs in the next call.
    assert max(calls) > 1, calls
