"""Storage that fails with EIO when a test wants it to; ``failing_storage.c`` says how."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class FailingStorage:
    """For jobs that are started with ``environ``. ``folder`` is for the library and the switch."""

    def __init__(self, folder: Path) -> None:
        library = folder / "failing_storage.so"
        self._switch = folder / "switch"
        flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        subprocess.run(["cc", *flags, "-o", library, SOURCE, "-ldl"], check=True, timeout=60)
        self.environ = {"LD_PRELOAD": str(library), "FAILING_STORAGE": str(self._switch)}

    @contextlib.contextmanager
    def failing(self, calls: str, pattern: Path | str, whose: str = "all") -> Iterator[None]:
        """``calls``: write, read, sync or sync-folder. ``pattern``: of paths without symbolic links."""
        draft = self._switch.with_suffix(".new")
        draft.write_text(f"{calls} {pattern} {whose}")
        draft.rename(self._switch)
        try:
            yield
        finally:
            self._switch.unlink()
