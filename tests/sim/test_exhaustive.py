"""Every interleaving of small worlds."""

from pathlib import Path

import pytest

from resilient_train.testing.answers import answering
from resilient_train.testing.cluster import DrivenParts, Faults, Layout
from resilient_train.testing.explore import explore
from resilient_train.testing.rank import Program

SKIPS = Program(skips=True)
UNDOES = Program(optimizers=2, undo=True, skips=True)
ACCUMULATES = Program(accumulate=2)
BESIDE = Layout(2, (0,), twice=1, neighbours=True)
SAVED = Layout(2, (0, 0), saves=True)
ALONE = Layout(2, (0, 0), ((0,), (1,)), saves=True)
LISTED = {line.split(" | ")[0] for line in Path(__file__).with_name("answers.txt").read_text().splitlines()}
LONG = pytest.mark.long
"""5 s and more. What they show is drawn by the seeds of every day (``test_seeds.py``)."""
WORLDS = [
    pytest.param(Layout(2, (1, 0)), Faults(kills=1), id="2-ranks-2-updates-1-kill"),
    pytest.param(Layout(2, (2, 1)), Faults(kills=1), id="2-ranks-long-tails-1-kill"),
    pytest.param(Layout(2, (0,)), Faults(kills=2), id="2-ranks-1-update-2-kills", marks=LONG),
    pytest.param(Layout(2, (1,)), Faults(kills=1, glitches=1), id="2-ranks-1-kill-1-glitch", marks=LONG),
    pytest.param(Layout(2, (0,)), Faults(kills=1, cuts=1), id="2-ranks-1-kill-1-cut", marks=LONG),
    pytest.param(Layout(2, (1, 0)), Faults(damages=1), id="2-ranks-2-updates-1-damage"),
    pytest.param(Layout(2, (0,)), Faults(kills=1, damages=1), id="2-ranks-1-kill-1-damage", marks=LONG),
    pytest.param(Layout(2, (1,)), Faults(glitches=1, damages=1), id="2-ranks-1-glitch-1-damage", marks=LONG),
    pytest.param(Layout(2, (1,)), Faults(hangs=1), id="2-ranks-1-hang"),
    pytest.param(Layout(2, (0,)), Faults(kills=1, fences=1), id="2-ranks-1-kill-1-late-recovery", marks=LONG),
    pytest.param(Layout(2, (0,)), Faults(kills=1, hangs=1), id="2-ranks-1-kill-1-hang", marks=LONG),
    pytest.param(Layout(2, (1, 0)), Faults(pauses=1), id="2-ranks-2-updates-1-pause"),
    pytest.param(Layout(2, (0,)), Faults(pauses=1, kills=1), id="2-ranks-1-pause-1-kill", marks=LONG),
    pytest.param(Layout(2, (1,)), Faults(pauses=1, glitches=1, withdrawn=1), id="2-ranks-1-pause-1-glitch-taken-back"),
    pytest.param(Layout(2, (1, 0)), Faults(anomalies=2), id="2-ranks-2-updates-2-anomalies"),
    pytest.param(Layout(2, (0,)), Faults(kills=1, anomalies=1), id="2-ranks-1-kill-1-anomaly", marks=LONG),
    pytest.param(Layout(2, (1,)), Faults(glitches=1, anomalies=2), id="2-ranks-1-glitch-2-anomalies", marks=LONG),
    pytest.param(Layout(2, (0,)), Faults(damages=1, anomalies=2), id="2-ranks-1-damage-2-anomalies", marks=LONG),
    pytest.param(
        Layout(2, (0,), program=SKIPS), Faults(kills=1, anomalies=1), id="2-ranks-1-kill-1-update-left-out", marks=LONG
    ),
    pytest.param(Layout(2, (0, 0), program=UNDOES), Faults(anomalies=2), id="2-ranks-undo-2-updates-left-out"),
    pytest.param(Layout(2, (0, 0), program=ACCUMULATES), Faults(anomalies=2), id="2-ranks-accumulating-2-anomalies"),
    pytest.param(Layout(2, (1, 0)), Faults(asks=2), id="2-ranks-2-updates-2-ask-again"),
    pytest.param(Layout(2, (0,)), Faults(kills=1, asks=1), id="2-ranks-1-kill-1-asks-again", marks=LONG),
    pytest.param(
        Layout(2, (1,)), Faults(glitches=1, asks=1, anomalies=1), id="2-ranks-1-glitch-1-asks-1-anomaly", marks=LONG
    ),
    pytest.param(Layout(2, (0, 0), program=UNDOES), Faults(asks=2), id="2-ranks-undo-2-ask-again"),
    pytest.param(
        Layout(2, (0, 0), program=ACCUMULATES), Faults(asks=2), id="2-ranks-accumulating-2-ask-again", marks=LONG
    ),
    pytest.param(
        Layout(2, (0,), twice=1), Faults(asks=1, deviations=1), id="2-ranks-1-asks-again-1-deviates", marks=LONG
    ),
    pytest.param(Layout(2, (1, 0), twice=2), Faults(deviations=1), id="2-ranks-1-of-2-computed-twice-1-deviates"),
    pytest.param(Layout(2, (0,), twice=1), Faults(kills=1), id="2-ranks-computed-twice-1-kill", marks=LONG),
    pytest.param(Layout(2, (0,), twice=1), Faults(deviations=2), id="2-ranks-computed-twice-2-deviate"),
    pytest.param(
        Layout(2, (1,), twice=1), Faults(glitches=1, deviations=1), id="2-ranks-1-glitch-1-deviates", marks=LONG
    ),
    pytest.param(BESIDE, Faults(deviations=1), id="2-ranks-beside-each-other-1-deviates"),
    pytest.param(
        Layout(2, (0,), twice=1), Faults(anomalies=1, deviations=1), id="2-ranks-1-anomaly-1-deviates", marks=LONG
    ),
    pytest.param(Layout(2, (0,), twice=1), Faults(anomalies=2), id="2-ranks-computed-twice-2-anomalies"),
    pytest.param(Layout(2, (0, 0), twice=1, program=UNDOES), Faults(deviations=1), id="2-ranks-undo-1-deviates"),
    pytest.param(
        Layout(2, (0,), ((0,), (1,)), twice=1),
        Faults(glitches=1, deviations=1),
        id="2-ranks-each-alone-1-deviates",
        marks=LONG,
    ),
    pytest.param(Layout(2, (1, 0)), Faults(errors=2), id="2-ranks-2-updates-2-errors"),
    pytest.param(Layout(2, (0,)), Faults(kills=1, errors=1), id="2-ranks-1-kill-1-error", marks=LONG),
    pytest.param(Layout(3, (0,)), Faults(kills=1), id="3-ranks-1-update-1-kill", marks=LONG),
]
TWICE = Layout(2, (0,), twice=1)
ONE = Layout(2, (0,))
DEEP_WORLDS = [
    (ONE, Faults(pauses=1, damages=1)),
    (ONE, Faults(pauses=1, cuts=1)),
    (ONE, Faults(pauses=1, anomalies=1)),
    (ONE, Faults(pauses=1, hangs=1)),
    (ONE, Faults(anomalies=1, cuts=1)),
    (ONE, Faults(anomalies=1, asked=1)),
    (TWICE, Faults(pauses=1, deviations=1)),
    (TWICE, Faults(damages=1)),
    (TWICE, Faults(asked=1, deviations=1)),
    (Layout(2, (0,), pulls=True), Faults(kills=2)),
    (Layout(2, (1, 0), replaces=False), Faults(kills=1)),
    (Layout(2, (0,), replaces=False), Faults(kills=1, glitches=1)),
    (Layout(3, (((0, 1), (1, 2)),)), Faults(kills=1)),
    (Layout(2, (((0,), (0, 1)), 0)), Faults(kills=1)),
    (BESIDE, Faults(asked=1, deviations=1)),
    (BESIDE, Faults(damages=1, deviations=1)),
    (BESIDE, Faults(pauses=1, deviations=1)),
    (Layout(2, (0, 0)), Faults(kills=2)),
    (Layout(2, (1, 0)), Faults(kills=2)),
    (Layout(2, (2,)), Faults(kills=2)),
    (Layout(2, (1, 1)), Faults(kills=1, cuts=1, glitches=1)),
    (Layout(2, (0,)), Faults(kills=3)),
    (Layout(3, (1,)), Faults(kills=1)),
    (Layout(2, (0,)), Faults(kills=1, hangs=1, fences=1)),
    (Layout(3, (0,)), Faults(hangs=1)),
    (Layout(2, (1, 0)), Faults(pauses=1, kills=1)),
    (Layout(2, (0,)), Faults(pauses=1, kills=2)),
    (Layout(2, (0,)), Faults(pauses=1, asked=1)),
    (Layout(2, (0,)), Faults(pauses=2, kills=1, withdrawn=1)),
    (Layout(2, (0,)), Faults(kills=2, anomalies=1)),
    (Layout(2, (1,)), Faults(kills=1, anomalies=2)),
    (Layout(2, (0,)), Faults(hangs=1, anomalies=2)),
    (Layout(3, (0,)), Faults(anomalies=2)),
    (Layout(2, (0,), twice=1), Faults(kills=1, deviations=1)),
    (Layout(2, (0,), twice=1), Faults(hangs=1, deviations=1)),
    (Layout(2, (0,), twice=1), Faults(anomalies=2, deviations=1)),
    (Layout(3, (0,), twice=1), Faults(deviations=1)),
    (BESIDE, Faults(deviations=3)),
    (BESIDE, Faults(kills=1, deviations=1)),
    (BESIDE, Faults(glitches=1, anomalies=1, deviations=1)),
    (Layout(2, (1, 0)), Faults(kills=1, errors=2)),
    (Layout(2, (1,)), Faults(errors=2, pauses=1, asked=1)),
    (Layout(3, (0,)), Faults(errors=3)),
    (SAVED, Faults(kills=2)),
    (SAVED, Faults(kills=1, lates=1)),
    (SAVED, Faults(kills=1, differences=1)),
    (SAVED, Faults(lates=1, anomalies=1)),
    (SAVED, Faults(lates=2)),
    (SAVED, Faults(lates=1, pauses=1)),
    (SAVED, Faults(lates=1, asked=1)),
    (SAVED, Faults(lates=1, hangs=1)),
    (ALONE, Faults(kills=2)),
    (ALONE, Faults(kills=1, pauses=1)),
    (ALONE, Faults(kills=1, asked=1)),
    (ALONE, Faults(damages=1, glitches=1)),
]

