"""A process that takes a rank's place runs the code that the others run, whatever has become of the files."""

import shutil
from pathlib import Path

import pytest
from running import JOBS, Run, launch


def parameters(run: Run) -> set[str]:
    return {state for state, _ in run.digests().values()}


def run_of(folder: Path, how: str, *flags: str) -> Run:
    release = folder / "release"
    release.mkdir(parents=True)
    shutil.copy(JOBS / "edited.py", release)
    (release / "helper.py").write_text("SCALE = 1.0\n")
    (release / "late.py").write_text("SHIFT = 1.0\n")
    current = folder / "current"
    current.symlink_to(release)
    script = (current if how == "link" else release) / "edited.py"
    return launch(folder / "run", script, how, ranks=2, flags=flags)


@pytest.mark.parametrize("start", ["forked", pytest.param("cold", marks=pytest.mark.long)])
def test_it_runs_the_code_of_the_others(tmp_path: Path, start: str) -> None:
    reference = run_of(tmp_path / "never", "never")
    assert reference.code == 0, reference.explain()
    hows = ["script"] if start == "cold" else ["script", "helper", "package", "gone", "emptied", "removed", "link"]
    for how in hows:
        plan = ("--faults", "kill rank=1 step=5; kill rank=0 step=7", "--standby", str(int(start == "forked")))
        run = run_of(tmp_path / how, how, *plan)
        assert run.code == 0, run.explain()
        assert run.recoveries() == 2
        assert [each["detail"]["start"] for each in run.of("spawned")[2:]] == [start] * 2, run.explain()
        assert parameters(run) == parameters(reference), how


def test_a_job_that_is_started_again_runs_what_is_there_now(tmp_path: Path) -> None:
    """And removes what is its own, and nothing else."""
    for others in ("code", "code-mine"):
        (tmp_path / "run" / others).mkdir(parents=True)
        (tmp_path / "run" / others / "train.py").write_text("mine")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".resilient_train").touch()
    (tmp_path / "run" / "code-link").symlink_to(tmp_path / "theirs")
    first = run_of(tmp_path, "script")
    assert first.code == 0, first.explain()
    (kept,) = [each for each in (tmp_path / "run").glob("code-*") if each.name not in ("code-mine", "code-link")]
    release = tmp_path / "release"
    assert "OWN = 1.0" in Path(f"{kept}{release}/edited.py.kept").read_text()
    assert "OWN = 3.0" in (release / "edited.py").read_text()
    assert Path(f"{kept}{release}/late.py.kept").stat().st_mtime_ns == (release / "late.py").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "run" / "checkpoints", ignore_errors=True)
    again = launch(tmp_path / "run", release / "edited.py", "never", ranks=2)
    assert again.code == 0, again.explain()
    assert parameters(again) != parameters(first)
    assert not kept.exists()
    assert [(tmp_path / "run" / each / "train.py").read_text() for each in ("code", "code-mine")] == ["mine"] * 2
    assert (tmp_path / "theirs" / ".resilient_train").exists()


def test_what_the_job_writes_itself_is_read_as_it_is(tmp_path: Path) -> None:
    """A module that a script writes and reads again and again, in each process."""
    reference = run_of(tmp_path / "never", "rewritten")
    run = run_of(tmp_path / "killed", "rewritten", "--faults", "kill rank=1 step=5; kill rank=0 step=7")
    assert run.code == reference.code == 0, run.explain()
    told = [line for line in run.out.splitlines() if line.startswith("SCALES")]
    assert told == ["SCALES [1.0, 2.0, 3.25]"] * 4
    assert parameters(run) == parameters(reference)
