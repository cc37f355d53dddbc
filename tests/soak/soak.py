"""Random faults on real jobs, one seed a job, until so many have hit; and what came of it, counted.

    .venv/bin/python tests/soak/soak.py --faults 2000 [--sharded]
    .venv/bin/python tests/soak/soak.py --layouts 200

Each job must end with the bits of its undisturbed run, and its ranks' machines must have done what simulated ones
do. A job whose model is divided among ranks has that run without a word of ours, under torchrun. ``--layouts``: ranks
are killed, and nothing else is done, so often in each of ``LAYOUTS``.

It may end before that only if somebody asked it to, or its launcher was killed; then it is started again in
the same run directory. What may not be: other bits, an end that nobody asked for, no progress for ``PATIENCE_S``.
Such a job's directory stays, and its seed is told. The seed decides what is done and when in steps, but not where
in a step that is: a failure may need several tries.

As root: some faults mount a file system.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "process"))

import memories  # noqa: E402
import traced  # noqa: E402
from running import LAUNCHER, start  # noqa: E402
from watched_jobs import end_holder, holder_pid  # noqa: E402

from resilient_train.errors import ConfigError, JobEnded, ProtocolError  # noqa: E402
from resilient_train.launch.cli.asking import Follower, ask  # noqa: E402
from resilient_train.observe.sinks import EVENTS_FILE  # noqa: E402
from resilient_train.protocol.messages import Inject, Query  # noqa: E402

STEPS = 300
QUIET_STEPS = 12
"""At the end nobody is hit: a job that is over before its fault is repaired shows nothing."""
PATIENCE_S = 120.0
FAULTS_A_JOB = 25
IN_A_ROW = 3
"""A rank that dies five times without a committed update in between ends the job, as it should."""
VARIANTS = (
    "base",
    "accumulate",
    "two",
    "undo",
    "scaler",
    "early",
    "early+two+undo",
    "before+unused",
    "short+stateful+workers+persistent",
    "short+workers+persistent+shuffle",
)
SHARDED = (
    *("base", "accumulate", "mixed", "recompute", "two", "async", "kept", "undo", "compiled"),
    *("alone", "alone+accumulate", "alone+mixed+recompute", "alone+two"),
    *("tp", "tp+copied", "tp+copied+accumulate+recompute", "tp+copied+undo"),
    *("pp+replicate", "pp+replicate+onef", "pp+replicate+two", "pp+shard"),
    *("zero", "zero+views", "zero+accumulate+groups", "zero+scaled", "zero+undo", "zero+norm"),
)
"""Four ranks, each part held by two of them or, ``alone`` and ``zero``, by one."""
LAYOUTS = {
    "DDP": "zero+ddp",
    "HSDP": "base",
    "FSDP": "alone",
    "FSDP, blocks compiled": "alone+compiled",
    "FSDP, blocks computed twice": "alone+recompute",
    "TP, replicated": "tp+copied",
    "PP, replicated": "pp+replicate",
    "ZeRO-1": "zero",
}
"""By the names of ``docs/reference/layouts.md``: the variant of the job."""
ENDING = frozenset(("SIGTERM to the launcher", "SIGTERM to a rank", "SIGKILL to the launcher"))
"""The job may end of these, and goes on when it is started again."""

CLUTTER = ("compile_cache", "logs", "stacks")
"""Of a run directory's folders (``docs/reference/commands.md``)."""


class WrongError(Exception):
    """The promise is broken; the text says how."""


class StandingBy(msgspec.Struct):
    """As ``resilient-train status`` tells it."""

    pid: int
    depth: str


