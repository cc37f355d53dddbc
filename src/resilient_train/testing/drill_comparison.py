"""Compares two runs of a script by the digests that their ranks wrote (``session/drill_records.py``), and names the
first difference: the rank, the step, the tensor.

What differs although nothing had been done to either run is the script's own doing (a generator that it does not seed,
a clock in its state). It is named, and compared no more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from resilient_train.session.drill_records import FOLDER, DrillRecord, Names

_DECODER = msgspec.json.Decoder(Names | DrillRecord)
_INPUTS = ("batch", "generator", "loader", "rank_state")
"""What a step begins with, that is not the result of the steps before."""
_MADE_LATER = ("generator", "rank_state")
"""What a new process may lack when its first step begins, and have when it is over: see ``Carried.fetch``."""
_TRAINED = ("model", "optimizer")
_EVER = 1 << 62


class NamedRecord(NamedTuple):
    """A record with its names; ``incarnation`` is that of the process that wrote it."""

    incarnation: int
    step: int
    names: list[str]
    digests: list[str]


class Difference(msgspec.Struct, frozen=True):
    """The first one of a run. ``step`` is the step that began otherwise (``began``), or the one that began alike on all
    ranks, as far as can be seen, and ended otherwise.
    """

    rank: int
    step: int
    pieces: tuple[str, ...]
    """What differs on that rank, by name, in the order in which the state lists it."""
    began: bool
    again: bool = False
    """It had begun right, and began wrong when it ran again."""


def read(run_dir: Path, rank: int) -> Iterator[NamedRecord]:
    """What the processes of a rank wrote, in their order. Lines that are torn are left out."""
    found = []
    for path in (run_dir / FOLDER).glob(f"rank_{rank}.*.jsonl"):
        number = re.fullmatch(rf"rank_{rank}\.(\d+)\.jsonl", path.name)
        if number is not None:
            found.append((int(number[1]), path))
    for incarnation, path in sorted(found):
        names: list[str] = []
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                entry = _DECODER.decode(line)
                if isinstance(entry, Names):
                    names = entry.names
                else:
                    yield NamedRecord(incarnation, entry.step, names, entry.digests)


class DrillComparison:
    """``expected_dir``: the run directory of the undisturbed run that all others are compared with."""

    def __init__(self, expected_dir: Path, ranks: int) -> None:
        self._expected = [{each.step: each for each in read(expected_dir, rank)} for rank in range(ranks)]
        self.left_out: list[dict[str, None]] = [{} for _ in range(ranks)]
        """By rank, what differs between undisturbed runs."""

    def leave_out(self, run_dir: Path, before_step: int = _EVER) -> None:
        """Nothing was done to this run before ``before_step``: what differs there is compared no more."""
        for rank, expected in enumerate(self._expected):
            for snapshot in read(run_dir, rank):
                if snapshot.step < before_step and snapshot.step in expected:
                    self.left_out[rank].update(dict.fromkeys(_differing(expected[snapshot.step], snapshot, ())))

    def undetermined(self) -> tuple[int, str] | None:
        """A rank and a trained tensor of it that differs between undisturbed runs; None if there is none."""
        for rank, names in enumerate(self.left_out):
            for name in names:
                if _kind(name) in _TRAINED:
                    return rank, name
        return None

    def missing(self, run_dir: Path) -> list[int]:
        """The ranks that did not write their last state, or never wrote any."""
        ends = [max(expected, default=-1) for expected in self._expected]
        return [rank for rank, end in enumerate(ends) if end < 0 or all(s.step != end for s in read(run_dir, rank))]

    def first_difference(self, run_dir: Path) -> Difference | None:
        """The earliest difference, by step; of several ranks at the same step, that of the first."""
        found = [
            (snapshot.step, rank, (snapshot.incarnation, snapshot.step) in earlier, pieces)
            for rank in range(len(self._expected))
            for snapshot, earlier, pieces in self._differences(run_dir, rank)
        ]
        if not found:
            return None
        step, rank, again, pieces = min(found)
        before = max((each for each in self._expected[rank] if each < step), default=step)
        began = again or before == step or all(_kind(piece) in _INPUTS for piece in pieces)
        return Difference(rank, step if began else before, tuple(pieces), began, again)

    def _differences(self, run_dir: Path, rank: int) -> Iterator[tuple[NamedRecord, set[tuple[int, int]], list[str]]]:
        """A rank's first snapshot that differs, the (incarnation, step) before it, and what differs."""
        earlier: set[tuple[int, int]] = set()
        snapshots = list(read(run_dir, rank))
        for place, snapshot in enumerate(snapshots):
            pieces = self._pieces(rank, snapshot)
            if pieces and not self._is_made_later(rank, snapshots, place):
                yield snapshot, earlier, pieces
                return
            earlier.add((snapshot.incarnation, snapshot.step))

    def _pieces(self, rank: int, snapshot: NamedRecord) -> list[str]:
        expected = self._expected[rank].get(snapshot.step)
        return _differing(expected, snapshot, self.left_out[rank]) if expected is not None else []

    def _is_made_later(self, rank: int, snapshots: Sequence[NamedRecord], place: int) -> bool:
        """Whether a new process only lacks what its predecessor had made ahead, behind an update (``Carried.fetch``),
        and makes it in its first step: behind that nothing differs any more.
        """
        snapshot = snapshots[place]
        first = all(
            each.incarnation != snapshot.incarnation or each.step == snapshot.step for each in snapshots[:place]
        )
        if not (first and snapshot.incarnation and {*map(_kind, self._pieces(rank, snapshot))}.issubset(_MADE_LATER)):
            return False
        after = next((i for i in range(place, len(snapshots)) if snapshots[i].step > snapshot.step), None)
        if after is None:
            return False
        return not self._pieces(rank, snapshots[after]) or self._is_made_later(rank, snapshots, after)


def _kind(name: str) -> str:
    return name.partition(".")[0]


def _differing(expected: NamedRecord, found: NamedRecord, ignored: Collection[str]) -> list[str]:
    if expected.names == found.names:
        if expected.digests == found.digests:
            return []
        pairs = zip(found.names, expected.digests, found.digests, strict=True)
        return [name for name, one, other in pairs if one != other and name not in ignored]
    here, there = (
        dict(zip(found.names, found.digests, strict=True)),
        dict(zip(expected.names, expected.digests, strict=True)),
    )
    return [name for name in {**there, **here} if here.get(name) != there.get(name) and name not in ignored]
