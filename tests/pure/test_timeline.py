"""From events to recoveries: phases, outcomes, and what is said where events are missing."""

import re
from pathlib import Path

import pytest

import resilient_train
from pure.stories import HOSTILE, at, beginning, normal_end, ns, one_kill, whole_run
from resilient_train.observe import timeline
from resilient_train.observe.report import Line, recovery_lines
from resilient_train.observe.sinks import read_events
from resilient_train.observe.timeline import PHASES, RecoveryOutcome, read_run, recoveries


def phases(recovery):
    return {span.phase: pytest.approx(span.ms) for span in recovery.spans}


def test_a_single_kill_has_all_phases_with_the_right_lengths():
    (recovery,) = recoveries(whole_run())
    assert recovery.outcome is RecoveryOutcome.RESUMED
    assert recovery.total_ms == pytest.approx(351)
    expected = {"DETECT": 2, "STOP": 12, "REPLACE": 300, "AGREE": 2, "REBUILD": 10, "RESTORE": 38, "RESUME": 1}
    assert phases(recovery) == expected
    assert tuple(span.phase for span in recovery.spans) == PHASES


def test_what_a_recovery_says_besides_times():
    (recovery,) = recoveries(whole_run())
    assert (recovery.lost, recovery.seen_by) == ((2,), {2: "futex"})
    (copy,) = recovery.copies
    assert (copy.source, copy.target, copy.size_bytes, copy.duration_ms, copy.way) == (0, 2, 12_000_000, 20.0, "memory")
    assert (recovery.redone_by, recovery.redone_step, recovery.rolled_forward) == ((0, 1), 7, ())
    assert (recovery.injected[0].kind, recovery.injected[0].at, recovery.injected[0].step) == ("kill", "backward", 7)
    assert (recovery.commits, recovery.commits_lost) == (7, 0)


def test_stop_prefers_the_time_at_which_a_survivor_had_left_its_step():
    events = [e for e in one_kill() if not (e.kind == "joined" and e.rank == 1)]
    assert recoveries(events)[0].span("STOP").ms == pytest.approx(8)


def test_without_a_session_the_end_of_all_processes_is_the_jobs():
    def ended(*codes):
        spawned = [at(10 + rank, "spawned", rank, 0) for rank in range(2)]
        exited = [at(50 + rank, "exited", rank, 0, detail={"code": code}) for rank, code in codes]
        return read_run([*spawned, *exited]).finished

    assert ended((0, 0), (1, 0))
    assert not ended((0, 0))
    assert not ended((0, 0), (1, 3))


def test_the_order_of_lines_in_the_file_does_not_matter():
    assert recoveries(reversed(whole_run())) == recoveries(whole_run())


def test_a_fault_that_nobody_injected_has_no_detect_phase():
    events = [event for event in one_kill() if event.kind != "injected"]
    (recovery,) = recoveries(events)
    assert recovery.span("DETECT") is None
    assert recovery.injected == ()


def test_injections_that_kill_nobody_belong_to_the_next_recovery():
    hit = at(1400, "injected", 1, 1, 9, "COMPUTE", detail={"kind": "uce", "at": "forward"})
    nobody = [at(t, "fault", -1, g, lost=[], reason="memory") for g, t in ((2, 1410), (3, 2410))]
    first, second, third = recoveries([*one_kill(), hit, *nobody])
    assert [each.kind for each in first.injected] == ["kill"]
    assert [(each.kind, each.rank, each.step) for each in second.injected] == [("uce", 1, 9)]
    assert third.injected == ()
    assert phases(second)["DETECT"] == 10
    assert third.span("DETECT") is None


def test_an_injection_explains_only_the_first_death_after_it_and_for_a_minute():
    again = [event for event in one_kill(t=2000, generation=2) if event.kind != "injected"]
    first, second = recoveries([*one_kill(), *again])
    assert first.injected
    assert not second.injected
    late = [at(1000 - 61_000, "injected", 2, detail={"kind": "kill", "at": "start"}), *again]
    assert not recoveries(late)[0].injected


def test_what_a_rank_that_has_ended_itself_has_said():
    words = "rank 2 has lost a worker, and is replaced: DataLoader worker (pid 7) is killed by signal: Killed."
    first, second = recoveries([at(995, "worker_lost", 2, detail={"error": words}), *one_kill(), *one_kill(2000, 2)])
    assert (first.last_words, second.last_words) == ((words,), ())
    assert Line(f"  {words}") in recovery_lines(first)


