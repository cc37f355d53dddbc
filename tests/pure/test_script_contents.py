"""What a script keeps by ways that its text does not show is found in what its objects hold behind two steps."""

from __future__ import annotations

import array
import enum
import functools
import gzip
import io
import itertools
import mmap
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resilient_train.session.reading import script_contents
from resilient_train.session.reading.script_contents import changed, contents_of

pytestmark = pytest.mark.usefixtures("as_in_a_fork")  # a look ends after a second, the collector's work counted

NAMES = (
    array,
    functools,
    io,
    itertools,
    os,
    sqlite3,
    subprocess,
    OrderedDict,
    random,
    threading,
    weakref,
    UserDict,
    defaultdict,
    deque,
    SimpleNamespace,
    np,
)
"""The texts below use them."""
GZ = ""


@pytest.fixture(scope="module", autouse=True)
def _compressed(tmp_path_factory: pytest.TempPathFactory) -> None:
    global GZ
    GZ = str(tmp_path_factory.mktemp("compressed") / "noise.gz")
    with gzip.open(GZ, "wb") as file:
        file.write(random.Random(0).randbytes(200_000))


class Meter:
    total = 0

    def __init__(self) -> None:
        self.sum, self.history = 0.0, list[float]()
        self.inner: Any = None


class Slots:
    __slots__ = ("count", "empty")

    def __init__(self) -> None:
        self.count = 0


@dataclass(slots=True)
class Record:
    best: float = 1.0


