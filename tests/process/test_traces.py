"""What real ranks did is written and replayed. That it is so in every process test: ``conftest.machines``."""

from pathlib import Path

import msgspec
import pytest
import traced
from running import launch

from resilient_train.testing.replay import ReplayError, replay, traces

KILL = ("--faults", "kill rank=1 step=2 phase=UPDATING")


def test_each_process_of_a_job_is_replayed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run = launch(run_dir, "train.py", "--steps", "5", ranks=2, flags=KILL)
    assert run.code == 0, run.explain()
    assert run_dir in traced.RUNS
    assert [path.stem for path in traces(run_dir)] == ["rank_0.0", "rank_1.0", "rank_1.1"]
    killed, new = (list(replay(path)) for path in traces(run_dir)[1:])
    assert killed[-1].answer.endswith("Arrive Cross -> Barrier(HOOK)"), "its last words"
    assert new[-1].answer == "Finish + Finished: Compare ReturnEnd -> Left"

    path = traces(run_dir)[2]
    lines = path.read_bytes().splitlines()
    number = next(i for i, line in enumerate(lines) if b"RebuildReducer" in line)
    line = msgspec.json.decode(lines[number])
    line["effects"] = [effect for effect in line["effects"] if effect["type"] != "RebuildReducer"]
    path.write_bytes(b"\n".join([*lines[:number], msgspec.json.encode(line), *lines[number + 1 :]]))
    (wrong,) = traced.look(run_dir, set())
    assert f"rank 1, incarnation 1, line {number + 1}: Ok(value=" in wrong
    with pytest.raises(ReplayError, match="RebuildReducer"):
        list(replay(path))
    path.write_bytes(b"\n".join(lines))  # it is looked at once more, behind this test


def test_nothing_is_written_unasked(tmp_path: Path) -> None:
    run = launch(tmp_path / "run", "train.py", "--steps", "2", ranks=2, RESILIENT_TRACE="0")
    assert run.code == 0, run.explain()
    assert not (tmp_path / "run" / "rank_traces").exists()
