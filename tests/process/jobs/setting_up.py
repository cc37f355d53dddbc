"""Jobs that agree on something before their loop.

``setting_up.py STORY``. Each process prints ``SETUP RANK ATTEMPT JSON``, what its collectives gave it, as soon as it
has it: a process that takes a rank's place must print what the first one did.
"""

import argparse
import json
import os
import random
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train.config import read_link, read_settings

LARGE = 20_000  # 80 KB of float32: more than is kept of a result


def first() -> bool:
    """Whether this is no replacement."""
    link = read_link()
    return link is None or not link.joining


def rank_of() -> int:
    return dist.get_rank()


def ones(*values: float) -> torch.Tensor:
    return torch.tensor([float(value) for value in values])


def reductions() -> list[Any]:
    me, size = rank_of(), dist.get_world_size()
    summed, most, whole, part = ones(me + 2), ones(me), ones(me, 1), torch.zeros(1)
    dist.all_reduce(summed)
    work = dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    most /= 10  # after it was taken
    dist.reduce(whole, 1)  # gloo leaves partial sums with the others
    dist.reduce_scatter(part, [ones(me * 10 + i) for i in range(size)])
    late = ones(me + 5)
    dist.all_reduce(late, async_op=True)  # whoever begins the loop waits for it
    return [summed.item(), most.item(), whole.tolist(), part.item()]


def movements() -> list[Any]:
    me, size = rank_of(), dist.get_world_size()
    chosen = ones(uuid.uuid4().int % 1_000_000) if me == 1 else torch.zeros(1)
    dist.broadcast(chosen, 1)  # what rank 1 gives differs from run to run
    mine = torch.zeros(2)
    dist.scatter(mine, [ones(i, i * i) for i in range(size)] if me == 2 else None, src=2)
    pids = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(pids, ones(os.getpid()))
    places = [torch.zeros(1) for _ in range(size)]
    dist.gather(ones(me + 7), places if me == 0 else None, dst=0)
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(size) + 10.0 * me)
    dist.barrier()
    return [chosen.item(), mine.tolist(), [each.item() for each in (*pids, *places)], swapped.tolist()]


def objects() -> list[Any]:
    me, size = rank_of(), dist.get_world_size()
    config = [{"run": str(uuid.uuid4()), "lr": 0.05}] if me == 0 else [None]
    dist.broadcast_object_list(config, src=0)
    longer = ["x" * (uuid.uuid4().int % 50)] if me == 0 else [None]  # another size each time
    dist.broadcast_object_list(longer, src=0)
    pids: list[Any] = [None] * size
    dist.all_gather_object(pids, [me, os.getpid()])
    gathered: list[Any] = [None] * size
    dist.gather_object(f"of {me}", gathered if me == 2 else None, dst=2)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(size)] if me == 1 else None, src=1)
    return [config[0], longer[0], pids, gathered, mine]


def messages() -> list[Any]:
    me, size = rank_of(), dist.get_world_size()
    got = torch.zeros(1)
    requests = [dist.isend(ones(me + 0.5), (me + 1) % size), dist.irecv(got, (me - 1) % size)]
    for request in requests:
        assert request is not None
        request.wait()
    batched = torch.zeros(1)
    sends = dist.P2POp(dist.isend, ones(os.getpid()), (me + 1) % size)
    takes = dist.P2POp(dist.irecv, batched, (me - 1) % size)
    for request in dist.batch_isend_irecv([sends, takes]):
        request.wait()
    heard = torch.zeros(1)
    source = -1
    if me:
        dist.send(ones(os.getpid()), 0)
    else:
        source = dist.recv(heard)  # from whoever comes first
        dist.recv(torch.zeros(1))
    return [got.item(), batched.item(), source, heard.item()]


def subgroups() -> list[Any]:
    me = rank_of()
    left, right = dist.new_group([0, 1]), dist.new_group([1, 2])
    found = []
    for group, members in ((left, (0, 1)), (right, (1, 2))):
        if me in members:
            value = ones(me + 1)
            dist.all_reduce(value, group=group)
            found.append(value.item())
    return found


