"""Engines: what a Session asks of a training framework (``roles.py``), and how the one for a user's model is found.

An engine is an entry point of the group ``resilient_train.engines``, so another package can bring one.
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from resilient_train.errors import ConfigError
from resilient_train.frameworks.roles import Engine, Objects, Plugin

GROUP = "resilient_train.engines"


@functools.cache
def installed() -> tuple[EntryPoint, ...]:
    """The engines of all installed packages. Reads what pip has written of each package: some milliseconds."""
    return tuple(entry_points(group=GROUP))


def engine_for(objects: Objects) -> Engine:
    """The engine that claims the objects. Raises ConfigError if none does, or several do, or one can't be imported."""
    plugins = [(each, _imported(each)) for each in installed()]
    claiming = [(each, plugin) for each, plugin in plugins if plugin.claims(objects)]
    if len(claiming) == 1:
        return claiming[0][1].engine_for(objects)
    models = ", ".join(_qualified(model) for model in objects.models) or "missing"
    if claiming:
        raise ConfigError(
            f"model is {models}: several engines claim it ({_names(claiming)}): uninstall all of these but one"
        )
    names = _names(plugins) or "none; is resilient_train itself installed by pip?"
    raise ConfigError(f"model is {models}: no engine for it. Engines found: {names}")


def _names(plugins: list[tuple[EntryPoint, Plugin]]) -> str:
    return ", ".join(_named(entry) for entry, _ in plugins)


def _imported(entry: EntryPoint) -> Plugin:
    try:
        return cast("Plugin", entry.load())
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"engine {_named(entry)} can't be imported: {error}") from error


def _named(entry: EntryPoint) -> str:
    return f"{entry.name} of {entry.dist.name}" if entry.dist is not None else entry.name


def _qualified(model: Any) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"
