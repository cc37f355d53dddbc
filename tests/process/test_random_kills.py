"""Ranks killed, and stopped, at random moments, in recoveries too: the end is the undisturbed one, bit for bit.

What the places of the kill matrix do not show, chance does: it was this that found a redone step which published the
wrong start. The seed decides who is hit and when, but not where in a step that is: a failure may need several tries.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, Reference, Run, launch, read_events, start
from test_nccl import ENVIRON as WITHOUT_GPU

from resilient_train.launch.cli.asking import Follower
from resilient_train.observe.sinks import EVENTS_FILE

RANKS = 3
STEPS = 240
FEW_STEPS = 100
"""Every day. Nobody is hit before ``USUAL_STEPS`` then."""
USUAL_STEPS = 15
"""Before them nobody knows what is usual, and a stopped process gets seconds."""
QUIET_STEPS = 30
"""At the end nobody is hit: a rank that is lost when the others' loops are over has another test."""
MOST_STEPS_UNHURT = 20
IN_A_ROW = 3
"""A rank that dies five times without a committed update in between ends the job, as it should."""
LIMIT_S = 240
CASES = [(0, "kill stop", FEW_STEPS, "gloo")]
CASES += [
    pytest.param(seed, kinds, STEPS, over, marks=pytest.mark.long)
    for over, seeds in (("gloo", 12), ("nccl", 6))
    for seed in range(seeds)
    for kinds in ("kill", "kill stop")
]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Story:
    """What the job has written so far."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._follower = Follower(run_dir)
        self.pids: dict[int, int] = {}
        self.hit: dict[int, int] = {}
        """The last process of each rank that was hit."""
        self.holders: set[int] = set(range(RANKS))
        """Who has held the whole state since the last recovery ended: one of them has to live."""
        self.started = False

    def read_on(self) -> None:
        if not (self._run_dir / EVENTS_FILE).exists():
            return
        for event in self._follower.read():
            if event.kind == "spawned":
                pid = event.detail["pid"]
                assert isinstance(pid, int)
                self.pids[event.rank] = pid
            elif event.kind == "resumed":
                # Not who was hit behind its part in the recovery, and before this is read.
                self.holders = {rank for rank, pid in self.pids.items() if self.hit.get(rank) != pid}
            elif event.kind == "started":
                self.started = True

    def committed(self, rank: int) -> int:
        """How many steps the rank's processes have recorded."""
        path = self._run_dir / f"samples_rank{rank}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def steps(self) -> int:
        """The same of the rank that is ahead."""
        return max(map(self.committed, range(RANKS)))


class Bandit:
    """Hits ranks at random, so that nobody can say that the job had no chance."""

    def __init__(self, story: Story, seed: int, kinds: list[str]) -> None:
        self._story = story
        self._random = random.Random(seed)
        self._kinds = kinds
        self._last = dict.fromkeys(range(RANKS), (-1, 0))
        """Rank -> steps recorded when it was hit last, and how often it was hit since it had recorded more."""
        self.hits = 0

    def next_chance(self) -> tuple[int, float]:
        """How many recorded steps, and seconds behind them, until the next hit.

        Now and then none, and few: into the recovery from the hit before. Never many seconds: a fast job would get
        away unhurt.
        """
        steps = self._random.randrange(1, MOST_STEPS_UNHURT) if self._random.random() < 0.7 else 0
        return steps, self._random.choice([0.0005, 0.002, 0.01, 0.05]) * self._random.random() * 2

    def strike(self) -> None:
        for rank in self._random.sample(range(RANKS), self._random.choice([1, 1, 1, 2])):
            self._story.read_on()
            number = SIGNALS[self._random.choice(self._kinds)]
            if rank in self._story.pids and self._may_hit(rank):
                try:
                    os.kill(self._story.pids[rank], number)
                except ProcessLookupError:
                    continue  # it is dead already, and its successor not yet announced
                self._story.hit[rank] = self._story.pids[rank]
                self._story.holders.discard(rank)
                self.hits += 1

    def _may_hit(self, rank: int) -> bool:
        recorded = self._story.committed(rank)
        before, times = self._last[rank]
        times = times + 1 if recorded == before else 1
        if times > IN_A_ROW or not self._story.holders - {rank}:
            return False
        self._last[rank] = recorded, times
        return True


def disturb(process: subprocess.Popen[str], story: Story, bandit: Bandit, hit: range, deadline: float) -> None:
    """``hit``: the steps in which that happens."""

    def goes_on() -> bool:
        return process.poll() is None and time.monotonic() < deadline

    while goes_on() and not (story.started and story.steps() >= hit.start):
        story.read_on()
        time.sleep(0.02)
    while goes_on() and story.steps() < hit.stop:
        steps, seconds = bandit.next_chance()
        until = min(story.steps() + steps, hit.stop)
        while goes_on() and story.steps() < until:
            time.sleep(0.001)
        time.sleep(seconds)
        bandit.strike()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("seed", "kinds", "steps", "over"), CASES)
def test_the_end_is_the_undisturbed_one(
    tmp_path: Path, undisturbed: Reference, seed: int, kinds: str, steps: int, over: str
) -> None:
    reference = undisturbed(ranks=RANKS, steps=steps)
    run_dir = tmp_path / "run"
    flags = ["--nproc-per-node", str(RANKS), "--run-dir", str(run_dir), "--max-restarts", "100000"]
    job = [str(JOBS / "over_nccl.py"), "train.py"] if over == "nccl" else [str(JOBS / "train.py")]
    script = [*job, "--steps", str(steps)]
    if steps == FEW_STEPS:  # else it could be over before it is hit for the third time
        script += ["--rest-s", "0.02"]
    hit = range(USUAL_STEPS if steps == FEW_STEPS else 0, steps - QUIET_STEPS)
    story = Story(run_dir)
    bandit = Bandit(story, seed, kinds.split())
    deadline = time.monotonic() + LIMIT_S
    with start([*LAUNCHER, *flags, *script], **(WITHOUT_GPU if over == "nccl" else {})) as process:
        disturb(process, story, bandit, hit, deadline)
        try:
            out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir, torn=True))
    told = f"seed {seed}, {kinds}, {bandit.hits} hits\n{run.explain()}"
    assert run.code == 0, told
    assert run.digests() == reference.digests(), told
    assert bandit.hits >= 3, told
    assert run.recoveries() > 0, told


def test_the_job_of_the_soak_runs(tmp_path: Path) -> None:
    """It is this one, but nobody runs it every day: ``tests/soak/soak.py``."""
    (tmp_path / "records").mkdir()
    flags = ("--steps", "3", "--variant", "base", "--records", str(tmp_path / "records"))
    run = launch(tmp_path / "run", "../../soak/job.py", *flags, ranks=2)
    assert run.code == 0, run.explain()
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == [
        "end0",
        "end1",
        "rank0.jsonl",
        "rank1.jsonl",
    ]
