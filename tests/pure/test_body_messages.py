"""Messages of bodies: whether both ends count the same behind each update, and what the agent makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.frameworks.torch.communication.body_messages import BodyMessages
from resilient_train.protocol.carried_messages import CarriedMessages
from resilient_train.protocol.commands import EndJob
from resilient_train.protocol.controller import Controller
from resilient_train.protocol.messages import BodiesMessages, MessageChannel
from resilient_train.protocol.policy import Policy
from resilient_train.strategies.base import Fault, Kind

RANKS = (4, 7, 9)
"""Of the group."""


class Rank:
    def __init__(self, place: int) -> None:
        self.group: Any = SimpleNamespace(global_ranks=RANKS, getRank=lambda: place, group_name="pairs")
        self.messages = BodyMessages()

    def begin(self, verb: str, peer: int, tag: int = 0) -> None:
        self.messages.begin(self.group, verb, ([], peer, tag))


def words(*ranks: Rank) -> list[int | None]:
    return [dict(each.messages.words()).get(MessageChannel(4, 7, "pairs, tag 0")) for each in ranks]


def test_both_ends_have_one_word_as_long_as_they_count_the_same() -> None:
    first, second, other = map(Rank, range(3))
    for commits in range(1, 6):
        for _ in range(commits % 3):
            first.begin("send", 1)
            second.begin("recv", 0)
            second.begin("send", 0, tag=3)
            first.begin("recv", 1, tag=3)
        for each in (first, second):
            each.messages.commit(commits)
        (one, same) = words(first, second)
        assert one == same is not None
    assert other.messages.words() == []
    assert len(first.messages.words()) == 2


@pytest.mark.parametrize("late", [1, 3])
def test_what_is_received_later_is_another_word_for_good(late: int) -> None:
    first, second = Rank(0), Rank(1)
    for commits in range(1, 9):
        if commits != 2:
            first.begin("send", 1)
        if commits != 2 and (commits != 1 or late == 0):
            second.begin("recv", 0)
        if commits == late + 1:
            second.begin("recv", 0)
        first.messages.commit(commits)
        second.messages.commit(commits)
    one, other = words(first, second)
    assert one != other
    for each in (first, second):
        each.messages.forget()
    assert words(first, second) == [None, None]


def test_of_receives_from_anybody_nothing_is_known() -> None:
    rank = Rank(1)
    rank.begin("recv", 0)
    rank.messages.begin(rank.group, "recv_anysource", ([], 0))
    rank.messages.commit(1)
    assert rank.messages.words() == []


CHANNEL = MessageChannel(0, 1, "0, tag 0")


def test_the_agent_tells_one_channel_once_however_late_ranks_are_heard() -> None:
    carried = CarriedMessages()

    def heard(rank: int, commits: int, word: int | None, of: tuple[int, int] = (0, 0)) -> MessageChannel | None:
        return carried.heard(rank, BodiesMessages(commits, [(CHANNEL, word)] if word is not None else []), of)

    assert heard(0, 1, 5) is heard(0, 2, 6) is None, "ahead of the other"
    assert heard(1, 1, 5) is None
    assert heard(1, 2, 7, (0, 1)) is None, "of another generation"
    assert heard(0, 2, 6, (0, 1)) == CHANNEL
    assert heard(0, 4, 1, (0, 1)) is heard(1, 4, None, (0, 1)) is None, "it was told"


def test_who_has_received_nothing_yet_is_another_end() -> None:
    carried = CarriedMessages()
    others = MessageChannel(1, 2, "0, tag 0")
    assert carried.heard(1, BodiesMessages(1, [(others, 3)]), (0, 0)) is None
    assert carried.heard(0, BodiesMessages(1, [(CHANNEL, 5)]), (0, 0)) == CHANNEL


@pytest.mark.parametrize("kind", [Kind.COLLECTIVE, Kind.LOST, Kind.MEMORY, Kind.ANOMALY])
def test_the_next_fault_ends_the_job(kind: Kind) -> None:
    controller = Controller(2, Policy())
    assert [command.kind for command in controller.carried(CHANNEL)] == ["message_carried"]  # type: ignore[attr-defined]
    assert controller.carried(CHANNEL) == []
    commands = controller._fault(Fault(kind, "it is lost", 1))
    (end,) = (command for command in commands if isinstance(command, EndJob))
    assert end.code == 2
    assert end.reason.startswith("it is lost, and messages from rank 0 to rank 1 (0, tag 0) that are sent in the body")
