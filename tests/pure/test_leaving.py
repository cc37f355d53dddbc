"""How a job that has to end saves what it has: who is asked, from which state, and what if one more dies meanwhile."""

from __future__ import annotations

import pytest

from pure.test_controller import finish_recovery, join, of, recover, running, sent
from resilient_train.protocol.commands import EndJob, Kill, Note, RaiseStop, Spawn
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, Stage
from resilient_train.protocol.messages import Joined, Plan, Resume, SaveLast
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.savers import Choice, choose
from resilient_train.protocol.standing import Phase, Standing
from resilient_train.strategies import ttp

AT_7 = [Standing(7, Phase.COMPUTE)] * 4
NO_REPLACEMENT = Policy(replace=False)


def joined(commits: int, phase: Phase, *, holds: bool = True, tail_done: int = 0) -> Joined:
    return Joined(1, commits, phase, holds, tail_done, ("world",))


@pytest.mark.parametrize(
    ("ranks", "groups", "expected"),
    [
        ({0: joined(7, Phase.COMPUTE), 2: joined(7, Phase.READY)}, ((0, 1, 2),), Choice(7, ((0, 2),), exact=True)),
        # 2 had applied update 7 when 0 was stopped before it: what 0 has is exact, 2 is in the middle of its tail.
        ({0: joined(7, Phase.READY), 2: joined(8, Phase.APPLIED)}, ((0, 1, 2),), Choice(7, ((0,),), exact=True)),
        # Both have, and 2 is at the head of the next window already.
        ({0: joined(8, Phase.APPLIED), 2: joined(8, Phase.COMPUTE)}, ((0, 1, 2),), Choice(8, ((2,),), exact=True)),
        # Nobody is at a head: one finishes its tail alone, the one that has least to do.
        (
            {0: joined(8, Phase.APPLIED, tail_done=1), 2: joined(8, Phase.APPLIED, tail_done=2)},
            ((0, 1, 2),),
            Choice(8, ((2,),), exact=False),
        ),
        # Two shards: rank 3 alone has the second one, from before update 7.
        (
            {0: joined(7, Phase.READY), 2: joined(8, Phase.APPLIED), 3: joined(7, Phase.COMPUTE)},
            ((0, 2), (1, 3)),
            Choice(7, ((0,), (3,)), exact=True),
        ),
        ({0: joined(8, Phase.APPLIED), 3: joined(7, Phase.COMPUTE)}, ((0, 2), (1, 3)), None),
        ({0: joined(7, Phase.COMPUTE), 2: joined(7, Phase.COMPUTE)}, ((0, 2), (1, 3)), None),
        ({0: joined(7, Phase.UPDATING, holds=False)}, ((0, 1),), None),
        ({}, ((0,),), None),
    ],
)
def test_the_newest_exact_state_that_is_whole_is_chosen(
    ranks: dict[int, Joined], groups: tuple[tuple[int, ...], ...], expected: Choice | None
) -> None:
    assert choose(ranks, groups) == expected


def given_up(size: int = 4, replicas: tuple[tuple[int, ...], ...] = ()) -> Controller:
    controller = running(size, policy=NO_REPLACEMENT, replicas=replicas)
    commands = controller.lost(1, 0, "died", AT_7[:size])
    assert of(commands, RaiseStop) == [RaiseStop(1)]
    assert not of(commands, Spawn)
    assert controller.job.stage is Stage.LEAVING
    return controller


