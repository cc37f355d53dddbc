"""With which versions a checkpoint was written: for whoever wonders later why it loads differently.

Read from what is installed, so that neither the agent nor ``resilient-train verify`` imports torch.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

_PACKAGES = ("resilient_train", "torch", "numpy")


class OtherVersion(NamedTuple):
    """``here`` is None where the library is not installed."""

    library: str
    written_with: str
    here: str | None


@functools.cache
def libraries_here() -> dict[str, str]:
    """Name -> version of Python, and of those packages that matter and are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # an agent needs no torch
            continue
    return found


def differences(written_with: Mapping[str, str]) -> list[OtherVersion]:
    """What is another version here, or missing. No fault of the checkpoint's."""
    here = libraries_here()
    found = (OtherVersion(library, made, here.get(library)) for library, made in sorted(written_with.items()))
    return [each for each in found if each.written_with != each.here]
