"""Which groups become ones that can be rebuilt."""

import pytest

from resilient_train import _register

dist = pytest.importorskip("torch.distributed")


@pytest.mark.parametrize(
    ("backend", "is_gloo"),
    [
        (None, True),
        ("undefined", True),
        ("gloo", True),
        ("GLOO", True),
        ("cpu:gloo", True),
        ("CPU:Gloo", True),
        ("nccl", False),
        ("NCCL", False),
        ("cuda:nccl", False),
        ("cpu:gloo,cuda:nccl", False),
        ("cuda:nccl,cpu:gloo", False),
    ],
)
def test_what_asks_for_gloo(backend: str | None, is_gloo: bool) -> None:
    """Torch lowers a backend's name, but not before it has asked ``init_process_group`` of ours."""
    assert _register._is_for_gloo(backend, dist.distributed_c10d) == is_gloo


def test_where_nothing_is_asked_for_the_accelerator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    device = dist.distributed_c10d.torch.device("cuda")
    monkeypatch.setattr("torch._C._get_accelerator", lambda: device)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: device)  # what torch 2.14 asks
    for backend in (None, "undefined"):
        assert not _register._is_for_gloo(backend, dist.distributed_c10d)


def test_nccl_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    c10d = dist.distributed_c10d
    alone = ("nccl", "NCCL", "cuda:nccl")
    both = ("cpu:gloo,cuda:nccl", "cuda:nccl,cpu:gloo")
    strange = ("cpu:mpi,cuda:nccl", "nccl2", "cpu:gloo,cuda:ucc")
    asked_for = (*alone, *both, *strange)
    assert {each: _register._stands_for(each, c10d) for each in asked_for} == dict.fromkeys(asked_for)
    monkeypatch.setenv("RESILIENT_NCCL", "1")
    ours = dict.fromkeys(alone, "resilient_nccl") | dict.fromkeys(both, "resilient_gloo_nccl")
    assert {each: _register._stands_for(each, c10d) for each in asked_for} == dict.fromkeys(asked_for) | ours
    device = c10d.torch.device("cuda")
    monkeypatch.setattr("torch._C._get_accelerator", lambda: device)
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda **_: device)
    assert _register._stands_for(None, c10d) == "resilient_nccl"
