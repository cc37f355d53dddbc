"""One file of MindSpore's own checkpoint format, written, read back and compared; and read with its CRC looked at.

The last 17 bytes of a file that ``save_checkpoint(crc_check=True)`` wrote are ``crc_num`` and the CRC32 of all before
them, in 10 bytes, big-endian. MindSpore (2.10) itself only warns where they are missing, as in a file that was cut.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore

from resilient_train.errors import CheckpointError, StorageError
from resilient_train.integrations.mindspore.network_state import State, difference

_MARK, _CRC_BYTES = b"crc_num", 10
_CHUNK_BYTES = 1 << 24


def write(path: Path, state: State, notes: Mapping[str, Any]) -> None:
    """Writes ``state`` and ``notes`` (``append_dict``), and reads them back. Raises StorageError."""
    entries = [{"name": name, "data": each} for name, each in state.items()]
    try:
        mindspore.save_checkpoint(
            entries, str(path), integrated_save=False, append_dict=dict(notes), crc_check=True, format="ckpt"
        )
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found = read(path)
    except (OSError, RuntimeError, ValueError, CheckpointError) as error:
        raise StorageError(f"{path} could not be written: {error}") from error
    wrong = [name for name in state if name not in found] or [
        told for name, each in state.items() if (told := difference(name, each, found[name]))
    ]
    if wrong:
        raise StorageError(f"{path} was written, and reads back another state: {', '.join(wrong[:3])}")


def read(path: Path) -> dict[str, Any]:
    """Name -> Parameter, or text for what was a text.

    Raises CheckpointError for a file that is damaged, OSError for one that can't be read.
    """
    _check_crc(path)
    try:
        found: dict[str, Any] = mindspore.load_checkpoint(str(path))
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(str(path), f"can't be read: {error}") from error
    return found


def _check_crc(path: Path) -> None:
    trailer_bytes = len(_MARK) + _CRC_BYTES
    left = path.stat().st_size - trailer_bytes
    crc = 0
    with path.open("rb") as file:
        while left > 0:
            chunk = file.read(min(left, _CHUNK_BYTES))
            if not chunk:
                break
            crc, left = zlib.crc32(chunk, crc), left - len(chunk)
        trailer = file.read()
    if left != 0 or not trailer.startswith(_MARK):
        raise CheckpointError(str(path), "has no CRC at its end: it was cut, or saved without crc_check")
    if int.from_bytes(trailer[len(_MARK) :], "big") != crc:
        raise CheckpointError(str(path), "is not what was written: its CRC is another")
