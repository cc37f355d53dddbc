"""An exception in one line, as people are told of it: ``ValueError: text (train.py:31)``."""

from __future__ import annotations

import re
import sysconfig
import textwrap
import traceback
from pathlib import Path

_LENGTH_MAX = 400
_SHORT = 200
_IN_SOURCES = re.compile(r"\[/[^]\s]+\.(?:cc|cpp|cu|h|hpp):\d+\] ?")
"""Where torch was built: a long way to a file that nobody has."""
_LIBRARIES = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), str(Path(__file__).parent), "<")


def is_library(file: str) -> bool:
    """Whether the code of that file is Python's, a package's or ours: the user looks for a line of their own."""
    return file.startswith(_LIBRARIES)


def short(text: str) -> str:
    """What a library says of a fault, as it goes into a sentence."""
    return textwrap.shorten(_IN_SOURCES.sub("", text), _SHORT, placeholder=" ...")


def line_of(said: str, place: str) -> str:
    """``said`` is the last line of a traceback, ``place`` the file and line that led to it."""
    return f"{textwrap.shorten(said, _LENGTH_MAX, placeholder=' ...')} ({place})"


def describe(error: BaseException) -> str:
    """The exception, and the innermost line of the user's that it has passed."""
    lines = "".join(traceback.format_exception_only(error)).splitlines()
    said = next((line for line in lines if line and not line.startswith(" ")), type(error).__name__)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or frames
    return line_of(said, f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else "?")
