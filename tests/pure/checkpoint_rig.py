"""Small checkpoints without torch: two tensors cut by rows, some whole ones, values that tell name and step."""

import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from resilient_train.state.checkpoint.draft import CheckpointDraft
from resilient_train.state.checkpoint.libraries import libraries_here
from resilient_train.state.checkpoint.manifest import FileEntry, Kind
from resilient_train.state.checkpoint.restore import Checkpoint
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.image import ImagePlan, plan_image
from resilient_train.state.nan import NanFound
from resilient_train.state.sharding import Piece, Shape

NUMPY = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1", "BOOL": "?", "F16": "<f2"}
CUT = {"model.0.weight": ("F32", (8, 6)), "optimizer.0.moment": ("F64", (7, 3))}
"""Cut by rows among the shards; 7 rows do not divide evenly."""
WHOLE = {
    "model.0.scale": ("F32", ()),
    "extra.codes": ("U8", (5,)),
    "optimizer.0.step": ("I64", (1,)),
    "none": ("F16", (0, 4)),
}
NAMES = (*CUT, *WHOLE)


def value(name: str, step: int) -> np.ndarray:
    dtype, shape = (CUT | WHOLE)[name]
    count = int(np.prod(shape))
    return (np.arange(count) * 3 + step * 7 + len(name)).astype(NUMPY[dtype]).reshape(shape)


def rows(total: int, parts: int, part: int) -> slice:
    return slice(total * part // parts, total * (part + 1) // parts)


def whole(name: str, dtype: str, shape: Shape) -> Piece:
    """A tensor in one piece."""
    return Piece(name, dtype, shape, shape, (0,) * len(shape))


def pieces(shard: int, shards: int) -> list[Piece]:
    found = []
    for name, (dtype, shape) in CUT.items():
        mine = rows(shape[0], shards, shard)
        found.append(
            Piece(name, dtype, (mine.stop - mine.start, *shape[1:]), shape, (mine.start, *[0] * len(shape[1:])))
        )
    owned = [name for number, name in enumerate(WHOLE) if number % shards == shard]
    return found + [whole(name, *WHOLE[name]) for name in owned]


def block(array: np.ndarray, piece: Piece) -> np.ndarray:
    return array[tuple(slice(at, at + extent) for at, extent in zip(piece.offsets, piece.shape, strict=True))]


def image(plan: ImagePlan, step: int) -> memoryview:
    """Page-aligned memory that holds the image, as a slot does."""
    memory = mmap.mmap(-1, plan.capacity_bytes)
    memory[: plan.data_start] = plan.header(step)
    for piece, start in plan.places:
        memory[start : start + piece.size_bytes] = block(value(piece.name, step), piece).tobytes()
    return memoryview(memory)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def own(rank: int, step: int) -> bytes:
    return f"own state of rank {rank} at step {step}".encode()


def write(
    folder: Path,
    step: int,
    *,
    shards: int = 2,
    kind: Kind = "periodic",
    read_back: bool = False,
    libraries: Mapping[str, str] | None = None,
    nan: NanFound | None = None,
) -> Path:
    """A complete checkpoint of ``shards`` replica groups of one rank each."""
    with CheckpointDraft.begin(folder, step, kind) as draft:
        entries = add_files(draft, step, shards)
        return draft.commit(
            entries,
            commits=step,
            reason="a test",
            replica_groups=[[rank] for rank in range(shards)],
            shards=shards,
            libraries=libraries or libraries_here(),
            nan=nan,
            read_back=read_back,
        )


def add_files(draft: CheckpointDraft, step: int, shards: int) -> list[FileEntry]:
    entries = []
    for shard in range(shards):
        plan = plan_image(pieces(shard, shards), shard, shards)
        entries += [
            draft.add_image(shard, shards, image(plan, step), plan.total_bytes, shard).entry,
            draft.add_tree(shard, shards, b"\xc0", [place.piece.name for place in plan.places], shard),
            draft.add_rank(shard, shards, own(shard, step)),
        ]
    return entries


def loaded(checkpoint: Checkpoint, wanted: list[Piece], *, digests: bool = True) -> list[np.ndarray]:
    arrays = [np.full(piece.shape, 1, NUMPY[piece.dtype]) for piece in wanted]
    targets = [BlockTarget(piece, memory_of(array)) for piece, array in zip(wanted, arrays, strict=True)]
    checkpoint.load(targets, digests=digests)
    return arrays


def memory_of(array: np.ndarray) -> memoryview:
    return memoryview(array.reshape(-1).view("u1"))


def holds(checkpoint: Checkpoint, step: int) -> bool:
    """Whether everything in it is what was written at ``step``."""
    wanted = [checkpoint.tensors[name] for name in NAMES]
    tensors = all(
        np.array_equal(array, value(piece.name, step))
        for piece, array in zip(wanted, loaded(checkpoint, wanted), strict=True)
    )
    return tensors and all(checkpoint.rank_state(r) == own(r, step) for r in range(checkpoint.manifest.world_size))
