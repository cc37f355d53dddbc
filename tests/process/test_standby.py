"""A replacement that is forked from a process with its imports done: nobody can tell, and nothing is left behind."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, launch, read_events, start

AT_ONCE = {"RESILIENT_STANDBY": "1", "RESILIENT_STANDBY_DELAY_S": "0"}
FULL = "FULL" in os.environ
WORLDS = [("base", "1"), *([("workers+two", "2"), ("stateful+view", "1")] if FULL else [])]
DEEP = [("idle", "base"), ("built", "base"), *([("idle", "workers+two"), ("built", "stateful+view")] if FULL else [])]


def starts(events: list[dict[str, Any]]) -> list[str]:
    return [event["detail"]["start"] for event in events if event["kind"] == "spawned"]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("variant", "threads"), WORLDS)
def test_the_bits_of_forked_ranks(tmp_path: Path, undisturbed: Reference, variant: str, threads: str) -> None:
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING"
    arguments = ("train.py", "--steps", "12", "--variant", variant)
    environ = {**AT_ONCE, "OMP_NUM_THREADS": threads}
    flags = ("--faults", plan)
    run = launch(tmp_path / "run", *arguments, "--standby-at", "3", ranks=3, flags=flags, timeout_s=150, **environ)
    if threads == "1":
        reference = undisturbed(ranks=3, variant=variant, steps=12)
    else:
        reference = launch(tmp_path / "undisturbed", *arguments, ranks=3, OMP_NUM_THREADS=threads)
    assert_identical(run, reference, ranks=3, recoveries=2)
    assert starts(run.events) == ["cold"] * 3 + ["forked"] * 2, run.explain()
    assert run.of("standby_lost") == run.of("standby_off") == []
    assert "stand by" not in run.err


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("depth", "variant"), DEEP)
def test_the_bits_of_ranks_that_ran_the_script_ahead(
    tmp_path: Path, undisturbed: Reference, depth: str, variant: str
) -> None:
    plan = "kill rank=1 step=5 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING"
    arguments = ("train.py", "--steps", "12", "--variant", variant, "--standby-at", "3", "7")
    environ = {**AT_ONCE, "RESILIENT_STANDBY_DEPTH": depth}
    run = launch(tmp_path / "run", *arguments, ranks=3, flags=("--faults", plan), timeout_s=150, **environ)
    assert_identical(run, undisturbed(ranks=3, variant=variant, steps=12), ranks=3, recoveries=2)
    assert starts(run.events) == ["cold"] * 3 + [depth] * 2, run.explain()
    assert run.of("standby_lost") == run.of("standby_off") == run.of("standby_shallow") == []
    assert {event["detail"]["depth"] for event in run.of("standby_waits")} == {depth}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``small_agent.py`` says; then it is killed, and ``gone`` tells which of its processes outlived it."""
    folder = tmp_path_factory.mktemp("small")
    with start([sys.executable, str(JOBS / "small_agent.py"), str(folder)], OMP_NUM_THREADS="2") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        result: dict[str, Any] = json.loads(line)
        left = [psutil.Process(pid) for pid in result["left"]]
        process.kill()
        result["stayed"] = [each.pid for each in psutil.wait_procs(left, timeout=10)[1]]
    return result


def test_a_script_can_not_tell(told: dict[str, Any]) -> None:
    for name in ("tell", "module"):
        cold, forked = (json.loads(told["told"][name][way]["out"].splitlines()[0]) for way in ("cold", "forked"))
        assert forked["same"] == cold["same"], name
    again = json.loads(told["again"]["out"].splitlines()[0])
    first = json.loads(told["told"]["tell"]["forked"]["out"].splitlines()[0])
    assert all(one != other for one, other in zip(first["own"], again["own"], strict=True)), "the same random numbers"


def test_it_ends_as_it_would(told: dict[str, Any]) -> None:
    """Exit codes, tracebacks, hooks, what is written at the end."""
    for name, ways in told["told"].items():
        cold, forked = ways["cold"], ways["forked"]
        assert forked["code"] == cold["code"], name
        assert forked["err"] == cold["err"], name
        assert forked["out"].splitlines()[1:] == cold["out"].splitlines()[1:], name
    codes = {name: ways["forked"]["code"] for name, ways in told["told"].items()}
    assert (codes["raise"], codes["exit number"], codes["exit none"]) == (1, 7, 0)
    assert (codes["interrupt"], codes["abort"]) == (-signal.SIGINT, -signal.SIGABRT)
    assert "in <module>" in told["told"]["raise"]["forked"]["err"]


def test_what_is_odd_is_started_cold(told: dict[str, Any]) -> None:
    assert told["other"], "a variable that libraries read was different"
    assert told["none"], "the nursery was dead, and its last spare taken"
    assert told["refused_s"] < 1
    kinds = [kind for kind, _ in told["events"]]
    assert kinds == ["standby_ready", "standby_lost", "standby_ready"], "it was not started again"


def test_nothing_outlives_the_agent(told: dict[str, Any]) -> None:
    assert len(told["left"]) == 3, "a fork that lives, a spare and the nursery"
    assert told["stayed"] == []


@pytest.mark.skipif(not FULL, reason="two jobs of half a minute: make test FULL=1")
@pytest.mark.parametrize("victim", ["nursery", "spare", "agent", "rank"])
def test_whatever_is_killed_nothing_is_left(tmp_path: Path, victim: str) -> None:
    run_dir = tmp_path / "run"
    script = [str(JOBS / "train.py"), "--steps", "400" if victim != "agent" else "100000", "--standby-at", "3"]
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script]
    with start(command, **AT_ONCE) as process:
        deadline = time.monotonic() + 60
        while not (ready := [e for e in read_events(run_dir) if e["kind"] == "standby_ready"]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.3)
        nursery = ready[0]["detail"]["pid"]
        ranks = [e["detail"]["pid"] for e in read_events(run_dir) if e["kind"] == "spawned"]
        family = psutil.Process(process.pid).children(recursive=True)
        spares = [each.pid for each in family if each.pid not in (nursery, *ranks)]
        assert len(spares) == 1
        os.kill({"nursery": nursery, "spare": spares[0], "agent": process.pid, "rank": ranks[1]}[victim], 9)
        _, err = process.communicate(timeout=60)
        assert process.returncode == (-9 if victim == "agent" else 0), err
        assert psutil.wait_procs(family, timeout=10)[1] == []
        expected = ["cold", "cold", "forked"] if victim == "rank" else ["cold", "cold"]
        assert starts(read_events(run_dir)) == expected
