"""What ``MS_ENABLE_TFT`` says: which recoveries are on. And its normal form, which all of MindSpore reads alike.

Punctuation is forgiven: no braces, or one, quotes, spaces, commas too many. Names and values are not: they are as in
MindSpore's documents, or refused. MindSpore itself forgives nothing of that everywhere, and mostly in silence.
"""

from __future__ import annotations

import re
import unicodedata

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.faults import nearest

SWITCHES = ("TTP", "UCE", "HCCE", "ARF", "TRE", "TSP", "RSC")
_OTHER_KEYS = ("TRE_SNAPSHOT_STEPS", "ATO", "ATO_PATH", "ATO_THRESHOLD")
_KEYS = (*SWITCHES, *_OTHER_KEYS)
_NUMBERS = ("TRE_SNAPSHOT_STEPS", "ATO_THRESHOLD")
_NUMBER_MAX = (1 << 31) - 1
"""MindSpore's C++ code makes an ``int`` of them, or 0 where none can hold them."""
_RIGHT = {
    "TRE": "TRE:1, TRE:2 or TRE:0",
    "TRE_SNAPSHOT_STEPS": "for example TRE_SNAPSHOT_STEPS:10",
    "ATO_PATH": "for example ATO_PATH:./ato_info.json",
    "ATO_THRESHOLD": "for example ATO_THRESHOLD:10",
}
"""How keys are written that are not just on or off."""
_QUOTES = "'\""
_EDGES = "{}'\" \t\r\n\f\v"
_MEANT = str.maketrans({**dict.fromkeys(";|、", ","), "=": ":", **dict.fromkeys("“”‘’`", "'")})
_WORDS = {"TRUE": "1", "ON": "1", "YES": "1", "FALSE": "0", "OFF": "0", "NO": "0"}


class Switches(msgspec.Struct, frozen=True):
    """Which recoveries are on. ``tre`` is 0, 1 or 2 (2: from the memory snapshot)."""

    ttp: bool = False
    uce: bool = False
    hcce: bool = False
    arf: bool = False
    tre: int = 0
    tsp: bool = False
    rsc: bool = False
    other: dict[str, str] = {}


DEFAULT_SWITCHES = Switches(ttp=True, uce=True, hcce=True, arf=True, tsp=True)
"""What ``resilient-run`` turns on when ``MS_ENABLE_TFT`` is not set."""


def parse_switches(text: str) -> Switches:
    """Parses ``MS_ENABLE_TFT``, e.g. ``{TTP:1,UCE:1,ARF:1}``; braces, quotes and spaces are optional.

    Raises ConfigError for an unknown key or value. ``UCE`` and ``ARF`` imply ``TTP``, as in MindSpore.
    """
    found: dict[str, str] = {}
    for item in _items(text):
        key, value = _pair(item)
        if wrong := _wrong(key, value):
            meant = _meant(item)
            raise ConfigError(f"MS_ENABLE_TFT: {_shown(item)} is wrong; write {meant}" if meant else wrong)
        if key in found:
            raise ConfigError(f"MS_ENABLE_TFT: {key!r} stands twice; write it once")
        found[key] = str(int(value)) if key in _NUMBERS else value
    on = {key.lower(): found.get(key, "0") == "1" for key in SWITCHES if key != "TRE"}
    on["ttp"] = on["ttp"] or on["uce"] or on["arf"]
    other = {key: value for key, value in found.items() if key in _OTHER_KEYS}
    return Switches(tre=int(found.get("TRE", "0")), other=other, **on)


def normal_form(text: str) -> str:
    """The same switches in the one way of writing that all of MindSpore's parsers read alike: ``{TTP:1,UCE:1}``.

    What is off is left out: to all of them that is the same, and MindSpore would append ``TTP:1`` to a text with
    ``TTP:0``. A blank text gives an empty one, which MindSpore takes for a variable that is not set.
    """
    switches = parse_switches(text)
    if not text.strip():
        return ""
    values = {key: str(int(getattr(switches, key.lower()))) for key in SWITCHES} | switches.other
    off = [key for key in (*SWITCHES, "ATO") if values.get(key) == "0"]
    return "{" + ",".join(f"{key}:{values[key]}" for key in _KEYS if key in values and key not in off) + "}"


