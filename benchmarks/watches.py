"""What it costs to look at a step: ``python benchmarks/watches.py [--quick] [--models 10m] [--json FILE]``.

TRE's look at the loss (``session.check(loss)``), and at the norm where the loop clips; a norm that is computed for
nothing but the look (``session.check(norm=True)``); and the comparison of replicas, due in one of 32 steps. One
job for each model, with ``TRE:1``: blocks of 32 steps in turn, each with another of these in its bodies. *A share* is
the time by stop watches over the time of the same block, of the rank for which it is larger. *Whole step* is the block
over the one of the same round in whose bodies nothing is looked at: clipping is in it, and the machine's noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import HERE, MODELS, BenchmarkError, Case, Table, finish, launcher, show, started, summary, write_json

from resilient_train.child_job import sigterm_unwinds


class Look(NamedTuple):
    """A row: the blocks that it is measured in, and the labels of its stop watches."""

    what: str
    lanes: tuple[str, ...]
    labels: tuple[str, ...]


LOOKS = (
    Look("the loss, session.check(loss)", ("loss",), ("watch",)),
    Look("the norm, where the loop clips", ("clips",), ("watch",)),
    Look("a norm for that alone, session.check(norm=True)", ("norm",), ("watch", "norm")),
    Look("nothing given, with TRE", ("nothing",), ("watch",)),
    Look("replicas compared, every 32", ("nothing", "loss", "clips", "norm"), ("audit",)),
)
BLOCK = 32
"""Steps: in each of them replicas compare once."""
WARM_UP = 64
Block = dict[str, Any]


def run_job(case: Case, rounds: int, folder: Path, limit_s: int) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder.mkdir()
    log = folder / "job.log"
    flags = {"model": case.model, "rounds": rounds, "steps": BLOCK, "warm-up": WARM_UP, "out": folder}
    flags["limit-s"] = limit_s
    command = [*launcher("resilient-run", case.ranks, folder / "run"), str(HERE / "watches_job.py")]
    environ = {"MS_ENABLE_TFT": "{ARF:1,HCCE:1,TRE:1}"}
    with started([*command, *(f"--{name}={value}" for name, value in flags.items())], log, environ) as process:
        finish(process, log, limit_s)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(case.ranks)]


def measured(look: Look, ranks: list[list[Block]]) -> dict[str, Any]:
    """Microseconds a step and the share of the step, of the rank with the larger one; by block."""
    own_us, cpu_us, shares, ratios = [], [], [], []
    for number, blocks in enumerate(zip(*ranks, strict=True)):
        if blocks[0]["lane"] not in look.lanes:
            continue
        spent = [sum(block["own_ns"].get(label, 0) for label in look.labels) for block in blocks]
        own_us.append(max(spent) / BLOCK / 1e3)
        cpu_us.append(
            max(sum(block["cpu_ns"].get(label, 0) for label in look.labels) for block in blocks) / BLOCK / 1e3
        )
        shares.append(max(100 * ns / block["wall_ns"] for ns, block in zip(spent, blocks, strict=True)))
        ratios.append(wall(blocks) / wall(beside(ranks, number)))
    found = {"us": own_us, "cpu_us": cpu_us, "share": shares, "ratio": ratios}
    whole = len(look.lanes) == 1 and look.lanes != ("nothing",)
    return {"what": look.what, "whole": whole, **{name: summary(values) for name, values in found.items()}}


def beside(ranks: list[list[Block]], number: int) -> list[Block]:
    """The block of the same round in which nothing is looked at."""
    lanes = len({block["lane"] for block in ranks[0]})
    first = number // lanes * lanes
    (at,) = (at for at in range(first, first + lanes) if ranks[0][at]["lane"] == "nothing")
    return [blocks[at] for blocks in ranks]


def wall(blocks: Sequence[Block]) -> int:
    return max(int(block["wall_ns"]) for block in blocks)


def measure(case: Case, rounds: int, folder: Path) -> dict[str, Any]:
    ranks = run_job(case, rounds, folder, 300 + 200 * rounds)
    blocks = [rank["blocks"] for rank in ranks]
    steps_ms = [wall(each) / BLOCK / 1e6 for each in zip(*blocks, strict=True) if each[0]["lane"] == "nothing"]
    return {
        "ranks": case.ranks,
        "model": case.model,
        "parameters": ranks[0]["parameters"],
        "step_ms": summary(steps_ms),
        "watch_us": ranks[0]["watch_us"],
        "looks": [measured(look, blocks) for look in LOOKS],
        "blocks": blocks,
    }


def table(case: dict[str, Any]) -> Table:
    rows = []
    for look in case["looks"]:
        share, ratio = look["share"], look["ratio"]
        rows.append((
            look["what"],
            str(share["n"]),
            f"{look['us']['median']:.0f}",
            f"{look['cpu_us']['median']:.0f}",
            f"{share['median']:.3f} ({share['p25']:.3f} to {share['p75']:.3f})",
            f"{ratio['median']:.3f} ({ratio['p25']:.3f} to {ratio['p75']:.3f})" if look["whole"] else "",
        ))  # fmt: skip
    title = f"{Case(case['ranks'], case['model']).describe()}, a step {case['step_ms']['median']:.0f} ms"
    title += f"; a stop watch {case['watch_us']:.1f} us"
    columns = ("what is looked at", "blocks", "us a step", "CPU us", "share of a step, % (quartiles)", "whole step")
    return Table(title, columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["10m"])
    parser.add_argument("--rounds", type=int, help="blocks of each kind (default 12; 2 with --quick)")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    rounds, cases, tables = asked.rounds or (2 if asked.quick else 12), [], []
    with tempfile.TemporaryDirectory(prefix="rt-watches-") as folder, sigterm_unwinds():
        for case in (Case(ranks, model) for model in asked.models for ranks in asked.ranks):
            try:
                cases.append(measure(case, rounds, Path(folder) / f"{case.model}-{case.ranks}"))
            except BenchmarkError as error:
                raise SystemExit(f"{case.describe()}: {error}") from None
            tables.append(table(cases[-1]))
            show(tables[-1])
            write_json(asked.json, {"benchmark": "watches", "quick": asked.quick, "cases": cases}, tables)


if __name__ == "__main__":
    main()
