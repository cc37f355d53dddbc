"""The command ``resilient-run``. It may begin anew, and does so before the launcher's imports, which take 0.3 s."""

from resilient_train import config


def main() -> None:
    """Entry point of the command; see ``cli.run.main``."""
    config.fix_hash_seed()
    from resilient_train.launch.cli import run

    run.main()
