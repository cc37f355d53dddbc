"""What a training loop keeps from one step to the next by its own variables, read from its text.

``ema = 0.9 * ema + 0.1 * loss.item()``: a step reads what the one before has written. A process that takes a rank's
place begins such a variable anew, and a step that runs again changes it twice. Most are counters for people, so nobody
is refused for one: they are told by name, behind the first fault. Tensors that flow into a gradient are looked for, and
refused, elsewhere (``frameworks/torch/checks/flowing.py``).

Compilers call a variable so that an iteration reads before it writes it. This is that analysis, of the loop around
``session.steps()`` and of the user's functions that it calls, as if their text stood in it: of what a function keeps
there are its globals, the variables of functions around it, and attributes of objects that have a name (``self``). A
branch that is never taken counts. Iterators and random number generators are counted too: to use one is to change it;
and tensors and containers that a step changes in place, if it reads anything of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import CO_ASYNC_GENERATOR, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any, NamedTuple

from resilient_train import script_place
from resilient_train.frame_variables import variables
from resilient_train.session.reading.flow import Flow
from resilient_train.session.reading.known_objects import KnownObjects, Registration, Settled
from resilient_train.session.reading.names import Loop, loops_at, names_behind, statement_at
from resilient_train.session.reading.outer_loop import Made, was_around
from resilient_train.session.reading.scope import Key, Scope
from resilient_train.session.reading.static_lookup import (
    Texts,
    all_parts,
    functions_of,
    held,
    hooks_of,
)
from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_calls import BodyCall

_TOLD = 20
_STEP = "training_step"
"""Of a Lightning module."""


class LoopCarried(NamedTuple):
    """Variables as they are written there; ``place`` is FILE:LINE of the loop, or of the body."""

    names: tuple[str, ...]
    place: str

    def told(self) -> str:
        """For people, whose training may not care."""
        some, left = ", ".join(self.names[:_TOLD]), len(self.names[_TOLD:])
        some += f" and {left} more (in events.jsonl)" if left else ""
        return (
            f"the code at {self.place} keeps {some} from step to step, and the Session does not know of it: a process "
            "that takes a rank's place begins anew there, and a step that runs again changes it twice. If the training "
            "depends on it, register it (docs/how-to/load-data.md, What is found of what flows). There may be more: "
            "`resilient-train drill` finds what differs"
        )


def loop_carried(
    frame: FrameType,
    known: Iterable[object],
    models: Iterable[object] = (),
    settled: Settled = (),
    loaders: Iterable[object] = (),
    *,
    loops: Sequence[Loop] | None = None,
    texts: Texts | None = None,
    seen: set[Key] | None = None,
) -> LoopCarried | None:
    """Of the loops that run in ``frame``, or these ``loops`` of them; None if they keep nothing, or their text can't be
    read. ``known`` objects, and what is written as theirs, are left out; so are ``models``, but for numbers in their
    attributes, which no ``state_dict()`` has, and which are not in ``settled``. ``loaders`` read what they reach. To
    ``seen`` is added what the text writes.
    """
    found, texts = None, texts or Texts()
    registered = KnownObjects(known, models, settled, loaders)
    for loop in reversed(loops_at(frame, texts) if loops is None else loops):
        flow = Flow(Scope(frame.f_code, frame.f_globals, {**frame.f_globals, **variables(frame)}), registered, texts)
        flow.behind = names_behind(loop, frame, texts)
        found = and_also(found, _carried_by(loop, flow, frame.f_code.co_filename, seen))
    return found


def _carried_by(loop: Loop, flow: Flow, file: str, seen: set[Key] | None) -> LoopCarried | None:
    return _told_of(flow, lambda: flow.run_loop(loop), f"{file}:{loop.lineno}", seen)


def body_carried(
    body: Callable[..., Any],
    known: Iterable[object],
    models: Iterable[object] = (),
    settled: Settled = (),
    *,
    given: Mapping[str, Any] | None = None,
    texts: Texts | None = None,
    seen: set[Key] | None = None,
) -> LoopCarried | None:
    """The same, of a function that is called for each step; what stands around it runs once. Of a library's trainer it
    is not the user's: then of what the models have for it. ``given``: what its parameters stand for in each call.
    """
    found = functions_of(body)
    for part in (part for model in models for part in all_parts(model)) if not found else ():
        found += [*hooks_of(part), *functions_of(held(part, _STEP), part), *functions_of(part)]
    if not found:
        return None
    code = found[0].function.__code__
    scope, registered = Scope(code, found[0].function.__globals__, {}), KnownObjects(known, models, settled)
    flow = Flow(scope, registered, texts or Texts(), given)
    return _told_of(flow, lambda: flow.follow(found), f"{code.co_filename}:{code.co_firstlineno}", seen)


def carried_at(
    frames: Sequence[FrameType],
    made: Made,
    own: Registration,
    loader: object,
    texts: Texts,
    call: BodyCall | None,
    again: GivenAgain | None,
    seen: set[Key],
) -> LoopCarried | None:
    """Of the loops in ``frames``, the innermost first, in which a step is made; of a ``call`` its body too, and what
    calls are given ``again``. Those around the place where the Session was ``made`` are left out. ``seen``: see
    ``loop_carried``.
    """
    found = None
    for frame, loops in _around(frames, made, texts):
        found = and_also(found, loop_carried(frame, *own, [loader], loops=loops, texts=texts, seen=seen))
    if call is not None and again is not None:
        found = and_also(found, body_carried(call.body, *own, given=again.lasting(call), texts=texts, seen=seen))
        if again.results:
            found = and_also(found, LoopCarried(("what session.call returns",), script_place.line()))
    return found


def _around(frames: Sequence[FrameType], made: Made, texts: Texts) -> list[tuple[FrameType, list[Loop]]]:
    """The loops around a step. The function that draws it may have one of its own (``logger.log_every(steps)``), and be
    called in that of the training; or there is none, and a statement goes through all (``sum(map(train, steps))``).
    """
    around = [[each for each in loops_at(frame, texts) if not was_around(each, frame, made)] for frame in frames]
    trains = [number for number, frame in enumerate(frames) if not _hands_on(frame.f_code)]
    if trains and not any(around[number] for number in trains):
        around[trains[0]] = statement_at(frames[trains[0]], texts)
    return [(frame, loops) for frame, loops in zip(frames, around, strict=True) if loops]


def _hands_on(code: CodeType) -> bool:
    """It is a generator's, or a comprehension's."""
    is_generator = code.co_flags & (CO_GENERATOR | CO_ASYNC_GENERATOR)
    return bool(is_generator) or (code.co_name.startswith("<") and code.co_name != "<module>")


def and_also(found: LoopCarried | None, more: LoopCarried | None) -> LoopCarried | None:
    """Both, at the place of the first."""
    if found is None or more is None:
        return found or more
    return found._replace(names=tuple(dict.fromkeys((*found.names, *more.names))))


def _told_of(flow: Flow, run: Callable[[], None], place: str, seen: set[Key] | None) -> LoopCarried | None:
    try:
        run()
    except RecursionError:  # an expression of hundreds of parts
        return None
    finally:
        if seen is not None:
            seen |= flow.seen()
    names = flow.carried()
    return LoopCarried(tuple(sorted(names)), place) if names else None
