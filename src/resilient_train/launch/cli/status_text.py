"""A job's status in sentences, for a person; `--json` has the same as fields (docs/reference/commands.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

_MIB = 1 << 20


def told(status: Mapping[str, Any]) -> Iterator[str]:
    """What is as it should be takes two lines and one for each rank. Fields that are not known here come as they are:
    an agent of another version may have more.
    """
    left = dict(status)
    yield from _of_job(left)
    for rank in left.pop("ranks", []):
        yield _of_rank(rank)
    standbys = [_of_standby(each) for each in left.pop("standbys", [])]
    if standbys:
        yield f"standbys: {', '.join(standbys)}"
    for key, value in left.items():
        yield f"{key}: {value if isinstance(value, str) else msgspec.json.encode(value).decode()}"


def _of_job(left: dict[str, Any]) -> Iterator[str]:
    """Takes what it tells out of ``left``."""
    lasts = f" for {left.pop('stage_s')} s" if "stage_s" in left else ""
    yield f"{left.pop('stage', 'no stage is told')}{lasts}"
    if waits := left.pop("waits_for", None):
        yield f"it waits for {_ranks(waits)}"
    if lost := left.pop("unnoticed", None):
        yield f"{_ranks(lost)}: lost, or standing still, which the job is about to notice"
    if paused := left.pop("paused", None):
        yield f"all stand before step {paused['step']}, for {paused['paused_s']} s; `resilient-train resume` ends that"
    if (at := left.pop("pause_at", None)) is not None:
        yield f"a pause is asked for before {f'step {at}' if at else 'the next step'}"
    for each in left.pop("stragglers", []):
        yield f"rank {each['rank']} computes {each['ratio']} times as long as before step {each['since']}"
    if {"replacements", "restarts", "max_restarts"} <= left.keys():
        replaced, again, most = (left.pop(name) for name in ("replacements", "restarts", "max_restarts"))
        made = f", generation {left.pop('generation')}" if "generation" in left else ""
        yield f"replacements: {replaced}, restarts of all: {again} (at most {most} together){made}"


def _of_rank(rank: Mapping[str, Any]) -> str:
    where = str(rank.get("phase") or rank.get("reported") or "")
    if rank.get("step") is not None:
        where += f" of step {rank['step']}"
    done = f", {rank['commits']} updates committed" if rank.get("commits") is not None else ""
    if rank.get("pid") is None:
        return f"rank {rank['rank']}: {where}{done}, no process"
    age = f", {rank['age_s']} s old" if rank.get("age_s") is not None else ""
    before = f", {rank['incarnation']} before it" if rank.get("incarnation") else ""
    return f"rank {rank['rank']}: {where}{done} (process {rank['pid']}{age}{before})"


def _of_standby(each: Mapping[str, Any]) -> str:
    on_its_way = "" if each["ready"] else ", on its way"
    return f"{each['depth']} {each['pid']} ({each['own_bytes'] / _MIB:.0f} MiB{on_its_way})"


def _ranks(numbers: Iterable[int]) -> str:
    each = [str(number) for number in numbers]
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(each)}"
