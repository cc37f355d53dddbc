"""The job of ``checkpoint.py``: one rank under resilient-run, with a state of about the size that is asked for.

It measures what a Session's own snapshots, flushes and restores take, in turn with torch's ways of saving the same.
Times in ms unless a name says otherwise. Uses the insides of ``saves/saving.py``: a Session has no switch for "now".
"""
# ruff: noqa: SLF001

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from snapshot_job import TIMEOUT_MS, address_of, memcpy, timed, touched
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import resilient_train as rt
from resilient_train._native import Copier
from resilient_train.protocol.messages import Source
from resilient_train.session.saves.cadence import Due
from resilient_train.session.saves.saving import Saving
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.flush import WORK, Flush, Flushed

WIDTH = 1024
BYTES_PER_PARAMETER = 12
"""Of float32 with AdamW's two moments."""
FAR = 1 << 40
"""Snapshots out of the loop are of updates that never come."""
Times = dict[str, list[float]]


class Lane:
    """Says when to save in the place of a ``session/saves/cadence.Cadence``."""

    def __init__(self) -> None:
        self.every = 0
        self.due = Due.NOTHING

    def head(self, commits: int) -> Due:
        return self.due if self.every and commits % self.every == 0 else Due.NOTHING

    def waited(self, duration_s: float) -> None:
        """Of no interest."""


