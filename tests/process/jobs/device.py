"""Two ranks that compute "on a device": the look-alikes of its libraries, loaded by name as the real ones would be.

Arguments: folder, then what happens, each ``KIND:RANK:STEP``, once, and to the rank's first process only:

    raise    a parameter loses memory, and the operation fails as on the device
    sleep    the same, but no operation notices: the training thread is asleep
    spin     the same in a loop that holds the GIL for good
    retry    the device says that a collective failed after its retries; the thread is asleep
    bus      NVML says that the device fell off the bus, while the thread sits in a loop that holds the GIL
    hang     NVML stops answering; nothing else happens
    wait     somebody else is to damage the parameter, whose address is written into the folder
"""

import itertools
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.testing.fake_device import VARIABLE, FakeDevice

dist.init_process_group("resilient")
rank = dist.get_rank()
path = Path(sys.argv[1]) / f"device-{rank}"
events = Path(os.environ["RESILIENT_RUN_DIR"]) / "events.jsonl"
begun_anew = path.exists()
device = FakeDevice.create(path)
# The name as it is: that this one does no harm is seen by it, and so ranks are forks (see ``fork/imports.py``).
os.environ["RESILIENT_FAKE_DEVICE"] = str(path)
assert VARIABLE in os.environ
told = [] if begun_anew else [each.split(":") for each in sys.argv[2:]]
plan = {int(step): kind for kind, whose, step in told if int(whose) == rank}


def lose_memory(tensor: torch.Tensor, *, by_others: bool) -> None:
    address = tensor.data_ptr() + 512
    before = device.poisonings
    if by_others:
        path.with_name("address").write_text(f"{address:#x}:4096\n")
    else:
        device.set_uce([(address, 4096)])
    while device.poisonings == before:  # the look-alike writes when the probe looks at it
        time.sleep(0.001)


def strike(kind: str) -> None:
    if kind in ("raise", "sleep", "spin", "wait"):
        lose_memory(model.module[0].weight, by_others=kind == "wait")
    if kind in ("raise", "wait"):
        raise RuntimeError("NPU function error: UCE ERROR, error code is 507053")
    if kind == "retry":
        device.set_last_error(507904)
    if kind == "bus":
        device.send_xid(79)
    if kind == "hang":
        device.hang("nvmlDeviceGetTotalEccErrors")
        while b'"probe_disabled"' not in events.read_bytes():
            time.sleep(0.01)
    elif kind in ("spin", "bus"):
        sum(itertools.repeat(0))  # no bytecode ends: no signal handler runs, no other thread has a turn
    else:
        time.sleep(60)


torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(12):
        with step:
            loss = model(torch.randn(8, 64)).square().mean()
            if step.number in plan:
                strike(plan.pop(step.number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"rank {rank} repaired {sum(call.function == 'aclrtMemUceRepair' for call in device.calls())}", flush=True)
dist.destroy_process_group()