class Raw(io.RawIOBase):
    """Whose methods run nothing in a look."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        buffer[:1] = b"a"
        return 1

    def seekable(self) -> bool:
        raise AssertionError

    tell = fileno = seekable  # type: ignore[assignment]


class OwnDatabase(sqlite3.Connection):
    @property
    def total_changes(self) -> int:
        raise AssertionError


class Proxy:
    """Says of itself what it likes, and counts who asks."""

    asked = 0

    def __init__(self, *hands_on: Any) -> None:
        object.__setattr__(self, "hands_on", hands_on)

    def __getattribute__(self, name: str) -> Any:
        Proxy.asked += 1
        raise RuntimeError(name)


class Mode(enum.Enum):
    WARM = 1
    MAIN = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Rate(float):
    def __repr__(self) -> str:
        raise RuntimeError("a repr of the user's")

    __eq__ = __hash__ = __repr__  # type: ignore[assignment]


class Settings:
    """``sys.modules[__name__] = Settings()``."""

    __module__ = "settings_of_a_test"

    def __init__(self) -> None:
        self.rate = 0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Name(str):
    def __repr__(self) -> str:
        raise RuntimeError("a repr of the user's")

    __slots__ = ()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.seen = 0
        self.tracker = Meter()


def made_hook() -> Any:
    norms, count = {"w": 0.0}, 0

    def hook(*_: Any) -> None:
        nonlocal count
        count += 1
        norms["w"] += 1.0

    return hook


def rest(process: subprocess.Popen[bytes]) -> None:
    """Until it waits for its next line."""
    while "State:\tS" not in Path(f"/proc/{process.pid}/status").read_text():
        assert process.poll() is None
        time.sleep(0.001)


def with_default(value: float, kept: list[float] = []) -> None:  # noqa: B006 - what is tested
    kept.append(value)


def hung(module: torch.nn.Module, hook: Any) -> torch.nn.Module:
    module.register_forward_hook(hook)
    return module


def hung_on_parameter(module: torch.nn.Linear, hook: Any) -> torch.nn.Module:
    module.weight.register_hook(hook)
    return module


# What a script makes, what a step does to it, and what is told.
FOUND = {
    "an attribute": ("x = Meter()", "x.sum += 1", ["x.sum"]),
    "an attribute by another name": ("x = Meter()", "setattr(x, f'{chr(97)}vg', 1)", ["x.avg"]),
    "all attributes": ("x = Meter()", "vars(x).update(sum=2)", ["x.sum"]),
    "one of the class": ("x = Meter()", "Meter.total += 1", ["Meter.total"]),
    "one in a slot": ("x = Slots()", "x.count += 1", ["x.count"]),
    "one of a dataclass": ("x = Record()", "x.best = 0.5", ["x.best"]),
    "a namespace": ("x = SimpleNamespace(n=1)", "x.n += 1", ["x.n"]),
    "a list in a list": ("x = Meter()\nx.inner = [[], []]", "for h in x.inner: h.append(1)", ["x.inner"]),
    "a row of a tensor": ("x = [torch.zeros(9, 9)]", "row = x[0][5]; row.fill_(1)", ["x"]),
    "a tensor by its memory": ("x = [torch.zeros(9)]", "x[0].data.fill_(1)", ["x"]),
    "a row of an array": ("x = [np.zeros((9, 9))]", "row = x[0][5]; row += 1", ["x"]),
    "a number of NumPy's": ("x = Meter()\nx.sum = np.float32(0)", "x.sum += 1", ["x.sum"]),
    "an entry": ("x = Meter()\nx.inner = defaultdict(int)", "s = x.inner; s['k'] += 1", ["x.inner"]),
    "the value of an entry": ("x = {'k': 1}", "x['k'] += 1", ["x"]),
    "a dict of another class": ("x = UserDict(k=1)", "x['k'] += 1", ["x.data"]),
    "an entry by an odd name": ("x = {'a[0].b': [0], (1, 2): [0]}", "x['a[0].b'].append(1)", ["x"]),
    "a set": ("x = [set()]", "x[0].add(1)", ["x"]),
    "a set of as many": ("x = [{1}]", "x[0].clear(); x[0].add(2)", ["x"]),
    "a queue that is full": ("x = [deque([1, 2], maxlen=2)]", "x[0].append(3)", ["x"]),
    "an attribute of a parameter": (
        "x = Net()",
        "x.layer.weight.residual = torch.ones(2)",
        ["x.layer.weight.residual"],
    ),
    "the same of several": (
        "x = Net()",
        "for p in x.parameters(): p.residual = torch.ones(2)",
        ["x.layer.weight.residual"],
    ),
    "an attribute of a module": ("x = Net()", "x.seen += 1", ["x.seen"]),
    "what a module holds": ("x = Net()", "x.tracker.sum += 1", ["x.tracker.sum"]),
    "what a hook closes over": (
        "h = made_hook()\nx = hung(torch.nn.Linear(2, 2), h)\ndel h",
        "next(iter(x._forward_hooks.values()))()",
        ["count in hook", "norms in hook"],
    ),
    "what a parameter's hook closes over": (
        "h = made_hook()\nx = hung_on_parameter(torch.nn.Linear(2, 2), h)\ndel h",
        "next(iter(x.weight._backward_hooks.values()))()",
        ["count in hook", "norms in hook"],
    ),
    "what a function is bound to": ("x = functools.partial(print, Meter())", "x.args[0].sum += 1", ["x[1].sum"]),
    "whose method it is": ("x = Meter().__init__", "x.__self__.sum += 1", ["x.sum"]),
    "an attribute of a function": ("x = made_hook()", "x.calls = 1", ["hook.calls"]),
    "a default": ("x = with_default", "x(1.0)", ["default 0 of with_default"]),
    "behind a proxy": (
        "x = Proxy(Meter())",
        "object.__getattribute__(x, 'hands_on')[0].sum += 1",
        ["x.hands_on[0].sum"],
    ),
    "a random number generator": ("x = [random.Random(1)]", "for r in x: r.random()", ["x"]),
    "one of NumPy's": ("x = [np.random.default_rng(1)]", "for r in x: r.random()", ["x"]),
    "an old one of NumPy's": ("x = [np.random.RandomState(1)]", "for r in x: r.rand()", ["x"]),
    "one of torch's": ("x = [torch.Generator()]", "for r in x: torch.rand(1, generator=r)", ["x"]),
    "an iterator": ("x = [iter([1, 2, 3])]", "for r in x: next(r)", ["x"]),
    "a counter": ("x = [itertools.count()]", "for r in x: next(r)", ["x"]),
    "a flag": ("x = [threading.Event()]", "for e in x: e.set()", ["x[0]._flag"]),
    "a mark in memory": ("x = [bytearray(3), array.array('d', [0.0])]", "for a in x: a[0] = 1", ["x"]),
    "of weak keys": ("k = Meter()\nx = weakref.WeakKeyDictionary({k: 0})", "x[k] += 1", ["x.data"]),
    "the end of a long list": ("x = [[0] * 10**5, deque([0] * 10**5)]", "x[0][-1] = x[1][-1] = 1", ["x"]),
    "NaN that is a number now": ("x = Meter()\nx.sum = float('nan')", "x.sum = 1.0", ["x.sum"]),
    "one of several modes": ("x = Meter()\nx.inner = Mode.WARM", "x.inner = Mode.MAIN", ["x.inner"]),
    "and of numbers with names": ("x = Meter()\nx.inner = Level.LOW", "x.inner = Level.HIGH", ["x.inner"]),
    "a number of a class of its own": ("x = Meter()\nx.inner = Rate(1)", "x.inner = Rate(2)", ["x.inner"]),
    "a text of a class of its own": ("x = Meter()\nx.inner = Name('a')", "x.inner = Name('b')", ["x.inner"]),
    "a function of C": ("x = Meter()\nx.inner = torch.tanh", "x.inner = torch.sigmoid", ["x.inner"]),
    "a function": ("x = Meter()\nx.inner = made_hook", "x.inner = hung", ["x.inner"]),
    "a function of NumPy's": ("x = Meter()\nx.inner = np.sin", "x.inner = np.cos", ["x.inner"]),
    "a class": ("x = Meter()\nx.inner = Meter", "x.inner = Slots", ["x.inner"]),
    "the order of a dict": ("x = {1: [], 2: []}", "x[1] = x.pop(1)", ["x"]),
    "the order of what was used last": ("x = OrderedDict(a=1, b=2)", "x.move_to_end('a')", ["x"]),
    "where it is in a file": ("x = [io.BytesIO(b'ab'), io.StringIO('ab')]", "for f in x: f.read(1)", ["x"]),
    "what a file holds": ("x = [io.BytesIO(b'ab')]", "x[0].getbuffer()[0] = 1", ["x"]),
    "where it is in a file that is read": ("x = [open(__file__, 'rb')]", "for f in x: f.read(9000)", ["x"]),
    "and of a text": ("x = [open(__file__)]", "for f in x: f.read(9000)", ["x"]),
    "within the lines of one": ("x = [open(__file__)]", "for f in x: [next(f) for _ in range(200)]", ["x"]),
    "an unbuffered one": ("x = [open(__file__, 'rb', buffering=0)]", "for f in x: f.read(9000)", ["x"]),
    "a database": (
        "x = [sqlite3.connect(':memory:')]\nx[0].execute('create table t(a)')",
        "for d in x: d.execute('insert into t values (1)')",
        ["x"],
    ),
    "another process": (
        "x = [subprocess.Popen(['sh', '-c', 'read a; read b'], stdin=-1, bufsize=0)]",
        "for p in x: rest(p); p.stdin.write(b'1'); rest(p)",
        ["x"],
    ),
    "a database of a class of its own": (
        "x = [sqlite3.connect(':memory:', factory=OwnDatabase)]\nx[0].execute('create table t(a)')",
        "for d in x: d.execute('insert into t values (1)')",
        ["x"],
    ),
    "a compressed file": (
        "x = [gzip.open(GZ), gzip.open(GZ, 'rt', encoding='latin')]",
        "for f in x: f.read(90000)",
        ["x"],
    ),
    "a Sobol sequence": ("x = [torch.quasirandom.SobolEngine(2)]", "for s in x: s.draw(1)", ["x"]),
    "another module of the class": ("x = {'t': Net()}", "x['t'] = Net()", ["x"]),
    "another one in a module": ("x = torch.nn.Sequential(Net())", "x[0] = Net()", ["x.0"]),
    "a column": ("x = [torch.zeros(9, 9)[:, 1], np.zeros((9, 9))[:, 1]]", "for a in x: a[8] = 1", ["x"]),
    "of another order": ("x = [torch.zeros(9, 5).t()]", "x[0].data[4, 8] = 1", ["x"]),
    "another kind of object": ("x = Meter()\nx.inner = Slots()", "x.inner = Record()", ["x.inner", "x.inner.best"]),
}
NOT_FOUND = {
    "nothing": ("x = [Meter(), Net(), torch.ones(3), np.ones(3), {1: 2}, made_hook(), Proxy()]", "pass"),
    "NaN": ("x = Meter()\nx.sum = float('nan')\nx.inner = [torch.tensor(float('nan'))]", "x.sum = x.sum + 1"),
    "a variable": ("x = 1\ny = Meter()", "x = 2; y = Meter()"),
    "what a module learns": ("x = Net()", "x.layer.weight.data.add_(1)"),
    "whether it trains": ("x = Net()", "x.eval()"),
    "the same value anew": ("x = Meter()\nx.inner = torch.ones(3)", "x.inner = torch.ones(3)"),
    "a library's object": ("x = textwrap.TextWrapper()", "x.width += 1"),
    "what can't be looked at": (
        "x = [np.square, np.dtype('f4'), 10**5000, {10**5000: 1}, np.array([None]), np.poly1d([1])]",
        "pass",
    ),
    "many": ("x = [[0] * 10**6, deque([0] * 10**5), {*range(10**5)}, {k: 0 for k in range(10**5)}]", "x[0][500] = 1"),
    "a name that says what it likes": ("x = {Name('a'): Meter()}", "pass"),
    "a large array that is as it was": ("x = [np.ones(10**6)]", "x[0] = x[0].copy()"),
    "a file that is written": ("x = [open('/dev/null', 'w')]", "for f in x: f.write('a')"),
    "one of the kernel's numbers": ("x = [open('/proc/self/stat')]", "for f in x: f.read()"),
    "a pipe": (
        "x = [os.fdopen(end, mode) for end, mode in zip(os.pipe(), 'rw')]",
        "print('a', file=x[1], flush=True); x[0].readline()",
    ),
    "a file that is closed": ("x = [open(__file__)]; x[0].close()", "pass"),
    "a text in no file": (
        "x = [io.TextIOWrapper(io.BytesIO(b'a')), io.TextIOWrapper(io.BytesIO(b'a'))]; x[0].detach()",
        "pass",
    ),
    "a database that is closed": ("x = [sqlite3.connect(':memory:')]; x[0].close()", "pass"),
    "one of the user's own": ("x = [io.BufferedReader(Raw())]", "x[0].read(1)"),
    "modules that are in one another twice": (
        "x = torch.nn.ReLU()\nfor _ in range(30): x = torch.nn.Sequential(x, x)",
        "pass",
    ),
    "a process that nobody writes to": (
        "x = [subprocess.Popen(['sh', '-c', 'while sleep 0.001; do :; done'])]",
        "time.sleep(0.1); x[0].kill()",
    ),
    "a process that is no more": ("x = [subprocess.Popen(['true'])]; x[0].wait()", "pass"),
    "a module without tensors": ("x = {'t': torch.nn.Dropout()}", "x['t'] = torch.nn.Dropout()"),
    "torch's own mark on a parameter that is in parts": (
        "x = torch.nn.Linear(2, 2); vars(x.weight)['_is_param'] = True",
        "vars(x.weight).pop('_is_param')",
    ),
    "tensors that can't be looked at": (
        "x = [torch.ones(2, device='meta'), torch.ones(2, 2).to_sparse(), torch.nn.LazyLinear(2), torch.ones(0)]",
        "pass",
    ),
}


class Script:
    """A function that stands still between two steps."""

    def __init__(self, begin: str, step: str) -> None:
        text = f"def run():\n{textwrap.indent(begin, '    ')}\n    while True:\n        yield\n        {step}\n"
        made = dict[str, Any]()
        exec(compile(text, __file__, "exec"), globals(), made)
        self._run = made["run"]()

    def at_step(self) -> FrameType:
        next(self._run)
        frame: FrameType = self._run.gi_frame
        return frame


@pytest.mark.parametrize(("begin", "step", "told"), FOUND.values(), ids=FOUND)
def test_what_a_step_changes_is_named(begin: str, step: str, told: list[str]) -> None:
    script, asked = Script(begin, step), Proxy.asked
    before = contents_of([script.at_step()], lambda _: False)
    now = contents_of([script.at_step()], lambda _: False)
    assert sorted(changed(before, now)) == told
    assert Proxy.asked == asked
    Meter.total = 0


@pytest.mark.parametrize(("begin", "step"), NOT_FOUND.values(), ids=NOT_FOUND)
def test_what_stays_is_not(begin: str, step: str) -> None:
    script = Script(begin, step)
    before = contents_of([script.at_step()], lambda _: False)
    assert changed(before, contents_of([script.at_step()], lambda _: False)) == []


def test_what_is_settled_is_so_for_all_of_a_kind() -> None:
    """A text is read once for objects of one class."""
    script = Script("x = [Meter(), Meter()]", "for each in x: each.sum += 1; each.history.append(1); each.inner = [1]")
    first: Any = None

    def left_out(part: Any) -> bool:
        nonlocal first
        if type(part.holder) is Meter:
            first = first or part.holder
            return part.holder is first and part.key in ("sum", "inner")
        return False

    before = contents_of([script.at_step()], lambda _: False)
    assert changed(before, contents_of([script.at_step()], left_out)) == ["x[0].history", "x[1].history"]


def test_a_namespace_that_a_text_runs_in_is_no_container() -> None:
    names: dict[str, Any] = {}
    exec(
        compile("def run():\n    while True:\n        yield\n        globals()['made'] = 1\n", __file__, "exec"), names
    )
    run = names["run"]()
    looks = []
    for _ in range(2):
        next(run)
        looks.append(contents_of([run.gi_frame, sys._getframe()], lambda _: False))
    assert "names" not in changed(*looks)


def test_what_gets_another_name_has_not_changed() -> None:
    """In the first look an object was found by a variable of the loop, which the second one leaves out."""
    script = Script("x = Net()\ny = [x]", "x = y[0]")
    before = contents_of([script.at_step()], lambda _: False)
    now = contents_of([script.at_step()], lambda part: part.name == "x")
    assert "y[0].seen" in now.seen
    assert changed(before, now) == []


def test_variables_of_the_loop_and_of_functions_around_it_are_told_apart() -> None:
    script = Script("x = Meter()", "pass")
    holders = list[Any]()
    step = script.at_step()
    contents_of([step, sys._getframe()], lambda part: holders.append((part.holder, part.name)) or True)
    assert (step.f_code, "x") in holders
    assert (sys._getframe().f_code, "holders") in holders


def test_a_class_of_a_module_that_is_not_listed() -> None:
    """``exec_module`` of one that nobody has put into ``sys.modules``."""
    script = Script("x = Settings()", "x.rate += 1")
    before = contents_of([script.at_step()], lambda _: False)
    assert changed(before, contents_of([script.at_step()], lambda _: False)) == ["x.rate"]


def test_a_module_in_whose_place_an_object_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: Any = Settings()
    monkeypatch.setitem(sys.modules, "settings_of_a_test", settings)
    script = Script("x = sys.modules['settings_of_a_test']", "x.rate += 1")
    before = contents_of([script.at_step()], lambda _: False)
    now = contents_of([script.at_step()], lambda _: False)
    monkeypatch.undo()
    assert changed(before, now) == ["x.rate"]
    assert now.unread == ()


def test_no_value_of_the_script_lives_longer() -> None:
    """Neither by what a look keeps, nor by the dictionary that Python makes of a frame's variables."""
    script = Script("x = Meter()\nx.inner = Net()\nold = x.inner", "old = x.inner = None")
    frame = script.at_step()
    kept = contents_of([frame], lambda _: False)
    inner = frame.f_locals["x"].inner
    if sys.version_info < (3, 13):  # from there on no dictionary is kept
        frame.f_locals.clear()
    references = sys.getrefcount(inner)
    script.at_step()
    assert sys.getrefcount(inner) == references - 2
    assert kept.seen


