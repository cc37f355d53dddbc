"""The job of ``overhead.py``: times blocks of steps, with a Session (``--lanes session``), without, or both in turn.

With both, one process holds two copies of the model: one on a plain gloo group with an optimizer that the Session does
not know, one in the Session. Their blocks alternate, so whatever else the machine does meets both alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timers import python_calls, watch_cost_us, watching
from workload import LAYOUTS, Work, divided, make, train_once

Times = tuple[int, int]
"""Nanoseconds: wall time, and CPU time of all threads of this process."""
Run = Callable[[int], None]
"""Runs so many steps."""


def plain_lane(work: Work, layout: str = "ddp", backend: str = "gloo") -> Run:
    model, optimizer = divided(work, layout, backend)

    def run(steps: int) -> None:
        for _ in range(steps):
            train_once(model, optimizer, work)

    return run


@contextlib.contextmanager
def session_lane(work: Work, layout: str, total: int, memory_steps: int) -> Iterator[Run]:
    # Here and not above: the plain job is to be free of us.
    import resilient_train as rt

    model, optimizer = divided(work, layout, "resilient")
    with rt.Session(model=model, optimizer=optimizer) as session:
        if memory_steps:
            session.save_every(steps=10**9, memory_steps=memory_steps)
        if not session.recovering:
            raise SystemExit("the Session has no agent: start this under resilient-run")
        steps = iter(session.steps(total))

        def run(count: int) -> None:
            for _ in range(count):
                # The head of the loop belongs to the step; the tail's end of the block before comes along with it.
                step = next(steps)
                with step:
                    train_once(model, optimizer, work)

        yield run
        for _ in steps:  # nothing is left: this is where all ranks agree that the loop is over
            raise SystemExit("the benchmark's blocks don't add up to the session's steps")


def clock(run: Run, steps: int) -> Times:
    begin, begin_cpu = time.perf_counter_ns(), time.process_time_ns()
    run(steps)
    return time.perf_counter_ns() - begin, time.process_time_ns() - begin_cpu


def alternate(lanes: dict[str, Run], blocks: int, steps: int, side: dist.ProcessGroup) -> dict[str, list[Times]]:
    """Each pair of blocks in the other order than the one before, so that a drift favours nobody."""
    times: dict[str, list[Times]] = {name: [] for name in lanes}
    for block in range(blocks):
        for name in list(lanes)[:: 1 if block % 2 == 0 else -1]:
            dist.barrier(group=side)
            times[name].append(clock(lanes[name], steps))
    return times


def split(run: Run, blocks: int, steps: int, side: dist.ProcessGroup) -> dict[str, Any]:
    """Where the Session's time goes. Apart from the other blocks, because stop watches cost something themselves."""
    with watching() as ledger:
        for _ in range(blocks):
            dist.barrier(group=side)
            run(steps)
    dist.barrier(group=side)
    calls = python_calls(lambda: run(steps))
    count = blocks * steps
    return {
        "python_calls_per_step": calls / steps,
        "us_per_step": {label: ns / 1e3 / count for label, ns in ledger.own_ns.items()},
        "cpu_us_per_step": {label: ns / 1e3 / count for label, ns in ledger.cpu_ns.items()},
        "calls_per_step": {label: calls / count for label, calls in ledger.calls.items()},
        "barrier_us": [ns / 1e3 for ns in ledger.each_barrier_ns],
        "watch_us": watch_cost_us(),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    blocks, steps, warm_up = arguments.blocks, arguments.steps, arguments.warm_up
    split_blocks = arguments.split_blocks if arguments.lanes != "plain" else 0
    # Barriers between blocks, on a group of their own: on a resilient group they would be part of the loop's tail.
    side = dist.new_group(backend="gloo")
    total = warm_up + (blocks + (split_blocks + 1 if split_blocks else 0)) * steps  # one to count calls in
    work = make(arguments.model)
    result: dict[str, Any] = {"parameters": work.size(), "rank": dist.get_rank(), "torch": torch.__version__}
    with contextlib.ExitStack() as stack:
        lanes: dict[str, Run] = {}
        if arguments.lanes != "plain":
            lanes["session"] = stack.enter_context(
                session_lane(make(arguments.model), arguments.layout, total, arguments.memory_steps)
            )
            lanes["session"](warm_up)
        if arguments.lanes != "session":
            # Behind the Session's first step: before it, a wrapped model that is not registered is refused.
            lanes["plain"] = plain_lane(work, arguments.layout)
            lanes["plain"](warm_up)
        result["block_times"] = alternate(lanes, blocks, steps, side)
        if split_blocks:
            result["split"] = split(lanes["session"], split_blocks, steps, side)
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", choices=("both", "plain", "session"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--memory-steps", type=int, default=0)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of a block")
    parser.add_argument("--split-blocks", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=20, help="steps")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=int, required=True)
    arguments = parser.parse_args()
    signal.alarm(arguments.limit_s)  # SIGALRM ends us even if whoever should do it is gone
    if arguments.lanes == "plain":
        dist.init_process_group("gloo")
    else:
        import resilient_train  # noqa: F401 - makes the backend known

        dist.init_process_group("resilient")
    result = measure(arguments)
    (arguments.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
