"""How long a fault takes under torchrun, torchft, NVIDIA's resiliency extension and resilient_train.

``python benchmarks/peers.py [--quick] [--systems ..] [--json FILE] [--svg FILE]``: the systems in turn, each with the
same model, batches and schedule of faults. The peers are installed into virtual environments of their own when they
are first needed. With ``--json`` of a file that exists, what it holds is kept, apart from what is measured again, so
that long runs can be split.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import MODELS, USUAL_MODELS, BenchmarkError, Table, show, summary, write_json
from peers.installs import VENVS
from peers.picture import drawing
from peers.systems import PLAIN, SYSTEMS, System, Trial
from peers.trials import SIGNALS, faults, goodput, undisturbed

from resilient_train.child_job import sigterm_unwinds

BASELINE = "plain"
GOODPUT_EVERY_S = (60, 15)
COLUMNS = (
    "kill: all go on",
    "survivors",
    "caught up",
    "redone",
    "without it",
    "same end",
    "stop: all go on",
    "survivors",
    "ms per step",
    "more than plain",
)


class Bench:
    """The trials of one model, with a folder for each job."""

    def __init__(self, folder: Path, model: str, arguments: argparse.Namespace) -> None:
        self._folder = folder
        self._model = model
        self._arguments = arguments
        self._numbers = itertools.count()

    def trial(self) -> Trial:
        home = self._folder / f"{self._model}-{next(self._numbers)}"
        return Trial(self._model, self._arguments.ranks, home, self._arguments.limit_s, self._arguments.venvs)

    def measure(self, key: str, system: System) -> dict[str, Any]:
        """All that is asked for of one system."""
        given = self._arguments
        result: dict[str, Any] = {"system": key, "name": system.name, "model": self._model, "ranks": given.ranks}
        steps: set[int] = set()
        for kind, count in (("kill", given.kills), ("stop", given.stops)):
            if key != BASELINE and count:
                result[kind] = faults(system, self.trial, kind, count, given.patience_s)
                steps |= {end["step"] for end in result[kind]["ends"] if end["step"] is not None}
        result["undisturbed"] = undisturbed(system, self.trial(), given.undisturbed_s, steps)
        if given.goodput and key != BASELINE:
            rate = 1000 / result["undisturbed"]["step"]["mean_ms"]
            result["goodput"] = {}
            for every in given.every_s:
                found = goodput(system, self.trial(), 60 * given.goodput, every)
                share = found["steps"] / (rate * found["seconds"])
                result["goodput"][str(every)] = {**found, "share": round(share, 3)}
        return result


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What is known of a system: the new figures, and of the old ones those that were not measured again."""
    undisturbed_of = [each.get("undisturbed", {"digests": {}}) for each in (old, new)]
    digests = {int(step): each for found in undisturbed_of for step, each in found["digests"].items()}
    return {**old, **new, "undisturbed": {**new["undisturbed"], "digests": digests}}


def same_end(result: dict[str, Any], kind: str) -> str:
    """Whether the parameters after the faults are those of the run without any."""
    expected_of = {int(step): each for step, each in result["undisturbed"]["digests"].items()}
    found = set()
    for end in result[kind]["ends"]:
        expected = expected_of.get(end["step"])
        if expected is None:
            found.add("unknown")
        else:
            found.add("yes" if end["digests"] == [expected] else "no")
    return "/".join(sorted(found, reverse=True))


def cell(result: dict[str, Any], kind: str, name: str) -> str:
    """Median and worst in seconds, and how many of the faults never came to this."""
    if kind not in result:
        return "-"
    found = result[kind]["faults"]
    times = [each[name] / 1000 for each in found if each[name] is not None]
    if not times and kind == "kill" and name != "survivors_ms" and not SYSTEMS[result["system"]].rejoins:
        return "nobody comes"
    if not times:
        return f"not in {max(each['waited_s'] for each in found):.0f} s" if found else "-"
    numbers = summary(times)
    digits = 2 if numbers["median"] < 10 else 1
    text = f"{numbers['median']:.{digits}f} ({numbers['max']:.{digits}f})"
    return text if len(times) == len(found) else f"{text}, {len(found) - len(times)} of {len(found)} never"


