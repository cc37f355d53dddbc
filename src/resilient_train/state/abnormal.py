"""What was anomalous in a run: files beside its events, as MindSpore Transformers has ``abnormal_global_norm.json``.

``{"2": [45.7, 45.706]}``: the step, and its value each time that it ran, first before the recovery and then after it.
As Python's ``json`` has it, values that are not finite are ``NaN`` and ``Infinity``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from resilient_train.errors import ConfigError

FILES = {"norm": "abnormal_global_norm.json", "loss": "abnormal_loss.json"}


def read(run_dir: Path) -> dict[tuple[str, int], tuple[float, ...]]:
    """What the runs before this one have left: (``norm`` or ``loss``, step) -> values.

    Raises ConfigError for a file that is none of ours.
    """
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for what, name in FILES.items():
        path = run_dir / name
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} can't be read: {error}") from None
        try:
            rows = json.loads(text).items()
            found |= {(what, _step(step)): tuple(map(float, values)) for step, values in rows}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path} does not map steps to lists of numbers ({error}): it says which steps are not run again for "
                "an anomaly; move it away if it is not needed"
            ) from None
    return found


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is no step")
    return int(text)


def write(run_dir: Path, what: str, values: Mapping[int, tuple[float, ...]]) -> None:
    """Replaces the file: whoever reads it sees the old one or the new one, also after a crash. Raises OSError."""
    path = run_dir / FILES[what]
    new = path.with_name(f".{path.name}.new")
    with new.open("w") as file:
        file.write(json.dumps({str(step): list(each) for step, each in values.items()}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
