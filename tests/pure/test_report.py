"""The report: as text, and as JSON."""

import io
import json

import msgspec
import pytest

from pure.stories import HOSTILE, at, beginning, normal_end, ns, one_kill, whole_run
from resilient_train.observe.closing_line import summary
from resilient_train.observe.deviations import count_deviations
from resilient_train.observe.history import events_of
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


def test_who_had_other_bits_is_counted():
    """Nobody is named where all came to other bits, or where nobody can say who was right."""
    events = [
        *beginning(),
        at(1000, "deviates", 2, detail={"step": 7, "ranks": [2]}),
        at(1100, "deviates", 0, detail={"step": 11, "ranks": [0, 1, 2]}),
        at(1200, "replicas_differ", ranks=[0, 1, 2], alone=[2], commits=12),
        at(1300, "replicas_differ", ranks=[0, 1, 2], alone=[], commits=13),
        at(1400, "deviates", 1, detail={"step": 15, "ranks": [1]}),
        at(1500, "replicas_differ", ranks=[0, 1, 2]),
        at(1600, "deviates", 2, ranks=[2]),
        at(1700, "deviates", detail={"step": 17, "ranks": [0, 1]}),
        at(1800, "held_wrong", 0, commits=19, ranks=[0]),
    ]
    text = text_of(events)
    assert "rank 1 had other bits than it should once: computed in step 15\n" in text
    assert "rank 2 had other bits than it should 3 times: first computed in step 7, last computed in step ?\n" in text
    assert "rank 0 had other bits than it should once: held after 19 updates\n" in text
    told = as_dict(read_run(events))["deviations"]
    assert [each["rank"] for each in told] == [2, 2, 1, 2, 0]
    assert told[1] == {"rank": 2, "what": "held", "at": 12, "device": ""}
    assert "held after 12 updates" in text_of(events[: len(beginning()) + 3])


def test_a_state_that_became_nan():
    seen = {"commits": 16, "without": 8, "told": "rank 1 holds NaN in 3 of 4 tensors ('w' for one)", "first": True}
    events = [
        *beginning(),
        at(1000, "holds_nan", 1, **seen),
        at(1100, "holds_nan", 0, **{**seen, "first": False}),
        at(2000, "holds_nan", 0, **{**seen, "without": -1, "told": "rank 0 holds NaN"}),
    ]
    text = text_of(events)
    first = "rank 1 holds NaN in 3 of 4 tensors ('w' for one) after 16 updates; there was none after 8 updates\n"
    assert first in text
    assert "rank 0 holds NaN after 16 updates\n" in text
    assert text.count("holds NaN") == 2
    told = as_dict(read_run(events))["nan"]
    assert told[1] == {"told": "rank 0 holds NaN", "commits": 16, "without": None}
    end = at(3000, "session_end", 0, steps=20, nan_tensors=3)
    assert summary([*events, end], 0).endswith(", the state at the end holds NaN")
    assert "NaN" not in summary([*events, at(3000, "session_end", 0, steps=20)], 0)


def test_each_device_is_counted_by_itself(tmp_path):
    """Over all runs in the directory."""
    runs = {
        "events-1.jsonl": [at(1000, "deviates", 1, detail={"step": 3, "ranks": [1], "devices": {"1": "a cuda:1"}})],
        "events.jsonl": [
            at(2000, "deviates", 1, detail={"step": 7, "ranks": [1], "devices": {"1": "a cuda:1"}}),
            at(2100, "deviates", 1, detail={"step": 9, "ranks": [1], "devices": {"1": "b cuda:1", "x": "y"}}),
            at(2200, "replicas_differ", ranks=[0, 1, 2], alone=[1], commits=12, devices={"1": "b cuda:1", "2": "x"}),
            at(2300, "replicas_differ", ranks=[1, 3], alone=[], commits=13, devices={"1": "b cuda:1", "3": "b cuda:3"}),
            at(2400, "held_wrong", 3, ranks=[3], commits=13),
        ],
    }
    for name, events in runs.items():
        (tmp_path / name).write_bytes(b"\n".join(map(msgspec.json.encode, [*beginning(), *events])))
    assert count_deviations(events_of(tmp_path)) == {(1, "a cuda:1"): 2, (1, "b cuda:1"): 1}
    text = text_of([*beginning(), *runs["events.jsonl"]])
    assert "rank 1 (a cuda:1) had other bits than it should once: computed in step 7\n" in text
    told = "had other bits than it should 2 times: first computed in step 9, last held after 12 updates"
    assert f"rank 1 (b cuda:1) {told}\n" in text
    assert "rank 3 (b cuda:3) had other bits than it should once: held after 13 updates\n" in text


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


