"""A loop's variables that go from one step to the next are found in its text."""

from __future__ import annotations

import ast
import contextlib
import functools
import heapq
import importlib
import itertools
import linecache
import math
import random
import sys
import textwrap
from collections.abc import Iterator
from queue import Queue
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resilient_train import script_place
from resilient_train.errors import ConfigError
from resilient_train.session.metrics import check_metrics
from resilient_train.session.reading import loop_carried as loop_carried_module
from resilient_train.session.reading import static_lookup
from resilient_train.session.reading.flow import Flow
from resilient_train.session.reading.known_objects import KnownObjects, given_names, leaves_out, set_names
from resilient_train.session.reading.loop_carried import (
    LoopCarried,
    body_carried,
    loop_carried,
)
from resilient_train.session.reading.scope import Scope
from resilient_train.session.reading.static_lookup import Texts
from resilient_train.session.step import Step, StepListener

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
    "a list that each step clears first": ("news.clear()\nnews.append(step)\nuse(news)", ()),
    "a list that is emptied": ("del news[:]\nnews.append(step)\nuse(news)", ()),
    "a list that is filled anew": ("news[:] = [step]\nnews.append(step)\nuse(news)", ()),
    "a list that is cleared in the end": ("news.append(step)\nuse(news)\nnews.clear()", ("news",)),
    "a list that is shuffled": ("random.shuffle(news)", ("news",)),
    "a list that is new, and shuffled": ("news = [step]\nrandom.shuffle(news)", ()),
    "an array that is shuffled": ("np.random.shuffle(array)", ("array",)),
    "an array that is added to at places": ("np.add.at(array, step, 1)", ("array",)),
    "a part of a tensor": ("tensor.narrow(0, step, 1).copy_(part)\nuse(tensor)", ("tensor",)),
    "a row of one": ("tensor.select(0, 0).zero_()\nuse(tensor)", ("tensor",)),
    "a row of a view": ("tensor.view(-1).narrow(0, 0, 1).copy_(part)\nuse(tensor)", ("tensor",)),
    "half of one": ("tensor.real.copy_(part)\nuse(tensor)", ("tensor",)),
    "a part by a name": ("row = tensor.narrow(0, step, 1)\nrow.copy_(part)\nuse(tensor)", ("tensor",)),
    "all of one that has such a name": ("net.real.copy_(part)\nuse(net.real)", ()),
    "all of one": ("tensor.view(-1).copy_(part)\nuse(tensor)", ()),
    "some of an array": ("np.copyto(array, 1, where=step > 0)\nuse(array)", ("array",)),
    "all of an array": ("np.copyto(array, 1)\nuse(array)", ()),
    "some of a result": ("np.add(np.ones(8), 1, out=array, where=step > 0)\nuse(array)", ("array",)),
    "all of a result": ("np.add(np.ones(8), 1, out=array)\nuse(array)", ()),
    "a result in a row": ("torch.mean(part, 0, out=tensor.select(0, 0))\nuse(tensor)", ("tensor",)),
    "a heap": ("heapq.heappush(news, step)", ("news",)),
    "a list that is turned": ("news.reverse()\nuse(news)", ("news",)),
    "what only has the name of one that draws": ("use(image_maker)", ()),
    "a queue": ("queue.put(1)\nuse(queue.get())", ("queue",)),
    "an attribute by a name": ("setattr(net, 'seen', getattr(net, 'seen') * 2)", ("net.seen",)),
    "of a frozen object": ("object.__setattr__(net, 'seen', net.seen * 2)", ("net.seen",)),
    "an attribute by a name that each step sets first": ("setattr(net, 'seen', 2)\nuse(getattr(net, 'seen', 0))", ()),
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
    "a list that grows": ("use(rest)\nnews.append(step)\nuse(len(news))", ("news",)),
    "a list for people": ("news.append(step)", ()),
    "a list of this step": ("news = []\nnews.append(step)\nuse(news)", ()),
    "in place": ("use(net.mean * 2)\nnet.mean.mul_(0.9).add_(step)", ("net.mean",)),
    "in place, an entry": ("for k in counts:\n    means[k].mul_(0.9)", ("means",)),
    "in place, by a view": ("net.mean.data.mul_(0.9)\nnet.mean.detach().view(-1).add_(step)", ("net.mean",)),
    "in place, of two lists": ("for a, p in zip(stored, use_all()):\n    t = a\n    t.mul_(0.9)", ("stored",)),
    "in place, numbered": ("for k, a in enumerate(list(stored)):\n    a.mul_(0.9)", ("stored",)),
    "in place, of a dict": ("for k, v in means.items():\n    v.mul_(0.9)", ("means",)),
    "in place, its values": ("for v in means.values():\n    v.mul_(0.9)", ("means",)),
    "in place, in a comprehension": ("[a.mul_(0.9) for a, _ in zip(stored, stored)]", ("stored",)),
    "as a whole, a row": ("row = array[step % 3 :]\nrow.fill(1)\nuse(array)", ("array",)),
    "in place, a row": ("row = array[step % 3 :]\nrow[0] = row[1]\nuse(array)", ("array",)),
    "in place, by +=": ("for a in stored:\n    a += step", ("stored",)),
    "in place, of pairs": ("for a, b in nested:\n    b.add_(step)", ("nested",)),
    "in place, all at once": ("ops._foreach_lerp_(stored, [step], 0.1)", ("stored",)),
    "of all at once, a new list": ("fresh = [Mean()]\nops._foreach_lerp_(fresh, [step], 0.1)", ()),
    "of what is new": ("for a in [Mean()]:\n    a.mul_(0.9)", ()),
    "of what is registered, one by one": ("for a in mine:\n    a.mul_(0.9)", ()),
    "begun anew, one by one": ("for a in stored:\n    a.zero_()", ()),
    "begun anew, and read behind it": ("for a in stored:\n    a.zero_()\nuse(stored[0])\nuse(a for a in stored)", ()),
    "begun anew, and read before": ("use(stored[0])\nfor a in stored:\n    a.zero_()", ("stored",)),
    "what they were": ("use(len(a) for a in stored)\nfor a, p in zip(stored, use_all()):\n    a.copy_(p)", ("stored",)),
    "what each was": ("for a, p in zip(stored, use_all()):\n    use(a)\n    a.copy_(p)", ("stored",)),
    "what each was, by slices": ("for k, a in enumerate(stored):\n    use(a)\n    a[:] = k", ("stored",)),
    "what it was, put in": ("for a in stored:\n    a.copy_(a.mul_(2))", ("stored",)),
    "begun anew now and then": ("if step % 8:\n    for a in stored:\n        a.zero_()\nuse(stored[0])", ("stored",)),
    "begun anew but for some": (
        "for a in stored:\n    if step % 4:\n        continue\n    a.zero_()\nuse(stored[0])",
        ("stored",),
    ),
    "begun anew up to one": (
        "for a in stored:\n    a.zero_()\n    if step:\n        break\nuse(stored[0])",
        ("stored",),
    ),
    "begun anew in part": ("for a in stored[step % 2 :]:\n    a.zero_()\nuse(stored[0])", ("stored",)),
    "begun anew at times": (
        "for a, _ in zip(stored, [] if step % 2 else stored):\n    a.zero_()\nuse(stored[0])",
        ("stored",),
    ),
    "as it is handed on": ("use(stored)\nfor a in stored:\n    a.zero_()", ("stored",)),
    "logs, one by one": ("for log in logs.values():\n    log.append(step)", ()),
    "all of it, by what it was": ("array[:] = 0.9 * array + step", ("array",)),
    "all of it": ("array[:] = step\nuse(array)", ()),
    "an output": ("ops.add(array, step, out=array)", ("array",)),
    "copied over": ("ops.copyto(array, 0.9 * array)", ("array",)),
    "an output of this step": ("ops.add(step, step, out=array)\nuse(array)", ()),
    "another variable now": ("for a in stored:\n    a = Mean()\n    a.mul_(0.9)", ()),
    "a part": ("array[step] = 1\nuse(array.max())", ("array",)),
    "a slice": ("array[step : step + 2] = 1\nuse(array[0])", ("array",)),
    "in what is registered, by another name": ("kept[step] = 1\nuse(kept)", ()),
    "beside it": ("array[step] = 1\nuse(kept, array)", ("array",)),
    "of what is registered": ("known.bag.append(step)\nuse(known.bag)", ()),
    "what it gives": ("news.pop()", ("news",)),
    "asked first": ("while step > last:\n    last = step", ("last",)),
}


