"""Who holds what."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.errors import ConfigError
from resilient_train.protocol.messages import Started
from resilient_train.protocol.replicas import ReplicaTable, agreed


def test_ranks_that_give_other_groups() -> None:
    def started(*replicas: tuple[int, ...]) -> Started:
        return Started("", (), replicas)

    pairs = started((0, 2), (1, 3))
    assert agreed(dict.fromkeys(range(4), pairs)).groups == ((0, 2), (1, 3))
    with pytest.raises(ConfigError, match=r"ranks \[1, 3\] gave other replica groups than rank 0"):
        agreed({0: pairs, 1: started((0, 1), (2, 3)), 2: pairs, 3: started()})


def test_default_is_one_group() -> None:
    assert ReplicaTable(3).groups == ((0, 1, 2),)
    assert ReplicaTable(3).peers(1) == (0, 1, 2)


def test_shards() -> None:
    table = ReplicaTable(4, [[0, 2], [1, 3]])
    assert table.peers(3) == (1, 3)
    assert table.assign_sources([0, 3], [1, 2]) == {0: 2, 3: 1}


def test_a_shard_without_holder_is_missing() -> None:
    assert ReplicaTable(4, [[0, 2], [1, 3]]).assign_sources([0, 1, 3], [2]) == {0: 2}


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([[0, 1]], r"rank \[2\] in none"),
        ([[0, 1, 2, 5]], r"rank \[5\] not in a world of 3"),
        ([[0, 1], [1, 2]], r"rank \[1\] in more than one"),
        ([[0, -1, 1, 2]], r"rank \[-1\] not in"),
    ],
)
def test_wrong_tables_say_what_is_wrong(groups: list[list[int]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ReplicaTable(3, groups)


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_load_is_even_and_sources_hold_the_shard(empty: set[int], holders: set[int]) -> None:
    table = ReplicaTable(8, [[0, 1, 2, 3], [4, 5, 6, 7]])
    sources = table.assign_sources(empty, holders)
    for group in table.groups:
        held = holders & set(group)
        wanting = empty & set(group)
        assert (wanting & set(sources)) == (wanting if held else set())
        load = [sum(source == h for source in sources.values()) for h in held]
        assert not load or max(load) - min(load) <= 1
    assert all(source in holders and source in table.peers(target) for target, source in sources.items())