def agree() -> dict[str, Any]:
    told = {each.__name__: each() for each in (reductions, movements, objects, messages, subgroups)}
    show(told)
    return told


def show(told: Any) -> None:
    print("SETUP", rank_of(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), json.dumps(told), flush=True)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4))


def train(
    steps: int,
    scale: float,
    asked: argparse.Namespace,
    model: nn.Module,
    *,
    before: float | torch.Tensor = 0.0,
    zeroes_first: bool = False,
    **registered: Any,
) -> None:
    """``before``: is added to the factor of each loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + rank_of())
    with rt.Session(model=model, optimizer=optimizer, **registered) as session:
        if asked.save:
            session.save_every(steps=asked.save)
        if asked.story == "between":
            value = ones(rank_of() + 1)
            dist.all_reduce(value)
            show(value.item())
            steps, scale = int(value.item()) + 4, value.item() / 6
        for step in session.steps(steps):
            with step:
                x = torch.randn(8, 16)
                loss = nn.functional.cross_entropy(model(x), x[:, :4].argmax(1)) * (scale + before)
                if zeroes_first:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.done and step.number in asked.standby_at:
                with session.slow("waiting for a standby"):
                    wait_for_standby(asked.standby_at.index(step.number) + 1)


def wait_for_standby(count: int) -> None:
    """Until one has come to where it waits, or is known to come no further than its imports."""
    link = read_link()
    assert link is not None
    events = Path(link.run_dir) / "events.jsonl"
    waited = b'"standby_waits"' if read_settings().standby_depth == "built" else b'"standby_ready"'
    while b'"standby_shallow"' not in (text := events.read_bytes()) and text.count(waited) < count:
        time.sleep(0.02)


def usual(asked: argparse.Namespace) -> None:
    told = agree()
    steps = int(told["reductions"][0]) + 3
    scale = told["objects"][0]["lr"] * 10 + told["subgroups"][0] / 10 + told["messages"][0] / 10
    train(steps, scale, asked, DistributedDataParallel(model_of(0)))


def nothing(asked: argparse.Namespace) -> None:
    train(8, 1.0, asked, DistributedDataParallel(model_of(0)))


def registered(asked: argparse.Namespace) -> None:
    """The user's own broadcast of parameters, of another seed on each rank, beside DDP's; and a large table."""
    torch.manual_seed(rank_of())
    model = nn.Sequential(nn.Linear(16, LARGE // 16), nn.Linear(LARGE // 16, 4))
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    table = nn.Module()
    table.register_buffer("rows", torch.randn(LARGE))
    dist.all_reduce(table.rows)
    wrapped = DistributedDataParallel(model)
    train(8, 1.0, asked, wrapped, state={"table": table})


def logged(asked: argparse.Namespace) -> None:
    """As Lightning's trainer does it before its loop: each rank gives the next directory that it finds free."""
    link = read_link()
    assert link is not None
    root = Path(link.run_dir) / "lightning_logs"
    taken = len(list(root.glob("version_*")))
    told = [str(root / f"version_{9 + taken}")]  # a second process's is longer, by a digit
    dist.broadcast_object_list(told, 0, group=dist.group.WORLD)
    if rank_of() == 0:
        Path(told[0]).mkdir(parents=True, exist_ok=True)
    show(told[0])
    train(8, int(told[0].rpartition("_")[2]) / 10, asked, DistributedDataParallel(model_of(0)))


def large(asked: argparse.Namespace) -> None:
    table = torch.randn(LARGE)
    dist.broadcast(table, src=0)
    train(8, table.mean().item(), asked, DistributedDataParallel(model_of(0)))


def passing(asked: argparse.Namespace) -> None:
    """Large tables, of which a few numbers are used; each rank has made another one, but for the one that counts."""
    torch.manual_seed(rank_of())
    table, order = torch.randn(LARGE), torch.randperm(LARGE)
    dist.broadcast(table, src=0)
    dist.broadcast(order, src=0)
    steps = 6 + int(table[order[:3]].abs().max() > 0) + len(table[table > 3.5]) % 3
    show([table.mean().item(), order[:5].tolist(), steps])
    scale = table.std().item() + order.numpy()[7] / LARGE
    del table, order
    train(steps, scale, asked, DistributedDataParallel(model_of(0)))


