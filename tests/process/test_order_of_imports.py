"""Scripts that take ``init_process_group`` by its name, and above our import; and what a script finds of itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import JOBS, LAUNCHER, launch, read_events, start
from test_fork import starts

NANOGPT = JOBS / "nanogpt.py"
TELLS = JOBS / "tells.py"


@pytest.mark.parametrize("standby", ["1", pytest.param("0", marks=pytest.mark.long)], ids=["forked", "cold"])
def test_the_group_is_ours_whoever_comes_first(tmp_path: Path, standby: str) -> None:
    run = launch(tmp_path / "run", NANOGPT, ranks=2, flags=("--standby", standby, "--faults", "kill rank=1 step=4"))
    assert run.code == 0, run.explain()
    assert run.recoveries() == 1, run.explain()
    assert starts(run.events) == ["forked" if standby == "1" else "cold"] * 3


@pytest.mark.long
def test_an_interpreter_of_the_users_own_behind_a_wrapper(tmp_path: Path) -> None:
    """``--no-python`` starts what it is given: nobody can have imported us before. The group is made after it.

    A shell may start the rank: the process that the agent starts is not the one that trains.
    """
    flags = ("--no-python", "--faults", "kill rank=1 step=4")
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), *flags]
    with start([*command, "bash", "-c", f"{sys.executable} {NANOGPT}; exit $?"]) as process:
        _, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert any("start cold" in line and "--no-python" in line for line in err.splitlines()), err
    events = read_events(tmp_path / "run")
    assert starts(events) == ["cold"] * 3
    assert [event["kind"] for event in events].count("resumed") == 1
    assert [event["kind"] for event in events].count("session_end") == 2


def test_whose_groups_are_not_wrapped_is_told_what_helps(tmp_path: Path) -> None:
    """The name may be taken as early as it likes: what asks for the group is its backend."""
    named = tmp_path / "named.py"
    named.write_text(NANOGPT.read_text().replace('backend="gloo"', 'backend="resilient"'))
    off = {"RESILIENT_WRAP_BACKEND": "0"}
    refused = launch(tmp_path / "refused", NANOGPT, ranks=2, **off)
    assert refused.code == 2, refused.explain()
    (told,) = (line for line in refused.err.splitlines() if "resilient-run: the job ends" in line)
    assert told.endswith('import resilient_train before init_process_group, or pass it backend="resilient"'), told
    helped = launch(tmp_path / "helped", sys.executable, str(named), ranks=1, flags=("--no-python",), **off)
    assert helped.code == 0, helped.explain()


def test_under_plain_torchrun_it_is_a_plain_loop(tmp_path: Path) -> None:
    """There the group may be torch's own: nothing is to be replaced."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(NANOGPT)]
    with start(command) as process:
        _, err = process.communicate(timeout=120)
    # torch 2.13's gloo may abort a process that has done all, as it ends; without us as well (docs/facts.md).
    assert process.returncode == 0 or "terminate called without an active exception" in err, err
    assert "Traceback" not in err.partition("terminate called")[0], err
    assert err.count("the Session is a plain loop") == 1


@pytest.mark.parametrize("way", ["script", "relative", "module"])
def test_a_script_finds_of_itself_what_it_finds_under_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Itself, its folder, its arguments; and so do the processes that it spawns."""
    monkeypatch.chdir(JOBS)
    named = {"script": [str(TELLS)], "relative": ["../jobs/tells.py"], "module": ["-m", "tells"]}[way]
    told = {}
    for name, command in (
        ("plain", [sys.executable, *named]),
        ("forked", [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), *named]),
    ):
        file = tmp_path / "told"
        if name == "plain":
            subprocess.run([*command, str(file), "more"], check=True, timeout=60)
        else:
            with start([*command, str(file), "more"]) as process:
                out, err = process.communicate(timeout=60)
            assert process.returncode == 0, out + err
        told[name] = json.loads(file.read_text())
    assert starts(read_events(tmp_path / "run")) == ["forked"] * 2
    assert told["forked"] == told["plain"]
