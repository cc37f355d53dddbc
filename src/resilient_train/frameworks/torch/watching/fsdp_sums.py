"""Where FSDP2 adds gradients up: behind autograd, which never comes to the parameter itself.

A group of parameters hands its gradients to ``foreach_reduce``, which reduces them and adds them to what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from resilient_train.frameworks.torch.watching.replaced import replace

_CALLER = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def before_sums(call: Callable[[torch.Tensor], None]) -> Callable[[], None]:
    """``call(parameter)`` is called before something is added to its gradient. Returns what ends that."""
    caller: Any = sys.modules[_CALLER]
    add = caller.foreach_reduce

    def called(fsdp_params: Any, *more: Any, **named: Any) -> Any:
        for each in fsdp_params:
            call(each.sharded_param)
        return add(fsdp_params, *more, **named)

    return replace(caller, "foreach_reduce", called)


def is_used() -> bool:
    """Whether anything is divided that way."""
    return _CALLER in sys.modules
