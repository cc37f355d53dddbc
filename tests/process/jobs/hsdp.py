"""A small model that ``fully_shard`` divides among ranks, each part held by two of them (HSDP).

``alone``: each part is held by one rank (FSDP). ``tp``: two ranks compute each block together, and the two pairs divide
the parameters of theirs once more, or are replicas (``tp+copied``); ``paired``: the two have the same data.

``--plain``: without a word of ours, for torchrun. At its end each rank writes the bytes that it holds, parameter by
parameter, and its random numbers: who compares them needs nothing of ours either. ``--variant`` changes one thing, or
several (``accumulate+mixed``); ``taught``: a frozen model, which nobody registers, gives the targets;
``gathered``: behind the update the model is put together; ``handed``: rank 0 has read the weights, and torch hands them
out; ``loaded``: the Session has the loader; ``wrong``: rank 1 always computes otherwise; ``unzeroed``: gradients are
never dropped.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

WIDTH = 33
"""No multiple of two: the parts of ranks differ in size."""


class Block(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.recomputes = recomputes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.recomputes:
            return checkpoint(self.compute, inputs, use_reentrant=False)
        return self.compute(inputs)

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.dropout(self.down(torch.relu(self.up(self.norm(inputs)))))


class Net(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.first = nn.Linear(10, WIDTH)
        self.blocks = nn.ModuleList([Block(recomputes=recomputes) for _ in range(3)])
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.first(inputs)
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


def tell(told: Path, number: int) -> None:
    """For who waits until so many steps are made. The last ones are not made before he has done something about it."""
    if dist.get_rank() == 0:
        told.with_suffix(".new").write_text(str(number))
        told.with_suffix(".new").replace(told)  # who waits never reads half of it
    time.sleep(0.1 if number < 2 else 5)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """What this rank holds of it."""
    return getattr(tensor, "_local_tensor", tensor).detach().numpy().tobytes()


class Average:
    """Of a few numbers that this rank has of the first parameter, as a plain tensor."""

    def __init__(self, model: Any) -> None:
        self.of = next(iter(model.parameters()))._local_tensor.detach().flatten()[:8].clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"of": self.of}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.of.copy_(state["of"])


class Counted:
    """Of which each rank has the same."""

    def __init__(self) -> None:
        self.held: dict[str, Any] = {"best": float("nan"), "of": np.arange(3)}

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


class Job:
    out = Path()
    """Where it writes what it has."""
    teacher: Any = None

    def __init__(self, variant: frozenset[str]) -> None:
        self.variant, self.factor = variant, 1.0
        self.rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        with torch.device("meta" if "handed" in variant else "cpu"):
            self.model: Any = self.build()
        shape, names = ((world,), ("shard",)) if "alone" in variant else ((world // 2, 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        divide: Callable[..., Any] = fully_shard
        if "tp" in variant:
            for block in self.model.blocks:
                parallelize_module(block, mesh["shard"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            mesh = mesh["replicate"]
        if "copied" in variant:
            divide = replicate
        flags: dict[str, Any] = {"mesh": mesh}
        if "mixed" in variant:
            flags["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if "kept" in variant:
            flags["reshard_after_forward"] = False
        for block in self.model.blocks:
            if "compiled" in variant:
                block.compile(backend="aot_eager")
            divide(block, **flags)
        divide(self.model, **flags)
        if "async" in variant:
            self.model._set_unshard_async_op(True)
            for one, following in zip(self.model.blocks, self.model.blocks[1:], strict=False):
                one.set_modules_to_forward_prefetch([following])
        if "handed" in variant:
            self.take_weights()
        if "truncated" in variant:
            for parameter in self.model.parameters():
                if parameter.dim() > 1:  # as LLMs are, when they are divided already: ranks ask each other
                    nn.init.trunc_normal_(parameter, std=0.3, a=-0.4, b=0.4)
        if "taught" in variant:
            self.teacher = Net(recomputes=False).eval().requires_grad_(False)
            for block in self.teacher.blocks:
                divide(block, **flags)
            divide(self.teacher, **flags)
        half = len(list(self.model.parameters())) // 2
        parameters = list(self.model.parameters())
        self.optimizers: list[Any] = [torch.optim.AdamW(parameters[:half] if "two" in variant else parameters, lr=1e-2)]
        if "handed" in variant:
            self.take_moments()
            self.look_at_weights()
        if "two" in variant:
            self.optimizers.append(torch.optim.SGD(parameters[half:], lr=1e-2, momentum=0.9))
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 50) for each in self.optimizers]
        torch.manual_seed(1000 + self.reader)
        if "drawn" in variant:
            from device_generator import draw_dropout

            draw_dropout(2000 + self.rank)

    def build(self) -> Net:
        net = Net(recomputes="recompute" in self.variant)
        if self.variant & {"truncated", "handed"}:
            net.unused = nn.Linear(300, 300)  # more than a new process is told of one collective
        return net

    def take_weights(self) -> None:
        """Of one file, as it were, in each way that torch has; onto a model without memory at first."""
        torch.manual_seed(5)
        net = self.build()
        self.read = net, torch.optim.AdamW(net.parameters(), lr=1e-2)
        for parameter in net.parameters():
            parameter.grad = torch.randn_like(parameter)
        self.read[1].step()
        read = get_model_state_dict(net)
        first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, dict(read) if self.rank == 0 else {}, options=first)
        set_model_state_dict(self.model, dict(read), options=StateDictOptions(full_state_dict=True))
        held = self.model.state_dict()
        parts = {name: distribute_tensor(read[name], held[name].device_mesh, held[name].placements) for name in held}
        self.model.load_state_dict(parts)

    def take_moments(self) -> None:
        net, optimizer = self.read
        read = get_optimizer_state_dict(net, optimizer) if self.rank == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(self.model, self.optimizers[0], read, options=options)
        del self.read

    def look_at_weights(self) -> None:
        """As scripts do before they train: is the file whole, how good is it? And a factor that is made of them."""
        held = [parameter.to_local() for parameter in self.model.parameters()]
        if not all(torch.isfinite(each).all() for each in held):
            raise SystemExit("the weights are not finite")
        self.factor += min(held[0].abs().mean().item(), held[-1].numpy(force=True).max()) + sum(held[1][:3].tolist())
        self.factor += 1e-3 * len(held[0][held[0] > 0.1])
        self.evaluate()

    @property
    def reader(self) -> int:
        """Whose data this rank computes with."""
        return self.rank // 2 if "paired" in self.variant else self.rank

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number * 100 + self.reader)
        return torch.randn(8, 10, generator=generator), torch.randint(0, 5, (8,), generator=generator)

    def body(self, number: int, session: Any = None, batch: tuple[torch.Tensor, torch.Tensor] | None = None) -> float:
        """Returns this rank's loss."""
        inputs, targets = batch or self.batch(number)
        last = "accumulate" not in self.variant or number % 2 == 1
        if "switched" not in self.variant:
            self.model.set_requires_gradient_sync(last or "reduced" in self.variant)
        elif last or number == 0:  # it stays so for the next body
            self.model.set_requires_gradient_sync(last)
        if self.teacher is not None:
            with torch.no_grad():
                targets = self.teacher(inputs).softmax(-1)
        loss = nn.functional.cross_entropy(self.model(inputs).float(), targets)
        if "wrong" in self.variant and self.rank == 1 and number > 5:
            loss = loss * (1 + 2**-12)
        loss = loss * self.factor
        if session is not None and "checked" in self.variant:
            session.check(loss)
        try:
            loss.backward()
            if last:
                self.clip()
        except RuntimeError:
            if "caught" not in self.variant:
                raise
            self.model.reset_iter_state()  # as scripts do that go on without a batch for which there is no memory
        if not last:
            return loss.item()
        for optimizer in self.optimizers:
            optimizer.step()
        if "switched" in self.variant:
            self.model.set_requires_gradient_sync(False)
        for optimizer in self.optimizers if "unzeroed" not in self.variant else ():
            optimizer.zero_grad()
        for scheduler in self.schedulers:
            scheduler.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if "evaluate" in self.variant:
            self.evaluate()
        if "gathered" in self.variant:  # as a script does it for a checkpoint of its own
            whole = [parameter.full_tensor().detach().numpy().tobytes() for parameter in self.model.parameters()]
            (self.out / f"whole{self.rank}-{number}.bin").write_bytes(b"".join(whole))
        return loss.item()

    def clip(self) -> None:
        meshes: dict[Any, list[Any]] = {}  # torch clips what lies on one mesh
        for parameter in self.model.parameters():
            meshes.setdefault(parameter.device_mesh, []).append(parameter)
        for parameters in meshes.values():
            nn.utils.clip_grad_norm_(parameters, 1.0)

    def evaluate(self) -> None:
        """The outermost parameters stay whole behind it."""
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(2, 10))
        self.model.train()

    def train(self, session: Any, steps: int, told: Path | None) -> None:
        if "call" in self.variant:
            while not session.position.over and session.position.step < steps:
                session.call(self.body, session.position.step, session)
            return
        for step in session.steps(steps):
            with step:
                self.body(step.number, session, step.batch)
            if "warm" in self.variant and step.done:
                self.evaluate()
            if told is not None:
                tell(told, step.number)

    def whole(self) -> Iterator[bytes]:
        """All of the model, put together by torch."""
        self.model.reshard()
        for parameter in self.model.parameters():
            for tensor in (parameter, *(value for _, value in sorted(self.optimizers[0].state[parameter].items()))):
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                yield whole.detach().numpy().tobytes()

    def write_whole(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"whole{self.rank}.bin").write_bytes(b"".join(self.whole()))

    def state_of(self, number: int, parameter: Any) -> Any:
        """What this rank has in an optimizer beside a parameter."""
        return self.optimizers[number].state.get(parameter, {})

    def held(self) -> Iterator[tuple[str, bytes]]:
        """The memory of this rank, in one order on all."""
        for name, parameter in self.model.named_parameters():
            yield name, bytes_of(parameter)
            for number in range(len(self.optimizers)):
                for kind, value in sorted(self.state_of(number, parameter).items()):
                    yield f"{name}.{kind}, optimizer {number}", bytes_of(value)
        if self.teacher is not None:
            self.teacher.reshard()
            yield from ((f"teacher.{name}", bytes_of(each)) for name, each in self.teacher.named_parameters())
        yield "random numbers", bytes_of(torch.get_rng_state())
        yield "schedulers", json.dumps([each.state_dict() for each in self.schedulers], sort_keys=True).encode()

    def write(self, folder: Path) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.reshard()  # behind an evaluation the outermost parameters are whole
        folder.mkdir(parents=True, exist_ok=True)
        held = dict(self.held())
        (folder / f"rank{self.rank}.json").write_text(json.dumps([(name, len(data)) for name, data in held.items()]))
        (folder / f"rank{self.rank}.bin").write_bytes(b"".join(held.values()))


