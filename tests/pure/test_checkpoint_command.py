"""``resilient-train verify``: 0 whole, 1 broken, and which file."""

import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from pure.checkpoint_rig import write
from resilient_train.launch.cli.tool import main
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.nan import NanFound


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20):
        write(tmp_path / "checkpoints", step)
    write(tmp_path / "checkpoints", 15, kind="ttp")
    return tmp_path


def damage(run: Path) -> Path:
    path = run / "checkpoints" / "step_20"
    (path / "shard-1-of-2.safetensors").write_bytes(b"")
    return path


def test_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "checkpoints" / "step_20"
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: complete (step 20, periodic, 2 ranks, 2 shards, 0.0 MB)\n"


def test_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = damage(run)
    assert main(["verify", str(path)]) == 1
    assert f"{path}: shard-1-of-2.safetensors has 0 bytes instead of" in capsys.readouterr().out


@pytest.mark.parametrize("where", [".", "checkpoints"])
def test_all_of_a_run(where: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(run / where)]) == 0
    damage(run)
    capsys.readouterr()
    assert main(["verify", str(run / where)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0].rpartition("/")[2] for line in lines[:3]] == [
        "step_20",
        "ttp_saved_checkpoints-step_15",
        "step_10",
    ]
    assert lines[3] == f"newest complete: {run}/checkpoints/ttp_saved_checkpoints-step_15"


def test_nan(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no fault of the checkpoint's."""
    path = write(run / "checkpoints", 30, nan=NanFound(3, 6, "model.0.weight"))
    assert main(["verify", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"{path}: holds NaN in 3 of 6 tensors ('model.0.weight' for one)"
    assert lines[-2:] == [
        f"newest complete: {path}",
        f"newest complete without NaN: {run}/checkpoints/step_20",
    ]
    main(["verify", "--json", str(run)])
    told = json.loads(capsys.readouterr().out)
    assert (told["newest_complete"], told["newest_without_nan"]) == (str(path), str(run / "checkpoints" / "step_20"))
    assert [each["nan"] for each in told["checkpoints"][:2]] == [
        {"tensors": 3, "of": 6, "first": "model.0.weight"},
        None,
    ]


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    assert main(["verify", "--json", str(run)]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert told["newest_complete"].endswith("ttp_saved_checkpoints-step_15")
    broken, newest, _ = told["checkpoints"]
    assert [problem["file"] for problem in broken["problems"]] == ["shard-1-of-2.safetensors"]
    assert (newest["ok"], newest["kind"], newest["step"], newest["problems"]) == (True, "ttp", 15, [])


def test_a_link_that_is_named_is_followed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "latest").symlink_to("checkpoints/step_20")
    assert main(["verify", str(run / "latest")]) == 0


def test_without_a_manifest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step_20" / "manifest.json").unlink()
    assert main(["verify", str(run / "checkpoints" / "step_20"), "--json"]) == 1
    (told,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert told["problems"] == [{"file": "manifest.json", "reason": "is missing"}]
    assert "step" not in told


def test_other_versions_are_told_and_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, 3, libraries={**libraries_here(), "torch": "1.0", "flax": "9"})
    assert main(["verify", str(path)]) == 0
    torch_here = version("torch")
    assert capsys.readouterr().out.splitlines()[1] == (
        f"{path}: written with flax 9 (here none), torch 1.0 (here {torch_here})"
    )
    assert main(["verify", "--json", str(path)]) == 0
    (told,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert told["libraries"]["python"] == platform.python_version()
    assert told["differences"] == [
        {"library": "flax", "written_with": "9", "here": None},
        {"library": "torch", "written_with": "1.0", "here": torch_here},
    ]


def test_versions_are_known_without_the_libraries() -> None:
    """In a process of its own: this one has imported torch."""
    program = (
        "import sys; from resilient_train.launch.agent import saves; from resilient_train.launch.cli import verify; "
        "from resilient_train.state.checkpoint.libraries import libraries_here; "
        "print(*libraries_here()); assert 'torch' not in sys.modules"
    )
    made = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.split() == ["python", "resilient_train", "torch", "numpy"]
