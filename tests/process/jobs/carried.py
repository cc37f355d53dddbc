"""nanoGPT's own loop: random crops of a memory-mapped file, and the next batch fetched while the model is at this one.

``--where``: the next batch is fetched at the ``end`` of the body, behind the update, or ``ahead``, between the forward
and the backward pass of each of two micro-steps (as nanoGPT does it); ``hidden``: no batch is fetched ahead, but the
hidden state of a recurrent model goes on; ``both``: it goes on behind the micro-steps. ``--plain``: all that in local
variables, as in the script that somebody has.
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link

BLOCK, BATCH, WORDS, WIDTH = 8, 6, 32, 16


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, inputs, targets, hidden=None):
        found, hidden = self.recurrent(self.embedding(inputs), hidden)
        logits = self.head(self.dropout(found))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), hidden


def text() -> Path:
    """The tokens, the same whoever writes them first."""
    path = Path(tempfile.gettempdir()) / "resilient_train_carried.bin"
    if not path.exists():
        tokens = np.random.default_rng(0).integers(0, WORDS, 4096).astype(np.uint16)
        made = Path(tempfile.mkdtemp()) / path.name
        tokens.tofile(made)
        made.rename(path)
    return path


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    # A new memmap for every batch, as nanoGPT has it (it avoids a leak).
    data = np.memmap(text(), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - BLOCK, (BATCH,))
    x = torch.stack([torch.from_numpy(data[i : i + BLOCK].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + BLOCK].astype(np.int64)) for i in starts])
    return x, y


parser = argparse.ArgumentParser()
parser.add_argument("--where", choices=["end", "ahead", "hidden", "both"], default="end")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--plain", action="store_true")
parser.add_argument(
    "--cut-at", type=int, default=-1, help="the step in which the first rank dies when the last one has taken its value"
)
asked = parser.parse_args()
AHEAD, HIDDEN = asked.where in ("ahead", "both"), asked.where in ("hidden", "both")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(Language())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(1000 + dist.get_rank())


def wait_for_the_cut() -> None:
    """The first rank, in its first process, dies when the last one waits here. Its death cuts the last one's body."""
    link = read_link()
    assert link is not None
    waits = Path(link.run_dir, "waits")
    if link.rank == 0 and not link.incarnation:
        while not waits.exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)
    if link.rank == dist.get_world_size() - 1:
        waits.touch()
        while True:
            time.sleep(0.001)


def plain(session: rt.Session) -> None:
    if asked.where != "hidden":
        X, Y = get_batch()  # fetch the very first batch
    hidden = torch.zeros(1, BATCH, WIDTH)
    for step in session.steps(asked.steps):
        with step:
            for micro_step in range(2 if AHEAD else asked.where == "end"):
                with contextlib.nullcontext() if micro_step or asked.where == "end" else model.no_sync():
                    loss, _ = model(X, Y)
                    if AHEAD:
                        X, Y = get_batch()  # fetch the next batch while the model is at this one
                    loss.backward()
            if HIDDEN:
                loss, hidden = model(*get_batch(), hidden)
                if step.number == asked.cut_at and not step.attempt:
                    wait_for_the_cut()
                hidden = hidden.detach()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if asked.where == "end":
                X, Y = get_batch()


batch = rt.Carried(make=get_batch)
state = rt.Carried(torch.zeros(1, BATCH, WIDTH))


def carried(session: rt.Session) -> None:
    for step in session.steps(asked.steps):
        with step:
            for micro_step in range(2 if AHEAD else asked.where == "end"):
                with contextlib.nullcontext() if micro_step or asked.where == "end" else model.no_sync():
                    loss, _ = model(*batch.take())
                    if AHEAD:
                        batch.fetch()
                    loss.backward()
            if HIDDEN:
                before = state.take()
                if step.number == asked.cut_at and not step.attempt:
                    wait_for_the_cut()
                loss, hidden = model(*get_batch(), before)
                state.put(hidden.detach())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if asked.where == "end":
                batch.fetch()


own = {} if asked.plain else {"batch": batch, "state": state}
with rt.Session(model=model, optimizer=optimizer, rank_state=own) as session:
    (plain if asked.plain else carried)(session)
dist.destroy_process_group()
