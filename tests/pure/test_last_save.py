"""What counts as one request to end, and what as a second one."""

import signal
from typing import Any

import pytest

from resilient_train.launch.agent import repeated_signal
from resilient_train.launch.agent.last_save import LastSave


class Controller:
    def __init__(self) -> None:
        self.left: list[str] = []

    def leave(self, _code: int, reason: str) -> list[Any]:
        self.left.append(reason)
        return []


@pytest.mark.parametrize(
    ("second", "after_s", "requests"),
    [
        (("the launcher", signal.SIGTERM), 0.5, 1),
        (("rank 0", signal.SIGTERM), 0.0, 1),
        (("rank 0", signal.SIGTERM), 1.5, 2),
        (("the launcher", signal.SIGTERM), 1.5, 2),
        (("the launcher", signal.SIGHUP), 0.0, 2),
    ],
)
def test_a_signal_to_all_processes_is_one_request(
    second: tuple[str, int], after_s: float, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(repeated_signal.time, "monotonic", lambda: now_s)
    controller: Any = Controller()
    nothing: Any = None
    save = LastSave(nothing, controller, nothing, (), nothing)
    save.asked("rank 0", signal.SIGTERM)
    now_s += after_s
    save.asked(*second)
    assert len(controller.left) == requests
