"""``at_each_line.py SCRIPT PARTS ...``: one of the scripts here, with a fault at each line of torch's that a body runs.

PARTS: the first parts of the paths of modules, as in ``torch/distributed/fsdp,torch/nn/parallel``. In every so many
steps one rank, each in its turn, says that a collective has failed where its body comes to a line at which it has had
no fault yet, and waits there until the stop is known. Then it does what the signal's handler does with the frame of
that line. At its end a rank writes where it had one: ``lines_RANK.json`` in the run directory.
"""

import json
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import resilient_train as rt
from resilient_train.config import read_link
from resilient_train.interrupt import SIGNAL
from resilient_train.protocol.messages import Trouble

EVERY = 6
"""Steps from one fault to the next: what fails 20 times within 100 updates is not rebuilt any more."""
script, parts = sys.argv[1], tuple(sys.argv[2].split(","))
link = read_link()
assert link is not None
steps, call = rt.Session.steps, rt.Session.call
seen: set[tuple[str, int]] = set()
traced: dict[str, bool] = {}


class Line:
    """The one at which this step is cut."""

    def __init__(self, session: Any) -> None:
        self._driver = session._driver
        self.place: tuple[str, int] | None = None

    def of_call(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Which functions are looked at."""
        name = frame.f_code.co_filename
        if name not in traced:
            traced[name] = any(f"/site-packages/{part}" in name for part in parts)
        return self.of_line if traced[name] and self.place is None else None

    def of_line(self, frame: FrameType, event: str, _argument: object) -> Any:
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and place not in seen and self.place is None and self._driver._stop_delivery.interrupt.armed:
            seen.add(place)
            self.place = place
            self._cut(frame)
        return self.of_line

    def _cut(self, frame: FrameType) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
        try:
            generation = self._driver._rank.generation
            self._driver._link.channel.send(Trouble(generation, "a fault on request"))
            assert self._driver._peers.wait_stop(generation, 20_000)
            # Where it raises is where this function stands: in the place of the line that was to run.
            self._driver._stop_delivery.interrupt._on_signal(SIGNAL, frame)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def trace(session: Any, number: int) -> None:
    """A step begins. The first bodies too: what is made at the first use is made there."""
    turn, rest = divmod(number, EVERY)
    if not rest and turn % int(os.environ["WORLD_SIZE"]) == link.rank:
        sys.settrace(Line(session).of_call)


def disturbed(self: Any, *args: Any, **kwargs: Any) -> Iterator[rt.Step]:
    for step in steps(self, *args, **kwargs):
        if not step.attempt:
            trace(self, step.number)
        yield step
        sys.settrace(None)


def called(self: Any, *args: Any, **kwargs: Any) -> Any:
    trace(self, self.position.step)
    try:
        return call(self, *args, **kwargs)
    finally:
        sys.settrace(None)


rt.Session.steps, rt.Session.call = disturbed, called
sys.argv[:] = [str(Path(__file__).parent / script), *sys.argv[3:]]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    Path(os.environ["RESILIENT_RUN_DIR"], f"lines_{link.rank}.json").write_text(json.dumps(sorted(seen)))
