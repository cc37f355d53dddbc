"""What real ranks wrote of their machines (``session/rank_trace.py``), given to new machines: they must do the same.

``python -m resilient_train.testing.replay RUN`` tells what each rank of a run did, line by line. Whether the simulation
has been wherever they were, the process tests ask (``answers.py``).
"""

from __future__ import annotations

import argparse
import functools
import operator
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train.errors import ProtocolError
from resilient_train.protocol import rank_effects as do
from resilient_train.protocol import rank_events as on
from resilient_train.protocol.rank import TABLE, Rank
from resilient_train.session.rank_trace import FOLDER, Made, Torn, Turn
from resilient_train.testing.answers import answer_of

_EVENT: Any = functools.reduce(operator.or_, {*on.RankEvent.__subclasses__(), *(event for _, event in TABLE)})
_EFFECTS: Any = tuple[functools.reduce(operator.or_, do.Effect.__subclasses__()), ...]  # type: ignore[misc]
_WRITTEN = msgspec.defstruct("_WRITTEN", [("event", _EVENT), ("effects", _EFFECTS)])
"""What msgspec makes of these types it keeps for a struct, and makes anew for each value of another type: 0.4 ms."""
_LINE = msgspec.json.Decoder(Made | Turn | Torn)


class ReplayError(AssertionError):
    """A machine does something else than the rank's did, or the file is not what a rank writes; the text says where."""


class Replayed(NamedTuple):
    """One event of a rank's. ``answer``: see ``answers.py``; where the machine has refused the event, its words."""

    time_ns: int
    answer: str


def traces(run_dir: Path) -> list[Path]:
    """The files of a run, by rank and incarnation."""
    found = (run_dir / FOLDER).glob("rank_*.jsonl")
    return sorted(found, key=lambda path: tuple(map(int, _process(path))))


def _process(path: Path) -> tuple[str, str]:
    rank, incarnation = path.stem.removeprefix("rank_").split(".")
    return rank, incarnation


def replay(path: Path, rank: type[Rank] = Rank) -> Iterator[Replayed]:
    """Gives each event of the file to a new machine. Raises ReplayError at the first difference."""
    who, incarnation = _process(path)
    machine: Rank | None = None
    for number, line in _lines(path):
        where = f"rank {who}, incarnation {incarnation}, line {number}"
        if isinstance(line, Torn):
            raise ReplayError(f"{where}: the rank could not write on: {line.why}")
        if isinstance(line, Made):
            machine = rank(line.me, **line.options)
            continue
        if machine is None:
            raise ReplayError(f"{where}: an event, and no machine was made")
        yield _turn(machine, line, where)


def _lines(path: Path) -> Iterator[tuple[int, Made | Turn | Torn]]:
    """With their numbers. The last one of a process may be cut: it was killed, or the disk was full."""
    cut = ""
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            read = _LINE.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            cut = cut or f"{path}, line {number}: {error}"
            continue
        if cut and not isinstance(read, Made):
            raise ReplayError(f"{cut}, and the same process wrote on")
        cut = ""
        yield number, read


def _turn(machine: Rank, line: Turn, where: str) -> Replayed:
    try:
        written: Any = msgspec.convert({"event": line.event, "effects": line.effects}, _WRITTEN, str_keys=True)
    except msgspec.ValidationError as error:
        raise ReplayError(f"{where}: no event and effects of this version: {error}") from None
    event, effects = written.event, written.effects
    before, refused = machine.state, ""
    expected: tuple[do.Effect, ...] = ()
    try:
        expected = machine.on(event)
    except ProtocolError as error:
        refused = str(error)
    if (expected, refused) != (effects, line.refused):
        raise ReplayError(
            f"{where}: {event} in {before}\n  a machine:  {_told(expected, refused)}\n"
            f"  the rank's: {_told(effects, line.refused)}"
        )
    return Replayed(line.time_ns, refused or answer_of(before, event, effects, machine.state))


def _told(effects: tuple[do.Effect, ...], refused: str) -> str:
    return f"refuses: {refused}" if refused else " ".join(map(str, effects)) or "nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Tells what each rank of a run with ``RESILIENT_TRACE=1`` did, and at which line it differs from its machine."""
    parser = argparse.ArgumentParser(prog="python -m resilient_train.testing.replay", description=main.__doc__)
    parser.add_argument("run", type=Path, help="the run directory")
    parser.add_argument("--rank", type=int, help="this rank alone")
    options = parser.parse_args(argv)
    found = [path for path in traces(options.run) if options.rank in (None, int(_process(path)[0]))]
    if not found:
        print(f"no trace in {options.run / FOLDER}: was it run with RESILIENT_TRACE=1?", file=sys.stderr)
        return 2
    for path in found:
        print(f"-- rank {' incarnation '.join(_process(path))}")
        try:
            for turn in replay(path):
                at = datetime.fromtimestamp(turn.time_ns / 1e9, UTC).strftime("%H:%M:%S.%f")
                print(at, turn.answer)
        except ReplayError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
