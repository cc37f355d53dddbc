"""The command ``resilient-run``. It may begin anew, and does so before the launcher's imports, which take 0.3 s."""

import signal
import sys
from pathlib import Path

from resilient_train import config


def main() -> None:
    """Entry point of the command; see ``cli.run.main``."""
    # A program of the user's that calls this is left alone: what it has done before would be done again.
    if Path(sys.argv[0]).name in ("resilient-run", "-c"):
        config.fix_hash_seed()
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C among the imports: no traceback through all of them
    from resilient_train.launch.cli import run

    run.main()