def test_whoever_ends_itself_is_known_to_the_report():
    text = "".join(path.read_text() for path in Path(resilient_train.__file__).parent.rglob("*.py"))
    assert set(re.findall(r'\bfail_stop\(self\._notices\.event, "(\w+)"', text)) == set(timeline._ENDS_ITSELF)


def test_a_death_is_not_counted_for_two_faults():
    unseen = [event for event in one_kill(t=2000, generation=2) if event.kind != "death_seen"]
    _, second = recoveries([*one_kill(), *unseen])
    assert second.seen_by == {}
    assert second.fault_ns == ns(2001)


def test_a_second_fault_supersedes_and_newcomers_are_not_survivors():
    first = [event for event in one_kill() if event.time_ns < ns(1100)]
    second = [event for event in one_kill(t=1100, generation=2, rank=1) if event.kind != "joined"]
    joins = [at(1110, "joined", 0, 2, commits=7), at(1500, "joined", 2, 2), at(1400, "joined", 1, 2)]
    story = read_run([*beginning(), *first, *second, *joins])
    superseded, recovery = story.recoveries
    assert superseded.outcome is RecoveryOutcome.SUPERSEDED
    assert superseded.total_ms == pytest.approx(101)
    assert recovery.outcome is RecoveryOutcome.RESUMED
    assert recovery.span("STOP").ms == pytest.approx(10)
    assert recovery.span("REPLACE").ms == pytest.approx(400)
    assert story.steps_redone == 1


def test_a_job_that_ends_in_a_recovery_failed_it():
    cut = [event for event in one_kill() if event.time_ns < ns(1100)]
    story = read_run([*beginning(), *cut, at(1200, "job_end", code=75, reason="no replica is left")])
    (recovery,) = story.recoveries
    assert recovery.outcome is RecoveryOutcome.FAILED
    assert recovery.total_ms == pytest.approx(200)
    assert [span.phase for span in recovery.spans] == ["DETECT", "STOP"]
    assert (story.exit_code, story.end_reason, story.digest) == (75, "no replica is left", None)


def test_a_recovery_that_goes_on_is_unfinished():
    cut = [event for event in one_kill() if event.time_ns < ns(1100)]
    assert recoveries(cut)[0].outcome is RecoveryOutcome.UNFINISHED


def test_a_collective_that_failed_is_a_recovery_without_lost_ranks():
    events = [at(0, "fault", -1, 1, lost=[], reason="a collective failed"), at(9, "resumed", -1, 1)]
    (recovery,) = recoveries(events)
    assert (recovery.lost, recovery.seen_by, recovery.total_ms) == ((), {}, 9)


def test_committed_steps_that_a_plan_drops_are_counted():
    events = [at(0, "fault", 1, 1, lost=[1]), at(1, "joined", 0, 1, commits=9, holds=True)]
    story = read_run([*events, at(2, "plan", -1, 1, commits=7, copies={})])
    assert story.commits_lost == 2


def test_a_digest_needs_every_rank_to_agree():
    assert read_run(whole_run()).digest == "abc"
    one_missing = [event for event in whole_run() if not (event.kind == "session_end" and event.rank == 1)]
    assert read_run(one_missing).digest is None
    differing = [*beginning(), *normal_end(), at(6000, "session_end", 1, params_digest="other")]
    assert read_run(differing).digest is None


def test_no_events_are_a_run_of_which_nothing_is_known():
    story = read_run([])
    assert (story.world_size, story.recoveries, story.exit_code, story.digest) == (None, (), None, None)


@pytest.mark.parametrize("missing", sorted({event.kind for event in whole_run()}))
def test_any_kind_of_event_may_be_missing(missing):
    story = read_run(event for event in whole_run() if event.kind != missing)
    assert len(story.recoveries) == (missing != "fault")
    assert all(span.ms >= 0 for recovery in story.recoveries for span in recovery.spans)


def test_hostile_events_are_read_without_an_exception(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(HOSTILE)
    (recovery,) = read_run(read_events(path)).recoveries
    assert all(span.ms >= 0 for span in recovery.spans)
    assert recovery.lost == ()
    assert [(copy.source, copy.target) for copy in recovery.copies] == [(-1, -9), (0, 3)]
