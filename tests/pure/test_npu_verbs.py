"""torch_npu's verbs: which, in what order, with which arguments; no NPU, but the signatures of the real wheel."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is

from pure import npu_signatures  # noqa: E402
from pure.probe_rig import COMM, Copy  # noqa: E402
from pure.recorded_npu import RecordedNpu  # noqa: E402
from resilient_train._native import Board  # noqa: E402
from resilient_train.errors import ConfigError, DeviceError, TransferError  # noqa: E402
from resilient_train.frameworks.accelerator import Host  # noqa: E402
from resilient_train.frameworks.roles import Damage, Engine, Objects  # noqa: E402
from resilient_train.frameworks.torch import groups as groups_module  # noqa: E402
from resilient_train.frameworks.torch import state as state_module  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.frameworks.torch_npu import device as npu_device  # noqa: E402
from resilient_train.frameworks.torch_npu.device import NpuDevice  # noqa: E402
from resilient_train.protocol import rank_effects as do  # noqa: E402
from resilient_train.protocol import rank_events as on  # noqa: E402
from resilient_train.session.device_errors import DeviceErrors  # noqa: E402
from resilient_train.session.driver import Driver  # noqa: E402
from resilient_train.session.from_replica import FromReplica  # noqa: E402
from resilient_train.state.transfer import Span, view  # noqa: E402
from resilient_train.testing.fake_device import FakeDevice  # noqa: E402

UNDAMAGED = Damage(frozenset(), (), 0)
STOP = ("stop_device", {"device_id": 3})
CHECK = ("check_uce_in_memory", {"device_id": 3})
RESTART = ("restart_device", {"device_id": 3})
RESUME_LINKS = ("reinit_process_group", {"group": None, "rebuild_link": False})
NEW_LINKS = ("reinit_process_group", {"group": None, "rebuild_link": True})
NOTHING_LEFT = "nothing is called after the verb that failed"


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> RecordedNpu:
    recorded = RecordedNpu()
    monkeypatch.setitem(sys.modules, "torch_npu", recorded.module)
    monkeypatch.setattr(npu_device, "NPU", "cpu")  # the tensors here lie there
    return recorded


def trained_engine() -> Engine:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return engine_for(Objects((model,), (optimizer,), (), None, {}, {}))


def first_weight(engine: Engine) -> torch.Tensor:
    state: Any = engine.state
    weight: torch.Tensor = state.tensors()["model", 0, "0.weight"]
    return weight


def accelerator_of(engine: Engine) -> type:
    groups: Any = engine.groups
    return type(groups._accelerator)


def recover(engine: Engine, damage: Damage = UNDAMAGED, *, replaced: bool = False) -> Damage:
    """The engine's part from Quiesce to Build, as ``session/driver.py`` asks for it."""
    engine.groups.close()
    confirmed = engine.device.confirm(damage)
    engine.groups.adopt([], replaced=replaced)
    return confirmed


def mend(engine: Engine, damage: Damage) -> int:
    """From a replica in this process; returns the bytes that were fetched."""
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.delitem(sys.modules, "torch_npu")
        offer = trained_engine().state.sources()

    def fetch(local: list[Span]) -> None:
        for there, here in zip(offer.spans, local, strict=True):
            if here.size:
                view(here)[:] = view(there)

    return engine.state.mend(offer.manifest, fetch, offer.digest, damage)


def report(engine: Engine, tensor: torch.Tensor | None) -> Damage:
    """The device tells of a range: in this tensor, or in memory that nobody knows."""
    device: Any = engine.device
    device._unchecked = True
    address = tensor.data_ptr() if tensor is not None else 64
    return device.assess([Span(address, 8)])


# -- the order, for each kind of fault


