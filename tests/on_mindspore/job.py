"""``Model.train`` with MindSpore's own ``TrainFaultTolerance``: ``job.py FOLDER STEPS PLAN`` under ``resilient-run``,
or where rank 0 starts the controller. ``graph:0:0``: a step is one graph. ``marks:0:0``: each rank writes when
it has ended which step, for a benchmark. ``monitor:0:0``: MindSpore Transformers looks at norms, see the end.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

if os.environ["MS_ROLE"] == "MS_SCHED":
    sys.exit(0)  # collectives go another way, see ``collectives.py``

import doubles
import mindspore as ms
import numpy as np
import recorder
from collectives import Collectives
from mindformers_monitor import with_norms
from mindspore import Tensor, nn, ops
from mindspore.train import Model
from mindspore.train.callback import TrainFaultTolerance
from mindspore.train.callback import _train_fault_tolerance as stock
from mindspore.utils import _tft_handler

RANK, WORLD = int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"])
FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
EPOCHS, BATCH = 2, 4
PLAN = {tuple(each.split(":")) for each in sys.argv[3].split()}
comm = Collectives(FOLDER, RANK, WORLD)
doubles.replace(comm, in_graph=("graph", "0", "0") in PLAN)
ms.set_seed(1)
GRAPH = ("graph", "0", "0") in PLAN
ms.set_context(mode=ms.GRAPH_MODE if GRAPH else ms.PYNATIVE_MODE)


def due(kind: str, step: int) -> bool:
    mark = FOLDER / f"done.{kind}.{RANK}.{step}"
    if (kind, str(RANK), str(step)) not in PLAN or mark.exists():
        return False
    mark.touch()
    return True


def hang() -> None:
    """In native code that no exception ends. It lets other threads run."""
    while True:
        ctypes.CDLL(None).pause()


def die_in_a_repair() -> None:
    if due("gives", comm.step):
        os.kill(os.getpid(), signal.SIGKILL)


comm.before_sending = die_in_a_repair
rename = stock._rename_save_result


def rename_and_die(step: int, context: object) -> None:
    """MindSpore's own handler, and no answer."""
    rename(step, context)
    if due("renames", step):
        os.kill(os.getpid(), signal.SIGKILL)


stock._rename_save_result = rename_and_die


MONITOR = ("monitor", "0", "0") in PLAN
KEPT_BEHIND = 1 if MONITOR else 2
KEPT: dict[str, np.ndarray] = {}
"""What it was behind that update, for TRE (``tre:0:0``)."""


def load() -> tuple[dict[str, Tensor], bool | None]:
    """Written here, as MindFormers does it, by ``copy_``; or by MindSpore (``its_own:0:0``, with the flag of its
    callback ``its_own:0:1``).
    """
    numbers = {"epoch_num": 1, "step_num": KEPT_BEHIND}
    place = {name: ms.Parameter(Tensor(value), name=name) for name, value in numbers.items()}
    for number in ("0", "1"):
        if ("its_own", "0", number) in PLAN:
            names = [name for name in KEPT if number == "1" or name != "tft_g_one_flag"]
            return {name: ms.Parameter(Tensor(KEPT[name]), name=name) for name in names} | place, False
    for each in step.get_parameters():
        each.copy_(Tensor(KEPT[each.name]))
    return place, None


