"""What a rank writes of its machine can be replayed, and a replay tells every difference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import traced

from resilient_train.config import AgentLink
from resilient_train.errors import ProtocolError
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.messages import Finished, Plan, Pull, Resume, SaveLast
from resilient_train.protocol.rank import Rank
from resilient_train.session.rank_trace import RankTrace, path_of
from resilient_train.testing.replay import ReplayError, main, replay, traces

STEP = (on.Enter(), on.UpdateBegins(), on.Ok(), on.Ok(), on.UpdateEnds(), on.Exit(), on.Next(2))
STARTED = (on.Begin(2, 0), Resume(0))
WHOLE = (*STARTED, *STEP, *STEP, Finished())
RECOVERED = (
    *(*STARTED, on.Enter(), on.Exit("fault", "RuntimeError: cut"), on.Next(2), on.Ok(), on.Quieted(1)),
    *(Plan(1, 0, {1: 0}, replaced=(1,)), on.Ok(), Pull(1, 0, 1), on.Ok(), Resume(1), *STEP, *STEP, Finished()),
)
SAVED = (*STARTED, on.Next(2, stopped=True), on.Quieted(1), SaveLast(1, 0, 0, 1, 0, 1, {1: b"\xff\0"}))


def write(run_dir: Path, *events: Any, wanted: bool = True, **options: Any) -> Path:
    agent = AgentLink("", rank=0, world_size=2, incarnation=3, joining=False, run_dir=str(run_dir))
    trace = RankTrace(agent, wanted=wanted)
    rank = trace.machine(0, **options)
    for event in events:
        rank.on(event)
    trace.close()
    return path_of(run_dir, 0, 3)


def answers(path: Path) -> list[str]:
    return [turn.answer for turn in replay(path)]


@pytest.mark.parametrize("events", [WHOLE, RECOVERED, SAVED])
def test_what_a_rank_wrote_is_what_a_machine_does(tmp_path: Path, events: tuple[Any, ...]) -> None:
    path = write(tmp_path, *events, generation=0)
    assert traces(tmp_path) == [path]
    assert len(answers(path)) == len(events)
    assert answers(path)[1] == "Meet + Resume: Record Publish SnapshotBegin ShowState Draw Mark ReturnStep -> Open"


def test_without_the_setting_it_is_the_plain_machine(tmp_path: Path) -> None:
    agent = AgentLink("", 0, 2, 0, joining=False, run_dir=str(tmp_path))
    trace = RankTrace(agent, wanted=False)
    assert type(trace.machine(0)) is Rank
    trace.close()
    assert not list(tmp_path.iterdir())


def changed(path: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    """One line of the file becomes another one."""
    lines = path.read_bytes().splitlines()
    line = msgspec.json.decode(lines[number - 1])
    change(line)
    lines[number - 1] = msgspec.json.encode(line)
    path.write_bytes(b"\n".join(lines))


def test_an_effect_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    changed(path, 7, lambda line: line["effects"].pop(2))
    with pytest.raises(ReplayError, match=r"rank 0, incarnation 3, line 7: Ok\(value=1\) in Verify") as caught:
        answers(path)
    machine, rank = str(caught.value).splitlines()[1:]
    assert "LearnLayout() Publish(ahead=True) Arrive() Cross()" in machine
    assert "LearnLayout() Arrive() Cross()" in rank


def test_two_effects_are_swapped(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    changed(path, 7, lambda line: line["effects"].insert(2, line["effects"].pop(3)))
    with pytest.raises(ReplayError, match="Arrive\\(\\) Publish\\(ahead=True\\) Cross"):
        answers(path)


def test_an_effect_says_something_else(tmp_path: Path) -> None:
    path = write(tmp_path, *RECOVERED)
    changed(path, 7, lambda line: line["effects"][0].update(text="another one"))
    with pytest.raises(ReplayError, match="another one"):
        answers(path)


def test_an_event_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join(lines[:6] + lines[7:]))
    with pytest.raises(ReplayError, match="line 7"):
        answers(path)


def test_the_machine_was_made_otherwise(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    changed(path, 2, lambda line: line["options"].update(undo=True))
    with pytest.raises(ReplayError, match="SaveUndo"):
        answers(path)


def test_what_a_machine_refused_it_refuses_again(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError):
        write(tmp_path, on.Next(2))
    (told,) = answers(path_of(tmp_path, 0, 3))
    assert "can't happen in Setup" in told


def test_the_last_line_of_a_process_may_be_cut(tmp_path: Path) -> None:
    path = write(tmp_path, *WHOLE)
    path.write_bytes(path.read_bytes()[:-30])
    assert len(answers(path)) == len(WHOLE) - 1
    write(tmp_path, *WHOLE)  # a later run in the same directory
    assert len(answers(path)) == 2 * len(WHOLE) - 1
    text = path.read_bytes().splitlines()
    text[4] = text[4][:-3]
    path.write_bytes(b"\n".join(text))
    with pytest.raises(ReplayError, match="the same process wrote on"):
        answers(path)


def test_what_is_no_event_is_told_and_nobody_falls_over_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rank, "on", lambda *_: ())
    path = write(tmp_path, *STARTED, on.Ok(object()), on.Enter())  # type: ignore[arg-type]
    assert "can't be written" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(ReplayError):
        answers(path)
    assert b'"torn"' in path.read_bytes().splitlines()[-1]


def test_a_full_disk_ends_the_trace_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "write", lambda *_: 3)
    write(tmp_path, *WHOLE)
    assert capsys.readouterr().err.count("the disk is full") == 1
    monkeypatch.undo()
    (tmp_path / "file").touch()
    write(tmp_path / "file", *WHOLE)
    assert capsys.readouterr().err.count("can't be written") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    path = write(tmp_path, *RECOVERED)
    assert main([str(tmp_path), "--rank", "0"]) == 0
    told = capsys.readouterr().out
    assert "-- rank 0 incarnation 3\n" in told
    assert "Target + Pull: Serve -> Target\n" in told
    changed(path, 7, lambda line: line["effects"].pop())
    assert main([str(tmp_path)]) == 1
    assert "line 7" in capsys.readouterr().err


def test_what_the_simulation_never_did_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *RECOVERED)
    seen: set[str] = set()
    assert traced.look(tmp_path, seen) == []
    monkeypatch.setattr(traced, "listed", lambda: dict.fromkeys(seen - {"Target + Pull: Serve -> Target"}, ""))
    (wrong,) = traced.look(tmp_path, set())
    assert wrong.endswith("no simulated job comes to this: Target + Pull: Serve -> Target")


def test_what_only_a_real_job_does_is_still_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "listed", lambda: {"A + B: C -> D": "real test_this: why", "E": "seed 1"})
    assert traced.missing("test_this", {"A + B: C -> D"}) == traced.missing("test_that", set()) == []
    assert "not any more" in traced.missing("test_this", {"E"})[0]
