"""A training loop with MindIO's functions, as MindSpeed-LLM has it: ``mindspeed_loop.py FOLDER PORT STEPS PLAN``.

Four ranks are forks of this process, which starts again who was killed, as MindX does. All hold the dense part (with
``sharded@0:0`` its optimizer is in two halves, twice); ranks 0 and 2 hold one expert, 1 and 3 the other. The "device"
is what messages between ranks go through: nobody notices a dead peer, who waits is freed when it is stopped, and behind
that nothing works until it is cleaned. What hangs in it holds up all that comes behind, as a device's stream does.
"""

import hashlib
import io
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from resilient_train.integrations.mindio import finder

finder.install()

from mindio_ttp import framework_ttp as tft  # noqa: E402
from mindio_ttp.framework_ttp.ttp_decorator import get_mindio_export_version  # noqa: E402
from mindio_ttp.utils import tft_set_update_end_time, tft_set_update_start_time  # noqa: E402

FOLDER, PORT, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
PLAN = [each.replace("@", ":").split(":") for each in sys.argv[4].split()]
PLAN = [(kind, int(rank), int(step)) for kind, rank, step in PLAN]
WORLD = 4
RANK = -1
SHARDED, REBOOTS = ("sharded", 0, 0) in PLAN, ("noarf", 0, 0) not in PLAN
DENSE, EXPERTS = 0, 1
FORCE_STOP = "NPU function error: FORCE STOP, error code is 107022"
UCE = "NPU function error: UCE ERROR, error code is 507053"
RETRY_FAILED = "HCCL function error: HCCL OP RETRY FAILED, error code is 507904"


def due(kind: str, step: int) -> bool:
    """A fault of the plan, once."""
    mark = FOLDER / f"done.{kind}.{RANK}.{step}"
    if (kind, RANK, step) not in PLAN or mark.exists():
        return False
    mark.touch()
    return True


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note(name: str, value: object) -> None:
    with (FOLDER / name).open("a") as file:
        file.write(json.dumps(value) + "\n")


class Device:
    def __init__(self) -> None:
        self.stream = threading.Lock()
        self.changed = threading.Condition()
        self.stopped = False
        self.keeps_state = False
        """What it has lost was where no state is."""
        self.inbox: dict[tuple[str, int], torch.Tensor] = {}
        self._server = socket.create_server(("127.0.0.1", 0))
        draft = FOLDER / f"port{RANK}.draft"
        draft.write_text(str(self._server.getsockname()[1]))
        draft.rename(FOLDER / f"port{RANK}")
        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def clean(self) -> None:
        """What is left of steps that were cut counts for nothing."""
        with self.changed:
            self.stopped = False
            self.inbox = {key: value for key, value in self.inbox.items() if not key[0].startswith("step")}

    def exchange(self, name: str, value: torch.Tensor, ranks: list[int]) -> list[torch.Tensor]:
        """What each of them gives, in their order."""
        with self.stream:
            for peer in ranks:
                if peer != RANK:
                    self.send(name, peer, value)
            return [value if peer == RANK else self.receive(name, peer) for peer in ranks]

    def send(self, name: str, peer: int, value: torch.Tensor) -> None:
        buffer = io.BytesIO()
        torch.save(value.detach(), buffer)
        while not (FOLDER / f"port{peer}").exists():
            time.sleep(0.01)
        try:
            with socket.create_connection(("127.0.0.1", int((FOLDER / f"port{peer}").read_text()))) as link:
                link.sendall(json.dumps([name, RANK]).encode() + b"\n" + buffer.getvalue())
                link.shutdown(socket.SHUT_WR)
                link.recv(1)
        except OSError:
            pass  # a dead peer: nobody notices

    def receive(self, name: str, peer: int) -> torch.Tensor:
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or (name, peer) in self.inbox)
            if self.stopped:
                raise RuntimeError(FORCE_STOP)
            return self.inbox.pop((name, peer))

    def _serve(self) -> None:
        while True:
            link, _ = self._server.accept()
            with link, link.makefile("rb") as file:
                try:
                    name, source = json.loads(file.readline())
                    value = torch.load(io.BytesIO(file.read()), weights_only=True)
                except (ValueError, RuntimeError, EOFError, OSError):
                    continue  # its sender was killed
                with self.changed:
                    self.inbox[name, source] = value
                    self.changed.notify_all()
                link.send(b".")