def masked(asked: argparse.Namespace) -> None:
    """A registered model has the result, and a mask of it is kept beside: a small one, or weights of it."""
    torch.manual_seed(rank_of())
    table = nn.Module()
    table.register_buffer("rows", torch.randn(LARGE))
    dist.broadcast(table.rows, src=0)
    mask = table.rows > 0.0
    if asked.story == "weighed":
        mask = mask.float()
    train(8, 1.0, asked, DistributedDataParallel(model_of(0)), state={"table": table})
    show([mask.sum().item(), mask[:20].tolist()])


def unregistered(asked: argparse.Namespace) -> None:
    teacher = DistributedDataParallel(model_of(rank_of()))
    train(8, sum(p.sum().item() for p in teacher.parameters()), asked, DistributedDataParallel(model_of(0)))


def drawn(asked: argparse.Namespace) -> None:
    """Each rank has drawn weights of its own, and goes on with what DDP's constructor has made of them."""
    model = DistributedDataParallel(model_of(rank_of()))
    weight = model.module[0].weight
    strongest = nn.Module()
    strongest.register_buffer("mask", (weight.detach() > weight.mean()).float())
    told = [weight.std().item(), int((weight > 0.1).sum()), weight.detach().numpy()[0, :3].tolist()]
    show(told)
    train(6 + told[1] % 3, 4 * told[0], asked, model, state={"strongest": strongest})


def compared(asked: argparse.Namespace) -> None:
    """In the end, with what they began with; or that of many, which is large."""
    model = DistributedDataParallel(model_of(rank_of()))
    start = model.module[0].weight.detach().clone()
    if asked.story == "collected":
        start = start.repeat(40, 1)
    train(8, 1.0, asked, model)
    show((model.module[0].weight - start[:32]).norm().item())


def replicated(asked: argparse.Namespace) -> None:
    """Some updates above the loop, of a model whose first collective is that of a backward pass, and large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 2000), nn.Linear(2000, 4))
    replicate(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    torch.manual_seed(50 + rank_of())
    for _ in range(3):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    show(loss.item())
    train(6, loss.item(), asked, model)


def trained(asked: argparse.Namespace) -> None:
    """Some updates and an evaluation above the loop: what they come to goes on in it, and lies about."""
    model = DistributedDataParallel(model_of(rank_of()))
    if asked.story == "halved":
        model.register_comm_hook(None, fp16_compress_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(50 + rank_of())
    average = torch.zeros(())
    for number in range(3):
        output = model(torch.randn(8, 16))
        loss = output.square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if number < 2:  # and gradients that nobody drops
            optimizer.step()
            optimizer.zero_grad()
        average.mul_(0.5).add_(loss.detach())
    model.eval()
    with torch.no_grad():
        found = model(torch.ones(2, 16)).std().item()
    model.train()
    both, array = torch.stack([loss.detach(), norm]), output.detach().numpy()
    kept = [parameter.grad for parameter in model.parameters()]
    show([loss.item(), norm.item(), found, average.item()])
    train(6, found, asked, model, before=loss.detach(), zeroes_first=True)
    sums = [average.item(), output.sum().item(), both.sum().item(), float(array.sum())]
    show([*sums, *(0 if each is None else each.sum().item() for each in kept)])


def twice(asked: argparse.Namespace) -> None:
    """A teacher is trained above the loop, by a wrapper of its own, before the student is wrapped."""
    teacher = DistributedDataParallel(model_of(rank_of()))
    optimizer = torch.optim.SGD(teacher.parameters(), lr=0.1)
    torch.manual_seed(50 + rank_of())
    for _ in range(2):
        teacher(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    student = DistributedDataParallel(model_of(rank_of()))
    train(8, 1.0, asked, student, state={"teacher": teacher.module})


def unseeded(asked: argparse.Namespace) -> None:
    """All that the others have is rank 0's, and that is another one each time."""
    model = DistributedDataParallel(model_of(uuid.uuid4().int % 1_000_000))
    weight = model.module[0].weight.detach()
    scale, start = 1.0, None
    if asked.how == "read":
        scale = weight.std().item()
    elif asked.how == "kept" and not first():
        start = weight * 2
    train(8, scale, asked, model)
    del start


