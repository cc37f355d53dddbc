"""An update that a gradient scaler refuses has a barrier before it and a tail behind it, like any other.

Until now its body was redone whole, and what the code behind ``scaler.step`` had done was done twice: an EMA of the
parameters was another one at the end, with the same parameters, and exit code 0. The soak found it.
"""

from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, launch
from test_kill_matrix import PLACES

REFUSED = range(3, 43, 4)
"""The steps of ``train.py`` in which the scaler overflows, where it does so often."""
MORE = ("scaler", "scaler+undo")


def plan(kind: str, ranks: int, places: tuple[str, ...]) -> tuple[str, int]:
    """One fault in each refused step, going round the ranks; and the number of steps."""
    clauses, incarnation = [], dict.fromkeys(range(ranks), 0)
    for number, (step, place) in enumerate(zip(REFUSED, places, strict=False)):
        rank = number % ranks
        clauses.append(f"{kind} rank={rank} step={step} {place} incarnation={incarnation[rank]}")
        incarnation[rank] += kind == "kill"
    return "; ".join(clauses), REFUSED[len(places) - 1] + 2


@pytest.mark.timeout(240)
@pytest.mark.parametrize("variant", ["scaler+clipped", *(pytest.param(each, marks=pytest.mark.long) for each in MORE)])
def test_kill_at_every_phase_of_a_refused_update(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    faults, steps = plan("kill", 2, PLACES)
    variant += "+often"
    reference = undisturbed(ranks=2, variant=variant, steps=steps)
    arguments = ("--steps", str(steps), "--variant", variant)
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", faults), timeout_s=200)
    hits = len(run.of("injected"))
    assert hits == len(PLACES) - ("undo" in variant), "with undo a body has no end of its own behind its update"
    assert_identical(run, reference, ranks=2, recoveries=hits, once="undo" not in variant)


def test_a_link_that_fails_behind_a_refused_update(tmp_path: Path, undisturbed: Reference) -> None:
    """In the tail's collectives, and in front of the barrier."""
    places = ("phase=APPLIED at=start", "phase=READY at=before", "phase=APPLIED at=end")
    faults, steps = plan("hcce", 3, places)
    reference = undisturbed(ranks=3, variant="scaler+often", steps=steps)
    arguments = ("--steps", str(steps), "--variant", "scaler+often")
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=3, flags=("--faults", faults))
    assert_identical(run, reference, ranks=3, recoveries=run.recoveries())
    assert run.recoveries() >= 2
