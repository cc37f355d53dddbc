"""``answers.txt`` is what simulated jobs come to. That explorations come to nothing else: ``test_exhaustive.py``."""

from __future__ import annotations

import answers
import pytest

from resilient_train.protocol.rank import TABLE

AGAIN = "; run `python tests/sim/answers.py`"


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    """Of each job that is named, what it shows."""
    return {how: answers.shown(how) for how in set(answers.read().values()) if how.startswith("seed ")}


def test_each_answer_is_shown_by_its_job(shown: dict[str, set[str]]) -> None:
    wrong = [answer for answer, how in answers.read().items() if how in shown and answer not in shown[how]]
    assert not wrong, "\n".join([f"not any more{AGAIN}", *wrong])


def test_these_jobs_show_nothing_else(shown: dict[str, set[str]]) -> None:
    new = set().union(*shown.values()) - set(answers.read())
    assert not new, "\n".join([f"not listed{AGAIN}", *sorted(new)])


def test_what_only_real_jobs_come_to_is_not_simulated(shown: dict[str, set[str]]) -> None:
    real = {answer: how for answer, how in answers.read().items() if not how.startswith("seed ")}
    assert all(how.startswith("real test_") and len(how.partition(": ")[2]) > 20 for how in real.values()), real
    assert not real.keys() & set().union(*shown.values()), f"they are simulated now{AGAIN}"


def test_rows_that_are_answered_are_rows() -> None:
    rows = {f"{state.__name__} + {event.__name__}" for state, event in TABLE}
    named = (answer.partition(": ")[0].split(" + ") for answer in answers.read())
    assert {" + ".join(each.partition("(")[0] for each in pair) for pair in named} <= rows
