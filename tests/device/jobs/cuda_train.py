"""A small training on a GPU that all ranks share, each with its digest of its model at the end.

``cuda_train.py BACKEND LAYOUT STEPS OUT [lost] [saving]``: BACKEND is ``nccl``, ``cpu:gloo,cuda:nccl``, or ``default``
(no word); LAYOUT ``ddp``, ``hsdp`` (two copies) or ``fsdp``. NCCL refuses two ranks of one host on one GPU: each
says that it is another host. ``lost``: in its fourth step the first process of rank 1 hears that memory was lost.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["NCCL_HOSTID"], os.environ["NCCL_SOCKET_IFNAME"] = f"host{rank}", "lo"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import resilient_train as rt  # noqa: E402
from resilient_train.config import read_link  # noqa: E402

backend, layout, steps, out, flags = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5:]
link = read_link()
loses = "lost" in flags and rank == 1 and link is not None and not link.incarnation
torch.backends.cudnn.deterministic = True
torch.cuda.set_device(0)
dist.init_process_group(*([backend] if backend != "default" else []))
torch.manual_seed(7)
blocks = [nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256)) for _ in range(4)]
model: nn.Module = nn.Sequential(nn.BatchNorm1d(256) if layout == "ddp" else nn.LayerNorm(256), *blocks).cuda()
if layout == "ddp":
    model = DistributedDataParallel(model, device_ids=[0])
else:
    shape, names = ((2, world // 2), ("replicate", "shard")) if layout == "hsdp" else ((world,), ("shard",))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
logged = []
with rt.Session(model=model, optimizer=optimizer, scheduler=scheduler) as session:
    if "saving" in flags:
        session.save_every(steps=1000, memory_steps=1)
    for step in session.steps(steps):
        with step:
            batch = torch.randn(32, 256, generator=torch.Generator().manual_seed(step.number * world + rank)).cuda()
            loss = (model(batch) - batch.flip(1)).square().mean()
            loss.backward()
            if loses and step.number == 3:
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            told = loss.detach()
            dist.all_reduce(told, op=dist.ReduceOp.AVG)
            logged.append(told.item())
found = hashlib.sha256()
for name, tensor in model.state_dict().items():
    held = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    found.update(name.encode() + held.detach().cpu().contiguous().numpy().tobytes())
for entry in optimizer.state.values():
    for name in sorted(entry):
        held = entry[name].to_local() if hasattr(entry[name], "to_local") else entry[name]
        found.update(name.encode() + held.detach().cpu().contiguous().numpy().tobytes())
out.mkdir(parents=True, exist_ok=True)
(out / f"rank{rank}.json").write_text(json.dumps({"state": found.hexdigest(), "loss": logged[-1].hex()}))
dist.barrier()
dist.destroy_process_group()
