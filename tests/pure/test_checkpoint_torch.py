"""torch's state in a checkpoint: plain safetensors and plain DCP read it at another world size, and so do we."""

import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from resilient_train.errors import ConfigError  # noqa: E402
from resilient_train.frameworks.torch.tensors.checkpoint_pieces import (  # noqa: E402
    contents,
    local,
    memory_of,
    names_of,
    piece_of,
)
from resilient_train.frameworks.torch.tensors.leaves import TENSORS, dtype_of, span_of  # noqa: E402
from resilient_train.state import sharding  # noqa: E402
from resilient_train.state.checkpoint.draft import CheckpointDraft  # noqa: E402
from resilient_train.state.checkpoint.restore import Checkpoint, read_checkpoint  # noqa: E402
from resilient_train.state.checkpoint.target import BlockTarget  # noqa: E402
from resilient_train.state.checkpoint.verify import verify  # noqa: E402
from resilient_train.state.image import ImagePlan, plan_image  # noqa: E402
from resilient_train.state.sharding import Piece, divide  # noqa: E402
from resilient_train.state.transfer import view  # noqa: E402
from resilient_train.state.tree import Path as TreePath  # noqa: E402
from resilient_train.state.tree import Slot, unflatten  # noqa: E402

pytestmark = pytest.mark.torch
STEP = 40


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(7, 6, generator=draw),  # 7 rows do not divide by 4 or by 2
        "bf16": torch.randn(9, 5, generator=draw).to(torch.bfloat16),
        "bytes": torch.randint(0, 255, (33,), dtype=torch.uint8, generator=draw),
        "half": torch.randn(4, 3, 2, generator=draw).half(),
        "step": torch.tensor(float(seed + 3)),
        "count": torch.tensor(seed + 12345678901),
        "none": torch.empty(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def fill(
    pieces: list[Piece], shard: int, shards: int, held: Mapping[str, torch.Tensor]
) -> tuple[ImagePlan, memoryview]:
    """A slot that holds the image of these pieces of a rank's tensors."""
    plan = plan_image(pieces, shard, shards)
    slot = memoryview(mmap.mmap(-1, plan.capacity_bytes))
    slot[: plan.data_start] = plan.header(STEP)
    for piece, start in plan.places:
        source = memory_of(piece, held[piece.name])
        slot[start : start + source.size] = bytes(view(source)) if source.size else b""
    return plan, slot


def save(folder: Path, slots: list[tuple[ImagePlan, memoryview]], groups, names=(), tree: bytes = b"\xc0") -> Path:
    shards = len(slots)
    with CheckpointDraft.begin(folder, STEP) as draft:
        files = [
            draft.add_image(shard, shards, slot, plan.total_bytes, shard).entry
            for shard, (plan, slot) in enumerate(slots)
        ]
        files += [draft.add_tree(group, len(groups), tree, names, 0) for group in range(len(groups))]
        files += [draft.add_rank(rank, shards, b"") for rank in range(shards)]
        return draft.commit(
            files, commits=STEP, reason="", replica_groups=groups, shards=shards, libraries={"torch": torch.__version__}
        )


def save_replicated(folder: Path, state: Mapping[str, torch.Tensor], ranks: int, tree: bytes = b"\xc0") -> Path:
    """As a data parallel job of ``ranks`` does it: all hold all, each writes its part."""
    parts = divide([piece_of(name, tensor) for name, tensor in state.items()], ranks)
    slots = [fill(part, shard, ranks, state) for shard, part in enumerate(parts)]
    return save(folder, slots, [list(range(ranks))], list(state), tree)


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    """As if this process were one rank of several: enough to make DTensors, and nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded(state: Mapping[str, torch.Tensor], size: int, dim: int) -> dict[str, torch.Tensor]:
    """This rank's part: DTensors cut along ``dim`` where there is one, as FSDP2 has them; the rest plain."""
    mesh = init_device_mesh("cpu", (size,))
    return {
        name: distribute_tensor(tensor, mesh, [Shard(dim)], src_data_rank=None)
        if tensor.dim() > dim and tensor.numel()
        else tensor.clone()
        for name, tensor in state.items()
    }


def save_sharded(folder: Path, state: Mapping[str, torch.Tensor], size: int, dim: int) -> Path:
    """As ``size`` ranks that hold one part each: so many groups, and plain tensors are in all of them."""
    pieces, slots = [], []
    for rank in range(size):
        with world(rank, size):
            pieces.append([piece_of(name, tensor) for name, tensor in sharded(state, size, dim).items()])
    seen: set[Piece] = set()
    for rank, held in enumerate(pieces):
        mine = [piece for piece in held if piece not in seen]
        seen.update(held)
        with world(rank, size):
            slots.append(fill(mine, rank, size, sharded(state, size, dim)))
    return save(folder, slots, [[rank] for rank in range(size)])


def blank(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.fixture(params=["replicated", "rows", "columns"])
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """By four ranks."""
    monkeypatch.setattr(sharding, "SPLIT_MIN_BYTES", 1)
    if request.param == "replicated":
        return save_replicated(tmp_path, tensors(), 4)
    return save_sharded(tmp_path, tensors(), 4, 0 if request.param == "rows" else 1)


def test_whole(written: Path) -> None:
    assert verify(written).problems == ()
    found = blank(tensors())
    with read_checkpoint(written) as checkpoint:
        assert len(checkpoint.manifest.files) in {4 + 1 + 4, 4 + 4 + 4}
        load_tensors(checkpoint, found)
    assert all(same(found[name], tensor) for name, tensor in tensors().items())


@pytest.mark.parametrize(("size", "dim"), [(1, 0), (2, 0), (2, 1), (3, 0), (4, 1)])
def test_in_another_world(written: Path, size: int, dim: int) -> None:
    for rank in range(size):
        with world(rank, size), read_checkpoint(written) as checkpoint:
            expected, found = sharded(tensors(), size, dim), sharded(blank(tensors()), size, dim)
            load_tensors(checkpoint, found)
            assert all(same(local(found[name]), local(tensor)) for name, tensor in expected.items())


def test_plain_safetensors(written: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    found = [load_file(path) for path in sorted(written.glob("*.safetensors"))]
    whole = tensors()
    with read_checkpoint(written) as checkpoint:
        places = [header.places for header in checkpoint._headers]
    for file, held in zip(found, places, strict=True):
        assert set(file) == {piece.name for piece, _ in held}
        for piece, _ in held:
            cut = tuple(slice(at, at + extent) for at, extent in zip(piece.offsets, piece.shape, strict=True))
            assert same(file[piece.name], whole[piece.name][cut])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # no_dist: each rank for itself
@pytest.mark.parametrize(("size", "dim"), [(1, 0), (2, 0), (2, 1), (3, 0)])
def test_plain_dcp(written: Path, size: int, dim: int) -> None:
    pytest.importorskip("safetensors")
    for rank in range(size):
        with world(rank, size):
            expected, found = sharded(tensors(), size, dim), sharded(blank(tensors()), size, dim)
            dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(written)), no_dist=True)
            assert all(same(local(found[name]), local(tensor)) for name, tensor in expected.items())
            assert isinstance(found["w"], DTensor)


def load_tensors(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], *, digests: bool = True) -> int:
    """Fills tensors (plain ones whole, DTensors this rank's block) from a checkpoint of any layout, in place."""
    targets: list[BlockTarget] = []
    landed: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, tensor in tensors.items():
        here = local(tensor)
        landing = here
        if here.device.type != "cpu" or not here.is_contiguous():
            landing = torch.empty(here.shape, dtype=here.dtype)
            landed.append((here, landing))
        targets.append(BlockTarget(piece_of(name, tensor), view(span_of(landing))))
    count = checkpoint.load(targets, digests=digests)
    with torch.no_grad():
        for here, landing in landed:
            here.copy_(landing)
    return count


