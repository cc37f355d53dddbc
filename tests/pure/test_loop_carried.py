"""A loop's variables that go from one step to the next are found in its text."""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
import textwrap
from collections.abc import Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

from resilient_train.session.loop_carried import LoopCarried, loop_carried

LOOPS = {
    "nothing": ("loss = step * 2\nprint(loss)", ()),
    "an average": ("loss = step * 2\nema = 0.9 * ema + 0.1 * loss", ("ema",)),
    "a sum": ("total += step", ("total",)),
    "a sum that begins in each step": ("total = 0\nfor part in range(3):\n    total += part", ()),
    "a batch ahead": ("use(x, y)\nx, y = batch()", ("x", "y")),
    "its own batch": ("x, y = batch()\nuse(x, y)", ()),
    "the best": ("best = min(best, step)", ("best",)),
    "written on one way only": ("if step:\n    last = step\nprint(last)", ("last",)),
    "written on both": ("if step:\n    last = step\nelse:\n    last = 1\nprint(last)", ()),
    "else the step is left": ("if step:\n    last = step\nelse:\n    continue\nprint(last)", ()),
    "the loss of the last part": (
        "for part in range(parts):\n    loss = part\n    if loss:\n        continue\nprint(loss)",
        (),
    ),
    "parts that go on": ("for part in range(parts):\n    use(hidden)\n    hidden = part", ("hidden",)),
    "written in a loop that may not run": ("while next(data):\n    last = step\nprint(last)", ("data", "last")),
    "written as one tries": ("try:\n    x = batch()\nexcept OSError:\n    pass\nprint(x)", ("x",)),
    "or in the handler": ("try:\n    x = batch()\nexcept OSError:\n    x = 1\nprint(x)", ()),
    "finally": ("try:\n    pass\nfinally:\n    x = 1\nprint(x)", ()),
    "an attribute": ("use(net.hidden)\nnet.hidden = batch()", ("net.hidden",)),
    "an attribute that each step sets first": ("net.hidden = batch()\nuse(net.hidden)", ()),
    "a count in an object": ("net.seen += 1", ("net.seen",)),
    "of an object of this step": ("fresh = batch()\nfresh.seen += 1", ()),
    "an entry": ("counts['n'] += 1", ("counts['n']",)),
    "some entry": ("counts[step] += 1", ("counts[step]",)),
    "what is registered": ("known.seen += 1\nuse(known.hidden)\nknown.hidden = 1", ()),
    "in with": ("with open_it() as held:\n    x = held\nprint(x)", ()),
    "the walrus": ("if (n := step) > 1:\n    print(n)", ()),
    "a comprehension": ("print([part for part in range(3)], {k: v for k, v in pairs})", ()),
    "in a comprehension": ("print([part * scale for part in range(3)])\nscale = 2", ("scale",)),
    "match": ("match step:\n    case 0:\n        x = 1\n    case _:\n        x = 2\nprint(x)", ("x",)),
    "an iterator": ("use(next(data))", ("data",)),
    "generators of numbers": ("use(rng.random(), numbers.normal(), old.rand())", ("numbers", "old", "rng")),
    "a file": ("log.write('x')", ()),
    "functions, and what is read only": ("use(net.weight, scale)", ()),
    "a function of its own": ("def inner():\n    return total\ninner()", ()),
    "starred": ("use(rest)\nfirst, *rest = batch()", ("rest",)),
    "annotated": ("use(x)\nx: int = 1", ("x",)),
    "asked first": ("while step > last:\n    last = step", ("last",)),
}


class Thing:
    seen = hidden = weight = 0


class Batch:
    seen = 0

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


FRAMES: list[LoopCarried | None] = []


def looked(frame: FrameType, known: Any) -> None:
    FRAMES.append(loop_carried(frame, (known,)))


def names() -> dict[str, Any]:
    known = Thing()

    def steps() -> Iterator[int]:
        yield 1
        looked(sys._getframe(1), known)

    values: dict[str, Any] = dict.fromkeys(("ema", "total", "best", "last", "scale", "loss"), 0)
    return values | {
        "session_steps": steps,
        "net": Thing(),
        "known": known,
        "counts": {"n": 0, 1: 0},
        "pairs": [(1, 2)],
        "data": iter([1, 0, 3]),
        "rng": random.Random(0),
        "numbers": np.random.default_rng(0),
        "old": np.random.RandomState(0),
        "log": sys.stderr,
        "use": lambda *_: None,
        "batch": Batch,
        "open_it": contextlib.nullcontext,
        "x": 0,
        "y": 0,
        "rest": (),
        "parts": 2,
        "hidden": 0,
    }


def carried(source: str, values: dict[str, Any]) -> LoopCarried | None:
    name = f"<loop {len(FRAMES)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec"), values)
    finally:
        del linecache.cache[name]
    return FRAMES.pop()


@pytest.mark.parametrize("where", ["script", "function"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str, where: str) -> None:
    body, expected = LOOPS[name]
    loop = f"for step in session_steps():\n{textwrap.indent(body, '    ')}\n"
    if where == "function":
        values = names()
        given = ", ".join(f"{each}={each}" for each in values)
        loop = f"def main({given}):\n    print('before')\n{textwrap.indent(loop, '    ')}\nmain()\n"
        found = carried(loop, values)
        line = 3
    else:
        found, line = carried(loop, names()), 1
    assert (found.names if found else ()) == expected
    if found:
        assert found.place.endswith(f":{line}")


def test_the_innermost_loop_counts() -> None:
    inner = "for step in session_steps():\n        total += step"
    source = f"n = 0\nfor epoch in range(1):\n    n += 1\n    {inner}\n    n = n\n"
    found = carried(source, names())
    assert found
    assert found.names == ("total",)


def test_a_loop_that_asks_itself() -> None:
    body = "step = next(it, None)\n    if step is None:\n        break\n    total += step"
    source = f"it = session_steps()\nwhile True:\n    {body}\n"
    found = carried(source, names())
    assert found
    assert found.names == ("it", "total")


def test_without_a_text_there_is_nothing_to_say() -> None:
    exec(compile("for step in session_steps():\n    total += step\n", "<nowhere>", "exec"), names())
    assert FRAMES.pop() is None
    assert carried("session = session_steps()\nnext(session)\nnext(session, 0)\n", names()) is None, "no loop"


class Strange(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Proxy(metaclass=Strange): ...


def test_no_class_of_the_users_is_asked() -> None:
    assert carried("for step in session_steps():\n    use(proxy)\n", {**names(), "proxy": Proxy()}) is None


def test_a_text_that_is_too_much() -> None:
    source = f"for step in session_steps():\n    use({' + '.join(['x'] * 900)})\n    x = 1\n"
    found = carried(source, names())
    assert found is None or found.names == ("x",)


def test_values_are_not_kept() -> None:
    """Python keeps a dictionary of a function's variables until it returns."""

    class Big: ...

    def loop() -> int:
        big = Big()
        for _ in range(1):
            looked(sys._getframe(), None)
            FRAMES.pop()
        holders = sys.getrefcount(big)
        del big
        return holders

    assert loop() == 2


def test_of_many_some_are_told() -> None:
    told = LoopCarried(tuple("abcdefgh"), "train.py:7").told()
    assert told.startswith("the loop at train.py:7 keeps a, b, c, d, e, f and 2 more from step to step")
    assert "keeps a, b from" in LoopCarried(("a", "b"), "x").told()
