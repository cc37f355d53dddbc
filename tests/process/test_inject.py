"""``resilient-train inject``: an operator at another terminal hits a job that runs, and the bits stay the same."""

import contextlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from identity import assert_identical
from running import JOBS, LAUNCHER, Reference, Run, read_events, start

from resilient_train.events import Event
from resilient_train.launch.cli import tool
from resilient_train.observe import sinks
from resilient_train.observe.sinks import EVENTS_FILE
from resilient_train.protocol import messages as m
from resilient_train.testing.fake_device import library
from resilient_train.transport import Channel, encode

STEPS = 70
"""At the pace of an operator these last 23 s; then the job is let go."""
TOOL = [sys.executable, "-m", "resilient_train.launch.cli.tool"]


class Running:
    """A job under way, and what an operator does to it."""

    def __init__(self, run_dir: Path, process: subprocess.Popen[str]) -> None:
        self.run_dir = run_dir
        self.process = process

    def inject(self, *words: str, code: int = 0) -> dict[str, Any]:
        """What ``resilient-train inject RUN WORDS --json`` prints, as an object; the error's line under ``error``."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            done = tool.main(["inject", str(self.run_dir), *words, "--json"])
        return self.answer(words, (done, out.getvalue(), err.getvalue()), code)

    def inject_from_a_shell(self, *words: str) -> dict[str, Any]:
        command = [*TOOL, "inject", str(self.run_dir), *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return self.answer(words, (done.returncode, done.stdout, done.stderr), 0)

    def answer(self, words: tuple[str, ...], done: tuple[int, str, str], code: int) -> dict[str, Any]:
        found, out, err = done
        assert found == code, (words, out, err)
        if code:
            assert out == ""
            assert err.count("\n") == 1
            return {"error": err}
        return json.loads(out)

    def wait_for(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while not (found := condition()):
            assert self.process.poll() is None, self.end().explain()
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)
        return found

    def told(self, kind: str) -> list[Event]:
        """By the reader that takes a line that is being written for none: the file grows under it."""
        return [event for event in sinks.read_events(self.run_dir / EVENTS_FILE) if event.kind == kind]

    def wait_for_recoveries(self, number: int) -> None:
        self.wait_for(lambda: len(self.told("resumed")) >= number)

    def end(self) -> Run:
        """The job at its own end."""
        (self.run_dir / "enough").touch()
        out, err = self.process.communicate(timeout=60)
        return Run(self.run_dir, self.process.returncode, out, err, read_events(self.run_dir))


@contextlib.contextmanager
def training(run_dir: Path, ranks: int, *arguments: str, **environ: str) -> Iterator[Running]:
    script = [str(JOBS / "train.py"), "--steps", str(STEPS), "--pace", str(run_dir / "enough"), *arguments]
    with start([*LAUNCHER, "--nproc-per-node", str(ranks), "--run-dir", str(run_dir), *script], **environ) as process:
        job = Running(run_dir, process)
        job.wait_for((run_dir / "samples_rank0.jsonl").exists)
        yield job


def talk_nonsense(path: Path, incarnation: int) -> None:
    """Everything that should not come over the socket of an agent, and does."""
    a_rank = encode(m.Hello("rank", 0, incarnation, os.getpid()))
    order = encode(m.Inject("kill", 0))
    for data in (
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("<I", 3) + b"\xff\xff\xff",
        struct.pack("<I", 1 << 20) + b"half a frame",
        order,  # before any Hello
        a_rank + order,  # a rank is no operator
        encode(m.Hello("rank", 7, 0, 1)) + order,
        encode(m.Hello("somebody")) + order,
        encode(m.Hello("rank", 0, 0, -1)),
        encode(m.Hello("operator")) + encode(m.LoopOver(0)) + encode(m.Inject("kill", -1)) + encode(m.Inject("\0", 0)),
    ):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(data)
    channel = Channel(str(path))
    channel.send(m.Hello("operator"))
    channel.send(m.Done(1, False, 3))  # a frame of a rank's
    reply = channel.receive(20)
    channel.close()
    assert reply == m.Reply(error="an operator can't send Done")


@pytest.mark.timeout(120)
def test_kill_hcce_and_uce_into_a_running_job(tmp_path: Path, undisturbed: Reference) -> None:
    with training(tmp_path / "run", 2) as job:
        talk_nonsense(job.run_dir / "agent-0.sock", 0)
        killed = job.inject_from_a_shell("kill", "--rank", "1")
        assert killed["incarnation"] == 0
        job.wait_for_recoveries(1)
        broken = job.inject("hcce", "--rank", "1")
        assert (broken["rank"], broken["incarnation"]) == (1, 1)
        job.wait_for_recoveries(2)
        lost = job.inject("uce", "--rank", "0", "--target", "optimizer")
        assert lost["step"] >= broken["step"] >= killed["step"]
        job.wait_for_recoveries(3)
        assert "there is no rank 2" in job.inject("kill", "--rank", "2", code=2)["error"]
        run = job.end()
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=3)
    found = [(e["rank"], e["step"], e["detail"]["kind"], e["detail"]["at"]) for e in run.of("injected")]
    expected = [(1, killed["step"], "kill", "operator"), (1, broken["step"], "hcce", "start")]
    assert found == [*expected, (0, lost["step"], "uce", "forward")]
    assert len(run.of("spawned")) == 3, "one process was replaced, by the kill"
    assert run.of("foreign_frame"), run.explain()
    report = subprocess.run(
        [*TOOL, "report", str(run.run_dir), "--json"], capture_output=True, text=True, timeout=60, check=True
    )
    told = [each["injected"] for each in json.loads(report.stdout)["recoveries"]]
    assert [[(e["rank"], e["step"], e["kind"], e["at"]) for e in each] for each in told] == [[each] for each in found]
    trace = json.loads((run.run_dir / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["kind"] for e in trace if e["name"] == "injected"] == ["kill", "hcce", "uce"]
    assert "the run is over" in job.inject("kill", code=2)["error"]


def killed_and_asked(run_dir: Path, rank: int) -> dict[str, Any]:
    """The job's status as it is right behind a kill, before the agent can have seen the death."""
    channel = Channel(str(run_dir / "agent-0.sock"))
    asked = (m.Hello("operator"), m.Inject("kill", rank), m.Query())
    channel._socket.sendall(b"".join(map(encode, asked)))  # in one, for the agent to answer in one
    replies = [channel.receive(20) for _ in range(2)]
    channel.close()
    assert all(isinstance(reply, m.Reply) and not reply.error for reply in replies), replies
    return replies[1].status  # type: ignore[union-attr]


