"""Bodies that end without an update of a registered optimizer: part of an accumulation, or a loop that is not seen.

Nothing is committed then, so a fault runs all of them again, and their batches are kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Gradients, Window
from resilient_train.observe.sinks import say_aside

PATIENCE = 100
"""So many bodies in a row are told, once."""


class BodiesWithoutUpdate:
    """``event`` writes an event of this rank; ``tells``: it is the rank that speaks for all."""

    def __init__(
        self, window: Window, gradients: Gradients, event: Callable[[str, dict[str, Any]], None], *, tells: bool
    ) -> None:
        self._window = window
        self._gradients = gradients
        self._event = event
        self._tells = tells

    def body_ended(self, step: int, begun: int) -> None:
        """The body of ``step`` ended without an update; the window began with step ``begun``. Raises UsageError."""
        name = self._window.changed_unasked()
        if name:
            raise UsageError(
                f"step {step} has changed parameter {name!r} without a step() of a registered optimizer: such an "
                "update is not seen, and a fault would run it again on what it has changed; update by a "
                "torch.optim.Optimizer that is registered, Session(optimizer=...)"
            )
        if self._tells and step - begun + 1 == PATIENCE:
            self._tells = False
            self._event("no_update", {"steps": PATIENCE, "begun": begun})
            say_aside(
                f"no registered optimizer has stepped in {PATIENCE} steps, since step {begun}: nothing is committed "
                "meanwhile, a fault runs all of them again, and their batches are kept in memory"
            )

    def tell_untrained(self) -> None:
        """The job begins: says which parameters nobody will update."""
        names = self._gradients.without_optimizer() if self._tells else []
        if names:
            shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
            say_aside(
                f"parameters with requires_grad that are in no registered optimizer: {len(names)} ({shown}); if one "
                "updates them, register it, or nobody will bring back what it does; those that join later by "
                "add_param_group() are seen"
            )
