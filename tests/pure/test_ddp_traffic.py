"""What DistributedDataParallel broadcasts of a wrapper's buffers, told from outside."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
dist = torch.distributed

from resilient_train.frameworks.torch.communication.collective_results import done  # noqa: E402
from resilient_train.frameworks.torch.communication.ddp_traffic import coalesced  # noqa: E402


class Recorder(dist.ProcessGroup):  # type: ignore[misc, name-defined]
    """Of one rank, that keeps what is broadcast."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.given: list[Any] = []

    def broadcast(self, tensors: list[Any], _opts: Any) -> Any:
        self.given += tensors
        return done(tensors)


@pytest.mark.parametrize(("size", "parts"), [(1, 5), (20, 4), (1 << 20, 3)])
def test_what_is_broadcast_of_buffers_is_told_of_anothers(size: int, parts: int) -> None:
    """``_broadcast_coalesced`` is C++: however it parts them, what another rank would have given is found."""
    torch.manual_seed(0)

    def made() -> list[Any]:
        return [
            torch.randn(3, 2).t(), torch.randint(9, ()), torch.randn(5), torch.randn(4).double(), torch.randint(9, (2,))
        ]  # fmt: skip

    mine, theirs = made(), made()
    wrapper: Any = SimpleNamespace(modules_buffers=mine, broadcast_bucket_size=size)
    here, there = Recorder(), Recorder()
    dist._broadcast_coalesced(here, mine, size, 0)
    dist._broadcast_coalesced(there, theirs, size, 0)
    assert len(here.given) == len(there.given) == parts
    place = {id(each): value for each, value in zip(mine, theirs, strict=True)}
    for one, other in zip(here.given, there.given, strict=True):
        found = coalesced(wrapper, one, lambda buffers: [place[id(each)] for each in buffers])
        assert found is not None
        assert found.dtype == other.dtype
        assert torch.equal(found, other)
        assert coalesced(wrapper, one, lambda _: None) is None, "nobody can tell what they are there"
        assert coalesced(wrapper, other + 20, lambda _: pytest.fail("not these")) is None
