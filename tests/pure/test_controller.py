"""The controller's decisions, one by one; their interleavings are explored in ``tests/sim``."""

import math

import pytest

from resilient_train.launch.agent.console_text import told
from resilient_train.protocol.commands import Command, EndJob, KeepAnomalies, Kill, Note, RaiseStop, Send, Spawn
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.job import EXIT_UNRECOVERABLE, Stage
from resilient_train.protocol.messages import (
    Anomaly,
    Differs,
    Finished,
    Held,
    HoldsNan,
    Joined,
    Late,
    Plan,
    Resume,
    Started,
    Stop,
)
from resilient_train.protocol.policy import Policy
from resilient_train.protocol.progress import Activity, Progress
from resilient_train.protocol.standing import Phase, Standing

COMPUTE_0 = [Standing(0, Phase.COMPUTE)] * 3


def sent(commands: list[Command], kind: type) -> list:
    return [each.message for each in commands if isinstance(each, Send) and isinstance(each.message, kind)]


def of(commands: list[Command], kind: type) -> list:
    return [each for each in commands if isinstance(each, kind)]


def killed(commands: list[Command]) -> list[int]:
    return [each.rank for each in of(commands, Kill)]


def running(size: int = 3, policy: Policy | None = None, replicas: tuple[tuple[int, ...], ...] = ()) -> Controller:
    controller = Controller(size, policy)
    controller.launch()
    for rank in range(size):
        controller.greeted(rank, 0)
        digest = str(next((g for g in replicas if rank in g), "all"))
        controller.started(rank, 0, Started(digest, ("world",), replicas))
    assert controller.job.stage is Stage.RUNNING
    return controller


def join(
    controller: Controller, rank: int, *, holds: bool = True, commits: int = 0, phase: Phase = Phase.COMPUTE
) -> list:
    message = Joined(controller.job.generation, commits, int(phase), holds, 0, ("world",))
    return controller.joined(rank, controller.job.incarnations[rank], message)


def recover(controller: Controller, lost: int, *, commits: int = 0) -> list[Command]:
    for rank in range(controller.job.world_size):
        commands = join(controller, rank, holds=rank != lost, commits=commits)
    return commands


def finish_recovery(controller: Controller) -> list[Command]:
    for rank in range(controller.job.world_size):
        commands = controller.done(rank, controller.job.incarnations[rank], controller.job.generation)
    return commands


def test_start() -> None:
    controller = Controller(2)
    assert controller.launch() == [Spawn(r, 0, joining=False, attempt=0) for r in (0, 1)]
    assert controller.started(0, 0, Started("x", (), step=40)) == []
    commands = controller.started(1, 0, Started("x", (), step=40))
    assert of(commands, Note) == [Note("started", detail={"world_size": 2, "step": 40})]
    assert sent(commands, Resume) == [Resume(0)] * 2


@pytest.mark.parametrize(
    ("second", "text"),
    [(Started("other", ()), "differs at the start"), (Started("x", (), ((0,), (1,))), "other replica groups")],
)
def test_a_wrong_start_ends_with_code_2(second: Started, text: str) -> None:
    controller = Controller(2)
    controller.started(0, 0, Started("x", ()))
    (end,) = of(controller.started(1, 0, second), EndJob)
    assert end.code == 2
    assert text in end.reason


def test_replica_groups_that_do_not_cover_end_with_code_2() -> None:
    controller = Controller(2)
    controller.started(0, 0, Started("x", (), ((0,),)))
    assert of(controller.started(1, 0, Started("x", (), ((0,),))), EndJob)[0].code == 2


def test_shards_may_differ() -> None:
    running(4, replicas=((0, 2), (1, 3)))


def test_a_loss_stops_all_and_forks_last() -> None:
    controller = running()
    commands = controller.lost(1, 0, "died", COMPUTE_0)
    assert commands[0] == RaiseStop(1)
    assert [s.lost for s in sent(commands, Stop)] == [(1,)] * 3
    assert commands[-1] == Spawn(1, 1, joining=True, attempt=0)
    assert controller.job.stage is Stage.RECOVERING


def test_a_death_counts_once() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    assert controller.lost(1, 0, "died", COMPUTE_0) == []
    assert controller.exited(1, 0, -9, COMPUTE_0) == []
    assert controller.job.generation == 1


def test_a_recovery() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    (plan, *others) = sent(recover(controller, 1), Plan)
    assert plan == Plan(1, 0, {1: 0}, (), (1,))
    assert others == [plan] * 2
    assert sent(finish_recovery(controller), Resume) == [Resume(1)] * 3
    assert controller.job.stage is Stage.RUNNING


def test_who_speaks_of_the_past_is_not_heard() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    old = Joined(0, 0, 1, True, 0, ())
    assert controller.joined(0, 0, old) == []
    dead = Joined(1, 0, 1, True, 0, ())
    join(controller, 0)
    join(controller, 2)
    assert controller.joined(1, 0, dead) == [], "its incarnation is over"
    assert controller.job.plan is None
    assert controller.done(0, 0, 1) == [], "no plan yet"
    assert sent(join(controller, 1, holds=False), Plan)
    assert controller.done(0, 0, 0) == []
    assert controller.finish(0, 0, 1) == []


def test_that_a_loop_is_over_outlives_the_rank_that_knew_it() -> None:
    """As it was: of three ranks behind a `break` each died before the recovery of the one before it was over."""
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    controller.done(0, 0, 1, over=True)
    controller.lost(0, 0, "died", COMPUTE_0)
    for rank, incarnation in ((0, 1), (1, 1), (2, 0)):
        controller.joined(rank, incarnation, Joined(2, 0, Phase.COMPUTE, rank == 2, 0, ()))
    resumed = [sent(controller.done(rank, incarnation, 2), Resume) for rank, incarnation in ((0, 1), (1, 1), (2, 0))]
    assert resumed[-1] == [Resume(2, over=True)] * 3
    assert not controller.job.over, "a recovery after this one asks anew"


