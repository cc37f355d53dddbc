"""Reads ``RANK_TABLE_FILE``: which rank is on which device of which server (``hccl.json``, versions 1.0, 1.2 and 2.0).

Only what is published of the format is looked at. What else stands in the file is left to HCCL.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from resilient_train.errors import ConfigError


class RankTable(msgspec.Struct, frozen=True):
    """What a table without errors says. ``servers`` is 0 in version 2.0, which names none."""

    version: str
    servers: int
    ranks: int


class _Head(msgspec.Struct):
    version: str


class _Device(msgspec.Struct):
    device_id: str
    rank_id: str
    device_ip: str = ""
    """Several with commas in between; not every device has one."""
    super_device_id: str = ""


class _Server(msgspec.Struct):
    server_id: str
    device: list[_Device]
    host_ip: str = ""
    container_ip: str = ""


class _ByServer(msgspec.Struct):
    """Versions 1.0 and 1.2. All numbers are strings."""

    status: str
    server_list: list[_Server]
    server_count: str | None = None
    super_pod_list: list[dict[str, Any]] = []


class _Rank(msgspec.Struct):
    rank_id: int | str
    level_list: list[dict[str, Any]]


class _ByRank(msgspec.Struct):
    """Version 2.0."""

    rank_list: list[_Rank]
    status: str = "completed"


_BY_SERVER = ("1.0", "1.2")
_BY_RANK = "2.0"
_T = TypeVar("_T")


def read_rank_table(path: str) -> RankTable:
    """Raises ConfigError, with the file's name, for one that can't be read or is wrong."""
    try:
        data = Path(path).read_bytes() if Path(path).is_file() else None
    except OSError as error:
        raise ConfigError(f"{path!r} can't be read: {error.strerror}") from None
    if data is None:
        raise ConfigError(f"there is no file {path!r}")
    try:
        return parse_rank_table(data)
    except ConfigError as error:
        raise ConfigError(f"{path!r}: {error}") from None


def parse_rank_table(data: bytes) -> RankTable:
    """Raises ConfigError for what is wrong first, with its place in the table, and how much more is."""
    version = _decode(data, _Head).version
    if version in _BY_SERVER:
        by_server = _decode(data, _ByServer)
        _refuse(_wrong_servers(by_server))
        ranks = sum(len(server.device) for server in by_server.server_list)
        return RankTable(version, len(by_server.server_list), ranks)
    if version == _BY_RANK:
        by_rank = _decode(data, _ByRank)
        _refuse(_wrong_ranks(by_rank))
        return RankTable(version, 0, len(by_rank.rank_list))
    raise ConfigError(f"version: {version!r} is unknown here; known are {', '.join((*_BY_SERVER, _BY_RANK))}")


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        wrong, _, place = str(error).partition(" - at `$")
        wrong = wrong.replace("Object missing required field", "there is no").replace("Expected", "expected")
        hint = "; write the number in quotes" if re.match(r"expected `str.*got `(int|float)`", wrong) else ""
        where = place.strip(".`")
        raise ConfigError(f"{where}{': ' if where else ''}{wrong}{hint}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"this is no JSON: {error}") from None


def _refuse(wrong: Iterable[str]) -> None:
    first, *more = [*wrong, ""]
    if first:
        count = len(more) - 1
        raise ConfigError(first + (f" (and {count} more)" if count else ""))


def _wrong_servers(table: _ByServer) -> Iterator[str]:
    yield from _wrong_status(table.status)
    servers = table.server_list
    if table.server_count is not None and _number(table.server_count) != len(servers):
        yield f"server_count: {table.server_count!r}, but server_list has {len(servers)}"
    ranks: list[tuple[str, str]] = []
    for index, server in enumerate(servers):
        at = f"server_list[{index}]"
        for name in ("host_ip", "container_ip"):
            yield from _wrong_address(f"{at}.{name}", getattr(server, name))
        places = [f"{at}.device[{number}]" for number in range(len(server.device))]
        devices = list(zip(places, server.device, strict=True))
        yield from _wrong_numbers([(f"{place}.device_id", each.device_id) for place, each in devices], "on one server")
        for place, each in devices:
            for address in each.device_ip.split(","):
                yield from _wrong_address(f"{place}.device_ip", address.strip())
        ranks += [(f"{place}.rank_id", each.rank_id) for place, each in devices]
    yield from _wrong_rank_ids(ranks)


def _wrong_ranks(table: _ByRank) -> Iterator[str]:
    yield from _wrong_status(table.status)
    yield from _wrong_rank_ids(
        [(f"rank_list[{i}].rank_id", str(each.rank_id)) for i, each in enumerate(table.rank_list)]
    )


def _wrong_status(status: str) -> Iterator[str]:
    if status != "completed":
        yield f"status: {status!r}, not 'completed': who writes the table has not finished it"


def _wrong_rank_ids(ids: Sequence[tuple[str, str]]) -> Iterator[str]:
    if not ids:
        yield "there are no ranks"
    yield from _wrong_numbers(ids, "in the table")
    for place, text in ids:
        number = _number(text)
        if number is not None and number >= len(ids):
            yield f"{place}: {text!r}, but {len(ids)} ranks are 0 to {len(ids) - 1}"


def _wrong_numbers(ids: Sequence[tuple[str, str]], where: str) -> Iterator[str]:
    """What is no number, and what stands twice. An id comes with its place."""
    first: dict[int, str] = {}
    for place, text in ids:
        number = _number(text)
        if number is None:
            yield f"{place}: {text!r} is no whole number from 0"
        elif number in first:
            yield f"{place}: {text!r} stands twice {where}: {first[number]} has it too"
        else:
            first[number] = place


def _number(text: str) -> int | None:
    # The length first: Python makes no number of thousands of digits.
    return int(text) if len(text) <= 10 and text.isascii() and text.isdecimal() else None


def _wrong_address(place: str, text: str) -> Iterator[str]:
    if text and not _is_address(text):
        yield f"{place}: {text!r} is no IP address"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
