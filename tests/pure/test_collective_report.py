"""What a rank writes of its newest collectives when it is asked, and what the agent makes of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from resilient_train._native import Board
from resilient_train.launch.agent import collective_reports
from resilient_train.launch.agent.collective_reports import CollectiveReports
from resilient_train.launch.agent.console_text import newest_told
from resilient_train.observe.collectives import (
    ENTRIES_MAX,
    FILE_BYTES_MAX,
    Heading,
    file_of,
    heading_of,
    report_of,
    told,
)
from resilient_train.session import collective_report
from resilient_train.session.collective_report import CollectiveReport
from resilient_train.session.peers import Peers
from resilient_train.state.arena import Arena


def entry(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "input_dtypes": ["Float"],
        "input_sizes": [[3, 5]],
        "is_p2p": False,
        "process_group": ["0", "generation 2"],
        "profiling_name": "gloo:all_reduce",
        "retired": True,
        "state": "scheduled",
    } | changes


def dump(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"entries": list(entries), "version": "2.10"}).encode()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "past all_reduce 41 of group 0 (generation 2), Float [3, 5]"),
        ({"retired": False}, "in all_reduce 41 of group 0 (generation 2), Float [3, 5]"),
        ({"retired": False, "state": "completed"}, "past all_reduce 41 of group 0 (generation 2), Float [3, 5]"),
        ({"is_p2p": True, "p2p_seq_id": 7}, "past all_reduce 7 of group 0 (generation 2), Float [3, 5]"),
        ({"input_dtypes": [], "input_sizes": []}, "past all_reduce 41 of group 0 (generation 2)"),
        (
            {"input_dtypes": ["Long"] * 4, "input_sizes": [[1], [2], [3], []]},
            "past all_reduce 41 of group 0 (generation 2), Long [1], Long [2], 2 more",
        ),
        ({"process_group": ["a"], "profiling_name": "send"}, "past send 41 of group a, Float [3, 5]"),
    ],
)
def test_a_collective_in_words(changes: dict[str, Any], expected: str) -> None:
    assert told(entry(41, **changes)) == expected


def test_what_an_entry_fails_to_say_is_left_out() -> None:
    assert told({}) == told({"process_group": None, "input_sizes": None}) == "in ? ? of group ?"


def heading(content: bytes) -> Heading:
    return msgspec.json.decode(content.splitlines()[0], type=Heading)


def test_the_newest_stand_first_and_no_more_than_there_is_room_for() -> None:
    content = report_of(dump(*map(entry, range(2000))), rank=3, incarnation=1)
    assert len(content) <= FILE_BYTES_MAX
    first, *entries = map(json.loads, content.splitlines())
    assert [each["collective_seq_id"] for each in entries] == list(range(1999, 1999 - ENTRIES_MAX, -1))
    assert entries[0] == entry(1999), "as torch wrote it"
    assert first == {
        "rank": 3,
        "incarnation": 1,
        "newest": "past all_reduce 1999 of group 0 (generation 2), Float [3, 5]",
        "left_out": 2000 - ENTRIES_MAX,
    }


def test_large_entries_are_bounded_by_their_bytes() -> None:
    large = {"input_sizes": [[9] * 1000] * 30, "input_dtypes": ["Float"] * 30}
    content = report_of(dump(*(entry(number, **large) for number in range(9))), rank=0, incarnation=0)
    assert len(content) <= FILE_BYTES_MAX
    found = heading(content)
    assert 0 < found.left_out < 9
    assert len(content.splitlines()) == 1 + 9 - found.left_out
    assert len(content.splitlines()[0]) < 1000, "the heading too"


def test_a_recorder_that_is_switched_off_says_nothing() -> None:
    content = report_of(b'{"version": "2.10", "pg_status": {}}', rank=0, incarnation=0)
    assert heading(content) == Heading(0, 0)
    assert len(content.splitlines()) == 1


# -- in a rank


@pytest.fixture
def board() -> Iterator[Board]:
    made = Board.create(3)
    yield made
    made.close()


def rank_of(board: Board, rank: int, folder: Path, recorded: Callable[[], bytes]) -> CollectiveReport:
    peers = Peers(board, rank, Arena.create(1 << 12), lambda _: 0, lambda _: 0)
    link: Any = SimpleNamespace(peers=peers, rank=rank, incarnation=0)
    return CollectiveReport(link, folder, recorded)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_writes_when_it_is_asked_and_says_so(board: Board, tmp_path: Path) -> None:
    board.ask_report()
    asked_on: list[str] = []

    def recorded() -> bytes:
        asked_on.append(threading.current_thread().name)
        return dump(entry(4))

    report = rank_of(board, 1, tmp_path / "stacks", recorded)
    report.look()
    assert asked_on == [], "the question was asked of its predecessor"
    board.ask_report()
    report.look()
    wait_until(lambda: board.reported(1) == 2)
    assert [board.reported(rank) for rank in range(3)] == [0, 2, 0]
    path = file_of(tmp_path / "stacks", 1, 0)
    assert heading_of(path).newest.startswith("past all_reduce 4")
    assert path.stat().st_mode & 0o777 == 0o600
    report.look()
    report.close()
    assert asked_on == ["rt-report"], "once, and on no thread that matters"


def test_a_recorder_that_raises_is_an_answer(board: Board, tmp_path: Path) -> None:
    def recorded() -> bytes:
        raise RuntimeError("the recorder is broken" + "!" * 9999)

    report = rank_of(board, 0, tmp_path, recorded)
    board.ask_report()
    report.look()
    wait_until(lambda: board.reported(0) == 1)
    content = file_of(tmp_path, 0, 0).read_bytes()
    assert heading(content).error.startswith("RuntimeError: the recorder is broken")
    assert len(content) < 1000


@pytest.mark.parametrize(
    "nonsense", [b"", b"[1]", b"\xff", b'{"entries": [3]}', b'{"entries": [{"process_group": 5}]}']
)
def test_nonsense_of_a_recorder_is_an_answer(board: Board, tmp_path: Path, nonsense: bytes) -> None:
    report = rank_of(board, 0, tmp_path, lambda: nonsense)
    board.ask_report()
    report.look()
    wait_until(lambda: board.reported(0) == 1)
    assert heading_of(file_of(tmp_path, 0, 0)).error


def test_a_recorder_that_hangs_holds_up_nobody(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_report, "_CLOSE_S", 0.01)
    entered, let_go = threading.Event(), threading.Event()
    times = 0

    def recorded() -> bytes:
        nonlocal times
        times += 1
        entered.set()
        let_go.wait(60)
        return dump()

    report = rank_of(board, 0, tmp_path, recorded)
    board.ask_report()
    report.look()
    assert entered.wait(10)
    board.ask_report()
    report.look()
    report.close()
    assert (times, board.reported(0)) == (1, 0)
    let_go.set()
    wait_until(lambda: board.reported(0) == 1)
    report.close()
    report.look()
    wait_until(lambda: board.reported(0) == 2)  # what was asked meanwhile
    assert times == 2


def test_storage_that_does_not_take_it_is_no_answer(
    board: Board, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stacks").write_text("a file where the folder should be")
    report = rank_of(board, 0, tmp_path / "stacks", dump)
    board.ask_report()
    report.look()
    report.close()
    assert board.reported(0) == 0
    assert "rank 0 can't write its newest collectives" in capsys.readouterr().err


# -- in the agent


def processes(*ranks: int) -> Any:
    return [SimpleNamespace(rank=rank, incarnation=0) for rank in ranks]


def test_all_have_answered(board: Board, tmp_path: Path) -> None:
    reports = CollectiveReports(board, tmp_path)
    assert reports.look() is None
    reports.ask(processes(0, 2))
    assert board.report_asked == 1
    board.set_reported(0, 1)
    file_of(tmp_path, 0, 0).write_bytes(report_of(dump(entry(5)), 0, 0))
    assert reports.look() is None
    board.set_reported(2, 1)
    file_of(tmp_path, 2, 0).write_bytes(b"\xff\n")
    newest = reports.look()
    assert newest is not None
    assert newest.told[0] == "past all_reduce 5 of group 0 (generation 2), Float [3, 5]"
    assert newest.told[2].startswith("can't be read")
    assert newest.silent == []
    assert reports.look() is None, "told once"


def test_who_does_not_answer_in_time_is_named(board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_reports, "ANSWER_S", 0.0)
    reports = CollectiveReports(board, tmp_path)
    reports.ask(processes(0, 1, 2))
    board.set_reported(1, 1)
    file_of(tmp_path, 1, 0).write_bytes(report_of(dump(), 1, 0))
    newest = reports.look()
    assert newest is not None
    assert newest == ({1: "nothing was recorded"}, [0, 2])
    # An answer to the question before is none to this one.
    reports.ask(processes(1))
    assert reports.look() == ({}, [1])


def test_the_line_for_people() -> None:
    assert newest_told({0: "in all_reduce 3", 1: "past all_reduce 2", 2: "in all_reduce 3"}, [3, 4]) == (
        "newest collectives: ranks 0, 2 in all_reduce 3; rank 1 past all_reduce 2; ranks 3, 4 did not answer"
    )
    assert newest_told({}, [1]) == "newest collectives: rank 1 did not answer"
