"""Ranks that are forked from a process with its imports done, or that have run the script ahead: nobody can tell, and
nothing is left behind.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, finish, launch, read_events, start
from saved_jobs import RANKS, STEPS, command, pid_of, wait_for, wait_for_step

WAYS = ("plain", "cold", "forked")


def starts(events: list[dict[str, Any]]) -> list[str]:
    return [event["detail"]["start"] for event in events if event["kind"] == "spawned"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "threads", "ranks"),
    [
        ("two+view", "2", 2),
        pytest.param("base", "1", 3, marks=pytest.mark.long),
        pytest.param("workers+two", "2", 3, marks=pytest.mark.long),
        pytest.param("stateful+view", "1", 3, marks=pytest.mark.long),
    ],
)
def test_the_bits_of_forked_ranks(tmp_path: Path, variant: str, threads: str, ranks: int) -> None:
    """They are those of new interpreters, with one thread and with two, which give other bits."""
    plan = "kill rank=1 step=2 phase=COMPUTE at=backward; kill rank=0 step=4 phase=UPDATING"
    arguments = ("train.py", "--steps", "6", "--variant", variant)
    run = launch(tmp_path / "run", *arguments, ranks=ranks, flags=("--faults", plan), OMP_NUM_THREADS=threads)
    cold = launch(tmp_path / "cold", *arguments, ranks=ranks, flags=("--standby", "0"), OMP_NUM_THREADS=threads)
    assert_identical(run, cold, ranks=ranks, recoveries=2)
    assert starts(run.events) == ["forked"] * (ranks + 2), run.explain()
    assert starts(cold.events) == ["cold"] * ranks
    assert run.of("standby_lost") == run.of("standby_off") == cold.of("standby_off") == []
    assert "start cold" not in run.err + cold.err
    # Each process that was the first rank tells what its loop keeps, behind its first recovery.
    assert [event["detail"]["names"] for event in run.of("loop_carried")] == [["asked.show_start", "began"]] * 2
    assert run.err.count("keeps asked.show_start, began from step to step") == 2
    assert cold.of("loop_carried") == []


@pytest.mark.parametrize("variant", ["stateful+view", pytest.param("base", marks=pytest.mark.long)])
def test_the_bits_of_ranks_that_ran_the_script_ahead(tmp_path: Path, undisturbed: Reference, variant: str) -> None:
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING"
    arguments = ("train.py", "--steps", "12", "--variant", variant, "--standby-at", "3", "7")
    environ = {"RESILIENT_STANDBY_DEPTH": "built"}
    run = launch(tmp_path / "run", *arguments, ranks=3, flags=("--faults", plan), **environ)
    assert_identical(run, undisturbed(ranks=3, variant=variant, steps=12), ranks=3, recoveries=2)
    assert starts(run.events) == ["forked"] * 3 + ["built"] * 2, run.explain()
    assert run.of("standby_lost") == run.of("standby_off") == run.of("standby_shallow") == []
    assert {event["detail"]["depth"] for event in run.of("standby_waits")} == {"built"}


def said(script: str, folder: Path, **environ: str) -> dict[str, Any]:
    """What that agent of ``jobs/`` says; then it is killed, and ``stayed`` tells which of its processes outlived it."""
    with start([sys.executable, str(JOBS / script), str(folder)], **environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        result: dict[str, Any] = json.loads(line)
        left = [psutil.Process(pid) for pid in result["left"]]
        process.kill()
        result["stayed"] = [each.pid for each in psutil.wait_procs(left, timeout=60)[1]]
    return result


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return said("small_agent.py", tmp_path_factory.mktemp("small"), OMP_NUM_THREADS="2", PYTHONPATH=str(JOBS))


@pytest.mark.long
def test_a_script_can_not_tell(told: dict[str, Any]) -> None:
    for name in ("tell", "module"):
        plain, cold, forked = (json.loads(told["told"][name][way]["out"].splitlines()[0]) for way in WAYS)
        for found in (plain, cold, forked):
            found["same"].pop("parent" if found is plain else "", None)
        wraps = [each["same"].pop("wrapped", None) for each in (plain, cold, forked)]
        if name == "tell":
            assert wraps[1:] == [True, True], "init_process_group is ours before the script takes it by its name"
        assert forked["same"] == cold["same"], name
        for found in (plain, cold):  # what the agent's own start sees to
            found["same"].pop("parent", None)
            found["same"].pop("death_signal")
        assert cold["same"] == plain["same"], name
    again = json.loads(told["again"]["out"].splitlines()[0])
    first = json.loads(told["told"]["tell"]["forked"]["out"].splitlines()[0])
    assert all(one != other for one, other in zip(first["own"], again["own"], strict=True)), "the same random numbers"


def test_it_ends_as_it_would(told: dict[str, Any]) -> None:
    """Exit codes, tracebacks, hooks, what is written at the end."""
    for name, ways in told["told"].items():
        plain = ways["plain"]
        for way in WAYS[1:]:
            assert ways[way]["code"] == plain["code"], (name, way)
            assert ways[way]["err"] == plain["err"], (name, way)
            lines = slice(name in ("tell", "module"), None)
            assert ways[way]["out"].splitlines()[lines] == plain["out"].splitlines()[lines], (name, way)
    codes = {name: ways["forked"]["code"] for name, ways in told["told"].items()}
    assert (codes["raise"], codes["exit number"], codes["exit none"]) == (1, 7, 0)
    assert (codes["interrupt"], codes["abort"]) == (-signal.SIGINT, -signal.SIGABRT)
    assert "in <module>" in told["told"]["raise"]["forked"]["err"]


def test_what_is_odd_is_started_cold(told: dict[str, Any]) -> None:
    assert told["other"], "a variable that libraries read was different"
    assert told["none"], "the zygote was dead, and its last spare taken"
    kinds = [kind for kind, _ in told["events"]]
    assert kinds == ["standby_ready", "standby_lost", "standby_lost", "standby_ready"], "it was not started again"


def test_a_zygote_is_made_again_at_once_and_one_that_dies_again_is_not(told: dict[str, Any]) -> None:
    assert told["again_s"] == [0.0, 1.5], "what its pause is set to"


def test_nothing_outlives_the_agent(told: dict[str, Any]) -> None:
    assert len(told["left"]) == 4, "a rank, a spare, the zygote and the root"
    assert told["stayed"] == []


VARIABLES = {
    "get": "uses RANK",
    "getenv": "uses LOCAL_RANK",
    "contains": "uses RANK",
    "copy": "takes all environment variables",
    "bytes": "uses RANK",
    "set": "uses RANK",
    "library": "uses LOCAL_RANK",
    "suppressed": "uses LOCAL_RANK",
    "child reads": "uses RANK",
}
DEEDS = {
    "child lives": "while processes run that the script has started",
    "raise": "raised KeyError before it came to rt.standby_point(): 'missing'",
    "exit": "ended (exit code 3) before it came to",
    "die": "a spare ended on its way through the script, as 2 did before it",
    "slow": "took longer than 1.5 s (RESILIENT_STANDBY_LIMIT_S)",
}
OF_THE_GROUP = {
    "rank": "asks for the rank before rt.standby_point(): move it behind",
    "sampler": "asks for the rank",
    "new group": "asks for the rank",
    "objects": "asks for the rank",
    "raise": "raised KeyError before it came to rt.standby_point()",
    "get": "uses RANK before rt.standby_point(): move it behind",
}
NAMES_NO_LINE = ("raise", "exit", "die", "slow", "end")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return said("early_agent.py", tmp_path_factory.mktemp("ahead"))


@pytest.mark.long
def test_a_script_that_needs_its_rank_is_found_out(ahead: dict[str, Any]) -> None:
    """It never gets a wrong one, and the user is told what to move."""
    expected = {f"{what}@group": text for what, text in (VARIABLES | DEEDS).items()}
    expected |= {f"{what}@point": text for what, text in OF_THE_GROUP.items()}
    expected |= {"end": "before it came to rt.standby_point()"}
    assert ahead["odd"].keys() == expected.keys()
    for case, text in expected.items():
        kind, detail = ahead["odd"][case][-1]
        assert kind == "standby_shallow", case
        assert text in detail["reason"], case
        assert (detail["asked"], detail["depth"]) == ("built", "forked"), case
        assert ("early.py:" in detail["reason"]) == (not case.startswith(NAMES_NO_LINE)), case


def test_who_ran_the_script_ahead_is_the_rank(ahead: dict[str, Any]) -> None:
    for case, life in ahead["lives"].items():
        assert life["start"] == "built", case
        assert life["code"] == (case == "raise as a rank"), (case, life)
        line, end = life["out"].splitlines()  # and no banner: that is in standby.log
        told = json.loads(line)
        assert told.pop("set") == ("WARN" if case == "set another@group" else None)
        assert told == {
            "rank": [2, 2, 2, "2"],
            "sampler": 2,
            "size": 3,
            "environ": "_Environ",
            "hook": "[rank2]",
            "sockets": 0,
        }, case
        assert end == "the end"
        lines = life["err"].splitlines()
        assert all(each.startswith("[rank2]: ") for each in lines), life
        assert bool(lines) == (case == "raise as a rank")


def test_spares_in_the_script_come_and_go(ahead: dict[str, Any]) -> None:
    assert ahead["after a death"] == ["standby_waits", "standby_lost", "standby_waits"]
    described = [(each["depth"], each["ready"]) for each in ahead["described"]]
    assert described == [("root", True), ("zygote", True), ("built", True)]
    _, zygote, spare = (each["own_bytes"] for each in ahead["described"])
    assert zygote > 30 << 20 > spare > 1 << 20
    assert ahead["of another attempt"] == "forked", "its store was that of ranks which are gone"
    assert len(ahead["left"]) >= 3, "the root, the zygote, and a spare on its way"
    assert ahead["stayed"] == []


@pytest.mark.parametrize(
    ("depth", "victims"),
    [
        ("forked", ("rank", "spare", "zygote", "root")),
        pytest.param("built", ("rank", "spare"), marks=pytest.mark.long),
    ],
)
def test_whatever_is_killed_nothing_is_left(tmp_path: Path, depth: str, victims: tuple[str, ...]) -> None:
    """The job comes to its end, and so do all that have ever stood by."""
    run_dir, enough = tmp_path / "run", tmp_path / "enough"
    with start(standing_by(run_dir, "--pace", str(enough)), RESILIENT_STANDBY_DEPTH=depth) as process:
        seen: dict[int, psutil.Process] = {}
        for victim in victims:
            family = wait_for_family(process.pid, run_dir, depth)
            seen |= {each.pid: each for each in family.values()}
            family[victim].kill()
            gone(process, family[victim].pid)
        enough.touch()
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert psutil.wait_procs(seen.values(), timeout=60)[1] == []
    assert starts(read_events(run_dir)) == ["forked", "forked", depth]


@pytest.mark.parametrize("depth", ["built", pytest.param("forked", marks=pytest.mark.long)])
def test_nothing_is_left_where_the_agent_is_killed(tmp_path: Path, depth: str) -> None:
    run_dir = tmp_path / "run"
    with start(standing_by(run_dir, "--pace", str(tmp_path / "never")), RESILIENT_STANDBY_DEPTH=depth) as process:
        family = wait_for_family(process.pid, run_dir, depth)
        process.kill()
        assert process.wait(60) == -9
        assert psutil.wait_procs(family.values(), timeout=60)[1] == []
    assert starts(read_events(run_dir)) == ["forked", "forked"]


def standing_by(run_dir: Path, *arguments: str) -> list[str]:
    script = [str(JOBS / "train.py"), "--steps", "200", "--standby-at", "3", *arguments]
    return [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script]


def gone(launcher: Any, pid: int) -> None:
    """Until nothing is left of the process: its launcher has seen that it died."""
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"{pid} is not reaped"
        assert launcher.poll() is None, launcher.communicate()
        time.sleep(0.005)


def wait_for_family(launcher: int, run_dir: Path, depth: str) -> dict[str, psutil.Process]:
    """The launcher's processes when all are there, and the job trains: root, zygote, two ranks, a spare that waits."""
    deadline = time.monotonic() + 60
    while True:
        family = {each.pid: each for each in psutil.Process(launcher).children(recursive=True)}
        events = read_events(run_dir, torn=True)
        kinds = [event["kind"] for event in events]
        if "started" in kinds and kinds.count("spawned") == 2 + kinds.count("resumed"):
            ranks = [pid_of(run_dir, rank) for rank in range(2)]
            zygote = next(e["detail"]["pid"] for e in reversed(events) if e["kind"] == "standby_ready")
            others = sorted(family.keys() - {zygote, *ranks})  # the root was the first
            waits = {e["detail"]["pid"] for e in events if e["kind"] == "standby_waits"}
            if len(family) == 5 and len(others) == 2 and (depth == "forked" or others[1] in waits):
                names = {"root": others[0], "spare": others[1], "zygote": zygote, "rank": ranks[1], "other": ranks[0]}
                return {name: family[pid] for name, pid in names.items()}
        assert time.monotonic() < deadline, family
        time.sleep(0.02)


