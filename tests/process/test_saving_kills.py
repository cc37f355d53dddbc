"""Ranks, all ranks at once, launchers and holders killed at random instants of a job that saves at every update.

At every update, so that some snapshot is being taken, written or renamed at nearly every instant. The seed decides who
is hit and when, but not where in a step that is: a failure may need several tries.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from running import Reference
from watched_jobs import RANKS, Job, gone, holder_pid, job, state_of, wait, wrongs

from resilient_train.state.vault.client import Vault

STEPS = 80
"""A hit comes after some six; and a step that saves costs a tenth of a second."""
QUIET_STEPS = 12
"""At the end nobody is hit."""
STORY = ("holder", "rank", "holder and ranks", "launcher", "holder and rank", "ranks", "holder and launcher")
"""Each of the victims once."""
VICTIMS = (
    "holder",
    "holder",
    "rank",
    "ranks",
    "launcher",
    "holder and launcher",
    "holder and ranks",
    "holder and rank",
)
STORIES = [tuple(random.Random(seed).choices(VICTIMS, k=8)) for seed in range(24)]


def committed(job: Job) -> int:
    """The steps that the rank that is ahead has recorded."""
    paths = [job.run_dir / f"samples_rank{rank}.jsonl" for rank in range(RANKS)]
    return max((path.read_bytes().count(b"\n") for path in paths if path.exists()), default=0)


class Bandit:
    """Hits when another checkpoint has been saved since the last time, at a random instant of the steps behind it."""

    def __init__(self, run_dir: Path, seed: int) -> None:
        self.folder = run_dir / "checkpoints"
        self._random = random.Random(seed)
        self.hits = 0

    def strike(self, job: Job, victims: str) -> bool:
        """False: the job ended, or was about to, before that. Where ranks were hit, something was done about it."""
        # Without all of its ranks a job goes on from what was saved; where nothing was yet, it ends, and rightly so.
        job.await_more("saved" if job.pids or "ranks" in victims else "started")
        until = committed(job) + self._random.randrange(6)
        wait(lambda: committed(job) >= until or not job.running(), "no steps were made")
        time.sleep(self._random.uniform(0, 0.03))
        # It stands still while they are hit: else it replaces the first one before the last one dies.
        job.process.send_signal(signal.SIGSTOP)
        wait(lambda: state_of(job.process.pid) == "T" or not job.running(), "the agent does not stop")
        job.heard("saved")
        if not job.running() or committed(job) > STEPS - QUIET_STEPS:
            job.process.send_signal(signal.SIGCONT)
            return False
        after = "restart_all" if victims.endswith("ranks") else "resumed"
        told = len(job.heard(after))
        for victim in victims.split(" and "):
            for pid in self._pids(job, victim):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.hits += 1
        job.process.send_signal(signal.SIGCONT)
        if "rank" in victims:
            wait(lambda: len(job.heard(after)) > told or not job.running(), f"no {after} came")
        return True

    def _pids(self, job: Job, victim: str) -> list[int]:
        if victim == "holder":
            return [pid for pid in [holder_pid(job.run_dir)] if pid]
        if victim == "launcher":
            return [job.process.pid]
        return list(job.pids.values()) if victim == "ranks" else [job.pids[self._random.randrange(RANKS)]]


def after_launcher(job: Job) -> None:
    """The launcher was killed: its ranks die with it, and a holder that lives ends what it was writing."""
    job.process.communicate(timeout=30)
    wait(lambda: all(map(gone, job.pids.values())), "ranks outlived their launcher")
    if holder_pid(job.run_dir):
        with contextlib.closing(Vault.connect(job.run_dir, member=False)) as vault:
            wait(lambda: not vault.inventory().works, "the holder does not come to an end")


def run_story(run_dir: Path, seed: int, story: tuple[str, ...], reference: Reference) -> None:
    bandit, left, run = Bandit(run_dir, seed), list(story), None
    saved: list[int] = []
    """Steps; which, in a job that saves at each, are also the numbers of updates."""
    while run is None:
        with job(run_dir, "--steps", str(STEPS), "--save", "1") as running:
            while left and bandit.strike(running, victims := left.pop(0)):
                if "launcher" in victims:
                    after_launcher(running)
                    break
            else:
                run = running.end(120)
            back = [int(each["commits"]) for each in running.heard("restored")]
            told = f"seed {seed}, {bandit.hits} hits of {story}: {max(saved, default=0)} was saved, back to {back}"
            assert not back or min(back) >= max(saved, default=0), told
            saved += [int(each["step"]) for each in running.heard("saved")]
            wrong = wrongs(bandit.folder, saved)
            assert not wrong, f"{told}\n{wrong}"
    told += f"\n{run.explain()}"
    assert run.code == 0, told
    assert run.digests() == reference(ranks=RANKS, steps=STEPS).digests(), told
    assert bandit.hits >= len(story) - len(left), told


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "story"),
    [
        (0, STORY),
        *(pytest.param(seed, story, marks=pytest.mark.long) for seed, story in enumerate(STORIES, 1)),
    ],
)
def test_nothing_complete_is_lost(run_dir: Path, undisturbed: Reference, seed: int, story: tuple[str, ...]) -> None:
    run_story(run_dir, seed, story, undisturbed)
