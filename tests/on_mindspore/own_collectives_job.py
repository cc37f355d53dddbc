"""``Model.train`` with MindSpore's own collectives and our ``FaultTolerance``: ``own_collectives_job.py FOLDER``, and
the rank that dies (or ``hangs``), and the step in which it does, once; or ``slow``; or ``from``, and the folder in
which another one has saved. Ends with a digest of all state.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import nn
from mindspore.communication import get_group_size, get_rank, init
from mindspore.train import Callback, Model
from saved_job import BATCHES, EPOCHS, dataset, digest

from resilient_train.integrations.mindspore import FaultTolerance

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
init()  # the scheduler stays in here

FOLDER, *ARGUMENTS = sys.argv[1:]
SAVED = Path(ARGUMENTS[1] if ARGUMENTS[:1] == ["from"] else FOLDER) / "saved"
DIES = [int(each) for each in ARGUMENTS if each.isdecimal()]
RANK, WORLD = get_rank(), get_group_size()


class Death(Callback):
    def on_train_step_begin(self, run_context: Any) -> None:
        step = run_context.original_args().cur_step_num
        print("step", step, flush=True)
        time.sleep(0.3 * ("slow" in ARGUMENTS))
        if [RANK, step] == DIES and start.step < step - 1:
            if "hangs" in ARGUMENTS:
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGKILL)


def model() -> Model:
    ms.set_seed(7)
    network = nn.SequentialCell(nn.Dense(48, 16), nn.ReLU(), nn.Dense(16, 1))
    rate = nn.exponential_decay_lr(0.01, 0.9, EPOCHS * BATCHES, BATCHES, 1)
    return Model(network, nn.MSELoss(), nn.Adam(network.trainable_params(), learning_rate=rate))


ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
trained, data = model(), dataset(RANK, WORLD)
own = FaultTolerance(SAVED, snapshot_every=1, step_grace_s=1)
start = own.resume(trained, data)
print("start", start.step, flush=True)
trained.train(EPOCHS, data, callbacks=[own, Death()], dataset_sink_mode=False, initial_epoch=start.epoch)
Path(FOLDER, f"end{RANK}").write_text(digest(trained))