def main(kind: type[Job]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--variant", default="base")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--tell", type=Path)
    parser.add_argument("--replicas", type=json.loads, default=[])
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    job = kind(frozenset(asked.variant.split("+")))
    job.out = asked.out
    job.out.mkdir(parents=True, exist_ok=True)
    if asked.plain:
        for number in range(asked.steps):
            job.body(number)
            if "warm" in job.variant:
                job.evaluate()
    else:
        import resilient_train as rt

        with contextlib.ExitStack() as stack:
            session = stack.enter_context(
                rt.Session(
                    model=job.model,
                    optimizer=job.optimizers,
                    scheduler=job.schedulers,
                    scaler=getattr(job, "scaler", None),
                    undo="undo" in job.variant,
                    loader=[job.batch(number) for number in range(asked.steps)] if "loaded" in job.variant else None,
                    replicas=asked.replicas,
                    state={
                        **({"average": Average(job.model)} if "average" in job.variant else {}),
                        **({"counted": Counted()} if "counted" in job.variant else {}),
                    },
                )
            )
            if asked.save:
                session.save_every(steps=asked.save, memory_steps=asked.memory or None)
            job.train(session, asked.steps, asked.tell)
    job.write(asked.out)
    if asked.whole:
        job.write_whole(asked.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Job)
