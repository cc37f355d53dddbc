"""A fault at each line of torch's Python that a body comes to, one rank in its turn: the bits are those of no fault.

What is halfway done there must be undone or done again: in DDP, in FSDP, in the schedules of pipelines, in autograd.
"""

from __future__ import annotations

import json
from pathlib import Path

import memories
import pytest
from memories import RANKS
from running import Run, launch

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def lines(run: Run, ranks: int) -> list[int]:
    """At how many lines each rank had a fault; each of them was one recovery, and cost no process."""
    found = [len(json.loads((run.run_dir / f"lines_{rank}.json").read_text())) for rank in range(ranks)]
    assert run.recoveries() == sum(found), run.explain()
    assert {event["detail"]["strategy"] for event in run.of("fault")} == {"HCCE"}
    assert len(run.of("spawned")) == ranks
    return found


def test_ddp(tmp_path: Path) -> None:
    steps = ("--steps", "6000")
    run = launch(tmp_path / "cut", "at_each_line.py", "train.py", "torch/", *steps, ranks=2, timeout_s=1000)
    undisturbed = launch(tmp_path / "plain", "train.py", *steps, ranks=2, timeout_s=1000)
    assert (run.code, undisturbed.code) == (0, 0), run.explain()
    assert min(lines(run, 2)) > 300
    assert run.ends() == undisturbed.ends()
    assert run.digests() == undisturbed.digests(), run.explain()


@pytest.mark.parametrize(
    ("job", "variant", "parts", "steps"),
    [
        ("hsdp.py", "base", "torch/distributed/fsdp", 2400),
        ("pipelined.py", "replicate", "torch/distributed/pipelining", 1800),
    ],
)
def test_divided(tmp_path: Path, job: str, variant: str, parts: str, steps: int) -> None:
    ran = []
    for name, script in (("plain", (job,)), ("cut", ("at_each_line.py", job, parts))):
        flags = ("--variant", variant, "--steps", str(steps), "--out", str(tmp_path / name / "out"))
        ran.append(launch(tmp_path / name / "run", *script, *flags, ranks=RANKS, timeout_s=1000))
    undisturbed, run = ran
    assert undisturbed.code == 0, undisturbed.explain()
    memories.ends_as(run, tmp_path / "plain" / "out")
    assert min(lines(run, RANKS)) > 50
