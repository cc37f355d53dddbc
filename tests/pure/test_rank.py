"""The rank machine, row by row where a row has a reason of its own; whole jobs are in ``tests/sim``."""

from __future__ import annotations

import ast
import inspect
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from resilient_train import interrupt
from resilient_train.errors import ProtocolError
from resilient_train.protocol import rank as machine
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol import standing
from resilient_train.protocol.messages import Finished, Paused, Plan, Pull, Resume, SaveLast
from resilient_train.protocol.rank import TABLE, At, Barrier, Body, Build, Drain, Left, Open, Rank, Save, Tail, Update
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.session import driver

SAVE = SaveLast(1, 1, part=0, parts=1, shard=0, shards=1)
STOP = on.Next(9, stopped=True)


def names(effects: tuple[do.Effect, ...]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def rank_after(*events: Any, **options: Any) -> Rank:
    rank = Rank(1, **options)
    for event in events:
        rank.on(event)
    return rank


STARTED = (on.Begin(9, 0), Resume(0))
IN_BODY = (*STARTED, on.Enter())
VERIFYING = (*IN_BODY, on.UpdateBegins())
READY = (*VERIFYING, on.Ok())
UPDATING = (*READY, on.Ok())
IN_TAIL = (*UPDATING, on.UpdateEnds())
AT_HEAD = (*IN_TAIL, on.Exit(), on.Next(9))


def recovering(plan: Plan | SaveLast, *events: Any) -> tuple[Any, ...]:
    return (*events, on.Quieted(1), plan)


# -- a healthy step


def test_what_a_healthy_step_does() -> None:
    rank = rank_after(*STARTED)
    did = [
        name
        for event in (on.Enter(), on.UpdateBegins(), on.Ok(), on.Ok(), on.UpdateEnds(), on.Exit(), on.Next(9))
        for name in names(rank.on(event))
    ]
    assert did == [
        *("Arm", "Return"),
        *("Disarm", "CheckCollectives"),
        *("SnapshotFence", "LearnLayout", "Publish", "Arrive", "Cross"),
        *("Compare", "SetMode", "Return"),
        *("Synchronize", "Committed", "ResetLog", "Record", "SetMode", "Return"),
        "Return",
        *("Record", "SetMode", "Publish", "SnapshotBegin", "ShowState", "Draw", "Mark", "ReturnStep"),
    ]
    assert (rank.number, rank.standing) == (1, (1, Phase.COMPUTE))


def test_standings_only_grow() -> None:
    rank, seen = Rank(0), []
    for event in (*AT_HEAD, *IN_TAIL[2:]):
        rank.on(event)
        seen.append(rank.standing)
    assert seen == sorted(seen)
    assert seen[-1] == (2, Phase.APPLIED)


def test_gradients_are_accumulated() -> None:
    rank = rank_after(*IN_BODY, on.Exit())
    assert isinstance(rank.state, Open)
    assert names(rank.on(on.Next(9))) == ["Draw", "ReturnStep"], "no state to go back to is remembered on the way"
    assert (rank.number, rank.base, rank.standing) == (1, 0, (0, Phase.COMPUTE))


def test_all_optimizers_write_behind_one_barrier() -> None:
    rank = rank_after(*UPDATING[:3], on.UpdateBegins(0), on.Ok(), on.Ok(), on.UpdateEnds(0), optimizers=2)
    assert names(rank.on(on.UpdateBegins(1))) == ["Return"]
    rank.on(on.UpdateEnds(1))
    assert rank.standing == (1, Phase.APPLIED)


def test_an_optimizer_without_a_turn() -> None:
    rank = rank_after(*UPDATING, on.UpdateEnds(0), on.Exit(), optimizers=2)
    assert rank.standing == (1, Phase.APPLIED)


def test_undo_makes_the_body_one_transaction() -> None:
    rank = rank_after(*IN_BODY, undo=True)
    assert names(rank.on(on.UpdateBegins())) == ["Disarm", "SnapshotFence", "SaveUndo", "Return"]
    assert rank.state == Body(held=True)
    assert names(rank.on(on.UpdateEnds())) == ["Arm", "Return"]
    assert names(rank.on(on.Exit())) == ["Disarm", "CheckCollectives"]
    rank.on(on.Ok())
    assert "Committed" in names(rank.on(on.Ok()))


# -- what a plan means


@pytest.mark.parametrize(
    ("before", "plan", "standing", "does"),
    [
        (IN_BODY, Plan(1, 0, {}), (0, Phase.COMPUTE), "takes back"),
        (READY, Plan(1, 0, {}), (0, Phase.COMPUTE), "takes back"),
        (READY, Plan(1, 1, {}), (1, Phase.COMPUTE), "applies"),
        (IN_TAIL, Plan(1, 1, {}), (1, Phase.COMPUTE), "finishes"),
        (AT_HEAD, Plan(1, 1, {}), (1, Phase.COMPUTE), "takes back"),
    ],
)
def test_the_part_in_a_plan(before: tuple[Any, ...], plan: Plan, standing: Any, does: str) -> None:
    rank, did = rank_after(*before), []
    for event in _to_target(rank, plan):
        did += names(rank.on(event))
    assert rank.standing == standing
    assert rank.intact
    assert ("Rollback" in did) == (does == "takes back")
    assert ("Committed" in did) == (does == "applies")
    assert "Fetch" not in did
    assert did[-1] == "AwaitResume"


def _to_target(rank: Rank, plan: Plan) -> list[Any]:
    """A stop, as it meets the rank where it stands, and all that comes until it waits for Resume."""
    planned = (on.Quieted(1), plan, on.Ok())
    match rank.state:
        case Body():
            return [on.Exit("interrupted"), STOP, *planned]
        case Open():
            return [STOP, *planned]
        case Barrier() if plan.commits > rank.standing.commits:
            return [on.Stopped(), *planned, on.UpdateEnds(), on.Exit(), on.Next(9)]
        case Barrier():
            return [on.Stopped(), *planned, on.Exit("interrupted"), on.Next(9)]
        case Tail():
            return [on.TailCut(stopped=True), *planned, on.Exit(), on.Next(9)]
    raise AssertionError(rank.state)


@pytest.mark.parametrize("commits", [1, 17])
def test_a_replacement_copies_whatever_the_plan(commits: int) -> None:
    rank = Rank(1, joining=True)
    assert names(rank.on(on.Begin(99, 0))) == ["Quiesce"]
    rank.on(on.Quieted(1))
    assert not rank.intact
    rank.on(Plan(1, commits, {1: 0}))
    assert rank.on(on.Ok())[-1] == do.Fetch(Plan(1, commits, {1: 0}), source=0)
    rank.on(on.Ok(2 * commits))
    assert (rank.number, rank.standing, rank.intact) == (2 * commits, (commits, Phase.COMPUTE), True)


def test_a_cut_update_leaves_nothing_usable() -> None:
    rank = rank_after(*UPDATING, on.Exit("fault"), on.Next(9), on.Ok(), on.Quieted(1))
    assert not rank.intact
    rank.on(on.Stopped())
    rank.on(on.Quieted(2))
    assert not rank.intact, "a second fault does not repair it"
    rank.on(Plan(2, 1, {1: 0}))
    assert names(rank.on(on.Ok())) == ["Rollback", "Fetch"]
    rank.on(on.Ok(1))
    assert rank.intact


def test_damage_of_what_is_not_replicated_is_redone() -> None:
    rank = rank_after(*IN_BODY)
    assert names(rank.on(on.Exit("fault", damaged=True)))[:2] == ["Disarm", "SendDamaged"]
    assert rank.intact
    assert not rank_after(*IN_BODY, on.Exit("fault", damaged=True, lost=True)).intact
    assert not rank_after(*IN_BODY, on.Exit("interrupted"), STOP, on.Quieted(1, damaged=True)).intact


def test_who_has_lost_its_state_says_no_less_than_before() -> None:
    """Others may apply the update that it was READY for."""
    rank = rank_after(*READY, on.Stopped(), on.Quieted(1, damaged=True), Plan(1, 1, {1: 0}))
    assert names(rank.on(on.Ok())) == ["SetMode", "Cut"]
    assert rank.standing == (0, Phase.READY)
    rank.on(on.Exit("interrupted"))
    assert names(rank.on(on.Next(9))) == ["Rollback", "Fetch"]


def test_memory_that_is_lost_behind_a_cut_body() -> None:
    """What the rank was to do under the plan counts on its state: a newer recovery must come first."""
    rank = rank_after(*recovering(Plan(1, 0, {}), *READY, on.Stopped()), on.Ok())
    assert isinstance(rank.state, Drain)
    assert names(rank.on(on.Exit("fault", "UCE", damaged=True, lost=True))) == ["SendDamaged", "Return"]
    assert not rank.intact
    assert names(rank.on(on.Next(9))) == ["SendTrouble", "AwaitStop"]


@pytest.mark.parametrize(("before", "commits"), [(IN_BODY, 1), (READY, 2)])
def test_a_plan_for_somebody_else(before: tuple[Any, ...], commits: int) -> None:
    rank = rank_after(*before)
    with pytest.raises(ProtocolError, match="no part in a plan"):
        for event in _to_target(rank, Plan(1, commits, {})):
            rank.on(event)


def test_a_plan_that_takes_an_update_back() -> None:
    with pytest.raises(ProtocolError, match="in a tail; the plan is for 0"):
        rank_after(*recovering(Plan(1, 0, {}), *IN_TAIL, on.TailCut(stopped=True)), on.Ok())


def test_who_is_a_source_offers_first() -> None:
    plan = Plan(1, 0, {3: 1, 0: 1, 2: 5})
    rank = rank_after(*recovering(plan, *IN_BODY, on.Exit("interrupted"), STOP))
    effects = rank.on(on.Ok())
    assert do.SendOffers((0, 3)) in effects
    assert names(rank.on(Pull(1, 1, 3))) == ["Serve"]
    assert names(rank.on(on.Ok())) == ["AwaitResume"]


# -- interrupts, and who must not be interrupted


def test_only_a_body_is_interrupted() -> None:
    """Arm is done on the way into Body, and Disarm on every way out of it."""
    for events, disarmed in [
        ((on.Exit("interrupted"),), True),
        ((on.Exit("fault"),), True),
        ((on.Exit("error"),), True),
        ((on.Exit("leaves"),), True),
        ((on.Exit(),), True),
        ((on.UpdateBegins(),), True),
    ]:
        rank = rank_after(*IN_BODY)
        did = [name for event in events for name in names(rank.on(event))]
        assert ("Disarm" in did) == disarmed
        assert not (isinstance(rank.state, Body) and not rank.state.held)


@pytest.mark.parametrize("state", [Update, Tail, Drain])
def test_no_way_out_of_what_must_end(state: type) -> None:
    assert (state, on.Stopped) not in TABLE


def test_every_wait_ends() -> None:
    """Whatever may come of an effect that waits is a row of the state that waits for it."""
    outcomes: dict[str, tuple[type, ...]] = {
        "Verify": (on.Ok, on.Anomalous, on.Doubtful),
        "Barrier": (on.Ok, on.Stopped),
        "Ask": (on.Ok, on.Failed),
        "Quiet": (on.Quieted,),
        "Agree": (Plan, SaveLast, on.Stopped),
        "Build": (on.Ok, on.Failed, on.Stopped),
        "Restore": (on.Ok, on.Failed, on.Stopped),
        "Target": (Resume, Paused, Pull, on.Ok, on.Failed, on.Stopped),
        "Finish": (Finished, on.Stopped),
        "Save": (on.Stopped,),
        "Halt": (on.Stopped,),
        "Meet": (Resume, Paused, on.Stopped),
    }
    have: dict[str, set[type]] = {}
    for state, event in TABLE:
        have.setdefault(state.__name__, set()).add(event)
    for state_name, events in outcomes.items():
        # The user's code is on the stack of those with `at`, and an error goes through it.
        raised = {on.Exit} if hasattr(getattr(machine, state_name), "at") else set()
        assert have[state_name] == set(events) | raised, state_name


@pytest.mark.parametrize("how", ["leaves", "error"])
@pytest.mark.parametrize(
    "before",
    [VERIFYING, READY, (*READY, on.Stopped()), (*READY, on.Stopped(), on.Quieted(1)), (*IN_TAIL, on.TailCut())],
    ids=["verify", "barrier", "quiet", "agree", "ask"],
)
def test_what_it_waits_for_raises(before: tuple[Any, ...], how: Any) -> None:
    """As it was: the job's end came while a survivor waited in a hook, and a ProtocolError hid it."""
    rank = rank_after(*before)
    assert rank.on(on.Exit(how)) == (do.Return(value=False),)
    assert isinstance(rank.state, Left)


# -- misuse, and the end


@pytest.mark.parametrize(
    ("before", "event", "text"),
    [
        (IN_TAIL, on.UpdateBegins(), r"optimizer.step\(\) ran twice in step 0"),
        (STARTED, on.UpdateBegins(), r"optimizer.step\(\) was called outside `with step:` \(step 0\)"),
        (IN_BODY, on.Enter(), "step 0 was used twice"),
        (IN_TAIL, on.Enter(), "was used twice"),
    ],
)
def test_misuse(before: tuple[Any, ...], event: Any, text: str) -> None:
    (effect,) = rank_after(*before).on(event)
    assert isinstance(effect, do.Misuse)
    assert re.search(text, effect.text)


@pytest.mark.parametrize(
    "before",
    [(*IN_BODY, on.Exit()), (*IN_TAIL, on.Exit()), recovering(Plan(1, 0, {}), *READY, on.Stopped())],
    ids=["open", "tail", "drain"],
)
def test_another_call_of_steps_goes_further(before: tuple[Any, ...]) -> None:
    rank = rank_after(*before)
    if isinstance(rank.state, Build):
        rank.on(on.Ok())
        rank.on(on.Exit("interrupted"))
    rank.on(on.Next(17))
    assert rank.total == 17


def test_what_cannot_happen_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=r"rank 1: Ok\(value=1\) can't happen in Body\(held=False\)"):
        rank_after(*IN_BODY, on.Ok())


