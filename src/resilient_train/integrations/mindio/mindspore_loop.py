"""Where the loop of MindSpore 2.10 is, of which its callback hands over the parameters (``cb_params``).

The callback tells the loop's own count. Behind a repair that begins anew at the epoch's beginning (without dataset
sinking, or with TRE:1), and where the loop goes back by TRE at 0. Nothing here says anything of another framework.
"""

from __future__ import annotations

from typing import Any


class MindSporeLoop:
    """``args``: what the loop has given for its handlers; ``callback``: the object with which one was registered."""

    def __init__(self, args: Any = None, callback: Any = None) -> None:
        self._args, self._callback = args, callback
        self._counts = _whole_number(getattr(args, "cur_step_num", None)) is not None

    def back_at(self) -> int | None:
        """The update behind which the loop begins by itself. None: behind none that it could name."""
        return _whole_number(getattr(self._args, "initial_step", None)) if self._counts else None

    def count_from(self, step: int) -> None:
        """Makes the next update that it tells of the one behind ``step``."""
        if self._counts:
            # The callback adds what it was told that was done before the job. Others, those of MindSpore Transformers,
            # add what the loop says, which behind a TRE is where that went back to, and stays so for later repairs.
            before = _whole_number(getattr(self._callback, "initial_step", None)) or 0
            self._args.cur_step_num, self._args.initial_step = step - before, before

    def updates_held(self) -> int | None:
        """How many updates its parameters say that they hold. None: they don't."""
        if not self._counts:
            return None
        for holder in (self._args, getattr(self._args, "network", None)):
            if (count := getattr(getattr(holder, "optimizer", None), "global_step", None)) is not None:
                return int(count.asnumpy().reshape(-1)[0])
        return None


def _whole_number(found: Any) -> int | None:
    return found if isinstance(found, int) else None
