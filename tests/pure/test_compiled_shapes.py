"""Code that torch.compile has compiled by the order in which shapes came is known, and nothing else."""

import pytest
import torch

from resilient_train.frameworks.torch.watching.compiled_shapes import CompiledShapes

pytestmark = pytest.mark.usefixtures("as_in_a_fork")


def since(*calls: tuple[object, ...], dynamic: bool | None = None) -> str:
    """What is found of calls of a function, the first of which is made before the loop."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, factor: (x.softmax(-1) * factor).sum(), backend="eager", dynamic=dynamic)
    first, *others = calls
    compiled(*first)
    shapes = CompiledShapes()
    assert not shapes.changing()
    for each in others:
        compiled(*each)
    return shapes.changing()


def test_shapes_that_change_in_the_loop() -> None:
    four, five = torch.rand(2, 4), torch.rand(2, 5)
    assert not since((four, 1), (four, 1))
    with torch.no_grad():
        assert not since((four, 1), (four, 1))
    assert not since((four.double(), 1), (four, 1)), "another type, and no other size"
    assert "test_compiled_shapes.py:" in since((four, 1), (five, 1))
    assert "test_compiled_shapes.py:" in since((four, 2), (four, 3), (four, 4))
    assert not since((four, 1), (five, 1), (torch.rand(2, 7), 1), dynamic=True)


def test_what_was_compiled_before_the_loop_is_no_news() -> None:
    compiled = torch.compile(torch.sin, backend="eager")
    for length in (4, 5):
        compiled(torch.rand(length))
    shapes = CompiledShapes()
    for length in (4, 5, 9):
        assert not shapes.changing()
        compiled(torch.rand(length))
    assert not shapes.changing()


def test_torch_gives_up() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        assert "more than 2 times" in since(*((torch.rand(2, 4).to(kind), 1) for kind in kinds))