class Model:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.dense = torch.nn.Parameter(torch.randn(8, 8) / 3)
        torch.manual_seed(2 + RANK % 2)
        self.expert = torch.nn.Parameter(torch.randn(8, 8) / 3)

    def part(self, kind: int) -> torch.nn.Parameter:
        return (self.dense, self.expert)[kind]


def company(kind: int) -> tuple[list[int], int]:
    """Ranks that hold this part together, and how many times they do."""
    if kind == EXPERTS:
        return [rank for rank in range(WORLD) if rank % 2 == RANK % 2], 2
    return list(range(WORLD)), 2 if SHARDED else WORLD


class PartOptimizer:
    """Adam on this rank's shard."""

    def __init__(self, kind: int, parameter: torch.nn.Parameter) -> None:
        self.kind, self.parameter = kind, parameter
        ranks, copies = company(kind)
        self.shards = len(ranks) // copies
        place = ranks.index(RANK)
        self.shard = place % self.shards
        self.together = ranks[place - self.shard : place - self.shard + self.shards]
        self.main = torch.nn.Parameter(self._own(parameter.detach()).clone())
        self.adam = torch.optim.Adam([self.main])

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.reshape(self.shards, -1)[self.shard]

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        self.adam.param_groups[0]["lr"] = lr
        self.main.grad = self._own(gradient).clone()
        self.adam.step()

    def gather(self, device: Device, name: str) -> None:
        """The parameter from all shards."""
        found = device.exchange(f"{name}.{self.kind}", self.main.detach(), self.together)
        self.parameter.data.copy_(torch.cat(found).reshape(8, 8))

    def state(self) -> torch.Tensor:
        moments = self.adam.state[self.main]
        step = torch.full_like(self.main, float(moments["step"]))
        return torch.stack([self.main.detach(), moments["exp_avg"], moments["exp_avg_sq"], step])

    def load(self, state: torch.Tensor) -> None:
        main, average, square, step = state
        self.main.data.copy_(main)
        moments = {"step": step[0].clone(), "exp_avg": average.clone(), "exp_avg_sq": square.clone()}
        self.adam.state[self.main] = moments

    def damage(self) -> None:
        self.main.data.fill_(float("nan"))
        self.adam.state[self.main]["exp_avg"].fill_(float("nan"))


class ReplicaOptimizer:
    """Both parts' under one mark, as MindSpeed-LLM's chained optimizer."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parts = [PartOptimizer(kind, model.part(kind)) for kind in (DENSE, EXPERTS)]
        self.current_step = 0

    def step(self, device: Device, iteration: int, gradients: list[torch.Tensor], lr: float) -> None:
        tft.tft_start_updating_os()
        self.current_step = iteration
        tft_set_update_start_time()
        for part, gradient in zip(self.parts, gradients, strict=True):
            part.step(gradient, lr)
            if part.kind == DENSE:
                fault_in_update(self, iteration + 1)
        tft_set_update_end_time()
        self.current_step += 1
        tft.tft_end_updating_os(self.current_step)
        if due("gather", self.current_step):
            raise RuntimeError(RETRY_FAILED)
        self.gather(device, f"step.{self.current_step}.gather")

    def gather(self, device: Device, name: str) -> None:
        for part in self.parts:
            part.gather(device, name)

    def damage(self) -> None:
        for part in self.parts:
            part.damage()
        self.model.dense.data.fill_(float("nan"))
        self.model.expert.data.fill_(float("nan"))


class Scheduler:
    def __init__(self) -> None:
        self.num_steps = 0

    def lr(self) -> float:
        return 0.01 * 0.98**self.num_steps


def fault_in_update(optimizer: ReplicaOptimizer, step: int) -> None:
    if due("killu", step):
        die()
    if due("uceu", step):
        optimizer.damage()
        raise RuntimeError(UCE)


def fault(optimizer: ReplicaOptimizer, step: int) -> None:
    if due("kill", step):
        die()
    if due("raise", step):
        raise ValueError("out of the script")
    if due("hcce", step):
        raise RuntimeError(RETRY_FAILED)
    if due("low", step):
        device.keeps_state = True
        raise RuntimeError(UCE)
    if due("uce", step):
        optimizer.damage()
        raise RuntimeError(UCE)


class Args:
    """Megatron's ``get_args()``."""

    iteration = 0
    reborn = False


