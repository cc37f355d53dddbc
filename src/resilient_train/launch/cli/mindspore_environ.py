"""What is wrong with the variables that MindSpore 2.10, MindIO and HCCL read, before they say it in their own way.

None of them is for us: a wrong one ends MindSpore's import or start with a traceback that does not name it, or does
nothing in silence. ``MS_ENABLE_TFT`` is also ours, see ``mindspore_view``.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.faults import nearest
from resilient_train.launch.cli.findings import Finding, Grade
from resilient_train.launch.cli.mindspore_view import split_at_import
from resilient_train.launch.cli.rank_table import read_rank_table

RANK_TABLE = "RANK_TABLE_FILE"
_MONITORING = "MS_ENABLE_THM"
_IP = "MS_TFT_IP"
_PORT = "MS_TFT_PORT"
_FOR_MINDSPORE = "MINDIO_FOR_MINDSPORE"
_NEED_MINDIO = ("TTP", "UCE", "HCCE", "ARF", "TSP")
_SAVE = "HCCL_STATUS_SAVE"
_SAVE_CONFIG = "HCCL_STATUS_SAVE_CONFIG"
_SAVE_PATH = "HCCL_STATUS_SAVE_PATH"
_SAVE_INTERVAL = "HCCL_STATUS_SAVE_INTERVAL"
_FROM_FILE = "CCAE_"
"""MindSpore's prefix for what stands in the file."""
_KEYS = ("HCCL_WATCHDOG", _SAVE, _SAVE_CONFIG)
_RIGHT_CONFIG = f"{_SAVE_CONFIG}:'FILE.json', with {_SAVE_PATH} and {_SAVE_INTERVAL} in the file"


class _Flag(msgspec.Struct, frozen=True):
    """A variable that is on or off. ``reads``: how its reader tells; ``right``: all values that are clear."""

    reader: str
    reads: Callable[[str], bool]
    right: tuple[str, ...]
    meaning: str


_FLAGS = {
    _FOR_MINDSPORE: _Flag(
        "MindIO",
        lambda text: text.lower() in ("1", "true"),
        ("1", "0", "true", "True", "false", "False"),
        "MindIO works for MindSpore, not for PyTorch",
    ),
    "PROCESS_RECOVER": _Flag(
        "MindCluster's taskd",
        lambda text: text == "on",
        ("on", "off"),
        "taskd recovers processes through MindIO. Whether resilient-run replaces ranks is up to ARF",
    ),
    "RESUME_MODE_ENABLE": _Flag(
        "torch_npu",
        lambda text: re.match(r"\s*[+-]?0*[1-9]", text, re.ASCII) is not None,  # strtol
        ("1", "0"),
        "a torch_npu that reads it only warns where a stream can't be synchronized. It does nothing here",
    ),
}


def look(environ: Mapping[str, str], *, starts: bool = False) -> list[Finding]:
    """What is to say of those of the variables that are set; where MindSpore ``starts`` now, also of what is missing.

    A PROBLEM ends MindSpore's import or start. Raises ConfigError for an ``MS_ENABLE_TFT`` that is wrong.
    """
    switches = config.read_switches(environ) if config.given_switches(environ) else None
    needs = ", ".join(key for key in _NEED_MINDIO if getattr(switches, key.lower(), False))
    # To all readers but that of the port an empty one is one that is not set.
    monitoring = environ.get(_MONITORING, "").strip()
    findings = list(_monitoring(monitoring, arf="ARF" in needs)) if monitoring else []
    findings += _controller(environ, needs, starts=starts)
    findings += [_flag(name, environ[name], needs) for name in _FLAGS if environ.get(name)]
    if environ.get(RANK_TABLE):
        findings.append(_rank_table(environ[RANK_TABLE]))
    return findings


def _rank_table(path: str) -> Finding:
    try:
        table = read_rank_table(path)
    except ConfigError as error:
        return Finding(Grade.PROBLEM, RANK_TABLE, str(error))
    servers = f", servers: {table.servers}" if table.servers else ""
    return Finding(Grade.OK, RANK_TABLE, f"version {table.version}, ranks: {table.ranks}{servers}")


def _flag(name: str, text: str, needs: str) -> Finding:
    flag = _FLAGS[name]
    state = "on" if flag.reads(text) else "off"
    if name == _FOR_MINDSPORE and needs and state == "off":
        told = f"{text!r} is off, so MindIO looks for PyTorch, and MS_ENABLE_TFT has {needs}; write {name}=1"
        return Finding(Grade.NOTE, name, told)
    if text in flag.right:
        return Finding(Grade.OK, name, f"{state}: {flag.meaning}" if state == "on" else state)
    right = " or ".join(flag.right[:2])
    return Finding(Grade.NOTE, name, f"{text!r}: {flag.reader} takes it for {state}; write {right}")


# -- where MindIO's controller is


