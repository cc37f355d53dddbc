"""A training script in the order of nanoGPT's: ``init_process_group`` by its name, above ``import resilient_train``.

``tell FILE``: only writes what it finds out about itself.
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as there

import resilient_train as rt


def found(_: int = 0) -> dict:
    """What a script may look at to find its files and its modules."""
    main = sys.modules["__main__"]
    return {
        "argv": sys.argv,
        "file": __file__,
        "main": getattr(main, "__file__", None),
        "path": sys.path[0],
        "package": main.__package__,
        "spec": main.__spec__ and main.__spec__.name,
        "cwd": str(Path.cwd()),
    }


def train() -> None:
    rank = int(os.environ.get("RANK", "-1"))
    assert rank != -1, "nanoGPT's own test for DDP"
    init_process_group(backend="gloo")
    torch.manual_seed(1337 + rank)
    model = DDP(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(8):
            with step:
                model(torch.randn(2, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["tell"]:
        if os.environ.get("RANK", "0") == "0":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                told = {"self": found(), "child": pool.apply(found)}
            Path(sys.argv[2]).write_text(json.dumps(told))
    else:
        train()
