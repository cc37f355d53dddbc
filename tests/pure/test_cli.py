"""The resilient-train command: exit codes, one line for what is wrong, one object for --json."""

import json
import socket
import struct
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from pure.stories import HOSTILE, whole_run, write
from resilient_train.events import Event, to_line
from resilient_train.launch.cli import asking
from resilient_train.launch.cli.tool import main
from resilient_train.protocol.messages import FromRank, Hello, Inject, Query, Reply
from resilient_train.transport import FrameBuffer, encode


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "run", whole_run())


class FakeAgent:
    """Answers one operator after the other with ``replies``, and remembers what it was asked."""

    def __init__(self, path, *replies: bytes) -> None:
        self.asked = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._replies = replies
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        for number, reply in enumerate(self._replies, 1):
            connection, _ = self._listener.accept()
            with connection:
                frames = FrameBuffer()
                while len(self.asked) < 2 * number and (data := connection.recv(4096)):
                    self.asked += [msgspec.msgpack.decode(body, type=FromRank) for body in frames.feed(data)]
                connection.sendall(reply)

    def close(self) -> None:
        self._listener.close()
        self._thread.join(5)


@pytest.fixture
def agent(run):
    agents = []

    def start(*replies: bytes) -> FakeAgent:
        agents.append(FakeAgent(run / "agent-0.sock", *replies))
        return agents[-1]

    yield start
    for started in agents:
        started.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["reprot"], "No such command"),
        (["report"], "Missing argument"),
        (["report", "nowhere"], "not a directory"),
        (["report", "."], "no events.jsonl"),
        (["report", "--jsn", "."], "No such option"),
        (["inject"], "give a run's directory (or none) and a kind"),
        (["inject", "a", "b", "kill"], "give a run's directory (or none) and a kind"),
        (["inject", ".", "kil", "--rank", "1"], "did you mean 'kill'?"),
        (["inject", ".", "kill", "--rank", "one"], "Invalid value for '--rank'"),
        (["inject", ".", "kill", "--rank", "-1"], "Invalid value for '--rank'"),
        (["inject", ".", "kill", "--rank", "1", "--now"], "it is no run's directory"),
        (["inject", "nowhere", "kill", "--limit-s", "0"], "there is no such directory"),
        (["inject", "kill", "--now"], "no job is running in resilient_runs/"),
        (["inject", ".", "hcce", "--target", "param"], "only uce has a target"),
        (["inject", ".", "uce", "--target", "parm"], "did you mean 'param'?"),
        (["inject", ".", "kill", "--latency-ms", "0"], "--latency-ms is for device, not for kill"),
        (["inject", ".", "device", "--target", "param"], "--target is for uce"),
        (["inject", ".", "device", "--error", "1"], "name the --library: acl, hccl, nccl, nvml"),
        (["inject", ".", "device", "--library", "acl"], "say what the library is to answer"),
        (["inject", ".", "device", "--library", "acl", "--error", "0"], "it is no run's directory"),
        (["status", "nowhere", "--limit-s", "0"], "no job is running"),
        (["verify", "nowhere"], "is not a directory"),
        (["verify", "."], "holds no checkpoint"),
        (["demo", "--steps", "0"], "at least 6"),
        (["demo", "--ranks", "1"], "no replica"),
        (["demo", "--faults", "kill rank=9 step=3"], "cannot happen"),
        (["demo", "--faults", "kill rank=1 stepp=3"], "did you mean 'step'?"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, words, refused):
    refused(arguments, words)


def test_demo_does_not_write_into_a_directory_in_use(run, capsys):
    assert main(["demo", "--run-dir", str(run)]) == 2
    assert "not an empty directory" in capsys.readouterr().err


def test_no_arguments_show_the_help(capsys):
    assert main([]) == 0
    assert "report" in capsys.readouterr().out


def test_report_prints_the_run_and_writes_its_trace(run, capsys):
    assert main(["report", str(run)]) == 0
    assert "rank 2 lost" in capsys.readouterr().out
    assert json.loads((run / "trace.json").read_bytes())["traceEvents"]


def test_report_as_json_is_one_object(run, capsys):
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recoveries"][0]["total_ms"] == 351
    assert told["trace"] == str(run / "trace.json")


