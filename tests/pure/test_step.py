"""One pass through the loop's body."""

import pytest

from resilient_train.session.step import Step


class Body:
    def __init__(self, *, keep: bool = False) -> None:
        self.keep = keep
        self.seen: list[object] = []

    def enter(self, step: Step) -> None:
        self.seen.append(("enter", step.number))

    def leave(self, step: Step, error: BaseException | None) -> bool:
        self.seen.append(error)
        return self.keep


def test_values() -> None:
    step = Step(Body(), 7, batch="b", epoch=2, attempt=1)
    assert (step.number, step.batch, step.epoch, step.attempt, step.entered) == (7, "b", 2, 1, False)
    assert repr(step) == "Step(7, attempt=1)"
    assert list(range(10))[step] == 7


def test_the_body_is_told() -> None:
    body = Body()
    with Step(body, 3) as step:
        assert step.entered
    assert body.seen == [("enter", 3), None]


def test_an_error_goes_on_unless_the_step_runs_again() -> None:
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine"):
        with Step(Body(), 0):
            raise error
    body = Body(keep=True)
    with Step(body, 0):
        raise error
    assert body.seen[-1] is error


def test_keeping_nothing_is_nothing() -> None:
    with Step(Body(keep=True), 0):
        pass


def test_an_error_of_entering_is_not_kept() -> None:
    class Refusing(Body):
        def enter(self, step: Step) -> None:
            raise RuntimeError("refused")

    body = Refusing(keep=True)
    with pytest.raises(RuntimeError, match="refused"):
        with Step(body, 0):
            pass
    assert body.seen == []


def test_no_attribute_by_accident() -> None:
    with pytest.raises(AttributeError):
        Step(Body(), 0).nubmer = 3  # type: ignore[attr-defined]
