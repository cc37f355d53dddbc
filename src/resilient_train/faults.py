"""The little language in which a plan of injected faults is written.

A plan is a list of clauses separated by ``;``::

    kill rank=2 step=7 phase=UPDATING; kill rank=0 step=20 phase=COMPUTE at=backward

``kill`` is SIGKILL, ``stop`` is SIGSTOP, ``loop`` is an endless loop that never lets go of the GIL, ``hcce`` breaks the
rank's collectives (its connections are shut), as a link does that fails for good, ``uce`` destroys memory of a tensor
(``target=param``, ``optimizer``, ``buffer``, ``gradient``, ``activation``) and makes the operation fail.

``norm`` and ``loss`` make the anomaly check (TRE) see ``value=`` in the place of what the loop has computed. ``slow``
makes this step and all later ones of the process take ``value=`` times as long to compute. ``flip`` inverts the bits
``mask=`` of one element (``index=``) of the rank's tensors of a kind (``target=``), and nobody is told: a silent error.

``step`` is the loop's step number. A clause hits the process that was started first for that rank (``incarnation=0``)
unless it says otherwise, and hits once. Clauses for the phases of a recovery (STOP, REBUILD, RESTORE) need no step;
``generation=N`` picks the recovery, ``step=N`` the first one that finds the rank in that step, or behind it. In the
phases of a step, ``generation=N`` asks for N recoveries before (a step that is redone).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

import msgspec

from resilient_train.errors import ConfigError

INJECTABLE = ("kill", "stop", "loop", "hcce", "uce")
"""Kinds that a plan and ``resilient-train inject`` accept."""
ANOMALIES = ("norm", "loss")
"""Kinds that only a plan accepts: what the anomaly check sees is another value."""
SLOW = "slow"
"""The same: a device that has become slower."""
FLIP = "flip"
"""The same: memory, or a unit that computes, is wrong once without a sign of it."""
IN_A_PLAN = (*INJECTABLE, *ANOMALIES, SLOW, FLIP)
TARGETS = ("param", "optimizer", "buffer", "gradient", "activation")
"""Whose memory ``uce`` destroys, or ``flip`` changes (``target=``); the first is the default."""

UCE_PLACES = (("COMPUTE", "forward"), ("COMPUTE", "backward"), ("UPDATING", "start"))
"""Where an operation of the device's could fail, and is repaired in the process."""
UCE_IN_TAIL = ("APPLIED", "start")
"""The same after the update, which costs the process (decision 12)."""

COST_NO_PROCESS = ("hcce", "uce", *ANOMALIES)
"""Kinds from which a rank recovers in its own process; after the others (but ``slow`` and ``flip``, which end none) a
new one takes its place.
"""

FROM_OUTSIDE = ("kill", "stop")
"""Kinds that reach a process from outside it, wherever it is; the others happen inside it, at a place of a step."""

PLACES: dict[str, tuple[str, ...]] = {
    "COMPUTE": ("start", "forward", "backward", "end"),
    "READY": ("before", "barrier"),
    "UPDATING": ("start", "end"),
    "APPLIED": ("start", "end"),
    "BETWEEN": ("start",),
    "STOP": ("start",),
    "REBUILD": ("start", "end"),
    "RESTORE": ("start", "end"),
}
"""Phase -> where in it a fault can be injected; the first is the default."""

RECOVERY_PHASES = ("STOP", "REBUILD", "RESTORE")
"""Phases that belong to a recovery, not to a step."""
_COPIES = ("RESTORE", "start")

ANOMALY_PLACE = ("READY", "before")
"""Where the check looks."""
_SLOW_PLACE = ("COMPUTE", "start")
_WITH_VALUE = (*ANOMALIES, SLOW)
_WITH_TARGET = ("uce", FLIP)

FLIP_PLACES = {
    "param": (("COMPUTE", "start"), ("UPDATING", "start")),
    "optimizer": (("COMPUTE", "start"), ("UPDATING", "start")),
    "buffer": (("COMPUTE", "start"), ("UPDATING", "start")),
    "gradient": (("COMPUTE", "backward"), ("UPDATING", "start")),
    "activation": (("COMPUTE", "forward"),),
}
"""Where there is memory of that kind to ``flip``; the first is the default. A gradient in the middle of a backward pass
is this rank's own; before the update it is what all have agreed on.
"""