class Mean:
    def mul_(self, *_: object) -> Mean:
        return self

    add_ = zero_ = copy_ = __iadd__ = detach = view = mul_
    data = property(mul_)
    __mul__ = mul_

    def __setitem__(self, *_: object) -> None:
        """As a tensor's."""


class Thing:
    seen = hidden = weight = 0

    def __init__(self) -> None:
        self.mean, self.bag, self.real = Mean(), list[int](), torch.zeros(1)


class Ops:
    """As torch's and NumPy's: no text of the user's."""

    _foreach_lerp_ = add = copyto = staticmethod(lambda *_, **__: None)


class Batch:
    seen = 0

    def get(self, _: int) -> int:
        return 0

    def __iter__(self) -> Iterator[int]:
        return iter((1, 2))


FRAMES: list[LoopCarried | None] = []


def looked(frame: FrameType, known: Any) -> None:
    FRAMES.append(loop_carried(frame, (known,)))


class Generator:
    """Of images."""


def names() -> dict[str, Any]:
    known = Thing()
    known.kept = [0, 0, 0]  # type: ignore[attr-defined]

    def steps() -> Iterator[int]:
        yield 1
        looked(sys._getframe(1), known)

    values: dict[str, Any] = dict.fromkeys(("ema", "total", "best", "last", "scale", "loss"), 0)
    return values | {
        "session_steps": steps,
        "net": Thing(),
        "known": known,
        "kept": known.kept,  # type: ignore[attr-defined]
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
        "news": [0],
        "means": {"n": Mean(), 1: Mean()},
        "array": np.zeros(8),
        "tensor": torch.zeros(8),
        "part": torch.zeros(1),
        "torch": torch,
        "stored": [Mean(), Mean()],
        "nested": [(0, Mean())],
        "mine": [known.mean],
        "logs": {"loss": [0]},
        "ops": Ops,
        "Mean": Mean,
        "use_all": lambda: (0, 0),
        "random": random,
        "np": np,
        "heapq": heapq,
        "queue": Queue(),
        "image_maker": Generator(),
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


CALLED = {
    "a global": ("def f():\n    global total\n    total += 1", "f()", ("total in f",)),
    "a global that the loop writes": ("def f():\n    use(total)", "f()\ntotal = 1", ("total in f",)),
    "and has written": ("def f():\n    use(total)", "total = 1\nf()", ()),
    "a variable of its own": ("def f():\n    n = 0\n    n += 1\n    return n", "f()", ()),
    "a parameter": ("def f(n):\n    n = n + 1\n    return n", "f(step)", ()),
    "an attribute": (
        "class T:\n    ema = 0\n    def f(self):\n        self.ema = 0.9 * self.ema\nt = T()",
        "t.f()",
        ("self.ema in T.f",),
    ),
    "set first": (
        (
            "class T:\n    def f(self):\n        self.loss = 1\n        self.g()\n    def g(self):\n"
            "        use(self.loss)\nt = T()"
        ),
        "t.f()",
        (),
    ),
    "set behind": (
        (
            "class T:\n    loss = 0\n    def f(self):\n        self.g()\n        self.loss = 1\n"
            "    def g(self):\n        use(self.loss)\nt = T()"
        ),
        "t.f()",
        ("self.loss in T.g",),
    ),
    "set on the way that returns, and not on the other": (
        "def f():\n    global x\n    if total:\n        return\n    x = 1",
        "f()\nuse(x)",
        ("x",),
    ),
    "set on both": (
        "def f():\n    global x\n    if total:\n        x = 2\n        return\n    x = 1",
        "f()\nuse(x)",
        (),
    ),
    "in an object that is handed over": ("def f(meter):\n    meter.seen += 1", "f(net)", ("meter.seen in f",)),
    "by name": ("def f(*, meter):\n    meter.seen += 1", "f(meter=net)", ("meter.seen in f",)),
    "in one that is registered": ("def f(meter):\n    meter.seen += 1", "f(known)", ()),
    "in one that is new": ("def f(meter):\n    meter.seen += 1", "fresh = batch()\nf(fresh)", ()),
    "generators of numbers": (
        (
            "class T:\n    def __init__(self):\n        self.rng = rng\n    def __call__(self):\n"
            "        return self.rng.random()\nt = T()"
        ),
        "t()",
        ("self.rng in T.__call__",),
    ),
    "a generator in a dictionary": (
        "held = {'rng': numbers}\ndef f():\n    held['rng'].beta(1, 1)",
        "f()",
        ("held['rng'] in f",),
    ),
    "a function in a list": (
        "def g():\n    global total\n    total += 1\nall_of = [g]",
        "all_of[0]()",
        ("total in g",),
    ),
    "no entry": (
        "held = {}\ndef f():\n    if len(held):\n        use(held['rng'], held[x], held[total + 1])",
        "f()",
        (),
    ),
    "a function of autograd": (
        (
            "class F:\n    seen = 0\n    apply = classmethod(use)\n"
            "    @staticmethod\n    def forward(ctx, x):\n        return x / (F.seen + 1)\n"
            "    @staticmethod\n    def backward(ctx, x):\n        F.seen = 0.9 * F.seen + 1\n        return x"
        ),
        "F.apply(x)",
        ("F.seen in F.forward",),
    ),
    "a function around it": (
        "def make():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n    return f\nf = make()",
        "f()",
        ("n in f",),
    ),
    "wrapped": (
        (
            "import functools\ndef wrap(g):\n    return functools.wraps(g)(lambda: g())\n@wrap\n"
            "def f():\n    net.seen += 1"
        ),
        "f()",
        ("net.seen in f",),
    ),
    "partly given": (
        "import functools\ndef g(a):\n    net.seen += a\nf = functools.partial(g, 1)",
        "f()",
        ("net.seen in g",),
    ),
    "handed over": ("def closure():\n    net.seen += 1", "use(closure)", ("net.seen in closure",)),
    "a property": (
        "class T:\n    n = 0\n    @property\n    def p(self):\n        self.n += 1\nt = T()",
        "use(t.p)",
        ("self.n in T.p",),
    ),
    "of the class": (
        (
            "class T:\n    n = 0\n    @classmethod\n    def f(cls):\n        cls.n += 1\n"
            "    @staticmethod\n    def g():\n        T.n += 1"
        ),
        "T.f()\nT.g()",
        ("cls.n in T.f",),
    ),
    "that call each other": (
        "def f():\n    net.seen += 1\n    if step > 1:\n        g()\ndef g():\n    f()",
        "f()",
        ("net.seen in f",),
    ),
    "a slot": (
        "class T:\n    __slots__ = ('n',)\n    def f(self):\n        self.n += 1\nt = T()\nt.n = 0",
        "t.f()",
        ("self.n in T.f",),
    ),
    "a class is called": ("class T:\n    def __init__(self):\n        self.n = 0\n        self.n += 1", "T()", ()),
    "by get of something without a name": (
        "def f():\n    batch().get(0)\n    net.seen += 1",
        "f()",
        ("net.seen in f",),
    ),
    "an entry of some key": ("def f(k):\n    counts[k] = counts[k] + 1", "f(step)", ("counts[k] in f",)),
    "or by get": ("def f(k):\n    counts[k] = counts.get(k, 0) + 1", "f(step)", ("counts[k] in f",)),
    "written before it is read": ("def f(k):\n    counts[k] = 1\n    use(counts[k])", "f(step)", ()),
    "begun anew by a function": ("def f(of):\n    for a in of:\n        a.zero_()", "f(stored)\nuse(stored[0])", ()),
    "kept by a function": (
        "def f(of):\n    use(of[0])\n    for a in of:\n        a.zero_()",
        "f(stored)",
        ("of in f",),
    ),
    "a default": ("def f(k, seen={}):\n    seen[k] = seen.get(k, 0) + 1", "f(step)", ("seen[k] in f",)),
    "entries": ("def f():\n    counts['n'] = counts['n'] + 1", "f()", ("counts['n'] in f",)),
}


@pytest.mark.parametrize("name", CALLED)
def test_what_functions_keep(name: str) -> None:
    before, body, expected = CALLED[name]
    found = carried(f"{before}\nfor step in session_steps():\n{textwrap.indent(body, '    ')}\n", names())
    assert (found.names if found else ()) == expected


def test_a_function_within_the_loops_own() -> None:
    source = (
        "def main():\n    n = 0\n    def f():\n        nonlocal n\n        n += 1\n"
        "    for step in session_steps():\n        f()\n        print(n)\nmain()\n"
    )
    found = carried(source, names())
    assert found
    assert found.names == ("n in f",)


def test_a_method_that_has_the_loop() -> None:
    source = (
        "class T:\n    ema = seen = 0\n    def run(self):\n        for step in session_steps():\n"
        "            self.body(step)\n"
        "            self.seen += 1\n    def body(self, step):\n        self.ema += step\nT().run()\n"
    )
    found = carried(source, names())
    assert found
    assert found.names == ("self.ema in T.body", "self.seen")


def test_what_hooks_keep() -> None:
    def hook(*_: object) -> None:
        seen["n"] = seen.get("n", 0) + 1

    def averages(state: dict[str, int], bucket: str) -> None:
        if bucket in state:
            state[bucket] = state[bucket] + 1

    seen: dict[str, int] = {}
    model = Cell(first=Cell())
    model._modules["first"]._forward_hooks = {0: hook}  # type: ignore[attr-defined]
    model._comm_hooks = [(averages, {})]  # type: ignore[attr-defined]
    found = carried("for step in session_steps():\n    model()\n", {**names(), "model": model})
    assert found
    assert [each.split(" in ") for each in found.names] == [["seen['n']", "hook"], ["state[bucket]", "averages"]]


def test_numbers_of_a_model_are_in_no_state_dict() -> None:
    of_average = ("self.begun in Averaging.forward", "self.mean in Averaging.forward")
    of_anneal = ("self.temperature in Annealed.forward",)
    for inner, expected in ((Annealed, of_anneal), (Publishing, ()), (Averaging, of_average)):
        model = Cell(module=Cell(first=inner()))
        model._modules["module"]._modules["first"].weight = object()  # type: ignore[attr-defined]
        source = "for step in session_steps():\n    model()\n"
        values = {**names(), "known": None}

        def steps() -> Iterator[int]:
            yield 1
            FRAMES.append(loop_carried(sys._getframe(1), (), (model,)))  # noqa: B023 - read at once

        found = carried(source, {**values, "session_steps": steps, "model": model})
        assert (found.names if found else ()) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("of['0.weight'].grad.clamp_(-1, 1)", ()),
        ("for key in of:\n    of[key].grad /= 2\n    of[key].grad.clamp_(-1, 1)", ()),
        ("for key in of:\n    of[key].requires_grad_(step > 1)\n    of[key].grad = of[key].grad * 2", ()),
        ("row[0].data.mul_(0.5)\nrow[step].grad.add_(1)", ()),
        ("use(more[step])\nmore[step].data.mul_(0.5)", ("more",)),
        ("use(of)\nof.pop('0.weight')", ("of",)),
        ("use(none[step])\nnone[step] /= 2", ("none[step]",)),
        ("use(some[step])\nsome[step] += 2", ("some[step]",)),
    ],
)
def test_a_containers_entries_that_are_all_a_models(body: str, expected: tuple[str, ...]) -> None:
    """Which one it is the text does not say. ``params = dict(model.named_parameters())`` is an ordinary line."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model(torch.ones(2)).sum().backward()

    def steps() -> Iterator[int]:
        yield 1
        FRAMES.append(loop_carried(sys._getframe(1), (), (model,)))

    of, row = dict(model.named_parameters()), [*model.parameters()]
    values = {
        **names(),
        "session_steps": steps,
        "of": of,
        "row": row,
        "more": [*row, torch.ones(2)],
        "none": {1: 2.0},
        "some": {0: row[0], 1: 2},
    }
    found = carried(f"for step in session_steps():\n{textwrap.indent(body, '    ')}\n", values)
    assert (found.names if found else ()) == expected


def test_what_a_new_process_takes_over_is_not_told() -> None:
    inner = Averaging()
    model = Cell(module=Cell(first=inner))
    model._modules["module"]._modules["first"].weight = object()  # type: ignore[attr-defined]

    def steps() -> Iterator[int]:
        yield 1
        FRAMES.append(loop_carried(sys._getframe(1), (), (model,), [(inner, {"begun"})]))

    values = {**names(), "known": None, "session_steps": steps, "model": model}
    found = carried("for step in session_steps():\n    model()\n", values)
    assert found
    assert found.names == ("self.mean in Averaging.forward",)


class Metric:
    """As torchmetrics', whose text is not followed: nothing in it says that it changes."""

    def __init__(self, *, kept: bool = False) -> None:
        self._modules: dict[str, Any] = {}
        self._defaults, self._persistent, self.hits = {"hits": 0}, {"hits": kept}, 0

    def update(self, _: object) -> None: ...

    def state_dict(self) -> dict[str, int]:
        return {"hits": self.hits} if self._persistent["hits"] else {}


