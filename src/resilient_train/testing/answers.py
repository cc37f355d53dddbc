"""What a rank machine was seen to answer: for a pair of a state and an event the effects, and the state that follows.

``tests/sim/answers.txt`` lists what simulated jobs come to. A real process comes to nothing else (``replay.py``).
"""

from __future__ import annotations

from typing import Any

import msgspec

from resilient_train.protocol import rank_events as on
from resilient_train.protocol.messages import Plan, SaveLast
from resilient_train.protocol.rank import WAITS_IN_CODE, At, Effects, MachineState, Rank


def kind_of(state: MachineState) -> str:
    """The state's class and what tells its behaviour from that of others of its class."""
    told = []
    for name in state.__struct_fields__:
        value = getattr(state, name)
        if isinstance(value, At):
            told.append(value.name)
        elif name != "plan" and value:
            told.append(type(value).__name__ if isinstance(value, msgspec.Struct) else name)
    return type(state).__name__ + (f"({','.join(told)})" if told else "")


def kind_of_event(event: Any, state: MachineState) -> str:
    """The event's class and what the rows of ``state`` look at in it."""
    told: list[str] = []
    match event:
        case on.Exit(how=how) if not isinstance(state, WAITS_IN_CODE):
            told.append(how)
        case Plan(last=True):
            told.append("last")
        case SaveLast(part=-1):
            told.append("no part")
    told += [name for name in ("stopped", "pauses", "damaged", "lost", "over") if getattr(event, name, False)]
    return type(event).__name__ + (f"({','.join(told)})" if told else "")


def answer_of(before: MachineState, event: Any, effects: Effects, after: MachineState) -> str:
    """``state + event: effects -> state``, in words."""
    did = " ".join(type(effect).__name__ for effect in effects)
    return f"{kind_of(before)} + {kind_of_event(event, before)}: {did} -> {kind_of(after)}"


def answering(seen: set[str]) -> type[Rank]:
    """A rank machine that adds all that it answers."""

    class Answering(Rank):
        __slots__ = ()

        def on(self, event: Any) -> Effects:
            before = self.state
            effects = super().on(event)
            seen.add(answer_of(before, event, effects, self.state))
            return effects

    return Answering
