"""Undisturbed runs, made once for all tests that want them, also where these run in several workers.

A run is a folder of its own, named by what was asked for. Whoever comes first makes it; all others wait for that, at a
lock that the kernel lets go of when its holder dies, and then read what became of it. If it failed, it fails them all.
"""

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from running import Run, launch, read_events


class Undisturbed:
    """``undisturbed_of("called.py", "--steps", "8", ranks=2)``. Of what it returns only what lies there may be read.

    ``environ`` are variables of the job's, as for ``launch``.
    """

    def __init__(self, folder: Path, make: Callable[..., Run] = launch) -> None:
        self._folder = folder
        self._make = make
        self._known: dict[str, Run] = {}
        folder.mkdir(exist_ok=True)

    def __call__(self, script: str, *arguments: str, ranks: int, **environ: str) -> Run:
        asked = json.dumps([script, arguments, ranks, sorted(environ.items())])
        name = f"{Path(script).stem}-{hashlib.sha256(asked.encode()).hexdigest()[:16]}"
        if name not in self._known:
            result = self._folder / f"{name}.json"
            with locked(self._folder / f"{name}.lock"):
                if not result.exists():
                    # One that a dying worker has begun lies there already.
                    run_dir = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._folder)) / "run"
                    _write(result, {"asked": asked, **self._run(run_dir, script, *arguments, ranks=ranks, **environ)})
            found = json.loads(result.read_text())
            assert not found["wrong"], f"the undisturbed run of {asked}:\n{found['wrong']}"
            run_dir = Path(found["run_dir"])
            self._known[name] = Run(run_dir, 0, found["out"], found["err"], read_events(run_dir))
        return self._known[name]

    def _run(self, run_dir: Path, script: str, *arguments: str, ranks: int, **environ: str) -> dict[str, Any]:
        """What is to be known of the run. ``wrong``: why it is no reference; empty if it is one."""
        try:
            run = self._make(run_dir, script, *arguments, ranks=ranks, **environ)
        except AssertionError as error:  # it did not end
            return {"wrong": str(error)}
        if run.code or run.recoveries():
            return {"wrong": f"it was to end well, without a recovery\n{run.explain()}"}
        return {"wrong": "", "run_dir": str(run_dir), "out": run.out, "err": run.err}


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile don't inherit the descriptor, and so don't hold the lock."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, what: dict[str, Any]) -> None:
    """Whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.rename(path)