def test_a_second_fault_starts_over_and_keeps_the_evidence() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    join(controller, 0, phase=Phase.READY)
    controller.lost(2, 0, "died", [Standing(0, Phase.READY), Standing(0, Phase.COMPUTE), Standing(0, Phase.READY)])
    join(controller, 1, holds=False)
    join(controller, 2, holds=False)
    (plan, *_) = sent(join(controller, 0, phase=Phase.READY), Plan)
    assert (plan.generation, plan.commits) == (2, 0), "rank 1 had not been READY"
    assert plan.copies == {1: 0, 2: 0}
    assert plan.replaced == (1, 2), "rank 1 is new to everybody still"
    finish_recovery(controller)
    controller.failed_collective(2, "reset by peer", COMPUTE_0)
    assert sent(recover(controller, -1), Plan)[0].replaced == ()


def test_a_shard_without_holder_ends_the_job() -> None:
    controller = running(4, replicas=((0, 2), (1, 3)))
    standings = [Standing(0, Phase.COMPUTE)] * 4
    controller.lost(1, 0, "died", standings)
    (end,) = of(controller.lost(3, 0, "died", standings), EndJob)
    assert end.code == EXIT_UNRECOVERABLE
    assert "no living rank holds" in end.reason
    assert controller.lost(0, 0, "died", standings) == [], "it has ended"


def test_a_replacement_that_was_heard_may_hold_the_state() -> None:
    controller = running(2)
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    assert not of(controller.lost(0, 0, "died", COMPUTE_0), EndJob), "rank 1 may have its copy already"
    join(controller, 0, holds=False)
    (end,) = of(join(controller, 1, holds=False), EndJob)
    assert "[0, 1] have no state" in end.reason


def test_loss_before_the_start_restarts_everybody() -> None:
    controller = Controller(2)
    controller.greeted(0, 0)
    controller.started(0, 0, Started("x", ()))
    commands = controller.exited(1, 0, -9, COMPUTE_0)
    assert of(commands, Spawn) == [Spawn(r, 1, joining=False, attempt=1) for r in (0, 1)]
    assert controller.started(0, 0, Started("x", ())) == [], "an old incarnation's Started"
    controller.started(0, 1, Started("x", ()))
    assert sent(controller.started(1, 1, Started("x", ())), Resume)


def test_loss_of_a_script_without_session_ends() -> None:
    (end,) = of(Controller(2).exited(1, 0, -9, COMPUTE_0), EndJob)
    assert end.code == 137
    assert "no Session" in end.reason
    assert of(Controller(2, Policy(restart_on_error=True)).exited(1, 0, 1, COMPUTE_0), Spawn)


def test_loss_of_a_script_that_would_have_made_a_session() -> None:
    controller = Controller(2)
    controller.job.uses_us = lambda: True
    assert len(of(controller.exited(1, 0, -9, COMPUTE_0), Spawn)) == 2


@pytest.mark.parametrize(("code", "ends_with"), [(0, 1), (3, 3)])
def test_a_rank_that_leaves_while_others_train(code: int, ends_with: int) -> None:
    assert of(running().exited(1, 0, code, COMPUTE_0), EndJob)[0].code == ends_with


@pytest.mark.parametrize(("code", "ends_with"), [(0, 1), (5, 5)])
def test_a_rank_taken_for_lost_that_had_left_by_itself(code: int, ends_with: int) -> None:
    """The watchdog's death is seen first; ``os._exit`` is a decision all the same."""
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    (end,) = of(controller.exited(1, 0, code, COMPUTE_0), EndJob)
    assert end.code == ends_with
    assert f"exit code {code}" in end.reason


def test_what_was_trained_since_is_saved_when_a_late_end_says_that_a_rank_had_left() -> None:
    """Its death was seen, it was replaced, and all have trained on before its exit code is known."""
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    finish_recovery(controller)
    commands = controller.exited(1, 0, 5, [Standing(2, Phase.COMPUTE)] * 3)
    assert not of(commands, EndJob)
    assert controller.job.stage is Stage.LEAVING


def test_how_others_ended_before_all_were_started_again_does_not_count() -> None:
    controller = Controller(2, Policy(restart_on_error=True))
    assert of(controller.exited(1, 0, 1, COMPUTE_0), Spawn)
    assert controller.exited(0, 0, 1, COMPUTE_0) == []


@pytest.mark.parametrize("first", ["exited", "started"])
def test_a_rank_that_ends_well_without_a_first_step_is_not_waited_for(first: str) -> None:
    controller = Controller(2)
    begun = Started("x", ())
    if first == "started":
        assert controller.started(0, 0, begun) == []
        commands = controller.exited(1, 0, 0, COMPUTE_0)
    else:
        assert controller.exited(1, 0, 0, COMPUTE_0) == []
        commands = controller.started(0, 0, begun)
    (end,) = of(commands, EndJob)
    assert (end.code, end.reason) == (
        1,
        "ranks [1] exited with code 0 before the first step, and ranks [0] wait there",
    )


def test_a_rank_that_was_ready_and_has_ended_well_waits_no_more() -> None:
    controller = Controller(2)
    begun = Started("x", ())
    assert controller.started(0, 0, begun) == controller.exited(0, 0, 0, COMPUTE_0) == []
    (end,) = of(controller.started(1, 0, begun), EndJob)
    assert end.reason == "ranks [0] exited with code 0 before the first step, and ranks [1] wait there"


def test_without_a_session_each_rank_may_end_when_it_likes() -> None:
    controller = Controller(2)
    assert controller.exited(1, 0, 0, COMPUTE_0) == controller.exited(0, 0, 0, COMPUTE_0) == []


IN_THE_TAIL = Progress(4, Phase.APPLIED, 2, Activity.LEAVING)
IN_THE_BODY = Progress(4, Phase.COMPUTE, 2, Activity.LEAVING)
LEFT = "rank 1 left with exit code 0 while the others were still training (to end early, all ranks leave the Session at"


def exits(controller: Controller, rank: int) -> list[Command]:
    return controller.finish(rank, 0, 0, IN_THE_TAIL, exits=True)


def test_one_breaks_and_another_comes_to_the_end_of_its_loop() -> None:
    """A process that has taken another one's place has only heard that the loops are over."""
    controller = running(2)
    assert controller.finish(1, 0, 0, IN_THE_TAIL) == []
    assert sent(controller.finish(0, 0, 0), Finished) == [Finished()] * 2


