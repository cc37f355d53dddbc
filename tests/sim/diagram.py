"""Writes ``docs/reference/rank-machine.md``: what the rows of ``protocol/rank.py`` do, as simulated jobs show it.

python tests/sim/diagram.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from mutants import Shape, shapes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "rank-machine.md"
HEALTHY = ("Setup", "Meet", "Open", "Body", "Verify", "Barrier", "Update", "Tail", "Finish", "Left")
TEXT = """# The rank machine

Drawn by `python tests/sim/diagram.py` from what `protocol/rank.py` answers in simulated jobs, and what only real ones
come to (`tests/sim/answers.txt`); do not edit. What the states mean stands at the head of
[rank.py](../../src/resilient_train/protocol/rank.py), events and effects in the files beside it. The words are those of
[the protocol](../protocol.md).

## Without a fault

```mermaid
stateDiagram-v2
{healthy}
```

## With faults

Everything that is not above. `Stopped` leads to `Quiet` from every state that waits: a newer recovery has begun.

```mermaid
stateDiagram-v2
{faults}
```

## Row by row

What a row returns depends on what the rank knows: each line is one answer, with the states that followed.

| state | event | effects | next |
|---|---|---|---|
{rows}
"""


def page(seen: Iterable[Shape]) -> str:
    """The whole page."""
    edges: dict[tuple[str, str], set[str]] = defaultdict(set)
    rows: dict[tuple[str, str, tuple[str, ...]], set[str]] = defaultdict(set)
    for shape in seen:
        before, event = shape.row.split("+")
        after = shape.after.partition("(")[0]
        edges[before, after].add(event)
        rows[before, event, shape.effects].add(after)
    stays = {pair for pair in edges if pair[0] == pair[1]}
    plain = {pair for pair in edges if set(pair) <= set(HEALTHY)} - stays
    return TEXT.format(
        healthy=_drawn({pair: edges[pair] for pair in plain}),
        faults=_drawn({pair: edges[pair] for pair in edges.keys() - plain - stays}),
        rows="\n".join(
            f"| {state} | {event} | {', '.join(effects)} | {' '.join(sorted(after))} |"
            for (state, event, effects), after in sorted(rows.items())
        ),
    )


def _drawn(edges: dict[tuple[str, str], set[str]]) -> str:
    return "\n".join(f"    {a} --> {b}: {', '.join(sorted(events))}" for (a, b), events in sorted(edges.items()))


if __name__ == "__main__":
    PAGE.write_text(page(shapes()))
