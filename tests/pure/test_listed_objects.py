"""What the collector lists, in a process whose parent has frozen all that it has."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, os
from resilient_train.frameworks.torch.listed_objects import listed

class Thing: pass

before = Thing()
gc.freeze()
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
frozen, mine = gc.get_freeze_count(), Thing()

def found(thing):
    return any(each is thing for each in listed())

assert found(mine) and not found(before)
assert gc.get_freeze_count() == frozen, "nothing was thawed"
gc.freeze()
later = Thing()
assert found(mine) and found(later)
assert gc.get_freeze_count() > frozen, "what the script has frozen is frozen again"
"""


def test_what_a_zygote_has_frozen_is_not_thawed() -> None:
    """To list it takes a fork 0.1 s, and to count it 30 ms."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
