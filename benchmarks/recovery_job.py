"""The job of ``recovery.py``: trains until it is ended, and writes down when it came where.

``marks_rank<r>.jsonl`` holds two kinds of lines: ``{"mark": .., "incarnation": .., "time_ns": ..}`` for the places that
a new process passes, and ``{"step": .., "time_ns": ..}`` for each update that this rank has applied.
"""

import time

_FIRST_LINE_NS = time.time_ns()  # before the imports, which are most of a process's start

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from workload import make  # noqa: E402

import resilient_train as rt  # noqa: E402

_STEPS = 100_000_000


class Marks:
    """One line is one write(2): a killed process leaves whole lines, apart from the last at worst."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._early: list[tuple[str, int]] = []
        self._descriptor = self._incarnation = -1

    def open(self) -> None:
        """From here on the rank is known. What was marked before is written now."""
        path = Path(self._folder) / f"marks_rank{os.environ['RANK']}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._incarnation = int(os.environ.get("RESILIENT_INCARNATION", "0"))
        for name, time_ns in self._early:
            self.mark(name, time_ns)

    def mark(self, name: str, time_ns: int = 0) -> None:
        time_ns = time_ns or time.time_ns()
        if self._descriptor < 0:
            self._early.append((name, time_ns))
            return
        line = {"mark": name, "incarnation": self._incarnation, "time_ns": time_ns}
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")

    def committed(self, step: int) -> None:
        os.write(self._descriptor, b'{"step": %d, "time_ns": %d}\n' % (step, time.time_ns()))


def main() -> None:
    model_name, folder, limit_s = sys.argv[1:]
    signal.alarm(int(limit_s))  # SIGALRM ends us even if whoever should do it is gone
    marks = Marks(folder)
    marks.mark("first_line", _FIRST_LINE_NS)
    marks.mark("imported")
    dist.init_process_group("resilient")
    marks.mark("group")
    work = make(model_name)
    model = DistributedDataParallel(work.model)
    marks.mark("model")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks.mark("optimizer")
    rt.standby_point()
    marks.open()
    with rt.Session(model=model, optimizer=optimizer) as session:
        marks.mark("session")
        for step in session.steps(_STEPS):
            with step:
                loss = torch.nn.functional.cross_entropy(model(work.inputs), work.targets)
                loss.backward()
                optimizer.step()
                # After the update, where a rank comes exactly once for each update that it applies.
                marks.committed(step.number)
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
