"""A training loop with MindIO's functions, as MindSpore's callback and model use them: ``mindio_loop.py FOLDER STEPS
PLAN``. Rank 0 starts the controller, as MindSpore's does, where ``resilient-run`` has none.

The "device" is a dictionary; collectives go through files in FOLDER, and can be aborted: what hangs in one raises.
"""

import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

if os.environ.get("MS_ROLE") == "MS_SCHED":
    sys.exit(0)

from mindio_ttp import controller_ttp
from mindio_ttp import framework_ttp as tft

RANK, WORLD = int(os.environ["MS_NODE_ID"]), int(os.environ["MS_WORKER_NUM"])
WHERE = os.environ["MS_TFT_IP"], int(os.environ["MS_TFT_PORT"])
FOLDER, STEPS = Path(sys.argv[1]), int(sys.argv[2])
PLAN = [each.replace("@", ":").split(":") for each in sys.argv[3].split()] if len(sys.argv) > 3 else []
PLAN = [(kind, int(rank), int(step)) for kind, rank, step in PLAN]
logging.basicConfig(level=logging.INFO, format=f"%(asctime)s [{RANK}] %(message)s")
log = logging.getLogger()


def write(path: Path, value: list) -> None:
    """Whole, or not at all."""
    draft = Path(f"{path}.by{RANK}")
    draft.write_text(json.dumps(value))
    draft.rename(path)


class Device:
    def __init__(self) -> None:
        self.model = [float(index) for index in range(8)]
        self.moments = [0.0] * 8
        self.step = 0
        self.aborted = threading.Event()
        self.stopped = threading.Event()
        """And not cleaned since: what comes from another rank would belong to a recovery that is given up."""

    def reduce(self, name: str, value: list[float]) -> list[float]:
        """The sum over all ranks, the same whenever it is asked for. Raises RuntimeError where it is aborted."""
        own = FOLDER / f"{name}.{RANK}"
        write(own, value)
        found = []
        for rank in range(WORLD):
            path = FOLDER / f"{name}.{rank}"
            while not path.exists():
                if self.aborted.wait(0.002):
                    raise RuntimeError("FORCE STOP, ForceStopError: aborted")
            found.append(json.loads(path.read_text()))
        return [sum(column) for column in zip(*found, strict=True)]


device = Device()


def due(kind: str, step: int) -> bool:
    """A fault of the plan, once."""
    if (kind, RANK, step) not in PLAN:
        return False
    mark = FOLDER / f"done.{kind}.{RANK}.{step}"
    if mark.exists():
        return False
    mark.touch()
    return True


def die() -> None:
    log.info("dies")
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """In native code that no exception ends. It lets other threads run."""
    while True:
        ctypes.CDLL(None).pause()


def stop(args, ctx) -> None:
    if due("kills", 1):
        die()
    if due("freezes", 1):
        os.kill(os.getpid(), signal.SIGSTOP)
    device.aborted.set()
    device.stopped.set()


def clean(is_uce, args, ctx) -> int:
    device.stopped.clear()
    return 2 if is_uce and ctx["low"] else 0


def rebuild(fault_ranks, args, ctx) -> None:
    log.info("rebuilds without %s", fault_ranks)


def repair(step, need_rebuild, error_ranks, info, args, ctx) -> None:
    log.info("repairs %s for step %d", info, step)
    if info["repair_type"] == tft.RepairType.RT_UCE_LOWLEVEL.value:
        return
    if info["repair_type"] == tft.RepairType.RT_SEND.value:
        if due("killr", 1):
            die()
        for target in info["dst"]:
            path = FOLDER / f"state.{target}.{step}"
            write(path, [device.model, device.moments, device.step])
        return
    path = FOLDER / f"state.{RANK}.{step}"
    # Who sends may have been killed: then nothing comes, and all are stopped once more.
    while not path.exists():
        if device.stopped.wait(0.002):
            raise RuntimeError("FORCE STOP, ForceStopError: aborted")
    device.model, device.moments, device.step = json.loads(path.read_text())
    path.unlink()


def rollback(step, args, ctx) -> None:
    device.step = step


def save(step, info, args, ctx) -> None:
    assert device.step == step
    if due("stucks", 1):
        hang()
    folder = FOLDER / f"ckpt-{step}_tmp"
    folder.mkdir(exist_ok=True)
    (folder / f"rank_{RANK}").write_text(json.dumps({"step": device.step, "model": device.model, "info": info}))


def rename(step, ctx) -> None:
    if due("killm", 1):
        die()
    (FOLDER / f"ckpt-{step}_tmp").rename(FOLDER / f"ckpt-{step}")
    if due("killn", 1):
        die()
    if due("stuckn", 1):
        hang()