def test_who_was_given_what_another_has_left_with_has_not_seen_why() -> None:
    """A rank lost in the tail in which the others break: its new process goes on, and is to be taken for hung."""
    controller = running(2)
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1, commits=4)
    finish_recovery(controller)
    goes_on = Progress(4, Phase.COMPUTE, 1, Activity.TRAINING)
    controller.finish(0, 0, 1, IN_THE_TAIL)
    assert controller.progressed([IN_THE_TAIL, goes_on]) == []


IN_BODY_4 = Standing(4, Phase.COMPUTE)


def test_who_is_hung_where_another_has_left_may_wait_for_it() -> None:
    controller = running(2)
    controller.finish(1, 0, 0, IN_THE_TAIL)
    leaving = of(controller.hold_up([0], "hung for 5 ms", [IN_BODY_4, IN_BODY_4]), Note)[0]
    assert (leaving.kind, leaving.rank, controller.job.stage) == ("leaving", 1, Stage.LEAVING)
    reason = str(leaving.detail["reason"])
    assert reason.startswith("rank 1 left its loop after 4 updates while the others were still training")
    assert reason.endswith("; rank 0 hung for 5 ms")


AT_ITS_END = Progress(4, Phase.APPLIED, 2, Activity.FINISHED)
WITHOUT_UPDATE = Progress(4, Phase.COMPUTE, 2, Activity.FINISHED)  # the last window is not whole


@pytest.mark.parametrize(
    ("left", "other", "further"),
    [
        (AT_ITS_END, IN_THE_TAIL, False),
        (AT_ITS_END, IN_THE_BODY._replace(collectives=0), False),
        (AT_ITS_END, IN_THE_BODY._replace(commits=3, collectives=9), False),
        (AT_ITS_END, IN_THE_BODY._replace(activity=Activity.FINISHED), False),
        (AT_ITS_END, IN_THE_TAIL._replace(collectives=3), True),
        (AT_ITS_END, IN_THE_BODY, True),
        (AT_ITS_END, IN_THE_BODY._replace(collectives=0, phase=Phase.READY), True),
        (AT_ITS_END, IN_THE_TAIL._replace(commits=5), True),
        (WITHOUT_UPDATE, IN_THE_BODY, False),
        (WITHOUT_UPDATE, IN_THE_BODY._replace(collectives=3), True),
    ],
)
def test_who_has_more_to_do_than_another_waits_for_it_in_vain(
    left: Progress, other: Progress, *, further: bool
) -> None:
    """Uneven data. It was taken for hung after minutes, and its new process heard that the loops were over."""
    controller = running(2)
    controller.finish(1, 0, 0, left)
    notes = of(controller.progressed([other, left]), Note)
    assert [note.kind for note in notes] == ["leaving"] * further
    told = "rank 1 has made all its steps, 4 updates, and another one goes on: all ranks make the same steps, with the "
    assert all(note.detail["reason"].startswith(told) for note in notes)


def test_who_is_hung_in_the_tail_of_its_last_step_is_given_up() -> None:
    controller = running(2)
    controller.finish(1, 0, 0, AT_ITS_END)
    (kill,) = of(controller.hold_up([0], "hung", [Standing(4, Phase.APPLIED), IN_BODY_4]), Kill)
    assert kill.rank == 0


@pytest.mark.parametrize(("step", "total", "steps"), [(0, 14, "0 to 13"), (5, 18, "5 to 17")])
def test_ranks_that_are_to_make_other_steps_do_not_begin(step: int, total: int, steps: str) -> None:
    controller = Controller(2)
    controller.launch()
    controller.started(0, 0, Started("same", ("world",), step=0, total=18))
    (end,) = of(controller.started(1, 0, Started("same", ("world",), step=step, total=total)), EndJob)
    assert end.code == 2
    assert end.reason.startswith(
        f"rank 0 is to make steps 0 to 17 and rank 1 steps {steps}: all ranks make the same steps"
    )


def test_who_is_hung_before_that_is_given_up() -> None:
    controller = running(2)
    controller.finish(1, 0, 0, IN_THE_TAIL)
    (kill,) = of(controller.hold_up([0], "hung", [Standing(3, Phase.UPDATING), IN_BODY_4]), Kill)
    assert kill.rank == 0


def test_all_leave_by_an_exit() -> None:
    controller = running()
    assert exits(controller, 1) == exits(controller, 0) == []
    over = IN_THE_TAIL._replace(activity=Activity.FINISHED)
    assert controller.progressed([over, over, IN_THE_TAIL]) == []
    assert sent(exits(controller, 2), Finished) == [Finished()] * 3


def test_one_leaves_by_an_exit_and_another_by_the_end_of_its_loop() -> None:
    controller = running(2)
    exits(controller, 1)
    (note,) = of(controller.finish(0, 0, 0), Note)
    assert note.kind == "leaving"
    assert note.detail["reason"].startswith(LEFT)


@pytest.mark.parametrize("exits", [True, False])
@pytest.mark.parametrize(
    ("left", "other", "further"),
    [
        (IN_THE_TAIL, IN_THE_TAIL, False),
        (IN_THE_TAIL, IN_THE_TAIL._replace(collectives=1), False),
        (IN_THE_TAIL, IN_THE_BODY._replace(commits=3, collectives=9), False),
        (IN_THE_TAIL, IN_THE_TAIL._replace(activity=Activity.FINISHED), False),
        (IN_THE_TAIL, IN_THE_TAIL._replace(collectives=3), True),
        (IN_THE_TAIL, IN_THE_BODY._replace(collectives=0), False),  # where the loop may be left as well
        (IN_THE_TAIL, IN_THE_BODY._replace(collectives=1), True),
        (IN_THE_TAIL, IN_THE_BODY._replace(collectives=0, phase=Phase.READY), True),
        (IN_THE_TAIL, IN_THE_BODY._replace(collectives=0, commits=5), True),
        (IN_THE_BODY, IN_THE_BODY, False),
        (IN_THE_BODY, IN_THE_TAIL._replace(collectives=9), False),
        (IN_THE_BODY, IN_THE_BODY._replace(collectives=1), False),
        (IN_THE_BODY, IN_THE_BODY._replace(collectives=3), True),
        (IN_THE_BODY, IN_THE_BODY._replace(phase=Phase.READY), True),
    ],
)
def test_who_is_further_than_a_rank_that_left_does_not_leave_with_it(
    left: Progress, other: Progress, *, further: bool, exits: bool
) -> None:
    """It waits for the one that left, for ever as a rule."""
    controller = running(2)
    assert controller.progressed([other, left]) == []
    controller.finish(1, 0, 0, left, exits=exits)
    gone = left._replace(activity=Activity.FINISHED)
    notes = of(controller.progressed([other, gone]), Note)
    assert [note.kind for note in notes] == ["leaving"] * further
    told = LEFT if exits else LEFT.replace("with exit code 0", "its loop after 4 updates")
    assert all(note.detail["reason"].startswith(told) for note in notes)
    assert controller.progressed([other, gone]) == [], "it is told once"


