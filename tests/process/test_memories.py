"""The comparison that tests of divided models rest on: it sees one bit, and names where it is."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from memories import RANKS, ends_as
from running import Run

NAMES = ("blocks.0.up.weight", "blocks.0.up.weight.exp_avg", "random numbers")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    write(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write(tmp_path / "out")
    (tmp_path / "run").mkdir()
    return Run(tmp_path / "run", 0, "", "")


def write(folder: Path) -> None:
    """As the jobs do."""
    folder.mkdir()
    for rank in range(RANKS):
        blobs = [bytes([rank, at, 7, 9]) * 8 for at in range(len(NAMES))]
        (folder / f"rank{rank}.bin").write_bytes(b"".join(blobs))
        (folder / f"rank{rank}.json").write_text(json.dumps([[n, len(b)] for n, b in zip(NAMES, blobs, strict=True)]))


def flip(out: Path) -> None:
    data = bytearray((out / "rank2.bin").read_bytes())
    data[32 + 5] ^= 1
    (out / "rank2.bin").write_bytes(data)


def shorten(out: Path) -> None:
    (out / "rank1.bin").write_bytes((out / "rank1.bin").read_bytes()[:-1])


def leave_out(out: Path) -> None:
    (out / "rank3.bin").unlink()


def rename(out: Path) -> None:
    path = out / "rank0.json"
    path.write_text(path.read_text().replace("random numbers", "luck"))


def test_what_is_the_same(plain: Path, run: Run) -> None:
    ends_as(run, plain)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (flip, "rank 2: blocks.0.up.weight.exp_avg differs from byte 5 on"),
        (shorten, "rank 1 has named 96 of its 95 bytes"),
        (leave_out, "rank3.bin"),
        (rename, r"rank 0 has other tensors: \['luck', 'random numbers'\]"),
    ],
)
def test_what_is_not(plain: Path, run: Run, change: Callable[[Path], None], told: str) -> None:
    change(run.run_dir.parent / "out")
    with pytest.raises(AssertionError, match=told):
        ends_as(run, plain)