def test_a_mapped_file_that_has_become_shorter_ends_nobody(tmp_path: Path) -> None:
    """To touch what is behind its end is SIGBUS."""
    (tmp_path / "cache").write_bytes(bytes(8 * mmap.PAGESIZE))
    mapped = np.memmap(tmp_path / "cache", dtype=np.float32, mode="r+")
    kept = [torch.from_numpy(mapped), np.asarray(mapped), torch.from_numpy(mapped)[::3], mapped[::5], mapped]
    looks = [contents_of([sys._getframe()], lambda _: False)]
    mapped[-1] = 1
    looks.append(contents_of([sys._getframe()], lambda _: False))
    assert "kept" in changed(*looks)
    with (tmp_path / "cache").open("r+b") as file:
        file.truncate(mmap.PAGESIZE)
    last = contents_of([sys._getframe()], lambda _: False)
    assert (last.unread, len(kept)) == ((), 5)


def test_one_that_can_not_be_looked_at_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(each: Any) -> Any:
        raise TypeError("an odd one")

    monkeypatch.setattr(script_contents, "_of_numpys", fails)
    script = Script("x = [np.random.default_rng(1)]\ny = Meter()", "y.sum += 1")
    before = contents_of([script.at_step()], lambda _: False)
    now = contents_of([script.at_step()], lambda _: False)
    assert changed(before, now) == ["y.sum"]
    assert now.unread == ("x: TypeError: an odd one",)


@pytest.mark.parametrize(
    "begin",
    [
        "x = [[np.random.RandomState(1) for _ in range(128)] for _ in range(30)]",
        "x = [torch.Generator() for _ in range(250)]",
        "x = [np.zeros(50 << 20, 'V1').view('V%d' % (50 << 20))[0], np.bytes_(b'a' * (50 << 20))]",
        "x = None\nfor _ in range(10**5): x = [x]",
    ],
)
def test_no_look_takes_long(begin: str) -> None:
    script, spent = Script(begin, "pass"), list[float]()
    for _ in range(2):
        frame, before = script.at_step(), time.thread_time()
        contents_of([frame], lambda _: False)
        spent.append(time.thread_time() - before)
    assert min(spent) < 2.0


def test_large_scripts_are_looked_at_in_part() -> None:
    script = Script("x = [[Meter() for _ in range(200)] for _ in range(100)]\ny = Meter()", "y.sum += 1")
    before = contents_of([script.at_step()], lambda _: False)
    assert changed(before, contents_of([script.at_step()], lambda _: False)) == ["y.sum"]
