"""``resilient-train drill``: a user's own script, undisturbed and with faults."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, start

from resilient_train.launch.cli.tool import main
from resilient_train.testing import drill as drills

DRILLED = str(JOBS / "drilled.py")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drill's jobs come from the test server."""

    @contextlib.contextmanager
    def launched(run_dir: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen]:
        run_dir.mkdir(parents=True, exist_ok=True)
        ours = {name: value for name, value in environ.items() if name.startswith("RESILIENT_")}
        with start([*LAUNCHER, "--run-dir", str(run_dir), *arguments], **ours) as process:
            yield process

    monkeypatch.setattr(drills, "launched", launched)


@pytest.mark.usefixtures("served")
def test_every_kind_on_a_users_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RESILIENT_HANG_TIMEOUT_S", "2")
    flags = ("--ranks", "2", "--faults", "5", "--kinds", "kill,stop,hcce,uce,loop", "--seed", "3", "--json")
    job = (str(JOBS / "train.py"), "--steps", "14")
    code = main(["drill", "--run-dir", str(tmp_path / "drill"), *flags, "--", *job])
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert code == 0, (result, err)
    assert result["ok"] is result["identical"] is True
    assert [fault["strategy"] for fault in result["faults"]] == ["ARF", "HANG, ARF", "HCCE", "UCE", "HANG, ARF"]
    assert all(fault["recovery_ms"] > 0 for fault in result["faults"])
    assert result["committed_steps_lost"] == 0
    assert result["difference"] is None
    assert result["not_compared"] == {}


def run(capsys: pytest.CaptureFixture[str], run_dir: Path, mode: str, *flags: str) -> tuple[int, str, str]:
    """Exit code, what was said, and the verdict, its last line."""
    code = main(["drill", "--run-dir", str(run_dir), "--ranks", "2", *flags, "--", DRILLED, mode])
    said = capsys.readouterr().out
    return code, said, said.splitlines()[-1]


@pytest.mark.parametrize(
    ("mode", "verdict", "words"),
    [
        ("fails", "not known", ["the undisturbed run ended with exit code 3"]),
        ("no-session", "not known", ["no Session"]),
        ("drifts", "not known", ["not deterministic: model.0.module.weight of rank 0 differs between two undisturbed"]),
        ("drifts-late", "not known", ["something differs; undisturbed once more", "not deterministic: model.0."]),
        (
            "not-taken-back",
            "NO",
            ["did not begin again as it had begun: state.count.value of rank", "(the last fault before: hcce"],
        ),
        ("fine", "yes", ["not compared: NumPy's random numbers, Python's random numbers of rank 0, 1"]),
    ],
)
@pytest.mark.usefixtures("served")
def test_what_is_said_of_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, verdict: str, words: list[str]
) -> None:
    """The verdict and the exit code say the same, and what is the script's own doing is not put on the faults."""
    code, said, last = run(capsys, tmp_path / "drill", mode, "--faults", "1", "--kinds", "hcce", "--seed", "7")
    assert last.startswith(f"recovers bit for bit: {verdict}"), said
    assert code == (verdict != "yes"), said
    for each in words:
        assert each in said


@pytest.mark.usefixtures("served")
def test_a_batch_that_is_fetched_behind_the_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new process fetches it in its first step: that is no difference."""
    _, said, last = run(capsys, tmp_path / "drill", "ahead", "--faults", "3", "--kinds", "kill", "--seed", "1")
    assert last.startswith("recovers bit for bit: yes (3 faults"), said
    assert "undisturbed once more" not in said


@pytest.mark.usefixtures("served")
def test_a_local_variable_that_is_carried_from_step_to_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It differs in a new process. The first step that uses it is named, and with --each the fault that does it."""
    flags = ("--faults", "2", "--kinds", "kill,uce", "--seed", "0", "--each")
    code, said, last = run(capsys, tmp_path / "drill", "carries", *flags)
    assert code == 1, said
    assert last.startswith("recovers bit for bit: NO"), said
    kill, uce = (line for line in said.splitlines() if "ARF  " in line or "UCE  " in line)
    assert kill.endswith("NOT THE SAME"), said
    assert not uce.endswith("SAME"), said
    step = kill.split("step=")[1].split()[0]
    (told,) = (line for line in said.splitlines() if "is the first that differs" in line)
    assert f"step {step} is the first that differs: it began as undisturbed" in told, said
    assert "a local variable that is carried from step to step" in told
    (kept,) = (line for line in said.splitlines() if "the code at" in line)
    assert "keeps prefetched from step to step" in kept, said
    assert kill.split("  ")[0] in told
