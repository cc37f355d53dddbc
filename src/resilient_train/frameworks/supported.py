"""Which torch this package works with. Nothing here imports it."""

from __future__ import annotations

import platform
from importlib import metadata

TORCH = ("2.13", "2.14", "2.15")
"""A recovery uses internals of DDP and of process groups, which change from one minor version to the next: the tests
were run with each of these (``make test-torch``).
"""
_INSTALL = f"pip install torch=={TORCH[0]}.0"


def torch_installed() -> str | None:
    """The version of the torch that is installed; None: there is none."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def torch_problem(version: str | None) -> str:
    """Why nothing can be recovered with this torch; empty if it can."""
    if version is None:
        return f"torch is not installed: {_INSTALL}"
    if not version.startswith(tuple(f"{each}." for each in TORCH)):
        needed = f"{', '.join(TORCH[:-1])} or {TORCH[-1]}"
        return (
            f"torch {version} is installed, and recoveries need {needed}, whose internals they use: "
            f"{_INSTALL}, or start the script with torchrun (a Session is a plain loop there)"
        )
    return ""


def version_line() -> str:
    """What ``--version`` prints: this package's version and those that it depends on most."""
    ours, torch = metadata.version("resilient-train"), torch_installed()
    return f"resilient_train {ours}, torch {torch or 'not installed'}, Python {platform.python_version()}"
