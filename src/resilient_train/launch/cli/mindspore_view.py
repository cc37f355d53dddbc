"""What MindSpore 2.10 makes of ``MS_ENABLE_TFT`` as it stands, where that is not what is meant.

It reads the variable in three ways: its Python code looks for words, its import splits the text, its C++ code splits it
differently. The table is in ``docs/reference/settings.md``. Whoever is not started by us gets the text as it stands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection

from resilient_train.errors import ConfigError
from resilient_train.tft_switches import SWITCHES, Switches, parse_switches

_IN_CPP = ("UCE", "HCCE", "ARF", "TRE", "RSC")
"""What the C++ code asks for."""
_SPACES = " \t\r\n\f\v"


def differs(text: str) -> str:
    """What MindSpore would make of it; empty where that is what is meant. ``text`` may be one that we refuse."""
    broken = _breaks_import(text)
    if broken is not None:
        return f"MindSpore could not be imported with this: {broken!r} has no colon"
    python, cpp = _by_words(text), _by_cpp(text)
    with contextlib.suppress(ConfigError):
        switches = parse_switches(text)
        meant = _on(switches)
        if python == meant and cpp == meant & {*_IN_CPP}:
            short = switches.tre == 2 and "TRE_SNAPSHOT_STEPS" not in switches.other
            return "MindSpore would take no snapshots: TRE:2 needs TRE_SNAPSHOT_STEPS" if short else ""
    if not python and cpp == set():
        return "MindSpore would switch on nothing, and not say so"
    told = "may crash on an item without a value" if cpp is None else _names(cpp)
    return f"MindSpore's Python code would switch on {_names(python)}, its C++ code {told}"


def _on(switches: Switches) -> set[str]:
    found = {key for key in SWITCHES if getattr(switches, key.lower())}
    return found | ({"ATO"} if switches.other.get("ATO") == "1" else set())


def _names(keys: Collection[str]) -> str:
    return ", ".join(key for key in (*SWITCHES, "ATO") if key in keys) or "nothing"


def _breaks_import(text: str) -> str | None:
    """The item by which ``import mindspore`` ends in an IndexError."""
    return next((item for item in split_at_import(text) if ":" not in item), None)


def split_at_import(text: str) -> list[str]:
    """The items that ``import mindspore`` sees in ``MS_ENABLE_TFT``, and in ``MS_ENABLE_THM``."""
    return [item for item in text.strip().replace("{", "").replace("}", "").strip().split(",") if item]


def _by_words(text: str) -> set[str]:
    """Wherever the words stand, and whatever follows: ``TTP:10`` has ``TTP:1`` in it. ``UCE`` and ``ARF`` stand in each
    place of the code where ``TTP`` does.
    """
    found = {key for key in (*SWITCHES, "ATO") if f"{key}:1" in text} | ({"TRE"} if "TRE:2" in text else set())
    return found | ({"TTP"} if found & {"UCE", "ARF"} else set())


def _by_cpp(text: str) -> set[str] | None:
    """None: it reads behind the end of a list."""
    found = {}
    for item in _split(text.lstrip(_SPACES + "{").rstrip(_SPACES + "}"), ","):
        pair = _split(item, ":")
        if len(pair) < 2:
            return None
        found[pair[0].strip(_SPACES)] = pair[1].strip(_SPACES)
    return {key for key in _IN_CPP if found.get(key) == "1" or (key == "TRE" and found.get(key) == "2")}


def _split(text: str, separator: str) -> list[str]:
    """As ``std::getline`` does: nothing behind a separator at the end."""
    parts = text.split(separator)
    return parts if parts[-1] else parts[:-1]
