"""Takes what MindSpore's C++ code calls in ``libttp_c_api.so`` to this process's rank.

The libraries (csrc/mindio/ttp.hpp) keep two pointers to functions, which are set here. A callback of ctypes takes the
GIL by itself, in any thread. Where no rank is connected the C functions return 2 without a word to Python: before there
is one, when it is closed, and from the moment on in which the interpreter begins to end.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from collections.abc import Callable
from pathlib import Path

from resilient_train import _native

log = logging.getLogger("resilient_train.mindio")

_DONE, _NOT_DONE = 0, 1
_Mark = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_connected: tuple[object, ...] = ()
"""What the library has pointers to: it must live."""
_pid = 0
"""Of the process that has connected: a child of it has no thread that could call."""


def directory() -> Path:
    """The folder that is ``mindio_ttp.__path__[0]``: beside the compiled module, wherever the Python files are."""
    return Path(str(_native.__file__)).parent / "integrations/mindio/libraries"


def connect(updating: Callable[[], bool], finished: Callable[[int], object]) -> None:
    """From here on C code's marks come to these functions, in its own threads, until ``disconnect``.

    ``updating`` returns whether the update may begin. What they raise is logged, and C code gets 1.
    """
    global _connected, _pid

    def begin(_: int) -> int:
        try:
            return _DONE if updating() else _NOT_DONE
        except Exception:
            log.exception("C code says that an update begins, and it can't be told")
            return _NOT_DONE

    def end(step: int) -> int:
        try:
            finished(step)
        except Exception:
            log.exception("C code says that update %d is over, and it can't be told", step)
            return _NOT_DONE
        return _DONE

    marks = _Mark(begin), _Mark(end)
    _library().resilient_ttp_connect(*marks)
    _connected, _pid = marks, os.getpid()
    # Behind it no thread can be given the GIL any more: Python ends the thread that asks.
    atexit.unregister(disconnect)
    atexit.register(disconnect)


def disconnect() -> None:
    """Waits for the calls that are under way; later ones return 2."""
    if _pid == os.getpid():
        _library().resilient_ttp_connect(_Mark(), _Mark())


def _library() -> ctypes.CDLL:
    # CDLL and not PyDLL: without the GIL, which a call under way needs. The same file is the same library to C code.
    library = ctypes.CDLL(str(directory() / "framework_ttp/libttp_framework.so"))
    library.resilient_ttp_connect.argtypes = [_Mark, _Mark]
    library.resilient_ttp_connect.restype = None
    return library