def test_nobody_explains_a_failed_collective() -> None:
    rank = rank_after(*VERIFYING, on.Ok(0), on.Exit("interrupted"))
    assert names(rank.on(on.Next(9))) == ["SendTrouble", "AwaitStop"]
    assert names(rank.on(on.Failed())) == ["GiveUp"]
    assert isinstance(rank.state, Left)


def test_the_loop_ends_together() -> None:
    rank = rank_after(*AT_HEAD, on.Enter(), on.Exit())
    assert names(rank.on(on.Over())) == ["ShowState", "SendFinish", "AwaitFinished"]
    assert names(rank.on(Finished())) == ["Compare", "ReturnEnd"]
    assert names(rank.on(on.Next(9))) == ["ReturnEnd"]


def test_where_an_exit_may_end_the_loop() -> None:
    """Not where the state is none that all ranks have, or nobody knows yet whether it is."""
    leaves = on.Exit("leaves")
    for before in ((), (on.Enter(),), (on.Enter(), leaves), (on.Enter(), on.Exit("interrupted"))):
        rank = rank_after(*AT_HEAD, *before)
        assert rank.leavable is (before in ((), (on.Enter(), leaves))), before
    for before in (VERIFYING, READY, UPDATING, IN_TAIL):
        assert rank_after(*before).leavable is (before is IN_TAIL), before
    undoing = rank_after(*VERIFYING, on.UpdateEnds(), leaves, undo=True)
    assert isinstance(undoing.state, machine.Open)
    assert not undoing.leavable


