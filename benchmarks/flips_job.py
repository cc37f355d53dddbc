"""The job of ``flips.py``: a small model that writes down what it holds after each update.

Dropout, BatchNorm, clipping. Flips are done where ``--flips`` (JSON: step -> a clause of a fault plan) says, each once,
also where all ranks are started again. Behind ``--look`` steps the parameters are compared with those of
``--reference``; where they differ the loop ends, for all that comes behind would differ as well.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.faults import parse_plan

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--records", type=Path, required=True)
parser.add_argument("--flips", type=Path)
parser.add_argument("--reference", type=Path)
parser.add_argument("--look", type=int, default=0)
parser.add_argument("--memory", action="store_true", help="a snapshot in memory of each step")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
asked = parser.parse_args()

dist.init_process_group("gloo")
rank, link = dist.get_rank(), read_link()
torch.manual_seed(0)
layers: list[nn.Module] = []
for width in (16, 32, 32):
    layers += [nn.Linear(width, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
flips = json.loads(asked.flips.read_text()) if asked.flips else {}
places = sorted(map(int, flips))
expected = json.loads(asked.reference.read_text()) if asked.reference else []
record = (asked.records / f"rank{rank}.jsonl").open("a")


def digest(tensors: list[torch.Tensor]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(each.detach().numpy().tobytes() for each in tensors))


def held() -> str:
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return digest([*model.parameters(), *moments])


def flip(session: rt.Session, step: int) -> None:
    """Does the flip of this step, if it is this rank's and nobody has done it."""
    (clause,) = parse_plan(flips[str(step)])
    done = asked.records / f"flip{step}"
    if clause.rank != rank or done.exists():
        return
    done.touch()
    session._driver._injector.add(clause)  # noqa: SLF001 - an order has no room for an element and its bits


with rt.Session(model=model, optimizer=optimizer) as session:
    if asked.memory:
        session.save_every(steps=1_000_000, memory_steps=1)
    for step in session.steps(asked.steps):
        if str(step.number) in flips and step.attempt == 0:
            flip(session, step.number)
        off = False
        with step:
            points = torch.randn(8, 16)
            with torch.autocast("cpu", torch.bfloat16, enabled=asked.bf16):
                loss = nn.functional.cross_entropy(model(points).float(), points[:, :4].argmax(dim=1))
            (loss / asked.accumulate).backward()
            if (step.number + 1) % asked.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                now = held()
                record.write(json.dumps([step.number, now]) + "\n")
                record.flush()
                if asked.look and any(step.number == place + asked.look for place in places):
                    differ = torch.tensor(float(now != expected[step.number]))
                    dist.all_reduce(differ)
                    off = bool(differ)
        if off and step.done:
            break
record.close()
if rank == 0 and not asked.flips:
    rows = dict(map(json.loads, (asked.records / "rank0.jsonl").read_text().splitlines()))
    (asked.records / "reference.json").write_text(json.dumps([rows.get(each, "") for each in range(asked.steps)]))
dist.destroy_process_group()
os._exit(0) if link is None else None