class Bench:
    """A model in a Session, and what the sections measure it with."""

    def __init__(self, size_bytes: int, batch: int, session: rt.Session, parts: tuple[Any, ...]) -> None:
        self.session = session
        self.model, self.optimizer = parts
        self.steps = iter(session.steps(1 << 30))
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(batch, WIDTH, generator=generator)
        self.size_bytes = size_bytes
        self.far = FAR
        self.forward_backward_ms: list[float] = []
        assert session._driver is not None
        self.saving: Saving = session._driver.saving
        self.lane = Lane()
        self.saving._cadence = self.lane  # type: ignore[assignment]

    def run(self, count: int) -> None:
        for _ in range(count):
            with next(self.steps):
                begin = time.perf_counter()
                self.model(self.inputs).square().mean().backward()
                self.forward_backward_ms.append((time.perf_counter() - begin) * 1e3)
                self.optimizer.step()
                self.optimizer.zero_grad()

    def snapshot(self) -> None:
        """The whole of it while the training thread waits: header, plan, copy with digests, trailer, record."""
        self.far += 1
        self.saving._begin(self.far, 0, store=False)
        self.saving.fence()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def save(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def take(bench: Bench, rounds: int, folder: Path) -> Times:
    """What the training thread waits for, against plain copies of as many bytes and torch's ways."""
    first_ms = timed(bench.snapshot)
    second_ms = timed(bench.snapshot)  # the other slot's first
    pair = bench.saving._pair
    assert pair is not None
    newest = pair.newest()
    assert newest is not None
    size_bytes = newest.image_bytes
    source, target = touched(size_bytes), touched(size_bytes)
    copier = Copier(2)

    def stream() -> None:
        copier.gather(target, [(address_of(source), size_bytes, 0)], hashed=False)
        assert copier.wait(TIMEOUT_MS)

    found: Times = {name: [] for name in ("stream", "snapshot", "torch_save", "dcp_async_blocks", "dcp_async_all")}
    stream()
    for number in range(rounds):
        found["stream"].append(timed(stream))
        found["snapshot"].append(timed(bench.snapshot))
        if number < max(5, rounds // 3):
            found["torch_save"].append(timed(lambda: save(bench.state(), folder / "torch.pt")))
            begin = time.perf_counter()
            future = dcp.async_save(bench.state(), checkpoint_id=folder / "dcp", no_dist=True)
            found["dcp_async_blocks"].append((time.perf_counter() - begin) * 1e3)
            future.result()
            found["dcp_async_all"].append((time.perf_counter() - begin) * 1e3)
            shutil.rmtree(folder / "dcp")
    return {**found, "first": [first_ms], "second": [second_ms]}


class Flusher:
    """The holder's writing, without an agent."""

    def __init__(self, bench: Bench, run_dir: Path, folder: Path) -> None:
        bench.snapshot()
        assert bench.saving._pair is not None
        newest = bench.saving._pair.newest()
        assert newest is not None
        self._newest = newest
        self.size_bytes = newest.image_bytes
        self._folder = folder
        self.vault = Vault.connect(run_dir)
        self.holder = psutil.Process(self.vault.inventory().pid)
        self.number = 0
        self.steps = 0

    def begin(self) -> None:
        self.steps += 1
        flush = Flush(str(self._folder), self.steps, self._newest.commits, ((0,),), {}, 1, ((0,),))
        self.number = self.vault.submit(WORK, [(0, self._newest.sequence)], msgspec.msgpack.encode(flush))

    def over(self, timeout_s: float) -> Flushed | None:
        told = self.vault.result(self.number, timeout_s)
        return None if told is None else msgspec.msgpack.decode(told, type=Flushed)

    def flush(self) -> None:
        self.begin()
        assert self.over(TIMEOUT_MS / 1e3) is not None

    def cpu_s(self) -> float:
        times = self.holder.cpu_times()
        return float(times.user + times.system)


def store(bench: Bench, rounds: int, folder: Path, run_dir: Path) -> Times:
    """Durable, one after the other: the holder's flush, and torch.save with fsync."""
    flusher = Flusher(bench, run_dir, folder / "flushed")
    found: Times = {name: [] for name in ("flush", "flush_cpu_s", "torch_save", "torch_save_cpu_s")}
    flusher.flush()
    found["image_bytes"] = [float(flusher.size_bytes)]
    for _ in range(rounds):
        before = flusher.cpu_s()
        found["flush"].append(timed(flusher.flush))
        found["flush_cpu_s"].append(flusher.cpu_s() - before)
        before = time.process_time()
        found["torch_save"].append(timed(lambda: save(bench.state(), folder / "torch.pt")))
        found["torch_save_cpu_s"].append(time.process_time() - before)
    flusher.vault.close()
    return found


def flush_share(bench: Bench, rounds: int, folder: Path, run_dir: Path) -> Times:
    """Steps while the holder writes all the time, and while it does not."""
    flusher = Flusher(bench, run_dir, folder / "flushed")
    found: Times = {"quiet": [], "flushing": []}
    for _ in range(rounds):
        found["quiet"].append(timed(lambda: bench.run(3)))

        def beside() -> None:
            flusher.begin()
            for _ in range(3):
                bench.run(1)
                if flusher.over(0) is not None:
                    flusher.begin()

        found["flushing"].append(timed(beside))
        assert flusher.over(TIMEOUT_MS / 1e3) is not None
    flusher.vault.close()
    return found


def overlap(bench: Bench, rounds: int) -> Times:
    """Blocks of ten steps in turn: no snapshots, in every step, in every tenth; the last two with storage too."""
    lanes = {
        "off": (0, Due.NOTHING),
        "every": (1, Due.MEMORY),
        "tenth": (10, Due.MEMORY),
        "tenth_stored": (10, Due.STORAGE),
    }
    found: Times = {name: [] for name in lanes}
    bench.snapshot()
    for number in range(rounds):
        for name in list(lanes)[:: 1 if number % 2 == 0 else -1]:
            bench.lane.every, bench.lane.due = lanes[name]
            found[name].append(timed(lambda: bench.run(10)))
            bench.lane.every = 0
            bench.run(1)  # fences what is under way
    return found


def restore(bench: Bench, rounds: int, folder: Path) -> Times:
    """The Session's way back from memory, verified; of a mapping of its own each time, as in a fresh process."""
    bench.snapshot()
    save(bench.state(), folder / "torch.pt")
    assert bench.saving._pair is not None
    size_bytes = bench.saving._pair.newest().image_bytes  # type: ignore[union-attr]
    source, target = touched(size_bytes), touched(size_bytes)
    found: Times = {"memcpy": [], "restore": [], "torch_load": []}
    for _ in range(rounds):
        found["memcpy"].append(timed(lambda: memcpy(address_of(target), address_of(source), size_bytes, 1)))
        found["restore"].append(timed(lambda: bench.saving._restoring._from_memory(Source("memory", bench.far))))
        found["torch_load"].append(timed(lambda: torch.load(folder / "torch.pt", weights_only=True)))
    return found


def measure(arguments: argparse.Namespace) -> Times:
    run_dir, folder, rounds = arguments.run_dir, arguments.out.parent / "files", arguments.rounds
    folder.mkdir(parents=True)
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)  # they take many times as long, and a deep model's gradients come to them
    torch.manual_seed(0)
    layers = max(1, round(arguments.size_bytes / (BYTES_PER_PARAMETER * WIDTH * (WIDTH + 1))))
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with rt.Session(model=model, optimizer=optimizer) as session:
        session.save_every(steps=FAR)
        bench = Bench(arguments.size_bytes, arguments.batch, session, (model, optimizer))
        bench.run(3)
        sections: dict[str, Callable[[], Times]] = {
            "take": lambda: take(bench, rounds, folder),
            "store": lambda: store(bench, rounds, folder, run_dir),
            "share": lambda: flush_share(bench, rounds, folder, run_dir),
            "overlap": lambda: overlap(bench, rounds),
            "restore": lambda: restore(bench, rounds, folder),
        }
        times = sections[arguments.section]()
        shutil.rmtree(folder)
        window_ms = statistics.median(bench.forward_backward_ms)
        return {**times, "forward_backward": [window_ms]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=("take", "store", "share", "overlap", "restore"))
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=int, default=400)
    asked = parser.parse_args()
    signal.alarm(asked.limit_s)
    dist.init_process_group("resilient")
    asked.out.write_text(json.dumps(measure(asked)))
    dist.destroy_process_group()
