"""What of torch's has called a collective."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch

_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep  # noqa: PTH120 - compared with code objects' names, which are strings
    for path in (torch.__file__, os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep)  # noqa: PTH120
)


def carries_objects() -> bool:
    """Whether the collective is part of one that pickles objects (``all_gather_object`` and the like)."""
    names = (frame.f_code.co_name for frame in _frames() if _in_library(frame))
    return any(name.endswith(("_object", "_object_list")) for name in names)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _in_library(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))
