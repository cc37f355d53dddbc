"""``Model.train`` with our ``FaultTolerance``: ``saved_job.py JSON``, see ``Plan``. Ends with a digest of all state."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from collectives import Collectives
from mindspore import Tensor, nn, ops
from mindspore.dataset import vision
from mindspore.train import Callback, Model

from resilient_train.integrations.mindspore import (
    ExceptionCheckpoint,
    FaultTolerance,
    checkpoint_file,
    ttp_directory,
)

EPOCHS, BATCHES, BATCH = 3, 6, 4
LOSS = -1


class Plan(NamedTuple):
    """``faults``: kind -> [rank, step]. ``life``: how often the job was started before."""

    folder: str
    mode: str = "PYNATIVE"
    rank: int = 0
    world_size: int = 1
    life: int = 0
    faults: Mapping[str, list[int]] = MappingProxyType({})
    options: Mapping[str, Any] = MappingProxyType({})
    groups: list[list[int]] | None = None
    prefix: str = ""
    """Of an ``ExceptionCheckpoint``, which there is then."""
    apart: bool = False
    """Whether each rank has a directory of its own, as mindx_elastic wants it."""
    always: bool = False
    """Whether an odd value comes again when its step is run again."""


class Faults(Callback):
    def __init__(self, plan: Plan, when: str) -> None:
        self.plan, self.when = plan, when

    def due(self, kind: str, step: int) -> bool:
        return self.plan.faults.get(kind) == [self.plan.rank, step]

    def on_train_step_begin(self, run_context: Any) -> None:
        step = run_context.original_args().cur_step_num
        if self.when == "behind" and self.due("begin", step):
            raise ValueError("at the beginning of a step")

    def on_train_step_end(self, run_context: Any) -> None:
        step = run_context.original_args().cur_step_num
        if self.when == "behind":
            print("ended", step, flush=True)
        for kind, number in (("term", signal.SIGTERM), ("usr1", signal.SIGUSR1), ("int", signal.SIGINT)):
            if self.due(f"{kind} {self.when}", step):
                os.kill(os.getpid(), number)
        if self.due(f"raise {self.when}", step):
            raise ValueError(f"of a callback {self.when} ours")


class Step(nn.Cell):
    """Gradients that all ranks sum up; an update. Each gradient goes through a function of Python's, in graphs too."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, comm: Collectives, plan: Plan) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.gradient = ops.value_and_grad(network, None, optimizer.parameters)
        self.shares = tuple(self.share(index, comm, plan) for index in range(len(optimizer.parameters)))
        self.watch = self.share(LOSS, comm, plan)

    @staticmethod
    def share(index: int, comm: Collectives, plan: Plan) -> ops.Custom:
        happened: set[str] = set()

        def total(value: np.ndarray) -> np.ndarray:
            at = [plan.rank, comm.step]
            if plan.faults.get("in the step") == at:
                raise ValueError("in a step")
            for kind, factor, where in (("nan loss", np.nan, LOSS), ("spike", 1000, LOSS), ("nan gradient", np.nan, 3)):
                if plan.faults.get(kind) == at and index == where and (plan.always or kind not in happened):
                    happened.add(kind)
                    value = value * np.float32(factor)
            if index == LOSS:
                return value
            if plan.faults.get("hang") == at and index == 0:
                print("hangs", flush=True)
                hang()
            return comm.sum(str(index), [value])[0] / np.float32(plan.world_size)

        return ops.Custom(total, lambda shape: shape, lambda dtype: dtype, func_type="pyfunc")

    def construct(self, data: Tensor, label: Tensor) -> Tensor:
        loss, gradients = self.gradient(data, label)
        summed = ()
        for share, each in zip(self.shares, gradients):  # noqa: B905 - a graph knows no `strict`
            summed += (share(each),)
        return self.watch(ops.depend(loss, self.optimizer(summed)))


