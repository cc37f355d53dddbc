"""Ranks killed in the tail of an update, in collectives of every kind over groups of every kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, launch

WHOLE = ("reductions", "chain", "mesh", "three", "to_roots", "gathers", "exchanges")
"""What can go on without a rank that died before it came to it."""
SOURCED = ("broadcasts", "direct", "scatters", "objects", "messages")
"""What can't, if that rank was to send something."""
SAME_ON_ALL = ("reductions", "gathers", "broadcasts")
KINDS = (*WHOLE, *SOURCED)
RANKS = 4
Values = dict[tuple[int, int], str]
"""(rank, step) -> a digest of what the step's tail has given."""


def values(run: Run) -> Values:
    found: Values = {}
    for rank in range(RANKS):
        for line in (run.run_dir / f"tail_rank{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert (rank, record["step"]) not in found, f"rank {rank} ran the tail of step {record['step']} twice"
            found[rank, record["step"]] = record["found"]
    return found


def parameters(run: Run) -> dict[int, str]:
    return {rank: digest for rank, (digest, _) in run.digests().items()}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """The run without faults, made once for each choice of kinds."""
    made: dict[tuple[str, ...], Run] = {}

    def run(*arguments: str) -> Run:
        if arguments not in made:
            made[arguments] = launch(tmp_path_factory.mktemp("calm") / "run", "tail.py", *arguments, ranks=RANKS)
            assert made[arguments].code == 0, made[arguments].explain()
        return made[arguments]

    return run


def assert_exact(run: Run, reference: Run, *, faults: int, gone: set[tuple[int, int]]) -> None:
    """``gone``: (rank, step) of the tails that a dead rank has not come to the end of."""
    assert run.code == 0, run.explain()
    assert run.recoveries() == faults, run.explain()
    assert parameters(run) == parameters(reference)
    expected = {key: value for key, value in values(reference).items() if key not in gone}
    assert values(run) == expected, run.explain()


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shift", range(RANKS))
def test_a_rank_dies_behind_what_it_gave(tmp_path: Path, calm: Callable[..., Run], shift: int) -> None:
    """All that it gave was published: every survivor gets the bits of the undisturbed run."""
    victims = {step: (step + shift) % RANKS for step in range(len(KINDS))}
    plan = [f"{step}:{rank}:last" for step, rank in victims.items()]
    run = launch(tmp_path / "run", "tail.py", "--kinds", *KINDS, "--kill", *plan, ranks=RANKS, timeout_s=220)
    gone = {(rank, step) for step, rank in victims.items()}
    assert_exact(run, calm("--kinds", *KINDS), faults=len(plan), gone=gone)
    assert not run.of("tail_input_missing")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("shift", range(RANKS))
def test_a_rank_dies_in_the_first(tmp_path: Path, calm: Callable[..., Run], shift: int) -> None:
    """Each tail goes on without it behind that one, the same on all ranks; training has not noticed."""
    victims = {step: (step + shift) % RANKS for step in range(len(WHOLE))}
    plan = [f"{step}:{rank}:first" for step, rank in victims.items()]
    run = launch(tmp_path / "run", "tail.py", "--kinds", *WHOLE, "--steps", "7", "--kill", *plan, ranks=RANKS)
    reference = calm("--kinds", *WHOLE, "--steps", "7")
    assert run.code == 0, run.explain()
    assert run.recoveries() == len(plan), run.explain()
    assert parameters(run) == parameters(reference)
    found = values(run)
    missing = {event["step"] for event in run.of("tail_input_missing")}
    for step, kind in enumerate(WHOLE):
        told = {rank: found[rank, step] for rank in range(RANKS) if rank != victims[step]}
        if step not in missing:
            assert all(value == values(reference)[rank, step] for rank, value in told.items())
        if kind in SAME_ON_ALL:
            assert len(set(told.values())) == 1, (kind, told)
    assert missing, "no tail was longer than one collective"
