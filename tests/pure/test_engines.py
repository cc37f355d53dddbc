"""How the engine of a user's model is found."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from resilient_train import frameworks
from resilient_train.errors import ConfigError
from resilient_train.frameworks import engine_for, roles
from resilient_train.frameworks.roles import Engine, Objects

SOURCES = sorted((Path(frameworks.__file__).parents[1] / "session").rglob("*.py"))
OWN = EntryPoint("torch", "resilient_train.frameworks.torch", frameworks.GROUP)


class Model:
    """Of a framework that another package brings the engine for."""


ENGINE: Any = object()
theirs = SimpleNamespace(
    claims=lambda objects: any(isinstance(each, Model) for each in objects.models), engine_for=lambda _: ENGINE
)
"""That package's plug-in, which the entry points below name."""
greedy = SimpleNamespace(claims=lambda _: True, engine_for=lambda _: ENGINE)


def named(name: str, attribute: str) -> EntryPoint:
    return EntryPoint(name, f"engines_of_others:{attribute}", frameworks.GROUP)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What pip has installed."""
    others: Any = SimpleNamespace(theirs=theirs, greedy=greedy)
    monkeypatch.setitem(sys.modules, "engines_of_others", others)
    entries: list[EntryPoint] = []
    monkeypatch.setattr(frameworks, "installed", lambda: tuple(entries))
    return entries


def test_our_own_engine_is_an_entry_point_like_any_other() -> None:
    assert OWN in entry_points(group=frameworks.GROUP)
    assert OWN in frameworks.installed()


def test_another_packages_engine_is_taken_for_its_objects(found: list[EntryPoint]) -> None:
    found += [OWN, named("theirs", "theirs")]
    assert engine_for(Objects((Model(),), ())) is ENGINE


def test_objects_that_nobody_claims(found: list[EntryPoint]) -> None:
    found += [OWN, named("theirs", "theirs")]
    with pytest.raises(ConfigError, match=r"model is builtins.dict, builtins.int: no engine .* found: torch, theirs$"):
        engine_for(Objects(({}, 3), ()))
    with pytest.raises(ConfigError, match="model is missing: no engine for it"):
        engine_for(Objects((), ()))
    found.clear()
    with pytest.raises(ConfigError, match="Engines found: none; is resilient_train itself installed"):
        engine_for(Objects((Model(),), ()))


def test_two_engines_that_claim_the_same(found: list[EntryPoint]) -> None:
    """Which of them a job had been started with would decide its bits."""
    found += [named("theirs", "theirs"), named("greedy", "greedy")]
    with pytest.raises(ConfigError, match=r"several engines claim it \(theirs, greedy\)"):
        engine_for(Objects((Model(),), ()))


@pytest.mark.parametrize("value", ["engines_of_nobody:theirs", "engines_of_others:nothing"])
def test_an_engine_that_is_not_there(found: list[EntryPoint], value: str) -> None:
    found += [OWN, EntryPoint("lost", value, frameworks.GROUP)]
    with pytest.raises(ConfigError, match=r"engine lost can't be imported: .*(engines_of_nobody|nothing)"):
        engine_for(Objects((Model(),), ()))


def test_no_framework_is_imported_for_another_ones_model() -> None:
    code = (
        "import sys; import resilient_train as rt\n"
        "try: rt.Session(model={}, optimizer=None)\n"
        "except rt.ConfigError as error: print(error, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert "no engine for it" in done.stdout
    assert done.stdout.endswith(" False\n")


@pytest.mark.torch
def test_the_torch_engine_has_all_that_is_asked_of_its_roles() -> None:
    torch = pytest.importorskip("torch")
    engine = engine_for(Objects((torch.nn.Linear(2, 2),), ()))
    for field, role in get_type_hints(Engine).items():
        for verb in verbs_of(role):
            assert callable(getattr(getattr(engine, field), verb, None)), f"{field}.{verb}"


def test_each_role_is_small_and_each_of_its_verbs_is_used() -> None:
    """By whom is said in its docstring; here, that somebody outside of the engine does."""
    session = Path(frameworks.__file__).parent.parent / "session"
    text = "\n".join(path.read_text() for path in session.rglob("*.py"))
    for role in get_type_hints(Engine).values():
        verbs = verbs_of(role)
        assert len(verbs) <= 13, role.__name__
        for verb in verbs:
            assert f".{verb}" in text, f"{role.__name__}.{verb}"


def verbs_of(role: type) -> list[str]:
    assert role.__module__ == roles.__name__
    return [name for name in vars(role) if not name.startswith("_")]


@pytest.mark.parametrize("role", Engine._fields)
def test_a_role_names_its_callers(role: str) -> None:
    """Who writes another engine reads there what is called where."""
    kind = get_type_hints(Engine)[role]
    named = re.findall(r"``(?:\w+/)*(\w+)\.py``", inspect.getdoc(kind).partition("Called by")[2])
    assert sorted(named) == sorted(path.stem for path in SOURCES if calls(path, role, kind.__name__)), role


def calls(path: Path, role: str, kind: str) -> bool:
    """Whether that file is given the role by its name, or calls a method of an engine's."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == roles.__name__
        for alias in node.names
    }
    of_engine = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == role
        and ast.unparse(node.value.value) in ("engine", "self._engine")
    ]
    return kind in imported or bool(of_engine)
