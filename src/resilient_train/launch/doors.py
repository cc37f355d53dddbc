"""What a standby must not do while it runs the user's script for no rank: overwrite or remove what the job has written,
and start programs, which may look for a rank's variables.

Doors are functions that are replaced for that time. Found before anything has happened; and found only where Python
code is what does it.
"""

from __future__ import annotations

import _posixsubprocess
import builtins
import functools
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parent.parent)
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120 - to be compared with names in code objects, which are text
_INSTALLED = ("site-packages", "dist-packages")
_PLUMBING = tuple(f"{_STDLIB}/{name}.py" for name in ("os", "_collections_abc"))
_INNOCENT = frozenset({"platform", "ctypes.util", "uuid", "multiprocessing.resource_tracker"})
"""Modules whose programs (``uname``, ``ldconfig``) ask for no rank."""
_PROGRAMS = (
    (subprocess, "_fork_exec"),
    (_posixsubprocess, "fork_exec"),
    *((os, name) for name in ("system", "posix_spawn", "posix_spawnp", "execv", "execve")),
)
_OPENS = "overwrites"
_OPENERS = ((builtins, "open"), (io, "open"))
_REMOVERS = tuple((os, name) for name in ("remove", "unlink", "truncate", "rmdir"))
_RENAMERS = tuple((os, name) for name in ("rename", "replace"))


class Doors:
    """``refuse(what)`` is called with what the script is about to do; it does not return."""

    def __init__(self, refuse: Callable[[str], Any]) -> None:
        self._refuse = refuse
        self._real: list[tuple[Any, str, Any]] = []
        self._own: set[str] = set()
        """Files that this process has made: it may do with them what it likes."""
        self._closed = False

    def close(self) -> None:
        """From now on they are watched."""
        self._closed = True
        for module, name in _PROGRAMS:
            self._replace(module, name, self._on_program)
        for module, name in _OPENERS:
            self._replace(module, name, self._on_open)
        self._replace(os, "open", self._on_os_open)
        self._replace(os, "mkdir", self._on_mkdir)
        if "torch" in sys.modules:  # imported by now: not from here, where it would be no import of the script's
            self._replace(sys.modules["torch"], "save", self._on_torch_save)  # opens its file in C++
        for module, name in _REMOVERS:
            self._replace(module, name, self._on_remove)
        for module, name in _RENAMERS:
            self._replace(module, name, self._on_rename)

    def open(self) -> None:
        """All is as it was; who has kept a replaced function has one that looks at nothing any more."""
        self._closed = False
        for module, name, real in self._real:
            setattr(module, name, real)
        self._real.clear()

    def _replace(self, module: Any, name: str, look: Callable[..., None]) -> None:
        real = getattr(module, name)

        @functools.wraps(real)
        def door(*args: Any, **kwargs: Any) -> Any:
            if self._closed:
                look(*args, **kwargs)
            return real(*args, **kwargs)

        self._real.append((module, name, real))
        setattr(module, name, door)

    def _on_program(self, *args: Any, **_: Any) -> None:
        if not _called_by(_INNOCENT):
            program = args[0] if args else ""
            if isinstance(program, list | tuple):
                program = program[0] if program else ""
            self._refuse(f"starts a program ({os.fsdecode(program)})")

    def _on_open(self, file: Any, mode: str = "r", *_: Any, **__: Any) -> None:
        if isinstance(file, int):
            return
        if "w" in mode:
            self._look(file, _OPENS)
        elif "a" in mode or "x" in mode:
            self._claim(file)

    def _on_os_open(self, path: Any, flags: int, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        if flags & os.O_TRUNC:
            self._look(path, _OPENS, dir_fd)
        elif flags & os.O_CREAT:
            self._claim(path, dir_fd)

    def _on_mkdir(self, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        self._claim(path, dir_fd)

    def _on_torch_save(self, _: Any, file: Any, *__: Any, **___: Any) -> None:
        if isinstance(file, str | os.PathLike):
            self._look(file, _OPENS)

    def _on_remove(self, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> None:
        self._look(path, "removes", dir_fd)

    def _on_rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self._look(source, "renames", src_dir_fd)
        self._look(target, "replaces", dst_dir_fd)

    def _look(self, path: Any, verb: str, dir_fd: int | None = None) -> None:
        name = _absolute(path, dir_fd)
        # A device is none of the job's results, and a lock file is there to be taken.
        there = os.path.isfile(name) or (verb != _OPENS and os.path.isdir(name))  # noqa: PTH112, PTH113 - of names
        if there and name not in self._own and not name.endswith(".lock"):
            self._refuse(f"{verb} {name}")
        self._own.add(name)

    def _claim(self, path: Any, dir_fd: int | None = None) -> None:
        name = _absolute(path, dir_fd)
        if not os.path.lexists(name):
            self._own.add(name)


def _absolute(path: Any, dir_fd: int | None) -> str:
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115 - a name is wanted
    base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else os.getcwd()  # noqa: PTH109, PTH115
    return os.path.join(base, os.fsdecode(path))  # noqa: PTH118 - as the system will take it


def _called_by(modules: frozenset[str]) -> bool:
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to ask
    while frame is not None:
        if frame.f_globals.get("__name__") in modules:
            return True
        frame = frame.f_back
    return False


def place() -> str:
    """``FILE:LINE`` of the user's own code that is running now, and where in a library it is, if it is in one."""
    library = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - likewise
    while frame is not None:
        name, where = frame.f_code.co_filename, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not name.startswith((_PACKAGE, "<", *_PLUMBING)):
            if not (name.startswith(_STDLIB) or any(part in name for part in _INSTALLED)):
                return f"{where} (in {library})" if library else where
            library = library or where
        frame = frame.f_back
    return library or "an unknown place"
