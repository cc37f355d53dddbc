"""A rank's limit of descriptors: the user's but for recoveries. And a thread that has some of its own."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from resilient_train.descriptors import RecoveryLimit, keep_alone


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


def opened(whose: str = "self") -> list[int]:
    return [int(each.name) for each in Path(f"/proc/{whose}/fd").iterdir()]


def _is_open(descriptor: int) -> bool:
    """The listing's own is not, any more."""
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False


def test_a_thread_with_descriptors_of_its_own() -> None:
    """It keeps one, and what it opens and closes is nobody else's business."""
    kept, other = (os.memfd_create(name) for name in ("kept", "other"))
    told: dict[str, object] = {}

    def run() -> None:
        told["alone"] = keep_alone(kept)
        told["there"] = set(filter(_is_open, opened("thread-self")))
        told["opened"] = [os.dup(kept) for _ in range(40)][-1]
        os.close(kept)

    before = opened()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert told["alone"]
    assert told["there"] == {0, 1, 2, kept}
    assert int(str(told["opened"])) >= 40
    assert opened() == before
    for each in (kept, other):
        os.close(each)


def test_where_the_kernel_does_not_do_it_all_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resilient_train.descriptors._CLOSE_RANGE", 10_000)
    kept = os.memfd_create("kept")
    before = opened()
    assert not keep_alone(kept)
    assert opened() == before
    os.close(kept)
