"""A snapshot's layout is kept from the one before: whatever moves, grows or turns is found out."""

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from pure.staging_rig import STEP, WHOLE, Trained, room  # noqa: E402
from resilient_train._native import Copier  # noqa: E402
from resilient_train.frameworks.roles import SaveShare  # noqa: E402
from resilient_train.frameworks.torch.tensors.snapshot_images import Images  # noqa: E402
from resilient_train.frameworks.torch.tensors.staging import Staging  # noqa: E402

pytestmark = pytest.mark.torch


def copied(host: Trained, share: SaveShare = WHOLE, images: Images | None = None) -> bytes:
    """By what has kept the layout from the copy before. (``State.image`` would refuse models of another shape.)"""
    image = (images or host.state._images).image(host.state.tree(), STEP, share)
    memory = room(image)
    image.begin(memory, Copier()).finish()
    return bytes(memory)


def fresh(host: Trained, share: SaveShare = WHOLE) -> bytes:
    """By something that has kept nothing."""
    return copied(host, share, Images(Staging(1 << 30)))


def other_memory(host: Trained) -> None:
    host.model.large.data = host.model.large.detach().clone() + 1


def other_shape(host: Trained) -> None:
    host.optimizer.state.clear()
    host.model.large.data = torch.full((20, 30), 4.0)


def other_shape_of_the_same_memory(host: Trained) -> None:
    host.model.brief.data = host.model.brief.detach().view(3, 5)


def other_dtype_of_the_same_memory(host: Trained) -> None:
    host.model.brief.data = host.model.brief.detach().view(torch.float16)


def a_square_of_the_same_memory_turned(host: Trained) -> None:
    moment = host.optimizer.state[host.model.large]
    moment["exp_avg"] = moment["exp_avg"][:300, :300].contiguous()
    copied(host)
    moment["exp_avg"] = moment["exp_avg"].t()


def other_dtype(host: Trained) -> None:
    host.model.large.data = host.model.large.detach().double()


def turned_in_place(host: Trained) -> None:
    host.model.brief.data = host.model.brief.detach().t()


def straightened(host: Trained) -> None:
    host.model.turned.data = host.model.turned.detach().contiguous() * 3


def other_moments(host: Trained) -> None:
    for state in host.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)


def fewer_moments(host: Trained) -> None:
    del host.optimizer.state[host.model.large]


def other_buffer(host: Trained) -> None:
    host.model.mean = torch.arange(4.0)


def exchanged(host: Trained) -> None:
    """The same addresses under other names."""
    model = host.model
    model.one, model.two = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.zeros(8))
    copied(host)
    model.one.data, model.two.data = model.two.data, model.one.data


CHANGES = [
    other_memory, other_shape, other_dtype, other_shape_of_the_same_memory, other_dtype_of_the_same_memory,
    a_square_of_the_same_memory_turned, turned_in_place, straightened, other_moments, fewer_moments, other_buffer,
    exchanged,
]  # fmt: skip


@pytest.mark.parametrize("share", [WHOLE, SaveShare(1, 3, 1, 3)])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_found_out(change: Callable[[Trained], None], share: SaveShare) -> None:
    host = Trained()
    host.update(0.5)
    assert copied(host, share) == fresh(host, share)
    change(host)
    assert copied(host, share) == fresh(host, share)
    host.forward()
    assert copied(host, share) == fresh(host, share)


def test_the_layout_is_kept_while_values_change() -> None:
    host = Trained()
    host.update(0.5)
    before = copied(host)
    layout = host.state._images._layout
    host.update(0.25)
    host.forward()
    after = copied(host)
    assert host.state._images._layout is layout
    assert after == fresh(host) != before


def test_another_share_is_another_layout() -> None:
    host = Trained()
    host.update(0.5)
    for share in (WHOLE, SaveShare(0, 2, 0, 2), SaveShare(1, 2, 1, 2), SaveShare(1, 2, 4, 8)):
        assert copied(host, share) == fresh(host, share)
