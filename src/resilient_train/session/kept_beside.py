"""What a script keeps from step to step beside the Session: told by rank 0, behind the first recovery.

Two things find it: the text of the loop (``reading/flow.py``), and what the script's objects hold behind two steps
(``reading/script_contents.py``). For the second, each process of rank 0 looks once behind its first step, which costs
some milliseconds, and once more when it tells.
"""

from __future__ import annotations

from resilient_train import script_place
from resilient_train.frameworks.roles import Objects, Window
from resilient_train.session.given_again import GivenAgain
from resilient_train.session.kept_calls import BodyCall
from resilient_train.session.loader import Cursor
from resilient_train.session.notices import Notices
from resilient_train.session.reading.known_objects import KnownObjects, own_of
from resilient_train.session.reading.loop_carried import LoopCarried, and_also, carried_at
from resilient_train.session.reading.scope import Key
from resilient_train.session.reading.script_contents import HeldPart, ScriptContents, changed, contents_of
from resilient_train.session.reading.static_lookup import Texts, reached_from


class KeptBeside:
    """Of one process."""

    def __init__(self, notices: Notices, objects: Objects, cursor: Cursor, window: Window) -> None:
        self._notices, self._objects, self._cursor, self._window = notices, objects, cursor, window
        self._first: ScriptContents | None = None
        self._told: tuple[str, ...] = ()
        self._ends = not notices.is_speaker
        """There is nothing more to tell."""

    def step_made(self, call: BodyCall | None, again: GivenAgain | None, *, recovered: bool) -> None:
        """The loop stands behind a step, of its own or made by that ``call``. ``recovered``: a rank was replaced, or a
        step has run again.
        """
        if self._ends or (self._first is not None and not recovered):
            return
        try:
            found = self._look(call, again, recovered=recovered)
        except Exception as error:  # a text that it does not understand is no reason to end a job that goes on
            self._ends = True
            self._notices.event("loop_unread", {"error": f"{type(error).__name__}: {error}"})
            return
        if found and set(found.names) - set(self._told):
            news = tuple(each for each in found.names if each not in self._told)
            self._told += news
            self._notices.carried(found._replace(names=news))

    def _look(self, call: BodyCall | None, again: GivenAgain | None, *, recovered: bool) -> LoopCarried | None:
        frames = [*script_place.frames()]
        if not frames:
            self._ends = True
            return None
        read = {id(each) for each in reached_from(self._cursor.sources())}
        first, self._first = self._first, self._first or contents_of(frames, lambda part: id(part.value) in read)
        if not recovered:
            return None
        texts, seen = Texts(), set[Key]()
        own = own_of(self._objects, self._cursor.sources(), self._window.settled(), texts)
        found = carried_at(frames[0], own, self._cursor.loader, texts, call, again, seen)
        if first is None:  # a new process is told of by its text; with the next step there are two looks
            return found
        self._ends = True
        known = KnownObjects(*own, [self._cursor.loader])
        names = changed(
            first, contents_of(frames, lambda part: id(part.value) in read or _is_settled(part, known, seen))
        )
        return and_also(found, LoopCarried(tuple(names), script_place.line())) if names else found


def _is_settled(part: HeldPart, known: KnownObjects, seen: set[Key]) -> bool:
    """The Session carries it, or its text was read."""
    is_read = (id(part.holder), part.key) in seen or (id(part.value), "") in seen or id(part.value) in known.read
    return is_read or known.carries(part.holder, part.key, part.value)
