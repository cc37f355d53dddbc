"""The commands' side of a running job: which run is the newest, and whether an order has hit."""

import os
import socket
import threading
from pathlib import Path

import pytest

from pure.stories import whole_run, write
from resilient_train.errors import ConfigError
from resilient_train.events import Event, to_line
from resilient_train.launch.cli.asking import Follower, NotHitError, Ordered, newest_run

ORDER = Ordered(rank=1, incarnation=2, number=5)


def event(kind: str, rank: int = 1, incarnation: int = 2, **detail: object) -> Event:
    return Event(kind=kind, time_ns=1, rank=rank, incarnation=incarnation, step=8, detail=detail)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", [*whole_run(), event("injected", order=5)])


def append(run: Path, *events: Event) -> None:
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"".join(map(to_line, events)))


def test_only_what_comes_after_the_beginning_counts(run: Path) -> None:
    with pytest.raises(NotHitError, match=r"within 0.05 s; it stays ordered"):
        Follower(run).wait_for(ORDER, 0.05)


def test_the_order_among_other_events(run: Path) -> None:
    follower = Follower(run)
    others = [
        event("injected", rank=0, order=5),
        event("injected", order=4),
        event("injected"),
        event("exited", incarnation=1),
        event("spawned", incarnation=2),
        event("session_end", rank=0),
    ]
    append(run, *others, event("injected", order=5, at="forward"))
    assert follower.wait_for(ORDER, 0).detail == {"order": 5, "at": "forward"}


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (event("spawned", incarnation=3), "rank 1 was lost, or left its loop"),
        (event("exited"), "rank 1 was lost, or left its loop"),
        (event("session_end"), "rank 1 was lost, or left its loop"),
        (event("job_end", rank=-1, incarnation=0), "the job ended"),
    ],
)
def test_a_fault_that_can_not_hit_any_more(run: Path, last: Event, words: str) -> None:
    follower = Follower(run)
    append(run, last)
    with pytest.raises(NotHitError, match=words):
        follower.wait_for(ORDER, 20)


def test_a_line_that_comes_in_two_pieces_and_garbage(run: Path) -> None:
    follower = Follower(run)
    line = b"\xff garbage\n" + to_line(event("injected", order=5))
    with (run / "events.jsonl").open("ab", buffering=0) as file:
        file.write(line[:30])
        assert follower.read() == []
        timer = threading.Timer(0.05, file.write, [line[30:]])
        timer.start()
        assert follower.wait_for(ORDER, 20).step == 8
        timer.join()


def test_the_newest_run_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no job is running in resilient_runs/"):
        newest_run()
    runs = ["resilient_runs/b", "resilient_runs/drill-1/disturbed", "resilient_runs/a"]
    for age, name in enumerate(runs):
        Path(name).mkdir(parents=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{name}/agent-0.sock")
        os.utime(f"{name}/agent-0.sock", ns=(0, 1000 - age))
    Path("resilient_runs/over").mkdir()
    found = []
    for _ in runs:
        found.append(str(newest_run()))
        (newest_run() / "agent-0.sock").unlink()
    assert found == runs
