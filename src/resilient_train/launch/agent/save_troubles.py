"""What goes wrong with saving: each an event, and the first of its kind a line on the console."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

_TOLD = {
    "save_failed": "not written",
    "save_skipped": "skipped",
    "nan_saved": "written, with values that are not numbers",
    "retention_failed": "older ones could not be deleted",
    "wrong_stay": "those that are wrong could not be set aside",
}


class Teller(Protocol):
    """Writes an event of the agent."""

    def __call__(self, kind: str, *, detail: dict[str, Any]) -> None: ...


class SaveTroubles:
    """``say`` writes to the console: of each kind it hears the first, until one is written where one had failed."""

    def __init__(self, note: Teller, say: Callable[[str], None]) -> None:
        self._note = note
        self._say = say
        self._kinds: set[str] = set()
        self._passed_over: set[str] = set()

    def tell(self, kind: str, step: int | None, reason: str, *, ends: bool = False) -> None:
        """``step``: of the checkpoint that it is about; None: of none. ``ends``: the job does, and says so itself."""
        self._note(kind, detail={"reason": reason} if step is None else {"step": step, "reason": reason})
        subject = "checkpoints" if step is None else f"checkpoint of step {step}"
        if kind not in self._kinds and not ends:
            self._kinds.add(kind)
            self._say(f"{subject}: {_TOLD[kind]}: {reason}. Training goes on")

    def pass_over(self, path: str, reason: str, *, ends: bool) -> None:
        """What lies there is not gone on from. Written down once for each path. ``ends``: see ``tell``."""
        if path not in self._passed_over:
            self._passed_over.add(path)
            self._note("checkpoint_skipped", detail={"path": path, "reason": reason})
            if not ends:
                self._say(f"{path} is passed over: {reason}")

    def written(self, step: int) -> None:
        """A checkpoint was, so saving is well again."""
        if "save_failed" in self._kinds:
            self._kinds.clear()
            self._say(f"checkpoint of step {step}: written; saving is well again")
