"""Undisturbed runs, made once per session: what every disturbed run must equal."""

from pathlib import Path

import pytest
from running import Reference, Run, launch


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
