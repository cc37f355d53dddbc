"""What the script has said to be wrong, written down for the launcher after this one.

All go back behind it; what was saved of it is taken out of memory, and set aside on storage, one after the other. A
launcher that is killed before that is done would leave a wrong state as the newest.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.state.checkpoint.files import sync_folder, write_file

FILE = "distrusted.json"


class Distrusted(msgspec.Struct, frozen=True, omit_defaults=True):
    """Steps: what was saved behind them is wrong. None: nothing that is wrong lies there."""

    in_memory: int | None = None
    on_storage: int | None = None


class DistrustRecord:
    """Of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ConfigError if what an earlier launcher has written can't be read."""
        self._path = run_dir / FILE
        try:
            self.held = msgspec.json.decode(self._path.read_bytes(), type=Distrusted)
        except FileNotFoundError:
            self.held = Distrusted()
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{self._path} says which saved states are wrong, and can't be read ({error}): mend or remove it, or "
                "choose another --run-dir"
            ) from None

    def write(self, wrong: Distrusted) -> None:
        """In one step, which lasts: an old one would have what is right set aside. Nothing happens where that is known
        already. Raises OSError.
        """
        if wrong == self.held:
            return
        if wrong == Distrusted():
            self._path.unlink(missing_ok=True)
        else:
            fresh = self._path.with_suffix(".tmp")
            fresh.unlink(missing_ok=True)  # of a launcher that was killed
            write_file(fresh, msgspec.json.encode(wrong))
            fresh.rename(self._path)
        sync_folder(self._path.parent)
        self.held = wrong