def test_memory_error_in_a_parameter(
    npu: RecordedNpu, device: FakeDevice, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the device's own list to the repaired bits. torch_npu repairs the addresses, so we must not."""
    monkeypatch.setenv("RESILIENT_ACL_LIBRARY", copy("libascendcl.so"))
    engine = trained_engine()
    engine.device.watch(lambda probes: probes.alarm(Board.create(1), 0))
    victim = first_weight(engine)
    device.set_uce([(victim.data_ptr() + 16, 64)])
    (hit,) = engine.device.errors(wait=True)
    npu.take()
    npu.answer("npu.check_uce_in_memory", 3)
    address = victim.data_ptr()
    assert (hit.address, hit.size) == (address + 16, 64)
    damage = engine.device.assess([hit])
    assert npu.take() == [], "what stands behind the `with` of the step may still use the device"
    assert damage.replicated == {("model", 0, "0.weight")}
    assert recover(engine, damage) == damage
    assert npu.take() == [STOP, CHECK, RESUME_LINKS, RESTART]
    assert mend(engine, damage) == 8 * 8 * 4 + sum(8 * 4 * 2 + 8 for _ in ("mean, variance and count of BatchNorm",))
    marked = npu.take()
    assert {name for name, _ in marked} == {"update_npu_tensor_to_safe"}
    tensors = [call["tensor_obj"] for _, call in marked]
    assert any(tensor.data_ptr() == address for tensor in tensors)
    assert len(tensors) >= 6 + 3 * 6 + 3, "parameters, moments with their counts, buffers"
    engine.device.close()
    assert device.calls("aclrtMemUceRepair") == []
    mend(engine, damage)
    assert npu.take() == [], "marked once"


def test_memory_error_in_temporary_memory(npu: RecordedNpu) -> None:
    engine = trained_engine()
    npu.take()
    npu.answer("npu.check_uce_in_memory", 2)
    damage = report(engine, None)
    assert not recover(engine, damage).lost
    assert npu.take() == [STOP, CHECK, RESUME_LINKS, RESTART]


def test_collective_that_failed(npu: RecordedNpu) -> None:
    engine = trained_engine()
    npu.take()
    assert recover(engine) is UNDAMAGED
    assert npu.take() == [STOP, CHECK, RESUME_LINKS, RESTART]


def test_replaced_peer(npu: RecordedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_engine()
    npu.take()
    monkeypatch.setattr(groups_module, "hccl_groups", lambda: ["one", "another"])
    npu.answer("distributed.reinit_process_group", "the group")
    recover(engine, replaced=True)
    others = [("reinit_process_group", {"group": each, "rebuild_link": True}) for each in ("one", "another")]
    assert npu.take() == [STOP, CHECK, RESTART, NEW_LINKS, *others]


def test_groups_that_hccl_serves() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        other = dist.new_group([0])
        assert groups_module.hccl_groups() == []
        for each, (_, store) in list(dist.distributed_c10d._world.pg_map.items()):
            dist.distributed_c10d._world.pg_map[each] = ("cpu:gloo,npu:hccl", store)
        assert groups_module.hccl_groups() == [other]
    finally:
        dist.destroy_process_group()


def test_the_device_knows_of_more(npu: RecordedNpu) -> None:
    """Several bits flipped: no address. Or it lies in a tensor that the Session does not know. All is fetched."""
    engine = trained_engine()
    state: Any = engine.state
    npu.answer("npu.check_uce_in_memory", 3)
    for damage in (UNDAMAGED, report(engine, None)):
        everything = recover(engine, damage)
        assert everything.replicated == set(state.tensors())
        assert everything.own == tuple(state._rank_state.buffers.changed())
        npu.take()
        mend(engine, everything)
        assert {name for name, _ in npu.take()} == {"update_npu_tensor_to_safe"}


class QuietDriver(Driver):
    """What a Driver needs for its Quiesce, which an engine alone answers."""

    def __init__(self, engine: Any) -> None:
        self.events: list[str] = []
        peers: Any = SimpleNamespace(rank=0, alarms=list, clear_alarms=lambda: None, stop_generation=4)
        nothing: Any = SimpleNamespace(wait=lambda: None, notice=lambda _: None, lift=lambda: None, hold=lambda: None)
        self._engine, self._peers, self._descriptors, self._children = engine, peers, nothing, nothing
        self.saving = self._stop_delivery = nothing
        self._link: Any = SimpleNamespace(rank=0)
        self._clock: Any = SimpleNamespace(stop=lambda: None)
        self._device = DeviceErrors(peers, engine.device, self._event, mends=True)
        self._notices: Any = SimpleNamespace(event=self._event)
        self._from_replica = FromReplica(self._link, engine.state, engine.window, engine.groups, nothing, "auto")

    def _event(self, kind: str, detail: dict[str, Any]) -> None:
        self.events.append(f"{kind}: {detail.get('tensors', detail.get('error'))}")


def stopped_engine(found: Damage) -> Any:
    groups = SimpleNamespace(sockets=list, close=lambda: None)
    device = SimpleNamespace(confirm=lambda _: found, errors=lambda wait: [], notes=list)
    return SimpleNamespace(groups=groups, device=device, state=None, window=None)


def test_damage_that_only_the_check_finds() -> None:
    everything = Damage(frozenset({("model", 0, "weight")}), (), 0)
    driver = QuietDriver(stopped_engine(everything))
    assert driver._quiesce(do.Quiesce(tail=False)) == on.Quieted(4, damaged=True)
    driver._device.confirmed(everything)
    assert driver.events == ["uce: ['model.0.weight']"], "told once"
    with pytest.raises(DeviceError, match="after the update, where a step can't be left"):
        QuietDriver(stopped_engine(everything))._quiesce(do.Quiesce(tail=True))


def test_second_fault_before_the_restart(npu: RecordedNpu) -> None:
    engine = trained_engine()
    npu.take()
    damage = report(engine, first_weight(engine))
    npu.answer("npu.check_uce_in_memory", 3)
    engine.groups.close()
    damage = engine.device.confirm(damage)
    recover(engine, damage, replaced=True)
    assert npu.take() == [STOP, CHECK, CHECK, RESTART, NEW_LINKS]


def test_second_fault_after_the_restart(npu: RecordedNpu) -> None:
    """torch_npu has forgotten by then; what the first check said still holds."""
    engine = trained_engine()
    damage = report(engine, first_weight(engine))
    npu.answer("npu.check_uce_in_memory", 3)
    damage = recover(engine, damage)
    npu.answer("npu.check_uce_in_memory", 0)
    npu.take()
    assert recover(engine, damage) == damage
    assert npu.take() == [STOP, CHECK, RESUME_LINKS, RESTART]
    mend(engine, damage)
    assert npu.take()


def test_a_process_that_joins_stops_nothing(npu: RecordedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_engine()
    npu.take()
    solo = SimpleNamespace(solo=True, shut=lambda: None, suspend=lambda why: None, adopt=lambda built: None)
    monkeypatch.setattr(groups_module, "groups", {"world": solo})
    engine.groups.close()
    engine.device.confirm(UNDAMAGED)
    engine.groups.adopt([None], replaced=True)
    assert npu.take() == []


def test_the_device_is_done_before_it_may_be_stopped(npu: RecordedNpu) -> None:
    """Before READY and before APPLIED. What it was still doing would be lost, and the others would not know."""
    engine = trained_engine()
    npu.take()
    driver = QuietDriver(engine)
    assert driver._check_collectives(do.CheckCollectives()) == on.Ok(1)
    engine.device.synchronize()
    assert npu.take() == [("synchronize", {"device": 3})] * 2
    npu.answer("npu.synchronize", RuntimeError("UCE ERROR, error code is 507053"))
    with pytest.raises(RuntimeError, match="507053"):
        driver._check_collectives(do.CheckCollectives())


def test_a_thread_that_waits_in_the_device_is_freed(npu: RecordedNpu) -> None:
    """By another thread, and only while all that the device does would be done again."""
    accelerator = NpuDevice(npu.module, 0)
    npu.take()
    assert accelerator.cut() == 0, "between bodies"
    accelerator.lend()
    assert accelerator.cut() == 1
    assert accelerator.cut() == 0, "once"
    assert npu.take() == [("set_device", {"device": 3}), STOP]
    with pytest.raises(RuntimeError, match="FORCE STOP: NPU 3 was stopped while rank 0 waited for it"):
        accelerator.synchronize()
    npu.take()
    accelerator.take_back()
    assert npu.take() == [CHECK, RESUME_LINKS, RESTART], "what stands behind the body may use the device"
    accelerator.lend()
    accelerator.synchronize()
    assert accelerator.cut() == 0, "the update begins"
    accelerator.lend()
    accelerator.stop()
    accelerator.check(reported=False)
    accelerator.restart((), replaced=False)
    assert accelerator.cut() == 0, "a recovery is over: what runs now is behind the update, or not begun"


def test_damage_that_was_found_where_a_thread_was_freed(npu: RecordedNpu) -> None:
    """torch_npu has forgotten it when the recovery asks."""
    engine = trained_engine()
    groups: Any = engine.groups
    npu.answer("npu.check_uce_in_memory", 3)
    engine.device.lend()
    assert groups.waiters()(False) == 1
    engine.device.take_back()
    npu.answer("npu.check_uce_in_memory", 0)
    everything = recover(engine)
    state: Any = engine.state
    assert everything.replicated == set(state.tensors())


def test_a_collective_behind_the_update_is_waited_for_on_the_device(npu: RecordedNpu) -> None:
    groups: Any = trained_engine().groups
    npu.take()
    waits = SimpleNamespace(wait=lambda: npu.calls.append(("wait", {})))

    def call() -> Any:
        assert groups._accelerator._lent
        npu.calls.append(("call", {}))
        return waits

    assert groups.finish(call) is waits
    assert [name for name, _ in npu.take()] == ["synchronize", "call", "wait", "synchronize"]
    assert groups.waiters()(False) == 0


def test_what_lies_on_a_device_is_not_written_from_here(npu: RecordedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = trained_engine()
    damage = report(engine, first_weight(engine))
    monkeypatch.setattr(state_module, "on_host", lambda _: False)
    with pytest.raises(TransferError, match=r"model.0.0.weight lies on a device"):
        mend(engine, damage)


def test_an_error_that_shows_where_the_device_is_waited_for(npu: RecordedNpu) -> None:
    """A collective has failed, or a stop has freed this thread: others may know why. Other errors go on."""
    engine = trained_engine()
    driver = QuietDriver(engine)
    npu.answer("npu.synchronize", RuntimeError("HCCL OP RETRY FAILED, error code is 507904"))
    assert driver._check_collectives(do.CheckCollectives()) == on.Ok(0)
    npu.answer("npu.synchronize", RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        driver._check_collectives(do.CheckCollectives())


def test_communicators_are_asked_while_they_are_whole(
    npu: RecordedNpu, device: FakeDevice, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the step in which HCCL has made them, to the recovery that suspends or frees them."""
    for name in ("acl", "hccl"):
        monkeypatch.setenv(f"RESILIENT_{name.upper()}_LIBRARY", copy(f"lib{name.replace('acl', 'ascendcl')}.so"))
    monkeypatch.setenv("RESILIENT_HCCL", "1")
    made: list[int] = []
    engine = trained_engine()
    engine.device._communicators = lambda number: made if number == 3 else []
    engine.device.watch(lambda probes: probes.alarm(Board.create(1), 0))
    device.set_comm_error(4)
    engine.device.synchronize()
    made += [COMM]
    assert engine.device.notes() == []
    engine.device.synchronize()
    engine.device.synchronize()
    while not (notes := engine.device.notes()):
        time.sleep(0.001)
    assert [(note["kind"], note["probe"], note["code"]) for note in notes] == [("HCCE", "hccl", 4)]
    recover(engine)
    calls = len(device.calls("HcclGetCommAsyncError"))
    engine.device.errors(wait=True)
    assert len(device.calls("HcclGetCommAsyncError")) == calls
    engine.device.close()


def test_injected_errors_are_not_the_devices(npu: RecordedNpu) -> None:
    """The device knows nothing of them, and says so; that is no contradiction."""
    engine = trained_engine()
    with pytest.raises(RuntimeError, match="injected"):
        engine.drill.poison("param")
    damage = engine.device.assess(engine.device.errors(wait=True))
    assert recover(engine, damage) == damage
    assert mend(engine, damage) > 0


# -- out of order, or missing


def test_wrong_order_is_an_assertion(npu: RecordedNpu) -> None:
    accelerator = NpuDevice(npu.module, 0)
    npu.take()
    with pytest.raises(AssertionError, match="before stop_device"):
        accelerator.check(reported=False)
    with pytest.raises(AssertionError, match="before check_uce_in_memory"):
        accelerator.restart((), replaced=False)
    accelerator.stop()
    with pytest.raises(AssertionError, match="before check_uce_in_memory"):
        accelerator.restart((), replaced=False)
    accelerator.check(reported=False)
    with pytest.raises(AssertionError, match="before restart_device"):
        accelerator.mark_safe(())
    assert npu.take() == [STOP, CHECK]


@pytest.mark.parametrize("verb", [verb for verb in npu_signatures.VERBS if verb != "npu.is_initialized"])
def test_torch_npu_without_a_verb(npu: RecordedNpu, verb: str) -> None:
    place, _, name = verb.rpartition(".")
    delattr(npu.module.npu._recovery if place.endswith("_recovery") else getattr(npu.module, place), name)
    with pytest.raises(ConfigError, match=f"torch_npu 2.13.0 has no {verb}"):
        NpuDevice(npu.module, 0)


def test_its_random_numbers_are_the_ranks(npu: RecordedNpu) -> None:
    engine = trained_engine()
    npu.answer("npu.get_rng_state", torch.arange(16, dtype=torch.uint8))
    state = engine.data.random_state()
    npu.answer("npu.get_rng_state", torch.zeros(16, dtype=torch.uint8))
    assert engine.data.random_state() != state, "it has drawn"
    npu.take()
    engine.data.restore_random_state(state)
    ((verb, given),) = npu.take()
    assert (verb, given["device"], given["new_state"].tolist()) == ("set_rng_state", 3, [*range(16)])


def test_tensors_elsewhere_are_not_marked(npu: RecordedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu_device, "NPU", "npu")
    engine = trained_engine()
    npu.answer("npu.check_uce_in_memory", 3)
    damage = recover(engine)
    npu.take()
    mend(engine, damage)
    assert npu.take() == [], "its tensors are on the CPU"


# -- verbs that fail


@pytest.mark.parametrize(
    ("verb", "answer", "text"),
    [
        ("npu.stop_device", 1, r"stop_device\(3\) answered 1: its tasks were not aborted"),
        ("npu.stop_device", None, r"stop_device\(3\) answered None"),
        ("npu.stop_device", RuntimeError("ERR00100"), "stop_device failed: RuntimeError: ERR00100"),
        ("npu.check_uce_in_memory", 0, "of which torch_npu does not know"),
        ("npu.check_uce_in_memory", 1, "is not torch_npu's, and cannot be repaired"),
        ("npu.check_uce_in_memory", 4, "answered 4, which has no meaning"),
        ("npu.check_uce_in_memory", RuntimeError("ERR00100"), "check_uce_in_memory failed: RuntimeError"),
        ("npu.restart_device", 1, "answered 1 instead of None"),
        ("npu.restart_device", RuntimeError("507053"), "restart_device failed: RuntimeError: 507053"),
        ("distributed.reinit_process_group", RuntimeError("ERR02200"), "reinit_process_group failed: RuntimeError"),
        ("npu._recovery.update_npu_tensor_to_safe", RuntimeError("No block"), "update_npu_tensor_to_safe failed"),
    ],
)
@pytest.mark.parametrize("replaced", [False, True])
def test_failing_verb(npu: RecordedNpu, verb: str, answer: Any, text: str, replaced: bool) -> None:
    engine = trained_engine()
    npu.answer("npu.check_uce_in_memory", 3)
    npu.answer(verb, answer)
    damage = report(engine, first_weight(engine))
    npu.take()
    with pytest.raises(DeviceError, match=text) as caught:
        mend(engine, recover(engine, damage, replaced=replaced))
    assert str(caught.value).startswith("rank 0, NPU 3: ")
    assert str(caught.value).endswith("ends so that it is replaced")
    assert npu.take()[-1][0] == verb.rpartition(".")[2], NOTHING_LEFT


def test_device_error_ends_the_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """By a signal: an exit code would end the job as an error of the user's."""
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    error: list[Exception] = [DeviceError("rank 0: it is gone")]
    driver = QuietDriver(stopped_engine(UNDAMAGED))
    driver._rank: Any = SimpleNamespace(on=lambda _: (do.Mark(),))
    driver._injector: Any = SimpleNamespace(clauses=[])
    driver._perform = {do.Mark: lambda _: raise_it(error[0])}
    with pytest.raises(DeviceError):
        driver._drive(on.Enter())
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert driver.events == ["device_failed: rank 0: it is gone"]
    assert capfd.readouterr().err == "resilient_train: rank 0: it is gone\n"
    error[0] = TransferError("another's")
    with pytest.raises(TransferError):
        driver._drive(on.Enter())
    assert len(killed) == 1


def raise_it(error: Exception) -> None:
    raise error


# -- who is asked at all


def test_without_torch_npu_nothing_is_told() -> None:
    assert "torch_npu" not in sys.modules
    engine = trained_engine()
    assert accelerator_of(engine) is Host
    assert recover(engine, replaced=True) is UNDAMAGED


def test_torch_npu_that_is_loaded_and_not_used(npu: RecordedNpu) -> None:
    """``import torch`` loads every backend that is installed."""
    npu.answer("npu.is_initialized", value=False)
    assert accelerator_of(trained_engine()) is Host
    assert {name for name, _ in npu.take()} == {"is_initialized"}


# -- the real wheel


def test_signatures_are_those_of_the_wheel() -> None:
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("reads the sources of torch_npu 2.13.0; see CONTRIBUTING.md")
    package = Path(next(iter(spec.submodule_search_locations)))
    assert npu_signatures.read(package) == json.loads(npu_signatures.COMMITTED.read_text())


def test_recorder_refuses_what_the_wheel_would(npu: RecordedNpu) -> None:
    with pytest.raises(TypeError, match="device"):
        npu.module.npu.stop_device()
    with pytest.raises(TypeError, match="rebuild"):
        npu.module.distributed.reinit_process_group(None, rebuild=True)
