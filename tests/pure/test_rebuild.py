"""What ranks tell each other while they build a group: by way of the thread that has the channel, and nothing else."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from resilient_train.frameworks.torch.communication import process_group as group_module
from resilient_train.frameworks.torch.communication.process_group import BuiltGroup, ResilientGroup
from resilient_train.protocol.messages import Address
from resilient_train.session.rebuild import AddressExchange, build_groups

RANKS = 3


class Untouched(Store):
    """torch's store, in which a stranger has written."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} of the store was asked for")


@pytest.fixture
def wakes() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_what_is_told_is_taken_once_and_heard_by_who_waits(wakes: int) -> None:
    exchange = AddressExchange(4, os.dup(wakes))
    exchange.tell("group/0", b"here", [0, 2])
    assert os.eventfd_read(wakes) == 1
    told = [Address(4, "group/0", b"here", (0, 2))]
    assert (exchange.take(), exchange.take()) == (told, [])
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(exchange.wait_for("group/2")))
    waiting.start()
    exchange.hear(Address(4, "group/1", b"another", (0,)))
    exchange.hear(Address(4, "group/2", b"there", (0,)))
    waiting.join(30)
    assert found == [b"there"]
    assert not exchange.closed
    exchange.close()
    assert exchange.closed
    assert os.eventfd_read(wakes) == 1


def test_a_build_that_is_given_up_waits_for_nobody(wakes: int) -> None:
    exchange = AddressExchange(1, os.dup(wakes))
    errors: list[str] = []

    def wait() -> None:
        try:
            exchange.wait_for("group/1")
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    exchange.give_up()
    waiting.join(30)
    assert errors == ["the build of this process group was given up: a newer generation was announced"]


def test_what_is_told_while_another_word_is_sent_is_sent_too() -> None:
    """A rank may be the last that the others need: its groups are built when it has told, and not yet been heard."""
    sending, over = threading.Event(), threading.Event()
    sent: list[str] = []

    class Channel:
        def wait_either(self, other: int) -> bool:
            return bool(select.select([other], [], [], 30)[0])

        def send(self, frame: Address) -> None:
            sent.append(frame.key)
            sending.set()
            assert over.wait(30)

        def put_back(self, frames: list[Any]) -> None:
            assert frames == []

    class Groups:
        def build(self, generation: int, addresses: AddressExchange, *, replaced: bool) -> str:
            close = addresses.close

            def close_and_say() -> None:
                close()
                over.set()

            addresses.close = close_and_say  # type: ignore[method-assign]
            addresses.tell("first/0", b"", [0, 1])
            assert sending.wait(30)
            addresses.tell("second/0", b"", [0, 1])
            return "built"

    link: Any = SimpleNamespace(channel=Channel(), hear_addresses=lambda *_: None)
    assert build_groups(link, Groups(), 3, replaced=False) == "built"  # type: ignore[arg-type] # as much of it as is asked for
    assert sent == ["first/0", "second/0"]


def test_a_group_is_built_without_a_word_in_the_store(wakes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "groups", {})
    exchanges = [AddressExchange(2, os.dup(wakes)) for _ in range(RANKS)]
    built: list[BuiltGroup | None] = [None] * RANKS

    def build(rank: int) -> None:
        group = ResilientGroup(Untouched(), rank, RANKS, "all", [], timedelta(seconds=30))
        built[rank] = group.build(2, exchanges[rank], replaced=True)

    builders = [threading.Thread(target=build, args=(rank,)) for rank in range(RANKS)]
    for each in builders:
        each.start()
    while any(each.is_alive() for each in builders):
        for frame in [frame for exchange in exchanges for frame in exchange.take()]:
            assert frame.ranks == tuple(range(RANKS))
            for exchange in exchanges:
                exchange.hear(frame)
        time.sleep(0.001)
    tensors = [torch.full((4,), float(rank)) for rank in range(RANKS)]
    works = [each.inner.allreduce([tensor]) for each, tensor in zip(built, tensors, strict=True) if each]
    for work in works:
        work.wait()
    assert all(tensor.tolist() == [3.0] * 4 for tensor in tensors)
    assert all(each is not None and each.sockets for each in built)