def test_survivors_share_the_state_of_their_group_and_one_writes_for_the_dead() -> None:
    controller = given_up()
    assert join(controller, 0, commits=7) == join(controller, 2, commits=7) == []
    commands = join(controller, 3, commits=7)
    orders = {each.rank: each.message for each in commands if isinstance(getattr(each, "message", None), SaveLast)}
    assert {rank: (o.part, o.parts, o.shard, o.shards) for rank, o in orders.items()} == {
        0: (0, 3, 0, 3),
        2: (1, 3, 1, 3),
        3: (2, 3, 2, 3),
    }
    assert [sorted(orders[rank].others) for rank in (0, 2, 3)] == [[1], [], []]
    assert ttp.savers(controller.job, 1) == ((0, 2, 3),)
    assert ttp.savers(controller.job, 0) == ()
    (end,) = of(controller.saved_last("saved: /there"), EndJob)
    assert end.code == EXIT_UNRECOVERABLE
    assert "switched off" in end.reason
    assert end.reason.endswith("saved: /there")
    assert controller.saved_last("again") == []
    assert controller.exited(0, 0, -15, AT_7) == []


def test_who_does_not_hold_the_chosen_state_waits() -> None:
    controller = given_up()
    join(controller, 0, commits=8, phase=Phase.APPLIED)
    join(controller, 2, commits=7, phase=Phase.READY)
    commands = join(controller, 3, commits=7)
    orders = {order.shard: order for order in sent(commands, SaveLast)}
    assert sorted(orders) == [-1, 0, 1]
    assert sorted(orders[0].others) == [0, 1], "rank 0 has gone on, and its own state from before is in its arena"


def test_a_rank_that_dies_before_all_have_joined_is_not_waited_for() -> None:
    controller = given_up()
    join(controller, 0, commits=7)
    join(controller, 2, commits=7)
    (order,) = {order.shards for order in sent(controller.lost(3, 0, "died", AT_7), SaveLast)}
    assert order == 2
    assert controller.exited(3, 0, -9, AT_7) == [], "told once"


def test_a_saver_that_dies_makes_the_others_begin_again() -> None:
    controller = given_up()
    for rank in (0, 2, 3):
        join(controller, rank, commits=7)
    assert of(controller.lost(2, 0, "died", AT_7), RaiseStop) == [RaiseStop(2)]
    assert ttp.savers(controller.job, 1) == (), "what was captured for the first try does not count"
    assert join(controller, 0, commits=7) == []
    assert {order.shards for order in sent(join(controller, 3, commits=7), SaveLast)} == {2}
    assert ttp.savers(controller.job, 2) == ((0, 3),)


def test_a_shard_without_holder_is_told() -> None:
    controller = given_up(replicas=((0, 2), (1, 3)))
    (end,) = of(controller.lost(3, 0, "died", AT_7), EndJob)
    assert "no living rank holds" in end.reason
    controller = given_up(replicas=((0, 2), (1, 3)))
    for rank in (0, 2):
        join(controller, rank, commits=8)
    (end,) = of(join(controller, 3, commits=7, holds=False), EndJob)
    assert "no living rank holds" in end.reason


def test_who_does_not_come_is_killed_and_left_out() -> None:
    controller = given_up()
    join(controller, 0, commits=7)
    join(controller, 2, commits=7)
    assert controller.job.awaited() == [3]
    assert [each.rank for each in of(controller.expired(1, AT_7, 9), Kill)] == [3]
    assert sent(controller.lost(3, 0, "was killed", AT_7), SaveLast)


def test_the_last_saver_is_waited_for() -> None:
    controller = given_up(2)
    assert of(controller.expired(1, AT_7, 9), Kill) == of(controller.fence({0}, "hung"), Kill) == []
    assert sent(join(controller, 0, commits=7), SaveLast)


def test_who_has_not_come_in_half_of_the_time_is_left_out() -> None:
    controller = running(4)
    controller.lost(1, 0, "died", AT_7)
    controller.leave(143, "it got SIGTERM")
    join(controller, 0, commits=7)
    assert controller.hurry(), "one that holds everything is enough"
    assert controller.job.stage is Stage.LEAVING
    assert join(controller, 2, commits=7) == [], "it has not come in time, and is left out"
    (order,) = sent(join(controller, 0, commits=7), SaveLast)
    assert sorted(order.others) == [1, 2, 3]
    assert controller.hurry() == [], "once"
    assert join(controller, 1, holds=False) == []
    assert controller.lost(3, 0, "died", AT_7) == []
    (end,) = of(controller.saved_last("saved"), EndJob)
    assert end.code == 143


