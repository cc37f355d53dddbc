"""NaN in memory, in a shard's image, and in a state."""

from __future__ import annotations

import mmap
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resilient_train._native import holds_nan
from resilient_train.errors import CheckpointError
from resilient_train.frameworks.torch.tensors.nan import nan_in
from resilient_train.protocol.messages import HoldsNan
from resilient_train.session.comparisons.nan_watch import NanWatch
from resilient_train.state.image import plan_image
from resilient_train.state.nan import LARGEST, NanFound, tensors_with_nan
from resilient_train.state.sharding import Piece

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
}


def memory(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy())


@pytest.mark.parametrize("name", DTYPES)
def test_each_format_is_torchs(name: str) -> None:
    """All numbers of 8 and 16 bits; of the others the neighbours of infinity, both signs, and any."""
    size, largest = LARGEST[name]
    sign = 1 << (8 * size - 1)
    bits: list[int] = [*range(1 << 8 * size)] if size < 3 else []
    if not bits:
        drawn = random.Random(1)
        near = [largest + by for by in (-1, 0, 1, 2)] + [sign - 1, 0]
        bits = [b | s for b in near for s in (0, sign)] + [drawn.getrandbits(8 * size) for _ in range(2000)]
    room = bytearray(b"".join(each.to_bytes(size, "little") for each in bits))
    torchs = torch.frombuffer(room, dtype=DTYPES[name]).to(torch.float64).isnan().tolist()
    ours = [holds_nan(memoryview(room)[at : at + size], size, largest) for at in range(0, len(room), size)]
    assert ours == torchs


@pytest.mark.parametrize("name", DTYPES)
def test_wherever_it_stands(name: str) -> None:
    """In a block or behind the last whole one, and where numbers are not aligned."""
    size, largest = LARGEST[name]
    nan = (largest + 1).to_bytes(size, "little")
    count = 2 * 4096 // size + 5
    room = bytearray(count * size + 1)
    for start in (0, 1):
        view = memoryview(room)[start : start + count * size]
        assert not holds_nan(view, size, largest)
        for at in (0, 1, 4096 // size - 1, 4096 // size, count - 6, count - 5, count - 1):
            view[at * size : (at + 1) * size] = nan
            assert holds_nan(view, size, largest), (start, at)
            assert not holds_nan(view[: at * size], size, largest), "not behind the end"
            view[at * size : (at + 1) * size] = bytes(size)
    assert not holds_nan(b"", size, largest)


def test_numbers_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="no number has 3 bytes"):
        holds_nan(bytes(6), 3, 1)


def test_an_image_names_them() -> None:
    tensors = {
        "model.weight": ("F32", torch.tensor([1.0, torch.nan])),
        "model.mask": ("F32", torch.tensor([-torch.inf, torch.inf])),
        "optimizer.moment": ("BF16", torch.tensor([torch.nan], dtype=torch.bfloat16)),
        "optimizer.complex": ("C64", torch.tensor([complex(1, torch.nan)])),
        "extra.codes": ("I32", torch.tensor([0x7FC00000], dtype=torch.int32)),
        "none": ("F16", torch.empty(0, dtype=torch.float16)),
    }
    pieces = [Piece(name, dtype, tuple(t.shape), tuple(t.shape), (0,)) for name, (dtype, t) in tensors.items()]
    plan = plan_image(pieces, 0, 1)
    with mmap.mmap(-1, plan.capacity_bytes) as room:
        room[: plan.data_start] = plan.header(3)
        for piece, start in plan.places:
            room[start : start + piece.size_bytes] = bytes(memory(tensors[piece.name][1]))
        with memoryview(room) as image:
            held, spoilt = tensors_with_nan(image, plan.total_bytes)
            assert held == tensors.keys()
            assert spoilt == {"model.weight", "optimizer.moment", "optimizer.complex"}
            with pytest.raises(CheckpointError):
                tensors_with_nan(image[8:], plan.total_bytes - 8)


def test_a_state() -> None:
    """Infinities are none, whatever they add up to; what torch takes no norm of is left out."""
    sound: dict[str, Any] = {
        "model": {"weight": torch.ones(3), "mask": torch.tensor([torch.inf, -torch.inf]), "none": torch.empty(0)},
        "optimizer": [{"step": torch.tensor(3), "eighth": torch.zeros(2).to(torch.float8_e5m2)}],
        "lr": 0.1,
    }
    assert nan_in(sound) is None
    assert nan_in({}) is None
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        spoilt = {**sound, "buffer": torch.full((300,), 60000.0, dtype=dtype), "loss": torch.nan}
        assert nan_in(spoilt) is None, "the sum may be infinite"
        spoilt["buffer"][299] = torch.nan
        spoilt["wrong"] = {"too": torch.tensor([torch.nan])}
        assert nan_in(spoilt) == NanFound(2, 7, "buffer")
    assert str(NanFound(2, 7, "buffer")) == "NaN in 2 of 7 tensors ('buffer' for one)"


def watch(*, goes_back: bool) -> tuple[NanWatch, list[NanFound | None], list[HoldsNan]]:
    held: list[NanFound | None] = [None]
    told: list[HoldsNan] = []
    link: Any = SimpleNamespace(channel=SimpleNamespace(send=told.append))
    state: Any = SimpleNamespace(nan=lambda: held[0])
    return NanWatch(link, state, goes_back=goes_back), held, told


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_rank_tells_it_once(*, goes_back: bool) -> None:
    rank, held, told = watch(goes_back=goes_back)
    rank.look(4, 9)
    held[0] = NanFound(1, 2, "w")
    rank.look(8, 17)
    rank.look(16, 33)
    assert told == [HoldsNan(8, 17, str(held[0]), without=4, since=9 if goes_back else -1)]
    held[0] = None
    rank.look(17, 35)
    held[0] = NanFound(2, 2, "w")
    rank.look(18, 37)
    assert told[1:] == [HoldsNan(18, 37, str(held[0]), without=17, since=35 if goes_back else -1)]


def test_a_process_that_has_never_seen_it_without_sends_nobody_back() -> None:
    rank, held, told = watch(goes_back=True)
    held[0] = NanFound(1, 2, "w")
    rank.look(4, 9)
    assert told == [HoldsNan(4, 9, str(held[0]))]