def test_bodies_behind_the_last_update_run_again_too() -> None:
    """Steps that are no whole window: a recovery at the end takes them back."""
    rank = Rank(1)
    for event in (on.Begin(1, 0), Resume(0), on.Enter(), on.Exit(), on.Next(1)):
        rank.on(event)
    assert isinstance(rank.state, machine.Finish)
    for event in (on.Stopped(), on.Quieted(1), Plan(1, 0, {}), on.Ok()):
        rank.on(event)
    assert names(rank.on(Resume(1)))[-1] == "ReturnStep"
    assert (rank.number, rank.attempt) == (0, 1)


def test_no_interrupt_between_an_event_and_its_effects() -> None:
    """A body is armed while its end, or an optimizer's hook, is told to the machine."""
    assert interrupt._on_top_unsafe(cast("Any", SimpleNamespace(f_globals=vars(machine))))


def test_who_comes_after_a_break_ends_too() -> None:
    plan = Plan(1, 3, {1: 0}, replaced=(1,))
    rank = Rank(1, joining=True)
    for event in (on.Begin(99, 0), on.Quieted(1), plan, on.Ok(), on.Ok(3)):
        rank.on(event)
    assert "SendFinish" in names(rank.on(Resume(1, over=True)))


def test_the_last_snapshot() -> None:
    last = Plan(1, 0, {}, last=True)
    rank = rank_after(*recovering(last, *IN_BODY, on.Exit("interrupted"), STOP), on.Ok())
    assert names(rank.on(Resume(1))) == ["Compare", "SetMode", "SaveState"]
    assert isinstance(rank.state, Save)
    assert names(rank.on(on.Stopped())) == ["Quiesce"], "a fault in it is a recovery like any other"