def test_finish() -> None:
    controller = running()
    assert controller.finish(0, 0, 0) == controller.finish(1, 0, 0) == []
    assert sent(controller.finish(2, 0, 0), Finished) == [Finished()] * 3
    assert controller.lost(0, 0, "died", COMPUTE_0) == []
    assert controller.exited(0, 0, 0, COMPUTE_0) == []
    assert of(controller.exited(1, 0, 4, COMPUTE_0), EndJob)[0].code == 4


def test_who_had_finished_finishes_again_after_a_recovery() -> None:
    controller = running()
    controller.finish(0, 0, 0)
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    finish_recovery(controller)
    assert controller.finish(1, 1, 1) == controller.finish(2, 0, 1) == []
    assert controller.job.stage is Stage.RUNNING
    assert sent(controller.finish(0, 0, 1), Finished)


def test_who_is_killed_has_not_finished() -> None:
    """Its word was on the way when it was killed, and the others' come before its death is seen."""
    controller = running()
    assert killed(controller.fence({1}, "came to other bits", COMPUTE_0)) == [1]
    assert [controller.finish(rank, 0, 0) for rank in range(3)] == [[], [], []]
    assert of(controller.lost(1, 0, "came to other bits", COMPUTE_0), Spawn)
    recover(controller, 1)
    finish_recovery(controller)
    assert controller.finish(0, 0, 1) == controller.finish(2, 0, 1) == []
    assert sent(controller.finish(1, 1, 1), Finished)


def test_who_does_not_join_in_time_is_killed() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    join(controller, 0)
    assert killed(controller.expired(1, COMPUTE_0, 9)) == [1, 2]
    assert controller.expired(0, COMPUTE_0, 9) == []


def test_a_recovery_that_does_not_come_to_its_end_is_begun_anew_before_anybody_is_killed() -> None:
    controller = running()
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    controller.done(2, 0, 1)
    commands = controller.expired(1, COMPUTE_0, 9)
    assert killed(commands) == []
    assert [(stop.generation, stop.lost) for stop in sent(commands, Stop)] == [(2, ())] * 3
    assert "[0, 1] did not come to the start of update 0 within 9 s" in sent(commands, Stop)[0].reason
    join(controller, 0)
    join(controller, 2)
    assert killed(controller.expired(2, COMPUTE_0, 9)) == [1], "it was asked, and did not come"


def test_recoveries_that_never_come_to_their_end_are_given_up_with_the_state_saved() -> None:
    controller = running(policy=Policy(max_stuck=3))
    standings = [Standing(4, Phase.COMPUTE)] * 3
    commands = controller.lost(1, 0, "died", standings)
    for _ in range(3):
        recover(controller, 1, commits=4)
        commands = controller.expired(controller.job.generation, standings, 9)
        assert killed(commands) == []
    handed_over, leaving = of(commands, Note)
    assert (handed_over.kind, handed_over.detail["strategy"], leaving.kind) == ("escalated", "HCCE", "leaving")
    assert "recoveries keep failing" in leaving.detail["reason"]


def test_a_replacement_that_strays_costs_no_state() -> None:
    """What the survivors hold is saved; the replacement, which is still there, is not waited for."""
    controller = running()
    controller.lost(1, 0, "died", [Standing(4, Phase.COMPUTE)] * 3)
    assert controller.strayed(1, 0, "of its predecessor's") == []
    commands = controller.strayed(1, 1, "it calls something else")
    assert [note.kind for note in of(commands, Note)] == ["leaving"]
    assert controller.strayed(1, 1, "it calls something else") == [], "the script has caught the first one"
    assert controller.exited(1, 1, 2, [Standing(4, Phase.COMPUTE)] * 3) == []
    for rank in (0, 2):
        commands = join(controller, rank, commits=4)
    assert {each.rank for each in of(commands, Send)} == {0, 2}
    (end,) = of(controller.saved_last("saved"), EndJob)
    assert (end.code, end.reason) == (2, "it calls something else; saved")


def test_a_replacement_that_strays_before_anything_was_trained() -> None:
    controller = running()
    controller.lost(1, 0, "died", [Standing(0, Phase.COMPUTE)] * 3)
    (end,) = of(controller.strayed(1, 1, "it calls something else"), EndJob)
    assert (end.code, end.reason) == (2, "it calls something else")


def test_the_last_one_that_has_the_state_is_never_killed() -> None:
    controller = running()
    standings = [Standing(3, Phase.COMPUTE)] * 3
    assert killed(controller.fence({1, 2}, "hung", standings)) == [1, 2]
    assert killed(controller.fence({0}, "hung", standings)) == [], "the others are as good as dead"
    controller.lost(1, 0, "hung", standings)
    controller.lost(2, 0, "hung", standings)
    join(controller, 1, holds=False, commits=3)
    join(controller, 2, holds=False, commits=3)
    for _ in range(3):
        assert killed(controller.fence(controller.job.awaited(), "hung", standings)) == []
    assert controller.expired(controller.job.generation, standings, 9, stopped={0}) == [
        Note("spared", rank=0, detail={"ranks": [0], "reason": "did not join the recovery within 9 s"})
    ], "it may be continued"
    (end,) = of(controller.expired(controller.job.generation, standings, 9), EndJob)
    assert end.code == EXIT_UNRECOVERABLE
    assert "[0] did not join the recovery within 9 s" in end.reason


