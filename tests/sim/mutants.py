"""Wrong rank machines, made by machine from ``protocol/rank.py``; ``mutants.txt`` says of each by what it is caught.

Two kinds. *Rows*: of what a row of the table returns, one effect is left out, two neighbours are swapped, or the state
that follows is another one. Which lists of effects a row returns stands in ``answers.txt``. *Lines*: of the source, a
guard is negated, one of its operands left out, or an assignment to the rank dropped.

A caught mutant has the seed of a job that breaks the promise. The others have a reason:

``same``     nothing that anybody can see is another: the reason says why;
``unseen``   the simulation does not model what is lost: the reason names the test that sees it.

``python tests/sim/mutants.py`` writes the list anew (ten minutes); reasons stay, and what has neither seed nor reason
has the word ``SURVIVES``. With names (``... drop:Tail+Next:...``) it searches only for these, and prints their lines.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from resilient_train.protocol import rank as machine
from resilient_train.protocol.rank import At, Effects, MachineState, Rank
from resilient_train.testing.answers import kind_of
from resilient_train.testing.cluster import DrivenParts, Faults, Layout
from resilient_train.testing.rank import Program
from resilient_train.testing.sim import simulate

REASONS = ("same: ", "unseen: ")
LIST = Path(__file__).with_name("mutants.txt")
ANSWERS = Path(__file__).with_name("answers.txt")
SEARCH = range(2500)
"""So far a seed is looked for when the list is written."""
MANY = 300
"""Of these, so many that do what the mutant changes."""
SOON = 200
"""So many are tried where a seed of the list catches its mutant no more."""


JOBS: dict[str, tuple[Layout | None, Faults | None]] = {
    "": (None, None),
    "savers": (Layout(3, (1, 1), replaces=False), Faults(kills=2, glitches=1)),
    "undoing savers": (Layout(2, (0, 0), program=Program(undo=True), replaces=False), Faults(kills=1)),
    "few savers": (Layout(4, (1, 1), ((0, 1), (2, 3)), replaces=False), Faults(kills=2)),
    "waiting savers": (Layout(4, (2, 2), replaces=False), Faults(kills=3)),
    "breaks": (Layout(3, (1, 0), program=Program(breaks=True)), Faults(kills=3, glitches=1)),
    "leaves": (Layout(3, (1, 1), program=Program(breaks=True)), Faults(kills=1, damages=1, asked=1)),
    "undo": (Layout(2, (0, 0), program=Program(accumulate=2, optimizers=2, undo=True)), Faults(kills=1, damages=2)),
    "accumulates": (Layout(2, (0, 0, 0), program=Program(accumulate=2)), Faults(kills=1, damages=2)),
    "lost": (Layout(3, (1, 1)), Faults(cuts=1, heard=2, glitches=2, damages=1)),
    "failures": (Layout(3, (1, 1)), Faults(kills=2, failures=3)),
    "undone failures": (
        Layout(2, (0, 0, 0), program=Program(undo=True)),
        Faults(kills=1, glitches=2, failures=2),
    ),
    "paused": (Layout(2, (1, 0)), Faults(kills=1, pauses=2, withdrawn=1)),
    "paused at once": (Layout(2, (0,)), Faults(kills=1, pauses=1)),
    "left out": (Layout(2, (1, 0), program=Program(optimizers=2, skips=True)), Faults(kills=1, anomalies=2)),
    "undone and left out": (
        Layout(2, (0, 0), program=Program(accumulate=2, optimizers=2, undo=True, skips=True)),
        Faults(kills=1, anomalies=2),
    ),
    "anomalies": (Layout(2, (1, 1)), Faults(kills=1, glitches=1, anomalies=3)),
    "known anomalies": (Layout(2, (0, 0), known=(0, 1)), Faults(kills=2, anomalies=3)),
    "known, and a kill": (Layout(2, (0,), known=(0,)), Faults(kills=1, anomalies=2)),
    "undone and known": (
        Layout(2, (0, 0), known=(0, 1), program=Program(undo=True)),
        Faults(kills=2, anomalies=3),
    ),
    "computed twice": (Layout(2, (1, 1), twice=1), Faults(kills=1, glitches=1, deviations=2)),
    "undone, computed twice": (
        Layout(2, (0, 0, 0), twice=2, program=Program(accumulate=2, undo=True)),
        Faults(kills=1, deviations=1),
    ),
    "misled": (Layout(3, (3, 3, 3), replaces=False), Faults(kills=1, failures=3)),
    "talks": (Layout(2, (0, 0), program=Program(undo=True, talks=True)), Faults(kills=1, glitches=2)),
    "fails": (Layout(2, (0, 0), program=Program(undo=True, misuse="fails as it writes")), Faults(kills=1)),
    "stopped": (Layout(2, (1, 0)), Faults(kills=1, glitches=1, failures=1, stops=1)),
    "stopped as it undoes": (
        Layout(2, (1, 0), program=Program(accumulate=2, undo=True)),
        Faults(kills=1, glitches=1, failures=1, stops=1),
    ),
    "left out, and a kill": (Layout(2, (0,), known=(0,), program=Program(skips=True)), Faults(kills=1)),
    "rest": (Layout(2, (0, 1), program=Program(accumulate=3, rest=2)), Faults(kills=2, glitches=1)),
    "errors": (Layout(3, (1, 1)), Faults(kills=1, errors=3)),
    "undone errors": (Layout(2, (0, 0), program=Program(accumulate=2, undo=True)), Faults(kills=1, errors=2)),
    "errors and damages": (Layout(2, (1, 1)), Faults(errors=2, damages=1, glitches=1)),
    "errors of savers": (Layout(3, (2, 1), replaces=False), Faults(errors=2, kills=1, asked=1)),
    "scratches": (Layout(3, (1, 0), program=Program(optimizers=2)), Faults(kills=1, scratches=2)),
    "swallows": (Layout(2, (1, 0), program=Program(optimizers=2, swallows=True)), Faults(glitches=2, damages=2)),
    "asks again": (Layout(2, (1, 0), program=Program(accumulate=2)), Faults(kills=1, asks=2, anomalies=1)),
    "begins at the end": (Layout(2, (0, 0), begun=2), Faults(kills=1)),
    "enters twice behind a cut": (
        Layout(2, (0, 0), program=Program(misuse="enters twice behind a cut")),
        Faults(glitches=2),
    ),
    "failures in tails": (Layout(3, (2, 2)), Faults(kills=1, failures=2)),
    "misled savers": (Layout(4, (3, 3), ((0, 1), (2, 3)), replaces=False), Faults(kills=2, failures=3)),
    "errors of few savers": (Layout(4, (3, 3), ((0, 1), (2, 3)), replaces=False), Faults(errors=2, kills=2)),
    "undone, asks again": (Layout(2, (0, 0), program=Program(optimizers=2, undo=True)), Faults(kills=1, asks=2)),
}
"""Where the jobs that seeds draw come to something too seldom: others, whose schedules the seeds draw."""


class Shape(NamedTuple):
    """What a row did once: the types of its effects, and the kinds of the states on both sides."""

    row: str
    effects: tuple[str, ...]
    before: str
    after: str


class Mutant(NamedTuple):
    """``make`` gives the wrong class of ranks. ``touches``: whether it changes what has that shape."""

    name: str
    make: Callable[[], type[Rank]]
    touches: Callable[[Shape], bool]


# -- rows: what a row returns is changed


def _row_of(rank: Rank, event: Any) -> str:
    return f"{type(rank.state).__name__}+{type(event).__name__}"


def _names(effects: Effects) -> tuple[str, ...]:
    return tuple(type(effect).__name__ for effect in effects)


class _Listening(Rank):
    """Tells what its rows return."""

    __slots__ = ()
    shapes: set[Shape]

    def on(self, event: Any) -> Effects:
        row, before = _row_of(self, event), kind_of(self.state)
        effects = super().on(event)
        self.shapes.add(Shape(row, _names(effects), before, kind_of(self.state)))
        return effects


def listening(seed: int, job: str = "") -> set[Shape]:
    """The shapes of a job without a mistake."""
    shapes: set[Shape] = set()
    wrong = type("Listening", (_Listening,), {"__slots__": (), "shapes": shapes})
    layout, faults = JOBS[job]
    simulate(seed, driver=DrivenParts(rank=wrong), layout=layout, faults=faults)
    return shapes


@cache
def answered() -> dict[Shape, list[str]]:
    """What all rows answer, and how that is come to: ``answers.txt``, whose own tests say that nothing is missing."""
    found: dict[Shape, list[str]] = {}
    for line in ANSWERS.read_text().splitlines():
        answer, how = line.split(" | ", 1)
        pair, did = answer.split(": ", 1)
        before, event = pair.split(" + ")
        effects, after = did.split(" -> ")
        row = f"{before.partition('(')[0]}+{event.partition('(')[0]}"
        found.setdefault(Shape(row, tuple(effects.split()), before, after), []).append(how)
    return found


def shapes() -> frozenset[Shape]:
    """What all rows do."""
    return frozenset(answered())


def _changing(change: Callable[[Rank, MachineState, str, Effects], Effects]) -> type[Rank]:
    def on(self: Rank, event: Any) -> Effects:
        row, before = _row_of(self, event), self.state
        return change(self, before, row, Rank.on(self, event))

    return type("Mutant", (Rank,), {"__slots__": (), "on": on})


def _without(row: str, names: tuple[str, ...], index: int) -> type[Rank]:
    def change(_: Rank, __: MachineState, at: str, effects: Effects) -> Effects:
        if at == row and _names(effects) == names:
            return effects[:index] + effects[index + 1 :]
        return effects

    return _changing(change)


def _swapped(row: str, names: tuple[str, ...], index: int) -> type[Rank]:
    def change(_: Rank, __: MachineState, at: str, effects: Effects) -> Effects:
        if at == row and _names(effects) == names:
            return (*effects[:index], effects[index + 1], effects[index], *effects[index + 2 :])
        return effects

    return _changing(change)


def _following(row: str, after: str, other: str) -> type[Rank]:
    def change(rank: Rank, before: MachineState, at: str, effects: Effects) -> Effects:
        if at == row and kind_of(rank.state) == after:
            rank.state = before if other == "unchanged" else _like(other, before, rank.state)
        return effects

    return _changing(change)


def _like(kind: str, before: MachineState, after: MachineState) -> MachineState:
    """A state of that kind, with the plan, if it needs one, of those on both sides."""
    name, _, told = kind.rstrip(")").partition("(")
    cls = getattr(machine, name)
    fields: dict[str, Any] = {}
    for field in cls.__struct_fields__:
        given = next((getattr(state, field) for state in (after, before) if hasattr(state, field)), None)
        plan = next((getattr(s, f, None) for s in (after, before) for f in ("plan", "duty") if hasattr(s, f)), None)
        if field == "at":
            fields[field] = At[told]
        elif field in ("held", "stopped"):
            fields[field] = field in told
        elif field == "text":
            fields[field] = given or "text" * ("text" in told)
        elif field == "duty":
            fields[field] = plan if "Plan" in told or "SaveLast" in told else None
        else:
            fields[field] = plan
    return cls(**fields)


def rows() -> Iterator[Mutant]:
    """All mutants of rows."""
    lists = sorted({(shape.row, shape.effects) for shape in shapes()})
    for row, names in lists:
        touches = functools.partial(_has_list, row, names)
        for index, name in enumerate(names):
            told = " ".join((*names[:index], f"-{name}", *names[index + 1 :]))
            yield Mutant(f"drop {row}: {told}", functools.partial(_without, row, names, index), touches)
        for index, name in enumerate(names[:-1]):
            told = " ".join((*names[:index], f"{names[index + 1]}<>{name}", *names[index + 2 :]))
            yield Mutant(f"swap {row}: {told}", functools.partial(_swapped, row, names, index), touches)
    after: dict[str, set[str]] = {}
    moved = {(shape.row, shape.after) for shape in shapes() if shape.before != shape.after}
    for shape in shapes():
        after.setdefault(shape.row, set()).add(shape.after)
    for row, kinds in sorted(after.items()):
        for kind in sorted(kinds):
            others = ["unchanged"] * ((row, kind) in moved) + sorted(filter(_fits(kind), kinds - {kind}))
            for other in others:
                make = functools.partial(_following, row, kind, other)
                yield Mutant(f"next {row}: {other} for {kind}", make, functools.partial(_leads_to, row, kind))


def _fits(kind: str) -> Callable[[str], bool]:
    """Whether a state of another kind can be made of one of that kind: it has the plan, or order, that is needed."""
    held = _duties(kind)
    return lambda other: _duties(other) <= held


def _duties(kind: str) -> set[str]:
    of_plan = kind.startswith(("Build", "Restore", "Target"))
    return {"Plan"} if of_plan else {name for name in ("Plan", "SaveLast") if name in kind}


def _has_list(row: str, names: tuple[str, ...], shape: Shape) -> bool:
    return (shape.row, shape.effects) == (row, names)


def _leads_to(row: str, kind: str, shape: Shape) -> bool:
    return (shape.row, shape.after) == (row, kind)


# -- lines: the source is changed


_NOT_THE_MACHINE = ("copy", "key", "_key_of", "_row", "enter", "__init__")


class _Change(NamedTuple):
    where: str
    told: str
    node: ast.AST
    field: str
    index: int
    new: ast.AST | None


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name in _NOT_THE_MACHINE:
            continue
        for node in ast.walk(function):
            if isinstance(node, (ast.If, ast.IfExp)):
                new = ast.UnaryOp(ast.Not(), node.test)
                yield _Change(function.name, f"not ({ast.unparse(node.test)})", node, "test", -1, new)
            if isinstance(node, ast.BoolOp):
                for index, value in enumerate(node.values):
                    told = f"no `{ast.unparse(value)}` in `{ast.unparse(node)}`"
                    yield _Change(
                        function.name, told, node, "values", index, ast.Constant(isinstance(node.op, ast.And))
                    )
            for name in ("body", "orelse"):
                block = getattr(node, name, None)
                for index, line in enumerate(block if isinstance(block, list) else ()):
                    for told, new in _without_assignment(line):
                        yield _Change(function.name, told, node, name, index, new)


def _without_assignment(line: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(line, ast.AugAssign) and _of_rank(line.target):
        yield f"without `{ast.unparse(line)}`", ast.Pass()
    if not isinstance(line, ast.Assign) or len(line.targets) != 1:
        return
    target, value = line.targets[0], line.value
    if isinstance(target, ast.Attribute) and _of_rank(target):
        yield f"without `{ast.unparse(line)}`", ast.Pass()
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for index, (each, its) in enumerate(zip(target.elts, value.elts, strict=True)):
            if _of_rank(each):
                left = [t for i, t in enumerate(target.elts) if i != index]
                values = [v for i, v in enumerate(value.elts) if i != index]
                new = ast.Assign([ast.Tuple(left, ast.Store())], ast.Tuple(values, ast.Load()))
                yield f"without `{ast.unparse(each)} = {ast.unparse(its)}`", new


def _of_rank(target: ast.AST) -> bool:
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "rank"


@cache
def _source() -> str:
    assert machine.__file__ is not None
    return Path(machine.__file__).read_text()


def _changed(number: int) -> type[Rank]:
    tree = ast.parse(_source())
    change = next(each for i, each in enumerate(_changes(tree)) if i == number)
    if change.index < 0:
        setattr(change.node, change.field, change.new)
    else:
        part = getattr(change.node, change.field)
        part[change.index : change.index + 1] = [change.new] if change.new is not None else []
    ast.fix_missing_locations(tree)
    module = types.ModuleType(machine.__name__)
    sys.modules["mutant_of_rank"] = module
    exec(compile(tree, "mutant of rank.py", "exec"), module.__dict__)
    wrong: type[Rank] = module.Rank
    return wrong


def everything(_: Shape) -> bool:
    """What a changed line touches: nobody knows."""
    return True


def lines() -> Iterator[Mutant]:
    """All mutants of lines."""
    counts: dict[str, int] = {}
    for number, change in enumerate(_changes(ast.parse(_source()))):
        name = f"line {change.where}: {change.told}"
        counts[name] = counts.get(name, 0) + 1
        again = f" ({counts[name]})" if counts[name] > 1 else ""
        yield Mutant(name + again, functools.partial(_changed, number), everything)


@cache
def mutants() -> dict[str, Mutant]:
    """All, by name."""
    found = [*rows(), *lines()]
    named = {mutant.name: mutant for mutant in found}
    assert len(named) == len(found)
    return named


# -- what catches them, or why nothing does


TOUCHES = {
    "Record": "record",
    "Publish": "arena own",
    "Arrive": "record",
    "ResetLog": "log",
    "SendOffers": "channel model",
    "SendDone": "channel",
    "SendDamaged": "channel",
    "SendStarted": "channel",
    "SendFinish": "channel snapshot",
    "SendAnomaly": "channel",
    "DropGradients": "gradients",
    "SnapshotBegin": "arena snapshot model words",
    "SnapshotFence": "snapshot",
    "ShowState": "words",
    "Compare": "words",
    "CheckUnchanged": "samples",
    "Arm": "interrupts",
    "Disarm": "interrupts",
    "SetMode": "mode",
    "Exchange": "mode",
    "Mark": "start own",
    "Draw": "batches own",
    "Rollback": "start own model samples",
    "ForgetBatches": "batches",
    "SaveUndo": "undo",
    "Committed": "start undo batches",
    "Synchronize": "device",
    "TellTailFailed": "event",
    "LearnLayout": "reducer",
    "RebuildReducer": "reducer",
}
"""What of its process, and of what others see, an effect reads or writes."""
OUTLIVES = ("record", "arena", "log", "channel")
"""These are still there when the process is not; so between two of them a kill may come that others see."""


def commuting(name: str) -> str:
    """Why a swap is none; empty if that is not known."""
    pair = next((word.split("<>") for word in name.split() if "<>" in word), [])
    if not pair or any(each not in TOUCHES for each in pair):
        return ""
    first, second = (set(TOUCHES[each].split()) for each in pair)
    if first & second or (first.intersection(OUTLIVES) and second.intersection(OUTLIVES)):
        return ""
    return f"same: {pair[0]} and {pair[1]} have nothing in common, and at most one of them outlives the process"


Case = tuple[str, int]
"""One of JOBS, and a seed."""


def caught(mutant: Mutant, cases: Iterable[Case]) -> Case | None:
    """The first of the cases that shows that the machine is wrong."""
    driver = DrivenParts(rank=mutant.make())
    for job, seed in cases:
        layout, faults = JOBS[job]
        try:
            simulate(seed, driver=driver, layout=layout, faults=faults)
        except Exception:
            return job, seed
    return None


def case_of(what: str) -> Case:
    """What a line says: ``seed 7``, or ``seed 7 of savers``; in ``answers.txt`` without the ``of``."""
    seed, _, job = what.removeprefix("seed ").partition(" ")
    return job.removeprefix("of "), int(seed)


@cache
def _listened(seed: int) -> frozenset[Shape]:
    return frozenset(listening(seed))


def cases(mutant: Mutant) -> Iterator[Case]:
    """Where one is looked for: what does not touch the mutant is left out, and what is known to do so comes first."""
    yield from sorted(
        {
            case_of(how)
            for shape, ways in answered().items()
            for how in ways
            if mutant.touches is not everything and mutant.touches(shape) and how.startswith("seed ")
        }
    )
    fit = (seed for seed in SEARCH if any(map(mutant.touches, _listened(seed))))
    yield from (("", seed) for seed in itertools.islice(fit, MANY))
    yield from ((job, seed) for job in JOBS if job for seed in range(MANY // 2))


def _search(asked: tuple[str, str]) -> tuple[str, Case | None]:
    name, listed = asked
    mutant = mutants()[name]
    known = [case_of(listed)] if listed.startswith("seed ") else []
    return name, caught(mutant, itertools.chain(known, cases(mutant)))


def search(names: Iterable[str], listed: dict[str, str]) -> Iterator[tuple[str, Case | None]]:
    """What catches each, if anything does; what is ``listed``, if that does."""
    mutants()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        yield from pool.imap_unordered(_search, [(name, listed.get(name, "")) for name in names], chunksize=4)


def read() -> dict[str, str]:
    """The list: a seed, or a reason, for each name."""
    if not LIST.exists():
        return {}
    told = [line.split(" | ", 1) for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    return dict(told)


def line(name: str, case: Case | None, old: dict[str, str]) -> str:
    """The line of the list."""
    if case is not None:
        return f"{name} | seed {case[1]}" + (f" of {case[0]}" if case[0] else "")
    reason = commuting(name) or old.get(name, "")
    return f"{name} | {reason if reason.startswith(REASONS) else 'SURVIVES'}"


def main() -> int:
    """Writes the list, or the lines of those that are named. What has a reason is searched for only if it is named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    old = read()
    excused = {name for name in mutants() if old.get(name, "").startswith(REASONS)}
    names = options.names or [name for name in mutants() if name not in excused]
    told = {name: line(name, None, old) for name in excused}
    for name, case in search(names, old):
        told[name] = line(name, case, old)
        if case is None or options.names:
            print(told[name], flush=True)
    if not options.names:
        LIST.write_text(
            "\n".join(["# Written by mutants.py, which says what this is.", *map(told.get, mutants())]) + "\n"
        )
        print(f"{len(told)} mutants, {sum(' | seed ' in each for each in told.values())} caught")
    return 0


if __name__ == "__main__":
    sys.exit(main())
