"""Rank machines that are wrong in one place, made by machine: each is caught, or there is a reason why it can't be.

What ``mutants.txt`` says, and how it is written anew: ``mutants.py``.
"""

from __future__ import annotations

import itertools

import diagram
import mutants
import pytest

from resilient_train.protocol.rank import TABLE

NO_UPDATE = "a hook of an optimizer that ends has begun: in a tail or behind a cut its beginning has raised"
NOTHING_BEGUN = "the driver tells the end of a loop that has begun"
ENDED = "a script that swallows the error with which it should end; each row gives the thread back, or raises again"
UNANSWERED = {
    "Tail+UpdateEnds": NO_UPDATE,
    "Drain+UpdateEnds": NO_UPDATE,
    "Setup+Over": NOTHING_BEGUN,
    "Left+Next": ENDED,
    "Left+Exit": ENDED,
    "Left+UpdateBegins": ENDED,
    "Left+UpdateEnds": ENDED,
    "Left+Enter": ENDED,
    "Left+TailCut": ENDED,
}
"""Rows of the table that neither a simulated job nor a real one comes to, and why."""


def test_every_row_is_answered() -> None:
    """``test_answers.py`` shows that each answer is one, and that there is no other."""
    answered = {shape.row for shape in mutants.shapes()}
    rows = {f"{state.__name__}+{event.__name__}" for state, event in TABLE}
    assert answered <= rows
    assert rows - answered == set(UNANSWERED)


def test_the_page_shows_the_machine() -> None:
    assert diagram.PAGE.read_text() == diagram.page(mutants.shapes()), "run `python tests/sim/diagram.py`"


def test_the_list_has_every_mutant() -> None:
    listed = mutants.read()
    missing = [name for name in mutants.mutants() if name not in listed]
    assert not missing, f"of these nothing is known; run `python tests/sim/mutants.py`: {missing}"
    gone = [name for name in listed if name not in mutants.mutants()]
    assert not gone, f"these are not made any more; run `python tests/sim/mutants.py`: {gone}"
    survivors = [name for name, what in listed.items() if not what.startswith(("seed ", *mutants.REASONS))]
    assert not survivors, f"nothing catches these: extend the simulation, or give the reason: {survivors}"


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in (1, 2, 3))])
def test_each_mutant_is_caught_by_its_seed(part: int) -> None:
    """Every day each fourth one."""
    changed = []
    for name, what in itertools.islice(mutants.read().items(), part, None, 4):
        if not what.startswith("seed "):
            continue
        mutant = mutants.mutants()[name]
        if mutants.caught(mutant, [mutants.case_of(what)]) is None:
            soon = itertools.islice(mutants.cases(mutant), mutants.SOON)
            changed.append(mutants.line(name, mutants.caught(mutant, soon), {}))
    assert not changed, "these seeds catch their mutants no more; the lines should be:\n" + "\n".join(changed)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_list_is_what_a_search_finds() -> None:
    listed = mutants.read()
    found = {name: mutants.line(name, case, listed) for name, case in mutants.search(mutants.mutants(), listed)}
    wrong = [line for name, line in found.items() if line != f"{name} | {listed.get(name)}"]
    assert not wrong, "run `python tests/sim/mutants.py`; these lines are others now:\n" + "\n".join(wrong)