def test_a_last_one_is_waited_for_as_long_as_it_is_worth() -> None:
    """Whether its process runs or not: somebody may continue it, or nobody."""
    controller = saving(3)
    assert controller.outwaited(0, 60) == [], "no recovery waits for it"
    standings = [Standing(5, Phase.COMPUTE)] * 2
    controller.lost(1, 0, "died", standings)
    assert controller.outwaited(0, 60) == [], "of an earlier recovery"
    (spared,) = of(controller.fence({0}, "hung", standings), Note)
    assert (spared.kind, spared.detail["saved"]) == ("spared", 3)
    commands = controller.outwaited(1, 60)
    assert [each.rank for each in of(commands, Spawn)] == [0, 1]
    (again,) = (note for note in of(commands, Note) if note.kind == "restart_all")
    assert "rank 0 did not join the recovery within 60 s" in str(again.detail["reason"])
    assert controller.outwaited(1, 60) == []


@pytest.mark.parametrize("why", ["nothing is saved", "it has come", "no restart is left", "the job ends"])
def test_a_last_one_is_waited_for_on(why: str) -> None:
    controller = saving(-1 if why == "nothing is saved" else 3)
    standings = [Standing(5, Phase.COMPUTE)] * 2
    controller.lost(1, 0, "died", standings)
    if why == "it has come":
        join(controller, 0, commits=5)
    if why == "no restart is left":
        controller.job.policy = Policy(max_restarts=1)
    if why == "the job ends":
        controller.leave(143, "asked")
    assert controller.outwaited(controller.job.generation, 60) == []


def test_a_last_one_that_does_not_come_costs_what_was_not_saved() -> None:
    controller = running(2)
    controller.job.can_go_back = lambda: True
    controller.lost(1, 0, "died", COMPUTE_0)
    join(controller, 1, holds=False)
    assert len(of(controller.expired(1, COMPUTE_0, 9), Spawn)) == 2
    assert controller.job.stage is Stage.STARTING


def test_where_all_are_named_all_are_asked() -> None:
    """A pause that the hang watch does not know: nobody is killed, and whoever hears the stop goes on."""
    controller = running(policy=Policy(max_stuck=3, save_last=False))
    commands = controller.fence({0, 1, 2}, "hung", COMPUTE_0)
    assert killed(commands) == []
    assert len(sent(commands, Stop)) == 3
    assert sent(recover(controller, -1), Plan)
    finish_recovery(controller)
    while not (ends := of(controller.fence({0, 1, 2}, "hung", COMPUTE_0), EndJob)):
        recover(controller, -1)
        finish_recovery(controller)
    assert "nobody else has its state" in ends[0].reason


def test_a_group_of_its_own_is_not_killed_for_the_others_sake() -> None:
    controller = running(4, replicas=((0, 2), (1, 3)))
    assert killed(controller.fence({1, 2, 3}, "hung")) == [2]


def test_who_has_copied_the_state_may_stand_for_it() -> None:
    controller = running(2)
    controller.lost(1, 0, "died", COMPUTE_0)
    recover(controller, 1)
    assert killed(controller.fence({0}, "hung")) == [], "rank 1 may have its copy, or not"
    controller.done(1, 1, 1)
    assert killed(controller.fence({0}, "hung")) == [0]


def test_a_failed_collective_is_a_fault_of_its_own() -> None:
    controller = running()
    commands = controller.failed_collective(0, "rank 1: reset")
    assert sent(commands, Stop)[0].lost == ()
    assert not of(commands, Spawn)
    assert controller.failed_collective(0, "late") == [], "explained already"
    assert sent(controller.failed_collective(1, "building groups"), Stop)[0].generation == 2, "also in a recovery"


def test_damaged_memory_is_a_fault_that_costs_no_process() -> None:
    controller = running()
    commands = controller.damaged(1, 0, 0, "memory error", COMPUTE_0)
    assert of(commands, RaiseStop) == [RaiseStop(1)]
    assert of(commands, Spawn) == []
    assert [stop.lost for stop in sent(commands, Stop)] == [()] * 3
    assert controller.damaged(1, 0, 0, "again", COMPUTE_0) == [], "a recovery is under way, and it says so there"
    assert controller.damaged(1, 7, 1, "of an older process", COMPUTE_0) == []
    join(controller, 0)
    join(controller, 1, holds=False)
    plan = sent(join(controller, 2), Plan)[0]
    assert (plan.commits, plan.copies, plan.finishers, plan.replaced) == (0, {1: 0}, (), ())


def test_memory_that_is_damaged_again_and_again_costs_the_process() -> None:
    controller = running(policy=Policy(max_stuck=3))
    for _ in range(2):
        assert not of(controller.damaged(1, 0, controller.job.generation, "memory error", COMPUTE_0), Kill)
        for rank in range(3):
            join(controller, rank, holds=rank != 1)
        finish_recovery(controller)
    assert killed(controller.damaged(1, 0, controller.job.generation, "memory error", COMPUTE_0)) == [1]


def test_a_damaged_rank_keeps_the_others_from_rolling_forward() -> None:
    """It is still computing: it has published nothing for the next update, although its peers are READY."""
    controller = running()
    controller.damaged(2, 0, 0, "memory error", COMPUTE_0)
    join(controller, 0, phase=Phase.READY)
    join(controller, 1, phase=Phase.READY)
    assert sent(join(controller, 2, holds=False), Plan)[0].commits == 0


def test_failed_collectives_in_a_row_end_the_job_but_not_over_its_life() -> None:
    controller = running(policy=Policy(max_stuck=3, save_last=False))
    for commits in range(1, 8):
        assert not of(controller.failed_collective(controller.job.generation, "flaky"), EndJob)
        recover(controller, -1, commits=commits)
        finish_recovery(controller)
    ends = []
    while not ends:
        ends = of(controller.failed_collective(controller.job.generation, "flaky"), EndJob)
    assert controller.job.generation <= 7 + 3
    assert "keep failing" in ends[0].reason


