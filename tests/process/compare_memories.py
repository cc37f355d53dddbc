"""``compare_memories.py PLAIN OUT RANKS``: whether each rank ended with the same bytes, tensor by tensor.

A rank has written ``rankN.bin``, and into ``rankN.json`` the names of what lies in there and how long each is. Nothing
but Python's own library has a part in this: ``python -I -S`` runs it, which finds no other package.

Prints what differs, and ends with 1 then.
"""

import json
import sys
from pathlib import Path


def read(folder: Path, rank: int) -> dict[str, bytes]:
    """By name. Fails for bytes that have no name."""
    data = (folder / f"rank{rank}.bin").read_bytes()
    found: dict[str, bytes] = {}
    at = 0
    for name, size in json.loads((folder / f"rank{rank}.json").read_text()):
        assert name not in found, f"rank {rank} has written {name} twice"
        found[name] = data[at : at + size]
        at += size
    assert at == len(data) > 0, f"rank {rank} has named {at} of its {len(data)} bytes"
    return found


def differences(plain: Path, out: Path, ranks: int) -> list[str]:
    """One line for each tensor that is not the same."""
    told: list[str] = []
    for rank in range(ranks):
        expected, found = read(plain, rank), read(out, rank)
        if [*expected] != [*found]:
            told.append(f"rank {rank} has other tensors: {sorted(expected.keys() ^ found.keys())}")
        for name in expected.keys() & found.keys():
            one, other = expected[name], found[name]
            if one != other:
                pairs = zip(one, other, strict=False)
                at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
                told.append(f"rank {rank}: {name} differs from byte {at} on")
    return sorted(told)


if __name__ == "__main__":
    told = differences(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    print("\n".join(told))
    sys.exit(bool(told))
