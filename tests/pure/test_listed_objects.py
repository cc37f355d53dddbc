"""What the collector lists, in a process whose parent has frozen all that it has."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from resilient_train.frameworks.torch.watching.listed_objects import instances_of

PROGRAM = """
import gc, os
from resilient_train.frameworks.torch.watching.listed_objects import listed

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


class Strange(type):
    """No key of a dictionary, and not to be asked for anything."""

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)

    __hash__ = None  # type: ignore[assignment]


class Proxy(metaclass=Strange):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("asked")


class Thing: ...


class Kind(Thing): ...


def test_instances_are_found_among_objects_that_can_not_be_asked() -> None:
    """One was enough, anywhere in the process, and a job with pipelines could not go on behind a fault."""
    proxy, one, other = Proxy(), Thing(), Kind()
    found = instances_of(Thing)
    assert {id(one), id(other)} == {id(each) for each in found}
    assert [id(each) for each in instances_of(Proxy)] == [id(proxy)]
