"""Seeded random schedules of whole jobs.

``SIM_SECONDS=3600 SIM_FIRST=1000000 pytest tests/sim/test_seeds.py`` runs for an hour, from another seed on.
"""

import os
import time

import pytest

from resilient_train.testing import sim
from resilient_train.testing.sim import Outcome, SimulationError, main, simulate

SECONDS = float(os.environ.get("SIM_SECONDS", "8"))
FIRST = int(os.environ.get("SIM_FIRST", "0"))
MIN_JOBS = 200


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 120)
def test_many_seeds() -> None:
    deadline = time.monotonic() + SECONDS
    outcomes: list[Outcome] = []
    while time.monotonic() < deadline or len(outcomes) < MIN_JOBS:
        outcomes.append(simulate(FIRST + len(outcomes)))
    recoveries = sum(each.generations for each in outcomes)
    given_up = sum(each.given_up for each in outcomes)
    transitions = sum(each.transitions for each in outcomes)
    print(f"{len(outcomes)} jobs, {transitions} transitions, {recoveries} recoveries, {given_up} given up")
    assert recoveries > len(outcomes), "the schedules hardly hit anything"
    assert 0 < given_up < len(outcomes) * 2 / 3, "of five jobs one replaces nobody, or does what is forbidden"


@pytest.mark.timeout(SECONDS + 120)
def test_many_seeds_of_jobs_that_go_back() -> None:
    """To what is saved: nobody has the state of some shard, the script says that it is wrong, or replicas differ."""
    deadline = time.monotonic() + SECONDS / 2
    outcomes: list[Outcome] = []
    while time.monotonic() < deadline or len(outcomes) < MIN_JOBS:
        outcomes.append(simulate(FIRST + len(outcomes), saves=True))
    attempts = sum(each.attempts for each in outcomes)
    print(f"{len(outcomes)} jobs, {attempts} times all started again")
    assert attempts > len(outcomes) / 10


@pytest.mark.parametrize("seed", [0, 92, 4711])
def test_a_seed_is_one_schedule(seed: int) -> None:
    first: list[str] = []
    second: list[str] = []
    assert simulate(seed, trace=first.append) == simulate(seed, trace=second.append)
    assert first == second
    assert len(first) > 20


def moves(seeds: range) -> str:
    told: list[str] = []
    for seed in seeds:
        simulate(seed, trace=told.append)
    return "\n".join(told)


def test_some_seeds_compute_updates_twice_and_some_ask_for_steps_again() -> None:
    """All others have the schedules that they had before these were thought of: the draws have numbers of their own."""
    told = moves(range(4, 400, 16))
    assert all(f"twice={every}" in told for every in (1, 2, 3))
    assert ": deviation" in told
    assert ": asks again" in moves(range(11, 800, 64))
    others = moves(range(5, 400, 16))
    assert "twice=0" in others
    assert "twice=1" not in others
    assert ": deviation" not in others


def test_failure_names_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sim, "MAX_TRANSITIONS", 10)
    with pytest.raises(SimulationError, match=r"python -m resilient_train\.testing\.sim --seed 5 --trace"):
        simulate(5)
    assert main(["--seed", "5"]) == 1
    assert "seed 5" in capsys.readouterr().err
    with pytest.raises(SimulationError, match="--seed 5 --trace --saves"):
        simulate(5, saves=True)
    assert main(["--seeds", "5", "9", "--seconds", "1"]) == 1


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0", "10", "--seconds", "30"]) == 0
    assert "10 jobs" in capsys.readouterr().out
    assert main(["--seed", "3", "--trace"]) == 0
    assert "rank 0" in capsys.readouterr().out