class Job:
    """One run directory, its present launcher, and what has been heard of it."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = ranks
        self.run = folder / "disk" / "run"
        self.records = folder / "records"
        self.process: subprocess.Popen[str]
        self.pids: dict[int, int] = {}
        self.recovering = False
        self.started = False
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What ends a fault, and when."""
        self.narrow: set[int] = set()
        """Processes that have no descriptors left just now."""
        self.heard = collections.Counter[str]()
        """Events, of all launchers."""
        self.finished = False
        """All have trained to the end. A rank that is killed behind that ends the job (exit code 128 + n)."""
        self.ends = False
        """A fault was done of which the job may end."""
        self.follow()

    def follow(self) -> None:
        """A new launcher writes new events. It would put the old ones aside itself, but when it has started."""
        with contextlib.suppress(FileNotFoundError):
            (self.run / EVENTS_FILE).rename(self.run / f"events-before-{time.monotonic_ns()}.jsonl")
        self._follower = Follower(self.run)
        self.pids, self.started, self.recovering, self.finished, self.ends = {}, False, False, False, False

    def look(self) -> bool:
        """Reads on, and ends faults whose time is over. Returns whether anything was new."""
        now = time.monotonic()
        for each in [each for each in self.later if each[0] <= now]:
            self.later.remove(each)
            each[1]()
        heard = self._follower.read() if (self.run / EVENTS_FILE).exists() else []
        self.heard.update(event.kind for event in heard)
        for event in heard:
            if event.kind == "spawned":
                self.pids[event.rank] = int(str(event.detail["pid"]))
            elif event.kind == "fault":
                self.recovering = True
            elif event.kind == "spared":  # stopped for good, and nobody else has its state: somebody continues it
                self.later.append((now + 0.5, functools.partial(self.signal, signal.SIGCONT, event.rank)))
            elif event.kind == "finished":
                self.finished = True
            elif event.kind in ("started", "resumed"):
                self.started, self.recovering = True, False
        return bool(heard)

    def steps(self) -> int:
        """Recorded by the rank that is ahead. One that is run again after a loss of all is recorded again."""
        found = [path.read_text().rstrip().rpartition("\n")[2] for path in self.records.glob("*.jsonl")]
        steps = [-1]
        for line in found:
            with contextlib.suppress(ValueError):  # a rank was killed in the middle of a line
                steps.append(json.loads(line)["step"])
        return max(steps) + 1

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)

    def standing_by(self, *depths: str) -> list[int]:
        """The launcher's processes that are no ranks: ``root`` and ``zygote`` fork them, ``forked`` ones wait."""
        with contextlib.suppress(ConfigError, ProtocolError, JobEnded, OSError):
            each = msgspec.convert(ask(self.run, Query()).status["standbys"], list[StandingBy])
            return [process.pid for process in each if process.depth in depths]
        return []

    def end_all(self) -> None:
        for _, end in self.later:
            end()
        self.later.clear()


# -- faults: each returns False where there was nothing to hit


def kill(job: Job, rng: random.Random) -> bool:
    job.signal(signal.SIGKILL, rng.randrange(job.ranks))
    return True


def kill_two(job: Job, rng: random.Random) -> bool:
    job.signal(signal.SIGKILL, *rng.sample(range(job.ranks), 2))
    return True


def kill_all(job: Job, _: random.Random) -> bool:
    job.signal(signal.SIGKILL, *range(job.ranks))
    return True


def _stop(job: Job, ranks: list[int], seconds: float) -> bool:
    pids = [job.pids[rank] for rank in ranks]
    job.signal(signal.SIGSTOP, *ranks)

    def go_on() -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    job.later.append((time.monotonic() + seconds, go_on))
    return True


def stop(job: Job, rng: random.Random) -> bool:
    return _stop(job, [rng.randrange(job.ranks)], rng.choice((0.02, 0.2, 1.0, 2.5)))


def stop_some(job: Job, rng: random.Random) -> bool:
    return _stop(job, rng.sample(range(job.ranks), rng.randrange(2, job.ranks + 1)), rng.choice((0.02, 0.5, 2.0)))


def stop_all(job: Job, rng: random.Random) -> bool:
    return _stop(job, list(range(job.ranks)), rng.choice((0.05, 1.5, 3.0)))


def stop_for_good(job: Job, rng: random.Random) -> bool:
    job.signal(signal.SIGSTOP, rng.randrange(job.ranks))
    return True


def cut(job: Job, rng: random.Random) -> bool:
    with contextlib.suppress(ConfigError, ProtocolError, JobEnded, OSError):
        return not ask(job.run, Inject("hcce", rng.randrange(job.ranks))).error
    return False


def ask_a_rank(job: Job, rng: random.Random) -> bool:
    job.signal(signal.SIGTERM, rng.randrange(job.ranks))
    return True


def ask_the_launcher(job: Job, _: random.Random) -> bool:
    job.process.send_signal(signal.SIGTERM)
    return True


def kill_launcher(job: Job, _: random.Random) -> bool:
    job.process.send_signal(signal.SIGKILL)
    return True


def kill_holder(job: Job, _: random.Random) -> bool:
    pid = holder_pid(job.run)
    with contextlib.suppress(ProcessLookupError):
        if pid:
            os.kill(pid, signal.SIGKILL)
    return bool(pid)


def kill_holder_and_rank(job: Job, rng: random.Random) -> bool:
    return kill_holder(job, rng) and kill(job, rng)


def _kill_standing(job: Job, rng: random.Random, *depths: str) -> bool:
    found = job.standing_by(*depths)
    with contextlib.suppress(ProcessLookupError):
        if found:
            os.kill(rng.choice(found), signal.SIGKILL)
    return bool(found)


