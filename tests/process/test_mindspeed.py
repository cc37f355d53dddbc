"""The provider of ``mindio_ttp`` under a loop like MindSpeed-LLM's: decorated, with a table for the dense part and one
for the experts.
"""

import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import JOBS, Run, finish, free_port

RANKS = 4
STEPS = 14
LOOP = str(JOBS / "mindspeed_loop.py")
SEND, HIGHLEVEL = 0, 1  # MindIO's RepairType
DENSE, EXPERTS = 0, 1  # its OptimizerType
TRACKER = "latest_checkpointed_iteration.txt"


def run(folder: Path, plan: str = "") -> Run:
    how: dict[str, Any] = {"forked": True}
    with free_port() as port:
        return finish([sys.executable, LOOP, str(folder), str(port), str(STEPS), plan], folder, **how)


def codes(job: Run) -> list[int]:
    assert job.code == 0, job.explain()
    found = json.loads((job.run_dir / "codes").read_text())
    assert isinstance(found, list)
    return found


def ends(folder: Path) -> list[str]:
    return [(folder / f"end{rank}").read_text() for rank in range(RANKS)]


def noted(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def repairs(folder: Path, rank: int) -> list[dict[str, Any]]:
    return noted(folder / f"repairs{rank}")


WHOLE, SHARDED = "", "sharded@0:0 "
"""How the dense part's optimizer lies on the ranks."""


Undisturbed = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """The ends of the undisturbed run, which is made once."""

    @functools.cache
    def made(how: str) -> list[str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        job = run(folder, how)
        assert codes(job) == [0] * RANKS, job.explain()
        return ends(folder)

    return made


IN_TURN = "uce@1:3 hcce@2:5 uceu@3:7 low@0:9 gather@1:10 kill@2:12"
AT_ONCE = "killu@3:4 kills@2:1 uce@1:8 killr@1:7 uce@0:11 uce@3:11 hcce@2:12"
"""In an update and in the stop for it, in a repair, of two ranks."""


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "plan"),
    [
        pytest.param(WHOLE, IN_TURN, id="whole, in turn"),
        pytest.param(SHARDED, AT_ONCE, id="sharded, at once"),
        pytest.param(SHARDED, IN_TURN, id="sharded, in turn", marks=pytest.mark.long),
        pytest.param(WHOLE, AT_ONCE, id="whole, at once", marks=pytest.mark.long),
    ],
)
def test_the_end_is_the_undisturbed_one(tmp_path: Path, undisturbed: Undisturbed, how: str, plan: str) -> None:
    job = run(tmp_path, how + plan)
    assert codes(job) == [0] * RANKS, job.explain()
    assert ends(tmp_path) == undisturbed(how), job.explain()
    due = {f"done.{each}".replace("@", ".").replace(":", ".") for each in plan.split()}
    assert due == {path.name for path in tmp_path.glob("done.*")}, job.explain()


@pytest.mark.process
@pytest.mark.parametrize("how", [WHOLE, SHARDED], ids=["whole", "sharded"])
def test_each_part_comes_from_who_holds_it(tmp_path: Path, undisturbed: Undisturbed, how: str) -> None:
    """In one call: the dense part from the first that has it, the expert from the only one. MindSpeed-LLM makes a
    group of ``rank_list``, so all have the same.
    """
    job = run(tmp_path, f"{how}uce@1:5")
    assert codes(job) == [0] * RANKS, job.explain()
    assert ends(tmp_path) == undisturbed(how), job.explain()
    (got,) = repairs(tmp_path, 1)
    dense = 3 if how else 0
    assert got == {
        "step": 4,
        "need_rebuild": True,
        "error_ranks": [1, 1],
        "type": [DENSE, EXPERTS],
        "repair_type": HIGHLEVEL,
        "src": [dense, 3],
        "dst": [1, 1],
        "rank_list": sorted({1, dense, 3}),
    }
    sent = [each for rank in (0, 2, 3) for each in repairs(tmp_path, rank)]
    assert {each["repair_type"] for each in sent} == {SEND}
    assert not any(each["need_rebuild"] for each in sent)
    assert all(each["rank_list"] == got["rank_list"] for each in sent)
    assert sorted((s, kind) for each in sent for s, kind in zip(each["src"], each["type"], strict=True)) == sorted(
        zip(got["src"], got["type"], strict=True)
    )


@pytest.mark.process
@pytest.mark.parametrize(
    ("how", "fault", "lost", "step"),
    [
        pytest.param(WHOLE, "noarf@0:0 kill@1:6", 1, 5, id="whole, a death"),
        pytest.param(SHARDED, "noarf@0:0 killu@2:6", 2, 6, id="sharded, a death in an update"),
        pytest.param(SHARDED, "noarf@0:0 kill@1:6", 1, 5, id="sharded, a death", marks=pytest.mark.long),
        pytest.param(WHOLE, "raise@1:6", None, 5, id="whole, an error", marks=pytest.mark.long),
        pytest.param(SHARDED, "raise@1:6", None, 5, id="sharded, an error", marks=pytest.mark.long),
    ],
)
def test_the_end_of_life_is_saved_by_one_complete_set(
    tmp_path: Path, undisturbed: Undisturbed, how: str, fault: str, lost: int | None, step: int
) -> None:
    """Each group's part by ranks of that group. What it was saved for goes on from it."""
    job = run(tmp_path, how + fault)
    assert 0 not in codes(job), job.explain()
    assert noted(tmp_path / TRACKER) == [step], job.explain()
    folder = tmp_path / f"iter_{step:07d}"
    assert sorted(path.name for path in folder.iterdir()) == ["dense.pt", "expert0.pt", "expert1.pt"]
    assert not list(tmp_path.glob("*_tmp"))
    told = {(info["type"], tuple(info["ranks"])) for each in noted(tmp_path / "saves") for info in each["info"]}
    first = {WHOLE: (0,), SHARDED: tuple(rank if rank != lost else rank ^ 2 for rank in (0, 1))}[how]
    assert told == {(DENSE, first), (EXPERTS, (0,)), (EXPERTS, (1 if lost != 1 else 3,))}
    for each in noted(tmp_path / "saves"):
        assert all(each["rank"] in info["ranks"] for info in each["info"]), "it is told of what it is to write only"
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    shutil.copy(tmp_path / TRACKER, resumed)
    folder.rename(resumed / folder.name)
    again = run(resumed, how)
    assert codes(again) == [0] * RANKS, again.explain()
    assert ends(resumed) == undisturbed(how)