def test_repairs_are_bounded_within_a_window_of_updates() -> None:
    controller = running(policy=Policy(max_repairs=3, repairs_window=10, save_last=False))
    for commits in (1, 5, 9, 16, 20):
        standings = [Standing(commits, Phase.COMPUTE)] * 3
        assert not of(controller.failed_collective(controller.job.generation, "flaky", standings), EndJob)
        recover(controller, -1, commits=commits)
        finish_recovery(controller)
    standings = [Standing(22, Phase.COMPUTE)] * 3
    assert not of(controller.failed_collective(controller.job.generation, "flaky", standings), EndJob)
    recover(controller, -1, commits=22)
    finish_recovery(controller)
    commands = controller.failed_collective(controller.job.generation, "flaky", standings, culprit=2)
    assert killed(commands) == [2], "its device says so, so it is replaced"
    assert of(controller.failed_collective(controller.job.generation, "flaky", standings), EndJob)


def test_survivors_that_a_recovery_waits_for() -> None:
    controller = running()
    assert controller.job.awaited() == []
    controller.lost(1, 0, "died", COMPUTE_0)
    join(controller, 0)
    assert controller.job.awaited() == [2], "the replacement has other things to do first"
    join(controller, 2)
    assert controller.job.awaited() == []


def test_a_rank_that_dies_again_and_again_without_a_commit_between() -> None:
    controller = running(policy=Policy(max_stuck=3))
    for _ in range(10):
        commands = controller.lost(1, controller.job.incarnations[1], "died", COMPUTE_0)
        if of(commands, EndJob):
            break
        recover(controller, 1)
        finish_recovery(controller)
    assert controller.job.replacements == 2
    assert "without one committed update" in of(commands, EndJob)[0].reason


def test_progress_resets_the_count() -> None:
    controller = running(policy=Policy(max_stuck=2))
    for commits in range(1, 10):
        assert of(controller.lost(1, commits - 1, "died", [Standing(commits, Phase.COMPUTE)] * 3), Spawn)
        recover(controller, 1, commits=commits)
        finish_recovery(controller)


@pytest.mark.parametrize("by_its_exit", [True, False])
def test_a_death_that_ends_the_job_has_one_exit_code_whoever_saw_it_first(by_its_exit: bool) -> None:
    """A scheduler starts a job with code 75 again. The end of a process and its futex may tell in any order."""
    controller, standings = running(policy=Policy(max_restarts=0)), [Standing(6, Phase.APPLIED)] * 3
    if by_its_exit:
        controller.exited(1, 0, -9, standings)
    else:
        controller.lost(1, 0, "was killed by signal 9", standings)
    for rank in (0, 2):
        join(controller, rank, commits=6)
    (end,) = of(controller.saved_last("saved"), EndJob)
    assert end.code == EXIT_UNRECOVERABLE


def test_stop_ends_once() -> None:
    controller = running()
    assert of(controller.stop(143, "SIGTERM"), EndJob) == [EndJob(143, "SIGTERM")]
    assert controller.stop(143, "SIGTERM") == []
    assert controller.job.stage is Stage.ENDED


def test_who_is_stopped_before_the_first_step_costs_all_their_start() -> None:
    """Nobody has a state yet that must be kept, whatever the replica groups will be."""
    controller = Controller(2)
    controller.launch()
    controller.greeted(0, 0)
    assert killed(controller.fence({1}, "hung", COMPUTE_0)) == [1]
    spawns = of(controller.lost(1, 0, "hung", COMPUTE_0), Spawn)
    assert [(spawn.rank, spawn.incarnation, spawn.joining) for spawn in spawns] == [(0, 1, False), (1, 1, False)]


def test_every_fault_is_noted() -> None:
    commands = running().lost(1, 0, "died", COMPUTE_0)
    assert Note("fault", rank=1, detail={"lost": [1], "reason": "rank 1 died", "strategy": "ARF"}) in commands


def differs(controller: Controller, rank: int, held: str) -> list[Command]:
    message = Differs(5, [("v", "0"), ("w", held)], averages=True, batch=f"batch {rank}", device=f"host cuda:{rank}")
    return controller.differs(rank, controller.job.incarnations[rank], message)


@pytest.mark.parametrize("stage", [Stage.RUNNING, Stage.FINISHED])
def test_replicas_that_differ_end_the_job_when_all_have_said_what_they_hold(stage: Stage) -> None:
    controller = running(4, replicas=((0, 2), (1, 3)))
    if stage is Stage.FINISHED:
        for rank in range(4):
            controller.finish(rank, 0, 0)
    assert controller.differs(0, 7, Differs(5, [], averages=True)) == [], "not of this incarnation"
    assert differs(controller, 0, "1") == []
    commands = differs(controller, 2, "2")
    (note, *_), (end,) = of(commands, Note), of(commands, EndJob)
    assert (note.kind, note.detail["ranks"]) == ("replicas_differ", [0, 2])
    assert end.code == 2
    assert "'w' differs between ranks [0] and [2]" in end.reason
    assert differs(controller, 0, "1") == controller.disagreed(0) == []


def test_replicas_that_differ_are_not_waited_for_in_vain() -> None:
    controller = running(3)
    assert differs(controller, 1, "2") == []
    assert differs(controller, 0, "1") == []
    (end,) = of(controller.disagreed(0), EndJob)
    assert end.code == 2
    assert "'w' differs between ranks [0] and [1]" in end.reason


def saving(newest: int) -> Controller:
    controller = running(2)
    controller.job.can_go_back, controller.job.newest_saved = lambda: True, lambda: newest
    return controller


def differ(controller: Controller) -> list[Command]:
    """Before update 5."""
    return [*differs(controller, 0, "1"), *differs(controller, 1, "2")]


def test_replicas_that_differ_go_back_to_a_saved_state() -> None:
    controller = saving(4)
    commands = differ(controller)
    told, again = of(commands, Note)
    assert (told.kind, again.kind) == ("replicas_differ", "restart_all")
    by_rank = {key: told.detail[key] for key in ("name", "digests", "batches", "devices")}
    assert by_rank == {
        "name": "w",
        "digests": {"0": "1", "1": "2"},
        "batches": {"0": "batch 0", "1": "batch 1"},
        "devices": {"0": "host cuda:0", "1": "host cuda:1"},
    }
    assert [(spawn.rank, spawn.attempt) for spawn in of(commands, Spawn)] == [(0, 1), (1, 1)]
    assert controller.job.stage is Stage.STARTING
    assert controller.disagreed(0) == controller.disagreed(1) == [], "the first one's time is over"


