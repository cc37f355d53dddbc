"""How long a rank whose collective failed waits for the agent to say why: as long as both could run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.session import driver as module
from resilient_train.session.driver import Driver

LIMIT_S = 60.0


class Rig:
    """A rank in virtual time. ``look_s`` says how long each look took, and ``stopped`` whether the agent is, at a time;
    a stop comes at ``stop_s``.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        look_s: Callable[[float], float] = lambda _: 0.1,
        stopped: Callable[[float], bool] = lambda _: False,
        stop_s: float = 1e9,
    ) -> None:
        self.now = 0.0
        self.activities: list[Any] = []
        self._look_s, self._stop_s = look_s, stop_s
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        driver: Any = Driver.__new__(Driver)
        driver._verdict_timeout_s = LIMIT_S
        driver._rank = SimpleNamespace(generation=1)
        driver._pulse = SimpleNamespace(at=self.activities.append)
        driver._peers = SimpleNamespace(wait_stop=self._wait_stop)
        channel = SimpleNamespace(receive=lambda timeout_s: None, peer_is_stopped=lambda: stopped(self.now))
        driver._link = SimpleNamespace(channel=channel)
        self.driver = driver

    def _wait_stop(self, _generation: int, _timeout_ms: int) -> bool:
        self.now += self._look_s(self.now)
        return self.now >= self._stop_s

    def waits(self, *, limited: bool = True) -> on.RankEvent:
        found: on.RankEvent = self.driver._await_stop(do.AwaitStop(limited=limited))
        return found


def test_nobody_knows_why(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch)
    assert rig.waits() == on.Failed()
    assert LIMIT_S < rig.now < LIMIT_S + 1


def test_the_agent_was_stopped_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, stopped=lambda now: 1 < now < 1000, stop_s=1005)
    assert rig.waits() == on.Ok()
    rig = Rig(monkeypatch, stopped=lambda now: 1 < now < 1000)
    assert rig.waits() == on.Failed()
    assert 1000 + LIMIT_S - 2 < rig.now < 1000 + LIMIT_S + 1, "it has its time when it is continued"


def test_the_rank_itself_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the agent, say, and both are continued: whose turn comes first is open."""
    rig = Rig(monkeypatch, look_s=lambda now: 600 if 1 < now < 2 else 0.1, stop_s=605)
    assert rig.waits() == on.Ok()


def test_a_verdict_that_must_come_has_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(monkeypatch, stop_s=10 * LIMIT_S)
    assert rig.waits(limited=False) == on.Ok()
    assert len(rig.activities) == 2
