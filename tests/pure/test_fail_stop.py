"""Whose fault an error is: of a worker that was killed, or the script's."""

from __future__ import annotations

import pytest

from resilient_train.session.fail_stop import lost_worker

KILLED = "DataLoader worker (pid 4711) is killed by signal: Killed. "


def caught(raise_it: object) -> BaseException:
    try:
        raise_it()  # type: ignore[operator]
    except RuntimeError as error:
        return error
    raise AssertionError


def test_a_killed_worker() -> None:
    def by_the_queue() -> None:
        try:
            raise RuntimeError(KILLED)
        except RuntimeError as error:
            raise RuntimeError("DataLoader worker (pid(s) 4711) exited unexpectedly") from error

    assert lost_worker(RuntimeError(KILLED)) == KILLED.strip()
    assert lost_worker(caught(by_the_queue)) == KILLED.strip()


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError(KILLED),
        RuntimeError("Caught ValueError in DataLoader worker process 0."),
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details are lost"),
        RuntimeError("my own program is killed by signal: 9"),
    ],
)
def test_the_scripts_own(error: BaseException | None) -> None:
    assert lost_worker(error) == ""


def test_errors_that_are_one_anothers_cause() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert lost_worker(one) == ""
