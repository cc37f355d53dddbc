"""A pause, as the script of a rank sees it: it can ask for one, and have functions called while all ranks stand still.

Questions go to the agent over a connection of their own, as a command's do: any thread may ask, at any time. Who asks
in a step asks on all ranks, and again when the step runs again; so what is asked for names the step, and asking twice
is asking once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from resilient_train.config import AgentLink
from resilient_train.errors import ProtocolError
from resilient_train.frameworks.roles import Data, Drill
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol import messages as m
from resilient_train.transport import Channel

_TOLD = 3
"""So many names stand in a sentence."""
OnPause = Callable[[int], object]
"""Gets the number of the step before which all ranks stand."""


class ScriptPauses:
    """``slow`` keeps the hang watch away, ``event`` writes an event of this rank."""

    def __init__(
        self,
        agent: AgentLink,
        drill: Drill,
        data: Data,
        slow: Callable[[str], AbstractContextManager[None]],
        event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._agent = agent
        self._drill, self._data = drill, data
        self._slow = slow
        self._event = event
        self._functions: list[OnPause] = []
        self._refused = False

    def add(self, function: OnPause) -> None:
        """It is called in each pause from now on."""
        self._functions.append(function)

    def ask(self, step: int) -> None:
        """All ranks are to stop before ``step``. Told once where that is switched off."""
        if (refusal := self._ask(m.Pause(step, self._agent.rank))) and not self._refused:
            self._refused = True
            say_aside(f"rank {self._agent.rank}: session.pause() has no effect: {refusal}")

    def end(self, generation: int) -> None:
        """The pause of that generation, or what was asked for in it, is to end."""
        self._ask(m.Unpause(generation))

    def _ask(self, question: m.Pause | m.Unpause) -> str:
        channel = Channel(self._agent.socket)
        try:
            channel.send(m.Hello("operator"))
            channel.send(question)
            reply = channel.receive()
        finally:
            channel.close()
        if not isinstance(reply, m.Reply):
            raise ProtocolError(f"the agent answered {type(reply).__name__} instead of Reply")
        return reply.error

    def stand(self, step: int) -> str:
        """All ranks stand before ``step``: calls the functions. What is wrong with what they did; empty if nothing is.

        An exception of one is told, and costs nothing else: the functions have no part in the training.
        """
        if not self._functions:
            return ""
        with self._slow("on_pause"):
            held, random = self._drill.parts({}), self._data.random_state()
            for function in self._functions:
                self._call(function, step)
            self._data.restore_random_state(random)
            now = self._drill.parts({})
        if not (changed := [name for name in held | now if held.get(name) != now.get(name)]):
            return ""
        # Called again, behind a fault in the pause, it would change the same twice; and a new process never has.
        some = ", ".join(changed[:_TOLD]) + (f" and {len(changed) - _TOLD} more" if changed[_TOLD:] else "")
        return (
            f"rank {self._agent.rank}: a function of session.on_pause has changed {some} before step {step}: in a "
            "pause what is registered may be read, and not be written"
        )

    def _call(self, function: OnPause, step: int) -> None:
        try:
            function(step)
        except Exception as error:
            traceback.print_exc()
            self._event("on_pause_failed", {"error": f"{type(error).__name__}: {error}"})
            say_aside(f"rank {self._agent.rank}: a function of session.on_pause has failed: {error!r}")
