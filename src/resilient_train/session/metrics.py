"""torchmetrics' metrics count for themselves, and ``state_dict()`` has nothing of it unless each is told so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resilient_train.errors import ConfigError
from resilient_train.session.reading.static_lookup import all_parts, counts_for_itself, held


def check_metrics(registered: Mapping[str, Mapping[str, Any]]) -> None:
    """``registered``: by the Session's argument. Raises ConfigError for a metric of which nothing would be carried."""
    for argument, things in registered.items():
        for name, thing in things.items():
            of_torch = type(held(thing, "_modules")) is dict
            if of_torch and any(map(counts_for_itself, all_parts(thing))) and not thing.state_dict():
                raise ConfigError(
                    f"{argument}[{name!r}] is a {type(thing).__qualname__}, whose state_dict() has nothing of what it "
                    "counts: nothing of it would be brought back (docs/how-to/loops.md, Metrics)"
                )