def test_who_is_asked_to_end_at_the_end_finishes() -> None:
    at_the_end = (on.Begin(1, 0), *IN_TAIL[1:], on.Exit(), on.Next(1, stopped=True))
    rank = rank_after(*recovering(Plan(1, 1, {}, last=True), *at_the_end), on.Ok())
    assert "SendFinish" in names(rank.on(Resume(1)))


def test_the_last_snapshot_of_who_is_left() -> None:
    rank = rank_after(*recovering(SAVE, *READY, on.Stopped()))
    assert rank.state == Save(At.HOOK)
    rank = rank_after(*recovering(SAVE, *IN_TAIL, on.TailCut(stopped=True)))
    assert rank.state == Tail(SAVE), "the tail runs to its end first"
    assert names(rank.on(on.Next(9))) == ["Record", "Publish", "SaveState"]
    rank = rank_after(*recovering(SAVE, *IN_TAIL, on.TailCut(stopped=True)))
    assert names(rank.copy().on(on.Exit())) == names(rank.copy().on(on.Exit("leaves"))) == ["Return"], "it goes on"
    assert names(rank.on(on.Exit("error", "KeyError: 3"))) == ["TellTailFailed", "Record", "Publish", "SaveState"]
    assert names(rank_after(*IN_TAIL).on(on.Exit("error", "KeyError: 3"))) == ["Return"], "the user's own"
    rank = rank_after(*IN_TAIL, on.Exit(), STOP, on.Quieted(1))
    assert names(rank.on(SAVE)) == ["Rollback", "Publish", "SaveState"], "what its tail drew is published nowhere yet"
    (waits,) = rank_after(*IN_BODY, on.Exit("interrupted"), STOP, on.Quieted(1)).on(SaveLast(1, 1))
    assert waits == do.AwaitEnd()


