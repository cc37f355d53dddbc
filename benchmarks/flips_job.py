"""The job of ``flips.py``: a small model that writes down what it holds.

Dropout, BatchNorm, clipping. Flips are done where ``--plan`` says (JSON: ``flips``, step -> a clause of a fault plan;
``looks``), each once, also where all ranks are started again. Behind the steps in ``looks`` what each rank holds is
compared with what it held there in the undisturbed job (``--reference``, a folder); where it differs the loop ends, for
all that comes behind would differ as well.
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

NEVER = 1_000_000
SAVES = {"memory": {"steps": NEVER, "memory_steps": 1}, "storage": {"steps": 64}}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--records", type=Path, required=True)
parser.add_argument("--record-all", action="store_true", help="what is held behind each step, to be a reference")
parser.add_argument("--plan", type=Path)
parser.add_argument("--reference", type=Path)
parser.add_argument("--save", choices=SAVES)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
asked = parser.parse_args()

dist.init_process_group("gloo")
rank, link = dist.get_rank(), read_link()
torch.manual_seed(0)
layers: list[nn.Module] = []
for width in (16, 32):
    layers += [nn.Linear(width, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(32, 4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
torch.manual_seed(1 + rank)
plan = json.loads(asked.plan.read_text()) if asked.plan else {"flips": {}, "looks": []}
flips, looks = plan["flips"], frozenset(plan["looks"])
recorded = looks | {int(step) for step in flips}
expected = json.loads((asked.reference / f"held{rank}.json").read_text()) if asked.reference else {}
record = (asked.records / f"rank{rank}.jsonl").open("a")


def digest(tensors: list[torch.Tensor]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(each.detach().numpy().tobytes() for each in tensors))


def held() -> list[str]:
    """What replicas have in common: parameters and moments. And what this rank has alone: buffers, random numbers."""
    moments = [value for each in optimizer.state.values() for value in each.values()]
    return [digest([*model.parameters(), *moments]), digest([*model.buffers(), torch.get_rng_state()])]


def write_down(step: int) -> bool:
    """Whether any rank holds something else than it should; asked behind the steps in ``looks``."""
    now = held()
    record.write(json.dumps([step, *now]) + "\n")
    record.flush()
    if step not in looks:
        return False
    differ = torch.tensor(float(now != expected[str(step)]))
    dist.all_reduce(differ)
    return bool(differ)


def flip(session: rt.Session, step: int) -> None:
    """Does the flip of this step, if it is this rank's and nobody has done it."""
    (clause,) = parse_plan(flips[str(step)])
    done = asked.records / f"flip{step}"
    if clause.rank != rank or done.exists():
        return
    done.touch()
    session._driver._injector.add(clause)  # noqa: SLF001 - an order has no room for an element and its bits


with rt.Session(model=model, optimizer=optimizer) as session:
    if asked.save:
        session.save_every(**SAVES[asked.save])
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
                if asked.record_all or step.number in recorded:
                    off = write_down(step.number)
        if off and step.done:
            break
record.close()
if asked.record_all:
    rows = map(json.loads, (asked.records / f"rank{rank}.jsonl").read_text().splitlines())
    (asked.records / f"held{rank}.json").write_text(json.dumps({step: now for step, *now in rows}))
dist.destroy_process_group()
os._exit(0) if link is None else None