def leave(ctx) -> None:
    os._exit(1)


CONTEXT = {"low": False}


def one_step() -> None:
    step = device.step + 1
    if ("pace", 0, 0) in PLAN:
        time.sleep(0.02)
    if due("hold", step):
        while not (FOLDER / "go").exists():
            time.sleep(0.01)
    if due("leave", step):
        sys.exit(0)
    if due("freeze", step):
        os.kill(os.getpid(), signal.SIGSTOP)
    if due("stuck", step):
        hang()
    if due("kill", step) or ("die", RANK, step) in PLAN:
        die()
    for kind in ("hcce", "uce", "low", "raise"):
        if due(kind, step):
            CONTEXT["low"] = kind == "low"
            if kind == "uce":
                device.model = [float("nan")] * 8
            text = {"hcce": "HCCL OP RETRY FAILED, HCCEError", "raise": "out of the script"}.get(
                kind, "UCE ERROR, UCEError"
            )
            raise RuntimeError(text)
    gradient = device.reduce(f"grad{step}", [value * (RANK + 1) / 8 + step for value in device.model])
    tft.tft_start_updating_os(-1)
    for index, value in enumerate(gradient):
        device.moments[index] = device.moments[index] * 0.9 + value
        device.model[index] -= device.moments[index] / 100
        if index == 3 and due("killu", step):
            die()
        if index == 3 and due("stucku", step):
            hang()
        if index == 3 and due("works", step):
            deadline = time.monotonic() + 2
            # On a busy machine computing alone may be too little.
            with Path("/dev/zero").open("rb", buffering=0) as file:
                while time.monotonic() < deadline:
                    hashlib.sha256(file.read(1 << 20))
    device.step = step
    tft.tft_end_updating_os(step)
    tft.tft_pause_train(step)


def train() -> None:
    arf = tft.tft_is_reboot_node()
    if arf:
        if due("killb", 1):
            die()
        tft.tft_report_error(tft.ReportState.RS_INIT_FINISH.value)
        assert tft.tft_get_reboot_type() == "arf"
        assert tft.tft_wait_next_action() == tft.Action.RETRY.value
    tft.tft_set_step_args({"device": device})
    tft.tft_set_optimizer_replica(
        RANK, [{"type": 1, "rank_list": list(range(WORLD)), "replica_cnt": WORLD, "replica_shift": 0}]
    )
    (train_decorated if ("decorated", 0, 0) in PLAN else train_by_hand)(arf=arf)


ARF = []


@tft.tft_exception_handler
def train_decorated(*, arf: bool) -> None:
    """As MindSpeed's loops have it."""
    device.aborted.clear()
    if arf and not ARF:
        ARF.append("told")
        raise RuntimeError("ARF FINISH")
    if device.step:
        (FOLDER / "resumed").touch()
    while device.step < STEPS:
        one_step()


def train_by_hand(*, arf: bool) -> None:
    """As MindSpore's Model has it."""
    while device.step < STEPS:
        try:
            if arf:
                arf = False
                raise RuntimeError("ARF FINISH")
            one_step()
        except RuntimeError as error:
            text = str(error)
            log.info("raises %s", text)
            states = {
                "UCEError": "RS_UCE",
                "HCCEError": "RS_HCCL_FAILED",
                "ForceStopError": "RS_NORMAL",
                "ARF FINISH": "RS_PREREPAIR_FINISH",
            }
            state = next((state for words, state in states.items() if words in text), "RS_UNKNOWN")
            tft.tft_report_error(tft.ReportState[state].value)
            if state == "RS_UNKNOWN":
                raise
            if tft.tft_wait_next_action() == tft.Action.EXIT.value:
                raise
            assert tft.tft_get_repair_step() == device.step
            device.aborted.clear()
            (FOLDER / "resumed").touch()


if RANK == 0 and "MINDX_TASK_ID" not in os.environ:
    controller_ttp.tft_init_controller(RANK, WORLD, False, enable_arf=True)
    controller_ttp.tft_start_controller(*WHERE, False, "")
tft.tft_init_processor(RANK, WORLD, False, False, "", enable_arf=True)
tft.tft_start_processor(*WHERE)
for name, handler in {
    "save_ckpt": save,
    "rename": rename,
    "exit": leave,
    "stop": stop,
    "clean": clean,
    "rebuild_group": rebuild,
    "repair": repair,
    "rollback": rollback,
}.items():
    getattr(tft, f"tft_register_{name}_handler")(handler, CONTEXT)
train()
tft.tft_destroy_processor()
state = json.dumps([device.model, device.moments, device.step])
(FOLDER / f"end{RANK}").write_text(hashlib.sha256(state.encode()).hexdigest())