def filled(asked: argparse.Namespace) -> None:
    """Rank 0 has read a teacher's weights, and hands them out."""
    torch.manual_seed(rank_of())
    teacher = nn.Linear(LARGE // 16, 16)
    read = teacher.state_dict() if rank_of() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(teacher, read, options=options)
    train(8, teacher.weight.sum().item(), asked, DistributedDataParallel(model_of(0)))


def placed(asked: argparse.Namespace) -> None:
    """The same, by the part, of one that is divided."""
    torch.manual_seed(rank_of())
    teacher = nn.Linear(LARGE // 4, 16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(16, LARGE // 4)
    teacher.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]).clone().detach())
    train(8, teacher.bias.sum().item(), asked, DistributedDataParallel(model_of(0)))


def handed(asked: argparse.Namespace) -> None:
    """A table that goes into no module."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.full((LARGE,), float(1 - rank_of())), mesh, [Replicate()])
    train(8, table.to_local().mean().item(), asked, DistributedDataParallel(model_of(0)))


def unwaited(asked: argparse.Namespace) -> None:
    box = torch.zeros(1)
    request = dist.irecv(box, 1 - rank_of())
    train(8, 1.0, asked, DistributedDataParallel(model_of(0)))
    del request


def warmed(asked: argparse.Namespace) -> None:
    """Passes above the line, as docs/how-to/standbys.md has them: gradients of DDP's go over the group."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 2000), nn.Linear(2000, 4)))
    for _ in range(3):
        model(torch.zeros(8, 16)).sum().backward()
    model.zero_grad(set_to_none=True)
    norm = model.module[0].weight.detach().norm().item()
    dist.barrier()
    rt.standby_point()
    bias = model.module[0].bias.sum().item()
    value = ones(rank_of() + 1)
    dist.all_reduce(value)
    show([value.item(), norm, bias, model.module[1].bias.sum().item()])
    train(8, value.item() * norm / 20, asked, model)


def before(asked: argparse.Namespace) -> None:
    """The standby's line stands behind a collective."""
    value = ones(3)
    dist.all_reduce(value)
    rt.standby_point()
    show(value.item())
    train(8, value.item(), asked, DistributedDataParallel(model_of(0)))


def differing(asked: argparse.Namespace) -> None:
    """What a replacement does is not what was done at first."""
    value, pair = ones(rank_of() + 1), ones(rank_of(), 1)
    if first():
        dist.all_reduce(value)
        dist.broadcast(pair, src=0)
    elif asked.how == "order":
        dist.broadcast(pair, src=0)
        dist.all_reduce(value)
    elif asked.how == "shape":
        dist.all_reduce(pair)
    elif asked.how == "dtype":
        dist.all_reduce(value.double())
    elif asked.how == "operation":
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
    elif asked.how == "fewer":
        dist.all_reduce(value)
    elif asked.how == "more":
        dist.all_reduce(value)
        dist.broadcast(pair, src=0)
        dist.barrier()
    elif asked.how == "caught":
        try:
            dist.barrier()
        except BaseException as error:
            print("CAUGHT", type(error).__name__, flush=True)
    train(8, 1.0, asked, DistributedDataParallel(model_of(0)))


STORIES = (
    *(usual, nothing, registered, logged, large, passing, masked, unregistered, drawn, compared, trained, unseeded),
    *(twice, replicated, filled, placed, handed, unwaited, warmed, before, differing),
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("story")
    parser.add_argument("--how", default="")
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--standby-at", type=int, nargs="*", default=[])
    arguments = parser.parse_args()
    dist.init_process_group(timeout=timedelta(seconds=60))
    stories = {each.__name__: each for each in STORIES}
    stories |= {"between": nothing, "weighed": masked, "halved": trained, "collected": compared}
    stories[arguments.story](arguments)
    dist.destroy_process_group()
