"""What MindSpore's unmodified callback says to ``mindio_ttp``, said again to ours: it answers and orders the same.

``mindspore_calls.json`` is written by ``tests/on_mindspore/recorder.py``, which says what an event is. Each process of
a recorded job is a thread here, with functions of its own; handlers do what the recorded ones did.
"""

from __future__ import annotations

import importlib.util
import json
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest

from resilient_train.integrations.mindio import c_api, provided

JOBS = json.loads(Path(__file__).with_name("mindspore_calls.json").read_text())
LIMIT_S = 20
FAULTS = (2, 4, 8)  # RS_UCE, RS_HCCL_FAILED, RS_UNKNOWN


def mindx(*_: Any) -> int:
    """MindSpore's stand-in, in a rank: nobody calls it."""
    raise AssertionError


class Process:
    """``wrong``: what was answered or ordered otherwise than in the recording."""

    def __init__(self, rank: int, events: list[Any], job: Job) -> None:
        self.rank, self.events, self.job = rank, events, job
        self.wrong: list[str] = []
        self._tft: Any = functions_of_its_own()
        self._changed = threading.Condition()
        self._told = [index for index, event in enumerate(events) if event[1] == "told"]
        self._begun, self._ended = 0, 0
        self._awaited: tuple[int, int] | None = None
        """So many handlers are to have begun, and to have ended, before its training thread does more."""
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            for index, (thread, what, *_) in enumerate(self.events):
                if (thread, what) == ("main", "call"):
                    self._wait_for_handlers(self.events[:index])
                    self._call(index)
            self._wait_for_handlers(self.events)
        except Exception:
            self.wrong.append(traceback.format_exc())

    def _wait_for_handlers(self, before: list[Any]) -> None:
        """Those that had been called by then, and had come to their ends."""
        begun = sum(what == "told" for _, what, *_ in before)
        ended = sum(what in ("did", "raised") for _, what, *_ in before)
        with self._changed:
            self._awaited = begun, ended
            self._changed.notify_all()
            come = self._changed.wait_for(lambda: not self._hangs(), LIMIT_S)
            self._awaited = None
        assert come, f"{begun} handlers had been called and {ended} had ended, here {self._begun} and {self._ended}"

    def _hangs(self) -> bool:
        return self._awaited is not None and (self._begun < self._awaited[0] or self._ended < self._awaited[1])

    def hang(self) -> None:
        """Waits until its training thread is where only a fault of another rank's frees it: in a collective."""
        with self._changed:
            assert self._changed.wait_for(self._hangs, LIMIT_S), f"rank {self.rank} is in no collective"

    def _call(self, index: int) -> None:
        thread, _, name, given, named = self.events[index]
        if name.startswith("tft_start_"):
            given = [given[0], self.job.port_of(name), *given[2:]]
        if name.startswith("tft_register_") and name.endswith("_handler"):
            given = [self._handler(name.removeprefix("tft_register_").removesuffix("_handler")), *given[1:]]
        if name == "tft_register_mindx_callback":
            given = [given[0], mindx]
        if name == "tft_report_error" and given[0] in FAULTS:
            self.job.hang_but(self.rank)
        result = getattr(self._tft, name)(*given, **named)
        if name == "tft_init_processor":
            self._tft._processor._end = lambda _: None
        if name == "tft_start_controller":
            self.job.listens(self._tft._hub._hub.port)
        expected = [[thread, "returned", name, result]]
        recorded = [event for event in self.events[index + 1 :] if event[0] == thread][:1]
        if recorded and recorded != expected:  # a process that was ended in the call has recorded nothing
            self.wrong.append(f"rank {self.rank}, event {index}: {expected}, and not {recorded}")

    def _handler(self, name: str) -> Any:
        def handle(*given: Any) -> Any:
            with self._changed:
                index = self._told[self._begun] if self._begun < len(self._told) else len(self.events)
                self._begun += 1
                self._changed.notify_all()
            recorded = self.events[index : index + 1]
            if recorded != [[name, "told", name, json.loads(json.dumps(given))]]:
                self.wrong.append(f"rank {self.rank}, event {index}: {name}{given}, and not {recorded}")
            result = None
            for later, (thread, what, *values) in enumerate(self.events[index + 1 :], index + 1):
                if thread == name and what == "call":
                    self._call(later)
                elif thread == name and what in ("did", "raised"):
                    result = what, values[1]
                    break
            with self._changed:
                self._ended += 1
                self._changed.notify_all()
            if result and result[0] == "raised":
                raise RuntimeError(f"as {result[1]} in the recording")
            return result[1] if result else None

        return handle

    def dies(self) -> None:
        """As by a signal: its connection ends."""
        self._tft._processor._over = True
        self._tft._processor._socket.close()


class Job:
    def __init__(self, recorded: dict[str, Any]) -> None:
        self._port = 0
        self._listens = threading.Event()
        self._living: dict[int, Process] = {}
        self.processes = [Process(each["rank"], each["events"], self) for each in recorded["processes"]]

    def listens(self, port: int) -> None:
        self._port = port
        self._listens.set()

    def port_of(self, name: str) -> int:
        """Any, for the controller."""
        if name == "tft_start_processor":
            assert self._listens.wait(LIMIT_S)
        return self._port

    def hang_but(self, rank: int) -> None:
        """A fault comes when the others have done all that they had to do before it."""
        for process in list(self._living.values()):
            if process.rank != rank:
                process.hang()

    def run(self) -> list[str]:
        """Returns all that was wrong."""
        for process in self.processes:
            if (before := self._living.get(process.rank)) is not None:  # in whose place it came
                before.thread.join(LIMIT_S)  # its recording ends where it was killed
                self.hang_but(process.rank)
                before.dies()
            self._living[process.rank] = process
            process.thread.start()
        for process in self.processes:
            while process.thread.is_alive() and not self.wrong():  # then others may wait for what never comes
                process.thread.join(0.05)
        return self.wrong()

    def wrong(self) -> list[str]:
        return [wrong for process in self.processes for wrong in process.wrong]


def functions_of_its_own() -> Any:
    """``mindio_ttp`` is one controller and one processor in a process."""
    spec = importlib.util.spec_from_file_location("provided_again", provided.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("recorded", JOBS, ids=[job["plan"] for job in JOBS])
def test_it_answers_and_orders_what_it_did(monkeypatch: pytest.MonkeyPatch, recorded: dict[str, Any]) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", recorded["switches"])
    monkeypatch.setattr(c_api, "connect", lambda *_: None)  # C code has one processor for all threads
    monkeypatch.setattr(c_api, "disconnect", lambda: None)
    job = Job(recorded)
    wrong = job.run()
    assert not wrong, "\n".join(wrong)
