"""What the bodies of a window say of themselves: the norms of their gradients, and their losses. Can they be right?

Values come as the engine has them, on a device that may be far from having computed them, and nobody waits. They are
looked at once, in front of the barrier of the update, where the device has done all that it was given. The largest of
a window is compared with a limit, if the user has set one, and with those of the windows before (``usual.py``).

One that comes behind the update is looked at where it comes, which may have to wait for the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from resilient_train.observe.usual import Usual

What = Literal["norm", "loss"]
_NO_VALUE = math.nan
_NAMES = {"norm": "gradient norm", "loss": "loss"}


class AnomalyLimits(NamedTuple):
    """A value is an anomaly from its limit on, and if it is not finite."""

    norm: float = math.inf
    loss: float = math.inf

    @property
    def given(self) -> bool:
        """Whether the user has set one."""
        return self != AnomalyLimits()


class FoundAnomaly(NamedTuple):
    """An anomaly. ``usual``: the median of the windows before, where it is they that set the limit. ``raised``: the
    script asks for the step once more, by the error that is its ``text``.
    """

    what: Literal["norm", "loss", "raised"]
    value: float
    limit: float
    usual: float | None = None
    text: str = ""


class Redone(NamedTuple):
    """A step that was run again for a value, from the same inputs: the value then, and now."""

    what: str
    values: tuple[float, float]

    @property
    def same(self) -> bool:
        """Whether it is the same number, or no number again."""
        was, now = self.values
        return was == now or (math.isnan(was) and math.isnan(now))

    @property
    def in_json(self) -> list[float | str]:
        """Both values; as text what JSON has no number for."""
        return [value if math.isfinite(value) else str(value) for value in self.values]

    def told(self, step: int) -> str:
        """The verdict."""
        was, now = self.values
        run = f"the {_NAMES[self.what]} of step {step}, run again from the same inputs, is {now:.9g}"
        if self.same:
            return f"{run} again: that is the data's doing, or the optimisation's, and no machine's"
        return (
            f"{run}, and was {was:.9g}: a device has computed wrongly, or the script does not compute the same each "
            "time (`resilient-train drill` tells)"
        )


class AppliedValues(NamedTuple):
    """Of updates that were applied, from ``first`` on; None where there was none, or none that was finite."""

    first: int
    norms: list[float | None]
    losses: list[float | None]


class Anomalies:
    """Of one rank. ``scaled``: a gradient scaler looks at the gradients, and refuses the update if they are not finite:
    that is its way to find a scale, and no anomaly. ``spikes``: what is far above the usual is one too. ``tell`` says
    to people, once, what is not looked at.
    """

    def __init__(self, limits: AnomalyLimits, tell: Callable[[str], None], *, scaled: bool, spikes: bool) -> None:
        self._limits, self._tell, self._scaled = limits, tell, scaled
        self._values: dict[What, list[Any]] = {"norm": [], "loss": []}
        self._usual: dict[What, Usual] = {"norm": Usual(), "loss": Usual()} if spikes else {}
        self._worst: dict[What, float] = {}
        """Of the window that was looked at last."""
        self._applied: dict[int, dict[What, float]] = {}
        """By update: the largest values that are finite, since they were taken last."""
        self._told: set[str] = set()
        self._again: tuple[int, FoundAnomaly] | None = None
        """The step that is run again for the last one."""
        self._empty = False
        """The window before had no value, nor what was behind its update."""
        self.found = FoundAnomaly("norm", 0.0, 0.0)
        """The last one."""

    def begin(self) -> None:
        """A window begins, or begins again."""
        for values in self._values.values():
            values.clear()

    def add(self, what: What, value: Any) -> None:
        """One more value of the window; anything that ``float`` takes when the device has computed it."""
        self._values[what].append(value)

    def late(self) -> None:
        """A norm came when an optimizer was writing, or had written."""
        self._tell_once(
            "gradients are clipped in an optimizer.step() or behind the first of several, so their norm is not checked "
            "(TRE): clip all gradients before the first optimizer.step(), or pass Session(undo=True)"
        )

    def inject(self, what: What, value: float) -> None:
        """A fault on request: the window has this value, and no other."""
        self._values[what][:] = [value]

    def look(self) -> bool:
        """Whether there is an anomaly in the window. The device is at rest."""
        empty = not any(self._values.values())
        if empty and self._empty:
            self._tell_once(
                "TRE is on, and two steps had neither a gradient norm nor a loss to look at: clip the gradients "
                "(torch.nn.utils.clip_grad_norm_), or call session.check(loss) before optimizer.step()"
            )
        self._empty = empty
        self._worst.clear()
        found = self._look_at("norm") or self._look_at("loss")
        self.found = found or self.found
        return found is not None

    def raised(self, text: str) -> FoundAnomaly:
        """A body was left by an error that asks for the step once more."""
        self.found = FoundAnomaly("raised", _NO_VALUE, _NO_VALUE, text=text)
        return self.found

    def runs_again(self, step: int) -> None:
        """The step is run again for the last one."""
        self._again = step, self.found

    def redone(self, step: int) -> Redone | None:
        """What has come of the value for which ``step`` was run again, if this was that; told once."""
        if self._again is None:
            return None
        (which, found), self._again = self._again, None
        now = None if found.what == "raised" or which != step else self._worst.get(found.what)
        return None if now is None else Redone(found.what, (found.value, now))

    def behind(self, what: What, value: Any, update: int) -> FoundAnomaly | None:
        """Looks at a value behind that update, which is applied. May wait until the device has computed it."""
        self._empty = False
        number = float(value)
        found = self._judged(what, number) if self._counts(what, number) else None
        self._add_applied(what, number, update)
        return found

    def applied(self, update: int) -> None:
        """The window that was looked at last is that update, and applied: so its values are among the usual ones."""
        for what, value in self._worst.items():
            self._add_applied(what, value, update)
        self._worst.clear()

    def take(self, at_least: int) -> AppliedValues | None:
        """The finite values of the updates since they were taken last, if these are so many; else None."""
        if len(self._applied) < at_least:
            return None
        taken, self._applied = self._applied, {}
        updates = range(min(taken), max(taken) + 1)
        norms, losses = ([taken.get(update, {}).get(what) for update in updates] for what in ("norm", "loss"))
        return AppliedValues(updates.start, norms, losses)

    def _look_at(self, what: What) -> FoundAnomaly | None:
        values = [value for value in map(float, self._values[what]) if self._counts(what, value)]
        if not values:
            return None
        self._worst[what] = worst = _worst_of(values)
        return self._judged(what, worst)

    def _counts(self, what: What, value: float) -> bool:
        return what == "loss" or not self._scaled or math.isfinite(value)

    def _judged(self, what: What, value: float) -> FoundAnomaly | None:
        limit = self._limits.norm if what == "norm" else self._limits.loss
        if not math.isfinite(value) or value >= limit:
            return FoundAnomaly(what, value, limit)
        spike = self._usual[what].spike(value) if self._usual else None
        return FoundAnomaly(what, value, spike.limit, spike.median) if spike is not None else None

    def _add_applied(self, what: What, value: float, update: int) -> None:
        if math.isfinite(value):
            values = self._applied.setdefault(update, {})
            values[what] = max(value, values.get(what, value))
        if what in self._usual:
            self._usual[what].add(value)

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def _worst_of(values: Iterable[float]) -> float:
    """One that is not finite, or else the largest."""
    return min(values, key=lambda value: (math.isfinite(value), -value))
