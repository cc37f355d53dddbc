"""The tree digest: the same from memory, from a file and from chunks that several hands have hashed."""

import errno
import os
from pathlib import Path

import pytest
import xxhash

from resilient_train.state.digest import CHUNK_BYTES, chunk_digests, digest_of, file_digest, tree_digest


def test_what_it_is() -> None:
    data = os.urandom(CHUNK_BYTES + 5)
    first, second = (xxhash.xxh3_128(part).digest() for part in (data[:CHUNK_BYTES], data[CHUNK_BYTES:]))
    assert chunk_digests(data) == [first, second]
    assert digest_of(data) == xxhash.xxh3_128(first + second).hexdigest() == tree_digest([first, second])


def test_known_values() -> None:
    """Fixed for ever: files of this version must verify in later ones."""
    assert digest_of(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest_of(b"resilient") == tree_digest([xxhash.xxh3_128_digest(b"resilient")])


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 63])
def test_of_a_file(size: int, tmp_path: Path) -> None:
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    assert file_digest(fd, size) == digest_of(data)
    with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
        file_digest(fd, size + 1)
    os.close(fd)


def test_any_contiguous_memory() -> None:
    data = bytes(range(64))
    assert digest_of(memoryview(data).cast("Q")) == digest_of(bytearray(data)) == digest_of(data)
