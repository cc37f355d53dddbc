"""The kills as a picture: a bar for each system, split at the places that whoever begins anew passes."""

from __future__ import annotations

import statistics
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from peers.recoveries import PARTS

_LEFT, _RIGHT, _TOP, _ROW, _BAR, _WIDTH = 265, 185, 66, 30, 16, 960
_FONT = 'font-family="system-ui, sans-serif"'
# Readable on white and on black: a page may be shown on either.
_INK = "#7a7f87"
_SEGMENTS = {
    "first_line": ("noticed, stopped, started anew", "#c0504d"),
    "imported": ("imports", "#e0a458"),
    "entered": ("noticed, stopped, started anew", "#c0504d"),
    "ready": ("group, model, state", "#5b8fb9"),
    "end": ("first step", "#5aa469"),
    "caught_up": ("steps done again", "#9b7bb8"),
}


class Bar(NamedTuple):
    """Medians of one system: the ends of its segments in seconds, and when the survivors went on."""

    name: str
    ends: list[tuple[str, float]]
    survivors: float | None
    all_back: bool


def bars(results: list[dict[str, Any]]) -> list[Bar]:
    """Those systems that came through a kill, and those that did not, without any segment."""
    found = []
    for result in results:
        if "kill" not in result:
            continue
        kills = result["kill"]["faults"]
        back = [each for each in kills if each["all_ms"] is not None]
        used = back or [each for each in kills if each["survivors_ms"] is not None]
        ends = [
            (name, _median([each["parts_ms"][name] for each in used if name in each["parts_ms"]])) for name in PARTS
        ]
        ends.append(("end", _median([each["all_ms" if back else "survivors_ms"] for each in used])))
        ends.append(("caught_up", _median([each["caught_up_ms"] for each in used if each["caught_up_ms"] is not None])))
        survivors = _median([each["survivors_ms"] for each in kills if each["survivors_ms"] is not None])
        whole = [(name, end / 1000) for name, end in ends if end is not None]
        found.append(Bar(result["name"], whole, None if survivors is None else survivors / 1000, bool(back)))
    return found


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def drawing(results: list[dict[str, Any]]) -> str:
    """The picture as SVG."""
    rows = bars(results)
    longest = max((end for bar in rows for _, end in bar.ends), default=1.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    height = _TOP + _ROW * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT} font-size="13">',
        _text(10, 20, "kill -9 of one of 4 ranks: seconds until all ranks have committed the next step", weight="bold"),
        *_legend(),
        *_axis(longest, scale, height),
    ]
    for index, bar in enumerate(rows):
        parts += _row(bar, _TOP + _ROW * index, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(bar: Bar, top: float, scale: float) -> list[str]:
    middle = top + _ROW / 2
    parts = [_text(_LEFT - 10, middle + 4, bar.name, anchor="end")]
    begin = 0.0
    for name, until in bar.ends:
        end = max(begin, until)  # medians of different faults need not be in order
        width = max((end - begin) * scale, 0.8)
        left = _LEFT + begin * scale
        color = _SEGMENTS[name][1]
        parts.append(
            f'<rect x="{left:.1f}" y="{middle - _BAR / 2}" width="{width:.1f}" height="{_BAR}" fill="{color}"/>'
        )
        begin = end
    if not bar.ends:
        return [*parts, _text(_LEFT + 6, middle + 4, "does not go on")]
    whole = next(until for name, until in bar.ends if name == "end")
    note = f"{whole:.2f}" if bar.all_back else f"{whole:.2f}, without the lost rank"
    parts.append(_text(_LEFT + begin * scale + 6, middle + 4, note))
    if bar.all_back and bar.survivors is not None and bar.survivors < 0.9 * whole:
        at = _LEFT + bar.survivors * scale
        parts.append(f'<path d="M{at:.1f} {middle - 11} l4 -5 h-8 z" fill="{_INK}"/>')
    return parts


def _legend() -> list[str]:
    parts = []
    left = 10.0
    for label, color in dict(_SEGMENTS.values()).items():
        parts.append(f'<rect x="{left:.0f}" y="34" width="12" height="12" fill="{color}"/>')
        parts.append(_text(left + 17, 45, label))
        left += 34 + 7 * len(label)
    return parts


def _axis(longest: float, scale: float, height: float) -> list[str]:
    step = next((each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if longest / each <= 8), 50)
    parts = []
    for number in range(int(longest / step) + 1):
        at = _LEFT + number * step * scale
        parts.append(f'<path d="M{at:.1f} {_TOP - 4} V{height - 26}" stroke="{_INK}" stroke-opacity="0.35"/>')
        parts.append(_text(at, height - 10, f"{number * step:g} s", anchor="middle"))
    return parts


def _text(left: float, top: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text {place} fill="{_INK}">{escape(text)}</text>'
