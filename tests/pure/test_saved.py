"""What a report says of checkpoints: written, left out, restored from, and which updates were lost."""

import json

import msgspec
import pytest

from pure.stories import HOSTILE, at, beginning, normal_end, one_kill
from resilient_train.observe.report import as_dict, lines
from resilient_train.observe.saved import NotSaved, Origin, Saved, WayBack
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import read_run


def saved_of(*events) -> Saved:
    return read_run(events).saved


def text_of(*events) -> str:
    return "\n".join(line.text for line in lines(read_run(events)))


def written(t: float, commits: int, took_s: float = 0.25, name: str = "step_"):
    detail = {"step": commits, "commits": commits, "path": f"runs/1/checkpoints/{name}{commits}"}
    return at(t, "saved", detail={**detail, "bytes": 9, "duration_ns": round(took_s * 1e9)})


def skipped(t: float, step: int, reason: str):
    return at(t, "save_skipped", detail={"step": step, "reason": reason})


def back(t: float, commits: int, to: int | None, source: str = "memory") -> list:
    """All ranks are lost, and start again."""
    path = "" if source == "memory" else f"runs/1/checkpoints/step_{to}"
    restored = [at(t + 500 + r, "restored", r, source=source, commits=to, path=path) for r in range(3)]
    return [
        at(t, "restart_all", 1, 1, reason="rank 1 was lost; nobody is left", attempt=1, commits=commits),
        *(restored if to is not None else []),
        at(t + 600, "started", generation=1, world_size=3, step=to or 0),
    ]


def ended(t: float, commits: int, code: int = 75):
    return at(t, "job_end", code=code, reason="over", commits=commits)


def test_a_run_that_saves_nothing_says_nothing_of_it():
    assert saved_of(*beginning(), *one_kill(), *normal_end()) == Saved()
    assert "checkpoint" not in text_of(*beginning(), *normal_end())


def test_checkpoints_are_counted_and_the_newest_is_named():
    events = [*beginning(), written(1000, 5, 0.2), written(2000, 10, 0.6), written(3000, 15, 0.3), *normal_end()]
    text = text_of(*events)
    assert "checkpoints written: 3 (median 0.3 s)" in text
    assert "newest: step 15, after 15 updates: runs/1/checkpoints/step_15" in text
    assert saved_of(*events).lost_at_end is None, "it came to its end"


def test_what_is_missing_is_counted_once_for_each_step():
    early = [skipped(1000 + r, 5, f"rank {r}: the holder does not answer") for r in range(2)]
    failed = at(1500, "save_failed", detail={"step": 15, "reason": "No space left on device"})
    off = at(1600, "save_off", 2, reason="900 MB are missing")
    events = [*beginning(), *early, skipped(1400, 10, "storage is busy"), failed, off]
    found = saved_of(*events)
    assert found.left_out == (NotSaved(5, "rank 0: the holder does not answer"), NotSaved(10, "storage is busy"))
    text = text_of(*events)
    assert "checkpoints left out: 2; the last, of step 10: storage is busy" in text
    assert "checkpoints failed: 1; the last, of step 15: No space left on device" in text
    assert "rank 2 took no more snapshots: 900 MB are missing" in text


def test_a_run_that_goes_on_from_an_earlier_one():
    path = "runs/1/checkpoints/step_8"
    passed = at(100, "checkpoint_skipped", path="runs/1/checkpoints/step_9", reason="a digest is wrong")
    events = [passed, at(400, "restored", 0, source="storage", commits=8, path=path), *beginning()]
    assert saved_of(*events).begun_from == Origin("storage", 8, path)
    assert saved_of(*events).ways_back == ()
    text = text_of(*events)
    assert f"began from storage, after 8 updates ({path})" in text
    assert "passed over: runs/1/checkpoints/step_9: a digest is wrong" in text
    assert saved_of(*events, ended(900, 10)).lost_at_end == 2
    assert saved_of(*events, ended(900, 10), written(950, 9)).lost_at_end == 1, "from memory, in the end"
    left = at(950, "left_in_memory", commits=9)
    assert saved_of(*events, ended(900, 10), left).lost_at_end == 1, "it will be, and is there for the next launcher"
    assert saved_of(*events, ended(900, 8)).lost_at_end == 0


def test_a_first_start_that_fails_is_no_way_back():
    restored = at(100, "restored", 0, source="memory", commits=8, path="")
    again = at(200, "restart_all", 1, reason="what was saved can't be taken up", attempt=1, commits=0)
    found = saved_of(restored, again, *beginning())
    assert (found.begun_from, found.ways_back) == (None, ()), "the second start found nothing"


