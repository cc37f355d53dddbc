"""``session.call``: for loops that own their step, and give its body to the Session as a function.

The machine is that of ``with step:``. A body that a fault has cut is left by an exception, as there; but then nothing
of the user's runs on behind it: ``call`` asks for the step again and calls the body again, with the same arguments.

Where gradients are accumulated the bodies before it in the window have returned long since, and their gradients are
gone with the fault; so all calls of the window are kept until its update, and all are made again. What stands between
them in the loop is not: a rank that was cut in its third body does not run it, and one that was in its second does. So
collectives there are refused.

A rank whose update was torn, and that has copied it from another one, stands behind a body that it can neither finish
nor run again: ``driver.py`` ends its process, and a new one begins behind it.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from resilient_train.errors import UsageError
from resilient_train.protocol.rank_effects import Mode
from resilient_train.session.driver import Driver
from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_calls import BodyCall, KeptCall
from resilient_train.session.redo.randomness import BodiesRandom
from resilient_train.session.step import Step

ENDLESS = sys.maxsize
"""The loop alone knows how many there will be."""


class Position(NamedTuple):
    """Where the loop stands. A process that takes a place in a running job begins there."""

    step: int
    """The number of the next call, or of the one that runs: from 0, over the whole training."""
    over: bool = False
    """All other ranks have left their loops: there is nothing left to do but to leave this one."""


class Calls:
    """The calls of one rank under an agent."""

    def __init__(self, driver: Driver, random: BodiesRandom) -> None:
        self._driver = driver
        self._random = random
        self._window = driver.kept_calls = list[KeptCall]()
        self._met: Step | None = None
        """The first step, asked for by ``position`` and not entered yet."""
        self._failed = -1
        """The step whose body an exception has left before its update."""
        self._held = False
        """The loop's collectives don't reach the other ranks at present."""
        self._again = GivenAgain()
        driver.calling = True

    def position(self) -> Position:
        """See ``Session.position``. The first time this rank meets the others here."""
        if not self._driver.begun:
            with self._random:
                self._met = self._driver.next_step(ENDLESS)
                if self._met is not None:
                    self._driver.head_begins()
            if self._driver.joined_late:  # the others are in a body already, and answer nobody
                self._set_mode(Mode.LOOPBACK)
        return Position(self._driver.number, self._driver.over)

    def make(self, call: BodyCall) -> Any:
        """Calls the body, and again where a fault has cut it; its result, of the time that counts."""
        if self._failed >= 0:
            raise UsageError(
                f"the body of step {self._failed} was left by an exception before its update, and session.call() was "
                "called again: what that body has left half-done can't be told from what a redo must bring back"
            )
        kept = KeptCall(call, self._driver.look)
        if not self._window:
            self._driver.announces(kept.look(plain=False))
        self._window.append(kept)
        self._again.begin(call)
        try:
            with self._random:
                result = self._make_all()
            self._again.end(call, result)
            if self._again.known:
                self._driver.step_made(call, self._again)
            if self._driver.window_open:
                self._set_mode(Mode.BETWEEN)
            return result
        except BaseException:
            self._failed = self._driver.number if self._driver.window_open else -1
            raise
        finally:
            if not self._driver.window_open:
                self._window.clear()

    def _make_all(self) -> Any:
        """The newest call, and before it those that a fault has undone."""
        step, made = self._first(), len(self._window) - 1
        while step is not None:
            place = self._driver.place
            with step:
                if place < made and self._window[place].has_changed():
                    self._driver.gets_other_arguments()
                made = max(made, place + 1)
                result = self._window[place].make()
            if step.done and place + 1 == len(self._window):
                return result
            if step.done and not self._driver.window_open:
                raise UsageError(
                    f"body {place + 1} of {len(self._window)} has updated when it ran again, and had not before: what "
                    "decides that must be handed over as an argument (docs/how-to/trainers.md)"
                )
            step = self._driver.next_step(ENDLESS)
        raise UsageError(
            "session.call() was called when all other ranks had left their loops: ask session.position.over before the "
            "first call"
        )

    def _first(self) -> Step | None:
        self._loop_waits()
        step, self._met = self._met, None
        if step is None:
            return self._driver.next_step(ENDLESS)
        self._driver.head_ends()
        return step

    def _set_mode(self, mode: Mode) -> None:
        self._driver.set_mode(mode)
        self._held = mode is not Mode.DIRECT

    def _loop_waits(self) -> None:
        """What stands between two calls is over."""
        if self._held:
            self._set_mode(Mode.DIRECT)

    def close(self, error: BaseException | None) -> None:
        """The loop is over."""
        self._loop_waits()
        with self._random:
            self._driver.close(error)


class PlainCalls:
    """Without an agent: the body is called."""

    def __init__(self, random: BodiesRandom) -> None:
        self._random = random
        self._number = 0
        self._begun = False

    def position(self) -> Position:
        """See ``Session.position``."""
        if not self._begun:
            self._begun = True
            with self._random:  # the bodies' stream begins here, as it does under an agent
                pass
        return Position(self._number)

    def make(self, call: BodyCall) -> Any:
        """Calls the body."""
        self._begun = True
        with self._random:
            result = call.make()
        self._number += 1
        return result
