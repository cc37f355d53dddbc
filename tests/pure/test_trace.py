"""The Chrome trace: what Perfetto needs to find in it."""

import json

import pytest

from pure.stories import HOSTILE, at, whole_run
from resilient_train.events import Event
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import PHASES
from resilient_train.observe.trace import trace, write_trace


def entries(events, **wanted):
    return [e for e in trace(events)["traceEvents"] if all(e.get(key) == value for key, value in wanted.items())]


def test_one_named_process_per_rank_and_one_for_the_agent():
    names = {entry["pid"]: entry["args"]["name"] for entry in entries(whole_run(), name="process_name")}
    assert names == {1: "agent", 2: "rank 0", 3: "rank 1", 4: "rank 2"}


def test_every_entry_has_what_the_format_demands():
    for entry in trace(whole_run())["traceEvents"]:
        assert entry["ph"] in {"M", "X", "i"}
        assert {"name", "pid", "tid"} <= entry.keys()
        if entry["ph"] != "M":
            assert entry["ts"] >= 0
        if entry["ph"] == "X":
            assert entry["dur"] >= 0


def test_times_are_microseconds_from_the_first_event():
    (fault,) = entries(whole_run(), name="fault")
    assert fault["ts"] == pytest.approx(1_001_000)
    assert fault["ph"] == "i"


def test_an_event_with_a_length_is_a_span_that_ended_at_its_time():
    event = Event(kind="step", time_ns=10_000_000, rank=0, duration_ns=4_000_000)
    (span,) = entries([Event(kind="run_start", time_ns=0), event], name="step")
    assert (span["ph"], span["ts"], span["dur"]) == ("X", 6000, 4000)


def test_phases_of_a_recovery_are_spans_of_the_agent_and_do_not_share_rows():
    spans = [entry for entry in entries(whole_run(), ph="X", pid=1) if entry["name"] in PHASES]
    assert [span["name"] for span in spans] == list(PHASES)
    assert len({span["tid"] for span in spans}) == len(PHASES)
    (whole,) = entries(whole_run(), ph="X", pid=1, name="recovery 1 (resumed)")
    assert whole["dur"] == pytest.approx(351_000)


def test_each_process_of_a_rank_is_a_span():
    lives = [entry for entry in entries(whole_run(), ph="X", pid=4) if entry["name"].startswith("incarnation")]
    assert [life["args"]["pid"] for life in lives] == [102, 200]
    assert lives[0]["ts"] + lives[0]["dur"] == pytest.approx(1_000_000)


def test_the_exit_of_a_predecessor_does_not_end_its_successors_span():
    late = at(1020, "exited", 2, 1, code=-9)
    lives = [e for e in entries([*whole_run(), late], ph="X", pid=4) if e["name"] == "incarnation 1"]
    assert lives[0]["dur"] > 3_000_000


def test_the_file_is_json_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text("old")
    write_trace(whole_run(), path)
    assert json.loads(path.read_bytes())["traceEvents"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_nothing_and_hostile_events_still_make_a_trace(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HOSTILE)
    write_trace(read_events(path), tmp_path / "trace.json")
    write_trace([], tmp_path / "empty.json")
    for name in ("trace.json", "empty.json"):
        json.loads((tmp_path / name).read_bytes())
