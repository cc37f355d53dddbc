"""How many spikes of a norm or a loss are found, and how many good values are taken for one.

``python benchmarks/spikes.py``: curves that are made, and two of a small GPT that is trained here (its loss and its
gradients' norm, one process). One value in 50 is made larger by a factor. Beside what TRE does: a threshold at twice
the highest of the first 500 values, which is what somebody would set who has watched a run begin; and mean plus six
standard deviations of the last 64.

A cell says which share of the spikes is found (recall), and which share of what is taken for a spike is one
(precision). The second hangs on how many there are: where they are a hundred times rarer, there are a hundred times as
many false ones for each right one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from common import Table, show, write_json

from resilient_train.observe.usual import Usual

FACTORS = (1.5, 2.0, 3.0, 10.0, 1000.0)
ONE_IN = 50
QUIET = 500
"""Values at the beginning without a spike."""


class Rule(Protocol):
    def look(self, value: float) -> bool: ...


class Ours:
    def __init__(self) -> None:
        self._usual = Usual()

    def look(self, value: float) -> bool:
        found = self._usual.spike(value) is not None
        self._usual.add(value)
        return found


class Fixed:
    def __init__(self) -> None:
        self._count, self._highest = 0, 0.0

    def look(self, value: float) -> bool:
        if self._count < 500:
            self._count, self._highest = self._count + 1, max(self._highest, value)
            return False
        return value >= 2 * self._highest


class ZScore:
    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=64)

    def look(self, value: float) -> bool:
        enough = len(self._values) >= 16
        mean = sum(self._values) / max(len(self._values), 1)
        spread = math.sqrt(sum((each - mean) ** 2 for each in self._values) / max(len(self._values), 1))
        found = enough and value > mean + 6 * spread
        self._values.append(value)
        return found


RULES: dict[str, Callable[[], Rule]] = {"ours": Ours, "threshold": Fixed, "z-score": ZScore}


def made(name: str, steps: int) -> list[float]:
    """A curve, always the same."""
    drawn = random.Random(name)
    falling = [2.0 + 8.0 * math.exp(-10 * number / steps) for number in range(steps)]
    kinds: dict[str, Callable[[int], float]] = {
        "loss, falling": lambda n: falling[n] + drawn.gauss(0, 0.1),
        "norm, skewed": lambda _: drawn.lognormvariate(0, 0.3),
        "norm, very skewed": lambda _: drawn.lognormvariate(0, 0.6),
        "norm, warm-up": lambda n: min(1.0, (n + 1) / 500) * drawn.lognormvariate(0, 0.3),
        "norm, 20 levels": lambda n: (1 + 4 * (n * 20 // steps % 2)) * drawn.lognormvariate(0, 0.3),
    }
    return [kinds[name](number) for number in range(steps)]


KINDS = ("loss, falling", "norm, skewed", "norm, very skewed", "norm, warm-up", "norm, 20 levels")


def trained(steps: int) -> dict[str, list[float]]:
    """Loss and norm of each step of the demonstration's model."""
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader

    from resilient_train.demo.gpt import GPT
    from resilient_train.demo.text import VOCABULARY, Windows

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, data = GPT(VOCABULARY, 64, width=64, depth=3), DataLoader(Windows(64), batch_size=4, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 100))
    found: dict[str, list[float]] = {"GPT, loss": [], "GPT, norm": []}

    def batches() -> Iterator[Any]:
        while True:
            yield from data

    for inputs, targets in batches():
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        found["GPT, norm"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        found["GPT, loss"].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        warm.step()
        if len(found["GPT, loss"]) == steps:
            return found
    raise AssertionError


def recorded(name: str | None, steps: int) -> dict[str, list[float]]:
    """``trained``, or what it has left in that file before."""
    file = Path(name) if name else None
    if file is not None and file.exists():
        curves: dict[str, list[float]] = json.loads(file.read_text())
        return curves
    curves = trained(steps)
    if file is not None:
        file.write_text(json.dumps(curves) + "\n")
    return curves


def measure(curve: Sequence[float], rule: Callable[[], Rule]) -> dict[str, Any]:
    """By factor: which share of the spikes is found (recall), and which share of what is found is one (precision; None:
    nothing is found). And of the curve without spikes, how many values are taken for one, per 100,000.
    """
    recall: dict[str, float] = {}
    precision: dict[str, float | None] = {}
    quiet = rule()
    begun = sum(quiet.look(value) for value in curve)
    for factor in FACTORS:
        drawn, each, hits, spikes, called = random.Random(factor), rule(), 0, 0, 0
        for number, value in enumerate(curve):
            spike = number >= QUIET and drawn.random() < 1 / ONE_IN
            seen = each.look(value * factor if spike else value)
            hits, spikes, called = hits + (spike and seen), spikes + spike, called + seen
        recall[f"x{factor:g}"] = 100 * hits / spikes
        precision[f"x{factor:g}"] = 100 * hits / called if called else None
    return {"recall": recall, "precision": precision, "false": 1e5 * begun / len(curve), "values": len(curve)}


def row(name: str, rule: str, seen: dict[str, Any]) -> tuple[str, ...]:
    """``recall / precision`` of each factor."""
    both = zip(seen["recall"].values(), seen["precision"].values(), strict=True)
    cells = (f"{share:.0f} / {'-' if right is None else f'{right:.0f}'}" for share, right in both)
    return name, rule, *cells, f"{seen['false']:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000, help="of a curve that is made")
    parser.add_argument("--trained", type=int, default=20_000, help="steps of the GPT")
    parser.add_argument("--curves", metavar="FILE", help="the GPT's curves: read, or trained and written")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    given = parser.parse_args()
    steps, of_gpt = (2000, 1200) if given.quick else (given.steps, given.trained)
    curves = {name: made(name, steps) for name in KINDS} | recorded(given.curves, of_gpt)
    by_curve = {name: {rule: measure(curve, each) for rule, each in RULES.items()} for name, curve in curves.items()}
    rows = [row(name, rule, seen) for name, by_rule in by_curve.items() for rule, seen in by_rule.items()]
    factors = (f"x{factor:g}" for factor in FACTORS)
    title = "spikes that are found, % / of what is taken for one so many are, %"
    table = Table(title, ("curve", "rule", *factors, "false, of 100,000"), rows)
    show(table)
    write_json(given.json, {"benchmark": "spikes", "curves": by_curve}, [table])


if __name__ == "__main__":
    main()