args = Args()
device: Device


def train(parts: list, _: list) -> int:
    """``parts``: model, optimizer, scheduler. Handlers may put others in their place, for the next call."""
    model, optimizer, scheduler = parts
    while args.iteration < STEPS:
        step = args.iteration + 1
        fault(optimizer, step)
        model.dense.grad = model.expert.grad = None
        generator = torch.Generator().manual_seed(100 * step + RANK)
        batch = torch.randn(4, 8, generator=generator)
        (torch.tanh(batch @ model.dense) @ model.expert).pow(2).mean().backward()
        gradients = []
        for kind in (DENSE, EXPERTS):
            ranks, _ = company(kind)
            found = device.exchange(f"step.{step}.{kind}", model.part(kind).grad, ranks)
            gradients.append(sum(found[1:], found[0]) / len(ranks))
        optimizer.step(device, args.iteration, gradients, scheduler.lr())
        scheduler.num_steps += 1
        args.iteration += 1
    return args.iteration


@tft.tft_exception_handler
def tft_train(*parts: list) -> int:
    tft.set_mindio_export_version("MindSpeed-LLM")
    if args.reborn:
        raise RuntimeError("ARF FINISH")
    return train(*parts)


def stop(train_args: list, ctx: None) -> None:
    if due("kills", 1):
        die()
    device.stop()


def clean(is_uce: bool, train_args: list, ctx: None) -> int:
    device.clean()
    keeps, device.keeps_state = device.keeps_state, False
    return 2 if is_uce and keeps else 0


def rebuild(fault_ranks: list, train_args: list, ctx: None) -> None:
    """Links find their peers by themselves."""
    assert get_mindio_export_version() == "MindSpeed-LLM"
    args.reborn = False


def repair(step: int, need_rebuild: bool, error_ranks: list, info: dict, train_args: list, ctx: None) -> None:
    parts = train_args[0]
    sends = info["repair_type"] == tft.RepairType.RT_SEND.value
    note(f"repairs{RANK}", {"step": step, "need_rebuild": need_rebuild, "error_ranks": error_ranks, **info})
    if due("killr", step):
        die()
    if info["src"] == info["dst"]:
        return  # nothing is lost
    # Their common group is made by all of them, or by none.
    device.exchange(f"group.{step}.{info['rank_list']}", torch.zeros(1), info["rank_list"])
    if need_rebuild:
        model = parts[0] = Model()
        parts[1] = ReplicaOptimizer(model)
    for kind, source, target in zip(info["type"], info["src"], info["dst"], strict=True):
        if sends:
            assert source == RANK
            device.send(f"repair.{step}.{kind}", target, parts[1].parts[kind].state())
        else:
            assert target == RANK
            parts[1].parts[kind].load(device.receive(f"repair.{step}.{kind}", source))


def rollback(step: int, train_args: list, ctx: None) -> None:
    _, optimizer, scheduler = train_args[0]
    args.iteration = scheduler.num_steps = step
    optimizer.gather(device, f"rollback.{step}")