def paused_run():
    """An operator's pause with a repaired fault in it, one that is taken back, one that the loop's end forestalls."""
    return [
        *beginning(),
        at(1000, "pause_asked", by="operator", at_step=0),
        at(1040, "pausing", -1, 1, lost=[], reason="pausing before the next step", strategy="TSP"),
        at(1060, "paused", -1, 1, detail={"step": 7}),
        at(1500, "saved", detail={"step": 5, "commits": 5, "path": "a/step_5"}),
        at(2000, "fault", 1, 2, lost=[1], reason="rank 1 was killed by signal 9"),
        at(2100, "paused", -1, 2, detail={"step": 7}),
        at(2200, "on_pause_failed", 0, 2, error="ValueError: no"),
        at(4060, "resumed", -1, 2, detail={"commits": 7, "step": 7, "paused_s": 3.0}),
        at(4100, "pause_asked", by="rank 2", at_step=12),
        at(4150, "pause_withdrawn"),
        at(4200, "pause_asked", by="rank 2", at_step=99),
        *normal_end(),
    ]


def test_pauses_are_listed():
    text = text_of(paused_run())
    assert "pause before step 7, asked for by an operator: resumed" in text
    assert "all ranks stood 60 ms after the question (20 ms after the first)" in text
    assert "\n  for 3.0 s\n" in text
    assert "meanwhile: checkpoint of step 5 written" in text
    assert "meanwhile: recovery 2: rank 1 was killed by signal 9" in text
    assert "meanwhile: rank 0: a function of session.on_pause has failed: ValueError: no" in text
    assert "pause before step 12, asked for by rank 2: withdrawn" in text
    assert "pause before step 99, asked for by rank 2: not reached" in text


def test_time_paused_is_no_lost_time():
    run = read_run(paused_run())
    assert [round(recovery.total_ms) for recovery in run.recoveries] == [100], "to all standing again, not to resume"
    found = as_dict(run)
    assert found["paused_s"] == pytest.approx(3.0)
    assert [pause["length_s"] for pause in found["pauses"]] == pytest.approx([3.0, 0, 0])
    assert (found["steps_redone"], found["committed_steps_lost"], found["updates_lost"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("after", "outcome", "length_s"),
    [
        ([], "unfinished", 1.0),
        ([at(3060, "leaving", -1, 1, reason="SIGTERM", paused_s=2.0)], "the job ended in it", 2.0),
        ([at(2060, "job_end", code=2, reason="a function wrote")], "the job ended in it", 1.0),
        (
            [
                at(2060, "restart_all", reason="all are lost", attempt=1, commits=7, state_lost=True),
                at(9060, "paused", detail={"step": 5}),
                at(9560, "resumed", detail={"step": 5, "commits": 5}),
            ],
            "resumed",
            1.5,
        ),
    ],
)
def test_how_a_pause_ends(after, outcome, length_s):
    asked = [at(1000, "pause_asked", by="rank 0", at_step=7), at(1060, "paused", -1, 1, detail={"step": 7})]
    (pause,) = as_dict(read_run([*beginning(), *asked, at(2060, "straggler"), *after]))["pauses"]
    assert (pause["outcome"], pause["length_s"]) == (outcome, pytest.approx(length_s))
    assert pause["gather_s"] is None


def test_an_earlier_pause_takes_the_place_of_a_later_one_and_a_torn_file_is_read():
    asked = [at(1, "pause_asked", by="operator", at_step=79), at(2, "pause_asked", by="rank 1", at_step=20)]
    torn = at(9, "paused", detail={"step": 3})
    assert [str(each.outcome) for each in read_run(asked).pauses] == ["withdrawn", "unfinished"]
    assert [each.by for each in read_run([torn]).pauses] == ["somebody"]
