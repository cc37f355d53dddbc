"""Through how many of our files the training thread goes: in a healthy step, and from a kill to the next update.

``python benchmarks/path.py``: two ranks; ``sys.setprofile`` in rank 0, which lives. Counts, no times.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from common import finish, launcher, started

PACKAGE = str(Path(__file__).parents[1] / "src" / "resilient_train") + os.sep
HEALTHY, HIT, STEPS = 20, 24, 29


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="rt-path-") as folder:
        log = Path(folder) / "log"
        with started([*launcher("resilient-run", 2, Path(folder) / "run"), __file__, folder], log) as process:
            finish(process, log, 120)
        print("\n".join(line[line.index("|") :] for line in log.read_text().splitlines() if "|" in line))


class Counting:
    """Counts calls of this package's functions, by file."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.calls[name.removeprefix(PACKAGE)] += 1

    def tell(self, what: str) -> None:
        files = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items()))
        print(f"| {what} | {len(self.calls)} files | {self.calls.total()} calls | {files} |", flush=True)


def job(folder: Path) -> None:
    import torch
    import torch.distributed as dist

    import resilient_train as rt

    dist.init_process_group("resilient")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    rank = dist.get_rank()
    path = None
    with rt.Session(model=model, optimizer=optimizer) as session:
        for step in session.steps(STEPS):
            if path is not None and step.attempt == 0:
                sys.setprofile(None)
                path.tell("a healthy step" if step.number == HEALTHY + 1 else "from a kill to the update behind it")
                path = None
            if rank == 0 and step.number in (HEALTHY, HIT) and step.attempt == 0:
                path = Counting()
                sys.setprofile(path)
            with step:
                if rank == 1 and step.number == HIT and not (folder / "hit").exists():
                    (folder / "hit").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    job(Path(sys.argv[1])) if sys.argv[1:] else main()
