"""``mindio_ttp``: who finds it, who may talk to its controller, and what its functions refuse."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from resilient_train.errors import ConfigError
from resilient_train.integrations.mindio import provided, wire
from resilient_train.integrations.mindio.controller import (
    MindioController,
    MindioStage,
    Recoveries,
    To,
    TrainingEnded,
    replica_sets,
)
from resilient_train.integrations.mindio.frames import (
    Action,
    CleanOrder,
    Did,
    ExitOrder,
    GoOrder,
    LockOrder,
    Part,
    ProcessorHello,
    RepairOrder,
    RepairType,
    ReplicaGroup,
    Reported,
    ReportState,
    SaveOrder,
    Savers,
    Status,
)
from resilient_train.integrations.mindio.hub import Hub, HubThread
from resilient_train.integrations.mindio.processor import ControllerLostError, Processor
from resilient_train.transport import encode

SECRET = b"s" * 32


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub("127.0.0.1", 0, 2, Recoveries(), SECRET)
    thread = HubThread(made)
    yield made
    thread.close()


def script(text: str, *, path: str = "") -> str:
    code = f"from resilient_train.integrations.mindio import finder; finder.install()\n{text}"
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_it_is_found_where_mindio_is_not() -> None:
    text = "from mindio_ttp import framework_ttp as t; print(t.ReportState.RS_UCE.value, t.tft_is_reboot_node.__name__)"
    assert script(text) == "2 tft_is_reboot_node"
    names = "tft_init_controller, tft_start_controller, tft_destroy_controller"
    assert script(f"from mindio_ttp.controller_ttp import {names}; print('ok')") == "ok"


def test_all_that_mindspeed_llm_imports_is_there() -> None:
    names = (
        "tft_exception_handler, tft_init_controller, tft_start_controller, tft_init_processor, tft_start_processor, "
        "tft_register_rename_handler, set_mindio_export_version, tft_register_save_ckpt_handler, tft_pause_train, "
        "tft_set_optimizer_replica, tft_set_dp_group_info, tft_register_stop_handler, tft_register_clean_handler, "
        "tft_register_repair_handler, tft_register_rollback_handler, tft_register_rebuild_group_handler, "
        "tft_is_reboot_node, tft_register_stream_sync_handler, tft_register_exception_handler, tft_set_step_args, "
        "tft_start_updating_os, tft_end_updating_os, OptimizerType, RepairType"
    )
    text = f"from mindio_ttp.framework_ttp import {names}\n"
    text += "from mindio_ttp.framework_ttp.ttp_decorator import tft_report_load_ckpt_step, get_mindio_export_version\n"
    text += "from mindio_ttp.utils import tft_set_update_start_time, tft_set_update_end_time\n"
    text += "print(get_mindio_export_version()); set_mindio_export_version('MindSpeed-LLM')\n"
    assert script(f"{text}print(get_mindio_export_version())").split() == ["None", "MindSpeed-LLM"]


def test_mindios_own_is_never_hidden(tmp_path: Path) -> None:
    (tmp_path / "mindio_ttp").mkdir()
    (tmp_path / "mindio_ttp/__init__.py").write_text("mine = True")
    (tmp_path / "mindio_ttp/framework_ttp.py").write_text("")
    assert script("import mindio_ttp; print(mindio_ttp.mine)", path=str(tmp_path)) == "True"
    text = "from mindio_ttp import framework_ttp as t; print(hasattr(t, 'tft_report_error'))"
    assert script(text, path=str(tmp_path)) == "False"


def processor(hub: Hub, rank: int, *, world_size: int = 2, secret: bytes = SECRET) -> Processor:
    made = Processor(rank, world_size, secret, end=lambda code: None)
    made.handlers["stop"] = (lambda args, ctx: None, None)
    made.start("127.0.0.1", hub.port, retries=1)
    return made


def until(hub: Hub, stage: MindioStage) -> None:
    deadline = time.monotonic() + 20
    while hub.controller.stage is not stage:
        assert time.monotonic() < deadline, hub.controller.stage
        time.sleep(0.005)


def test_strangers_are_not_let_in(hub: Hub) -> None:
    for rank, world_size, secret in ((0, 2, b"t" * 32), (0, 2, b""), (2, 2, SECRET), (-1, 2, SECRET), (0, 3, SECRET)):
        with pytest.raises(ControllerLostError, match=f"does not let rank {rank} in"):
            processor(hub, rank, world_size=world_size, secret=secret)
    first, second = processor(hub, 0), processor(hub, 1)
    until(hub, MindioStage.TRAINING)
    first.close()
    second.close()


def test_a_recorded_hello_counts_for_nothing(hub: Hub) -> None:
    with socket.create_connection(("127.0.0.1", hub.port)) as recorded:
        number = challenge(recorded)
        hello = encode(ProcessorHello(0, 2, wire.proof(SECRET, number, 0, 2)))
    with socket.create_connection(("127.0.0.1", hub.port)) as again:
        assert challenge(again) != number
        again.sendall(hello)
        assert again.recv(1 << 10) == b""


def challenge(connection: socket.socket) -> bytes:
    frame = wire.from_controller.decode(connection.recv(1 << 10)[4:])
    assert isinstance(frame, wire.Challenge)
    return frame.number


@pytest.mark.parametrize("times", [50, pytest.param(500, marks=pytest.mark.long)])
def test_hostile_frames_have_no_effect(hub: Hub, times: int) -> None:
    """10^4 of them, or 10^5: garbage, frames that claim too much, ranks' frames without a Hello, cut ones."""
    chance = random.Random(1)
    ranks = [processor(hub, 0), processor(hub, 1)]
    until(hub, MindioStage.TRAINING)
    said = (Status(7, updating=True), Reported(ReportState.RS_UNKNOWN), ProcessorHello(0, 2, b"x" * 32))
    whole = [encode(each) for each in said]

    def attack(times: int) -> None:
        for _ in range(times):
            with socket.create_connection(("127.0.0.1", hub.port)) as connection:
                text = chance.choice([chance.randbytes(64), b"\xff\xff\xff\xff" + b"x" * 99, *whole, whole[0][:9]])
                try:
                    for _ in range(50):
                        connection.sendall(text)
                except OSError:
                    pass  # it was shut out

    threads = [threading.Thread(target=attack, args=(times,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hub.controller.stage is MindioStage.TRAINING
    for each in ranks:
        each.set_replicas((ReplicaGroup((0, 1), 2),))
        each.end_updating(1)
    ranks[0].report(ReportState.RS_HCCL_FAILED)
    until(hub, MindioStage.STOPPING)
    for each in ranks:
        each.close()


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [("x" * 32, 0o644, "others may read it"), ("short", 0o600, "has 5 bytes"), (None, 0, "No such file")],
)
def test_a_secret_is_a_secret(tmp_path: Path, content: str | None, mode: int, says: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_text(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=says):
        wire.read_secret(str(path))


def test_where_others_come_a_secret_is_needed() -> None:
    with pytest.raises(ConfigError, match="name one address of this host"):
        wire.check_bind("0.0.0.0", SECRET)
    with pytest.raises(ConfigError, match="RESILIENT_TFT_SECRET_FILE"):
        wire.check_bind("192.0.2.1", b"")
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid: "):
        wire.check_bind("no.such.host.invalid", SECRET)
    wire.check_bind("192.0.2.1", SECRET)
    wire.check_bind("127.0.0.1", b"")


@pytest.mark.parametrize(("address", "info"), [("127.0.0.1", "certificates"), ("192.0.2.1", "")])
def test_tls_is_refused_where_it_would_be_counted_on(address: str, info: str) -> None:
    provided.tft_init_controller(0, 2, enable_local_copy=False)
    with pytest.raises(ConfigError, match="there is no TLS here"):
        provided.tft_start_controller(address, 0, enable_tls=True, tls_info=info)


@pytest.mark.parametrize("name", ["enable_local_copy", "enable_zit"])
def test_what_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=True"):
        provided.tft_init_controller(0, 2, **{"enable_local_copy": False, name: True})


def test_what_nobody_orders_is_refused_where_it_is_reported() -> None:
    with pytest.raises(ConfigError, match="no local copies here"):
        provided.tft_start_copy_os()
    with pytest.raises(ConfigError, match=r"step\(7\): a repair is never made from a periodic checkpoint"):
        provided.tft_report_load_ckpt_step(7)
    names = "tft_start_copy_os, tft_report_load_ckpt_step, ReportState"
    assert script(f"from mindio_ttp.framework_ttp import {names}; print('ok')") == "ok"


def test_taskd_finds_what_it_imports() -> None:
    names = ["init_controller", "start_controller", "destroy_controller", "query_high_availability_switch"]
    names += ["register_mindx_callback", "notify_controller_dump", "notify_controller_stop_train"]
    names += ["notify_controller_on_global_rank", "notify_controller_change_strategy"]
    names += ["notify_controller_prepare_action"]
    imported = ", ".join(f"tft_{name}" for name in names)
    assert script(f"from mindio_ttp.controller_ttp import {imported}; print('ok')") == "ok"


def test_a_loop_that_counts_anew_is_told(hub: Hub) -> None:
    rank = processor(hub, 0)
    rank.end_updating(1)
    rank.end_updating(3)
    with pytest.raises(RuntimeError, match="update 2 is over, behind update 3"):
        rank.end_updating(2)
    rank.close()


def test_who_holds_the_same() -> None:
    assert replica_sets(ReplicaGroup((0, 1, 2, 3), 4)) == ((0, 1, 2, 3),)
    assert replica_sets(ReplicaGroup((4, 5, 6, 7), 2)) == ((4, 6), (5, 7))
    assert replica_sets(ReplicaGroup((0, 1), 1)) == ((0,), (1,))


@pytest.mark.parametrize(
    "told",
    [(), (ReplicaGroup((0,), 1),), (ReplicaGroup((0, 1), 2), ReplicaGroup((0,), 1))],
    ids=["nothing", "one of two groups", "of the experts one of two groups"],
)
def test_of_what_nobody_has_told_nothing_is_made_up(told: tuple[ReplicaGroup, ...]) -> None:
    """Else a rank would get, or save, a part that is not its own, with exit code 0."""
    job = MindioController(2)
    for rank in range(2):
        job.hello(rank)
        job.status(rank, 3, updating=False)
    if told:
        job.replicas(0, told)
    effects = [*job.reported(0, ReportState.RS_HCCL_FAILED)]
    effects += [each for rank in range(2) for each in job.did(rank, Did(job.round, "lock", 0, 3))]
    (ended,) = [each for each in effects if isinstance(each, TrainingEnded)]
    assert ended.saved < 0
    assert "tft_set_optimizer_replica" in ended.reason


def of_two_kinds(dense: int, experts: int) -> MindioController:
    """Four ranks behind update 3. Ranks 0 and 2 are a group of the dense part, 1 and 3 the other, as with two tensor
    parallel ranks; 0 and 1 are one of the experts, 2 and 3 the other. So many copies are in each.
    """
    job = MindioController(4)
    for rank in range(4):
        job.hello(rank)
    for rank in range(4):
        along, across = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert job.replicas(rank, (ReplicaGroup(along, dense), ReplicaGroup(across, experts))) == []
        job.status(rank, 3, updating=False)
    return job


def answered(job: MindioController, order: str) -> list[To]:
    """What it does when all who are asked have answered."""
    effects = [each for rank in sorted(job.pending) for each in job.did(rank, Did(job.round, order, 0, 3))]
    return [each for each in effects if isinstance(each, To)]


def test_each_group_is_saved_by_ranks_of_its_own() -> None:
    """MindSpeed-LLM's handlers make a group of those that they are told of, and the first of them writes."""
    job = of_two_kinds(2, 1)
    job.gone(0)
    job.leave("it is lost")
    saves = {to.rank: to.frame.savers for to in answered(job, "lock") if isinstance(to.frame, SaveOrder)}
    assert saves == {}, "of rank 0's experts nobody has a copy"
    job = of_two_kinds(2, 2)
    job.gone(0)
    job.leave("it is lost")
    saves = {to.rank: to.frame.savers for to in answered(job, "lock") if isinstance(to.frame, SaveOrder)}
    assert saves == {1: (Savers(0, (1,)), Savers(1, (1,))), 2: (Savers(0, (2,)), Savers(1, (2,)))}
    renames = answered(job, "save")
    assert [to.frame.name() for to in renames] == ["rename"]


def test_a_rank_gets_each_kind_from_who_has_it() -> None:
    job = of_two_kinds(2, 2)
    effects = job.reported(1, ReportState.RS_UCE)
    effects = answered(job, "lock")
    for rank in (0, 2, 3):
        job.reported(rank, ReportState.RS_NORMAL)
    answered(job, "stop")
    effects = answered(job, "clean")
    orders = {to.rank: to.frame for to in effects if isinstance(to.frame, RepairOrder)}
    assert {order.ranks for order in orders.values()} == {(0, 1, 3)}
    high, sends = RepairType.RT_UCE_HIGHLEVEL.value, RepairType.RT_SEND.value
    assert {rank: order.parts for rank, order in orders.items()} == {
        0: (Part(1, sends, (0,), (1,)),),
        1: (Part(0, high, (3,), (1,)), Part(1, high, (0,), (1,))),
        3: (Part(0, sends, (3,), (1,)),),
    }


def lone(monkeypatch: pytest.MonkeyPatch, **handlers: Callable[..., object]) -> Processor:
    """Rank 0 behind update 1, without a controller."""
    rank = Processor(0, 4)
    monkeypatch.setattr(rank, "_send", lambda frame: None)
    rank.handlers |= {name: (handler, None) for name, handler in handlers.items()}
    rank.end_updating(1)
    return rank


def test_a_repair_is_one_call_for_all_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """MindSpeed-LLM goes through the lists side by side, sorts the last, and loads all that came at once."""
    calls: list[tuple[bool, list[int], dict[str, object]]] = []
    rank = lone(monkeypatch, repair=lambda step, anew, errors, info, args, ctx: calls.append((anew, errors, info)))
    high, sends, low = RepairType.RT_UCE_HIGHLEVEL, RepairType.RT_SEND, RepairType.RT_UCE_LOWLEVEL
    parts = (Part(0, high.value, (2,), (0,)), Part(1, high.value, (1,), (0,)))
    assert rank._repair(RepairOrder(round=0, step=1, parts=parts, ranks=(0, 1, 2))) == 0
    told = {"type": [0, 1], "repair_type": high.value, "src": [2, 1], "dst": [0, 0], "rank_list": [0, 1, 2]}
    assert calls == [(True, [0, 0], told)]
    calls.clear()
    parts = (Part(0, low.value, (), ()), Part(0, sends.value, (0, 0), (1, 2)), Part(1, sends.value, (0,), (1,)))
    assert rank._repair(RepairOrder(round=0, step=1, parts=parts, ranks=(0, 1, 2))) == 0
    none = {"type": [], "repair_type": low.value, "src": [], "dst": [], "rank_list": [0, 1, 2]}
    told = {"type": [0, 0, 1], "repair_type": sends.value, "src": [0] * 3, "dst": [1, 2, 1], "rank_list": [0, 1, 2]}
    assert calls == [(False, [], none), (False, [1, 2, 1], told)], "the device first"


def test_a_device_is_made_ready_before_what_is_on_it_is_given_away() -> None:
    job = of_two_kinds(2, 2)
    job.reported(0, ReportState.RS_UCE)
    job.reported(2, ReportState.RS_UCE)
    answered(job, "lock")
    for rank in (1, 3):
        job.reported(rank, ReportState.RS_NORMAL)
    answered(job, "stop")
    job.did(0, Did(job.round, "clean", 2, 3))
    orders = {to.rank: to.frame for to in answered(job, "clean") if isinstance(to.frame, RepairOrder)}
    assert [RepairType(part.how).name for part in orders[0].parts] == ["RT_UCE_LOWLEVEL", "RT_SEND"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_device_is_freed_before_the_end_of_life_is_saved(monkeypatch: pytest.MonkeyPatch, *, fails: bool) -> None:
    """The training thread hangs in it, or stands in a pause. What fails does not keep the state from being saved."""
    said: list[str] = []

    def stop(args: object, ctx: object) -> None:
        said.append("stop")
        if fails:
            raise ValueError("no device")

    rank = lone(
        monkeypatch,
        stop=stop,
        clean=lambda uce, args, ctx: said.append(f"clean {rank._waits}"),
        save_ckpt=lambda step, info, args, ctx: said.append(f"save {step} {info}"),
    )
    monkeypatch.setattr("resilient_train.integrations.mindio.processor._STOP_S", 10)
    rank.cleans_before_save = True
    rank._limit = 1

    def train() -> None:
        with pytest.raises(RuntimeError, match="FORCE STOP"):
            rank.pause(1)
        time.sleep(0.1)  # what it raises out of takes its time, and is waited for
        rank.report(ReportState.RS_NORMAL)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    rank._save(SaveOrder(round=0, step=1, savers=(Savers(1, (0, 2)),)))
    thread.join(10)
    assert not thread.is_alive()
    saved = "save 1 [{'type': 1, 'ranks': [0, 2]}]"
    assert said == (["stop", saved] if fails else ["stop", "clean True", saved])


class Npu:
    """``torch_npu.npu``: each thread has a device of its own choice, and begins with device 0."""

    def __init__(self) -> None:
        self._chosen = threading.local()
        self.emptied: list[int] = []
        self.npu = self

    def current_device(self) -> int:
        return int(getattr(self._chosen, "device", 0))

    def set_device(self, device: int) -> None:
        self._chosen.device = device

    def empty_cache(self) -> None:
        self.emptied.append(self.current_device())


def test_handlers_run_on_the_device_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    npu = Npu()
    monkeypatch.setitem(sys.modules, "torch_npu", npu)
    npu.set_device(3)
    seen = []
    rank = lone(monkeypatch, clean=lambda uce, args, ctx: seen.append(npu.current_device()) or 0)
    thread = threading.Thread(target=rank._carry_out, args=(CleanOrder(round=0, uce=False),))
    thread.start()
    thread.join()
    assert (seen, npu.emptied) == ([3], [3])


def test_who_is_to_go_on_goes_on_though_the_controller_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last update another rank may be at its end before this one has heard of it."""
    rank = lone(monkeypatch)
    rank.report(ReportState.RS_HCCL_FAILED)
    rank._go(GoOrder(round=1, step=1))
    rank._let_go()
    assert rank.wait_next_action() is Action.RETRY
    rank.report(ReportState.RS_HCCL_FAILED)  # nobody hears it
    assert rank.wait_next_action() is Action.EXIT
    rank.report(ReportState.RS_UNKNOWN, limit_s=1e9)
    assert rank.wait_next_action() is Action.EXIT


def test_a_replica_table_is_in_the_order_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells it: MindIO sorts it."""
    told: list[tuple[ReplicaGroup, ...]] = []
    rank = lone(monkeypatch)
    monkeypatch.setattr(rank, "set_replicas", told.append)
    monkeypatch.setattr(provided, "_processor", rank)
    provided.tft_set_optimizer_replica(0, [{"rank_list": [2, 0, 3, 1], "replica_cnt": 2, "replica_shift": 0}])
    assert told == [(ReplicaGroup((0, 1, 2, 3), 2),)]


def test_a_framework_that_decorates_its_loop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = lone(monkeypatch)
    monkeypatch.setattr(provided, "_processor", rank)
    monkeypatch.setattr(provided, "_framework", "")
    provided.tft_set_step_args("first")
    with pytest.raises(ValueError, match="'Megatron' is neither MindSpeed nor MindSpeed-LLM"):
        provided.set_mindio_export_version("Megatron")
    assert not rank.cleans_before_save
    provided.set_mindio_export_version("MindSpeed-LLM")
    provided.tft_set_step_args("then")
    assert (rank.args, rank.cleans_before_save) == ("first", True)


def test_a_loop_that_begins_again_counts_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a repair, and where it goes back by itself (MindSpore's TRE). The callback adds its ``initial_step``, and
    those of MindSpore Transformers that of the loop's parameters.
    """
    rank = lone(monkeypatch)
    rank.handlers["stop"] = lambda *_: 0, SimpleNamespace(initial_step=100)

    def begins(initial: int | None) -> tuple[int, int | None]:
        args = SimpleNamespace(cur_step_num=0, initial_step=initial)
        rank.set_args(args)
        return args.cur_step_num, args.initial_step

    assert begins(None) == (0, None)
    rank.end_updating(105)
    rank.report(ReportState.RS_HCCL_FAILED)
    rank._go(GoOrder(round=1, step=105))
    assert begins(None) == (5, 100), "repaired"
    rank.end_updating(106)
    assert begins(102) == (2, 100), "by itself, though it was repaired before"
    rank.end_updating(103)
    rank.report(ReportState.RS_HCCL_FAILED)
    rank._go(GoOrder(round=2, step=103))
    assert begins(102) == (3, 100), "repaired, whatever it went back to before"
    rank.end_updating(104)
    assert begins(104) == (4, 100), "to where it is"
    rank.mark_updating()
    rank.mark_updating()
    rank.end_updating(105)
    assert begins(None) == (0, None), "a second training"
    with pytest.raises(RuntimeError, match="counts anew"):
        rank.end_updating(101)
    rank.set_args("of another framework")


class Count:
    """MindSpore's, of updates; in parameters that were loaded."""

    def __init__(self, value: int) -> None:
        self.value = value

    def asnumpy(self) -> Any:
        return np.array([self.value])


@pytest.mark.parametrize("tells", [True, False], ids=["an end is told", "no end is told"])
def test_what_was_loaded_and_is_not_what_is_trained_is_seen(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """By the first update behind it, or where the callback's own flag was loaded as well, when more are begun."""
    rank, sent = lone(monkeypatch), list[object]()
    monkeypatch.setattr(rank, "_send", sent.append)
    for step in (2, 3, 4):
        rank.mark_updating()
        rank.end_updating(step)
    optimizer = SimpleNamespace(global_step=Count(2))
    rank.set_args(SimpleNamespace(cur_step_num=0, initial_step=2, optimizer=optimizer))
    if tells:
        rank.mark_updating()
        with pytest.raises(RuntimeError, match="has not changed the parameters that were loaded"):
            rank.end_updating(3)
    else:
        for _ in range(3):
            assert not any(isinstance(each, Reported) for each in sent)
            rank.mark_updating()
        assert any(isinstance(each, Reported) for each in sent)
        with pytest.raises(RuntimeError, match="has not changed the parameters that were loaded"):
            rank.close()
    assert not rank._holds(2)


def test_a_load_that_is_trained_on_is_none_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a process that came back, and has told of no update yet."""
    rank = lone(monkeypatch)
    optimizer = SimpleNamespace(global_step=Count(0))
    rank.set_args(SimpleNamespace(cur_step_num=0, initial_step=0, optimizer=optimizer))
    rank.mark_updating()
    rank.mark_updating()
    optimizer.global_step.value = 1
    rank.end_updating(1)
    rank.close()


def test_who_comes_when_all_is_over_is_sent_away() -> None:
    job = MindioController(1)
    job.hello(0)
    job.gone(0)
    assert job.stage is MindioStage.OVER
    assert job.hello(0) == [To(0, ExitOrder(round=job.round))]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (ReplicaGroup((0, 1), 2), ReplicaGroup((0,), 1), "names a rank twice"),
        (ReplicaGroup((0, 1), 2), ReplicaGroup((0, 1), 1), "contradicts"),
        (ReplicaGroup((0, 1), 2), ReplicaGroup((1, 2), 2), "that the job has not"),
        (ReplicaGroup((0, 1), 2), ReplicaGroup((0, 1), 3), "can't hold 3 copies"),
        (ReplicaGroup((0, 1), 2), ReplicaGroup((0, 1), 2, shift=1), "replica_shift is 1"),
    ],
)
def test_replica_groups_that_can_not_be_right_end_the_job(first: ReplicaGroup, second: ReplicaGroup, says: str) -> None:
    job = MindioController(2)
    job.hello(0)
    job.hello(1)
    assert job.replicas(0, (first,)) == []
    (ended,) = [each for each in job.replicas(1, (second,)) if isinstance(each, TrainingEnded)]
    assert says in ended.reason
    assert job.stage is MindioStage.OVER


@pytest.mark.parametrize("late", [False, True])
def test_who_left_its_loop_in_an_update_has_no_whole_state(monkeypatch: pytest.MonkeyPatch, *, late: bool) -> None:
    """Whatever clean says of the memory: what was half written is not whole. A device's mark may come late."""
    rank = Processor(0, 1)
    monkeypatch.setattr(rank, "_send", lambda frame: None)
    rank.handlers |= {"clean": (lambda uce, args, ctx: 2, None), "repair": (lambda *told: None, None)}
    rank.end_updating(1)
    if not late:
        rank.start_updating()
    rank.report(ReportState.RS_UCE)
    if late:
        rank.mark_updating()
    assert rank._lock(LockOrder(round=0, limit=1)) == 1, "at once: nothing more comes of that update"
    rank._clean(CleanOrder(round=0, uce=True))
    assert rank._lock(LockOrder(round=0, limit=1)) == 1
    part = Part(0, RepairType.RT_RECV_REPAIR.value, (1,), (0,))
    rank._repair(RepairOrder(round=0, step=1, parts=(part,), ranks=(0, 1)))
    assert rank._lock(LockOrder(round=0, limit=1)) == 0


def test_memory_that_was_lost_where_no_state_is_leaves_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Processor(0, 1)
    monkeypatch.setattr(rank, "_send", lambda frame: None)
    rank.handlers["clean"] = (lambda uce, args, ctx: 2, None)
    rank.end_updating(1)
    rank.report(ReportState.RS_UCE)
    assert rank._lock(LockOrder(round=0, limit=1)) == 1
    rank._clean(CleanOrder(round=0, uce=True))
    assert rank._lock(LockOrder(round=0, limit=1)) == 0


@pytest.mark.parametrize("tells", [True, False], ids=["", "TSP alone"])
def test_pauses_in_a_fast_loop(hub: Hub, *, tells: bool) -> None:
    """What is known of a rank's step is always old here: they have passed each place before they hear of it.

    With TSP alone MindSpore's callback tells of no update, and counts anew in each training.
    """
    ranks = [processor(hub, 0), processor(hub, 1)]
    until(hub, MindioStage.TRAINING)
    wanted, over = threading.Event(), threading.Event()
    collective = threading.Barrier(2, action=lambda: over.set() if wanted.is_set() else None, timeout=20)
    steps = [0, 0]

    def train(rank: int) -> None:
        while not over.is_set():
            steps[rank] += 1
            if tells:
                ranks[rank].start_updating()
                ranks[rank].end_updating(steps[rank])
            ranks[rank].pause(steps[rank] if tells else steps[rank] % 7)
            collective.wait()

    def order(what: Callable[[], None]) -> None:
        given = threading.Event()
        hub._server.get_loop().call_soon_threadsafe(lambda: (what(), given.set()))
        assert given.wait(20)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        order(hub.pause)
        until(hub, MindioStage.PAUSED)
        stands = [*steps]
        assert stands[0] == stands[1]
        time.sleep(0.002)
        assert steps == stands
        order(hub.unpause)
    wanted.set()
    for thread in threads:
        thread.join()
    assert steps[0] == steps[1] > 30
    for rank in ranks:
        rank.close()