TWO_BY_TWO = ((0, 2), (1, 3))
"""Two parts, each of which two ranks hold: shards of a model, or stages of a pipeline."""
EACH_ALONE = ((0,), (1,), (2,), (3,))
FOUR_RANKS = [
    pytest.param(Layout(4, (0,), TWO_BY_TWO), Faults(kills=1), id="2-by-2-1-kill"),
    pytest.param(Layout(4, (1,), TWO_BY_TWO), Faults(glitches=1), id="2-by-2-1-glitch"),
    pytest.param(Layout(4, (0, 0), EACH_ALONE, saves=True), Faults(kills=1), id="4-alone-1-kill"),
    pytest.param(Layout(4, (0,), TWO_BY_TWO, saves=True), Faults(kills=2), id="2-by-2-saved-2-kills", marks=LONG),
    pytest.param(Layout(4, (0,), EACH_ALONE, saves=True), Faults(kills=2), id="4-alone-2-kills"),
]
"""In each of them also what comes while all go back."""


def explored(layout: Layout, faults: Faults, delays: int | None = None) -> set[str]:
    """What the ranks' machines have answered."""
    answers: set[str] = set()
    driver = DrivenParts(rank=answering(answers), two_witnesses=False)
    seen = explore(layout, faults, driver, delays=delays)
    print(f"{seen.states} states, {seen.transitions} transitions, {seen.finals} ends")
    assert seen.complete
    assert seen.states > 1000
    assert seen.finals > 1
    assert answers <= LISTED, "run `python tests/sim/answers.py`"
    return answers


