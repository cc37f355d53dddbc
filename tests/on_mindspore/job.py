"""``Model.train`` with MindSpore's own ``TrainFaultTolerance``: ``job.py FOLDER STEPS PLAN`` under ``resilient-run``,
or where rank 0 starts the controller.
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
from mindspore import Tensor, nn, ops
from mindspore.train import Callback, Model
from mindspore.train.callback import TrainFaultTolerance
from mindspore.train.callback import _train_fault_tolerance as stock
from mindspore.utils import _tft_handler

RANK, WORLD = int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"])
FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
EPOCHS, BATCH = 2, 4
PLAN = {tuple(each.split(":")) for each in sys.argv[3].split()}
comm = Collectives(FOLDER, RANK, WORLD)
doubles.replace(comm)
ms.set_seed(1)
ms.set_context(mode=ms.PYNATIVE_MODE)


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


class Step(nn.Cell):
    """A backward pass, gradients that all ranks sum up, an update."""

    def __init__(self, network: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = network, optimizer
        self.gradient = ops.value_and_grad(network, None, optimizer.parameters)

    def construct(self, data: Tensor, label: Tensor) -> Tensor:
        comm.step = int(self.optimizer.global_step.asnumpy()[0]) + 1
        if ("pace", "0", "0") in PLAN:
            time.sleep(0.05)
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
        if due("raise", comm.step):
            raise ValueError("out of the script")
        loss, gradients = self.gradient(data, label)
        summed = comm.sum("gradients", [each.asnumpy() for each in gradients])
        self.optimizer(tuple(Tensor(each / WORLD) for each in summed))
        return loss


class Reborn(Callback):
    """What Ascend's C++ code does in the first step of a process that came back."""

    def __init__(self, *, reborn: bool) -> None:
        self.reborn = reborn

    def on_train_step_begin(self, _: object) -> None:
        if self.reborn:
            self.reborn = False
            raise RuntimeError("ARF FINISH , do next step repair weight.")


def dataset():
    def samples():
        for index in range(RANK, STEPS // EPOCHS * BATCH * WORLD, WORLD):
            chance = np.random.default_rng(index)
            yield chance.normal(size=(8,)).astype(np.float32), chance.normal(size=(1,)).astype(np.float32)

    return ms.dataset.GeneratorDataset(list(samples()), ["data", "label"], shuffle=False).batch(BATCH)


if ("record", "0", "0") in PLAN:
    recorder.begin(FOLDER / f"recorded{RANK}.{len(list(FOLDER.glob(f'recorded{RANK}.*')))}")
_tft_handler.init(config=None)
reborn = Reborn(reborn=_tft_handler.get_tft().tft_is_reboot_node())
network = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.Dense(16, 1))
optimizer = TrainFaultTolerance.get_optimizer_wrapper(nn.Adam)(network.trainable_params(), learning_rate=0.01)
step = Step(nn.WithLossCell(network, nn.MSELoss()), optimizer)
model = Model(step)
callback = TrainFaultTolerance(ckpt_save_path=str(FOLDER))
model.train(EPOCHS, dataset(), callbacks=[callback, reborn], dataset_sink_mode=False)
state = [np.ascontiguousarray(each.asnumpy()).tobytes() for each in step.get_parameters()]
(FOLDER / f"end{RANK}").write_text(hashlib.sha256(b"".join(state)).hexdigest())
