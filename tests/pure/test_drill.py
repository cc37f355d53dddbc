"""The plan of a drill: drawn from a seed, possible in the run at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from resilient_train.errors import ConfigError
from resilient_train.faults import parse_plan
from resilient_train.testing.drill import DrillOptions, plan


def options(**changes: object) -> DrillOptions:
    fields = {"command": (__file__,), "run_dir": Path("/nowhere/drill"), "ranks": 3, **changes}
    return DrillOptions(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("steps", [6, 7, 40])
def test_a_plan_can_happen(seed: int, steps: int) -> None:
    clauses = plan(options(seed=seed), steps, updates_every_step=bool(seed % 2))
    assert 1 <= len(clauses) <= 6
    numbers = [clause.step for clause in clauses]
    assert numbers == sorted(set(numbers))
    assert all(1 <= number < steps - 1 for number in numbers)
    deaths = [0, 0, 0]
    for clause in clauses:
        assert clause.incarnation == deaths[clause.rank], "a fault for a process that is not there any more"
        deaths[clause.rank] += clause.kind in ("kill", "stop")
        assert seed % 2 or clause.phase in ("COMPUTE", "BETWEEN")
    assert parse_plan("; ".join(clause.describe() for clause in clauses)) == tuple(clauses)


def test_the_same_seed_is_the_same_plan() -> None:
    one, same, other = (plan(options(seed=seed), 100, updates_every_step=True) for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"command": ()}, "give the script behind --"),
        ({"command": ("nowhere.py",)}, "there is no script 'nowhere.py'"),
        ({"limit_s": 0.0}, "--limit-s 0"),
        ({"ranks": 1}, "no replica"),
        ({"faults": 0}, "at least one"),
        ({"kinds": ("kill", "ucce")}, "'ucce' is not one of"),
        ({"run_dir": Path("/proc")}, "not an empty directory"),
    ],
)
def test_bad_input(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(**changes)
