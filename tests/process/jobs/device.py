"""Two ranks that compute "on a device": the look-alike of libascendcl, loaded by its name as the real one would be.

With ``--damage`` the device of rank 1 loses memory of a parameter in step 5, and the operation fails as on the device.
With ``--wait`` somebody else is to damage it: the address is written into the folder.
"""

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
device = FakeDevice.create(path)
os.environ[VARIABLE] = str(path)
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4)))
optimizer = torch.optim.AdamW(model.parameters())
damaged = False
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(12):
        with step:
            loss = model(torch.randn(8, 64)).square().mean()
            if len(sys.argv) > 2 and rank == 1 and step.number == 5 and not damaged:
                damaged = True
                address = model.module[0].weight.data_ptr() + 512
                if "--damage" in sys.argv:
                    device.set_uce([(address, 4096)])
                else:
                    path.with_name("address").write_text(f"{address:#x}:4096\n")
                while not device.poisonings:  # the look-alike writes when the probe looks at it
                    time.sleep(0.001)
                raise RuntimeError("NPU function error: UCE ERROR, error code is 507053")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
print(f"rank {rank} repaired {sum(call.function == 'aclrtMemUceRepair' for call in device.calls())}", flush=True)
dist.destroy_process_group()
