"""Which thresholds for the gradient norm and the loss: ``resilient-train advise --norm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resilient_train.errors import ConfigError
from resilient_train.observe.history import events_of
from resilient_train.observe.report import Line
from resilient_train.observe.thresholds import EVERY, Threshold, propose, values_of

_VARIABLES = {"norm": "RESILIENT_NORM_THRESHOLD", "loss": "RESILIENT_LOSS_THRESHOLD"}


def thresholds(run_dir: Path | None) -> dict[str, Threshold]:
    """``norm`` and ``loss`` -> what is proposed, from all runs in the directory. Raises ConfigError if that is none."""
    if run_dir is None:
        raise ConfigError('advise --norm: give --run-dir of a run that was trained with MS_ENABLE_TFT="{TRE:1}"')
    try:
        runs = [[event for event in run if event.kind == "values"] for run in events_of(run_dir)]
    except OSError as error:
        raise ConfigError(f"advise: {error.filename} can't be read: {error.strerror or error}") from None
    found = {what: threshold for what in _VARIABLES if (threshold := propose(values_of(run, what) for run in runs))}
    if not found:
        raise ConfigError(
            f"advise --norm: {run_dir} has no norms or losses of {EVERY} updates or more: they are written down where "
            "MS_ENABLE_TFT has TRE:1, and the loop clips its gradients or calls session.check(loss)"
        )
    return found


def as_dict(found: dict[str, Threshold]) -> dict[str, Any]:
    """The proposals as a JSON-able object."""
    return {what: each._asdict() | {"alarms_at_most": each.alarms_at_most} for what, each in found.items()}


def as_lines(found: dict[str, Threshold]) -> list[Line]:
    """The proposals for a person."""
    lines = list[Line]()
    for what, each in found.items():
        spikes = f"{each.spikes} spikes" if each.spikes else "no spike"
        seen = f"median {each.median:.3g}, highest {each.highest:.3g}, {spikes} in {each.values:,} updates"
        rate = f"{each.alarms} false alarms in them, so at most 1 in {1 / each.alarms_at_most:,.0f}"
        lines += [Line(f"{what:<10}{seen}"), Line(f"{'':<10}{_VARIABLES[what]}={each.limit:g}: {rate}", "bold")]
    return lines
