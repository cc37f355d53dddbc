"""What lies behind an image in a slot: how large it is taken for, and what is said where it does not fit."""

import msgspec
import pytest

from resilient_train.errors import TransferError
from resilient_train.state.vault import trailer
from resilient_train.state.vault.trailer import Trailer

LARGEST = (1 << 64) - 1


@pytest.mark.parametrize("image_bytes", [0, 4 << 20, (9 << 20) + 1])
@pytest.mark.parametrize("name", ["", "w", "weight" * 7, "Gewichte.größer", "重み" * 20, "重み" * 30_000])
@pytest.mark.parametrize("count", [0, 1, 20, 5_000])
@pytest.mark.parametrize("own", [{}, {LARGEST - rank: b"a rank's own" for rank in range(300)}])
def test_it_is_no_larger_than_it_is_taken_for(image_bytes: int, name: str, count: int, own: dict[int, bytes]) -> None:
    names, tree = (name,) * min(count, 1 + (1 << 20) // (1 + len(name))), b"tree" * 10
    digests = bytes(16 * -(-image_bytes // (4 << 20)))
    largest = Trailer(LARGEST, LARGEST, LARGEST, tree, names, own, digests, LARGEST)
    packed = msgspec.msgpack.encode(largest)
    size = trailer.size_bytes(image_bytes, tree, names, own)
    start = trailer.start_of(image_bytes)
    trailer.write(memoryview(bytearray(start + size)), image_bytes, packed)
    assert size < len(packed) + 4 * len(names) + 8 * len(own) + 5_000, "nor is it taken for much larger"


def test_where_it_does_not_fit_the_snapshot_is_none() -> None:
    with pytest.raises(TransferError, match="no room for a trailer of 124 bytes behind an image of 10 in a slot of 4"):
        trailer.write(memoryview(bytearray(4096 + 123)), 10, bytes(100))