@pytest.mark.parametrize(("to", "lost"), [(9, 3), (12, 0), (None, 12)])
def test_updates_that_all_ranks_went_back_behind(to, lost):
    found = saved_of(*beginning(), *back(2000, 12, to), *normal_end())
    origin = None if to is None else Origin("memory", to, "")
    assert found.ways_back == (WayBack("rank 1 was lost; nobody is left", 12, origin),)
    assert found.updates_lost == lost
    text = text_of(*beginning(), *back(2000, 12, to), *normal_end())
    where = "the beginning: nothing was saved" if to is None else f"memory, after {to} updates"
    assert f"all ranks went back from after 12 updates to {where}; lost: {lost} updates" in text
    assert (f"{lost} otherwise (see above)" in text) == bool(lost)


def test_without_the_agents_word_what_recoveries_knew_counts():
    """``restart_all`` of older runs does not say how far they had come."""
    silent = [event for event in back(2000, 0, 4) if event.kind != "restart_all"]
    cut = at(2000, "restart_all", reason="all ranks are lost", attempt=1)
    assert saved_of(*beginning(), *one_kill(), cut, *silent).updates_lost == 3


def test_each_way_back_counts_from_where_the_one_before_led():
    twice = [*back(2000, 12, 9), *back(4000, 11, 10, "storage"), *normal_end(6000)]
    assert [way.updates_lost for way in saved_of(*beginning(), *twice).ways_back] == [3, 1]


def test_a_way_back_that_fails_is_followed_by_another():
    first = [event for event in back(2000, 12, 9) if event.kind != "started"]
    second = back(3000, 0, 4, "storage")
    (way,) = saved_of(*beginning(), *first, *second).ways_back
    assert (way.furthest, way.origin.commits, way.updates_lost) == (12, 4, 8)
    assert saved_of(*beginning(), written(900, 4), *first, ended(2900, 12)).lost_at_end == 8, "and none worked"


def test_the_end_is_compared_with_storage():
    begun = [*beginning(), written(1000, 10)]
    assert saved_of(*begun, ended(3000, 13)).lost_at_end == 3
    assert "at the job's end no checkpoint had the last 3 updates" in text_of(*begun, ended(3000, 13))
    assert saved_of(*begun, *back(2000, 14, 12), ended(5000, 13)).lost_at_end == 3, "memory goes with the job"
    assert saved_of(*begun).lost_at_end is None, "it may still be running"
    assert saved_of(*begun, at(3000, "job_end", code=75, reason="over")).lost_at_end == 0


def test_an_end_of_life_checkpoint_saves_all():
    leaving = at(2000, "leaving", -1, 1, lost=[], reason="resilient-run got SIGTERM")
    events = [*beginning(), written(1000, 10), leaving, written(2500, 13, name="ttp_saved_checkpoints-step_")]
    assert saved_of(*events, ended(2600, 13, 143)).lost_at_end == 0
    assert "at the job's end no update was lost" in text_of(*events, ended(2600, 13, 143))


def test_before_the_first_step_there_is_nothing_to_lose():
    assert saved_of(at(0, "run_start", world_size=3), ended(400, 0, 2)).lost_at_end is None


def test_the_dict_survives_json():
    events = [*beginning(), written(1000, 10), *back(2000, 12, 10, "storage"), ended(5000, 13)]
    told = json.loads(msgspec.json.encode(as_dict(read_run(events))))
    assert told["updates_lost"] == 5
    saved = told["saved"]
    assert (saved["written"], saved["median_s"], saved["newest"]["commits"]) == (1, 0.25, 10)
    assert saved["ways_back"][0]["updates_lost"] == 2
    assert saved["ways_back"][0]["origin"]["source"] == "storage"
    assert saved["lost_at_end"] == 3


@pytest.mark.parametrize("kind", ["saved", "save_failed", "restored", "restart_all", "started", "job_end"])
def test_details_of_another_kind_are_unknown(kind, tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HOSTILE)
    odd = at(1500, kind, detail={"commits": "many", "path": 7, "reason": [], "source": 3, "step": True, "code": None})
    events = [*read_events(path), *beginning(), odd, *back(2000, 12, 9)]
    assert "all ranks went back" in text_of(*events)
    msgspec.json.encode(as_dict(read_run(events)))
