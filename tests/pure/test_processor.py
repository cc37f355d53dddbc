"""One rank's side: phases go forward only, and each plan has exactly one part for it."""

import pytest

from resilient_train.errors import ProtocolError
from resilient_train.protocol.messages import Plan
from resilient_train.protocol.processor import Action, Processor
from resilient_train.protocol.standing import Phase, Standing

ORDER = (Phase.COMPUTE, Phase.READY, Phase.UPDATING, Phase.APPLIED)


def standing_at(commits: int, phase: Phase) -> Processor:
    processor = Processor(1)
    processor.standing = Standing(commits, phase)
    return processor


def joined(commits: int, phase: Phase) -> Processor:
    processor = standing_at(commits, phase)
    processor.join(1)
    return processor


def test_phases_of_healthy_steps() -> None:
    processor = Processor(0)
    seen = [processor.advance(phase) for _ in range(3) for phase in ORDER]
    assert seen == sorted(set(seen))
    assert seen[-1] == (3, Phase.APPLIED)


@pytest.mark.parametrize("phase", [Phase.COMPUTE, Phase.READY])
def test_no_way_back(phase: Phase) -> None:
    with pytest.raises(AssertionError, match="went back"):
        standing_at(2, Phase.READY).advance(phase)


def test_an_update_ends_the_count_of_its_tail() -> None:
    processor = standing_at(0, Phase.UPDATING)
    processor.tail_done = 3
    processor.advance(Phase.APPLIED)
    assert processor.tail_done == 0


def test_join_says_how_far() -> None:
    processor = standing_at(4, Phase.APPLIED)
    processor.tail_done = 2
    message = processor.join(3, ("world",), 99)
    assert (message.generation, message.commits, message.phase, message.holds) == (3, 4, 0, True)
    assert (message.tail_done, message.groups, message.stopped_ns) == (2, ("world",), 99)
    assert processor.generation == 3


def test_a_cut_update_leaves_nothing_usable() -> None:
    processor = standing_at(4, Phase.UPDATING)
    assert not processor.join(1).holds
    assert not processor.join(2).holds, "a second fault does not repair it"
    assert processor.accept(Plan(2, 5, {1: 0})) is Action.COPY
    assert processor.settle() == (5, Phase.COMPUTE)
    assert processor.holds


def test_a_generation_is_joined_once() -> None:
    processor = joined(0, Phase.COMPUTE)
    processor.accept(Plan(1, 0, {}))
    for generation in (0, 1):
        with pytest.raises(ProtocolError, match="asked to join"):
            processor.join(generation)
    assert processor.join(2).generation == 2


def test_a_superseded_plan_is_forgotten() -> None:
    processor = joined(0, Phase.COMPUTE)
    processor.accept(Plan(1, 0, {2: 1}))
    assert processor.sources_for == (2,)
    processor.join(2)
    assert processor.plan is None
    assert processor.sources_for == ()


@pytest.mark.parametrize(
    ("standing", "commits", "action"),
    [
        ((3, Phase.COMPUTE), 3, Action.REDO),
        ((3, Phase.READY), 3, Action.REDO),
        ((3, Phase.READY), 4, Action.APPLY),
        ((4, Phase.APPLIED), 4, Action.FINISH_TAIL),
        ((0, Phase.APPLIED), 0, Action.FINISH_TAIL),
    ],
)
def test_the_part_in_a_plan(standing: tuple[int, Phase], commits: int, action: Action) -> None:
    processor = joined(*standing)
    assert processor.accept(Plan(1, commits, {})) is action
    assert processor.settle() == (commits, Phase.COMPUTE)


@pytest.mark.parametrize(
    ("standing", "commits"),
    [((3, Phase.COMPUTE), 4), ((3, Phase.READY), 5), ((4, Phase.APPLIED), 3), ((3, Phase.APPLIED), 4)],
)
def test_a_plan_for_somebody_else(standing: tuple[int, Phase], commits: int) -> None:
    with pytest.raises(ProtocolError, match="no part in a plan"):
        joined(*standing).accept(Plan(1, commits, {}))


@pytest.mark.parametrize("generation", [0, 2])
def test_a_plan_of_another_generation(generation: int) -> None:
    with pytest.raises(ProtocolError, match="is in generation 1"):
        joined(0, Phase.COMPUTE).accept(Plan(generation, 0, {}))


def test_sources() -> None:
    processor = joined(0, Phase.COMPUTE)
    processor.accept(Plan(1, 0, {3: 1, 0: 1, 2: 5}))
    assert processor.sources_for == (0, 3)


def test_a_replacement_copies_whatever_the_plan() -> None:
    processor = Processor(1, generation=-1, holds=False)
    assert not processor.join(1).holds
    assert processor.accept(Plan(1, 17, {1: 0})) is Action.COPY
