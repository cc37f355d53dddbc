"""Undisturbed runs, made once: what every disturbed run must equal. All that ranks did is replayed."""

import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import traced
from memories import Plain, Torchrun
from running import Reference, Run
from shared import Undisturbed
from watched_jobs import end_holder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # `make test &` of a shell: the jobs would ignore it as well
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Each new interpreter would compile all of ours anew, half of what its imports take. A user's does not.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(autouse=True)
def machines(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each rank of the test's jobs did what a machine does, and came to nothing that the simulation does not know."""
    yield
    traced.check(request.node.name)


@pytest.fixture(scope="session")
def of_all_workers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):  # a worker of xdist: its folder lies in that of all of them
        folder = folder.parent
    return folder


@pytest.fixture(scope="session")
def undisturbed_of(of_all_workers: Path) -> Undisturbed:
    """``undisturbed_of("called.py", "--steps", "8", ranks=2)``: see ``shared.py``."""
    return Undisturbed(of_all_workers / "undisturbed")


@pytest.fixture(scope="session")
def torchrun_of(of_all_workers: Path) -> Torchrun:
    """``torchrun_of("hsdp.py", "base")``: see ``memories.py``."""
    return Torchrun(of_all_workers / "plain")


@pytest.fixture(scope="module")
def torchrun(request: pytest.FixtureRequest, torchrun_of: Torchrun) -> Plain:
    """Of the module's ``JOB``, run without a word of ours, by variant."""
    return functools.partial(torchrun_of, request.module.JOB)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    """That of a job whose holder of snapshots may outlive it."""
    yield tmp_path / "run"
    end_holder(tmp_path / "run")


@pytest.fixture(scope="session")
def undisturbed(undisturbed_of: Undisturbed) -> Reference:
    """``undisturbed(ranks=3, variant="base", steps=20)``: of ``train.py``."""

    def reference(*, ranks: int, variant: str = "base", steps: int = 20, extra: tuple[str, ...] = ()) -> Run:
        return undisturbed_of("train.py", "--steps", str(steps), "--variant", variant, *extra, ranks=ranks)

    return reference
