"""CUDA graphs, which have addresses that a fault may change: refused while a loop runs, on a stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from resilient_train.errors import UsageError  # noqa: E402 - only where torch is
from resilient_train.frameworks.roles import Engine, Objects  # noqa: E402
from resilient_train.frameworks.torch.engine import engine_for  # noqa: E402

pytestmark = pytest.mark.torch


class Graph:
    """As far as ``torch.cuda.graph`` and ``make_graphed_callables`` use one."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def capture_begin(self, *_: object, **__: object) -> None:
        self.done.append("captured")

    def replay(self) -> None:
        self.done.append("replayed")


class Updates:
    def before_update(self, optimizer: object) -> None:
        pass

    def after_update(self, optimizer: object) -> None:
        pass

    def given(self) -> None:
        """Nothing is looked for of what flows."""


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    model = torch.nn.Linear(2, 2)
    made = engine_for(Objects((model,), (torch.optim.SGD(model.parameters(), lr=0.1),)))
    yield made
    made.window.detach()


def test_while_the_loop_runs_they_are_refused(engine: Engine) -> None:
    graph = Graph()
    graph.replay()
    engine.window.attach(Updates())
    for call in (graph.capture_begin, graph.replay):
        with pytest.raises(UsageError, match=r"test_cuda_graphs.py:\d+: a CUDA graph .* has the addresses"):
            call()
    engine.window.detach()
    graph.replay()
    assert graph.done == ["replayed"] * 2


def test_torchs_own_have_these_calls() -> None:
    """``capture_begin`` is called by ``torch.cuda.graph``, and ``replay`` by whoever uses what was captured."""
    assert {"capture_begin", "replay"} <= vars(torch.cuda.CUDAGraph).keys()