@pytest.mark.timeout(120)
def test_a_second_kill_waits_until_the_job_has_noticed_the_first(tmp_path: Path, undisturbed: Reference) -> None:
    with training(tmp_path / "run", 2) as job:
        status = killed_and_asked(job.run_dir, 1)
        assert (status["stage"], status["unnoticed"]) == ("RUNNING", [1])
        job.inject("kill", "--rank", "0")
        run = job.end()
    assert_identical(run, undisturbed(ranks=2, steps=STEPS), ranks=2, recoveries=2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))])
def test_all_kinds(tmp_path: Path, undisturbed: Reference, ranks: int) -> None:
    faults = [["stop"], ["loop"], ["kill"], ["hcce"]]
    faults += [["uce", "--target", each] for each in ("param", "optimizer", "buffer", "gradient", "activation")]
    with training(tmp_path / "run", ranks, RESILIENT_HANG_TIMEOUT_S="5") as job:
        for number, fault in enumerate(faults):
            hit = job.inject(*fault, "--seed", str(number))
            assert hit["kind"] == fault[0]
            job.wait_for_recoveries(number + 1)
        run = job.end()
    assert_identical(run, undisturbed(ranks=ranks, steps=STEPS), ranks=ranks, recoveries=len(faults))
    assert [e["detail"]["kind"] for e in run.of("injected")] == [fault[0] for fault in faults]


@pytest.mark.timeout(120)
def test_a_fault_in_the_middle_of_a_recovery(tmp_path: Path, undisturbed: Reference) -> None:
    """Signals reach a rank wherever it is. The other kinds wait, or, if they may not, are refused."""
    hold = tmp_path / "hold"
    with training(tmp_path / "run", 3, "--hold", str(hold)) as job:
        hold.touch()
        job.inject("kill", "--rank", "1")
        job.wait_for(lambda: sum(event.rank == 1 for event in job.told("spawned")) == 2)  # which is held
        assert "in no loop of a Session now" in job.inject("hcce", "--rank", "1", "--now", code=2)["error"]
        job.inject("kill", "--rank", "2", "--now")
        hold.unlink()
        survivor = job.inject("hcce", "--rank", "0")
        job.wait_for_recoveries(2)
        run = job.end()
    assert survivor["incarnation"] == 0
    assert run.code == 0, run.explain()
    assert run.digests() == undisturbed(ranks=3, steps=STEPS).digests(), run.explain()


@pytest.mark.timeout(120)
def test_a_script_without_a_session(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("import pathlib, sys, time\npathlib.Path(sys.argv[1]).touch()\ntime.sleep(100)\n")
    run_dir, begun = tmp_path / "run", tmp_path / "begun"
    with start([*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), str(script), str(begun)]) as process:
        job = Running(run_dir, process)
        job.wait_for(begun.exists)
        for kind in ("loop", "hcce", "uce"):
            assert "kill and stop work always" in job.inject(kind, "--now", code=2)["error"]
        assert "is STARTING" in job.inject("kill", "--limit-s", "0.1", code=1)["error"]
        job.inject("kill", "--rank", "0", "--now")
        run = job.end()
    assert run.code == 128 + signal.SIGKILL, run.explain()


@pytest.mark.timeout(120)
def test_memory_of_a_look_alike_device(tmp_path: Path) -> None:
    """The operator names addresses, the look-alike destroys what is there, and the probes find it."""
    run_dir = tmp_path / "run"
    command = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(run_dir), str(JOBS / "device.py"), str(tmp_path)]
    environ = {"RESILIENT_ACL_LIBRARY": str(library("libascendcl.so"))}
    with start([*command, "wait:1:5"], **environ) as process:
        job = Running(run_dir, process)
        address = tmp_path / "address"
        job.wait_for(lambda: address.exists() and address.read_text().endswith("\n"))
        words = ("device", "--library", "acl", "--rank", "1")
        assert "not writable memory" in job.inject(*words, "--range", "16:16", code=2)["error"]
        told = job.inject(*words, "--range", address.read_text().strip())
        assert (told["rank"], told["readers"], told["control"]) == (1, [1], str(tmp_path / "device-1"))
        run = job.end()
    assert run.code == 0, run.explain()
    (uce,) = run.of("uce")
    assert uce["detail"]["tensors"] == ["model.0.module.0.weight"]
    assert run.of("injected")[0]["detail"]["library"] == "acl"
    assert "rank 1 repaired 1" in run.out
