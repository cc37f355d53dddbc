"""The report: as text, and as JSON."""

import io
import json

import msgspec
import pytest

from pure.stories import HOSTILE, at, beginning, ns, one_kill, whole_run
from resilient_train.observe.report import as_dict, lines, show
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import PHASES, read_run


def text_of(events) -> str:
    return "\n".join(line.text for line in lines(read_run(events)))


def test_text_names_who_saw_what_and_where_state_came_from():
    text = text_of(whole_run())
    assert "3 ranks, 1 recovery" in text
    assert "rank 2 lost; seen by futex" in text
    assert "injected: kill rank 2 at step 7 in COMPUTE (backward)" in text
    assert "rank 0 -> rank 2, 12.0 MB in 20.0 ms (memory)" in text
    assert "step 7 redone by ranks 0, 1" in text
    assert "parameters equal on all ranks, digest abc" in text


def test_every_phase_has_a_bar_on_one_scale():
    rows = [line.text for line in lines(read_run(whole_run())) if "▏" in line.text]
    assert [row.split()[0] for row in rows] == [*PHASES, "total"]
    assert {len(row) for row in rows} == {len(rows[0])}
    assert all("█" in row for row in rows)
    replace, total = rows[2], rows[-1]
    assert replace.count("█") < total.count("█")


def test_failed_recoveries_say_so():
    cut = [event for event in one_kill() if event.time_ns < ns(1100)]
    text = text_of([*beginning(), *cut, at(1200, "job_end", code=75, reason="no replica is left")])
    assert "- failed" in text
    assert "exit code 75: no replica is left" in text
    assert "no plan was made" in text


def test_lost_commits_can_not_be_overlooked():
    events = [at(0, "fault", 1, 1, lost=[1]), at(1, "joined", 0, 1, commits=9), at(2, "plan", -1, 1, commits=7)]
    assert "COMMITTED STEPS LOST: 2" in text_of(events)


def test_who_was_slow_is_told():
    paces = {str(rank): {"compute_ms": 50.0 * ratio, "ratio": ratio} for rank, ratio in enumerate((1.3, 1.0, 1.05))}
    events = [
        *beginning(),
        at(1000, "straggler", 2, step=840, since=812, ratio=1.4, compute_ms=70.1, before_ms=50.2),
        at(1100, "straggler", 1, step=900, since=870, ratio=2.0, compute_ms=100, before_ms=50),
        at(1200, "straggler_over", 2, step=2260, since=2231, slower_since=812, ratio=1.4),
        at(1300, "straggler", 0, step=2300),
        at(4000, "compute", ranks=paces),
        at(4001, "finished"),
    ]
    text = text_of(events)
    assert "rank 2 computed 1.40 times slower since step 812, until step 2231\n" in text
    assert "rank 1 computed 2.00 times slower since step 870\n" in text
    assert "rank 0 computed ? times slower since step ?\n" in text
    assert text.count("as long as its peers") == 1
    assert "rank 0 computed 1.30 times as long as its peers at the end: 65 ms a step" in text
    told = as_dict(read_run(events))
    assert told["stragglers"][0] == {"rank": 2, "since": 812, "ratio": 1.4, "until": 2231}
    assert told["compute"]["2"] == {"compute_ms": 52.5, "ratio": 1.05}
    assert read_run([*beginning(), at(1000, "compute", ranks={"one": 5})]).paces == {}


def test_the_dict_survives_json():
    told = json.loads(msgspec.json.encode(as_dict(read_run(whole_run()))))
    assert told["steps_redone"] == 1
    assert told["committed_steps_lost"] == 0
    (recovery,) = told["recoveries"]
    assert recovery["phases_ms"]["REPLACE"] == 300
    assert recovery["total_ms"] == 351
    assert recovery["copies"][0]["source"] == 0
    assert recovery["starts"] == {"2": "forked"}


def test_show_prints_plain_text_where_there_is_no_terminal():
    report = lines(read_run(whole_run()))
    shown = io.StringIO()
    show(report, shown)
    assert shown.getvalue() == "\n".join(line.text for line in report) + "\n"


@pytest.mark.parametrize("events", [[], beginning()])
def test_a_run_without_recoveries(events):
    assert "0 recoveries" in text_of(events)


def test_hostile_events_can_be_shown(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HOSTILE)
    story = read_run(read_events(path))
    stream = io.StringIO()
    show(lines(story), stream)
    assert "world size unknown" in stream.getvalue()
    msgspec.json.encode(as_dict(story))
