"""What is read of a rank table, and what is said of one that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient_train.errors import ConfigError
from resilient_train.launch.cli.rank_table import RankTable, parse_rank_table, read_rank_table


def by_server(servers: int = 2, devices: int = 2, version: str = "1.0") -> dict[str, Any]:
    def device(server: int, number: int) -> dict[str, Any]:
        rank = server * devices + number
        return {"device_id": str(number), "device_ip": f"192.168.{server}.{number + 1}", "rank_id": str(rank)}

    listed = [
        {
            "server_id": f"10.0.0.{server}",
            "host_ip": f"10.0.0.{server}",
            "container_ip": f"172.16.0.{server}",
            "hardware_type": "any",
            "device": [device(server, number) for number in range(devices)],
        }
        for server in range(servers)
    ]
    return {"status": "completed", "version": version, "server_count": str(servers), "server_list": listed}


def by_rank(ranks: int = 3) -> dict[str, Any]:
    listed = [{"rank_id": rank, "device_id": rank, "level_list": [{"net_layer": 0}]} for rank in range(ranks)]
    return {"status": "completed", "version": "2.0", "rank_list": listed}


def in_a_superpod() -> dict[str, Any]:
    table = by_server(1, 1, version="1.2") | {"super_pod_list": [{"super_pod_id": "0"}]}
    table["server_list"][0]["device"][0]["super_device_id"] = "98369551"
    return table


def without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def parse(table: Any) -> RankTable:
    return parse_rank_table(json.dumps(table).encode())


def changed(table: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    change(table)
    return table


def of_one_device(**values: Any) -> dict[str, Any]:
    """Two servers with two devices each, where the second device of the second server has other values."""
    return changed(by_server(), lambda table: table["server_list"][1]["device"][1].update(values))


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (by_server(), RankTable("1.0", 2, 4)),
        (by_server(1, 16), RankTable("1.0", 1, 16)),
        (without(by_server(), "server_count"), RankTable("1.0", 2, 4)),
        (in_a_superpod(), RankTable("1.2", 1, 1)),
        (by_rank(), RankTable("2.0", 0, 3)),
        (without(by_rank(), "status"), RankTable("2.0", 0, 3)),
        (changed(by_rank(1), lambda table: table["rank_list"][0].update(rank_id="0")), RankTable("2.0", 0, 1)),
        (of_one_device(device_ip="192.168.7.1,192.168.7.2"), RankTable("1.0", 2, 4)),
        (of_one_device(device_ip=""), RankTable("1.0", 2, 4)),
        (of_one_device(device_ip="fd00::1"), RankTable("1.0", 2, 4)),
        (of_one_device(device_id="7"), RankTable("1.0", 2, 4)),
        (of_one_device(rank_id="2", device_id="0"), None),
    ],
)
def test_what_is_read(table: dict[str, Any], expected: RankTable | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError):
            parse(table)
    else:
        assert parse(table) == expected


BROKEN = [
    ([], "expected `object`, got `array`"),
    ({}, "there is no `version`"),
    ({"version": 1.0}, "version: expected `str`, got `float`; write the number in quotes"),
    (by_server(version="1.1"), "version: '1.1' is unknown here; known are 1.0, 1.2, 2.0"),
    (without(by_server(), "status"), "there is no `status`"),
    (by_server() | {"status": "initializing"}, "status: 'initializing', not 'completed': who writes the table has not"),
    (by_rank() | {"status": "initializing"}, "status: 'initializing', not 'completed'"),
    (by_server() | {"server_count": "3"}, "server_count: '3', but server_list has 2"),
    (by_server() | {"server_count": "two"}, "server_count: 'two', but server_list has 2"),
    (by_server() | {"server_count": 2}, "server_count: expected `str | null`, got `int`; write the number in quotes"),
    (without(by_server(), "server_list"), "there is no `server_list`"),
    (by_server(0), "there are no ranks"),
    (by_server(1, 0), "there are no ranks"),
    (by_rank(0), "there are no ranks"),
    (
        of_one_device(rank_id="2"),
        "server_list[1].device[1].rank_id: '2' stands twice in the table: server_list[1].device[0].rank_id has it too",
    ),
    (of_one_device(rank_id="02"), "server_list[1].device[1].rank_id: '02' stands twice"),
    (of_one_device(rank_id="4"), "server_list[1].device[1].rank_id: '4', but 4 ranks are 0 to 3"),
    (of_one_device(rank_id="-1"), "server_list[1].device[1].rank_id: '-1' is no whole number from 0"),
    (of_one_device(rank_id="9" * 5000), "is no whole number from 0"),
    (of_one_device(rank_id="٣"), "is no whole number from 0"),
    (of_one_device(rank_id=3), "server_list[1].device[1].rank_id: expected `str`, got `int`; write the number in"),
    (
        of_one_device(device_id="0"),
        "server_list[1].device[1].device_id: '0' stands twice on one server: server_list[1]",
    ),
    (of_one_device(device_id=""), "server_list[1].device[1].device_id: '' is no whole number from 0"),
    (of_one_device(device_ip="192.168.1.256"), "server_list[1].device[1].device_ip: '192.168.1.256' is no IP address"),
    (of_one_device(device_ip="192.168.1.1,x"), "server_list[1].device[1].device_ip: 'x' is no IP address"),
    (
        changed(by_server(), lambda table: table["server_list"][0].update(host_ip="host")),
        "server_list[0].host_ip: 'host' is no IP address",
    ),
    (
        changed(by_server(), lambda table: table["server_list"][1].update(container_ip="1.2.3")),
        "server_list[1].container_ip: '1.2.3' is no IP address",
    ),
    (
        changed(by_rank(), lambda table: table["rank_list"][2].update(rank_id=1)),
        "rank_list[2].rank_id: '1' stands twice in the table: rank_list[1].rank_id has it too",
    ),
    (
        changed(by_rank(), lambda table: table["rank_list"][2].update(rank_id=3)),
        "rank_list[2].rank_id: '3', but 3 ranks are 0 to 2",
    ),
    (
        changed(by_rank(), lambda table: table["rank_list"][2].pop("level_list")),
        "there is no `level_list`",
    ),
    (by_server() | {"server_count": "3", "status": ""}, "'completed': who writes the table has not finished it (and 1"),
]


@pytest.mark.parametrize(("table", "told"), BROKEN, ids=[told[:40] for _, told in BROKEN])
def test_what_is_wrong_is_told_with_its_place(table: Any, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(table)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"", b"hccl", b'{"version": "1.0",}', b'{"version": "\xff"}', b"[" * 100_000])
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_rank_table(data)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hccl.json"
    with pytest.raises(ConfigError, match=r"there is no file '.*/hccl.json'"):
        read_rank_table(str(path))
    with pytest.raises(ConfigError, match=r"there is no file"):
        read_rank_table(str(tmp_path))
    with pytest.raises(ConfigError, match=r"can't be read: File name too long"):
        read_rank_table("x" * 5000)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"hccl.json': this is no JSON: "):
        read_rank_table(str(path))
    path.write_text(json.dumps(by_server()))
    assert read_rank_table(str(path)) == RankTable("1.0", 2, 4)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
numbers = st.sampled_from(["0", "1", "2", "00", "x", ""]) | st.integers(0, 2) | anything
devices = st.fixed_dictionaries({"device_id": numbers, "rank_id": numbers}, optional={"device_ip": anything})
servers = st.fixed_dictionaries({"server_id": st.text(), "device": st.lists(devices, max_size=3)})
ranks = st.fixed_dictionaries({"rank_id": numbers, "level_list": st.lists(st.just({}), max_size=1)})
near = st.fixed_dictionaries(
    {"version": st.sampled_from(["1.0", "1.2", "2.0"]), "status": st.just("completed")},
    optional={
        "server_count": numbers,
        "server_list": st.lists(servers, max_size=2) | anything,
        "rank_list": st.lists(ranks, max_size=3) | anything,
    },
)


@given(near | anything)
def test_any_json_gives_a_table_or_one_line(table: Any) -> None:
    try:
        read = parse(table)
    except ConfigError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        return
    devices = [table["rank_list"]] if read.version == "2.0" else [each["device"] for each in table["server_list"]]
    listed = [each for some in devices for each in some]
    assert sorted(int(each["rank_id"]) for each in listed) == list(range(read.ranks)), "each rank once"


@given(st.binary())
def test_any_bytes_give_a_table_or_an_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        parse_rank_table(data)
