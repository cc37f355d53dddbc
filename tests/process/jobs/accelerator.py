"""A machine that has an accelerator, as torch sees it, and a collective library for it (gloo under another name).

Rank 0 prints what its default group uses, whether the Session protects the loop, and a digest of the parameters.
"""

import argparse
import json
import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

parser = argparse.ArgumentParser()
parser.add_argument("device")
parser.add_argument("backend", nargs="?")
parser.add_argument("--kill", action="store_true", help="rank 1 dies in its loop")
parser.add_argument("--once", action="store_true", help="only the first time")
parser.add_argument("--plain", action="store_true", help="rank 0 switches its watchdog off by itself")
asked = parser.parse_args()
device = torch.device(asked.device)
torch._C._get_accelerator = lambda: device
torch.accelerator.current_accelerator = lambda check_available=False: None if device.type == "cpu" else device
torch.accelerator.current_stream = lambda: SimpleNamespace(is_capturing=lambda: False)  # optimizers of torch 2.15 ask


def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("lookalike", create, devices=["privateuseone"])
dist.init_process_group(asked.backend)
uses = dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD]
torch.manual_seed(0)
model: nn.Module = nn.Linear(4, 4)
if "cpu" in uses:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(dist.get_rank())
if asked.plain and dist.get_rank() == 0:
    os.environ["RESILIENT_WATCHDOG"] = "0"
with rt.Session(model=model, optimizer=optimizer) as session:
    protected = session.recovering
    for step in session.steps(6):
        with step:
            model(torch.randn(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        again = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if asked.kill and dist.get_rank() == 1 and step.number == 3 and not (asked.once and again):
            os.kill(os.getpid(), signal.SIGKILL)
if dist.get_rank() == 0:
    digest = xxhash.xxh3_64_hexdigest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(json.dumps({"uses": uses, "protected": protected, "digest": digest}))
