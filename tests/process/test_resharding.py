"""A job goes on with another number of ranks than it had when it saved."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest
import torch.distributed.checkpoint as dcp
from running import JOBS, Run, launch

SAMPLES = 96


def go(run_dir: Path, ranks: int, steps: int, every: int, variant: str = "base") -> Run:
    arguments = ("--steps", str(steps), "--save", str(every), "--variant", variant, "--show-start")
    run = launch(run_dir, "train.py", *arguments, ranks=ranks)
    assert run.code == 0, run.explain()
    return run


def lines(run_dir: Path, name: str, rank: int) -> list[dict]:
    path = run_dir / f"{name}_rank{rank}.jsonl"
    return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []


def saved_parameters(checkpoint: Path) -> str:
    """Their digest, read by plain torch in a process without process groups."""
    spec = importlib.util.spec_from_file_location("job", JOBS / "train.py")
    job = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(job)
    model = job.build(frozenset())
    named = {f"model.0.module.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    dcp.load(named, storage_reader=dcp.HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    return job.digest_of(model)


def check_start(run: Run, ranks: int, saved: int) -> None:
    """All ranks begin with the parameters of the checkpoint, behind its last update."""
    expected = saved_parameters(run.run_dir / "checkpoints" / f"step_{saved}")
    for rank in range(ranks):
        start = lines(run.run_dir, "starts", rank)[-1]
        assert (start["step"], start["parameters"]) == (saved, expected), run.explain()
    assert len({lines(run.run_dir, "starts", rank)[-1]["random"] for rank in range(ranks)}) == ranks


class Part(NamedTuple):
    """The job with so many ranks: from the save before to its own, and one step that is lost with the process."""

    ranks: int
    saved_at: int


def trained(run_dir: Path, parts: list[Part]) -> tuple[Counter[int], dict[int, float]]:
    """How often each sample was used in what the next part went on from, and the mean loss of each step."""
    used = Counter[int]()
    losses: dict[int, float] = {}
    begin = 0
    for ranks, saved_at in parts:
        for rank in range(ranks):
            for line in lines(run_dir, "samples", rank):
                if len(line["counts"]) == ranks and begin <= line["step"] < saved_at:
                    used.update(line["ids"])
                    losses[line["step"]] = line["mean"] / ranks
        begin = saved_at
    return used, losses


# 96 samples in batches of 4: the last part ends an epoch.
FEW_TO_MORE = [Part(2, 5), Part(3, 10)]
MORE_TO_FEW_TO_MORE = [Part(4, 4), Part(2, 6), Part(3, 8)]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("parts", [pytest.param(FEW_TO_MORE, marks=pytest.mark.long), MORE_TO_FEW_TO_MORE])
@pytest.mark.shows("DDP", "divided anew", "goes on")
def test_an_epoch_in_worlds_of_several_sizes(tmp_path: Path, parts: list[Part]) -> None:
    run_dir = tmp_path / "run"
    again = saved_at = old = 0
    for ranks, until in parts:
        run = go(run_dir, ranks, until + 1, until)
        assert {event["detail"]["source"] for event in run.of("restored")} == ({"storage"} if old else set())
        if old:
            check_start(run, ranks, saved_at)
            moved = run.of("resharded")
            mine = {rank: rank if rank < old else -1 for rank in range(ranks)}
            assert {event["rank"]: event["detail"]["own_state_of"] for event in moved} == mine
            (used_again,) = {event["detail"]["used_again"] for event in moved}
            again += used_again
        old, saved_at = ranks, until
    used, losses = trained(run_dir, parts)
    assert set(used) == set(range(SAMPLES))
    assert used.total() == SAMPLES + again
    assert max(used.values()) <= 2
    assert again == 2 if parts is MORE_TO_FEW_TO_MORE else again == 1
    assert sorted(losses) == list(range(saved_at))
    first = parts[0].saved_at
    assert fmean(losses[step] for step in range(first, saved_at)) < fmean(losses[step] for step in range(first)) + 0.2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("variant", [pytest.param("base", marks=pytest.mark.long), "stateful"])
def test_four_ranks_then_one(tmp_path: Path, variant: str) -> None:
    run_dir = tmp_path / "run"
    go(run_dir, 4, 5, 4, variant)
    run = go(run_dir, 1, 20 if variant == "base" else 5, 50, variant)
    check_start(run, 1, 4)
    (moved,) = run.of("resharded")
    if variant == "stateful":
        assert "begins again" in moved["detail"]["loader"]
        return
    assert (moved["detail"]["used"], moved["detail"]["used_again"]) == (64, 0)
    after = [each for each in lines(run_dir, "samples", 0) if len(each["counts"]) == 1 and each["step"] < 12]
    before = [each for rank in range(4) for each in lines(run_dir, "samples", rank)]
    before = [each for each in before if len(each["counts"]) == 4 and each["step"] < 4]
    used = Counter(sample for each in before + after for sample in each["ids"])
    assert used == Counter(range(SAMPLES))
