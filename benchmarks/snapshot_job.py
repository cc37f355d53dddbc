"""One process of ``snapshot.py``: measures as told, prints one JSON object. Times in ms. Imports no torch.

The state is one region of private memory, cut into pieces as a model's tensors are: a few large ones, many small.
Copies that are compared are made in turn, in the same process, so that what else the machine does meets both.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resilient_train._native import Copier, populate
from resilient_train.state.vault.client import Vault
from resilient_train.state.vault.slots import SlotPair, image_digest

PIECE_BYTES = (64 << 20, 16 << 20, 16 << 20, 4 << 20, 3 << 20, 256 << 10, 12 << 10, 4 << 10, 4 << 10, 120)
TIMEOUT_MS = 60_000
THREADS = 2

Piece = tuple[int, int, int]


def address_of(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def touched(size_bytes: int, flags: int = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) -> mmap.mmap:
    """Memory with something in every page."""
    memory = mmap.mmap(-1, size_bytes, flags=flags)
    populate(memory)
    block = bytes(range(256)) * 4096
    for start in range(0, size_bytes - len(block), len(block)):
        memory[start : start + len(block)] = block
    return memory


def cut(address: int, size_bytes: int) -> list[Piece]:
    """Pieces that follow each other in memory and in the image."""
    pieces, at = [], 0
    while at < size_bytes:
        length = min(PIECE_BYTES[len(pieces) % len(PIECE_BYTES)], size_bytes - at)
        pieces.append((address + at, length, at))
        at += length
    return pieces


def timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def memcpy(target: int, source: int, size_bytes: int, threads: int) -> None:
    """libc's, which stores past the cache when the size is large; ctypes lets go of the GIL."""
    share = -(-size_bytes // threads)
    parts = [(target + at, source + at, min(share, size_bytes - at)) for at in range(0, size_bytes, share)]
    others = [threading.Thread(target=ctypes.memmove, args=part) for part in parts[1:]]
    for other in others:
        other.start()
    ctypes.memmove(*parts[0])
    for other in others:
        other.join()


def snapshot(pair: SlotPair, copier: Copier, pieces: list[Piece], size_bytes: int, *, hashed: bool) -> None:
    """What the training thread waits for when nothing overlaps."""
    draft = pair.begin()
    assert draft is not None
    with draft.image[:size_bytes] as image:
        copier.gather(image, pieces, hashed=hashed)
        assert copier.wait(TIMEOUT_MS)
    digest = image_digest(copier.digests()) if hashed else b""
    draft.commit(commits=pair.sequence(), step=0, image_bytes=size_bytes, generation=0, world=1, digest=digest)


def take(run_dir: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Snapshots against copies of the same bytes into warm memory."""
    state, plain = touched(size_bytes), touched(size_bytes, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    source, target = address_of(state), address_of(plain)
    pair = Vault.connect(run_dir).reserve(0, size_bytes)
    pair.prefault()
    copier, pieces, whole = Copier(THREADS), cut(source, size_bytes), [(source, size_bytes, 0)]

    def stream() -> None:
        copier.gather(plain, whole, hashed=False)
        assert copier.wait(TIMEOUT_MS)

    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: memcpy(target, source, size_bytes, 1),
        "memcpy_2": lambda: memcpy(target, source, size_bytes, THREADS),
        "stream_2": stream,
        "snapshot": lambda: snapshot(pair, copier, pieces, size_bytes, hashed=False),
        "hashed": lambda: snapshot(pair, copier, pieces, size_bytes, hashed=True),
    }
    for way in ways.values():
        way()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(timed(way))
    return found


def page_faults() -> int:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_minflt + used.ru_majflt


def first(run_dir: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """The first snapshots of a fresh process into fresh slots, and later ones."""
    state = touched(size_bytes)
    pieces, vault, copier = cut(address_of(state), size_bytes), Vault.connect(run_dir), Copier(THREADS)
    reserve_ms: list[float] = []
    begin = time.perf_counter()
    pair = vault.reserve(1, size_bytes)
    reserve_ms.append((time.perf_counter() - begin) * 1e3)
    found = {"reserve": reserve_ms, "prefault": [timed(pair.prefault)]}
    for label in ("first", *["later"] * (1 + min(rounds, 6))):
        faults, cpu_s = page_faults(), time.process_time()
        found.setdefault(label, []).append(timed(lambda: snapshot(pair, copier, pieces, size_bytes, hashed=True)))
        found.setdefault(f"{label}_cpu", []).append((time.process_time() - cpu_s) * 1e3)
        found.setdefault(f"{label}_faults", []).append(page_faults() - faults)
    vault.drop(1)
    return found


def copy_out(pair: SlotPair, copier: Copier, pieces: list[Piece], *, hashed: bool) -> None:
    """The newest snapshot, into memory that is there."""
    newest = pair.newest()
    assert newest is not None
    with pair.image(newest) as image:
        copier.scatter(image, pieces, hashed=hashed)
        assert copier.wait(TIMEOUT_MS)
    assert not hashed or image_digest(copier.digests()) == newest.digest


def restore(run_dir: Path, size_bytes: int, rounds: int) -> dict[str, list[float]]:
    """A fresh process: attach, then image to state, whose pages are there; each of ``rounds`` with a mapping of its
    own.
    """
    state, other = touched(size_bytes), touched(size_bytes)
    pieces, copier = cut(address_of(state), size_bytes), Copier(THREADS)
    copier.scatter(bytes(1), [])
    assert copier.wait(TIMEOUT_MS)
    found: dict[str, list[float]] = {name: [] for name in ("attach", "memcpy", "restore", "verified")}
    for _ in range(rounds):
        begin = time.perf_counter()
        vault = Vault.connect(run_dir)
        (pair,) = vault.open(0)
        found["attach"].append((time.perf_counter() - begin) * 1e3)
        found["memcpy"].append(timed(lambda: memcpy(address_of(other), address_of(state), size_bytes, 1)))
        for name, hashed in (("restore", False), ("verified", True)):
            (fresh,) = vault.open(0)  # with no page mapped
            found[name].append(timed(functools.partial(copy_out, fresh, copier, pieces, hashed=hashed)))
            fresh.close()
        pair.close()
        vault.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("take", "first", "restore"))
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("size_bytes", type=int)
    parser.add_argument("rounds", type=int)
    arguments = parser.parse_args()
    measure = {"take": take, "first": first, "restore": restore}[arguments.what]
    print(json.dumps(measure(arguments.run_dir, arguments.size_bytes, arguments.rounds)))


if __name__ == "__main__":
    main()