def test_an_error_in_a_tail_is_the_users() -> None:
    assert names(rank_after(*IN_TAIL).on(on.Exit("error", "KeyError: 3"))) == ["Return"]


def test_copies_are_independent() -> None:
    rank = rank_after(*IN_BODY)
    other = rank.copy()
    assert other.key() == rank.key()
    other.on(on.Exit())
    assert other.key() != rank.key()
    assert rank.standing == Standing(0, Phase.COMPUTE)


def test_the_driver_looks_at_no_state() -> None:
    """What it may read of a Rank is what it tells others; a look at the state would be a decision of its own."""
    tree = ast.parse(inspect.getsource(driver))
    assert do.__name__ in imported(tree), "the test sees what is imported"
    assert not {machine.__name__, standing.__name__} & imported(tree), "its Rank is made by rank_trace.py"
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and name_of(node.value) == "rank"}
    assert {"standing", "commits"} <= read, "the test sees what is read"
    assert "state" not in read
    looked_into = [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and name_of(node.value) == "standing"
    ]
    assert not looked_into, "it is handed on as it is"


@pytest.mark.parametrize(
    "line",
    [
        "from resilient_train.protocol.rank import Body",
        "from resilient_train.protocol import rank",
        "from resilient_train.protocol import rank as where",
        "import resilient_train.protocol.rank",
    ],
)
def test_each_way_to_import_the_states_is_seen(line: str) -> None:
    assert machine.__name__ in imported(ast.parse(line))
    assert machine.__name__ not in imported(ast.parse("from resilient_train.protocol import rank_effects"))


def imported(tree: ast.Module) -> set[str]:
    """The modules that a module imports; and, as if they were modules, what it takes from them."""
    nodes = list(ast.walk(tree))
    whole = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = [(node.module, alias.name) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]
    return whole | {str(module) for module, _ in parts} | {f"{module}.{name}" for module, name in parts}


def name_of(node: ast.expr) -> str:
    """``rank`` of both ``rank`` and ``self._rank``."""
    return (node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")).lstrip("_")
