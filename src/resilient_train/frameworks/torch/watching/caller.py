"""What of torch's has called a collective."""

from __future__ import annotations

import sys
from types import FrameType

import torch.distributed as dist

_TORCHS = dist.distributed_c10d.__file__


def carries_objects() -> bool:
    """Whether the collective is part of one that pickles objects (``all_gather_object`` and the like)."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == _TORCHS and code.co_name.endswith(("_object", "_object_list")):
            return True
        frame = frame.f_back
    return False