@pytest.mark.parametrize(
    ("now", "wrong"),
    [({0: 11, 1: 11}, [1]), ({0: 12, 1: 12}, [0]), ({0: 13, 1: 13}, None), ({0: 11, 1: 12}, None)],
    ids=["the second", "the first", "both", "they differ again"],
)
def test_of_two_who_was_wrong_is_told_when_both_have_come_there_again(
    now: dict[int, int], wrong: list[int] | None
) -> None:
    controller = saving(4)
    for rank in (0, 1):
        said = Differs(6, [("w", str(rank))], averages=True, since=5, held=(11, 12))
        controller.differs(rank, 0, said)
    assert controller.job.doubt is not None
    assert controller.held(0, 1, Held(4, 11)) == [], "another update"
    assert controller.held(0, 0, Held(5, 11)) == [], "a process of before"
    assert controller.held(0, 1, Held(5, now[0])) == []
    assert controller.copy().job.doubt is not controller.job.doubt
    commands = controller.held(1, 1, Held(5, now[1]))
    detail = {"commits": 5, "ranks": wrong, "anew": []}
    assert commands == ([Note("held_wrong", rank=wrong[0], detail=detail)] if wrong else [])
    assert controller.job.doubt is None
    (text,) = told("held_wrong", 3, 0.0, {"commits": 5, "ranks": [1]})
    assert "hold what the replicas of rank 1 had held: rank 1 had held something else" in text
    (text,) = told("held_wrong", 3, 0.0, {"commits": 5, "ranks": [0], "anew": [1]})
    assert "as all of them, rank 1 began anew, in another's place: if the training depends on something" in text


def test_a_rank_that_had_taken_anothers_place_is_named_with_them() -> None:
    controller = saving(4)
    controller.job.incarnations[1] = 2
    for rank in (0, 1):
        controller.differs(rank, 2 * rank, Differs(6, [("w", str(rank))], averages=True, since=5, held=(11, 12)))
    assert controller.job.doubt is not None
    assert controller.job.doubt.anew == controller.copy().job.doubt.anew == (1,)


def test_who_stands_alone_is_named_at_once_and_no_second_time() -> None:
    controller = running(3)
    controller.job.can_go_back, controller.job.newest_saved = lambda: True, lambda: 4
    for rank in range(3):
        said = Differs(6, [("w", str(rank == 2))], averages=True, since=5, held=(11, 11, 12))
        controller.differs(rank, 0, said)
    assert controller.job.stage is Stage.STARTING
    assert controller.job.doubt is None


def test_what_was_said_before_all_started_again_tells_nothing() -> None:
    controller = saving(4)
    assert differs(controller, 0, "1") == []
    controller.lost(0, 0, "died", COMPUTE_0)
    assert of(controller.lost(1, 0, "died", COMPUTE_0), Spawn)
    assert controller.job.attempt == 1
    assert differs(controller, 1, "2") == [], "rank 0 has said nothing yet"


@pytest.mark.parametrize("newest", [-1, 0])
def test_without_a_saved_state_they_end_the_job_at_once(newest: int) -> None:
    """A script without DDP is to be told so, and not to be started again first."""
    (end,) = of(differ(saving(newest)), EndJob)
    assert (end.code, end.reason.count("nothing of this is saved")) == (2, 1)


def started_again(controller: Controller) -> None:
    for rank in range(2):
        controller.started(rank, controller.job.incarnations[rank], Started("all", ("world",)))
    assert controller.job.stage is Stage.RUNNING


def test_replicas_that_differ_again_are_not_a_machines_mistake() -> None:
    controller = saving(4)
    differ(controller)
    started_again(controller)
    (end,) = of(differ(controller), EndJob)
    assert end.code == 2
    assert "They had differed before, and all had gone back for that" in end.reason


def test_behind_a_state_saved_since_it_is_another_mistake() -> None:
    controller = saving(4)
    differ(controller)
    started_again(controller)
    controller.job.newest_saved = lambda: 5
    assert len(of(differ(controller), Spawn)) == 2


def test_a_job_that_leaves_does_not_go_back() -> None:
    controller = saving(4)
    controller.leave(143, "SIGTERM")
    (end,) = of(differ(controller), EndJob)
    assert end.code == 2


def test_who_has_lost_memory_does_not_stand_for_the_last_one() -> None:
    controller = running(2)
    assert of(controller.damaged(1, 0, 0, "a parameter is lost", COMPUTE_0), RaiseStop)
    assert killed(controller.fence({0}, "hung", COMPUTE_0)) == [], "nobody knows yet what is left in rank 1"
    join(controller, 1, holds=True)
    assert killed(controller.fence({0}, "hung", COMPUTE_0)) == [0]


def test_what_a_script_finds_wrong_later_sends_all_back_once() -> None:
    controller = running()
    job = controller.job
    job.can_go_back, job.saved_before = (lambda: True), (lambda step: step >= 10)
    job.aware = True
    (note,) = of(controller.late(1, 0, Late(9, "")), Note)
    assert not note.detail["goes_back"]
    assert controller.late(0, 0, Late(9, "")) == [], "one line for each step"
    assert note.detail["told"].endswith("since step 9 can't be right; nothing of before is saved")
    commands = controller.late(1, 0, Late(12, "worse"))
    assert [spawn.rank for spawn in of(commands, Spawn)] == [0, 1, 2]
    first, again = [each for each in of(commands, Note) if each.kind in ("late_anomaly", "restart_all")]
    assert first.detail["goes_back"]
    assert again.detail["reason"] == "rank 1 says that what was trained since step 12 can't be right: worse"
    assert controller.late(1, 0, Late(12, "worse")) == [], "an old process"
    for rank in range(3):
        controller.started(rank, 1, Started("all", ("world",)))
    (note,) = of(controller.late(0, 1, Late(12, "worse")), Note)
    assert note.detail["told"].endswith("all have gone back for that already")
    assert of(controller.late(0, 1, Late(13, "")), Spawn), "another step is another anomaly"


