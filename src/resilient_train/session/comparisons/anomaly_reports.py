"""TRE on one rank: what the script, the clipping and the machine say of a window's values, and what the agent hears.

``anomalies.py`` judges values. Here it is known what a value is one of (the window that runs, or the update behind it),
and what follows from a verdict: a frame, for the agent decides whether all run the step again or go back; an event; a
line for people.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train.errors import UsageError
from resilient_train.exception_line import short
from resilient_train.frameworks.roles import Gradients
from resilient_train.observe import thresholds
from resilient_train.protocol import messages as m
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.rank import Rank
from resilient_train.session.agent_link import Link
from resilient_train.session.comparisons.anomalies import Anomalies, AnomalyLimits, FoundAnomaly, What
from resilient_train.session.notices import Notices


class AnomalyReports:
    """Of one rank, where TRE is on.

    A new process does not know what was usual. It may make others run a step again, and nothing else: with updates that
    are left out, what it does not see would be one that an undisturbed run leaves out. So there only limits count.
    """

    def __init__(
        self, link: Link, rank: Rank, gradients: Gradients, notices: Notices, limits: AnomalyLimits, *, skips: bool
    ) -> None:
        self._channel, self._rank, self._gradients, self._notices = link.channel, rank, gradients, notices
        self._values = Anomalies(limits, notices.say, scaled=gradients.scales(), spikes=not skips)
        self.inject = self._values.inject

    def watch(self) -> None:
        """Norms that the loop computes when it clips count from now on."""
        self._gradients.watch(self._clipped)

    def window_begins(self) -> None:
        """A window begins, or begins again."""
        self._values.begin()
        self._gradients.begin()

    def check(self, loss: Any, norm: Any) -> None:
        """See ``Session.check``."""
        if not (self._rank.redoable or self._rank.behind_update):
            raise UsageError(
                "session.check() was called outside the body of a step and not behind its update either (in front of a "
                "body, between two optimizers, behind the loop): call it in the body, before optimizer.step()"
            )
        if norm is True:
            norm = self._gradients.norm()
        given: tuple[tuple[What, Any], ...] = (("loss", loss), ("norm", norm))
        for what, value in given:
            if value is None:
                continue
            kept = self._gradients.kept(value)
            if self._rank.redoable:
                self._values.add(what, kept)
            else:
                self._check_behind(what, kept)

    def _check_behind(self, what: What, value: Any) -> None:
        """A value of the update that was applied last. Of one that was left out there is nothing to go back for."""
        rank, step = self._rank, self._rank.number - 1
        found = None if rank.skips and step in rank.tolerated else self._values.behind(what, value, rank.commits)
        if found is not None:
            self._channel.send(m.Late(step, seen=self._frame(step, found)))

    def _clipped(self, norm: Any) -> None:
        if self._rank.redoable:
            self._values.add("norm", norm)
        elif self._rank.updating:
            self._values.late()

    def asked_for(self, event: on.Exit) -> on.Exit:
        """A body was left by an error that asks for its step once more. One that is tolerated there is the script's."""
        found, rank = self._values.raised(event.text), self._rank
        if rank.number not in rank.tolerated:
            return event
        self._channel.send(self._frame(rank.number, found, again=True))
        return on.Exit("error", event.text)

    def asked_late(self, error: BaseException) -> None:
        """What asks for its step once more behind the update is an anomaly that is noticed later."""
        if self._rank.behind_update:
            step = self._rank.number - 1
            found = self._values.raised(f"{type(error).__name__}: {error}")
            self._channel.send(m.Late(step, seen=self._frame(step, found)))

    def send(self, *, again: bool) -> RuntimeError | None:
        """Tells the agent of the last one. Returns what to raise if it does not answer, if not what was raised."""
        found, number = self._values.found, self._rank.number
        if not again:
            self._values.runs_again(number)
        self._channel.send(self._frame(number, found, again=again))
        if found.what == "raised":
            return None
        told = f"the {found.what} of step {number} is {found.value:g}, and the agent has not answered to that"
        return RuntimeError(told)

    def look(self, inputs: Callable[[], tuple[str, str]]) -> bool:
        """Whether the window's values are an anomaly; and tells what has come of one that was run again for one.
        ``inputs``: a digest of its batches, and where they were computed.
        """
        number = self._rank.number
        found = self._values.look()
        if again := self._values.redone(number):
            batch, device = inputs()
            detail = {"what": again.what, "values": again.in_json, "same": again.same, "batch": batch, "device": device}
            self._notices.event("redone", detail)
            self._notices.say_of_rank(again.told(number))
        return found

    def committed(self) -> None:
        """The window that was looked at last is an update, and applied."""
        self._values.applied(self._rank.commits)
        self.write(thresholds.EVERY)

    def write(self, at_least: int) -> None:
        """For ``advise --norm``: losses are each rank's own, norms all have alike, so one writes them. What a lost
        process has not written yet is missing.
        """
        if not (values := self._values.take(at_least)):
            return
        given = {"norm": values.norms if self._notices.is_speaker else [], "loss": values.losses}
        if rows := {what: each for what, each in given.items() if any(value is not None for value in each)}:
            self._notices.event("values", {"first": values.first, **rows})

    def _frame(self, step: int, found: FoundAnomaly, *, again: bool = False) -> m.Anomaly:
        generation, skips, text = self._rank.generation, self._rank.skips, short(found.text)
        return m.Anomaly(generation, step, found.what, found.value, found.limit, again, skips, found.usual, text)