def place_in_step(kind: str, target: str) -> tuple[str, str]:
    """Where in a step (phase, place) a fault hits that is to hit as soon as it can."""
    if kind != "uce":
        return "COMPUTE", "start"
    # Between two steps there is mostly no gradient; in the middle of a backward pass there is one.
    return "COMPUTE", "backward" if target == "gradient" else "forward"


class Injection(msgspec.Struct, frozen=True):
    """One clause of a plan. ``step`` or ``generation`` is -1 where the clause does not name one."""

    kind: str
    rank: int
    phase: str
    at: str
    step: int = -1
    generation: int = -1
    incarnation: int = 0
    target: str = ""
    value: float = 0.0
    index: int = 0
    """Of the element, modulo their number."""
    mask: int = 0

    def describe(self) -> str:
        """The clause, written as a plan would have it."""
        parts = [self.kind, f"rank={self.rank}"]
        parts += [f"{name}={value}" for name in ("step", "generation") if (value := getattr(self, name)) >= 0]
        parts += [f"phase={self.phase}", f"at={self.at}"]
        if self.incarnation:
            parts.append(f"incarnation={self.incarnation}")
        if self.target:
            parts.append(f"target={self.target}")
        if self.kind in _WITH_VALUE:
            parts.append(f"value={self.value:g}")
        if self.kind == FLIP:
            parts.append(f"index={self.index} mask={self.mask:#x}")
        return " ".join(parts)


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the known word most like ``word``; empty if none is like it."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""


def parse_plan(text: str) -> tuple[Injection, ...]:
    """Parses a plan. Raises ConfigError that names the clause, the word that is wrong and the nearest right one."""
    return tuple(_parse_clause(clause.strip()) for clause in text.split(";") if clause.strip())


_NUMBERS = ("rank", "step", "generation", "incarnation", "index")
_WORDS = ("phase", "at", "target", "value", "mask")


def _parse_clause(clause: str) -> Injection:
    kind, *pairs = clause.split()
    if kind not in IN_A_PLAN:
        raise ConfigError(f"fault plan: unknown kind {kind!r} in {clause!r}{nearest(kind, IN_A_PLAN)}")
    numbers: dict[str, int] = {}
    words: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in (*_NUMBERS, *_WORDS):
            hint = nearest(key, (*_NUMBERS, *_WORDS))
            raise ConfigError(f"fault plan: {pair!r} in {clause!r} is not key=value with a known key{hint}")
        if key in numbers or key in words:
            raise ConfigError(f"fault plan: {key!r} stands twice in {clause!r}")
        if key in _WORDS:
            words[key] = value
        elif value.isdecimal():
            numbers[key] = int(value)
        else:
            raise ConfigError(f"fault plan: {key}={value!r} in {clause!r} must be a whole number from 0")
    return _checked(clause, kind, numbers, words)


def _checked(clause: str, kind: str, numbers: dict[str, int], words: dict[str, str]) -> Injection:
    if "rank" not in numbers:
        raise ConfigError(f"fault plan: {clause!r} names no rank (rank=N)")
    phase = words.get("phase", _usual_phase(kind)).upper()
    if phase not in PLACES:
        raise ConfigError(f"fault plan: unknown phase {phase!r} in {clause!r}{nearest(phase, PLACES)}")
    at = words.get("at") or _usual_place(kind, words, phase)
    if at not in PLACES[phase]:
        places = ", ".join(PLACES[phase])
        raise ConfigError(f"fault plan: phase {phase} has no place {at!r} in {clause!r}; it has {places}")
    if phase not in RECOVERY_PHASES and "step" not in numbers:
        raise ConfigError(f"fault plan: {clause!r} names no step (step=N)")
    if (phase, at) == _COPIES and "step" in numbers:
        raise ConfigError(f"fault plan: {clause!r}: who copies has no step yet: say incarnation=N, or generation=N")
    target, value = _target(clause, kind, words, (phase, at)), _value(clause, kind, words, (phase, at))
    mask = _mask(clause, kind, numbers, words)
    return Injection(kind=kind, phase=phase, at=at, target=target, value=value, mask=mask, **numbers)


