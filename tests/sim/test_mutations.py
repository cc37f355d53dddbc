"""A checker that cannot fail checks nothing: wrong parts are put in, and must be caught."""

from collections.abc import Callable, Collection, Mapping, Sequence

import pytest

from resilient_train.protocol import controller as controller_module
from resilient_train.protocol import verdict
from resilient_train.protocol.commands import Command, Kill
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.messages import Joined, Plan
from resilient_train.protocol.processor import Action, Processor
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.protocol.verdict import Account, Verdict, decide
from resilient_train.testing.checks import ViolationError, check_final
from resilient_train.testing.cluster import Driver, Faults, Layout, Move, World
from resilient_train.testing.explore import Counterexample, explore, started
from resilient_train.testing.rank import At
from resilient_train.testing.sim import SimulationError, simulate

FEW_SEEDS = 1500
SHARDED = Layout(4, (1, 0), ((0, 2), (1, 3)))
PURE = Layout(3, (1, 0))


def caught(
    driver: Driver | None = None,
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


class HoldsAfterCut(Processor):
    def join(self, generation: int, groups: tuple[str, ...] = (), stopped_ns: int = 0) -> Joined:
        holds = self.holds
        joined = super().join(generation, groups, stopped_ns)
        self.holds = holds
        return Joined(**{name: getattr(joined, name) for name in joined.__struct_fields__} | {"holds": holds})


def test_a_torn_rank_that_says_it_holds() -> None:
    assert caught(Driver(processor=HoldsAfterCut), faults=Faults(kills=1, cuts=1))


class HoldsWhatItLost(Processor):
    def damage(self) -> None:
        pass


def test_a_rank_that_goes_on_with_damaged_memory() -> None:
    assert caught(Driver(processor=HoldsWhatItLost), layout=PURE, faults=Faults(damages=1))


def test_a_damaged_rank_whose_standing_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are READY and roll forward, to where the damaged rank has published nothing."""
    monkeypatch.setattr(verdict, "_has_trained", lambda account: account.standing.phase is Phase.UPDATING)
    assert caught(layout=PURE, faults=Faults(kills=1, damages=1), seeds=4 * FEW_SEEDS)


class RedoesInsteadOfApplying(Processor):
    def accept(self, plan: Plan) -> Action:
        action = super().accept(plan)
        return Action.REDO if action is Action.APPLY else action


def test_a_rank_that_loses_its_update() -> None:
    assert "undisturbed" in caught(Driver(processor=RedoesInsteadOfApplying), layout=PURE, faults=Faults(kills=1))


class AppliesTwice(Processor):
    def accept(self, plan: Plan) -> Action:
        action = super().accept(plan)
        return Action.REDO if action is Action.FINISH_TAIL else action

    def settle(self) -> Standing:
        standing = super().settle()
        if self.rank == 0 and standing.commits:
            self.standing = Standing(standing.commits - 1, Phase.COMPUTE)
        return self.standing


def test_a_rank_that_applies_twice() -> None:
    assert "undisturbed" in caught(Driver(processor=AppliesTwice), layout=PURE, faults=Faults(kills=1))


class NoIncarnations(Controller):
    def _current(self, rank: int, incarnation: int) -> bool:
        return True


def test_a_controller_that_listens_to_the_dead() -> None:
    assert caught(Driver(controller=NoIncarnations), faults=Faults(kills=2))


class ForgetsEvidence(Controller):
    def _begin(self, lost: tuple[int, ...], reason: str) -> list[Command]:
        self._evidence = {rank: standing for rank, standing in self._evidence.items() if rank in lost}
        return super()._begin(lost, reason)


def test_a_controller_that_forgets_the_first_death_at_the_second() -> None:
    # On paper the record still lies on the board; forgotten, a survivor's READY looks like everybody's.
    assert caught(Driver(controller=ForgetsEvidence), layout=PURE, faults=Faults(kills=2), seeds=4 * FEW_SEEDS)


class DeafToTroubleInRecovery(Controller):
    def failed_collective(
        self, generation: int, detail: str, standings: Sequence[Standing] = (), *, culprit: int = -1
    ) -> list[Command]:
        if self.stage != "RUNNING":
            return []
        return super().failed_collective(generation, detail, standings, culprit=culprit)


def test_a_controller_that_takes_no_complaint_during_a_recovery() -> None:
    driver = Driver(controller=DeafToTroubleInRecovery)
    assert "deadlock" in caught(driver, layout=Layout(3, (2, 2)), faults=Faults(kills=1, glitches=2))


def test_a_barrier_over_the_replica_group_alone() -> None:
    assert "not READY" in caught(Driver(barrier_over_replicas=True), layout=SHARDED, faults=Faults(kills=1))


def go(world: World, until: Callable[[World], bool], *, without: str = "") -> None:
    while not until(world):
        world.step(next(move for move in world.moves() if str(move) != without))


def die_twice_in_a_tail(driver: Driver) -> World:
    """Rank 0 has the result of a collective, rank 1 lacks it, rank 2 dies, and its replacement dies as it stands in."""
    world = started(World(Layout(3, (1,)), Faults(kills=2), driver))
    go(world, lambda w: w.ranks[0].at is At.HEAD and w.ranks[2].at is At.IN_TAIL, without="rank 1: has the result")
    world.step(Move("fault", 2, "kill"))
    world.step(Move("agent", 2, "sees the death"))
    go(world, lambda w: w.ranks[2].at is At.GHOST)
    world.step(Move("fault", 2, "kill"))
    go(world, lambda w: w.final)
    check_final(world)
    return world


def test_a_ghost_that_forgets_the_log_before_it_is_written_anew() -> None:
    """As ``session/recovery._dead_entries`` did: a second death in between loses inputs that others have used."""
    assert die_twice_in_a_tail(Driver()).controller.generation == 2
    with pytest.raises(ViolationError, match="another result"):
        die_twice_in_a_tail(Driver(ghost_resets_log=True))


class KillsTheLast(Controller):
    """As the time-out of a recovery once did: whoever is silent is killed, whatever it holds."""

    def fence(self, ranks: Collection[int], reason: str, standings: Sequence[Standing] = ()) -> list[Command]:
        return [Kill(rank, reason) for rank in ranks] if self.stage in ("RUNNING", "RECOVERING") else []


@pytest.mark.parametrize("faults", [Faults(hangs=1), Faults(kills=1, fences=1)])
def test_a_controller_that_kills_the_last_holder(faults: Faults) -> None:
    assert "alone had the state" in caught(Driver(controller=KillsTheLast), layout=PURE, faults=faults)
    with pytest.raises(Counterexample, match="alone had the state"):
        explore(Layout(2, (0,)), faults, Driver(controller=KillsTheLast, two_witnesses=False))
