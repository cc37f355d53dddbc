"""Kills writers of snapshots at random instants, and looks at what they leave. Prints one JSON object.

One process without threads that forks the writers, so that a thousand kills take half a minute. KIND is ``right``, or
one of the wrong ways that show that these kills find something: ``single`` (one slot), ``early`` (the record before
the data).
"""

import argparse
import collections
import ctypes
import functools
import json
import os
import random
import signal
import struct
import time
from pathlib import Path

from resilient_train._native import Copier, die_with_parent
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.slots import SlotPair, SnapshotDraft, image_digest

IMAGE_BYTES = 8 << 20
TIMEOUT_MS = 30_000
_COMMITS = struct.Struct("<Q")
CONTENTS = [bytes([37 * index + 1]) * IMAGE_BYTES for index in range(4)]


class SinglePair(SlotPair):
    """Wrong: the newest snapshot is overwritten by the next."""

    def begin(self) -> SnapshotDraft | None:
        for snapshot in self.complete():
            self.discard(snapshot.sequence)
        draft = super().begin()
        assert draft is not None
        return draft


def write_for_ever(run_dir: Path, kind: str, told: int) -> None:
    """A writer: snapshot after snapshot, telling the number of each when it is committed."""
    die_with_parent(signal.SIGKILL)
    pair = Vault.connect(run_dir).reserve(0, IMAGE_BYTES)
    if kind == "single":
        pair = SinglePair(pair.fd, writes=True)
    pair.prefault()
    copier = Copier()
    sources = [ctypes.cast(content, ctypes.c_void_p).value for content in CONTENTS]
    commits = max((snapshot.commits for snapshot in pair.complete()), default=0)
    os.write(told, _COMMITS.pack(commits))
    while True:
        commits += 1
        draft = pair.begin()
        assert draft is not None
        image = pair.region(draft.slot) if kind == "early" else draft.image
        if kind == "early":
            draft.commit(commits=commits, step=0, image_bytes=IMAGE_BYTES, generation=0, world=1)
        copier.gather(image, [(sources[commits % 4], IMAGE_BYTES, 0)])
        assert copier.wait(TIMEOUT_MS)
        if kind != "early":
            digest = image_digest(copier.digests())
            image.release()
            draft.commit(commits=commits, step=0, image_bytes=IMAGE_BYTES, generation=0, world=1, digest=digest)
        os.write(told, _COMMITS.pack(commits))


def look(run_dir: Path, acknowledged: int) -> str:
    """What a new process finds after the kill."""
    vault = Vault.connect(run_dir, member=False)
    try:
        with vault.newest(0) as newest:
            if newest is None:
                return "lost" if acknowledged else "none yet"
            pair, snapshot = newest
            with pair.image(snapshot) as image:
                if image != CONTENTS[snapshot.commits % 4] or not pair.verified(Copier(), snapshot, TIMEOUT_MS):
                    return "torn"
            return "lost" if snapshot.commits < acknowledged else "good"
    finally:
        vault.close()


def kill_one(run_dir: Path, kind: str, draw: random.Random, *, awaited: bool) -> str:
    """``awaited``: not before there is a snapshot, however slow the machine is."""
    hears, tells = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(run_dir, kind, tells)
        finally:
            os._exit(1)
    os.close(tells)
    first = os.read(hears, _COMMITS.size)
    while awaited and not any(first) and first:
        first = os.read(hears, _COMMITS.size)
    assert first, "the writer died by itself"
    time.sleep(draw.uniform(0, 0.01))
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    with os.fdopen(hears, "rb") as stream:
        acknowledged = _COMMITS.unpack((first + stream.read())[-_COMMITS.size :])[0]
    return look(run_dir, acknowledged)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("kind", choices=("right", "single", "early"))
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    keeper = Vault.connect(arguments.run_dir)
    draw = random.Random(arguments.seed)
    kill = functools.partial(kill_one, arguments.run_dir, arguments.kind, draw)
    found = collections.Counter(kill(awaited=number > 0) for number in range(arguments.kills))
    keeper.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
