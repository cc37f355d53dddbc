"""The last line of a job: what it came to."""

from __future__ import annotations

import pytest

from pure.stories import at, beginning, whole_run
from resilient_train.events import Event
from resilient_train.faults import parse_plan
from resilient_train.observe.closing_line import missed, summary


def ends(*steps: int) -> list[Event]:
    return [at(9000 + rank, "session_end", rank, detail={"steps": number}) for rank, number in enumerate(steps)]


@pytest.mark.parametrize(
    ("events", "code", "expected"),
    [
        ([], 0, "done after 0 s: no Session came to its first step, 0 recoveries"),
        ([at(1, "plain_loop", 1, 0)], 0, "done after 0 s: its Session was a plain loop, 0 recoveries"),
        (beginning() + ends(9, 9, 9), 0, "done after 9 s: 9 steps, 0 recoveries"),
        (
            [*beginning(), at(5000, "job_end", code=75, reason="all are lost", commits=7)],
            75,
            "ended with exit code 75 after 5 s: 7 updates, 0 recoveries, 7 updates lost otherwise",
        ),
        (
            whole_run() + ends(20, 20),
            0,
            "done after 9 s: 20 steps, 1 recovery, 1 step redone, 0 committed steps lost in recoveries",
        ),
        (
            [*beginning(), at(600, "paused"), at(2600, "resumed"), *ends(9)],
            0,
            "done after 9 s: 9 steps, 0 recoveries, paused 1 time, 2 s in all",
        ),
        (
            [*beginning(), at(6000, "saved", detail={"step": 40, "commits": 40, "path": "a/step_40"}), *ends(41)],
            0,
            "done after 9 s: 41 steps, 0 recoveries, newest checkpoint: step 40 (a/step_40)",
        ),
        (
            [
                *beginning(),
                at(600, "tail_lost", detail={"next": 6, "names": []}),
                *(at(700 + rank, "tail_input_missing", rank, detail={"of": 1}) for rank in (0, 2)),
                at(900, "tail_lost", detail={"next": 7, "names": ["0.bn.running_mean"]}),
                at(950, "verified", step=7, detail={"ranks": []}),
                *ends(9),
            ],
            0,
            (
                "done after 9 s: 9 steps, 0 recoveries, results may differ from an undisturbed run's "
                "(tail_input_missing, tail_lost: see above)"
            ),
        ),
        (
            [*beginning(), at(950, "verified", step=7, detail={"ranks": [0, 1], "everywhere": True}), *ends(9)],
            0,
            (
                "done after 9 s: 9 steps, 0 recoveries, results may differ from an undisturbed run's "
                "(verified: see above)"
            ),
        ),
    ],
)
def test_what_is_said(events: list[Event], code: int, expected: str) -> None:
    assert summary(events, code) == expected


def test_planned_faults_that_did_not_happen() -> None:
    """What an operator ordered was not in the plan."""
    kill, stop, *more = parse_plan(
        "kill rank=1 step=3; stop rank=1 step=3;" + "; ".join(f"hcce rank=0 step={step}" for step in range(6))
    )
    events = [
        at(5, "injected", 1, step=3, phase="COMPUTE", detail={"kind": "kill", "at": "start"}),
        at(6, "injected", 1, step=3, detail={"kind": "stop", "at": "operator"}),
        at(7, "injected", 0, step=3, phase="COMPUTE", detail={"kind": "hcce", "at": "start", "order": 1}),
    ]
    assert missed(events, [kill]) == missed([], []) == ""
    assert missed(events, [kill, stop]).startswith(
        "1 of 2 planned faults did not happen (stop rank=1 step=3 phase=COMPUTE at=start): the job did not come to"
    )
    assert missed([], [kill]).startswith("1 of 1 planned fault did not happen (kill rank=1 step=3 ")
    assert "; and 1 more): " in missed(events, more)
    assert missed(events, [kill, kill]).startswith("1 of 2 planned faults"), "each hits once"


def test_why_they_may_not_have_happened() -> None:
    """A clause is for one process; and where all of a body is redone, no phase of it is behind the update."""
    (early,) = plan = parse_plan("kill rank=1 step=3")
    assert missed([at(5, "joined", 1, incarnation=1)], plan).endswith(
        "; rank 1 had another process by then (incarnation=N names it)"
    )
    assert "another process" not in missed([at(5, "joined", 0, incarnation=1)], plan)
    died_later = at(5, "injected", 1, step=7, incarnation=0, detail={"kind": "kill", "at": "start"})
    assert "another process" not in missed([died_later, at(6, "joined", 1, incarnation=1)], plan)
    further = at(5, "injected", 0, step=12, detail={"kind": "kill", "at": "start"})
    assert "another process" not in missed([further, at(6, "joined", 1, incarnation=1)], plan), "all were there"
    assert "another process" not in missed([at(5, "joined", 1)], [early])
    assert "; APPLIED is none where a Session has undo=True)" in missed(
        [], parse_plan("kill rank=1 step=3 phase=APPLIED")
    )
