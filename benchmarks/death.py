"""How soon the agent hears of a death, by the size of the process: ``python benchmarks/death.py [--json FILE]``.

``kill -9`` of a process that has touched so much memory, seen in two ways at once: by the death watch (robust futex),
as the agent does, and by a pidfd, which the kernel signals when it has freed the memory.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from common import BenchmarkError, Table, show, summary, write_json

from resilient_train._native import Board, DeathWatch

GIB = 1 << 30
SIZES_GIB = (0.0, 0.5, 1.0, 2.0, 4.0)
LIMIT_S = 60
VICTIM = """
import mmap, signal, sys
from resilient_train._native import Board, Watchdog, die_with_parent
die_with_parent(signal.SIGKILL)
board, size = Board.attach(int(sys.argv[1])), int(sys.argv[2])
memory = mmap.mmap(-1, max(size, 1))
memory.madvise(mmap.MADV_NOHUGEPAGE)  # as most memory of a rank is
for page in range(0, size, mmap.PAGESIZE):
    memory[page] = 1
watchdog = Watchdog(board, 0, beat_ms=10, signal_number=signal.SIGUSR1)
watchdog.start(0)
print("ready", flush=True)
sys.stdin.readline()
"""


def one_death(size_bytes: int) -> tuple[float, float]:
    """Milliseconds from the kill until the death watch has seen it, and until the pidfd is readable."""
    board = Board.create(1)
    watch = DeathWatch(board)
    command = [sys.executable, "-c", VICTIM, str(board.fd), str(size_bytes)]
    victim = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[board.fd])
    try:
        assert victim.stdout is not None
        if not select.select([victim.stdout], [], [], LIMIT_S)[0] or victim.stdout.readline() != b"ready\n":
            raise BenchmarkError("the victim did not come to life")
        if not watch.add(0):
            raise BenchmarkError("this kernel can't watch deaths (futex_waitv)")
        pidfd = os.pidfd_open(victim.pid)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        killed_ns = time.time_ns()
        os.kill(victim.pid, signal.SIGKILL)
        if not poll.poll(LIMIT_S * 1000):
            raise BenchmarkError("the victim does not die")
        freed_ns = time.time_ns()
        os.close(pidfd)
        ((_, seen_ns),) = watch.take()
        return (seen_ns - killed_ns) / 1e6, (freed_ns - killed_ns) / 1e6
    finally:
        victim.kill()
        victim.communicate(timeout=LIMIT_S)
        watch.close()
        board.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=20, help="of each size")
    parser.add_argument("--sizes-gib", type=float, nargs="+", default=list(SIZES_GIB))
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    cases: list[dict[str, Any]] = []
    rows = []
    for size_gib in given.sizes_gib:
        deaths = [one_death(int(size_gib * GIB)) for _ in range(given.deaths)]
        watch, pidfd = (summary([each[way] for each in deaths]) for way in range(2))
        ratio = summary([freed / seen for seen, freed in deaths])
        cases.append({"gib": size_gib, "watch_ms": watch, "pidfd_ms": pidfd, "ratio": ratio, "deaths": deaths})
        cells = [f"{each['median']:.2f} ({each['max']:.2f})" for each in (watch, pidfd)]
        rows.append((f"{size_gib:g} GiB", *cells, f"{ratio['median']:.0f} x"))
        write_json(given.json, {"benchmark": "death", "cases": cases})
    columns = ("touched by the victim", "death watch", "pidfd", "ratio")
    show(Table("kill -9 until it is known, ms, median (max)", columns, rows))


if __name__ == "__main__":
    main()
