"""A program can ask our group all that it can ask one of torch's own, and gets the same answers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from running import JOBS, LAUNCHER, start

REFUSED = {
    "split": "UsageError: a part that is split from a group can't be rebuilt after a fault: use dist.new_group(ranks)",
    "options": "UsageError: pg_options (_Options) can't be kept for a group that is rebuilt after a fault: leave them "
    "out",
}
"""What torch does, and we can't keep over a recovery."""


def answers(command: list[str], file: Path, backend: str) -> dict[str, Any]:
    with start([*command, "--nproc-per-node", "2", str(JOBS / "group_api.py"), str(file), backend]) as process:
        _, err = process.communicate(timeout=100)
    assert file.exists(), err
    # A stock group of gloo's takes tensors of a GPU as well, where torch was built for one; ours does not.
    text = file.read_text()
    for said in (",cuda:gloo", "device(type='cuda'), ", "'cuda', "):
        text = text.replace(said, "")
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("backend", ["none", "gloo"])
def test_the_answers_are_those_of_a_stock_group(tmp_path: Path, backend: str) -> None:
    stock = answers([sys.executable, "-m", "torch.distributed.run"], tmp_path / "stock.json", backend)
    ours = answers([*LAUNCHER, "--run-dir", str(tmp_path / "run")], tmp_path / "ours.json", backend)
    assert len(stock) > 40
    assert sum(str(answer).startswith(("RuntimeError", "ValueError")) for answer in stock.values()) <= 4, stock
    for question, answer in stock.items():
        assert ours[question] == REFUSED.get(question, answer), question
