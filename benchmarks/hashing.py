"""Why the library has an XXH3 of its own: copy and hash in one pass, against a copy that xxhash then reads again.

``python benchmarks/hashing.py [ROUNDS]``. One process, one thread, 512 MiB; the ways in turn. Ratios are medians.
"""

from __future__ import annotations

import mmap
import sys

import xxhash
from common import Table, show, summary
from snapshot_job import TIMEOUT_MS, address_of, timed, touched

from resilient_train._native import DIGEST_CHUNK_BYTES, Copier

SIZE_BYTES = 512 << 20


def main() -> None:
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
    ways = {
        "one pass": lambda: copy(hashed=True),
        "one after the other": one_after_the_other,
        "copy alone": lambda: copy(hashed=False),
    }
    rounds = [[timed(way) for way in ways.values()] for _ in range(int((sys.argv[1:] or ["20"])[0]))]
    rows = []
    for at, name in enumerate(ways):
        ratio = summary([each[at] / each[0] for each in rounds])
        times = summary([each[at] for each in rounds])
        rows.append(
            (name, f"{times['median']:.0f}", f"{ratio['median']:.2f} ({ratio['p25']:.2f} to {ratio['p75']:.2f})")
        )
    show(Table(f"512 MiB, {len(rounds)} rounds", ("", "ms", "to one pass (quartiles)"), rows))


if __name__ == "__main__":
    main()
