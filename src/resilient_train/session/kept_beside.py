"""What a script keeps from step to step beside the Session: told by rank 0, behind each recovery, each name once.

Two things find it: the text of the loop (``reading/flow.py``), and what the script's objects hold behind two steps
(``reading/script_contents.py``). For the second, each process of rank 0 looks once behind its first step, which costs
20 to 30 ms, and once more when it tells. It does so behind later recoveries too: what begins to change late (behind a
warm-up), or in another loop, was not there to be told of before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from resilient_train import script_place
from resilient_train.exception_line import short
from resilient_train.frameworks.roles import Objects, Window
from resilient_train.session.notices import Notices
from resilient_train.session.reading.known_objects import KnownObjects, own_of
from resilient_train.session.reading.loop_carried import LoopCarried, and_also, carried_at
from resilient_train.session.reading.outer_loop import made_here
from resilient_train.session.reading.scope import Key
from resilient_train.session.reading.script_contents import HeldPart, ScriptContents, changed, contents_of
from resilient_train.session.reading.static_lookup import Texts, can_change, is_object, reached_from
from resilient_train.session.redo.given_again import GivenAgain
from resilient_train.session.redo.kept_calls import BodyCall
from resilient_train.session.redo.loader import Cursor

T = TypeVar("T")
_ENTRY = re.compile(r"\[[^\]]*\]")


class KeptBeside:
    """Of one process."""

    def __init__(self, notices: Notices, objects: Objects, cursor: Cursor, window: Window) -> None:
        self._notices, self._objects, self._cursor, self._window = notices, objects, cursor, window
        self._made = made_here()
        self._first: ScriptContents | None = None
        self._has_looked = self._is_due = False
        """``_is_due``: there was a recovery, of which not all is told."""
        self._told = set[str]()

    def step_made(self, call: BodyCall | None, again: GivenAgain | None, *, recovered: bool) -> None:
        """The loop stands behind a step, of its own or made by that ``call``. ``recovered``: since the last one a rank
        was replaced, or a step has run again.
        """
        self._is_due |= recovered
        if not self._notices.is_speaker or (self._has_looked and not self._is_due):
            return
        frames, texts, seen = [*script_place.frames()], Texts(), set[Key]()
        is_first, self._has_looked = not self._has_looked, True
        if is_first:
            self._first = self._tried(lambda: contents_of(frames, self._is_read()))
        if not self._is_due:
            return
        self._is_due = is_first  # a new process is told of by its text; with the next step there are two looks
        if not frames:
            return
        own = self._tried(lambda: own_of(self._objects, self._cursor.sources(), self._window.settled(), texts))
        if own is None:
            return
        loader, first = self._cursor.loader, self._first
        found = self._tried(lambda: carried_at(frames, self._made, own, loader, texts, call, again, seen))
        if not is_first and first is not None:
            more = self._tried(lambda: self._changed(first, frames, KnownObjects(*own, [loader]), seen))
            found = and_also(found, more)
        self._tell(found)

    def _tried(self, read: Callable[[], T]) -> T | None:
        """A text or an object that it does not understand is no reason to end a job that goes on."""
        try:
            return read()
        except Exception as error:
            self._unread(f"{type(error).__name__}: {error}")
            return None

    def _unread(self, why: str) -> None:
        if why in self._told:
            return
        self._told.add(why)
        self._notices.event("loop_unread", {"error": why})
        self._notices.say(
            f"some of what this script keeps from step to step could not be found out ({short(why)}), so nothing is "
            "told of it: `resilient-train drill` finds what differs (docs/how-to/load-data.md, What is found of what "
            "flows)"
        )

    def _is_read(self) -> Callable[[HeldPart], bool]:
        """What a loader reaches is a loader's."""
        read = {id(each) for each in reached_from(self._cursor.sources()) if _is_itself(each)}
        return lambda part: id(part.value) in read

    def _changed(
        self, first: ScriptContents, frames: list[FrameType], known: KnownObjects, seen: set[Key]
    ) -> LoopCarried | None:
        is_read = self._is_read()
        now = contents_of(frames, lambda part: is_read(part) or _is_settled(part, known, seen))
        if now.unread:
            self._unread("; ".join(now.unread))
        names = changed(first, now)
        return LoopCarried(tuple(names), script_place.line()) if names else None

    def _tell(self, found: LoopCarried | None) -> None:
        if found is not None and (news := tuple(each for each in found.names if _place(each) not in self._told)):
            self._told |= {*map(_place, news)}
            self._notices.carried(found._replace(names=news))


def _place(name: str) -> str:
    """Of entries all are one: a list of objects may have others that change each time."""
    return _ENTRY.sub("[]", name)


def _is_settled(part: HeldPart, known: KnownObjects, seen: set[Key]) -> bool:
    """The Session carries it, or its text was read."""
    is_read = _is_itself(part.value) and ((id(part.value), "") in seen or id(part.value) in known.read)
    return is_read or (id(part.holder), part.key) in seen or known.carries(part.holder, part.key, part.value)


def _is_itself(value: object) -> bool:
    """Not so of small numbers, of which Python has one each."""
    return can_change(value) or is_object(value)
