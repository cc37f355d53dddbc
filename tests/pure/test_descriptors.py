"""A rank's limit of descriptors: the user's but for recoveries."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_train.descriptors import RecoveryLimit


@pytest.fixture
def own() -> Iterator[tuple[int, int]]:
    """This process's limit: a soft one that is not the hard one, and above what is open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = (len(list(Path("/proc/self/fd").iterdir())) + 200, before[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def current() -> tuple[int, int]:
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_all_that_there_are_while_a_rank_recovers(own: tuple[int, int]) -> None:
    limit = RecoveryLimit()
    limit.lower()
    assert current() == own, "nothing was lifted"
    for _ in range(2):
        limit.lift()
        limit.lift()
        assert current() == (own[1], own[1])
        limit.lower()
        assert current() == own


def test_old_groups_do_not_take_what_the_user_had(own: tuple[int, int]) -> None:
    limit = RecoveryLimit()
    limit.lift()
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(own[0])]
    limit.lower()
    later = [os.open("/dev/null", os.O_RDONLY) for _ in range(50)]
    assert current()[0] > own[0]
    for each in (*held, *later):
        os.close(each)
    limit.lift()
    limit.lower()
    assert current()[0] > own[0], "what was given stays"


def test_a_limit_that_somebody_sets_meanwhile_stays(own: tuple[int, int]) -> None:
    limit = RecoveryLimit()
    limit.lift()
    resource.setrlimit(resource.RLIMIT_NOFILE, (own[0] + 7, own[1]))
    limit.lower()
    assert current() == (own[0] + 7, own[1])