def test_a_metric_changes_when_it_is_used() -> None:
    lines = "for step in session_steps():\n    model()\n    metric.update(step)\n    known.hits.update(step)\n"
    model = Cell(first=Measured())
    values = {**names(), "model": model, "metric": Metric()}
    values["known"].hits = Metric()
    for registered, expected in ((Metric(), ("metric", "self.accuracy")), (values["metric"], ("self.accuracy",))):

        def steps() -> Iterator[int]:
            yield 1
            known = (values["known"], registered)  # noqa: B023 - read at once
            FRAMES.append(loop_carried(sys._getframe(1), known, (model,)))

        found = carried(lines, {**values, "session_steps": steps})
        assert found
        assert tuple(each.partition(" in ")[0] for each in found.names) == expected


def test_a_metric_that_gives_nothing_of_what_it_counts_is_refused() -> None:
    kept = Metric(kept=True)
    check_metrics({"state": {"other": object(), "loss": Cell(), "kept": kept}, "rank_state": {}})
    collection = Metric()
    collection._modules["first"] = Metric()
    del collection._defaults
    for each in (Metric(), collection):
        with pytest.raises(ConfigError, match=r"rank_state\['hits'\] is a .*nothing of what it counts"):
            check_metrics({"state": {"kept": kept}, "rank_state": {"hits": each}})