def test_report_of_a_hostile_file(tmp_path, capsys):
    run = write(tmp_path, [], tail=HOSTILE)
    assert main(["report", str(run)]) == 0
    assert main(["report", str(run), "--json"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("content", [b"", b"\n\n", b"garbage\n", b'{"kind":"run_st'])
def test_report_of_a_file_without_events(content, tmp_path, capsys):
    run = write(tmp_path, [], tail=content)
    assert main(["report", str(run)]) == 2
    assert "not a single event" in capsys.readouterr().err


def test_report_stands_without_its_trace(run, capsys):
    (run / "trace.json").mkdir()
    assert main(["report", str(run), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["trace"] is None
    assert "no trace" in err


def test_events_file_that_is_a_directory(tmp_path, capsys):
    (tmp_path / "events.jsonl").mkdir()
    assert main(["report", str(tmp_path)]) == 2
    assert "can't be read" in capsys.readouterr().err


def test_inject_asks_the_agent(run, agent, capsys):
    asked = agent(encode(Reply(status={"pid": 7, "incarnation": 2, "step": 40}))).asked
    assert main(["inject", str(run), "stop", "--rank", "1", "--json", "--now"]) == 0
    assert asked == [Hello(role="operator"), Inject("stop", 1)]
    told = {"run": str(run), "kind": "stop", "rank": 1, "pid": 7, "incarnation": 2, "step": 40}
    assert json.loads(capsys.readouterr().out) == told


def test_inject_without_run_and_rank_says_which_were_chosen(run, agent, tmp_path, monkeypatch, capsys):
    ranks = Reply(status={"ranks": [{"rank": 0, "pid": 7}, {"rank": 1, "pid": None}, {"rank": 2, "pid": 9}]})
    asked = agent(*[encode(reply) for reply in (ranks, Reply(status={"pid": 7, "step": 4})) * 8]).asked
    (tmp_path / "resilient_runs").mkdir()
    run.rename(tmp_path / "resilient_runs" / "newest")
    monkeypatch.chdir(tmp_path)
    for seed in (0, 0, 1, 2, 3, 4, 5, 6):
        assert main(["inject", "kill", "--seed", str(seed), "--now"]) == 0
    hit = [frame.rank for frame in asked if isinstance(frame, Inject)]
    assert hit[0] == hit[1]
    assert set(hit) == {0, 2}
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"kill of rank {hit[0]} (process 7) at step 4: done, in resilient_runs/newest"


def test_inject_waits_until_the_rank_is_hit(run, agent, capsys):
    asked = agent(encode(Reply(status={"pid": 7, "incarnation": 1, "order": 3}))).asked
    hit = Event(kind="injected", time_ns=1, rank=1, incarnation=1, step=41, detail={"kind": "uce", "order": 3})

    def append() -> None:
        while len(asked) < 2:  # what was there before the order does not count
            time.sleep(0.01)
        with (run / "events.jsonl").open("ab") as file:
            file.write(to_line(hit))

    rank = threading.Thread(target=append)
    rank.start()
    assert main(["inject", str(run), "uce", "--rank", "1", "--json", "--now"]) == 0
    rank.join()
    told = {"run": str(run), "kind": "uce", "rank": 1, "target": "param", "pid": 7, "incarnation": 1, "step": 41}
    assert json.loads(capsys.readouterr().out) == told


def test_inject_waits_until_the_job_trains_and_says_so(run, agent, capsys, monkeypatch):
    monkeypatch.setattr(asking, "_SOON_S", 0)
    starting, running = ({"stage": stage, "waits_for": [1]} for stage in ("STARTING", "RUNNING"))
    hit = {"pid": 7, "incarnation": 0, "step": 3}
    asked = agent(*[encode(Reply(status=each)) for each in (starting, starting, running, hit)]).asked
    assert main(["inject", str(run), "kill", "--rank", "1"]) == 0
    assert [type(each) for each in asked[1::2]] == [Query, Query, Query, Inject]
    out, err = capsys.readouterr()
    assert out.startswith("kill of rank 1 (process 7) at step 3: done")
    assert err == f"resilient-train: the job in {run} is STARTING (it waits for ranks [1]): waiting, at most 60 s\n"


def test_inject_waits_until_the_job_has_noticed_what_hit_it_before(run, agent, capsys, monkeypatch):
    """Two commands behind each other would else take both holders of the state."""
    monkeypatch.setattr(asking, "_SOON_S", 0)
    struck, recovering, running = (
        {"stage": stage, "waits_for": waits_for, "unnoticed": unnoticed}
        for stage, waits_for, unnoticed in (("RUNNING", [], [0]), ("RECOVERING", [0, 1], []), ("RUNNING", [], []))
    )
    asked = agent(*[encode(Reply(status=each)) for each in (struck, recovering, running, {"pid": 7})]).asked
    assert main(["inject", str(run), "kill", "--rank", "1"]) == 0
    assert [type(each) for each in asked[1::2]] == [Query, Query, Query, Inject]
    assert "has not yet noticed that ranks [0] are lost or stand still: waiting" in capsys.readouterr().err


def test_inject_waits_for_a_job_that_is_about_to_be_there(tmp_path, capsys):
    """Typed behind ``resilient-run``, which has imports to do before it has a run directory."""
    run = tmp_path / "run"
    agents = []

    def begin() -> None:
        write(run, [])
        status = {"stage": "RUNNING", "waits_for": []}
        agents.append(FakeAgent(run / "agent-0.sock", *[encode(Reply(status=each)) for each in (status, {"pid": 7})]))

    timer = threading.Timer(0.2, begin)
    timer.start()
    assert main(["inject", str(run), "kill", "--rank", "1"]) == 0
    timer.join()
    agents[0].close()


def test_inject_does_not_wait_for_a_run_that_is_over(run, capsys):
    """Its launcher is gone; and for a job that does not train, only so long."""
    write(run, [Event(kind="run_start", time_ns=1, detail={"pid": 2**22 + 1})])
    assert main(["inject", str(run), "kill", "--rank", "1"]) == 2
    assert "the run is over" in capsys.readouterr().err


def test_inject_gives_up_on_a_job_that_never_trains(run, agent, capsys):
    agent(encode(Reply(status={"stage": "STARTING", "waits_for": [0, 1]})))
    assert main(["inject", str(run), "kill", "--rank", "1", "--limit-s", "0"]) == 1
    assert "is STARTING (it waits for ranks [0, 1]) after 0 s (--limit-s); --now" in capsys.readouterr().err


def test_inject_says_that_nothing_was_hit(run, agent, capsys):
    agent(encode(Reply(status={"pid": 7, "incarnation": 1, "order": 3})))
    assert main(["inject", str(run), "hcce", "--rank", "1", "--limit-s", "0", "--now"]) == 1
    assert "stays ordered" in capsys.readouterr().err


def test_a_refusal_of_the_agent_is_said(run, agent, capsys):
    agent(encode(Reply(error="there is no rank 7")))
    assert main(["inject", str(run), "kill", "--rank", "7"]) == 2
    assert "there is no rank 7" in capsys.readouterr().err


def test_status_shows_what_the_agent_says(run, agent, capsys):
    rank = {
        "rank": 0,
        "pid": 7,
        "age_s": 9.5,
        "incarnation": 0,
        "commits": 4,
        "phase": "COMPUTE",
        "step": 5,
        "beats": 9,
    }
    new = {**rank, "rank": 1, "pid": 8, "incarnation": 2, "commits": None, "phase": "JOINING", "step": None}
    gone = {**new, "rank": 2, "pid": None, "age_s": None, "phase": "ENDED"}
    standby = {"pid": 6, "depth": "zygote", "ready": False, "own_bytes": 3 << 20}
    limits = {"restarts": 1, "replacements": 2, "max_restarts": 100}
    status = {
        "stage": "RECOVERING",
        "stage_s": 1.5,
        "waits_for": [1, 2],
        "unnoticed": [],
        "paused": None,
        "pause_at": 0,
        "stragglers": [{"rank": 0, "since": 3, "ratio": 2.5, "compute_ms": 8.0}],
        "generation": 3,
        **limits,
        "ranks": [rank, new, gone],
        "standbys": [standby],
        "of_tomorrow": [1],
    }
    asked = agent(encode(Reply(status=status))).asked
    assert main(["status", str(run)]) == 0
    assert asked[1] == Query()
    assert capsys.readouterr().out.splitlines() == [
        "RECOVERING for 1.5 s",
        "it waits for ranks 1, 2",
        "a pause is asked for before the next step",
        "rank 0 computes 2.5 times as long as before step 3",
        "replacements: 2, restarts of all: 1 (at most 100 together), generation 3",
        "rank 0: COMPUTE of step 5, 4 updates committed (process 7, 9.5 s old)",
        "rank 1: JOINING (process 8, 9.5 s old, 2 before it)",
        "rank 2: ENDED, no process",
        "standbys: zygote 6 (3 MiB, on its way)",
        "of_tomorrow: [1]",
    ]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"", "closed the connection"),
        (struct.pack("<I", 3) + b"xyz", "not a frame"),
        (struct.pack("<I", 2**32 - 1), "claims"),
        (encode(Query()), "not a frame"),
    ],
)
def test_something_else_behind_the_socket_is_an_error_without_a_traceback(reply, words, run, agent, capsys):
    agent(reply)
    assert main(["status", str(run)]) == 1
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_a_socket_that_nobody_listens_to(run, capsys):
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(run / "agent-0.sock"))
    assert main(["status", str(run)]) == 2
    assert "no job is running" in capsys.readouterr().err


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_the_command_does_not_import_torch_before_it_needs_it():
    done = run_python(
        "import sys, resilient_train.launch.cli.tool as tool; tool.main(['report', '/nowhere'])\n"
        "print('torch' in sys.modules)"
    )
    assert done.stdout == "False\n"


def test_a_terminal_without_the_bars_characters_and_a_reader_that_leaves(run):
    command = f"{sys.executable} -m resilient_train.launch.cli.tool report {run}"
    ascii_only = subprocess.run(
        f"PYTHONIOENCODING=ascii {command}", shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")
    left = subprocess.run(f"{command} | true", shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert left.stderr == ""
