"""What torch's functions for objects take in on a rank that is alone: its own objects, instead of a source's.

They first take sizes, then bytes, and make objects of those. Left as they were, the places of both hold anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from resilient_train.frame_variables import variables
from resilient_train.frameworks.torch.communication.collective_results import root_of

_TORCHS = dist.distributed_c10d.__file__
_TAKING = {
    "broadcast_object_list": "object_list",
    "recv_object_list": "object_list",
    "scatter_object_list": "scatter_object_output_list",
}
"""torch's functions, and where each puts what it takes."""
_FROM_ROOT = frozenset({"broadcast", "scatter"})
_RECEIVES = frozenset({"recv", "recv_anysource"})


def take_own(verb: str, me: int, args: Sequence[Any]) -> None:
    """Fills what the call takes, if it is part of one for objects of which this rank is not the source."""
    if verb not in _RECEIVES and (verb not in _FROM_ROOT or root_of(args) == me):
        return
    frame = _calling(_TAKING.__contains__)
    if frame is None:
        return
    place: torch.Tensor = args[0][0]
    given = variables(frame)
    objects = given[_TAKING[frame.f_code.co_name]]
    if frame.f_code.co_name == "scatter_object_list":
        objects = objects[:1]
    pickled: Any = dist.distributed_c10d._object_to_tensor
    form = {"weights_only": True} if given.get("weights_only") else {}  # torch 2.15: another one than pickle's
    made = [pickled(each, place.device, None, **form) for each in objects]
    place.copy_(torch.cat([size if place.dtype is torch.long else data for data, size in made]))


def of_objects() -> bool:
    """Whether the collective that is being called is part of one of torch's for objects."""
    return _calling(lambda name: name.endswith(("_object", "_object_list"))) is not None


def _calling(is_it: Callable[[str], bool]) -> FrameType | None:
    """The innermost of torch's functions of such a name that has called this."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _TORCHS and is_it(frame.f_code.co_name):
            return frame
        frame = frame.f_back
    return None