def tables(results: list[dict[str, Any]]) -> list[Table]:
    """One table for each model, with a row for each system."""
    found = []
    for model in dict.fromkeys(each["model"] for each in results):
        of_model = [each for each in results if each["model"] == model]
        plain = next((each for each in of_model if each["system"] == BASELINE), None)
        every_s = GOODPUT_EVERY_S if any("goodput" in each for each in of_model) else ()
        rows = [row(each, plain, every_s) for each in of_model if each["system"] != BASELINE]
        first = f"{model}, {of_model[0]['ranks']} ranks; seconds, median (max)"
        columns = (first, *COLUMNS, *(f"a fault per {every} s" for every in every_s))
        found.append(Table("kill -9 and SIGSTOP of one rank", columns, rows))
    return found


def row(result: dict[str, Any], plain: dict[str, Any] | None, every_s: Sequence[int]) -> tuple[str, ...]:
    def highest(name: str) -> str:
        kill = result.get("kill")
        if kill is None or all(each["survivors_ms"] is None for each in kill["faults"]):
            return "-"
        return str(max(each[name] for each in kill["faults"]))

    mean = result["undisturbed"]["step"]["mean_ms"]
    more = "-" if plain is None else f"{mean - plain['undisturbed']['step']['mean_ms']:+.1f} ms"
    shares = result.get("goodput", {})
    return (
        result["name"],
        *(cell(result, "kill", name) for name in ("all_ms", "survivors_ms", "caught_up_ms")),
        highest("redone"),
        highest("without_it") if SYSTEMS[result["system"]].rejoins else "all",
        same_end(result, "kill") if "kill" in result else "-",
        *(cell(result, "stop", name) for name in ("all_ms", "survivors_ms")),
        f"{mean:.1f}",
        more,
        *(f"{shares[str(every)]['share']:.1%}" if str(every) in shares else "-" for every in every_s),
    )


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="*", choices=[BASELINE, *SYSTEMS], default=[BASELINE, *SYSTEMS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(USUAL_MODELS))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, help="kill -9 of a rank (default 10; 1 with --quick; 0: none)")
    parser.add_argument("--stops", type=int, help="SIGSTOP of a rank (default 3; 0 with --quick)")
    parser.add_argument("--patience-s", type=float, default=120, help="longest wait for what comes of a fault")
    parser.add_argument(
        "--undisturbed-s", type=float, help="time in which steps are timed (default 15; 3 with --quick)"
    )
    parser.add_argument("--goodput", type=float, metavar="MINUTES", default=0, help="also: how far one comes in them")
    parser.add_argument("--every-s", type=int, nargs="+", choices=GOODPUT_EVERY_S, default=list(GOODPUT_EVERY_S))
    parser.add_argument("--limit-s", type=int, default=900, help="longest time for a job")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="where the peers are installed")
    parser.add_argument("--quick", action="store_true", help="a smoke run: numbers of no worth")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--svg", metavar="FILE", help="a picture of the kills, for the first model")
    given = parser.parse_args()
    for name, usual, quick in (("kills", 10, 1), ("stops", 3, 0), ("undisturbed_s", 15, 3)):
        if getattr(given, name) is None:
            setattr(given, name, quick if given.quick else usual)
    assert set(SIGNALS) == {"kill", "stop"}, "there is an option for each"
    return given


def main() -> None:
    given = arguments_of()
    order = [BASELINE, *SYSTEMS]
    results: list[dict[str, Any]] = []
    if given.json and Path(given.json).exists():
        results = json.loads(Path(given.json).read_text())["results"]
    with tempfile.TemporaryDirectory(prefix="rt-peers-") as folder, sigterm_unwinds():
        for model in given.models:
            bench = Bench(Path(folder), model, given)
            for key in given.systems:
                system = PLAIN if key == BASELINE else SYSTEMS[key]
                print(f"{model}, {system.name} ...", flush=True)
                try:
                    result = bench.measure(key, system)
                except BenchmarkError as error:
                    raise SystemExit(f"{system.name}: {error}") from None
                old = next((each for each in results if (each["system"], each["model"]) == (key, model)), {})
                results = [*(each for each in results if each is not old), merged(old, result)]
                results.sort(key=lambda each: (MODELS.index(each["model"]), order.index(each["system"])))
                write_json(given.json, {"benchmark": "peers", "quick": given.quick, "results": results})
    for table in tables(results):
        show(table)
    if given.svg:
        Path(given.svg).write_text(drawing([each for each in results if each["model"] == results[0]["model"]]))


if __name__ == "__main__":
    main()