class Cell:
    """As torch's: what is in it lies in a dictionary of its own."""

    def __init__(self, **modules: object) -> None:
        self._modules = modules

    def __call__(self) -> None: ...


class Annealed(Cell):
    temperature = 1.0

    def forward(self) -> None:
        self.temperature *= 0.99
        self.weight = self.weight + 1  # type: ignore[has-type]


class Averaging(Cell):
    """Of what it keeps only ``total`` is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.last, self.begun = np.zeros(3), [0.0], False
        self._buffers = {"total": np.zeros(3)}

    @property
    def total(self) -> Any:
        return self._buffers["total"]

    def forward(self) -> None:
        scale = 2 if self.begun else 1
        self.mean = 0.9 * self.mean + scale
        self.total[:2] += self.mean[:2]
        self.last.clear()
        self.last.append(scale)
        self.begun = True


class Measured(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = Metric()

    def forward(self) -> None:
        self.accuracy.update(1)


class Publishing(Annealed):
    def get_extra_state(self) -> float:
        return self.temperature


class Trainer:
    ema = seen = 0.0

    def body(self, batch: float) -> float:
        self.seen = 0
        self.seen += batch
        return self.average(batch)

    def average(self, loss: float) -> float:
        self.ema = 0.9 * self.ema + 0.1 * loss
        return self.ema


def test_a_body_that_is_given_to_a_session() -> None:
    trainer = Trainer()
    found = body_carried(trainer.body, ())
    assert found
    assert found.names == ("self.ema in Trainer.average",)
    assert found.place == f"{__file__}:{Trainer.body.__code__.co_firstlineno}"
    assert body_carried(trainer.body, (trainer,)) is None, "registered"
    assert body_carried(print, ()) is None
    found = body_carried(lambda: trainer.body(1), ())
    assert found
    assert found.names == ("self.ema in Trainer.average",)
    two = (lambda: trainer.body(1)), (lambda: 1)
    assert body_carried(two[0], ()) is None, "which of them it is nobody knows"


class Lit(Cell):
    hidden = 0

    def training_step(self) -> None:
        self.hidden = self.hidden + 1


def test_a_body_of_a_library() -> None:
    model = Cell(module=Lit(inner=Annealed()))
    found = body_carried(print, (), (model,))
    assert found
    assert found.names == ("self.hidden in Lit.training_step", "self.temperature in Annealed.forward")


class Bandit:
    """Of whose state half is given."""

    def __init__(self) -> None:
        self.weights, self.draws, self.rng = [1.0, 1.0], 0, random.Random(0)

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.weights}

    def draw(self) -> float:
        self.draws += 1
        self.weights[0] += 1
        return self.rng.random()


class Makes(Bandit):
    """One of what is given."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[:] = state["w"]
        self.draws = other = int(self.weights[0])
        print(other, self.rng)