def test_nobody_is_left_out_who_is_needed() -> None:
    controller = running(4, replicas=((0, 2), (1, 3)))
    controller.leave(143, "it got SIGTERM")
    join(controller, 0, commits=7)
    join(controller, 2, commits=7)
    assert controller.hurry() == []
    join(controller, 1, commits=7)
    assert controller.hurry()
    controller = running(2)
    controller.leave(143, "it got SIGTERM")
    recover(controller, -1, commits=7)
    assert controller.hurry() == [], "all have come"


def test_a_replacement_that_has_not_come_yet_is_not_waited_for() -> None:
    controller = running(4, policy=Policy(max_restarts=1))
    controller.lost(1, 0, "died", AT_7)
    controller.lost(2, 0, "died", AT_7)
    assert controller.job.stage is Stage.LEAVING
    join(controller, 0, commits=7)
    assert sent(join(controller, 3, commits=7), SaveLast)
    assert join(controller, 1, holds=False) == []


def test_nothing_trained_nothing_saved() -> None:
    controller = running(policy=NO_REPLACEMENT)
    assert of(controller.lost(1, 0, "died", [Standing(0, Phase.COMPUTE)] * 3), EndJob)


def test_asked_to_end_all_come_to_the_head_of_the_same_window() -> None:
    controller = running(4)
    commands = controller.leave(143, "it got SIGTERM")
    assert of(commands, RaiseStop) == [RaiseStop(1)]
    assert [note.kind for note in of(commands, Note)] == ["leaving"]
    for rank in (0, 1, 2):
        join(controller, rank, commits=7, phase=Phase.READY)
    (plan,) = {plan.last for plan in sent(join(controller, 3, commits=7, phase=Phase.READY), Plan)}
    assert plan
    assert len(sent(finish_recovery(controller), Resume)) == 4
    assert ttp.savers(controller.job, 1) == ((0, 1, 2, 3),)
    (end,) = of(controller.saved_last("saved"), EndJob)
    assert end.code == 143


def test_a_rank_lost_while_the_job_leaves_is_replaced_and_leaves_too() -> None:
    controller = running(4)
    controller.leave(143, "it got SIGTERM")
    assert of(controller.lost(2, 0, "died", AT_7), Spawn)
    (plan,) = {plan.last for plan in sent(recover(controller, 2, commits=7), Plan)}
    assert plan


def test_no_replacement_left_while_the_job_leaves() -> None:
    controller = running(4, policy=NO_REPLACEMENT)
    controller.leave(143, "it got SIGTERM")
    controller.lost(2, 0, "died", AT_7)
    for rank in (0, 1, 3):
        commands = join(controller, rank, commits=7)
    assert len(sent(commands, SaveLast)) == 3
    (end,) = of(controller.saved_last("saved"), EndJob)
    assert end.code == 143, "the answer is to what was asked"


def test_all_ranks_lost_while_the_job_leaves_nothing_starts_again() -> None:
    controller = running(2)
    controller.job.can_go_back = lambda: True
    controller.leave(143, "it got SIGTERM")
    controller.lost(0, 0, "died", AT_7[:2])
    (end,) = of(controller.lost(1, 0, "died", AT_7[:2]), EndJob)
    assert end.code == 143


@pytest.mark.parametrize("again", [False, True])
def test_it_ends_at_once_where_it_must(again: bool) -> None:
    controller = running(policy=None if again else Policy(save_last=False))
    if again:
        controller.leave(143, "once")
    assert of(controller.leave(143, "it got SIGTERM"), EndJob)[0].code == 143
    assert of(Controller(2).leave(143, "before the first step"), EndJob)
