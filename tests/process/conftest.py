"""Undisturbed runs, made once per session: what every disturbed run must equal. All that ranks did is replayed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import traced
from running import Reference, Run, launch


@pytest.fixture(autouse=True)
def machines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each rank of the test's jobs did what a machine does, and came to nothing that the simulation does not know."""
    yield
    seen: set[str] = set()
    wrong = [text for run_dir in traced.RUNS for text in traced.look(run_dir, seen)]
    traced.RUNS.clear()
    wrong += traced.missing(request.node.name, seen)
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """``undisturbed(ranks=3, variant="base", steps=20)``: a run without faults, cached."""
    made: dict[tuple[object, ...], Run] = {}

    def reference(*, ranks: int, variant: str = "base", steps: int = 20, extra: tuple[str, ...] = ()) -> Run:
        key = (ranks, variant, steps, extra)
        if key not in made:
            folder: Path = tmp_path_factory.mktemp(f"undisturbed-{ranks}-{variant}")
            run = launch(folder / "run", "train.py", "--steps", str(steps), "--variant", variant, *extra, ranks=ranks)
            assert run.code == 0, run.explain()
            assert run.recoveries() == 0
            made[key] = run
        return made[key]

    return reference
