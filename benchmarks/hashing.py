"""Why the library has an XXH3 of its own: copy and hash in one pass, against a copy that xxhash then reads again. And
what the digest costs that replicas compare: memory that is hashed where it lies, against the same bytes read.

``python benchmarks/hashing.py [ROUNDS] [--json FILE]``. One process; the ways of a table in turn. Ratios are medians.
The copies: one thread, 512 MiB. The digest: one thread and the two that a Session has, over 512 MiB, and over what 10 M
parameters take under AdamW, in pieces like a model's. *Read* is libc's ``memchr`` for a byte that is nowhere, from as
many threads: it does nothing but read.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash
from common import Table, show, summary, write_json
from snapshot_job import TIMEOUT_MS, address_of, cut, timed, touched

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier

SIZE_BYTES = 512 << 20
STATE_BYTES = 120_000_000
THREADS = (1, 2)
ABSENT = 0xFF
_memchr = ctypes.CDLL(None).memchr
_memchr.argtypes, _memchr.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p


def in_turn(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of each way, and their ratio to the first one in the same round."""
    times = [[timed(way) for way in ways.values()] for _ in range(rounds)]
    return {
        name: {"ms": summary([each[at] for each in times]), "ratio": summary([each[at] / each[0] for each in times])}
        for at, name in enumerate(ways)
    }


def copies(rounds: int) -> dict[str, dict[str, Any]]:
    state, image = touched(SIZE_BYTES), touched(SIZE_BYTES, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    pieces, copier, memory = [(address_of(state), SIZE_BYTES, 0)], Copier(1), memoryview(image)
    chunks = [memory[start : start + DIGEST_CHUNK_BYTES] for start in range(0, SIZE_BYTES, DIGEST_CHUNK_BYTES)]

    def copy(*, hashed: bool) -> None:
        copier.gather(image, pieces, hashed=hashed)
        assert copier.wait(TIMEOUT_MS)

    def one_after_the_other() -> bytes:
        copy(hashed=False)
        return b"".join(map(xxhash.xxh3_128_digest, chunks))

    copy(hashed=True)
    assert copier.digests() == one_after_the_other()
    ways: dict[str, Callable[[], object]] = {
        "one pass": lambda: copy(hashed=True),
        "one after the other": one_after_the_other,
        "copy alone": lambda: copy(hashed=False),
    }
    return in_turn(ways, rounds)


def read(address: int, size_bytes: int, threads: int) -> None:
    """Ctypes lets go of the GIL."""
    share = -(-size_bytes // threads)
    parts = [(address + at, min(share, size_bytes - at)) for at in range(0, size_bytes, share)]

    def look(start: int, length: int) -> None:
        assert _memchr(start, ABSENT, length) is None

    others = [threading.Thread(target=look, args=part) for part in parts[1:]]
    for other in others:
        other.start()
    look(*parts[0])
    for other in others:
        other.join()


def digests(size_bytes: int, threads: int, rounds: int) -> dict[str, dict[str, Any]]:
    """As ``fingerprint.py`` makes one: nothing is written."""
    state = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = bytes(each % ABSENT for each in range(1 << 20))
    for start in range(0, size_bytes, len(block)):
        part = block[: size_bytes - start]
        state[start : start + len(part)] = part
    address, copier = address_of(state), Copier(threads)
    pieces = cut(address, size_bytes)

    def digest() -> bytes:
        copier.hash(pieces)
        assert copier.wait(TIMEOUT_MS)
        return copier.digests()

    found, chunk = digest(), memoryview(state)[:DIGEST_CHUNK_BYTES]
    assert found.startswith(xxhash.xxh3_128_digest(chunk)), "it is not what it is to be"
    return in_turn({"read": lambda: read(address, size_bytes, threads), "digest": digest}, rounds)


def quartiles(ratio: Mapping[str, Any]) -> str:
    return f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})"


def copies_table(ways: Mapping[str, Mapping[str, Any]], rounds: int) -> Table:
    rows = [(name, f"{each['ms']['median']:.0f}", quartiles(each["ratio"])) for name, each in ways.items()]
    return Table(f"copies, 512 MiB, {rounds} rounds", ("", "ms", "to one pass (quartiles)"), rows)


def digests_table(found: Sequence[Mapping[str, Any]], rounds: int) -> Table:
    rows = []
    for each in found:
        size, speeds = each["size_bytes"], [each[way]["ms"]["median"] for way in ("read", "digest")]
        of = f"{size / 1e6:.0f} MB, {each['threads']} thread{'s' if each['threads'] > 1 else ''}"
        rows.append((of, *(f"{size / ms / 1e6:.1f}" for ms in speeds), quartiles(each["digest"]["ratio"])))
    columns = ("digest", "read, GB/s", "digest, GB/s", "time, to a read (quartiles)")
    return Table(f"the digest that replicas compare, {rounds} rounds", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=20)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    ways = copies(asked.rounds)
    found = [
        {"size_bytes": size_bytes, "threads": threads, **digests(size_bytes, threads, asked.rounds)}
        for size_bytes in (SIZE_BYTES, STATE_BYTES)
        for threads in THREADS
    ]
    tables = [copies_table(ways, asked.rounds), digests_table(found, asked.rounds)]
    for each in tables:
        show(each)
    write_json(asked.json, {"benchmark": "hashing", "copies": ways, "digests": found}, tables)


if __name__ == "__main__":
    main()
