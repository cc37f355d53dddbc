"""A loop that is left early: ``exits.py HOW WHERE RANKS``, RANKS being those that leave it so, in step 4 of 8.

HOW: "exit" (``sys.exit(0)``; "exit late": rank 1 after a while; "dies": rank 1 is killed there) or "break" ("break
dies"; "apart": rank 1 breaks in the next body). WHERE: "body" (its beginning), "barrier" (all of it but the update),
"tail", or "between" two bodies; "last" is the tail of the last step; "call": the tail of a ``session.call``. With
"break waits" the others then wait in their bodies for what is none of the library's.

Nobody leaves early with "uneven", where rank 1 asks for two steps less, and "more", where rank 0 calls a collective in
the last tail that rank 1 does not.

With "handed" the loop is in a generator, and who reads that breaks "between"; or fails there ("handed fails"), also
where that is in its turn read by another ("handed on fails"), or raises again what it has caught ("handed reraises").
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import resilient_train as rt

how, where, ranks = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
random.seed(0)
np.random.seed(0)  # noqa: NPY002 - what a rank carries
torch.manual_seed(0)
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def leaves(number: int, place: str) -> bool:
    """Whether the loop is to be left by a ``break``; here and now if by an exit."""
    if how == "apart" and rank:
        return False
    if str(rank) not in ranks or place != where or number != (7 if where == "last" else 4):
        return False
    if how == "break dies" and rank:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(0)
    if how == "exit late" and rank:
        time.sleep(2)
    if how == "dies" and rank:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("dies", "exit late"):
        sys.exit()
    return True


def body(number: int) -> None:
    model(torch.full((2, 3), rank + number * 0.1)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    leaves(number, "barrier")
    optimizer.step()
    optimizer.zero_grad()
    for place in ("last", "call"):
        leaves(number, place)


def handed() -> Iterator[int]:
    """The loop in a generator: who reads it may leave that."""
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(8):
            with step:
                body(step.number)
                dist.all_reduce(torch.ones(1))
            if step.done:
                yield step.number


def fail() -> None:
    raise ValueError("of the script's")


def on(numbers: Iterator[int]) -> Iterator[int]:
    for number in numbers:
        if how == "handed on fails" and leaves(number, "between"):
            fail()
        yield number


kept = None
if how == "handed":  # an error of before is not on its way
    try:
        fail()
    except ValueError as error:
        kept = error

for number in on(handed()) if how.startswith("handed") else ():
    if leaves(number, "between"):
        if how == "handed fails":
            fail()
        if how == "handed reraises":
            try:
                fail()
            except ValueError:
                print("caught")
                raise
        break
if how.startswith("handed"):
    sys.exit()
with rt.Session(model=model, optimizer=optimizer) as session:
    while where == "call" and session.position.step < 8:
        session.call(body, session.position.step)
    for step in session.steps(8 - 2 * (how == "uneven" and rank == 1)) if where != "call" else ():
        with step:
            if how == "apart" and rank and step.number == 5:
                time.sleep(1)  # the agent looks meanwhile
                break
            if leaves(step.number, "body"):
                break
            if how == "break waits" and str(rank) not in ranks and step.number == (4 if where == "body" else 5):
                while True:
                    time.sleep(0.001)
            body(step.number)
            if leaves(step.number, "tail"):
                break
            dist.all_reduce(torch.ones(1))
            if how == "more" and rank == 0 and step.number == 7:
                dist.all_reduce(torch.ones(1))
        if leaves(step.number, "between"):
            break
