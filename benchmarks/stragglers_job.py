"""A job that writes what the straggler watch would read: MODEL FOLDER STEPS SLEPT_S. Each rank: FOLDER/rank_R.json.

Each body sleeps for so long: as the host's threads of a job do whose device computes.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import make

import resilient_train as rt
from resilient_train._native import Board
from resilient_train.session import peers

_READ_EACH = 100
"""Steps. The board holds 128."""
model_name, folder, steps, slept_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
boards: list[Board] = []
_make = peers.Peers.__init__


def _remember(self: peers.Peers, board: Board, *arguments: object) -> None:
    boards.append(board)
    _make(self, board, *arguments)  # type: ignore[arg-type]


peers.Peers.__init__ = _remember  # type: ignore[method-assign]
dist.init_process_group("resilient")
rank = dist.get_rank()
work = make(model_name)
model = DistributedDataParallel(work.model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
windows: list[tuple[int, int, int]] = []
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(steps):
        with step:
            time.sleep(slept_s)
            torch.nn.functional.cross_entropy(model(work.inputs), work.targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.number % _READ_EACH == 0:
            windows += boards[0].computed(rank, windows[-1][0] if windows else 0)
(folder / f"rank_{rank}.json").write_text(json.dumps(windows))
dist.destroy_process_group()