NO_FORKS = {
    "import os\nos.environ['MKL_NUM_THREADS'] = '1'\n": "script.py:2 sets environment variables",
    "import queue\nassert queue.mine\n": "queue.py hides the module 'queue'",
    "import tomllib\nassert tomllib.mine\n": "",
}


@pytest.mark.parametrize("text", NO_FORKS, ids=["environ", "hidden", "fine"])
def test_a_script_that_can_not_be_forked_starts_cold(tmp_path: Path, text: str) -> None:
    """It runs as under ``python``, and the user is told why once."""
    for name in ("queue", "tomllib"):
        if f"import {name}" in text:
            (tmp_path / f"{name}.py").write_text("mine = True\n")
    (tmp_path / "script.py").write_text(f"{text}print('ran')\n")
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), str(tmp_path / "script.py")]
    with start(command) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "ran\nran\n"), err
    told = NO_FORKS[text]
    assert starts(read_events(tmp_path / "run")) == ["cold" if told else "forked"] * 2
    assert told in err
    assert err.count("start cold") == bool(told)


@pytest.mark.parametrize("begin", [pytest.param("command", marks=pytest.mark.long), "module"])
def test_the_hashes_of_strings_are_those_of_all_jobs(tmp_path: Path, begin: str) -> None:
    """However it starts: a table made in the order of a set is the same behind a cold start, and in the next job."""
    command = [str(Path(sys.executable).with_name("resilient-run"))] if begin == "command" else LAUNCHER
    flags = ("--standby", "0") if begin == "module" else ()
    (tmp_path / "script.py").write_text("print([*{'one', 'two', 'three', 'four', 'five'}, hash('a word')])\n")
    arguments = ("--nproc-per-node", "2", *flags, "--run-dir", str(tmp_path / "run"), str(tmp_path / "script.py"))
    run = finish([*command, *arguments], tmp_path / "run", PYTHONHASHSEED="")
    assert run.code == 0, run.explain()
    told = subprocess.check_output([sys.executable, tmp_path / "script.py"], env={"PYTHONHASHSEED": "0"}, text=True)
    assert run.out == told * 2
    assert starts(run.events) == ["cold" if flags else "forked"] * 2


