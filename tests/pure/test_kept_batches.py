"""A step that is redone gets its batch as it was drawn, whatever its body has written into it."""

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from resilient_train.errors import UsageError
from resilient_train.frameworks.torch import data
from resilient_train.frameworks.torch.watching.reached import reached
from resilient_train.session.redo.kept_batches import KeptBatches
from resilient_train.session.redo.loader import Batch


class Cursor:
    """Gives what it was given."""

    loader: Any = ()
    place = (0, 0)

    def __init__(self) -> None:
        self.value: Any = None

    def next(self) -> Batch:
        return Batch(self.value, 0)


class Pulse:
    def at(self, _: object) -> None:
        pass


class Job:
    def __init__(self) -> None:
        self.cursor = Cursor()
        self.kept = KeptBatches(self.cursor, data, Pulse(), lambda _: None)

    def draw(self, value: Any) -> Any:
        self.cursor.value = value
        assert self.kept.draw(0)
        return self.kept[0].batch.value

    def window(self, value: Any) -> bool:
        """A whole one. Returns whether a body was seen to write."""
        self.draw(value)
        return self.ends()

    def ends(self) -> bool:
        seen = self.kept.look()
        self.kept.forget()
        return seen


def by_torch(batch: Any) -> None:
    batch["x"].mul_(2)


def by_numpy(batch: Any) -> None:
    batch["x"].numpy()[:] *= 2


@pytest.mark.parametrize("how", [by_torch, by_numpy])
def test_a_batch_that_is_written_each_time(how: Any) -> None:
    job = Job()
    for turn in range(4):
        batch = job.draw({"x": torch.ones(8), "name": "a"})
        how(batch)
        for _ in range(2):
            assert job.kept.draw(0), "again"
            again = job.kept[0].batch.value
            assert torch.equal(again["x"], torch.ones(8))
            how(again)
        assert job.ends() == (turn == 0), "told once"


@pytest.mark.parametrize("windows", [0, 5])
def test_what_a_body_takes_out_of_its_batch_was_given_all_the_same(windows: int) -> None:
    """``labels = step.batch.pop("labels")``: they do not come from the step before."""
    job = Job()
    job.cursor.sources = tuple  # type: ignore[attr-defined]
    for _ in range(windows):
        job.window({"x": torch.ones(2)})
    labels = job.draw({"x": torch.ones(2), "labels": torch.ones(3)}).pop("labels")
    assert any(each is labels for each in reached(job.kept.given()) or ())


def test_a_batch_that_is_not_written_is_the_same_object() -> None:
    job = Job()
    for _ in range(4):
        batch = job.draw([torch.ones(8), np.ones(3), range(3)])
        assert job.kept.draw(0)
        assert job.kept[0].batch.value is batch
        assert not job.ends()


def test_a_batch_that_is_written_late_and_for_the_first_time_is_lost() -> None:
    job = Job()
    for _ in range(3):
        job.window([torch.ones(8)])
    job.draw([torch.ones(8)])[0].mul_(2)
    assert not job.kept.draw(0)
    assert job.ends(), "and from now on there is a copy"
    job.draw([torch.ones(8)])[0].mul_(2)
    assert job.kept.draw(0)
    assert torch.equal(job.kept[0].batch.value[0], torch.ones(8))


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    parts: dict[str, Any]


def test_other_things_in_the_same_containers_cost_no_copy() -> None:
    """What most scripts do: ``batch[key] = batch[key].to(device)``."""
    job = Job()
    for _ in range(5):
        x, y = torch.ones(8), torch.zeros(2)
        batch = job.draw([Sample(x, {"y": y})])
        batch[0].x = batch[0].x.cumsum(0)
        batch[0].parts["y"] = batch[0].parts["y"].float() + 1
        batch[0].parts["more"] = 3
        batch.append(4)
        assert job.kept.draw(0)
        assert job.kept[0].batch.value is batch
        assert len(batch) == 1
        assert batch[0].x is x
        assert batch[0].parts == {"y": y}
        assert not job.ends()