class Every(Bandit):
    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class More(Bandit):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n": self.draws}


class Asks(Bandit):
    def state_dict(self) -> dict[str, Any]:
        return {"n": self.draw()}


class Stepped:
    """As an optimizer of the user's."""

    def __init__(self) -> None:
        self.state: dict[str, float] = {"m": 0.0}
        self.param_groups, self.defaults, self.count = [{"lr": 0.1}], {}, 0
        self._optimizer_step_pre_hooks = {0: Counted()}

    def step(self) -> None:
        self.count = self.count + 1
        self.state["m"] += 1
        self.param_groups[0]["lr"] *= 0.9


class Counted:
    calls = 0

    def __call__(self, *_: object) -> None:
        self.calls = self.calls + 1


class Tallies(dict[str, int]):
    def state_dict(self) -> dict[str, int]:
        return dict(self.items())

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.clear()
        self.update(state)


def test_what_the_text_of_a_state_dict_names() -> None:
    assert given_names(Bandit(), Texts()) == {"weights"}
    assert [given_names(kind(), Texts()) for kind in (Every, More, Asks, Thing, dict)] == [None] * 5
    assert given_names(Tallies(), Texts()) is None, "what its class's own methods give is all of it"
    assert (set_names(Bandit(), Texts()), set_names(Makes(), Texts())) == (set(), {"draws"})
    bandit = Bandit()
    for settled, expected in (
        ([(bandit, given_names(bandit, Texts()))], ("self.draws in Bandit.draw", "self.rng in Bandit.draw")),
        ([(bandit, {"weights", "draws", "rng"})], ()),
    ):

        def steps() -> Iterator[int]:
            yield 1
            FRAMES.append(loop_carried(sys._getframe(1), (), (bandit,), settled))  # noqa: B023 - read at once

        found = carried("for step in session_steps(): b.draw()\n", {**names(), "session_steps": steps, "b": bandit})
        assert (found.names if found else ()) == expected