LOOKS = """
import gc
import sys
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt

asked, there, used_s = [], set(sys.modules), 0.0


def noted(name, call):
    def look(*args):
        asked.append(name)
        return call(*args)

    return look


for name in ("collect", "freeze", "unfreeze", "get_freeze_count"):
    setattr(gc, name, noted(name, getattr(gc, name)))
torch.distributed.init_process_group()
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
with rt.Session(model=model, optimizer=optimizer) as session:
    for step in session.steps(12):
        with step:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        used_s = used_s or time.process_time()
print(used_s)
print("asked", asked, "imported", sorted(set(sys.modules) - there))
"""


@pytest.mark.long
def test_a_fork_does_at_once_what_a_new_interpreter_takes_seconds_for(tmp_path: Path) -> None:
    """It imports nothing. Nor does it look at what its zygote has, a million objects: to count them takes 30 ms, half
    of what a recovery takes. By processor time: a machine that is busy takes more for both. 1 : 50 where this was
    written, and 1 : 22 with two such counts.
    """
    (tmp_path / "script.py").write_text(LOOKS)
    plan = ("--faults", "kill rank=1 step=3 phase=COMPUTE at=backward")
    used_s, said = dict[str, list[float]](), dict[str, list[str]]()
    for name, flags, ranks in (("forked", plan, 3), ("cold", ("--standby", "0"), 2)):
        run_dir = tmp_path / name
        with start(
            [*LAUNCHER, "--nproc-per-node", "2", *flags, "--run-dir", str(run_dir), f"{tmp_path}/script.py"]
        ) as job:
            out, err = job.communicate(timeout=100)
        assert job.returncode == 0, err
        assert starts(read_events(run_dir)) == [name] * ranks
        lines = out.splitlines()
        said[name] = [line for line in lines if line[0] == "a"]
        used_s[name] = [float(line) for line in lines if line[0] != "a"]
    assert said["forked"] == ["asked [] imported []"] * 2
    assert max(used_s["forked"]) < min(used_s["cold"]) / 33, used_s


def test_a_replacement_of_a_launcher_whose_folder_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: Reference
) -> None:
    """Nobody needs it: the script and the run directory lie elsewhere. The fork stays where it stands."""
    here, run_dir = tmp_path / "here", tmp_path / "run"
    here.mkdir()
    monkeypatch.chdir(here)
    with start(command(run_dir, "--pace", str(run_dir / "enough"))) as process:
        wait_for_step(run_dir, 2)
        monkeypatch.chdir(tmp_path)
        here.rmdir()
        os.kill(pid_of(run_dir, 1), signal.SIGKILL)
        wait_for(run_dir, process, "resumed")
        (run_dir / "enough").touch()
        out, err = process.communicate(timeout=100)
    run = Run(run_dir, process.returncode, out, err, read_events(run_dir))
    assert_identical(run, undisturbed(ranks=RANKS, steps=STEPS), ranks=RANKS, recoveries=1)
    assert starts(run.events)[RANKS:] == ["forked"]