@pytest.mark.parametrize(("layout", "faults"), WORLDS)
def test_every_interleaving_is_safe_and_ends(layout: Layout, faults: Faults) -> None:
    assert len(explored(layout, faults)) > 20


@pytest.mark.parametrize(
    ("layout", "faults"),
    [(ALONE, Faults(kills=1)), (SAVED, Faults(lates=1)), (SAVED, Faults(differences=1))],
    ids=["lost", "late", "different"],
)
def test_every_interleaving_in_which_all_go_back(layout: Layout, faults: Faults) -> None:
    """No machine recovers anything: each is a healthy one, and then another."""
    assert len(explored(layout, faults)) > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize(("layout", "faults"), DEEP_WORLDS)
def test_every_interleaving_of_a_larger_world(layout: Layout, faults: Faults) -> None:
    assert explore(layout, faults).complete


@pytest.mark.parametrize(("layout", "faults"), FOUR_RANKS)
def test_four_ranks_in_turn(layout: Layout, faults: Faults) -> None:
    explored(layout, faults, delays=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "faults", "delays"),
    [
        (Layout(4, (0,), TWO_BY_TWO), Faults(kills=1), 2),
        (Layout(4, (1, 0), TWO_BY_TWO), Faults(kills=1), 1),
        (Layout(4, (0,), TWO_BY_TWO), Faults(hangs=1), 1),
        (Layout(4, (0,), TWO_BY_TWO), Faults(kills=1, glitches=1), 1),
        (Layout(4, (0,), TWO_BY_TWO, saves=True), Faults(kills=1, differences=1), 1),
        (Layout(4, (0, 0), EACH_ALONE, saves=True), Faults(kills=1), 2),
        (Layout(4, (0,), EACH_ALONE, saves=True), Faults(kills=2), 1),
        (Layout(4, (0,), EACH_ALONE, saves=True), Faults(kills=1, lates=1), 1),
    ],
)
def test_four_ranks_nearly_in_turn(layout: Layout, faults: Faults, delays: int) -> None:
    explored(layout, faults, delays)


def test_without_faults_all_schedules_end_alike() -> None:
    seen = explore(Layout(2, (1, 0)), Faults())
    assert seen.complete
    assert seen.finals == 1


def test_the_limit_is_told() -> None:
    assert not explore(Layout(2, (0,)), Faults(kills=1), limit=500).complete