@pytest.mark.parametrize("call", ["o.step()", "scaler.step(o)"])
def test_what_an_optimizer_of_the_users_and_its_hooks_keep(call: str) -> None:
    optimizer = Stepped()

    def steps() -> Iterator[int]:
        yield 1
        settled = [(optimizer, {"state", "param_groups", "defaults"})]
        FRAMES.append(loop_carried(sys._getframe(1), optimizer.param_groups, (optimizer,), settled))

    scaler = SimpleNamespace(step=lambda each: each.step())
    values = {**names(), "session_steps": steps, "o": optimizer, "scaler": scaler}
    found = carried(f"for step in session_steps(): {call}\n", values)
    assert found
    assert found.names == ("self.calls in Counted.__call__", "self.count in Stepped.step")


@pytest.mark.torch
@pytest.mark.parametrize("verb", ["register_hook", "register_post_accumulate_grad_hook"])
def test_what_hooks_of_parameters_keep(verb: str) -> None:
    torch = pytest.importorskip("torch")

    class Clip:
        calls = 0

        def hook(self, _: object) -> None:
            self.calls += 1

    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    getattr(model[0].weight, verb)(Clip().hook)
    found = carried("for step in session_steps():\n    if step < 0: model(step)\n", {**names(), "model": model})
    assert found
    assert found.names == ("self.calls in Clip.hook",)


class Ramp:
    """Counts how often it is entered."""

    entered = 0

    def __enter__(self) -> float:
        self.entered += 1
        return self.entered / 10

    def __exit__(self, *_: object) -> None: ...


def test_what_is_entered_and_what_has_another_name() -> None:
    kept = [0.5]
    values = {**names(), "ramp": Ramp(), "kept": kept, "push": kept.append}
    found = carried("for step in session_steps():\n    with ramp as loss: pass\n    push(sum(kept))\n", values)
    assert found
    assert found.names == ("push", "self.entered in Ramp.__enter__")
    assert carried("for step in session_steps():\n    push(step)\n", values) is None, "nobody reads it"


class Held:
    """A data set, and a loader of it."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("data.keep[step] = 0", "data.keep"),
        ("table[step] = 1", "table"),
        ("weights[step] = 1", "weights"),
        ("if step > 3: data.hard = True", "data.hard"),
        ("data.hard = step > 3", ""),
        ("data.hard = step > 3\n    data.hard = False", ""),
        ("other.hard = True", ""),
        ("others[step] = 1", ""),
        ("if step > 3: loss_of.smoothing = 0.0", "loss_of.smoothing"),
        ("loss_of.smoothing = 0.1 * step", ""),
        ("if step > 3: drawn.p = 0.0", ""),
    ],
)
def test_what_is_read_where_no_text_tells(body: str, expected: str) -> None:
    """By a loader, between two steps; by a module of torch's."""
    table, weights = {"a": 0}, [0, 0]

    def collate(items: Any, *, by: Any = None) -> Any:
        return items, table, by

    data = Held(keep=[1, 1], hard=False)
    loader = Held(dataset=[data], collate_fn=functools.partial(collate, by=weights))
    loss_of, drawn = Held(_modules={}, smoothing=0.1), Cell()
    drawn.p = 0.1  # type: ignore[attr-defined]

    def steps() -> Iterator[int]:
        yield 1
        FRAMES.append(loop_carried(sys._getframe(1), (), (), (), [loader]))

    values = {**names(), "session_steps": steps, "data": data, "table": table, "weights": weights, "loss_of": loss_of}
    values |= {"other": Held(hard=False), "others": [0, 0], "drawn": drawn}
    found = carried(f"for step in session_steps():\n    {body}\n", values)
    assert (found.names if found else ()) == ((expected,) if expected else ())


@pytest.mark.parametrize(
    ("kept", "behind", "expected"),
    [
        ([{"w": np.ones(2)}], "mean = list(kept)", ("kept",)),
        ([{"w": np.ones(2)}], "def mean(): return kept", ()),
        ([{"w": np.ones(2)}], "kept = None", ()),
        ([0.5], "print(kept)", ("kept",)),
        ([0.5], "", ()),
    ],
)
def test_what_is_filled_for_what_stands_behind_the_loop(kept: Any, behind: str, expected: tuple[str, ...]) -> None:
    """Snapshots of an ensemble; losses that go into a file."""
    source = f"for step in session_steps():\n    kept.append(loss)\n{behind}\n"
    found = carried(source, {**names(), "kept": kept})
    assert (found.names if found else ()) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("    if step > 6:\n        best = loss\nprint(best)", ("best",)),
        ("    if step > 6:\n        net.seen = loss\nprint(net.seen)", ("net.seen",)),
        ("    best = loss\nprint(best)", ()),
        ("    if this.done:\n        best = loss\nprint(best)", ()),
        ("    if step > 6:\n        best = loss", ()),
        ("    if step > 6:\n        known.kept = loss\nprint(known.kept)", ()),
        ("    if env.done:\n        best = loss\nprint(best)", ("best",)),
        ("    if env.done:\n        hidden = loss\n    use(hidden)", ("hidden",)),
        ("    if this.done and step > 6:\n        best = loss\nprint(best)", ("best",)),
        ("    if step > 6:\n        best = loss\nbest = 1\nprint(best)", ()),
        ("    if step > 6:\n        best = loss\nif loss:\n    best = 1\nprint(best)", ("best",)),
        ("    if step > 6:\n        best = loss\nprint([best for best in range(3)])", ()),
        ("    if step > 6:\n        best = loss\nprint([best for best in range(3)])\nprint(best)", ("best",)),
        ("    if step > 6:\n        best = loss\nfor best in range(3):\n    print(best)", ()),
        ("    if step > 6:\n        best = loss\nbest = best + 1", ("best",)),
        ("    if step > 6:\n        best = loss\nbest += 1", ("best",)),
        ("    if step > 6:\n        best = loss\nprint((lambda i: best)(0))", ("best",)),
        ("    if step > 6:\n        best = loss\nprint((lambda best: best)(0))", ()),
        ("    if step > 6:\n        best = loss\nprint((lambda best=best: best)())", ("best",)),
        ("    if step > 6:\n        counts = {1: loss}\ncounts[1] += 1", ("counts",)),
        ("    if step > 6:\n        best = loss\nif (best := best + 1): pass", ("best",)),
        ("    if step > 6:\n        best = loss\ntry:\n    best = 1\nfinally:\n    print(best)", ()),
    ],
)
def test_what_is_set_now_and_then_and_read_behind_the_loop(source: str, expected: tuple[str, ...]) -> None:
    values = {**names(), "this": Step(StepListener, 0), "env": SimpleNamespace(done=True)}
    found = carried(f"for step in session_steps():\n    loss = step\n{source}\n", values)
    assert (found.names if found else ()) == expected


