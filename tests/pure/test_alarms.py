"""From a probe's finding to what the agent does about it, without a job."""

import pytest

from pure.probe_rig import LIMIT_MS, Make, eventually
from resilient_train._native import Board, Probes
from resilient_train.launch.agent.alarms import Alarms
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Stage
from resilient_train.protocol.policy import Policy
from resilient_train.testing.fake_device import FakeDevice


class Hearer:
    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.notes: list[tuple[str, int, dict[str, object]]] = []

    def fence(self, ranks: list[int], reason: str) -> None:
        assert reason
        self.done += [("fence", rank) for rank in ranks]

    def mend(self, rank: int, detail: str) -> None:
        assert detail
        self.done.append(("mend", rank))

    def give_up_collective(self, detail: str, *, culprit: int) -> None:
        assert detail
        self.done.append(("rebuild", culprit))

    def note(self, kind: str, rank: int, detail: dict[str, object]) -> None:
        self.notes.append((kind, rank, detail))


def ears(policy: Policy | None = None) -> tuple[Board, Alarms, Hearer, Controller]:
    board, controller = Board.create(2), Controller(2, policy)
    controller.job.stage = Stage.RUNNING
    return board, Alarms(board, controller.job), Hearer(), controller


def watched(make: Make, board: Board, rank: int, probe: str, **limits: int) -> Probes:
    """A probe that raises its alarms as that rank, and has found nothing so far."""
    probes = make(probe, start=False, **limits)
    probes.alarm(board, rank)
    probes.start()
    eventually(lambda: probes.status()[0].polls > 1)
    return probes


def strike(device: FakeDevice, what: str) -> None:
    if what == "bus":
        device.send_xid(79)
    elif what == "ecc":
        device.set_ecc_errors(1)
    elif what == "unknown xid":
        device.send_xid(999)
    elif what == "hang":
        device.hang("nvmlDeviceGetTotalEccErrors")
    else:
        device.set_last_error(int(what))


@pytest.mark.parametrize(
    ("probe", "what", "kind", "done"),
    [
        ("acl", "507904", "HCCE", ("rebuild", 1)),
        ("acl", "507056", "LINK", ("rebuild", 1)),
        ("acl", "507014", "DEVICE", ("fence", 1)),
        ("acl", "507053", "DEVICE", ("fence", 1)),  # nobody knows where: no address was reported
        ("nvml", "bus", "DEVICE", ("fence", 1)),
        ("nvml", "ecc", "DEVICE", ("fence", 1)),
        ("nvml", "hang", "DISABLED", None),
    ],
)
def test_what_a_finding_leads_to(
    make: Make, device: FakeDevice, probe: str, what: str, kind: str, done: tuple[str, int] | None
) -> None:
    board, alarms, hearer, _ = ears()
    watched(make, board, 1, probe, **({"call_limit_ms": LIMIT_MS} if what == "hang" else {}))
    strike(device, what)
    eventually(lambda: board.alarms(1))
    assert board.alarms(1) == [(probe, kind)]
    assert board.alarms(0) == []
    for _ in range(2):
        alarms.look(hearer)
    assert [note[:2] for note in hearer.notes] == [("alarm" if done else "probe_disabled", 1)], "told once"
    # Until the rank has gone nothing changes; a rebuild takes the alarm away.
    assert hearer.done == ([] if done is None else [done] if done[0] == "rebuild" else [done, done])


def test_what_nobody_knows_kills_nobody(make: Make, device: FakeDevice) -> None:
    board, _, _, _ = ears()
    probes = watched(make, board, 0, "nvml")
    strike(device, "unknown xid")
    eventually(lambda: any(each.kind == "NOTICE" for each in probes.take()))
    assert board.alarms(0) == []


def test_only_while_the_job_trains(make: Make, device: FakeDevice) -> None:
    board, alarms, hearer, controller = ears()
    watched(make, board, 0, "acl")
    device.set_last_error(507904)
    eventually(lambda: board.alarms(0))
    for stage in (Stage.STARTING, Stage.RECOVERING, Stage.FINISHED):
        controller.job.stage = stage
        alarms.look(hearer)
    assert hearer.done == []
    controller.job.stage = Stage.RUNNING
    alarms.look(hearer)
    assert hearer.done == [("rebuild", 0)]


def test_switched_off(make: Make, device: FakeDevice) -> None:
    board, alarms, hearer, _ = ears(Policy(rebuild=False, mend=False))
    watched(make, board, 0, "acl")
    device.set_last_error(507904)
    eventually(lambda: board.alarms(0))
    alarms.look(hearer)
    assert hearer.done == []
    assert len(hearer.notes) == 1
