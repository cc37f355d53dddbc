"""Writes ``answers.txt``: what the rank machines of simulated jobs answer, each with a job that shows it.

    python tests/sim/answers.py            # some minutes; read the difference

Answers are named by ``resilient_train/testing/answers.py``. ``seed N [JOB]`` is a job of the simulation (``JOB``: one
of ``mutants.JOBS``). What only real processes come to has the process test that does, and the reason why the simulation
can't: ``real TEST: REASON``. These lines are written by hand; they go when a simulated job comes there.

The process tests replay all that their ranks did, and none may answer what is not listed.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

from mutants import JOBS

from resilient_train.testing.answers import answering
from resilient_train.testing.cluster import DrivenParts
from resilient_train.testing.sim import simulate

LIST = Path(__file__).with_name("answers.txt")
SEEDS = range(3000)
"""Of the jobs that seeds draw."""
OTHERS = range(600)
"""Of each of ``JOBS``."""


def read() -> dict[str, str]:
    """Answer -> how it is come to."""
    return dict(line.split(" | ", 1) for line in LIST.read_text().splitlines()) if LIST.exists() else {}


def shown(how: str) -> set[str]:
    """The answers of the job that a line names."""
    _, seed, *job = how.split(" ", 2)
    layout, faults = JOBS["".join(job)]
    seen: set[str] = set()
    simulate(int(seed), driver=DrivenParts(rank=answering(seen)), layout=layout, faults=faults)
    return seen


def written() -> dict[str, str]:
    """The list anew."""
    # A job that still shows it stays: real ranks have come to what a seed behind these was looked for.
    found = {answer: how for answer, how in read().items() if how.startswith("real ") or answer in shown(how)}
    jobs = [f"seed {seed} {job}".rstrip() for job in JOBS for seed in (OTHERS if job else SEEDS)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for how, answers in zip(jobs, pool.imap(shown, jobs, chunksize=20), strict=True):
            for answer in answers:
                if not found.get(answer, "").startswith("seed "):
                    found[answer] = how
    return dict(sorted(found.items()))


if __name__ == "__main__":
    LIST.write_text("".join(f"{answer} | {how}\n" for answer, how in written().items()))
