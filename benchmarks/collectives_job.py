"""The job of ``collectives.py``, under torchrun: DDP steps in turn on groups that do more and more around gloo."""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from overhead_job import plain_lane
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.distributed.distributed_c10d import GroupName
from workload import make

from resilient_train._native import keep_thread_state
from resilient_train.frameworks.torch.communication.guarded_works import GuardedWork, Works

_TIMEOUT = timedelta(seconds=60)
_VERBS = ("allreduce", "broadcast", "allgather", "_allgather_base", "reduce", "barrier")
_works = Works()


def _handed_on(work: Any) -> Any:
    return work


def _called_back(work: Any) -> Any:
    work.get_future().add_done_callback(lambda _: None)
    return work


def _called_back_kept(work: Any) -> Any:
    work.get_future().add_done_callback(lambda _: keep_thread_state())
    return work


def _guarded(work: Any) -> Any:
    return GuardedWork(work, _works.live)


LANES: dict[str, Callable[[Any], Any]] = {
    "handed_on": _handed_on,
    "called_back": _called_back,
    "called_back_kept": _called_back_kept,
    "guarded": _guarded,
}
"""What a group in Python does with gloo's work before it gives it to DDP."""


class HandingOn(dist.ProcessGroup):
    """A group in Python that hands every collective on to gloo."""

    def __init__(self, options: Any, lane: str) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._name, self.treat = options.group_rank, str(options.group_id), LANES[lane]
        store = PrefixStore(f"handing-on/{self._name}", options.store)
        self.inner = ProcessGroupGloo(store, options.group_rank, options.group_size, _TIMEOUT)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "handing-on"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        return self._rank

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, _desc: str) -> None:  # noqa: N802 - torch's name
        return

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return "handing-on"


def _verb(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self.treat(getattr(self.inner, name)(*args, **kwargs))


for _name in _VERBS:
    setattr(HandingOn, _name, _verb(_name))


def _creator(lane: str) -> Callable[[Any, Any], HandingOn]:
    return lambda options, _backend_options: HandingOn(options, lane)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a block")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=int, required=True)
    given = parser.parse_args()
    signal.alarm(given.limit_s)  # SIGALRM ends us even if whoever should do it is gone
    dist.init_process_group("gloo")
    side = dist.new_group(backend="gloo")
    trainers = {name: plain_lane(make(given.model)) for name in ("gloo", "gloo_again")}
    for lane in LANES:
        dist.Backend.register_backend(lane, _creator(lane), extended_api=True, devices=["cpu"])
        trainers[lane] = plain_lane(make(given.model), backend=lane)
    for run in trainers.values():
        run(given.steps)
    names = list(trainers)
    times: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for block in range(given.blocks):
        turn = block % len(names)
        for name in names[turn:] + names[:turn]:
            dist.barrier(group=side)
            begin, begin_cpu = time.perf_counter_ns(), time.process_time_ns()
            trainers[name](given.steps)
            times[name].append((time.perf_counter_ns() - begin, time.process_time_ns() - begin_cpu))
    (given.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