def _controller(environ: Mapping[str, str], needs: str, *, starts: bool) -> Iterator[Finding]:
    """MindSpore's own callback meets MindIO there, on an Ascend device only."""
    hints = [name for name in (_IP, _PORT, _FOR_MINDSPORE) if environ.get(name)]
    missing = needs and (hints or starts)
    for name, wrong, example in ((_IP, _wrong_ip, "127.0.0.1"), (_PORT, _wrong_port, "30051")):
        text = environ.get(name)
        write = f"write for example {name}={example}"
        if text is None or (name == _IP and not text):
            if missing:
                ends = "MindSpore ends in a TypeError" if name == _PORT else "MindIO's controller gets no address"
                told = f"not set, and MS_ENABLE_TFT has {needs}: on an Ascend device {ends}; {write}"
                yield Finding(Grade.PROBLEM, name, told)
        elif told := wrong(text):
            yield Finding(Grade.PROBLEM if needs else Grade.NOTE, name, f"{text!r} {told}; {write}")
        else:
            used = "MindIO's controller" if needs else "nobody reads it: MS_ENABLE_TFT has nothing that needs MindIO"
            yield Finding(Grade.OK, name, f"{text} ({used})")


def _wrong_ip(text: str) -> str:
    if re.fullmatch(r"[0-9.]+", text):
        with contextlib.suppress(ValueError):
            return "is refused by MindIO" if ipaddress.IPv4Address(text) == ipaddress.IPv4Address(0) else ""
        return "is no IPv4 address"
    if re.fullmatch(r"[\w-]+(\.[\w-]+)*:[0-9]+", text, re.ASCII):
        return f"has the port in it, which belongs into {_PORT}"
    is_name = re.fullmatch(r"[\w-]+(\.[\w-]+)*\.?", text, re.ASCII)
    return "" if is_name else "is neither an IPv4 address nor a host name"


def _wrong_port(text: str) -> str:
    try:
        port = int(text)  # as MindSpore does
    except ValueError:
        return "is no whole number, and MindSpore ends in a ValueError"
    return "" if 1024 <= port <= 65535 else "is refused by MindIO, which takes ports from 1024 to 65535"


# -- MS_ENABLE_THM


def _monitoring(text: str, *, arf: bool) -> Iterator[Finding]:
    try:
        read = _as_imported(text)
    except ConfigError as error:
        yield Finding(Grade.PROBLEM, _MONITORING, str(error))
        return
    told = list(_without_effect(read, arf=arf))
    for each in told:
        yield Finding(Grade.NOTE, _MONITORING, each)
    if not told:
        yield Finding(Grade.OK, _MONITORING, f"{text!r}, for MindSpore alone")


def _as_imported(text: str) -> dict[str, str]:
    """What ``import mindspore`` makes of it and of the file that it names. ConfigError where that ends the import."""
    found: dict[str, str] = {}
    for item in split_at_import(text):
        key, colon, rest = item.partition(":")
        if not colon:
            raise ConfigError(f"{item!r} has no colon, and ends MindSpore's import in an IndexError; {_cure(item)}")
        value = rest.partition(":")[0]  # and what stands behind a second colon is lost
        if key == _SAVE_CONFIG:  # with a space in front it is another key
            found |= {_SAVE_CONFIG: value} | _status_file(value.strip("'\""))
        else:
            found[key.strip()] = value.strip()
    if found.get(_SAVE) == "1" and _FROM_FILE + _SAVE_PATH not in found:
        raise ConfigError(f"{_SAVE}:1 without {_SAVE_PATH} ends MindSpore's import in a TypeError; add {_RIGHT_CONFIG}")
    return found


def _status_file(path: str) -> dict[str, str]:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        wrong = f"can't be read ({error.strerror})"
    except (ValueError, RecursionError):
        wrong = "is no JSON"
    else:
        if isinstance(values, dict):
            return {_FROM_FILE + key: str(values[key]) for key in (_SAVE_PATH, _SAVE_INTERVAL) if key in values}
        wrong = "is no JSON object"
    raise ConfigError(f"{path!r} {wrong}, and that ends MindSpore's import; write {_RIGHT_CONFIG}")


def _cure(item: str) -> str:
    key, equals, value = (each.strip(" \t'\"") for each in item.partition("="))
    if equals:
        return f"write {key}:{value}"
    return f"write {key}:1 or {key}:0" if key in _KEYS else "take it out, or write KEY:VALUE"


def _without_effect(read: dict[str, str], *, arf: bool) -> Iterator[str]:
    for key, value in read.items():
        if key.startswith(_FROM_FILE):
            continue
        if key not in _KEYS:
            hint = nearest(key.strip("'\""), _KEYS) or f"; the keys are {', '.join(_KEYS)}"
            yield f"{key!r} has no effect{hint}"
        elif key != _SAVE_CONFIG and value not in ("0", "1"):
            yield f"{f'{key}:{value}'!r} is neither on nor off; write {key}:1 or {key}:0"
    if arf and read.get("HCCL_WATCHDOG") == "1":
        yield "HCCL_WATCHDOG:1 has no effect: ARF switches MindSpore's watchdog off"
    if read.get(_SAVE) == "1":
        path = read[_FROM_FILE + _SAVE_PATH]
        if not Path(path).is_absolute():
            yield f"{_SAVE_PATH} {path!r} is not absolute: MindSpore writes to /tmp"
        if _FROM_FILE + _SAVE_INTERVAL not in read:
            yield f"{_SAVE_INTERVAL} is missing: MindSpore takes 'None' for it; write {_RIGHT_CONFIG}"
