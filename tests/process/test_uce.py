"""Device memory that loses data: only what was hit is fetched again, nobody is replaced, the bits are the same.

The injection really destroys the bytes, so a repair that does nothing ends with other parameters, or with NaN.
"""

import itertools
from pathlib import Path

import pytest
from identity import assert_identical
from running import Reference, launch

PLACES = ("phase=COMPUTE at=forward", "phase=COMPUTE at=backward", "phase=UPDATING at=start")
TARGETS = ("param", "optimizer", "buffer", "gradient", "activation")
VARIANTS = ("accumulate+view+two+stateful", "undo+static+scaler")
ALONE = ("accumulate+view", "two+stateful", "undo", "static", "scaler")
WORLDS = (3, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long))


def plan_of(ranks: int) -> tuple[str, int, int]:
    """Every target at every place, going round the ranks: the plan, how many faults, how many steps."""
    cases = list(itertools.product(TARGETS, PLACES))
    clauses = [f"uce rank={i % ranks} step={2 + i} {place} target={what}" for i, (what, place) in enumerate(cases)]
    return "; ".join(clauses), len(cases), len(cases) + 3


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.shows("DDP", "memory damaged", "in place")
def test_every_kind_of_tensor(tmp_path: Path, undisturbed: Reference, ranks: int) -> None:
    plan, faults, steps = plan_of(ranks)
    run = launch(tmp_path / "run", "train.py", "--steps", str(steps), ranks=ranks, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=ranks, steps=steps), ranks=ranks, recoveries=faults)
    assert len(run.of("spawned")) == ranks, "nobody was to be replaced"
    whole = max(event["detail"]["bytes"] for event in run.of("fetched"))
    in_step = [e["detail"]["bytes"] for e in run.of("fetched") if e["detail"]["bytes"] < whole]
    # Three targets own state, at two places where the rest of it is intact; a cut update costs all of it.
    assert len(in_step) == 6, [event["detail"] for event in run.of("fetched")]
    assert max(in_step) < whole / 20


@pytest.mark.parametrize("variant", [*VARIANTS, *(pytest.param(each, marks=pytest.mark.long) for each in ALONE)])
def test_in_other_loops(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    plan = (
        "uce rank=1 step=3 phase=COMPUTE at=backward target=param; uce rank=0 step=5 phase=COMPUTE at=forward "
        "target=optimizer; uce rank=2 step=7 phase=COMPUTE at=backward target=gradient; kill rank=1 step=9"
    )
    arguments = ("--steps", "12", "--variant", variant)
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=3, flags=("--faults", plan))
    reference = undisturbed(ranks=3, variant=variant, steps=12)
    assert_identical(run, reference, ranks=3, recoveries=4, once="undo" not in variant)


def test_the_next_fault_comes_when_the_state_is_copied(tmp_path: Path, undisturbed: Reference) -> None:
    """Rank 1 copies what an update was cut in, and waits for all; what it had remembered of that step is gone."""
    plan = (
        "uce rank=1 step=3 phase=UPDATING at=start target=optimizer; kill rank=2 phase=RESTORE at=end generation=1; "
        "uce rank=1 step=6 phase=COMPUTE at=backward target=param; "
        "kill rank=2 phase=RESTORE at=end generation=3 incarnation=1"
    )
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=3, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=3, steps=9), ranks=3, recoveries=2)


def test_what_costs_the_process(tmp_path: Path, undisturbed: Reference) -> None:
    """The same step fails each time: bad memory that stays bad. Or it comes after the update, where the body can't be
    left. Then the next strategy takes over (ARF)."""
    again = "; ".join(["uce rank=1 step=4 phase=COMPUTE at=forward"] * 5)
    plan = f"{again}; uce rank=0 step=6 phase=APPLIED at=start target=optimizer"
    run = launch(tmp_path / "run", "train.py", "--steps", "9", ranks=2, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=2, steps=9), ranks=2, recoveries=run.recoveries())
    assert [event["rank"] for event in run.of("spawned")][2:] == [1, 0], run.explain()
    failed = [event["detail"]["error"] for event in run.of("device_failed")]
    assert ["after the update" in error for error in failed] == [False] * (len(failed) - 1) + [True], failed


def test_between_two_steps(tmp_path: Path, undisturbed: Reference) -> None:
    """In an evaluation of the script's: it is no error of the script's, and there is no step to run again."""
    arguments = ("--steps", "9", "--variant", "looks")
    plan = "uce rank=1 step=6 phase=COMPUTE at=forward target=param"
    run = launch(tmp_path / "run", "train.py", *arguments, ranks=2, flags=("--faults", plan))
    assert_identical(run, undisturbed(ranks=2, steps=9), ranks=2, recoveries=1)
    (failed,) = run.of("device_failed")
    assert "after the update, where a step can't be left" in failed["detail"]["error"]


def test_switched_off(tmp_path: Path) -> None:
    """Then it is an error of the script's, as it is without us."""
    run = launch(
        tmp_path / "run", "train.py", "--steps", "9", ranks=2,
        flags=("--faults", "uce rank=1 step=4 phase=COMPUTE at=forward"), MS_ENABLE_TFT="{ARF:1,HCCE:1}",
    )  # fmt: skip
    assert run.code == 1, run.explain()
    assert "UCE ERROR (injected: param)" in run.err
