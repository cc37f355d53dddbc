"""Whose fault an error is: of a worker that was killed, or the script's; and which one leaves a Session's end."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from pure.probe_rig import eventually
from resilient_train.session import stop_delivery
from resilient_train.session.driver import Driver
from resilient_train.session.fail_stop import lost_worker
from resilient_train.session.notices import Notices
from resilient_train.session.session import Session
from resilient_train.session.stop_delivery import StopDelivery

KILLED = "DataLoader worker (pid 4711) is killed by signal: Killed. "


class Wordless(Exception):  # noqa: N818 - the user's
    def __str__(self) -> str:
        raise AssertionError


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


@pytest.mark.parametrize(("codes", "killed"), [([-9], True), ([-9, -15], True), ([-9, 1], False), ([None], False)])
def test_workers_that_are_found_gone(codes: list[int | None], killed: bool) -> None:
    """As the iterator finds them that nobody told it of."""

    def _try_get_data() -> None:
        failed_workers = [SimpleNamespace(pid=4711, exitcode=code) for code in codes]
        raise RuntimeError(f"DataLoader worker (pid(s) {len(failed_workers)}) exited unexpectedly")

    assert bool(lost_worker(caught(_try_get_data))) is killed


class Waits:
    """A data set whose second sample does not come. ``begun``: is made when somebody asks for it."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 1:
            self.begun.touch()
            signal.pause()
        return index


@pytest.mark.torch
def test_the_iterator_of_torch_finds_them_so(tmp_path: Path) -> None:
    """A worker by ``forkserver`` is no child of this process. It is killed where it reads: between two samples it has a
    lock that torch's iterator takes, without a limit, when that is let go.
    """
    data = pytest.importorskip("torch").utils.data
    context, begun = multiprocessing.get_context("forkserver"), tmp_path / "begun"
    loader = iter(data.DataLoader(Waits(begun), num_workers=1, multiprocessing_context=context))
    next(loader)
    pid = loader._workers[0].pid
    eventually(begun.exists)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises((RuntimeError, OSError, EOFError)) as raised:  # as far as it has come in handing over
        deque(loader, maxlen=0)
    assert lost_worker(raised.value) == f"DataLoader worker (pid {pid}) is killed by signal"


@pytest.mark.parametrize(
    "error",
    [
        None,
        ValueError(KILLED),
        RuntimeError("Caught ValueError in DataLoader worker process 0."),
        RuntimeError("DataLoader worker (pid 7) exited unexpectedly with exit code 1. Details are lost"),
        RuntimeError("my own program is killed by signal: 9"),
        Wordless(),
    ],
)
def test_the_scripts_own(error: BaseException | None) -> None:
    assert lost_worker(error) == ""


def test_errors_that_are_one_anothers_cause() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert lost_worker(one) == ""


RELEASED = [
    "pulse.leaving",
    "device.close",
    "collectives.detach",
    "window.detach",
    "gradients.close",
    "drill.close",
    "errors.tell",
    "stop_delivery.close",
    "children.end",
    "saving.close",
    "verification.close",
    "pulse.close",
    "records.close",
    "trace.close",
    "sink.close",
    "injector.close",
    "link.close",
]


def opened(parts: MagicMock) -> Session:
    """A Session whose loop has not begun, made of these parts."""
    parts.link.rank = 3
    driver = Driver.__new__(Driver)
    driver._pid = os.getpid()
    driver._released = driver._begun = driver._told_end = False
    driver._engine, driver._device, driver.saving = parts, parts.errors, parts.saving
    for name in ("pulse", "verification", "stop_delivery", "records", "trace", "injector", "link", "children"):
        setattr(driver, f"_{name}", getattr(parts, name))
    driver._notices = notices = Notices.__new__(Notices)
    notices._who, notices.sink = {"rank": 3}, parts.sink
    session = Session.__new__(Session)
    session._driver, session._calls = driver, None
    return session


def released(parts: MagicMock) -> list[str]:
    return [name for name, _, _ in parts.method_calls]


@pytest.mark.parametrize("failing", RELEASED)
def test_the_users_exception_leaves_and_all_is_released(failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    parts = MagicMock()
    parts.configure_mock(**{f"{failing}.side_effect": OSError("no such thing")})
    with pytest.raises(ValueError, match="the user's"), opened(parts):
        raise ValueError("the user's")
    assert released(parts) == RELEASED
    told = "resilient_train: rank 3: the Session is closed, but for OSError('no such thing')\n"
    assert capsys.readouterr().err == told


def test_without_one_the_first_failure_of_the_release_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    parts = MagicMock()
    parts.window.detach.side_effect = OSError("the first")
    parts.sink.close.side_effect = OSError("the second")
    with pytest.raises(OSError, match="the first"), opened(parts):
        pass
    assert released(parts) == RELEASED
    assert capsys.readouterr().err.count("the second") == 1


def test_who_ends_the_process_in_the_release_does_so_behind_it() -> None:
    parts = MagicMock()
    parts.stop_delivery.close.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), opened(parts):
        raise ValueError("the user's")
    assert released(parts) == RELEASED


def test_sigterm_is_given_back_by_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python gives a signal back in the main thread only, where the Session need not be closed."""
    left = MagicMock()
    monkeypatch.setattr(stop_delivery, "leave_terminate", left)
    closed = StopDelivery.__new__(StopDelivery)
    closed.interrupt, closed._thread, closed._report, closed._watchdog = left.interrupt, left, left.report, left.dog
    left.is_alive.return_value = False
    left.interrupt.remove.side_effect = ValueError("signal only works in main thread")
    with pytest.raises(ValueError, match="main thread"):
        closed.close()
    assert left.called
    assert left.dog.stop.called
