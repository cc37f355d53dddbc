"""Where the user's own code is, for people who are to change it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

PACKAGE = f"{Path(__file__).parent}{os.sep}"
"""What the names of this package's files begin with."""
_STDLIB = os.path.dirname(os.__file__)  # noqa: PTH120 - to be compared with names in code objects, which are text
_INSTALLED = ("site-packages", "dist-packages")
_IN = " (in "
_PLUMBING = tuple(f"{_STDLIB}/{name}.py" for name in ("os", "_collections_abc"))


def place() -> str:
    """``FILE:LINE`` of the user's own code that is running now, and where in a library it is, if it is in one."""
    library = ""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to ask
    while frame is not None:
        name, where = frame.f_code.co_filename, f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if not name.startswith((PACKAGE, "<", *_PLUMBING)):
            if not _is_library(name):
                return f"{where}{_IN}{library})" if library else where
            library = library or where
        frame = frame.f_back
    return library or "an unknown place"


def frames() -> Iterator[FrameType]:
    """Those of the user's own code that are running now, the innermost first."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def is_users(name: str) -> bool:
    """Whether the file of that name is neither this package's nor a library's."""
    return not (_is_library(name) or name.startswith((PACKAGE, "<frozen")))


def _is_library(name: str) -> bool:
    return _INSTALLED[0] in name or name.startswith(_STDLIB) or _INSTALLED[1] in name  # asked of thousands of modules


def line() -> str:
    """``FILE:LINE`` of the user's own code that is running now."""
    return place().partition(_IN)[0]


def is_ours(library: str) -> bool:
    """Whether this package, and not the user's code, has called the function that asks, by way of the ``library`` in
    that directory: of what both call, torch for instance.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to ask
    asking = frame.f_code.co_filename if frame is not None else ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name != asking and not name.startswith((library, "<")):
            in_stdlib = name.startswith(_STDLIB) and not any(part in name for part in _INSTALLED)
            if not in_stdlib:
                return name.startswith(PACKAGE)
        frame = frame.f_back
    return False
