"""Kills writers of checkpoints and looks at what they left: ``checkpoints.py FOLDER HOW TRIALS NUMBER``.

Prints one line per violation, then ``violations=M``. HOW: ``time`` kills at instants drawn from the seed NUMBER,
``call`` at each NUMBER-th call of the file system. ``call-first`` and ``call-inplace``: the writer
is a deliberately wrong one.
"""

import itertools
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from pure.checkpoint_rig import holds, write
from resilient_train.state.checkpoint.files import write_file
from resilient_train.state.checkpoint.manifest import parse_name
from resilient_train.state.checkpoint.restore import read_checkpoint
from resilient_train.state.checkpoint.retention import retain, tidy
from resilient_train.state.checkpoint.verify import newest_complete, verify

KEEP = 2
CALLS = ("open", "pwrite", "ftruncate", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
LONGEST_S = 0.12
"""Some four checkpoints."""


def train(folder: Path, tell: Callable[[int], None], wrong: str) -> None:
    """What a run does from its start, writing its newest step again first."""
    tidy(folder)
    found = newest_complete(folder).report
    step = found.manifest.step if found else 1
    while True:
        if wrong == "first":
            for path in folder.glob("step_*"):
                shutil.rmtree(path)
        if wrong == "inplace":
            made = write(folder / "elsewhere", step)
            shutil.rmtree(folder / made.name, ignore_errors=True)
            (folder / made.name).mkdir()
            for path in sorted(made.iterdir()):
                write_file(folder / made.name / path.name, path.read_bytes())
        else:
            write(folder, step, shards=1 + step % 3)
        tell(step)
        retain(folder, KEEP)
        step += 1


def violations(folder: Path, acknowledged: int) -> list[str]:
    """What must not be, whenever the writer died."""
    wrong = []
    found = newest_complete(folder)
    newest = found.report.manifest.step if found.report else 0
    wrong += [f"torn, under a final name: {path.name}: {why}" for path, why in found.skipped]
    if newest < acknowledged:
        wrong.append(f"lost: step {acknowledged} was there, now the newest is {newest}")
    present = set()
    for path in folder.iterdir():
        name = parse_name(path.name)
        if name and name.suffix in {"", "_replaced"}:
            report = verify(path)
            if not report.ok:
                wrong.append(f"torn, under a final name: {path.name}")
                continue
            with read_checkpoint(path) as checkpoint:
                if not holds(checkpoint, name.step):
                    wrong.append(f"{path.name} holds something else")
            present.add(name.step)
    kept = {step for step in range(acknowledged - KEEP + 1, acknowledged + 1) if step >= 1}
    if not kept <= present:
        wrong.append(f"lost: {sorted(kept - present)} of {sorted(kept)}")
    return wrong


def die_in(at: int) -> None:
    """The ``at``-th call of the file system from now is this process's last; of a write, half of it is done."""
    calls = 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == at:
                if name == "pwrite":
                    real(args[0], args[1][: len(args[1]) // 2], args[2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


def trial(folder: Path, wrong: str, *, die_at: int = 0, wait_s: float = 0) -> int:
    """Forks a writer that dies, at a call or after a while; returns the newest step that it told, or 0."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if die_at:
                die_in(die_at)
            train(folder, lambda step: os.write(there, step.to_bytes(8)), wrong)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(there)
    if not die_at:
        time.sleep(wait_s)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    with os.fdopen(here, "rb") as stream:
        told = stream.read()
    return max((int.from_bytes(told[i : i + 8]) for i in range(0, len(told), 8)), default=0)


def at_any_instant(folder: Path, trials: int, seed: int) -> Iterator[str]:
    """Each writer goes on from what the one before has left. On a busy machine more of them are needed, which live
    longer and longer: storage may take more than LONGEST_S for one checkpoint.
    """
    draw = random.Random(seed)
    acknowledged = 0
    for number in itertools.count():
        if number >= trials and acknowledged >= trials / 4:
            return
        acknowledged = max(acknowledged, trial(folder, "", wait_s=draw.uniform(0, LONGEST_S) * (1 + number / trials)))
        yield from (f"trial {number}: {text}" for text in violations(folder, acknowledged))


def at_every_call(folder: Path, trials: int, every: int, wrong: str) -> Iterator[str]:
    """Each writer begins with the same leftovers, and dies at another call."""
    template = folder / "template"
    for step in (2, 3):
        write(template, step)
    write(template, 1).rename(template / "step_1_gone")
    for number in range(1 + every // 2, trials * every, every):
        shutil.copytree(template, folder / "trial")
        acknowledged = max(3, trial(folder / "trial", wrong, die_at=number))
        yield from (f"call {number}: {text}" for text in violations(folder / "trial", acknowledged))
        shutil.rmtree(folder / "trial")


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    trials, number = int(sys.argv[3]), int(sys.argv[4])
    how, _, wrong = how.partition("-")
    found = at_any_instant(folder, trials, number) if how == "time" else at_every_call(folder, trials, number, wrong)
    count = 0
    for text in found:
        print(text)
        count += 1
    print(f"violations={count}")


if __name__ == "__main__":
    main()
