"""A loss curve, and the one it should equal, as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_BOTH, _EXPECTED, _SEEN = "●", "·", "o"
_AXIS_WIDTH = 9


def draw(
    expected: Mapping[int, float], seen: Mapping[int, float], faults: Iterable[int] = (), *, width: int, height: int
) -> list[str]:
    """Both curves (step -> loss) in ``width`` columns and ``height`` rows, and a line that marks the faults' steps.

    A column shows the last step that falls into it. Empty where there is nothing to draw.
    """
    values = [*expected.values(), *seen.values()]
    if not values:
        return []
    first, last = min([*expected, *seen]), max([*expected, *seen])
    low, high = min(values), max(values)
    columns = min(width, last - first + 1)

    def column(step: int) -> int:
        return (step - first) * (columns - 1) // max(1, last - first)

    def row(value: float) -> int:
        return round((high - value) / (high - low) * (height - 1)) if high > low else 0

    grid = [[" "] * columns for _ in range(height)]
    shown_expected = {column(step): expected[step] for step in sorted(expected)}
    shown_seen = {column(step): seen[step] for step in sorted(seen)}
    for x, value in shown_expected.items():
        grid[row(value)][x] = _EXPECTED
    for x, value in shown_seen.items():
        grid[row(value)][x] = _BOTH if shown_expected.get(x) == value else _SEEN
    marks = [" "] * columns
    for step in faults:
        if first <= step <= last:
            marks[column(step)] = "▲"
    labels = {0: f"{high:.3f}", height - 1: f"{low:.3f}"}
    lines = [f"{labels.get(y, ''):>{_AXIS_WIDTH}} ┤{''.join(cells).rstrip()}" for y, cells in enumerate(grid)]
    ends = f"{first}{last:>{max(0, columns - len(str(first)))}}"
    blank = " " * _AXIS_WIDTH
    lines += [f"{blank} └{'─' * columns}", f"{blank}  {''.join(marks).rstrip()}".rstrip(), f"{blank}  {ends}"]
    return [line for line in lines if line]


LEGEND = f"{_BOTH} equal in both runs   {_EXPECTED} undisturbed only   {_SEEN} disturbed only   ▲ fault"
