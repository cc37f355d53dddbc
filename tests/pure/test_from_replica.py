"""State from a replica to a rank that has lost its own, both in this process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - only where torch is

from resilient_train.errors import TransferError  # noqa: E402
from resilient_train.frameworks.roles import NOTHING_WRITTEN, Damage, Objects, WrittenInTail  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402
from resilient_train.protocol.messages import Fetched, Offer, Plan, Pull  # noqa: E402
from resilient_train.session import from_replica as module  # noqa: E402
from resilient_train.session.from_replica import FromReplica  # noqa: E402
from resilient_train.state.transfer import Span, view  # noqa: E402

pytestmark = pytest.mark.torch

PLAN = Plan(3, 5, {1: 0})


class Rank:
    """``wire``: what the process group has under way."""

    def __init__(self, number: int, wire: list[bytes], transfer: str = "auto") -> None:
        torch.manual_seed(number)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.wire = wire
        self.sent: list[Any] = []
        self.taken: list[bytes] = []
        self.engine = engine_for(Objects((self.model,), (self.optimizer,)))
        link: Any = SimpleNamespace(rank=number, channel=SimpleNamespace(send=self.sent.append))
        groups: Any = SimpleNamespace(send=self._send, receive=self._receive)
        publication: Any = SimpleNamespace(around_tail=lambda _: NOTHING_WRITTEN)
        self.handover = FromReplica(link, self.engine.state, self.engine.window, groups, publication, transfer)

    def _send(self, spans: list[Span], target: int) -> None:
        assert target == 1
        self.wire += [bytes(view(span)) for span in spans]

    def _receive(self, spans: list[Span], source: int) -> None:
        assert source == 0
        for span in spans:
            view(span)[:] = self.wire.pop(0)

    def train(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take(self, offer: Offer) -> int:
        def load(published: bytes, _: WrittenInTail) -> int:
            self.taken.append(published)
            return 9

        return self.handover.take(PLAN, offer, b"published", load)

    @property
    def digest(self) -> str:
        return self.engine.state.fingerprint().digest()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[tuple[Rank, Rank, Offer]]:
    """A source, which has trained and made its offer, and a rank that is to copy it."""
    wire: list[bytes] = []
    transfer = getattr(request, "param", "auto")
    source, target = Rank(0, wire, transfer), Rank(1, wire, transfer)
    source.train()
    source.handover.offer(3, 5, (1,), within=False)
    yield source, target, source.sent[0]
    assert wire == []


def test_out_of_the_sources_memory(ranks: tuple[Rank, Rank, Offer]) -> None:
    source, target, offer = ranks
    assert target.take(offer) == 9
    assert target.digest == source.digest
    assert target.taken == [b"published"]
    (fetched,) = target.sent
    assert isinstance(fetched, Fetched)
    assert (fetched.source, fetched.way) == (0, "memory")
    assert target.handover.take_layout() == source.engine.window.layout()
    with pytest.raises(TransferError, match="can't be read"):
        target.engine.window.rebuild_reducer(b"no layout", 9)


def over_the_group(ranks: tuple[Rank, Rank, Offer]) -> None:
    source, target, offer = ranks
    source.handover.serve(Pull(3, 0, 1))  # the bytes wait in a list here; really it answers the target's frame
    assert target.take(offer) == 9
    assert target.digest == source.digest
    pull, fetched = target.sent
    assert pull == Pull(3, 0, 1)
    assert fetched.way == "group"


@pytest.mark.parametrize("ranks", ["group"], indirect=True)
def test_over_the_group_because_the_setting_says_so(ranks: tuple[Rank, Rank, Offer]) -> None:
    over_the_group(ranks)


def test_over_the_group_because_memory_can_not_be_read(
    ranks: tuple[Rank, Rank, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(module, "read_from", refused)
    over_the_group(ranks)


def test_a_copy_that_fails_half_way_leaves_nothing_to_roll_back_to(
    ranks: tuple[Rank, Rank, Offer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recovery begins anew, and has this rank roll back: to parts of its own state, among those of the source."""
    source, target, offer = ranks
    target.engine.window.begin()
    target.engine.window.save_undo()

    def torn(*_: Any) -> None:
        raise OSError("the source has died")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="has died"):
        patch.setattr(module, "read_from", torn)
        target.take(offer)
    torch.rand(3)
    random = torch.get_rng_state()
    target.engine.window.rollback()
    assert torch.equal(torch.get_rng_state(), random)
    target.take(offer)
    target.engine.window.rollback()
    assert target.digest == source.digest


def test_only_what_was_damaged_is_fetched_unless_the_rest_differs(ranks: tuple[Rank, Rank, Offer]) -> None:
    source, target, offer = ranks
    target.take(offer)
    path = ("model", 0, "0.weight")
    with torch.no_grad():
        target.model[0].weight.fill_(7)
    target.handover.damaged = Damage(frozenset({path}), (), 0)
    target.take(offer)
    assert target.sent[-1].bytes_copied == 4 * 4 * 4
    with torch.no_grad():
        target.model[1].weight.fill_(7)
    target.handover.damaged = Damage(frozenset({path}), (), 0)
    target.take(offer)
    assert target.sent[-1].bytes_copied > 4 * 4 * 4
    assert target.digest == source.digest


def test_an_offer_that_is_none(ranks: tuple[Rank, Rank, Offer]) -> None:
    _, target, _ = ranks
    with pytest.raises(TransferError, match="offer can't be read"):
        target.take(Offer(3, 0, 1, 1, b"not an offer", "0" * 32))
