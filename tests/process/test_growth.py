"""A survivor of many recoveries holds no more of the machine than a survivor of a few.

The job's group has a time-out of 20 s: a thread that gloo has forgotten (docs/facts.md) lives until then, no longer.
"""

import json
import statistics
from pathlib import Path

import pytest
from running import launch

CASES = [
    ("forked", 40),
    pytest.param("forked", 100, marks=pytest.mark.long),
    pytest.param("cold", 100, marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "recoveries"), CASES)
def test_many_recoveries(tmp_path: Path, start: str, recoveries: int) -> None:
    steps = 3 * recoveries + 1
    flags = ("--max-restarts", str(recoveries))
    environ = {"RESILIENT_STANDBY": str(int(start == "forked"))}
    run = launch(tmp_path / "run", "many.py", str(steps), ranks=2, flags=flags, timeout_s=580, **environ)
    assert run.code == 0, run.explain()
    assert run.recoveries() == recoveries
    assert len({digest for digest, _ in run.digests().values()}) == 1
    held = [json.loads(line) for line in (run.run_dir / "holdings.jsonl").read_text().splitlines()]
    early, late = held[3 : 3 + recoveries // 4], held[-(recoveries // 4) :]
    # Known defect (docs/guarantees.md): an operation that gloo has forgotten leaves a thread and four
    # descriptors behind even after its time-out. Bounded here to one such in four recoveries.
    leaks = recoveries // 4
    for name, slack in (("threads", 5 + leaks), ("fds", 4 + 4 * leaks), ("rss", 24 << 20)):
        before = statistics.median(each[name] for each in early)
        after = statistics.median(each[name] for each in late)
        assert after <= before + slack, f"{name} grew from {before} to {after} over {recoveries} recoveries"
