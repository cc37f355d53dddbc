"""The plan of injected faults: round trip, and errors that name the word."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.errors import ConfigError
from resilient_train.faults import (
    FLIP_PLACES,
    INJECTABLE,
    PLACES,
    RECOVERY_PHASES,
    TARGETS,
    UCE_PLACES,
    Injection,
    nearest,
    parse_plan,
)


def test_example_of_the_documentation() -> None:
    first, second = parse_plan("kill rank=2 step=7 phase=UPDATING; kill rank=0 step=20 phase=COMPUTE at=backward")
    assert first == Injection("kill", 2, "UPDATING", "start", step=7)
    assert second == Injection("kill", 0, "COMPUTE", "backward", step=20)


def test_empty_plans() -> None:
    assert parse_plan("") == parse_plan(" ; ;") == ()


@st.composite
def injections(draw: st.DrawFn) -> Injection:
    kind = draw(st.sampled_from((*INJECTABLE, "flip")))
    target = draw(st.sampled_from(TARGETS)) if kind in ("uce", "flip") else ""
    phase = draw(st.sampled_from(sorted(PLACES)))
    at = draw(st.sampled_from(PLACES[phase]))
    if kind == "uce":
        phase, at = draw(st.sampled_from(UCE_PLACES))
    if kind == "flip":
        phase, at = draw(st.sampled_from(FLIP_PLACES[target]))
    numbers = st.integers(0, 10**9)
    step = draw(numbers if phase not in RECOVERY_PHASES else numbers | st.just(-1))
    if (phase, at) == ("RESTORE", "start"):  # who copies has none
        step = -1
    return Injection(
        kind=kind,
        rank=draw(numbers),
        phase=phase,
        at=at,
        step=step,
        generation=draw(numbers | st.just(-1)),
        incarnation=draw(st.integers(0, 5)),
        target=target,
        index=draw(numbers) if kind == "flip" else 0,
        mask=draw(st.integers(1, (1 << 64) - 1)) if kind == "flip" else 0,
    )


@given(st.lists(injections()))
def test_describe_and_parse_are_inverse(plan: list[Injection]) -> None:
    assert parse_plan("; ".join(each.describe() for each in plan)) == tuple(plan)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("kil rank=1 step=2", r"unknown kind 'kil' .*did you mean 'kill'"),
        ("kill rank=1 stp=2", r"'stp=2' .*did you mean 'step'"),
        ("kill rank=1 step", r"'step' in"),
        ("kill rank=1 step=2 step=3", r"'step' stands twice"),
        ("kill rank=1 at=start at=end step=1", r"'at' stands twice"),
        ("kill rank=-1 step=2", r"rank='-1'"),
        ("kill rank=one step=2", r"rank='one'"),
        ("kill step=2", r"names no rank"),
        ("kill rank=1", r"names no step"),
        ("kill rank=1 step=1 phase=REDY", r"unknown phase 'REDY' .*did you mean 'READY'"),
        ("kill rank=1 step=1 target=param", r"only uce and flip have a target"),
        ("kill rank=1 step=1 index=4", r"only flip has index="),
        ("kill rank=1 step=1 mask=4", r"only flip has mask="),
        ("flip rank=1 step=1", r"which bits of the element\? \(mask=0x400000"),
        ("flip rank=1 step=1 mask=0", r"which bits"),
        ("flip rank=1 step=1 mask=many", r"which bits"),
        ("flip rank=1 step=1 mask=-1", r"which bits"),
        ("flip rank=1 step=1 mask=1 phase=APPLIED", r"where flip finds a param: .*phase=UPDATING at=start"),
        ("flip rank=1 step=1 mask=1 target=activation at=start", r"where flip finds a activation: .* at=forward"),
        ("kill rank=1 step=1 value=2", r"only norm, loss, slow have a value"),
        ("slow rank=1 step=1", r"how many times as long\? \(value=1.4"),
        ("slow rank=1 step=1 value=0.5", r"at least 1"),
        ("slow rank=1 step=1 value=inf", r"at least 1"),
        ("slow rank=1 step=1 value=much", r"at least 1"),
        ("slow rank=1 step=1 value=2 at=backward", r"slow begins with a body"),
        ("uce rank=1 step=1", r"hits an operation of the step: .*at=forward"),
        ("uce rank=1 step=1 at=forward target=parm", r"unknown target 'parm' .*did you mean 'param'"),
        ("kill rank=1 step=1 phase=READY at=backward", r"no place 'backward' .*before, barrier"),
    ],
)
def test_errors_name_the_word(text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_plan(text)


def test_a_flip_hits_where_such_memory_is() -> None:
    (clause,) = parse_plan("flip rank=1 step=20 mask=0x40000000")
    assert clause == Injection("flip", 1, "COMPUTE", "start", step=20, target="param", mask=1 << 30)
    for target, (phase, at) in {kind: places[0] for kind, places in FLIP_PLACES.items()}.items():
        (clause,) = parse_plan(f"flip rank=1 step=20 target={target} mask=3")
        assert (clause.phase, clause.at) == (phase, at)
    (clause,) = parse_plan("flip rank=1 step=20 target=gradient phase=UPDATING index=7 mask=1")
    assert (clause.at, clause.index) == ("start", 7)


def test_a_slow_rank() -> None:
    (clause,) = parse_plan("slow rank=1 step=20 value=1.4")
    assert clause == Injection("slow", 1, "COMPUTE", "start", step=20, value=1.4)
    assert parse_plan(clause.describe()) == (clause,)


def test_phase_may_be_written_small() -> None:
    assert parse_plan("stop rank=0 step=1 phase=ready")[0].at == "before"


def test_phases_of_a_recovery_need_no_step() -> None:
    assert parse_plan("kill rank=0 phase=REBUILD generation=2")[0].generation == 2
    assert parse_plan("kill rank=0 step=7 phase=REBUILD")[0].step == 7
    assert parse_plan("kill rank=0 phase=RESTORE incarnation=1")[0].step == -1
    with pytest.raises(ConfigError, match="has no step yet"):
        parse_plan("kill rank=0 step=7 phase=RESTORE")


@given(st.text())
def test_any_text_gives_a_plan_or_a_config_error(text: str) -> None:
    try:
        parse_plan(text)
    except ConfigError:
        pass


def test_nearest() -> None:
    assert nearest("xyz", ["abc"]) == ""
    assert nearest("abd", ["abc"]) == " (did you mean 'abc'?)"
