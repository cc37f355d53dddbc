"""The last line of a job: what it came to."""

from __future__ import annotations

import pytest

from pure.stories import at, beginning, whole_run
from resilient_train.events import Event
from resilient_train.observe.summary import summary


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
    ],
)
def test_what_is_said(events: list[Event], code: int, expected: str) -> None:
    assert summary(events, code) == expected
