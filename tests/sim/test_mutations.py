"""A checker that cannot fail checks nothing: wrong parts are put in, and must be caught."""

from collections.abc import Collection, Mapping, Sequence

import pytest

from resilient_train.protocol import controller as controller_module
from resilient_train.protocol import verdict
from resilient_train.protocol.commands import Command, Kill
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import Job
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.rank import Open, Rank
from resilient_train.protocol.rank_effects import Mode
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.protocol.verdict import Account, Verdict, decide
from resilient_train.strategies import arf, rsc
from resilient_train.strategies.base import Fault
from resilient_train.testing.cluster import DrivenParts, Faults, Layout, World
from resilient_train.testing.explore import Counterexample, explore
from resilient_train.testing.rank import Program, SimRank
from resilient_train.testing.sim import SimulationError, simulate

FEW_SEEDS = 1500
SHARDED = Layout(4, (1, 0), ((0, 2), (1, 3)))
PURE = Layout(3, (1, 0))


def caught(
    driver: DrivenParts | None = None,
    *,
    layout: Layout | None = None,
    faults: Faults | None = None,
    seeds: int = FEW_SEEDS,
) -> str:
    for seed in range(seeds):
        try:
            simulate(seed, driver=driver, layout=layout, faults=faults)
        except SimulationError as error:
            return str(error)
    pytest.fail(f"not caught in {seeds} seeds")


def test_a_verdict_that_ignores_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(accounts: Mapping[int, Account], _: Mapping[int, Standing]) -> Verdict:
        return decide(accounts, {})

    monkeypatch.setattr(controller_module, "decide", deaf)
    assert caught(layout=PURE, faults=Faults(kills=1))
    with pytest.raises(Counterexample, match=r"not READY|published nothing"):
        explore(Layout(2, (0,)), Faults(kills=1))


def test_a_verdict_that_always_redoes(monkeypatch: pytest.MonkeyPatch) -> None:
    def timid(accounts: Mapping[int, Account], evidence: Mapping[int, Standing]) -> Verdict:
        verdict = decide(accounts, evidence)
        base = min((accounts[rank].standing.commits for rank in verdict.holders), default=0)
        return verdict._replace(commits=base)

    monkeypatch.setattr(controller_module, "decide", timid)
    assert "goes back" in caught(layout=PURE, faults=Faults(kills=1))