def hang() -> None:
    """In native code, from which no signal comes back; other threads run."""
    lock = ctypes.create_string_buffer(64)
    libc = ctypes.CDLL(None)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def dataset(rank: int, world_size: int) -> Any:
    """Shuffled, with a random transform of MindSpore's own."""

    def samples():
        for index in range(rank, BATCHES * BATCH * world_size, world_size):
            chance = np.random.default_rng(index)
            yield chance.integers(0, 255, (4, 4, 3)).astype(np.uint8), chance.normal(size=(1,)).astype(np.float32)

    made = ms.dataset.GeneratorDataset(list(samples()), ["data", "label"], shuffle=True)
    made = made.map([vision.RandomHorizontalFlip(0.5), lambda x: x.reshape(-1).astype(np.float32) / 255], ["data"])
    return made.batch(BATCH)


def model(plan: Plan, step: Callback) -> Model:
    ms.set_seed(7)
    network = nn.SequentialCell(nn.Dense(48, 16), nn.ReLU(), nn.Dense(16, 1))
    rate = nn.exponential_decay_lr(0.01, 0.9, EPOCHS * BATCHES, BATCHES, 1)
    optimizer = nn.Adam(network.trainable_params(), learning_rate=rate)
    if plan.world_size == 1 and not {"in the step", "hang", "nan loss", "spike", "nan gradient"} & plan.faults.keys():
        return Model(network, nn.MSELoss(), optimizer)
    comm = Collectives(Path(plan.folder) / f"life{plan.life}", plan.rank, plan.world_size)
    comm.folder.mkdir(exist_ok=True)
    step.on_train_step_begin = lambda context: setattr(comm, "step", context.original_args().cur_step_num)
    return Model(Step(nn.WithLossCell(network, nn.MSELoss()), optimizer, comm, plan))


def train(plan: Plan) -> str:
    """Returns the digest of all state, of whatever the training has left."""
    ms.set_context(mode=getattr(ms, f"{plan.mode}_MODE"))
    counter = Callback()
    trained, data = model(plan, counter), dataset(plan.rank, plan.world_size)
    folder = f"{plan.folder}/device{plan.rank}" if plan.apart else plan.folder
    options = {"rank": plan.rank, "world_size": plan.world_size, "replica_groups": plan.groups, **plan.options}
    own = ExceptionCheckpoint(plan.prefix, folder, **options) if plan.prefix else FaultTolerance(folder, **options)
    start = own.resume(trained, data)
    print("start", start.step, flush=True)
    callbacks = [counter, Faults(plan, "before"), own, Faults(plan, "behind")]
    if start.epoch < EPOCHS and "TRE" in os.environ.get("MS_ENABLE_TFT", ""):
        callbacks.remove(own)
        own.train(trained, EPOCHS, data, callbacks=callbacks, initial_epoch=start.epoch)
    elif start.epoch < EPOCHS:
        trained.train(EPOCHS, data, callbacks=callbacks, dataset_sink_mode=False, initial_epoch=start.epoch)
    return digest(trained)


def disturb_saving(plan: Plan) -> None:
    """``kill: half``, ``kill: read``, ``kill: publish``, ``term: read``: at which point of saving what comes."""

    def act(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL if kind.startswith("kill") else signal.SIGTERM)

    def half(_: object, file: str, **__: object) -> None:
        Path(file).write_bytes(b"half")
        act()

    stock = checkpoint_file.read
    kind = next((each for each in plan.faults if ": " in each and plan.faults[each][0] == plan.rank), "")
    if kind.endswith("half"):
        ms.save_checkpoint = half
    if kind.endswith("read"):
        checkpoint_file.read = lambda path: (act(), stock(path))[1]
    if kind.endswith("publish"):
        ttp_directory._publish = act


def digest(trained: Model) -> str:
    state = [each.asnumpy().tobytes() for each in trained.train_network.get_parameters()]
    return hashlib.sha256(b"".join(state)).hexdigest()


if __name__ == "__main__":
    given = Plan(**json.loads(sys.argv[1]))
    disturb_saving(given)
    found = train(given)
    (Path(given.folder) / f"end{given.rank}").write_text(found)