def save(step: int, save_info: list, train_args: list, ctx: None) -> None:
    folder = FOLDER / f"iter_{step:07d}_tmp"
    folder.mkdir(exist_ok=True)
    note("saves", {"rank": RANK, "info": save_info})
    for info in save_info:
        part = train_args[0][1].parts[info["type"]]
        ranks, _ = company(part.kind)
        own = sorted(info["ranks"], key=lambda rank: ranks.index(rank) % part.shards)
        found = device.exchange(f"save.{step}.{part.kind}", part.state(), own)
        if info["ranks"][0] == RANK:
            torch.save(torch.cat(found, 1), folder / name_of(part.kind))


def name_of(kind: int) -> str:
    return "dense.pt" if kind == DENSE else f"expert{RANK % 2}.pt"


def rename(step: int, train_args: list) -> None:
    assert len(train_args[0]) == 3, "MindSpeed-LLM's gets the arguments of train"
    (FOLDER / f"iter_{step:07d}_tmp").rename(FOLDER / f"iter_{step:07d}")
    note("latest_checkpointed_iteration.txt", step)


def resume(optimizer: ReplicaOptimizer, scheduler: Scheduler) -> None:
    step = int((FOLDER / "latest_checkpointed_iteration.txt").read_text())
    args.iteration = scheduler.num_steps = step
    for part in optimizer.parts:
        whole = torch.load(FOLDER / f"iter_{step:07d}" / name_of(part.kind), weights_only=True)
        part.load(whole.reshape(4, part.shards, -1)[:, part.shard])
    optimizer.gather(device, f"resume.{step}")


def run() -> None:
    """A rank."""
    global device
    torch.set_num_threads(1)
    if RANK == 0:
        tft.tft_init_controller(RANK, WORLD, False, REBOOTS, False)
        tft.tft_start_controller("127.0.0.1", PORT, False, "")
    tft.tft_init_processor(RANK, WORLD, False, False, "", True, REBOOTS, False)
    tft.tft_start_processor("127.0.0.1", PORT)
    args.reborn = tft.tft_is_reboot_node()
    device = Device()
    model = Model()
    optimizer, scheduler = ReplicaOptimizer(model), Scheduler()
    tables = [company(kind) for kind in (DENSE, EXPERTS)]
    told = [{"rank_list": ranks, "replica_cnt": copies, "replica_shift": 0} for ranks, copies in tables]
    tft.tft_set_optimizer_replica(RANK, told)
    tft.tft_set_dp_group_info(RANK, list(range(WORLD)))
    tft.tft_register_save_ckpt_handler(save)
    tft.tft_register_rename_handler(rename)
    tft.tft_register_stop_handler(stop)
    tft.tft_register_clean_handler(clean)
    tft.tft_register_repair_handler(repair)
    tft.tft_register_rollback_handler(rollback)
    tft.tft_register_rebuild_group_handler(rebuild)
    if not args.reborn and (FOLDER / "latest_checkpointed_iteration.txt").exists():
        resume(optimizer, scheduler)
    parts = [model, optimizer, scheduler]
    assert tft_train(parts, [None]) == STEPS
    model, optimizer, _ = parts
    found = [model.dense.detach(), model.expert.detach(), *(part.state() for part in optimizer.parts)]
    digest = hashlib.sha256(b"".join(each.contiguous().numpy().tobytes() for each in found)).hexdigest()
    (FOLDER / f"end{RANK}").write_text(digest)


def fork(rank: int) -> int:
    """The process of a rank."""
    global RANK
    if pid := os.fork():
        return pid
    RANK = rank
    code = 1
    try:
        run()
        code = 0
    finally:
        if code:
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    ranks = {fork(rank): rank for rank in range(WORLD)}
    codes = {}
    while ranks:
        pid, status = os.wait()
        if (rank := ranks.pop(pid, None)) is None:
            continue
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and REBOOTS:
            ranks[fork(rank)] = rank
        else:
            codes[rank] = code
    (FOLDER / "codes").write_text(json.dumps([codes[rank] for rank in range(WORLD)]))


main()
