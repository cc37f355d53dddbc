"""What each rank of a job has in its memory at the end, against a run of plain torchrun.

Compared are the bytes that the job's script has written, tensor by tensor, by a process that can't import anything of
ours (``compare_memories.py``).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from running import JOBS, LAUNCHER, Run, launch, start
from shared import locked
from watched_jobs import end_holder

from resilient_train.state.checkpoint.verify import newest_complete

RANKS = 4
EVERY_DAY = (
    *(("hsdp.py", variant) for variant in ("base", "alone", "tp+copied")),
    ("pipelined.py", "replicate"),
    ("zero.py", "base"),
)
"""Scripts and variants. What changes no bit needs no run of its own: recomputing, gathers ahead of time, undo."""
COMPARE = Path(__file__).with_name("compare_memories.py")
Memory = list[bytes]
Plain = Callable[[str], Path]
"""``torchrun(variant)``: of one script, the folder with what each rank of a run without a word of ours has written."""


def memory_of(folder: Path) -> Memory:
    """What each rank had at its end."""
    return [(folder / f"rank{rank}.bin").read_bytes() for rank in range(RANKS)]


class Torchrun:
    """Runs of the scripts without a word of ours, each made once for all workers: ``torchrun("hsdp.py", "base")``.

    Whoever comes first makes all those of every day with one torchrun; a variant of long tests has one of its own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def __call__(self, job: str, variant: str) -> Path:
        """The folder with what each rank has written."""
        asked = (job, variant)
        every = EVERY_DAY if asked in EVERY_DAY else (asked,)
        with locked(self._folder / "lock"):
            if not self._out(*asked).exists():
                self._make(every)
        return self._out(*asked)

    def _out(self, job: str, variant: str) -> Path:
        return self._folder / f"{Path(job).stem}-{variant}"

    def _make(self, every: tuple[tuple[str, str], ...]) -> None:
        """Their folders come to be all at once, when all is well."""
        parts = {asked: self._out(*asked).with_suffix(".part") for asked in every}
        options = {asked: ["--plain", "--out", str(out), "--variant", asked[1]] for asked, out in parts.items()}
        commands = json.dumps([[str(JOBS / asked[0]), *options[asked]] for asked in every])
        done = under_torchrun([str(JOBS / "in_a_row.py"), commands])
        assert done.returncode == 0, done.stderr[-3000:]
        for asked, out in parts.items():
            out.rename(self._out(*asked))


def under_torchrun(script: list[str]) -> subprocess.CompletedProcess[str]:
    """Again where a rank's gloo has aborted it as it ended, which stock gloo does now and then (docs/facts.md)."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone", *script]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if "Signal 6 (SIGABRT)" not in done.stderr:
            break
    return done


def train(job: str, run_dir: Path, faults: str, *more: str, variant: str, **environ: str) -> Run:
    """The same script under ``resilient-run``."""
    flags = ("--faults", faults) if faults else ()
    arguments = ("--out", str(run_dir.parent / "out"), "--variant", variant, *more)
    return launch(run_dir, job, *arguments, ranks=RANKS, flags=flags, timeout_s=200, **environ)


def ended_by_the_scheduler(job: str, run_dir: Path, *more: str, variant: str) -> None:
    """Trains for some steps, until SIGTERM; the state is saved then."""
    told = run_dir.parent / "told"
    command = [str(JOBS / job), "--out", str(run_dir.parent / "out"), "--variant", variant, *more, "--tell", str(told)]
    with start([*LAUNCHER, "--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), *command]) as process:
        wait_for_step(told, 2)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert newest_complete(run_dir / "checkpoints").report is not None, err
    end_holder(run_dir)


def wait_for_step(told: Path, step: int) -> None:
    """``told`` is what the job writes its steps to."""
    deadline = time.monotonic() + 60
    while not told.exists() or int(told.read_text()) < step:
        assert time.monotonic() < deadline, f"it did not come to step {step}"
        time.sleep(0.01)


PLACES = (
    *("COMPUTE at=start", "COMPUTE at=forward", "COMPUTE at=backward", "READY at=before", "READY at=barrier"),
    *("UPDATING at=start", "UPDATING at=end", "APPLIED at=start", "APPLIED at=end"),
)
"""Of a step."""
IN_MEMORY = ("--save", "100", "--memory", "1")
EACH_ALONE = (
    "hcce rank=0 step=2 phase=COMPUTE at=backward; "
    "kill rank=2 step=4 phase=COMPUTE at=forward; "
    "kill rank=0 step=6 phase=UPDATING at=end incarnation=1; "
    "kill rank=3 step=6 phase=UPDATING at=end incarnation=1; "
    "uce rank=2 step=8 phase=COMPUTE at=backward target=param incarnation=2; "
    "stop rank=1 step=10 phase=COMPUTE at=forward incarnation=3"
)
"""Where nobody holds what another rank does: what all go back for, once they have gone on from a cut."""


def went_back_together(run: Run) -> None:
    """For each of ``EACH_ALONE``."""
    assert len(run.of("restart_all")) == 4, run.explain()
    assert {event["detail"]["source"] for event in run.of("restored")} == {"memory"}, run.explain()
    told = [event["detail"]["strategy"] for event in run.of("fault")]
    assert told[0] == "HCCE", run.explain()


def goes_on_divided_anew(
    job: str, run_dir: Path, ways: Sequence[tuple[str, int]], more: Callable[[int], Sequence[str]] = lambda _: ()
) -> bytes:
    """A run in the first way saves, and one in each of the others begins with that, and makes no step more. ``ways``:
    (variant, ranks); ``more``: arguments of that number of ranks.

    Returns the model with its moments as torch puts it together, which is the same in all of them.
    """

    def run(variant: str, ranks: int, run_dir: Path, *steps: str) -> tuple[Run, set[bytes]]:
        out = run_dir.parent / "out"
        arguments = ("--out", str(out), "--variant", variant, "--whole", "--steps", *steps, *more(ranks))
        run = launch(run_dir, job, *arguments, ranks=ranks)
        assert run.code == 0, run.explain()
        return run, {(out / f"whole{rank}.bin").read_bytes() for rank in range(ranks)}

    first, *others = ways
    _, expected = run(*first, run_dir.with_name("undisturbed"), "3")
    assert len(expected) == 1
    run(*first, run_dir, "4", "--save", "3")
    for variant, ranks in others:
        other, found = run(variant, ranks, run_dir, "3")
        assert len(other.of("restored")) == ranks, other.explain()
        assert found == expected, other.explain()
    return expected.pop()


def plain_net() -> Any:
    """The model of the jobs, in a process that has no group."""
    spec = importlib.util.spec_from_file_location("hsdp", JOBS / "hsdp.py")
    assert spec is not None
    assert spec.loader is not None
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    return job.Net(recomputes=False)


def ends_as(run: Run, plain: Path) -> None:
    assert run.code == 0, run.explain()
    told = differences(plain, run.run_dir.parent / "out")
    assert not told, f"{told}\n{run.explain()}"


def differences(plain: Path, out: Path) -> str:
    """What is not the same in the two folders. Empty: nothing."""
    command = [sys.executable, "-I", "-S", str(COMPARE), str(plain), str(out), str(RANKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return f"{COMPARE.name} ended with {done.returncode}: {done.stdout}{done.stderr}" if done.returncode else ""