def test_a_batch_in_an_object_that_is_written() -> None:
    job = Job()
    for turn in range(5):
        batch = job.draw(Sample(torch.ones(8), {"array": np.ones(3)}))
        batch.x.mul_(2)
        batch.parts["array"] *= 2
        assert job.kept.draw(0)
        assert torch.equal(batch.x, torch.ones(8))
        assert batch.parts["array"].tolist() == [1, 1, 1]
        batch.x.mul_(2)
        assert job.ends() == (turn == 0)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: Any = None


def test_a_batch_in_slots_and_behind_many_numbers() -> None:
    job = Job()
    for _ in range(5):
        batch = job.draw([Slotted(torch.ones(8)), list(range(20_000)), collections.deque([torch.ones(2)])])
        batch[0].x.mul_(2)
        batch[0].y = 3
        batch[2][0].mul_(2)
        assert job.kept.draw(0)
        assert torch.equal(batch[0].x, torch.ones(8))
        assert batch[0].y is None
        assert torch.equal(batch[2][0], torch.ones(2))
        batch[0].x.mul_(2)
        job.ends()


def test_the_sign_of_a_zero() -> None:
    job = Job()
    for _ in range(5):
        x = job.draw([torch.zeros(3)])[0]
        x.neg_()
        assert job.kept.draw(0)
        assert not x.signbit().any()
        x.neg_()
        job.ends()


def test_one_word_of_an_array() -> None:
    job = Job()
    for turn in range(5):
        batch = job.draw([np.ones((4, 1000)).T])
        batch[0][1, 0] += 1
        assert job.kept.draw(0)
        assert batch[0].sum() == 4000
        batch[0][1, 0] += 1
        assert job.ends() == (turn == 0)


def compressed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse_csr()


def columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse_csc()


def listed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_sparse()


def ragged(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor[:2]], layout=torch.jagged)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor, tensor[:2]])


def held_by(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.values() if tensor.is_nested else tensor.to_dense()).clone()


def scales(tensor: torch.Tensor) -> None:
    tensor.mul_(2)


def adds(tensor: torch.Tensor) -> None:
    if tensor.layout is torch.sparse_coo:
        tensor.add_(tensor.clone())
    else:
        tensor.values().add_(1)


@pytest.mark.parametrize("kind", [listed, compressed, columns, ragged, nested])
@pytest.mark.parametrize("write", [scales, adds])
def test_tensors_that_are_made_of_others(kind: Any, write: Any) -> None:
    """A graph, texts of several lengths. A list of coordinates is given other tensors where it is written."""
    job = Job()
    for turn in range(5):
        drawn = kind(torch.eye(3) + 1)
        found = held_by(drawn)
        (batch,) = job.draw([drawn])
        for _ in range(2):
            write(batch)
            assert not torch.equal(held_by(batch), found)
            assert job.kept.draw(0)
            assert torch.equal(held_by(batch), found), turn
        write(batch)
        job.ends()


def test_an_array_of_objects() -> None:
    job = Job()
    for _ in range(4):
        x, batch = torch.ones(2), np.empty(2, dtype=object)
        batch[:] = [x, [x]]
        drawn = job.draw(batch)
        drawn[0].mul_(2)
        drawn[1] = "another"
        assert job.kept.draw(0)
        assert drawn[0] is x
        assert drawn[1] == [x]
        assert x.tolist() == [1, 1]
        drawn[0].mul_(2)
        job.ends()
    assert any(each is x for each in reached([batch]) or ())


def test_gradients_of_the_batch() -> None:
    """Adversarial training: the second time the first gradient is not there."""
    job = Job()
    for _ in range(4):
        x = job.draw([torch.ones(3)])[0]
        for attempt in range(3):
            assert not attempt or job.kept.draw(0)
            x.mul_(2)
            x.requires_grad_()
            (x * x).sum().backward()
            assert x.grad.tolist() == [4, 4, 4]
        job.ends()


