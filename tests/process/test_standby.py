"""A replacement that is forked from a process with its imports done, or that has run the script ahead: nobody can tell,
and nothing is left behind.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, launch, read_events, start

from resilient_train.launch.spares import ForkedChild, Spare

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


def said(script: str, folder: Path, **environ: str) -> dict[str, Any]:
    """What that agent of ``jobs/`` says; then it is killed, and ``stayed`` tells which of its processes outlived it."""
    with start([sys.executable, str(JOBS / script), str(folder)], **environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()
        result: dict[str, Any] = json.loads(line)
        left = [psutil.Process(pid) for pid in result["left"]]
        process.kill()
        result["stayed"] = [each.pid for each in psutil.wait_procs(left, timeout=10)[1]]
    return result


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return said("small_agent.py", tmp_path_factory.mktemp("small"), OMP_NUM_THREADS="2")


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


VARIABLES = {
    "get": "RANK",
    "getenv": "LOCAL_RANK",
    "contains": "RANK",
    "bytes": "RANK",
    "set": "RANK",
    "library": "LOCAL_RANK",
    "suppressed": "LOCAL_RANK",
    "child reads": "RANK",
}
DEEDS = {
    "copy": "takes all environment variables",
    "program": "starts a program (true)",
    "shell": "starts a program (true)",
    "overwrite": "overwrites ",
    "remove": "removes ",
    "save": "overwrites ",
    "remove all": "removes ",
    "spawn": "starts a program (",
    "child lives": "while processes run that the script has started",
    "raise": "raised KeyError before it came to init_process_group(): 'missing'",
    "exit": "ended (exit code 3) before it came to",
    "die": "ended with code 4 on its way through the script, as 2 did before it",
    "slow": "took longer than 1.5 s (RESILIENT_STANDBY_LIMIT_S)",
}
OF_THE_GROUP = {
    "rank": "asks for the rank before rt.standby_point(): move it behind",
    "sampler": "asks for the rank",
    "new group": "asks for the rank",
    "objects": "asks for the rank",
    "session": "opens the Session",
    "raise": "raised KeyError before it came to rt.standby_point()",
    "get": "uses RANK before rt.standby_point()",
}
NAMES_NO_LINE = ("raise", "exit", "die", "slow")


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return said("early_agent.py", tmp_path_factory.mktemp("ahead"))


def test_a_script_that_needs_its_rank_is_found_out(ahead: dict[str, Any]) -> None:
    """It never gets a wrong one, the job's files are as they were, and the user is told what to move."""
    expected = {
        f"{what}@group": (f"uses {name} before init_process_group()", "forked") for what, name in VARIABLES.items()
    }
    expected |= {f"{what}@group": (text, "forked") for what, text in DEEDS.items()}
    expected |= {f"{what}@point": (text, "idle") for what, text in OF_THE_GROUP.items()}
    expected |= {"end": ("before it came to rt.standby_point()", "idle")}
    expected["child lives@group"] = (DEEDS["child lives"], "idle")  # seen where it would have waited
    assert ahead["odd"].keys() == expected.keys()
    for case, (text, depth) in expected.items():
        *events, file, leaf = ahead["odd"][case]
        kind, detail = events[-1]
        assert kind == "standby_shallow", case
        assert text in detail["reason"], case
        assert (detail["asked"], detail["depth"]) == ("built", depth), case
        assert ("early.py:" in detail["reason"]) == (not case.startswith((*NAMES_NO_LINE, "end"))), case
        assert file == leaf == "of the job", case


def test_who_ran_the_script_ahead_is_the_rank(ahead: dict[str, Any]) -> None:
    for case, life in ahead["lives"].items():
        assert life["start"] == ("idle" if case == "idle" else "built"), case
        assert life["code"] == (case == "raise as a rank"), (case, life)
        line, end = life["out"].splitlines()  # and no banner: that is in standby.log
        told = json.loads(line)
        assert told.pop("set") == ("WARN" if case == "set another@group" else None)
        assert told == {
            "rank": [2, 2, 2, "2"],
            "sampler": 2,
            "size": 3,
            "environ": "_Environ",
            "doors": [False, False, False],
            "hook": "[rank2]",
            "sockets": 1,
        }, case
        assert end == "the end"
        lines = life["err"].splitlines()
        assert all(each.startswith("[rank2]: ") for each in lines), life
        assert bool(lines) == (case == "raise as a rank")


def test_spares_in_the_script_come_and_go(ahead: dict[str, Any]) -> None:
    assert ahead["after a death"] == ["standby_waits", "standby_lost", "standby_waits"]
    assert [(each["depth"], each["ready"]) for each in ahead["described"]] == [("nursery", True), ("built", True)]
    nursery, spare = (each["own_bytes"] for each in ahead["described"])
    assert nursery > 100 << 20 > spare > 1 << 20
    assert ahead["of another attempt"] == "forked", "its store was that of ranks which are gone"
    assert len(ahead["left"]) >= 2, "the nursery, and a spare on its way"
    assert ahead["stayed"] == []


def test_a_spare_on_its_way_takes_half_of_a_core() -> None:
    async def measure() -> tuple[float, float]:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            while True:
                pass
        ours, theirs = socket.socketpair()
        spare, process = Spare(ForkedChild(pid), ours), psutil.Process(pid)
        shares = []
        try:
            spare.set_out(turns=True, limit_s=60, on_limit=lambda _: None)
            for _ in range(2):
                used, begun = sum(process.cpu_times()[:2]), time.monotonic()
                await asyncio.sleep(0.6)
                shares.append((sum(process.cpu_times()[:2]) - used) / (time.monotonic() - begun))
                spare.arrive()
            assert process.status() != psutil.STATUS_STOPPED
        finally:
            spare.end()
            theirs.close()
        return shares[0], shares[1]

    paced, free = asyncio.run(measure())
    assert 0.05 < paced < 0.62
    assert free > paced


VICTIMS = [(victim, "forked") for victim in ("nursery", "spare", "agent", "rank")]
VICTIMS += [("spare", "idle"), ("agent", "built"), ("rank", "built")]


@pytest.mark.skipif(not FULL, reason="jobs of half a minute: make test FULL=1")
@pytest.mark.parametrize(("victim", "depth"), VICTIMS)
def test_whatever_is_killed_nothing_is_left(tmp_path: Path, victim: str, depth: str) -> None:
    run_dir = tmp_path / "run"
    script = [str(JOBS / "train.py"), "--steps", "400" if victim != "agent" else "100000", "--standby-at", "3"]
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), *script]
    with start(command, **AT_ONCE, RESILIENT_STANDBY_DEPTH=depth) as process:
        deadline = time.monotonic() + 60
        waits = "standby_waits" if depth != "forked" else "standby_ready"
        while not any(e["kind"] == waits for e in read_events(run_dir)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        ready = [e for e in read_events(run_dir) if e["kind"] == "standby_ready"]
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
        expected = ["cold", "cold", depth] if victim == "rank" else ["cold", "cold"]
        assert starts(read_events(run_dir)) == expected