def _usual_phase(kind: str) -> str:
    return ANOMALY_PLACE[0] if kind in ANOMALIES else "COMPUTE"


def _usual_place(kind: str, words: dict[str, str], phase: str) -> str:
    """Where a clause hits that says of the place nothing but, maybe, its phase."""
    known = FLIP_PLACES.get(words.get("target", TARGETS[0]), ()) if kind == FLIP else ()
    return next((at for its_phase, at in known if its_phase == phase), PLACES[phase][0])


def _mask(clause: str, kind: str, numbers: dict[str, int], words: dict[str, str]) -> int:
    if kind != FLIP:
        for word in ("index", "mask"):
            if word in numbers or word in words:
                raise ConfigError(f"fault plan: {clause!r}: only flip has {word}=")
        return 0
    try:
        mask = int(words.get("mask", ""), 0)
    except ValueError:
        mask = 0
    if not 0 < mask < 1 << 64:
        raise ConfigError(f"fault plan: {clause!r}: which bits of the element? (mask=0x400000, mask=1)")
    return mask


def _value(clause: str, kind: str, words: dict[str, str], place: tuple[str, str]) -> float:
    if kind not in _WITH_VALUE:
        if "value" in words:
            raise ConfigError(f"fault plan: {clause!r}: only {', '.join(_WITH_VALUE)} have a value")
        return 0.0
    if kind == SLOW:
        return _times(clause, words, place)
    if place != ANOMALY_PLACE:
        raise ConfigError(f"fault plan: {clause!r}: {kind} is looked at in phase=READY at=before, and nowhere else")
    if "value" not in words:
        raise ConfigError(f"fault plan: {clause!r} has no value (value=45.7, value=nan)")
    try:
        return float(words["value"])
    except ValueError:
        raise ConfigError(f"fault plan: value={words['value']!r} in {clause!r} must be a number") from None


def _times(clause: str, words: dict[str, str], place: tuple[str, str]) -> float:
    if place != _SLOW_PLACE:
        raise ConfigError(f"fault plan: {clause!r}: slow begins with a body: phase=COMPUTE at=start, and nowhere else")
    try:
        times = float(words.get("value", ""))
    except ValueError:
        times = 0.0
    if not 1 <= times < float("inf"):
        raise ConfigError(f"fault plan: {clause!r}: how many times as long? (value=1.4; at least 1)")
    return times


def _target(clause: str, kind: str, words: dict[str, str], place: tuple[str, str]) -> str:
    if kind not in _WITH_TARGET:
        if "target" in words:
            raise ConfigError(f"fault plan: {clause!r}: only uce and flip have a target")
        return ""
    target = words.get("target", TARGETS[0])
    if target not in TARGETS:
        raise ConfigError(f"fault plan: unknown target {target!r} in {clause!r}{nearest(target, TARGETS)}")
    known = FLIP_PLACES[target] if kind == FLIP else (*UCE_PLACES, UCE_IN_TAIL)
    if place not in known:
        places = ", ".join(f"phase={phase} at={at}" for phase, at in known)
        what = f"where flip finds a {target}" if kind == FLIP else "uce hits an operation of the step"
        raise ConfigError(f"fault plan: {clause!r}: {what}: {places}")
    return target


def check_fault(kind: str, target: str) -> None:
    """Raises ConfigError unless there is such a kind, with such a target (empty: none was given)."""
    if kind not in INJECTABLE:
        raise ConfigError(f"unknown kind {kind!r}: one of {', '.join(INJECTABLE)}{nearest(kind, INJECTABLE)}")
    if target and kind != "uce":
        raise ConfigError(f"only uce has a target, not {kind}")
    if target and target not in TARGETS:
        raise ConfigError(f"unknown target {target!r}: one of {', '.join(TARGETS)}{nearest(target, TARGETS)}")
