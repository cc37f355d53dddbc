"""Where FSDP2 adds gradients up: behind autograd, which never comes to the parameter itself.

A group of parameters hands its gradients to ``foreach_reduce``, which reduces them and adds them to what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_CALLER = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def before_sums(call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """``call(parameter)`` is called before something is added to its gradient. Returns what ends that; whoever has
    replaced the function since keeps what he has made of it.
    """
    caller = sys.modules.get(_CALLER)  # without it nothing is divided that way
    if caller is None:
        return _nothing
    reduce = caller.foreach_reduce

    def called(fsdp_params: Any, *more: Any, **named: Any) -> Any:
        for each in fsdp_params:
            call(each.sharded_param)
        return reduce(fsdp_params, *more, **named)

    def end() -> None:
        if caller.foreach_reduce is called:
            caller.foreach_reduce = reduce

    caller.foreach_reduce = called
    return end


def _nothing() -> None:
    """FSDP2 is not there."""
