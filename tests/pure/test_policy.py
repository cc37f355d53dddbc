"""When to give up."""

from resilient_train.protocol.policy import DEFAULT_MAX_RESTARTS, Policy, why_give_up


def test_default_recovers() -> None:
    assert DEFAULT_MAX_RESTARTS > 0
    assert why_give_up(Policy(), used=0, lost=1, stuck=0) == ""


def test_restarts_are_counted_with_those_to_come() -> None:
    policy = Policy(max_restarts=2)
    assert why_give_up(policy, used=1, lost=1, stuck=0) == ""
    assert "--max-restarts 2 is used up" in why_give_up(policy, used=2, lost=1, stuck=0)
    assert "used up" in why_give_up(policy, used=1, lost=2, stuck=0)


def test_stuck() -> None:
    policy = Policy(max_stuck=3)
    assert why_give_up(policy, used=0, lost=1, stuck=2) == ""
    assert "3 times in a row" in why_give_up(policy, used=0, lost=1, stuck=3)


def test_switched_off() -> None:
    assert "ARF:1" in why_give_up(Policy(replace=False), used=0, lost=1, stuck=0)