def test_a_batch_that_becomes_part_of_a_graph() -> None:
    job = Job()
    for _ in range(4):
        x = job.draw([torch.ones(3)])[0]
        for attempt in range(3):
            assert not attempt or job.kept.draw(0)
            scale = torch.ones(1, requires_grad=True)
            x.mul_(scale).sum().backward()
            assert scale.grad.item() == 3
        job.ends()


def test_other_memory_for_a_tensor_of_the_batch() -> None:
    job = Job()
    for _ in range(4):
        x, others = job.draw([torch.ones(3)])[0], torch.zeros(3)
        x.data = others
        assert job.kept.draw(0)
        assert x.tolist() == [1, 1, 1]
        assert others.tolist() == [0, 0, 0]
        x.data = (x / 3).half()
        assert job.kept.draw(0)
        assert (x.tolist(), x.dtype) == ([1, 1, 1], torch.float32)
        assert not job.ends()


def test_a_batch_that_can_be_gone_through_once_is_refused() -> None:
    with pytest.raises(UsageError, match="is or has a generator, which can be gone through once"):
        Job().draw([(each for each in ())])


def test_deep_and_strange_batches() -> None:
    chain: list[Any] = []
    for _ in range(3000):
        chain = [chain]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    job = Job()
    for _ in range(3):
        job.draw([chain, nested, torch.fft.fft(torch.ones(4)).conj(), np.zeros(3, "datetime64[s]")])
        assert job.kept.draw(0)
        assert not job.ends()


def test_a_loader_that_uses_its_memory_again() -> None:
    """The batches of one window are one tensor; each step of the redo finds its own in there."""
    job = Job()
    memory = torch.zeros(4)
    for _ in range(4):
        for place in range(2):
            memory.fill_(place)
            job.cursor.value = memory
            assert job.kept.draw(place)
        for place in range(2):
            assert job.kept.draw(place)
            assert torch.equal(memory, torch.full((4,), float(place)))
        job.ends()


def test_what_the_loader_makes_of_the_ranks_own_state_is_brought_back_with_the_batch() -> None:
    class Own:
        sampler = seen = 0

        def own(self) -> dict[str, bytes]:
            return {"sampler": bytes([self.sampler]), "seen": bytes([self.seen])}

        def restore(self, entries: dict[str, bytes]) -> None:
            for name, state in entries.items():
                setattr(self, name, state[0])

    own = Own()

    class Moving(Cursor):
        def next(self) -> Batch:
            own.sampler += 10
            return super().next()

    kept = KeptBatches(Moving(), data, Pulse(), lambda _: None, own)
    for place in range(3):
        assert kept.draw(place)
        own.seen += 1  # what a body makes of it in an attempt that was not right, say
    own.sampler, own.seen = 10, 0  # as the beginning of the window has it, behind its first draw
    for place in range(3):
        assert kept.draw(place)
        assert own.sampler == 10 * (place + 1)
        own.seen += 5
    assert own.seen == 15
    own.sampler = 11
    assert not kept.draw(1), "a body moves it on as well, and not as it did"


def test_parts_of_a_graph_expanded_and_odd_things() -> None:
    job = Job()
    part = (torch.ones(3, requires_grad=True) * 2)[:2]
    ring: list[Any] = []
    ring.append(ring)
    for _ in range(3):
        batch = job.draw([part, torch.ones(1).expand(4), torch.eye(3).to_sparse(), ring, "text", None, len, object()])
        assert job.kept.draw(0)
        assert job.kept[0].batch.value is batch
        assert not job.ends()


def test_what_a_batch_knows_is_not_put_back() -> None:
    """Only what it is: a loader that stands behind it has gone on."""

    class Source:
        place = torch.zeros(1)

    class Own:
        def __init__(self) -> None:
            self.x, self.source, self.rows = torch.ones(8), Source(), ["text"] * 100_000

    job = Job()
    batch = job.draw(Own())
    batch.x.mul_(2)
    batch.source.place = torch.ones(1)
    assert job.kept.draw(0)
    assert torch.equal(batch.x, torch.ones(8))
    assert batch.source.place.item() == 1
