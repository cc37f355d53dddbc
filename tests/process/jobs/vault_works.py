"""Works for a holder under test."""

import os
from pathlib import Path

import xxhash

from resilient_train.state.vault.holder_work import WorkOrder


def digest(order: WorkOrder) -> bytes:
    (part,) = order.parts
    assert len(part.region) % 65536 == 0
    assert part.region.readonly
    return xxhash.xxh3_128_digest(part.region[: part.snapshot.image_bytes])


def wait(order: WorkOrder) -> bytes:
    """Until somebody has written to the named pipe ``argument``."""
    return Path(os.fsdecode(order.argument)).read_bytes()


def fail(order: WorkOrder) -> bytes:
    raise OSError(28, f"no room for snapshot {order.parts[0].snapshot.sequence}")


def write_down(order: WorkOrder) -> bytes:
    """Rank and update of each, into the file ``argument``."""
    told = ", ".join(f"{each.snapshot.rank}: {each.snapshot.commits}" for each in order.parts)
    Path(os.fsdecode(order.argument)).write_text(told)
    return b""
