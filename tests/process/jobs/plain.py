"""The same loop without a Session, with one, and without a process group; prints what each left in the process.

``both``: without a Session and then with one, in the same processes.
"""

import json
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist
import xxhash
from torch import nn

import resilient_train as rt

mode = sys.argv[1]
if mode != "alone":
    dist.init_process_group("gloo")


def train(*, session: bool) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    data = [torch.randn(2, 4) for _ in range(6)]

    def body(batch: torch.Tensor) -> None:
        model(batch).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if session:
        with rt.Session(model=model, optimizer=optimizer, loader=data) as opened:
            for step in opened.steps(6):
                with step:
                    body(step.batch)
    else:
        for batch in data:
            body(batch)
    digest = xxhash.xxh3_64_hexdigest(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    handlers = [str(signal.getsignal(number)) for number in (signal.SIGURG, signal.SIGINT, signal.SIGTERM)]
    names = sorted(thread.name for thread in threading.enumerate())
    return {"digest": digest, "threads": names, "handlers": handlers}


told = {"bare": train(session=False)} if mode == "both" else {}
told["session"] = train(session=True)
if mode == "alone" or dist.get_rank() == 0:
    print(json.dumps(told), flush=True)
if mode != "alone":
    os._exit(0)  # a process that frees a stock gloo group may abort as it ends (docs/facts.md)
