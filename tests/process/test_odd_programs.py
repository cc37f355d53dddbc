"""Programs that ended with other bits and exit code 0, or lost their job, until a reader of the code named them."""

from pathlib import Path
from typing import Any

import pytest
from running import launch
from shared import Undisturbed

STEPS = "18"
KILLS = (
    "kill rank=1 step=2 phase=COMPUTE at=backward; "
    "kill rank=0 step=5 phase=UPDATING; "
    "kill rank=1 step=9 phase=READY at=before incarnation=1; "
    "kill rank=0 step=15 phase=COMPUTE at=backward incarnation=1"
)
"""A survivor redoes, or goes on; and with 48 samples for two ranks the second pass over the data has begun."""


TOGETHER = (
    "codebook+cooling+noisy+milestones+versions+evaluates",
    "words+stream",
    "heads+shuffled",
    "freezes+noisy_class+counts",
    "thaws+scaled",
    "annealed+begins+sets+mines",
    "whitens+columns+fused",
)
ALONE = (
    *("heads", "codebook", "words", "scaled", "stream", "shuffled", "evaluates", "freezes", "counts"),
    *("noisy", "noisy_class"),
    *("milestones", "versions", "cooling", "thaws"),
    *("annealed", "begins", "annealed+sets", "mines", "whitens", "columns", "fused"),
)
"""Each by itself, to tell which one is to blame."""


def long(kinds: tuple[str, ...]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.long) for each in kinds]


@pytest.mark.parametrize("kind", [*TOGETHER, *long(ALONE)])
def test_the_bits_are_those_of_an_undisturbed_run(tmp_path: Path, undisturbed_of: Undisturbed, kind: str) -> None:
    reference = undisturbed_of("odd_programs.py", kind, STEPS, ranks=2)
    # Which gradient becomes ready first, and so when the fault hits, hangs on the head that is used.
    plan = KILLS.replace("COMPUTE at=backward", "READY at=before") if "heads" in kind else KILLS
    run = launch(tmp_path / "run", "odd_programs.py", kind, STEPS, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == 4, run.explain()
    assert run.digests() == reference.digests(), run.explain()
    assert run.of("other_data") == [], run.explain()


@pytest.mark.parametrize("kind", ["bank0+bank1+bank", *long(("bank0", "bank1", "bank"))])
def test_a_buffer_that_grows_is_put_back(tmp_path: Path, undisturbed_of: Undisturbed, kind: str) -> None:
    """As long as nobody is lost: a new process makes the buffer that the script makes."""
    plan = "hcce rank=1 step=0 phase=COMPUTE at=backward; hcce rank=1 step=3 phase=COMPUTE at=backward"
    reference = undisturbed_of("odd_programs.py", kind, "6", ranks=2)
    run = launch(tmp_path / "run", "odd_programs.py", kind, "6", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == 2, run.explain()
    assert run.digests() == reference.digests(), run.explain()


@pytest.mark.parametrize("kind", [*(TOGETHER[at] for at in (0, 2, 3, 5, 6)), *long(("heads", "freezes", "cooling"))])
def test_all_ranks_are_lost(tmp_path: Path, undisturbed_of: Undisturbed, kind: str) -> None:
    """What the script has switched while it ran is not in its text."""
    plan = "kill rank=1 step=9 phase=COMPUTE at=start; kill rank=0 phase=STOP at=start generation=1"
    reference = undisturbed_of("odd_programs.py", kind, STEPS, ranks=2)
    run = launch(tmp_path / "run", "odd_programs.py", kind, STEPS, "--save", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("restart_all")) == 1, run.explain()
    assert run.digests() == reference.digests(), run.explain()


@pytest.mark.parametrize("kind", ["forever", "grows", *long(("passes",))])
def test_a_loader_that_does_not_find_its_place_is_told(tmp_path: Path, kind: str) -> None:
    """All went on with other data, and exit code 0."""
    run = launch(tmp_path, "odd_programs.py", kind, STEPS, ranks=2, flags=("--faults", "kill rank=0 step=15"))
    assert run.code == 0, run.explain()
    (told,) = run.of("other_data")
    assert (told["rank"], told["incarnation"], told["detail"]["next"]) == (0, 1, 15)
    assert run.err.count("rank 0: its loader was brought to where step 15 begins, and gives another batch") == 1


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("subtracts", "session.steps(9, start=0)"),
        pytest.param("starts", "session.steps(16, start=7)", marks=pytest.mark.long),
    ],
)
def test_a_loop_from_a_checkpoint_of_this_very_job_is_refused(tmp_path: Path, way: str, words: str) -> None:
    flags = ("--faults", "kill rank=1 step=10")
    run = launch(tmp_path / "run", "own_checkpoint.py", str(tmp_path / "own.pt"), way, ranks=2, flags=flags)
    assert run.code == 2, run.explain()
    assert f"rank 1 can't be replaced, since its new process has begun its loop with {words}" in run.err, run.explain()
    assert "its state from after 10 updates is saved" in run.err, run.explain()


def test_a_number_that_is_broadcast_is_that_of_the_first_process(tmp_path: Path) -> None:
    job = ("own_checkpoint.py", str(tmp_path / "own.pt"), "broadcasts")
    reference = launch(tmp_path / "reference", *job, ranks=2)
    (tmp_path / "own.pt").unlink()
    plan = "kill rank=0 step=10; kill rank=1 step=13"
    run = launch(tmp_path / "run", *job, ranks=2, flags=("--faults", plan))
    assert reference.code == run.code == 0, run.explain()
    assert run.recoveries() == 2, run.explain()
    assert run.digests() == reference.digests(), run.explain()


def test_a_wrapper_that_is_not_registered_is_refused(tmp_path: Path) -> None:
    """With what it wraps registered all went well, until the first fault."""
    run = launch(tmp_path / "run", "odd_programs.py", "inner", STEPS, ranks=2)
    assert run.code == 2, run.explain()
    assert "odd_programs.py" in run.err
    assert "register the wrapper, Session(model=ddp)" in run.err


def test_shapes_that_change_are_compiled_otherwise(tmp_path: Path, undisturbed_of: Undisturbed) -> None:
    """Another kernel works on the same batch, which says so; and a fault hits between the parts that are compiled."""
    plan = "kill rank=1 step=4 phase=COMPUTE at=forward"
    reference = undisturbed_of("compiled.py", "layers+sizes", ranks=2)
    run = launch(tmp_path / "run", "compiled.py", "layers+sizes", ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert len(run.of("injected")) == run.recoveries() == 1, run.explain()
    assert not reference.of("compiled_otherwise")
    assert {told["rank"] for told in run.of("compiled_otherwise")} == {0, 1}, run.explain()
    assert "time_ns" not in run.err, "a hook of ours was compiled"
    assert run.digests() == reference.digests(), "eager kernels are the same for all sizes"


@pytest.mark.long
@pytest.mark.parametrize("how", ["outer+update", *long(("outer", "inner", "step", "update"))])
def test_compiled(tmp_path: Path, undisturbed_of: Undisturbed, how: str) -> None:
    """Dynamo looks at frames that DDP's reducer begins, and is not to compile a collective, nor a hook of ours."""
    plan = "kill rank=1 step=3 phase=COMPUTE at=start; kill rank=0 step=5 phase=COMPUTE at=backward"
    reference = undisturbed_of("compiled.py", how, ranks=2)
    run = launch(tmp_path / "run", "compiled.py", how, ranks=2, flags=("--faults", plan))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 2, run.explain()
    assert run.digests() == reference.digests(), run.explain()
