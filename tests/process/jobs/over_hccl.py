"""``over_hccl.py SCRIPT FAULTS ...``: one of the scripts here, over the HCCL of the fake torch_npu (``on_npu``).

FAULTS: ``uce:RANK:STEP,hcce:RANK:STEP``. The first process of the rank is failed by its device, in that step's first
collective: memory of a parameter has lost its content, or the collective has failed after its retries.
"""

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch_npu

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.frameworks.torch.tensors.leaves import local
from resilient_train.frameworks.torch_npu import device

script, faults = sys.argv[1:3]
link = read_link()
assert link is not None
plan = {}
for fault in filter(None, faults.split(",")):
    kind, rank, step = fault.split(":")
    if (int(rank), 0) == (link.rank, link.incarnation):
        plan[int(step)] = kind
if not torch_npu.MEMORY:
    device.NPU = "cpu"  # the tensors here lie there
steps = rt.Session.steps
init = dist.init_process_group


def disturbed(self: rt.Session, *args: Any, **kwargs: Any) -> Iterator[rt.Step]:
    torch_npu.epoch = lambda: self._driver._rank.generation
    for step in steps(self, *args, **kwargs):
        kind = plan.pop(step.number, "")
        if kind == "uce":
            held = [tensor for path, tensor in self._engine.state.tensors().items() if path[0] == "model"]
            torch_npu.fail_next(torch_npu.UCE, local(held[len(held) // 2]).detach())
        elif kind:
            torch_npu.fail_next(torch_npu.RETRY_FAILED)
        yield step


rt.Session.steps = disturbed
dist.init_process_group = lambda _: init("hccl")
sys.argv[:] = [str(Path(__file__).with_name(script)), *sys.argv[3:]]
runpy.run_path(sys.argv[0], run_name="__main__")
assert not plan, f"faults that did not come: {plan}"
assert not torch_npu.device.unsafe, "memory is still marked"
