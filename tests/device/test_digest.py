"""The digest that a real accelerator makes of its memory is the one that the host makes of the same bytes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from resilient_train._native import Copier  # noqa: E402
from resilient_train.frameworks.torch.tensors.device_digest import device_digest  # noqa: E402
from resilient_train.frameworks.torch.tensors.fingerprint import TorchFingerprint  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="torch finds no accelerator here (cuda or npu)"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
@pytest.mark.parametrize("count", [1, 7, 4096, 10_000_019])
def test_it_is_the_hosts(dtype: torch.dtype, count: int) -> None:
    here = torch.randint(-100, 100, (count,)).to(dtype)
    there = here.to(torch.accelerator.current_accelerator())
    assert int(device_digest(there)) == int(device_digest(here))
    assert int(device_digest(there[1:])) == int(device_digest(here[1:]))


def test_the_same_state_has_the_same_fingerprint() -> None:
    """What comes to the host is kept until it is read."""
    tree = {"model": [torch.randn(count, device=torch.accelerator.current_accelerator()) for count in range(1, 200)]}
    assert len({TorchFingerprint(tree, Copier()).digest() for _ in range(20)}) == 1