def test_a_damaged_rank_whose_standing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are READY and roll forward, to where the damaged rank has published nothing."""
    monkeypatch.setattr(verdict, "_has_trained", lambda account: account.standing.phase is Phase.UPDATING)
    assert caught(layout=PURE, faults=Faults(kills=1, damages=1), seeds=4 * FEW_SEEDS)


class NoIncarnations(Controller):
    def __init__(self, world_size: int, policy: Policy | None = None) -> None:
        super().__init__(world_size, policy)
        self.job = AllAreCurrent(world_size, policy)


class AllAreCurrent(Job):
    def current(self, rank: int, incarnation: int) -> bool:
        return True


def test_a_controller_that_listens_to_the_dead() -> None:
    assert caught(DrivenParts(controller=NoIncarnations), faults=Faults(kills=2))


class ForgetsEvidence(Controller):
    def _fault(self, fault: Fault) -> list[Command]:
        self.job.evidence = {rank: standing for rank, standing in self.job.evidence.items() if rank == fault.rank}
        return super()._fault(fault)


def test_a_controller_that_forgets_the_first_death_at_the_second() -> None:
    # On paper the record still lies on the board; forgotten, a survivor's READY looks like everybody's.
    assert caught(DrivenParts(controller=ForgetsEvidence), layout=PURE, faults=Faults(kills=2), seeds=4 * FEW_SEEDS)


class DeafToTroubleInRecovery(Controller):
    def failed_collective(
        self, generation: int, detail: str, standings: Sequence[Standing] = (), *, culprit: int = -1
    ) -> list[Command]:
        if self.job.stage != "RUNNING":
            return []
        return super().failed_collective(generation, detail, standings, culprit=culprit)


def test_a_controller_that_takes_no_complaint_during_a_recovery() -> None:
    driver = DrivenParts(controller=DeafToTroubleInRecovery)
    assert "deadlock" in caught(driver, layout=Layout(3, (2, 2)), faults=Faults(kills=1, glitches=2))


@pytest.mark.parametrize(
    ("driver", "words", "faults"),
    [
        (DrivenParts(controller=ForgetsEvidence, two_witnesses=False), "not READY", Faults(kills=2)),
        (DrivenParts(controller=DeafToTroubleInRecovery, two_witnesses=False), "deadlock", Faults(kills=1, glitches=1)),
        (DrivenParts(barrier_over_replicas=True, two_witnesses=False), "not READY", Faults(kills=1)),
    ],
)
def test_what_an_exploration_of_few_schedules_finds(driver: DrivenParts, words: str, faults: Faults) -> None:
    """Four ranks, each going on until it waits. (It does not find ``NoIncarnations``.)"""
    with pytest.raises(Counterexample, match=words):
        explore(Layout(4, (2,), ((0, 2), (1, 3))), faults, driver, delays=0)


def test_a_barrier_over_the_replica_group_alone() -> None:
    assert "not READY" in caught(DrivenParts(barrier_over_replicas=True), layout=SHARDED, faults=Faults(kills=1))


class KillsTheLast(Controller):
    """As the time-out of a recovery once did: whoever is silent is killed, whatever it holds."""

    def fence(self, ranks: Collection[int], reason: str, standings: Sequence[Standing] = ()) -> list[Command]:
        return [Kill(rank, reason) for rank in ranks] if self.job.stage in ("RUNNING", "RECOVERING") else []


@pytest.mark.parametrize("faults", [Faults(hangs=1), Faults(kills=1, fences=1)])
def test_a_controller_that_kills_the_last_holder(faults: Faults) -> None:
    assert "alone had the state" in caught(DrivenParts(controller=KillsTheLast), layout=PURE, faults=faults)
    with pytest.raises(Counterexample, match="alone had the state"):
        explore(Layout(2, (0,)), faults, DrivenParts(controller=KillsTheLast, two_witnesses=False))


def test_a_rank_that_does_not_say_that_its_collective_is_over() -> None:
    """The lowest finisher had the result from the group, so it works nothing out, and the others wait for that."""
    driver = DrivenParts(silent_when_over=True)
    assert "deadlock" in caught(driver, layout=Layout(3, (2, 2)), faults=Faults(kills=1))


class SavesForNobody(Controller):
    """As if the loss of a rank by an error of its script were the end of all."""

    def exited(
        self, rank: int, incarnation: int, code: int, standings: Sequence[Standing], how: str = ""
    ) -> list[Command]:
        job = self.job
        if code > 0 and job.stage == "RUNNING" and job.current(rank, incarnation):
            return job.end(code, f"rank {rank} failed")
        return super().exited(rank, incarnation, code, standings, how)


def test_a_controller_that_does_not_save_what_others_hold_when_a_rank_fails() -> None:
    program = Program(optimizers=2, misuse="fails in the update")
    faults = Faults(glitches=1)
    driver = DrivenParts(controller=SavesForNobody)
    assert "every shard has a holder" in caught(driver, layout=Layout(3, (1, 0), program=program), faults=faults)


class KeepsNothing(Rank):
    """In its body the script's own error looks like the end of a rank that has nothing to keep."""

    __slots__ = ()

    @property
    def whole(self) -> bool:
        return super().whole and not isinstance(self.state, Open)


def test_a_rank_that_fails_in_its_body_and_keeps_nothing() -> None:
    driver = DrivenParts(rank=KeepsNothing)
    assert "keeps nothing" in caught(driver, layout=PURE, faults=Faults(errors=1))


def test_a_tail_that_runs_twice_after_a_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = SimRank._leaves_the_body

    def leaves_again(self: SimRank, world: World) -> None:
        leaves(self, world)
        self.tails += self.mode is Mode.EXCHANGE

    monkeypatch.setattr(SimRank, "_leaves_the_body", leaves_again)
    assert "tails to their ends" in caught(layout=PURE, faults=Faults(kills=1))


def test_going_back_although_a_replica_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arf, "refuses", lambda *_: "no")
    monkeypatch.setattr(rsc, "_goes_back", lambda *_: True)
    with pytest.raises(Counterexample, match="all go back although every shard has a holder"):
        explore(Layout(2, (0, 0), saves=True), Faults(kills=1))


def test_giving_up_although_a_state_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsc, "refuses", lambda *_: "no")
    with pytest.raises(Counterexample, match=r"given up although update .* is saved"):
        explore(Layout(2, (0, 0), ((0,), (1,)), saves=True), Faults(kills=1))


def test_what_was_done_stays_when_all_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """``started`` is of the ranks that are gone: the job would run before the new ones are there."""

    def forgetful(fault: Fault, job: Job) -> list[Command]:
        before = dict(job.started)
        commands = begin(fault, job)
        job.started.update(before)
        return commands

    begin = rsc.begin
    monkeypatch.setattr(rsc, "begin", forgetful)
    with pytest.raises(Counterexample):
        explore(Layout(2, (0, 0), ((0,), (1,)), saves=True), Faults(kills=1))
