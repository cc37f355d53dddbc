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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import CO_GENERATOR
from types import FrameType
from typing import Any, NamedTuple

from resilient_train import script_place
from resilient_train.frame_variables import variables
from resilient_train.session.reading.flow import Flow
from resilient_train.session.reading.known_objects import KnownObjects, Registration, Settled
from resilient_train.session.reading.names import Loop, loops_at, names_behind
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
    each: bool = False,
    texts: Texts | None = None,
    seen: set[Key] | None = None,
) -> LoopCarried | None:
    """Of the innermost loop that runs in ``frame`` (of ``each`` one); None if it keeps nothing, or its text can't be
    read. ``known`` objects, and what is written as theirs, are left out; so are ``models``, but for numbers in their
    attributes, which no ``state_dict()`` has, and which are not in ``settled``. ``loaders`` read what they reach. To
    ``seen`` is added what the text writes.
    """
    found, texts = None, texts or Texts()
    loops, registered = loops_at(frame, texts), KnownObjects(known, models, settled, loaders)
    for loop in reversed(loops if each else loops[-1:]):
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
    own: Registration,
    loader: object,
    texts: Texts,
    call: BodyCall | None,
    again: GivenAgain | None,
    seen: set[Key],
) -> LoopCarried | None:
    """Of the loop in ``frames``, the innermost first, that draws the steps; or of all that are around the ``call``, of
    its body too, and of what calls are given ``again``. ``seen``: see ``loop_carried``.
    """
    found, each = None, call is not None
    for frame in _of_loops(frames, texts, each=each):
        found = and_also(found, loop_carried(frame, *own, [loader], each=each, texts=texts, seen=seen))
    if call is not None and again is not None:
        found = and_also(found, body_carried(call.body, *own, given=again.lasting(call), texts=texts, seen=seen))
        if again.results:
            found = and_also(found, LoopCarried(("what session.call returns",), script_place.line()))
    return found


def _of_loops(frames: Sequence[FrameType], texts: Texts, *, each: bool) -> Iterator[FrameType]:
    """Those in whose loops a step is made. A function that hands the steps on (``logger.log_every(session.steps(n))``)
    draws them in a loop of its own, and the step is made in that of its caller.
    """
    for frame in frames:
        if loops_at(frame, texts):
            yield frame
            if not each and not frame.f_code.co_flags & CO_GENERATOR:
                return


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
