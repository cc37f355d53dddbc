"""A script that imports us in a way that its text does not show, killed before its Session: it is started again."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from running import LAUNCHER, Run, launch, read_events, start

SCRIPT = """
import importlib, os, signal, sys

def dies_in(place):
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if place == sys.argv[1] and first and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        os.kill(os.getpid(), signal.SIGKILL)

rt = importlib.import_module("resilient_" + "train")
dies_in("imports")
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rows = [torch.full((1, 4), float(number)) for number in range(3)]
dies_in("data")
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
dies_in("model")
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(3):
        with step:
            model(rows[step.number]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
dist.destroy_process_group()
"""
PLACES = ("imports", "data", "model")


def places(of_every_day: str, ranks: int) -> list[object]:
    """Every new interpreter takes seconds: so of each way one place is tried every day, in a world of so many ranks."""
    others = [pytest.param(each, 2, marks=pytest.mark.long) for each in PLACES if each != of_every_day]
    return [(of_every_day, ranks), *others]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def is_started_again(run: Run, ranks: int) -> bool:
    return run.code == 0 and len(run.of("restart_all")) == 1 and len(run.of("session_end")) == ranks


def ended(tmp_path: Path, *command: str, ranks: int) -> Run:
    run_dir = tmp_path / "run"
    with start([*LAUNCHER, "--nproc-per-node", str(ranks), "--run-dir", str(run_dir), *command]) as process:
        out, err = process.communicate(timeout=100)
    return Run(run_dir, process.returncode, out, err, read_events(run_dir))


@pytest.mark.long
@pytest.mark.parametrize(("place", "ranks"), places("model", 2))
def test_by_other_means_than_a_statement(tmp_path: Path, script: Path, place: str, ranks: int) -> None:
    """In a fork the package was imported before the script. All start again as new interpreters."""
    run = launch(tmp_path / "run", script, place, ranks=ranks)
    assert is_started_again(run, ranks), run.explain()


@pytest.mark.parametrize(("place", "ranks"), places("imports", 1))
def test_in_a_new_interpreter(tmp_path: Path, script: Path, place: str, ranks: int) -> None:
    """So it was behind what such a one runs first."""
    run = launch(tmp_path / "run", script, place, ranks=ranks, flags=("--standby", "0"))
    assert is_started_again(run, ranks), run.explain()


@pytest.mark.long
@pytest.mark.parametrize(("place", "ranks"), places("imports", 1))
def test_in_an_interpreter_of_the_users_own(tmp_path: Path, script: Path, place: str, ranks: int) -> None:
    run = ended(tmp_path, "--no-python", sys.executable, str(script), place, ranks=ranks)
    assert is_started_again(run, ranks), run.explain()


@pytest.mark.long
@pytest.mark.parametrize(("place", "ranks"), places("data", 1))
def test_behind_a_shell(tmp_path: Path, script: Path, place: str, ranks: int) -> None:
    """The process that speaks for the rank is not the one that was started, which tells of its death."""
    line = f"{sys.executable} {script} {place}; exit $?"
    run = ended(tmp_path, "--no-python", "bash", "-c", line, ranks=ranks)
    assert is_started_again(run, ranks), run.explain()


def test_a_script_that_does_not_import_us_ends_with_its_rank(tmp_path: Path) -> None:
    """Though what runs it has, in a fork and in a new interpreter."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, torch\n"
        "if int(os.environ['RANK']) == int(os.environ['WORLD_SIZE']) - 1:\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    for ranks, flags in ((2, ()), (1, ("--standby", "0"))):
        run = launch(tmp_path / f"run{ranks}", path, ranks=ranks, flags=flags)
        assert run.code == 137, run.explain()
        assert run.of("restart_all") == []


def test_what_a_rank_starts_may_import_us(tmp_path: Path) -> None:
    """It has the rank's variables, and is not the rank: nothing is wrong with that, and nothing is told."""
    path = tmp_path / "script.py"
    path.write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import resilient_train'], check=True, timeout=60)\n"
    )
    run = launch(tmp_path / "run", path, ranks=1)
    assert run.code == 0, run.explain()
    assert run.of("foreign_frame") == []
