"""What ``resilient-run`` ends with, where that is not a rank's own exit code; see ``docs/reference/commands.md``."""

from __future__ import annotations

import signal

from resilient_train.protocol.job import EXIT_UNRECOVERABLE

EXIT_WRONG_INPUT = 2
EXIT_BUG = 70
"""EX_SOFTWARE."""
EXIT_SAVED = {
    signal.SIGTERM: 128 + signal.SIGTERM,
    signal.SIGHUP: 128 + signal.SIGHUP,
    signal.SIGUSR1: EXIT_UNRECOVERABLE,
}
"""Signals that ask for a graceful end, and the job's exit code. SIGUSR1 is what Slurm sends before a time limit, and
means that the job shall go on later (``sbatch --signal=USR1@120``).
"""
EXIT_AT_ONCE = (128 + signal.SIGINT, 128 + signal.SIGQUIT)
"""Of a job that somebody wants to end, whatever is lost."""