def test_a_value_behind_its_update_sends_all_back_once() -> None:
    """And is kept only where the step runs again for it: a later run reads which have."""
    controller = running()
    job = controller.job
    job.can_go_back, job.saved_before = (lambda: True), (lambda step: step >= 10)
    job.aware = True
    told = "the loss of step {} is nan on rank 1, behind its update"
    nothing_saved, goes_back, again = (
        Late(step, seen=Anomaly(0, step, "loss", math.nan, math.inf)) for step in (9, 12, 12)
    )
    (note,) = controller.late(1, 0, nothing_saved)
    assert isinstance(note, Note)
    assert note.detail["told"] == told.format(9) + "; nothing of before is saved"
    commands = controller.late(1, 0, goes_back)
    assert [kept.step for kept in of(commands, KeepAnomalies)] == [12]
    assert [note.detail["reason"] for note in of(commands, Note) if note.kind == "restart_all"] == [told.format(12)]
    for rank in range(3):
        commands = controller.started(rank, 1, Started("all", ("world",)))
    assert {send.message for send in of(commands, Send)} == {Resume(0, tolerated=frozenset({12}))}
    kept, note = controller.late(1, 1, again)
    assert isinstance(kept, KeepAnomalies)
    assert (kept.step, len(kept.values)) == (12, 2)
    assert isinstance(note, Note)
    assert note.detail["told"] == told.format(12) + "; all have gone back for that already"


def test_for_nan_all_go_back_once() -> None:
    """It shows somewhere between two looks; what shows again in between, however they lie then, is the same."""
    controller = running()
    job = controller.job
    job.can_go_back, job.saved_before = (lambda: True), (lambda step: step >= 4)
    job.aware = True
    only_told = controller.holds_nan(1, 0, HoldsNan(16, 16, "NaN in 3 of 4 tensors", without=8))
    (note,) = of(only_told, Note)
    assert (note.kind, note.rank, note.detail["first"], note.detail["may_go_back"]) == ("holds_nan", 1, True, False)
    (note,) = of(controller.holds_nan(0, 0, HoldsNan(16, 16, "NaN in 3 of 4 tensors", without=8)), Note)
    assert not note.detail["first"], "one line for all ranks"
    commands = controller.holds_nan(1, 0, HoldsNan(16, 16, "NaN", without=8, since=8))
    assert [spawn.rank for spawn in of(commands, Spawn)] == [0, 1, 2]
    again = next(each for each in of(commands, Note) if each.kind == "restart_all")
    assert again.detail["reason"] == "rank 1 says that what was trained since step 8 can't be right: it holds NaN"
    assert controller.holds_nan(0, 0, HoldsNan(16, 16, "NaN", without=8, since=8)) == [], "an old process"
    for rank in range(3):
        controller.started(rank, 1, Started("all", ("world",)))
    first, late = of(controller.holds_nan(0, 1, HoldsNan(14, 14, "NaN", without=10, since=10)), Note)
    assert first.detail["first"], "in this start nothing was told yet"
    assert late.detail["told"].endswith("all have gone back for that already")
    assert of(controller.holds_nan(0, 1, HoldsNan(24, 24, "NaN", without=16, since=16)), Spawn), "that is another one"


def test_nan_that_the_redone_step_has_come_to_again_sends_nobody_back() -> None:
    controller = running()
    controller.job.can_go_back = controller.job.saved_before = lambda *_: True
    cured = {("norm", 4): (math.nan,), ("loss", 5): (math.nan, 46.1)}
    controller.job.know_anomalies({("norm", 9): (math.nan, math.nan), **cured})
    for since, until, why in ((4, 9, ""), (9, 16, "for it already"), (10, 16, "")):
        message = HoldsNan(until, until, "NaN", without=since, since=since)
        commands = controller.holds_nan(1, controller.job.incarnations[1], message)
        late = next(each for each in of(commands, Note) if each.kind == "late_anomaly")
        assert late.detail["goes_back"] == (not why), (since, until)
        if not why:
            for rank in range(3):
                controller.started(rank, controller.job.incarnations[rank], Started("all", ("world",)))
        else:
            assert str(late.detail["told"]).endswith(why)


@pytest.mark.parametrize(("saved", "since"), [(-1, 8), (8, 8), (12, 12), (15, 15), (16, 8), (20, 8)])
def test_for_nan_all_go_back_to_the_newest_state_without(saved: int, since: int) -> None:
    """It may be newer than what ranks have looked at themselves."""
    controller = running()
    controller.job.can_go_back = controller.job.saved_before = lambda *_: True
    controller.job.newest_without_nan = lambda: saved
    commands = controller.holds_nan(1, 0, HoldsNan(16, 16, "NaN", without=8, since=8))
    assert [note.detail["step"] for note in of(commands, Note) if note.kind == "late_anomaly"] == [since]


def test_going_back_needs_no_replacements() -> None:
    """Without ARF nobody takes a lost rank's place; here none is lost. Where all are, it is another matter."""
    off = Policy(replace=False)
    controller = running(2, off)
    controller.job.can_go_back, controller.job.newest_saved = lambda: True, lambda: 4
    assert [spawn.rank for spawn in of(differ(controller), Spawn)] == [0, 1]
    controller = running(2, off)
    controller.job.can_go_back = controller.job.saved_before = lambda *_: True
    assert [spawn.rank for spawn in of(controller.late(1, 0, Late(12, "")), Spawn)] == [0, 1]
    controller = running(1, off)
    controller.job.can_go_back = lambda: True
    commands = controller.lost(0, 0, "died", COMPUTE_0)
    assert not of(commands, Spawn)
    assert "replacing lost ranks is switched off" in of(commands, EndJob)[0].reason


def test_where_all_may_not_start_again_training_goes_on() -> None:
    controller = running(policy=Policy(max_restarts=0))
    controller.job.can_go_back = controller.job.saved_before = lambda *_: True
    (note,) = controller.late(1, 0, Late(12, ""))
    assert isinstance(note, Note)
    assert not note.detail["goes_back"]
    assert "since step 12 can't be right, and " in str(note.detail["told"])
