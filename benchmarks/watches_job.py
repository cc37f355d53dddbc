"""The job of ``watches.py``: blocks of steps whose bodies have the loss looked at, or the norm, or nothing; in turn.

Stop watches stand around what looks, from before the Session is opened. They cost something themselves, which is told.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from timers import LOOKS, Ledger, watch_cost_us, watching
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad, clip_grad_norm_
from workload import make

import resilient_train as rt

Body = Callable[[torch.Tensor], object]
"""What stands between the backward pass and the optimizer; given the loss."""


def bodies(session: rt.Session, parameters: list[nn.Parameter]) -> dict[str, Body]:
    return {
        "nothing": lambda _: None,
        "loss": session.check,
        "clips": lambda _: clip_grad_norm_(parameters, 1.0),
        "norm": lambda _: session.check(norm=True),
    }


def measure(asked: argparse.Namespace, ledger: Ledger) -> dict[str, object]:
    # The Session puts itself around this, and a stop watch comes around both: what is left is the Session's own.
    clip_grad._clip_grads_with_norm_ = ledger.timed("clipping", clip_grad._clip_grads_with_norm_)
    work = make(asked.model)
    model = DistributedDataParallel(work.model)
    # So slow that norms and losses stay as they are: a spike would make a step run again, and there is none to spare.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8)
    blocks: list[dict[str, object]] = []
    with rt.Session(model=model, optimizer=optimizer) as session:
        if not session.recovering:
            raise SystemExit("the Session has no agent: start this under resilient-run")
        clip_grad._clip_grads_with_norm_ = ledger.timed("watch", clip_grad._clip_grads_with_norm_)
        lanes = bodies(session, [*model.parameters()])
        order = [lane for each in range(asked.rounds) for lane in (lanes, reversed(lanes))[each % 2]]
        steps = iter(session.steps(asked.warm_up + len(order) * asked.steps))

        def run(lane: str, count: int) -> None:
            for _ in range(count):
                with next(steps):
                    loss = nn.functional.cross_entropy(model(work.inputs), work.targets)
                    loss.backward()
                    lanes[lane](loss)
                    optimizer.step()
                    optimizer.zero_grad()

        run("nothing", asked.warm_up)
        for lane in order:
            own, cpu, begun = dict(ledger.own_ns), dict(ledger.cpu_ns), time.perf_counter_ns()
            run(lane, asked.steps)
            block = {"lane": lane, "wall_ns": time.perf_counter_ns() - begun}
            for name, before, now in (("own_ns", own, ledger.own_ns), ("cpu_ns", cpu, ledger.cpu_ns)):
                block[name] = {label: ns - before.get(label, 0) for label, ns in now.items()}
            blocks.append(block)
        for _ in steps:  # nothing is left: this is where all ranks agree that the loop is over
            raise SystemExit("the blocks don't add up to the session's steps: one of them was run again")
    return {"parameters": work.size(), "blocks": blocks, "watch_us": watch_cost_us()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of a block")
    parser.add_argument("--warm-up", type=int, required=True, help="steps")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=int, required=True)
    asked = parser.parse_args()
    signal.alarm(asked.limit_s)  # SIGALRM ends us even if whoever should do it is gone
    dist.init_process_group("resilient")
    with watching(LOOKS) as ledger:
        result = measure(asked, ledger)
    (asked.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