def load_tree(checkpoint: Checkpoint) -> Any:
    file = checkpoint.tree(0)
    made: dict[str, torch.Tensor] = {}

    def place(_: TreePath, slot: Slot) -> torch.Tensor:
        return made.setdefault(file.names[slot.number], torch.empty(slot.shape, dtype=dtype_of(slot.dtype)))

    tree = unflatten(file.tree, TENSORS, place)
    load_tensors(checkpoint, made)
    return tree


def test_a_tree_of_state(tmp_path: Path) -> None:
    """A model with its optimizer, in and out, and dtypes that safetensors lacks."""
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    tree = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "odd": [torch.tensor([1 + 2j], dtype=torch.complex128), torch.float16, (1, "x")],
    }
    payload, named = contents(tree)
    path = save_replicated(tmp_path, named, 3, payload)
    with read_checkpoint(path) as checkpoint:
        found = load_tree(checkpoint)
        assert checkpoint.tensors["odd.0"].dtype == "U8"
    assert same(found["odd"][0], tree["odd"][0])
    assert found["odd"][1:] == tree["odd"][1:]
    other = torch.nn.Linear(5, 3)
    other.load_state_dict(found["model"])
    again = torch.optim.AdamW(other.parameters())
    again.load_state_dict(found["optimizer"])
    assert (
        contents({"m": other.state_dict(), "o": again.state_dict()}).payload
        == contents({"m": model.state_dict(), "o": optimizer.state_dict()}).payload
    )
    for name, tensor in contents({"m": model.state_dict(), "o": optimizer.state_dict()}).tensors.items():
        assert same(contents({"m": other.state_dict(), "o": again.state_dict()}).tensors[name], tensor)


def test_memory_that_is_not_dense(tmp_path: Path) -> None:
    path = save_replicated(tmp_path, {"w": torch.arange(12.0).reshape(3, 4)}, 1)
    found = torch.zeros(4, 3).t()
    with read_checkpoint(path) as checkpoint:
        load_tensors(checkpoint, {"w": found})
    assert torch.equal(found, torch.arange(12.0).reshape(3, 4))


def test_another_model(tmp_path: Path) -> None:
    path = save_replicated(tmp_path, {"w": torch.ones(3)}, 1)
    with read_checkpoint(path) as checkpoint:
        with pytest.raises(ConfigError, match="holds no tensor 'v'"):
            load_tensors(checkpoint, {"v": torch.ones(3)})
        with pytest.raises(ConfigError, match="here it is F64"):
            load_tensors(checkpoint, {"w": torch.ones(3, dtype=torch.float64)})


def test_a_mesh_of_replicas_and_shards() -> None:
    """Ranks 0 and 2 of a 2 x 2 mesh hold the same rows."""
    found = []
    for rank in range(4):
        with world(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            tensor = distribute_tensor(torch.ones(5, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None)
            found.append(piece_of("w", tensor))
    assert found[0] == found[2] == Piece("w", "F32", (3, 2), (5, 2), (0, 0))
    assert found[1] == found[3] == Piece("w", "F32", (2, 2), (5, 2), (3, 0))


def test_names() -> None:
    paths = [("model", 0, "a.b", "c"), ("model", 0, "a", "b.c"), ("model", 0, "a", "b.c~1"), ("x",)]
    assert names_of(paths) == ["model.0.a.b.c", "model.0.a.b.c~2", "model.0.a.b.c~1", "x"]