class _Stepping:
    def __init__(self, steps: Any) -> None:
        self.steps = steps


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ("phases()", ("phases()",)),
        ("cycle(news), range(3)", ("cycle(news)", "range(3)")),
        ("itertools.repeat(1)", ()),
    ],
)
def test_what_a_loop_takes_one_of_with_each_step(beside: str, expected: tuple[str, ...]) -> None:
    steps = names()["session_steps"]
    values = {**names(), "session": _Stepping(steps), "phases": lambda: [1], "cycle": list, "itertools": itertools}
    found = carried(f"for step, *_ in zip(session.steps(), {beside}):\n    print(step)\n", values)
    assert (found.names if found else ()) == expected


def test_a_module_that_holds_others_grows() -> None:
    values = {**names(), "torch": torch, "teachers": torch.nn.ModuleList()}
    source = "for step in session_steps():\n    use(teachers)\n    teachers.append(torch.nn.ReLU())\n"
    found = carried(source, values)
    assert found
    assert found.names == ("teachers",)


def test_a_loader_that_a_loop_goes_through() -> None:
    data = Held(keep=[1, 1])
    values = {**names(), "data": data, "loader": Held(dataset=data)}
    found = carried("for step, _ in zip(session_steps(), [loader]):\n    data.keep[step] = 0\n", values)
    assert found
    assert found.names == ("data.keep",)


class Scaled:
    """Keeps how large what it was called with is, as a rule."""

    scale = count = weight = 1.0

    def __call__(self, value: float) -> float:
        self.scale = 0.9 * self.scale + 0.1 * value
        return value / self.scale

    def update(self, value: float) -> None:
        self.count += value


class Weighted(Scaled):
    """Only its base counts."""

    def update(self, value: float) -> None:
        super().update(2 * value)


def test_loops_in_loops_take_no_time() -> None:
    """Of objects of one class one is enough; of many classes there is an end."""
    kinds = [type(f"Kind{number}", (Scaled,), {}) for number in range(16)]
    lines = ["for step in session_steps():", *(f"{' ' * deep}for t{deep} in terms:" for deep in range(1, 9))]
    source = "\n".join([*lines, f"{' ' * 9}t8.update(1.0)\n"])
    for terms in ([Scaled() for _ in range(16)], [kind() for kind in kinds]):
        registered = KnownObjects((), (), ())
        flow = Flow(Scope((lambda: 0).__code__, {}, {"terms": terms}), registered, Texts())
        loop = ast.parse(source).body[0]
        assert isinstance(loop, ast.For)
        flow.run_loop(loop)
        assert flow.carried() == ["self.count in Scaled.update"]
        assert flow._statements < 50_000, "a power of 16"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("loss = sum(t(1.0) for t in terms)", "self.scale in Scaled.__call__"),
        ("for t in terms: t.update(1.0)", "self.count in Scaled.update"),
        ("for i, t in enumerate(terms): t.update(i)", "self.count in Scaled.update"),
        ("for t, x in zip(terms, (1.0, 2.0)): t(x)", "self.scale in Scaled.__call__"),
        ("for key, t in table.items(): t.weight *= 0.9", "t.weight"),
        ("for t in table.values(): t.weight = t.weight + 1", "t.weight"),
        ("table[key](1.0)", "self.scale in Scaled.__call__"),
        ("for key in ('a',): table[key].update(1.0)", "self.count in Scaled.update"),
        ("for t in reversed(terms): t.update(1.0)\n    t = None", "self.count in Scaled.update"),
        ("for t in [Scaled(), Scaled()]: t(1.0)", ""),
        ("terms = [Scaled()]\n    for t in terms: t.weight *= 0.9", ""),
        ("for t in known.kept: t.update(1.0)", ""),
        ("for t in table: t.lower()", ""),
        ("for name, t, w in rows: w * t(1.0)", "self.scale in Scaled.__call__"),
        ("for key, (t, w) in pairs.items(): t.update(w)", "self.count in Scaled.update"),
        ("for t in handlers['a']: t(1.0)", "self.scale in Scaled.__call__"),
        ("for t in handlers.get(key, ()): t(1.0)", "self.scale in Scaled.__call__"),
        ("t = terms[step % 2]\n    t(1.0)", "self.scale in Scaled.__call__"),
        ("t = terms[0] if step > 2 else terms[1]\n    t.update(1.0)", "self.count in Scaled.update"),
        ("table.get('a').update(1.0)", "self.count in Scaled.update"),
        ("getattr(terms[0], 'up' + 'date')(1.0)", "self.count in Scaled.update"),
        ("h = getattr(terms[0], 'up' + 'date', None)\n    if h is not None: h(1.0)", "self.count in Scaled.update"),
        ("list(map(terms[0].update, [1.0]))", "self.count in Scaled.update"),
        ("mine.update(1.0)", "self.count in Scaled.update"),
        ("drawn.seed(step)\n    drawn.random()", ""),
        ("drawn.random()\n    drawn.seed(step)", "drawn"),
        ("random.random()\n    random.seed(step)", ""),
        ("loss = [table for table in terms]\n    table['a'].update(1.0)", "self.count in Scaled.update"),
        ("t = terms[0]\n    t.update(1.0)", "self.count in Scaled.update"),
        ("t = Scaled()\n    t.update(1.0)", ""),
    ],
)
def test_objects_in_lists_and_dicts(body: str, expected: str) -> None:
    """Terms of a loss, callbacks, tasks: those that are there when the text is read."""
    values = {**names(), "terms": [Scaled(), Scaled()], "table": {"a": Scaled()}, "key": "a", "Scaled": Scaled}
    values |= {"rows": [("a", Scaled(), 0.5)], "pairs": {"a": (Scaled(), 0.5)}, "handlers": {"a": [Scaled()]}}
    values |= {"mine": Weighted(), "drawn": random.Random(0), "random": random}
    values["known"].kept[:] = [Scaled()]
    found = carried(f"for step in session_steps():\n    {body}\n", values)
    assert (found.names if found else ()) == ((expected,) if expected else ())