def _items(text: str) -> list[str]:
    # Spaces in ASCII only: MindSpore's C++ code knows no others.
    close = re.sub(r"\s*:\s*", ":", text.strip(_EDGES), flags=re.ASCII)
    return [item for item in re.split(r"[,\s]+", close, flags=re.ASCII) if item]


def _pair(item: str) -> tuple[str, str]:
    key, _, value = item.partition(":")
    return key.strip(_QUOTES), value.strip(_QUOTES)


def _wrong(key: str, value: str) -> str:
    """What is wrong, and the nearest right thing; empty if nothing is."""
    if key not in _KEYS:
        if key.startswith("HCCL_"):
            return f"MS_ENABLE_TFT: unknown key {key!r}: it belongs into MS_ENABLE_THM"
        hint = nearest(key.upper(), _KEYS) or f"; the keys are {', '.join(_KEYS)}"
        return f"MS_ENABLE_TFT: unknown key {_shown(key)}{hint}"
    right = _RIGHT.get(key, f"{key}:1 or {key}:0")
    if not value:
        return f"MS_ENABLE_TFT: {key!r} has no value; write {right}"
    if key == "ATO_PATH":
        return _wrong_path(value)
    if key in _NUMBERS:
        # The length first: Python makes no number of thousands of digits.
        if value.isascii() and value.isdecimal() and len(value) <= 10 and 0 < int(value) <= _NUMBER_MAX:
            return ""
        return (
            f"MS_ENABLE_TFT: {_shown(f'{key}:{value}')} must be a whole number above 0, and below 2^31; write {right}"
        )
    if value in ("0", "1") or (key == "TRE" and value == "2"):
        return ""
    return f"MS_ENABLE_TFT: {_shown(f'{key}:{value}')} is wrong; write {right}"


def _wrong_path(path: str) -> str:
    """Some of MindSpore's parsers look for switches in the whole text, or take out all braces: in a path as well."""
    plain = _plain(path)
    for on in (*(f"{key}:1" for key in (*SWITCHES, "ATO")), "TRE:2"):
        if on in plain:
            return f"MS_ENABLE_TFT: ATO_PATH:{path!r} has {on} in it, which is a switch; choose another path"
    if "{" in path or "}" in path:
        return f"MS_ENABLE_TFT: ATO_PATH:{path!r} has a brace in it; choose another path"
    return ""


def _meant(item: str) -> str:
    """What somebody wrote who used other signs or words for the same; empty if that isn't clear, or isn't right."""
    pairs = []
    for each in _items(_plain(item)):
        key, value = _pair(each.strip(_EDGES))
        pairs.append((key.upper(), _WORDS.get(value.upper(), value)))
    right = pairs and not any(_wrong(key, value) for key, value in pairs)
    return ",".join(f"{key}:{value}" for key, value in pairs) if right else ""


def _plain(text: str) -> str:
    """In ASCII what only looks so (full-width characters, a word processor's quotes), without what can't be seen."""
    visible = (each for each in unicodedata.normalize("NFKC", text) if unicodedata.category(each) != "Cf")
    return "".join(visible).translate(_MEANT)


def _shown(text: str) -> str:
    """In quotes, and the first character named that only looks like a right one."""
    odd = next((each for each in text if not each.isascii()), "")
    return f"{text!r} ({unicodedata.name(odd, f'U+{ord(odd):04X}')})" if odd else repr(text)


def snapshot_steps(switches: Switches) -> int:
    """After so many steps each ``TRE:2`` wants a snapshot in memory; 0: it wants none."""
    return int(switches.other.get("TRE_SNAPSHOT_STEPS", "0")) if switches.tre == 2 else 0


class AutoSave(msgspec.Struct, frozen=True):
    """What ``ATO:1`` asks for: saves at the best interval. The defaults are MindSpore's."""

    path: str = "./ato_info.json"
    """Failures and steps of earlier runs, see ``state.failures.parse_ato_info``."""
    threshold: int = 10
    """From so many failures on only what was seen counts, see ``state.failures.FailureRate.seen``."""


def auto_save(switches: Switches) -> AutoSave | None:
    """How ``ATO`` is set; None where it isn't on. It may stand beside the other switches, which MindSpore refuses."""
    if switches.other.get("ATO") != "1":
        return None
    usual = AutoSave()
    threshold = int(switches.other.get("ATO_THRESHOLD", usual.threshold))
    return AutoSave(switches.other.get("ATO_PATH", usual.path), threshold)
