"""What the ranks of real jobs did, compared with their machines, and with what simulated jobs come to."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from resilient_train.testing.replay import ReplayError, replay, traces

ANSWERS = Path(__file__).parents[1] / "sim" / "answers.txt"
RUNS: list[Path] = []
"""Run directories of jobs that have ended, and that nobody has looked at."""


@cache
def listed() -> dict[str, str]:
    """Answer -> the simulated job that comes to it, or ``real TEST: REASON``: see ``tests/sim/answers.py``."""
    return dict(line.split(" | ", 1) for line in ANSWERS.read_text().splitlines())


def remember(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """A job has ended; its run directory is that of the flag, or of the variable."""
    flags = dict(itertools.pairwise(command))
    found = flags.get("--run-dir", environ.get("RESILIENT_RUN_DIR"))
    if found is not None and Path(found) not in RUNS:
        RUNS.append(Path(found))


def look(run_dir: Path, seen: set[str]) -> list[str]:
    """What is wrong with the run; adds what its ranks' machines have answered."""
    wrong = []
    for path in traces(run_dir):
        try:
            for turn in replay(path):
                if turn.answer not in seen and turn.answer not in listed():
                    wrong.append(f"{path}: no simulated job comes to this: {turn.answer}")
                seen.add(turn.answer)
        except ReplayError as error:
            wrong.append(f"{path}: {error}")
    return wrong


def check(test: str) -> None:
    """What the ranks of this test's jobs did is what a machine does, and what the simulation knows."""
    seen: set[str] = set()
    wrong = [text for run_dir in RUNS for text in look(run_dir, seen)]
    RUNS.clear()
    wrong += missing(test, seen)
    assert not wrong, "\n".join(wrong)


def missing(test: str, seen: set[str]) -> list[str]:
    """What ``answers.txt`` says that this test comes to, and it did not."""
    own = [answer for answer, how in listed().items() if how.startswith(f"real {test}:")]
    return [f"answers.txt says that this test comes to `{each}`: not any more" for each in own if each not in seen]