def test_a_part_without_parts_may_have_hooks() -> None:
    def hook(*_: object) -> None:
        seen["n"] = seen["n"] + 1

    seen, layer = {"n": 0}, Cell()
    layer._forward_hooks = {0: hook}  # type: ignore[attr-defined]
    found = carried("for step in session_steps():\n    layer()\n", {**names(), "layer": layer})
    assert found
    assert len(found.names) == 1


def test_loops_around_it_count_as_well() -> None:
    """They share an iterator of steps, and a new process begins with the first."""
    inner = "for step in session_steps():\n        total += step"
    source = f"n = 0\nfor epoch in range(1):\n    n += 1\n    {inner}\n    n = n\n"
    found = carried(source, names())
    assert found
    assert found.names == ("total", "n")


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


def test_what_holds_millions_is_not_read_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A set of samples, say: the job waits for the look."""

    class Transition: ...

    looked_at = 0

    def is_array(value: object) -> bool:
        nonlocal looked_at
        looked_at += 1
        return type(value) is np.ndarray

    monkeypatch.setattr(static_lookup, "is_array", is_array)
    kept = [Transition()] * 100_000
    average = np.zeros(2)
    found = [*static_lookup.arrays_in({"replay": kept, "more": [kept, {"average": average}]})]
    assert not found
    assert looked_at <= 2000
    found = [*static_lookup.arrays_in({"average": (average,), "replay": kept})]
    assert [id(each) for each in found] == [id(average)]


def test_of_many_some_are_told() -> None:
    told = LoopCarried(tuple("abcdefghijklmnopqrstuv"), "train.py:7").told()
    assert told.startswith("the code at train.py:7 keeps a, b, c, ")
    assert ", s, t and 2 more (in events.jsonl) from step to step" in told
    assert "keeps a, b from" in LoopCarried(("a", "b"), "x").told()


def test_it_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank stands still as it reads, and all others may wait for it."""
    tally = {"steps": 0}

    def count() -> None:
        tally["steps"] += 1

    def body() -> None:
        count()

    assert body_carried(body, ()) is not None
    monkeypatch.setattr(static_lookup, "_FOR_S", 0.0)
    assert body_carried(body, ()) is None


@pytest.mark.parametrize(
    "module",
    ["argparse", "ast", "collections", "dataclasses", "json.decoder", "logging", "tarfile", "typing"],
)
def test_any_text_is_read(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the standard library were the user's."""
    monkeypatch.setattr(static_lookup, "_FOR_S", math.inf)
    texts = Texts()
    monkeypatch.setattr(loop_carried_module, "Texts", lambda: texts)
    monkeypatch.setattr(script_place, "is_users", lambda _: True)
    held = vars(importlib.import_module(module)).values()
    classes = [each for each in held if isinstance(each, type) and each.__module__ == module]
    every = [each for holder in (held, *(vars(each).values() for each in classes)) for each in holder]
    functions = [each for each in every if type(each) is FunctionType]
    assert len(functions) > 3
    for each in functions:
        body_carried(each, ())


def test_a_module_that_is_registered_has_no_number_in_its_state_unless_it_says_so() -> None:
    import torch

    class Plain(torch.nn.Module):
        pass

    class Telling(torch.nn.Module):
        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return self.__dict__["given"]

    telling = Telling()
    telling.given = {"seen": 3}
    assert leaves_out(Plain())
    assert not leaves_out(telling)
    telling.given = {}
    assert leaves_out(telling), "it has forgotten to"
    assert not leaves_out(torch.Generator())
    assert not leaves_out(object())


def test_what_comes_back_with_its_holder() -> None:
    class Holder:
        def __init__(self) -> None:
            self.kept, self.loose, self.inner = [1], 2, Thing()

    whole, partly, other, model = Holder(), Holder(), Holder(), torch.nn.Linear(1, 1)
    known = KnownObjects([whole], [model], [(partly, ["loose"])])
    assert known.carries(whole, "kept", whole.kept)
    assert known.carries(whole, "loose", whole.loose)
    assert known.carries(partly, "loose", partly.loose)
    assert not known.carries(partly, "kept", partly.kept)
    assert not known.carries(other, "loose", other.loose)
    assert not known.carries(other, "inner", other.inner)
    assert not known.carries(other, "", [1])
    assert not known.carries(other, "['a']", 1)
    assert not known.carries(model.weight, "residual", torch.ones(1)), "a new parameter has none"
