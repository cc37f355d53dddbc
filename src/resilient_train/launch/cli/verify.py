"""``resilient-train verify``: what is wrong with a checkpoint, or which of several is the one to go on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from resilient_train.errors import ConfigError
from resilient_train.launch.spec import CHECKPOINTS
from resilient_train.observe.report import Line
from resilient_train.state.checkpoint.libraries import differences
from resilient_train.state.checkpoint.manifest import MANIFEST, parse_name
from resilient_train.state.checkpoint.verify import Report, candidates, verify


def reports(path: Path) -> list[Report]:
    """Verifies the checkpoint at ``path``, or all that a run or a folder of checkpoints holds, the newest first.

    Raises ConfigError if there is none.
    """
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory: give a checkpoint's, or that of a run")
    path = path.resolve()  # a link that somebody names is meant
    if parse_name(path.name) or (path / MANIFEST).exists():
        return [verify(path)]
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    found = [verify(each) for _, each in candidates(folder)]
    if not found:
        raise ConfigError(f"{path} holds no checkpoint: no {MANIFEST}, and no directory that is called step_<N>")
    return found


def as_dict(found: list[Report]) -> dict[str, Any]:
    """For ``--json``."""
    return {
        "ok": all(report.ok for report in found),
        "newest_complete": _newest(found),
        "newest_without_nan": _newest(found, without_nan=True),
        "checkpoints": [_checkpoint(report) for report in found],
    }


def _newest(found: list[Report], *, without_nan: bool = False) -> str | None:
    return next((str(each.path) for each in found if each.ok and (each.without_nan or not without_nan)), None)


def _checkpoint(report: Report) -> dict[str, Any]:
    made = report.manifest
    fields = ("kind", "step", "commits", "reason", "world_size", "shards", "libraries") if made else ()
    return {
        "path": str(report.path),
        "ok": report.ok,
        **{name: getattr(made, name) for name in fields},
        "nan": msgspec.to_builtins(made.nan) if made and made.nan else None,
        "differences": [each._asdict() for each in differences(made.libraries)] if made else [],
        "size_bytes": report.size_bytes,
        "problems": [problem._asdict() for problem in report.problems],
    }


def as_lines(found: list[Report]) -> list[Line]:
    """For people."""
    result: list[Line] = []
    for report in found:
        if report.ok and report.manifest:
            made = report.manifest
            text = f"step {made.step}, {made.kind}, {made.world_size} ranks, {made.shards} shards"
            result.append(Line(f"{report.path}: complete ({text}, {report.size_bytes / 1e6:.1f} MB)"))
        if report.manifest and report.manifest.nan:
            result.append(Line(f"{report.path}: holds {report.manifest.nan}", "yellow"))
        if report.manifest and (others := differences(report.manifest.libraries)):
            told = ", ".join(f"{name} {made} (here {here or 'none'})" for name, made, here in others)
            result.append(Line(f"{report.path}: written with {told}", "yellow"))
        result += [Line(f"{report.path}: {problem.file} {problem.reason}") for problem in report.problems]
    if len(found) > 1:
        newest, sound = _newest(found), _newest(found, without_nan=True)
        result.append(Line(f"newest complete: {newest or 'none'}"))
        if sound != newest:
            result.append(Line(f"newest complete without NaN: {sound or 'none'}"))
    return result