class Step(nn.Cell):
    """A backward pass, gradients that all ranks sum up, an update."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.gradient = ops.value_and_grad(network, None, optimizer.parameters)
        self.reborn = _tft_handler.get_tft().tft_is_reboot_node()

    def __call__(self, *args: Tensor) -> Tensor:
        if self.reborn:
            self.reborn = False
            # What Ascend's C++ code does in the first step of a process that came back: behind the compilation, which
            # gives parameters their first values.
            if GRAPH:
                self.compile(*args)
            raise RuntimeError("ARF FINISH , do next step repair weight.")
        comm.step = int(self.optimizer.global_step.asnumpy()[0]) + 1
        self.meet_faults()
        loss = super().__call__(*args)
        loss.asnumpy()  # it has ended
        if ("marks", "0", "0") in PLAN:
            with (FOLDER / f"marks{RANK}").open("a") as marks:
                marks.write(f"{comm.step} {time.time_ns()}\n")
        return loss

    def meet_faults(self) -> None:
        if ("pace", "0", "0") in PLAN:
            time.sleep(0.05)
        if due("hold", comm.step):
            while not (FOLDER / "go").exists():
                time.sleep(0.01)
        if due("kill", comm.step):
            os.kill(os.getpid(), signal.SIGKILL)
        if due("freeze", comm.step):
            os.kill(os.getpid(), signal.SIGSTOP)
        if due("stuck", comm.step):
            hang()
        if due("hcce", comm.step):
            raise RuntimeError("HCCEError error occurs when execute, error_code=507904.")
        if due("uce", comm.step):
            for each in self.trainable_params():
                each.copy_(ops.zeros_like(each))
            raise RuntimeError("UCEError error occurs when execute, error_code=507053.")
        if due("low", comm.step):
            comm.uce = "RS_UCE_LOWLEVEL"
            raise RuntimeError("UCEError error occurs when execute, error_code=507053.")
        if ("tre", "0", "0") in PLAN and comm.step == KEPT_BEHIND + 1 and not KEPT:
            KEPT.update({each.name: each.asnumpy().copy() for each in self.get_parameters()})
        if due("tre", comm.step):
            raise RuntimeError("TREError: the training result is not what it should be")
        if due("raise", comm.step):
            raise ValueError("out of the script")

    def construct(self, data: Tensor, label: Tensor) -> Tensor:
        loss, gradients = self.gradient(data, label)
        summed = comm.sum("gradients", [each.asnumpy() for each in gradients])
        self.optimizer(tuple(Tensor(each / WORLD) for each in summed))
        return loss


class GraphStep(Step):
    """The same as one graph. What fails in one poisons it on the CPU, for seconds, so nothing in it does: it gives a
    number that says so, and there is no update.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(network, optimizer)
        # Not parts of one tensor: in a process that came back each was its first number, over and over (2.10).
        self.totals = [self.sum_of(number) for number in range(len(optimizer.parameters))]
        self.whole = ops.Custom(self.is_whole, lambda _: (1,), lambda _: ms.int32, func_type="pyfunc")
        self.error: RuntimeError | None = None

    def __call__(self, *args: Tensor) -> Tensor:
        self.error = None
        loss = super().__call__(*args)
        if self.error is not None:
            raise self.error
        return loss

    def sum_of(self, number: int) -> ops.Custom:
        def summed(gradient: np.ndarray) -> np.ndarray:
            try:
                (found,) = comm.sum(f"gradient{number}", [gradient])
            except RuntimeError as error:
                self.error = error
                return np.zeros_like(gradient)
            return (found / WORLD).astype(gradient.dtype)

        return ops.Custom(summed, lambda shape: shape, lambda dtype: dtype, func_type="pyfunc")

    def is_whole(self, _: np.ndarray) -> np.ndarray:
        return np.array([self.error is None], np.int32)

    def construct(self, data: Tensor, label: Tensor) -> Tensor:
        loss, gradients = self.gradient(data, label)
        first, second, third, fourth = gradients  # MindSpore takes no tuple here, nor several inputs for `whole`
        first, second = self.totals[0](first), self.totals[1](second)
        third, fourth = self.totals[2](third), self.totals[3](fourth)
        if self.whole(ops.depend(fourth, (first, second, third))) > 0:
            loss = ops.depend(loss, self.optimizer((first, second, third, fourth)))
        return loss


def dataset():
    def samples():
        for index in range(RANK, STEPS // EPOCHS * BATCH * WORLD, WORLD):
            chance = np.random.default_rng(index)
            yield chance.normal(size=(8,)).astype(np.float32), chance.normal(size=(1,)).astype(np.float32)

    return ms.dataset.GeneratorDataset(list(samples()), ["data", "label"], shuffle=False).batch(BATCH)


if ("record", "0", "0") in PLAN:
    recorder.begin(FOLDER / f"recorded{RANK}.{len(list(FOLDER.glob(f'recorded{RANK}.*')))}")
_tft_handler.init(config=None)
network = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 1))
# With TSP alone there is no report for its wrapper to call (2.10).
ONLY_PAUSES = os.environ["MS_ENABLE_TFT"] == "{TSP:1}"
adam = nn.Adam if ONLY_PAUSES else TrainFaultTolerance.get_optimizer_wrapper(nn.Adam)
optimizer = adam(network.trainable_params(), learning_rate=0.01)
step = (GraphStep if GRAPH else Step)(nn.WithLossCell(network, nn.MSELoss()), optimizer)
model = Model(step)
callbacks = [TrainFaultTolerance(ckpt_save_path=str(FOLDER), ckpt_load_fn=load)]
if MONITOR:
    abnormal = () if step.reborn else (40.0, 45.702465, 45.706, 44.0, 43.0, 44.5)  # with those of steps that run again
    callbacks.append(with_norms(FOLDER, RANK, 44.0, (*abnormal, *[40.0] * STEPS)))
model.train(EPOCHS, dataset(), callbacks=callbacks, dataset_sink_mode=False)
trained = [each for each in step.get_parameters() if not each.name.startswith("tft_")]
state = [np.ascontiguousarray(each.asnumpy()).tobytes() for each in trained]
(FOLDER / f"end{RANK}").write_text(hashlib.sha256(b"".join(state)).hexdigest())