def kill_forker(job: Job, rng: random.Random) -> bool:
    return _kill_standing(job, rng, "root", "zygote")


def kill_standby(job: Job, rng: random.Random) -> bool:
    return _kill_standing(job, rng, "forked", "built")


def _no_descriptors(job: Job, rng: random.Random, pid: int) -> bool:
    if pid in job.narrow:  # a second time would take the first one's limit for what to give back
        return False
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        there = [int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir()]
        if not there:  # it has just ended
            return False
        now = max(there) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (now + rng.randrange(3), before[1]))

        def give_back() -> None:
            job.narrow.discard(pid)
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

        job.narrow.add(pid)
        job.later.append((time.monotonic() + rng.uniform(0.2, 1.5), give_back))
        return True
    return False


def no_descriptors(job: Job, rng: random.Random) -> bool:
    return _no_descriptors(job, rng, job.process.pid)


def no_descriptors_in_holder(job: Job, rng: random.Random) -> bool:
    pid = holder_pid(job.run)
    return bool(pid) and _no_descriptors(job, rng, pid)


def full_disk(job: Job, rng: random.Random) -> bool:
    filling = job.run.parent / "filling"
    with contextlib.suppress(OSError), filling.open("ab", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with contextlib.suppress(OSError), filling.open("ab", buffering=0) as file:
        while True:
            file.write(b"x")
    job.later.append((time.monotonic() + rng.uniform(0.1, 1.5), lambda: filling.unlink(missing_ok=True)))
    return True


def tidy_up(job: Job, rng: random.Random) -> bool:
    """What a person may take for clutter; sockets, locks, events and checkpoints are what the job goes on with."""
    there = [name for name in CLUTTER if (job.run / name).exists()]
    for name in rng.sample(there, rng.randint(min(1, len(there)), len(there))):
        shutil.rmtree(job.run / name, ignore_errors=True)
    return bool(there)


FAULTS: dict[str, tuple[int, Callable[[Job, random.Random], bool]]] = {
    "SIGKILL to a rank": (30, kill),
    "SIGKILL to two ranks": (8, kill_two),
    "SIGKILL to all ranks": (3, kill_all),
    "SIGSTOP of a rank for a while": (12, stop),
    "SIGSTOP of some ranks for a while": (4, stop_some),
    "SIGSTOP of all ranks for a while": (4, stop_all),
    "SIGSTOP of a rank for good": (4, stop_for_good),
    "connections cut": (12, cut),
    "SIGTERM to a rank": (2, ask_a_rank),
    "SIGTERM to the launcher": (2, ask_the_launcher),
    "SIGKILL to the launcher": (2, kill_launcher),
    "SIGKILL to the holder of snapshots": (4, kill_holder),
    "SIGKILL to the holder of snapshots and a rank": (3, kill_holder_and_rank),
    "SIGKILL to what ranks are forked from": (3, kill_forker),
    "SIGKILL to a standby": (3, kill_standby),
    "the launcher has no descriptors left": (3, no_descriptors),
    "the holder of snapshots has no descriptors left": (3, no_descriptors_in_holder),
    "the disk is full": (3, full_disk),
    "files of the run directory deleted": (2, tidy_up),
}


KILLS = ("SIGKILL to a rank", "SIGKILL to two ranks", "SIGKILL to all ranks")


class Soak:
    """``folder`` holds all runs; those of jobs that went well are taken away."""

    def __init__(
        self, folder: Path, *, sharded: bool, variants: Sequence[str], faults: Collection[str] = FAULTS
    ) -> None:
        self.folder = folder
        self.sharded = sharded
        self.variants = variants
        self.faults = {name: FAULTS[name][0] for name in faults}
        self.heard = collections.Counter[str]()
        """The events of all jobs."""
        self.references: dict[tuple[int, str], Path] = {}

    def reference(self, ranks: int, variant: str) -> Path:
        """The records of the undisturbed run."""
        if (ranks, variant) not in self.references:
            with self.disk(f"reference-{ranks}-{variant}") as folder:
                job = Job(folder, ranks)
                if self.sharded:
                    done = memories.under_torchrun([*self.script(job, variant), "plain"])
                    assert done.returncode == 0, done.stderr
                else:
                    with start(self.command(job, variant)) as job.process:
                        out, err = job.process.communicate(timeout=300)
                    assert job.process.returncode == 0, out + err
                    end_holder(job.run)
                kept = self.folder / "references" / f"{ranks}-{variant}"
                shutil.rmtree(kept, ignore_errors=True)
                self.references[ranks, variant] = shutil.copytree(job.records, kept)
        return self.references[ranks, variant]

    @contextlib.contextmanager
    def disk(self, name: str) -> Iterator[Path]:
        """A folder with a file system of its own, ``disk``, which a fault may fill."""
        folder = self.folder / name
        disk = folder / "disk"
        disk.mkdir(parents=True)
        (folder / "records").mkdir()
        mounted = os.geteuid() == 0
        if mounted:
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", disk], check=True, timeout=60)
        try:
            yield folder
            keep = False
        except BaseException:
            keep = True
            shutil.copytree(
                disk, folder / "kept", ignore=shutil.ignore_patterns("*.sock", "filling"), dirs_exist_ok=True
            )
            raise
        finally:
            if mounted:
                subprocess.run(["umount", "-l", disk], check=True, timeout=60)
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    def command(self, job: Job, variant: str) -> list[str]:
        flags = ["--nproc-per-node", str(job.ranks), "--run-dir", str(job.run)]
        return [*LAUNCHER, *flags, *self.script(job, variant)]

    def script(self, job: Job, variant: str) -> list[str]:
        if self.sharded:
            return [str(HERE / "sharded_job.py"), str(STEPS), variant, str(job.records)]
        return [str(HERE / "job.py"), "--steps", str(STEPS), "--variant", variant, "--records", str(job.records)]

    def run(self, seed: int) -> tuple[list[str], str]:
        """One job. Returns by what it was hit, and what was wrong; empty if nothing was."""
        rng = random.Random(seed)
        ranks, variant = memories.RANKS if self.sharded else rng.choice((2, 3, 4)), rng.choice(self.variants)
        hits: list[str] = []
        try:
            with self.disk(f"seed-{seed}") as folder:
                job = Job(folder, ranks)
                try:
                    self.disturb(job, variant, rng, hits)
                    if told := self.differences(job, self.reference(ranks, variant)):
                        raise WrongError(f"OTHER BITS, exit code 0\n{told}")
                    if differences := traced.look(job.run, set()):
                        raise WrongError("\n".join(differences))
                finally:
                    self.heard.update(job.heard)
                    job.end_all()
                    end_holder(job.run)
        except Exception as error:  # whatever it is, it is told, and the others go on
            told = f"{type(error).__name__}: {error}\n  hit by: {', '.join(hits)}"
            return hits, f"seed {seed} ({ranks} ranks, {variant}): {told}"
        return hits, ""

    def differences(self, job: Job, undisturbed: Path) -> str:
        """What is not as it is in these records."""
        if self.sharded:
            told = memories.differences(undisturbed, job.records)
        else:
            told = "" if ends(job.records, job.ranks) == ends(undisturbed, job.ranks) else "another end"
        return told or "".join(
            sorted(line for _, line in steps(job.records, job.ranks) - steps(undisturbed, job.ranks))
        )

    def disturb(self, job: Job, variant: str, rng: random.Random, hits: list[str]) -> None:
        left = FAULTS_A_JOB
        while True:
            with start(self.command(job, variant)) as job.process:
                left = Bandit(job, rng, hits, self.faults).strike_until_the_end(left)
                job.end_all()
                code = job.process.wait(PATIENCE_S)
                text = "" if not job.process.stderr else job.process.stderr.read()
            if code == 0:
                return
            if not job.ends:
                raise WrongError(f"the job ended with {code}: {text[-600:]}")
            job.follow()


class Bandit:
    """Hits a job, and watches that it goes on."""

    def __init__(self, job: Job, rng: random.Random, hits: list[str], faults: dict[str, int]) -> None:
        self._job, self._rng, self._hits, self._faults = job, rng, hits, faults
        self._seen = (-1, time.monotonic())
        self._row = (-1, 0)
        """Steps recorded, and how often the job was hit since there were so many."""

    def strike_until_the_end(self, left: int) -> int:
        """Returns how many of ``left`` faults are left when the launcher has ended."""
        job, rng = self._job, self._rng
        while left and self._wait(lambda: job.started):
            steps = job.steps() + rng.randrange(1, 18)
            soon = rng.random() < 0.5  # in a recovery, if there is one before
            reached = self._wait(functools.partial(self._may_strike, steps, soon=soon), limit_s=10.0)
            if not reached or job.steps() > STEPS - QUIET_STEPS:
                break
            time.sleep(rng.choice((0.0, 0.002, 0.02, 0.1)) * rng.random())
            for _ in range(rng.choice((1, 1, 1, 2))):
                left -= self._strike()
        while self._wait(lambda: False):
            pass
        return left

    def _may_strike(self, steps: int, *, soon: bool) -> bool:
        return (soon and self._job.recovering) or self._job.steps() >= steps

    def _strike(self) -> bool:
        job, rng = self._job, self._rng
        job.look()
        steps = job.steps()
        row = self._row[1] + 1 if steps == self._row[0] else 1
        if row > IN_A_ROW or len(job.pids) < job.ranks or job.finished or job.process.poll() is not None:
            return False
        name = rng.choices(list(self._faults), list(self._faults.values()))[0]
        if not FAULTS[name][1](job, rng):
            return False
        self._row = steps, row
        job.ends = job.ends or name in ENDING
        self._hits.append(name)
        return True

    def _wait(self, until: Callable[[], bool], limit_s: float = 1e9) -> bool:
        """Until it is so, the time is over or the launcher has ended: False. Raises WrongError if nothing moves."""
        job, begun = self._job, time.monotonic()
        while job.process.poll() is None:
            now = time.monotonic()
            news, steps = job.look(), job.steps()
            if news or steps != self._seen[0]:
                self._seen = steps, now
            if until() or now - begun > limit_s:
                return True
            if now - self._seen[1] > PATIENCE_S:
                raise WrongError(f"NO PROGRESS for {PATIENCE_S:g} s at step {steps}")
            time.sleep(0.005)
        job.look()
        return False


def ends(records: Path, ranks: int) -> list[str]:
    """By rank: what its script says it has at its end."""
    return [(records / f"end{rank}").read_text() for rank in range(ranks)]


def steps(records: Path, ranks: int) -> set[tuple[int, str]]:
    """(rank, what it said of a step: samples, loss). A rank that died in a tail has said nothing of that step; where it
    had not given its part, zeros stand for it in the others' words (event ``tail_input_missing``).
    """
    lines = [(r, line) for r in range(ranks) for line in (records / f"rank{r}.jsonl").read_text().splitlines()]
    told = [(rank, line, json.loads(line)) for rank, line in lines if line.endswith("}")]  # a kill may have torn one
    return {(rank, line) for rank, line, of in told if of["step"] == 0 or 0 not in of["counts"]}


def hit(soak: Soak, seeds: Iterator[int], faults: int) -> tuple[collections.Counter[str], int, int]:
    """As many jobs as it takes. Returns by what they were hit, how many there were, and how many went wrong."""
    total, jobs, wrong = collections.Counter[str](), 0, 0
    while total.total() < faults:
        seed = next(seeds)
        hits, failure = soak.run(seed)
        total.update(hits)
        jobs += 1
        wrong += bool(failure)
        load = f"load {os.getloadavg()[0]:.0f}"
        print(failure or f"seed {seed}: well after {len(hits)} faults, {total.total()} in all, {load}", flush=True)
    return total, jobs, wrong


def hit_layouts(folder: Path, seeds: Iterator[int], kills: int, only: str) -> int:
    """Prints a table, and returns how many jobs went wrong."""
    rows, all_wrong = [], 0
    for layout, variant in LAYOUTS.items():
        if only in layout:
            soak = Soak(folder, sharded=True, variants=[variant], faults=KILLS)
            total, jobs, wrong = hit(soak, seeds, kills)
            all_wrong += wrong
            cells = [*(total[kind] for kind in KILLS), jobs, soak.heard["resumed"], soak.heard["restart_all"], wrong]
            rows.append(f"| {layout} | {' | '.join(map(str, cells))} |")
    print("\n| layout | a rank killed | two | all | jobs | others kept their state | all went back | wrong |")
    print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")
    return all_wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2000, help="as many seeds as this takes")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--sharded", action="store_true", help="jobs whose model is divided among ranks")
    parser.add_argument("--layouts", type=int, default=0, help="so many kills in each layout, and nothing else")
    parser.add_argument("--only", default="", help="variants of the job, or layouts, that have this in their name")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/soak"))
    asked = parser.parse_args()
    seeds = itertools.count(asked.first_seed)
    if asked.layouts:
        return bool(hit_layouts(asked.folder, seeds, asked.layouts, asked.only))
    variants = [each for each in (SHARDED if asked.sharded else VARIANTS) if asked.only in each]
    soak = Soak(asked.folder, sharded=asked.sharded, variants=variants)
    total, jobs, wrong = hit(soak, seeds, asked.faults)
    print(f"\n{total.total()} faults in {jobs} jobs, {wrong} wrong\n")
    for name in FAULTS:
        print(f"| {name} | {total[name]} |")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
