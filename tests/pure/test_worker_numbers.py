"""Random numbers of a loader's workers: a new process draws what its predecessor's workers would have drawn."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from resilient_train.errors import ConfigError
from resilient_train.frameworks.torch import data as torch_data
from resilient_train.session.redo.loader import Cursor

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
SAMPLES, SIZE, WORKERS = 14, 2, 3  # seven batches a pass: each begins with another worker than the one before ended


class Everywhere(Dataset[torch.Tensor]):
    """Draws from the three generators that everybody has."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)])  # noqa: NPY002


class Own(Everywhere):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        self.hold = {"python": random.Random(3), "numpy": [np.random.default_rng(4)]}
        self.torchs = torch.Generator().manual_seed(5)
        self.old = np.random.RandomState(6)

    def __getitem__(self, number: int) -> torch.Tensor:
        (numpys,) = self.hold["numpy"]
        drawn = [self.hold["python"].gauss(0, 1), numpys.standard_normal(), self.old.randn()]
        return torch.tensor([number, *drawn, torch.rand((), generator=self.torchs).item()])


class ByWorker(Own):
    """Each worker makes itself a generator by its number, as the pages of NumPy and torch advise."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, get_worker_info().id, self.made.random(), random.random()])


class Drawing(random.Random):
    """Of the script's."""


class Unopened(dict[str, int]):
    def __len__(self) -> int:
        raise RuntimeError("not opened")


class Mixed(Everywhere):
    """What is not to be asked, and a subclass; and a global variable that is called as an attribute is."""

    def __init__(self) -> None:
        self.unopened, self.rng = Unopened(), Drawing(8)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, self.rng.random()])


class Set(Everywhere):
    """Which of them a new process finds first is chance."""

    def __init__(self) -> None:
        self.among = {Holder(each) for each in range(6)}

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, *(each.own.random() for each in sorted(self.among, key=lambda one: one.number))])


class Holder:
    def __init__(self, number: int) -> None:
        self.number, self.own = number, random.Random(number)


rng = random.Random(9)


class Many(Everywhere):
    """Gets the numbers of a batch as a list, and draws for all of them."""

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        assert type(numbers) is list
        return [torch.tensor([number, drawn]) for number, drawn in zip(numbers, torch.rand(len(numbers)), strict=True)]


class Seldom(Everywhere):
    """One sample of a pass is drawn for."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return super().__getitem__(number) if number == 5 else torch.tensor([float(number)] * 5)


def seeded_by_number(worker: int) -> None:
    random.seed(torch.initial_seed() % 1000 + worker)
    data_set: Any = get_worker_info().dataset
    data_set.made = np.random.default_rng(worker)


def with_noise(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(samples), torch.rand(2)]


def cursor(kind: type[Dataset[Any]], made_by: type[DataLoader[Any]] = DataLoader, **options: Any) -> Cursor:
    torch.manual_seed(7)
    options = {"num_workers": WORKERS, "shuffle": True, "worker_init_fn": seeded_by_number, **options}
    made = Cursor(made_by(kind(), batch_size=SIZE, **options), torch_data)
    made.looks = True
    return made


def take(position: Cursor, count: int) -> list[tuple[Any, int]]:
    found = []
    for _ in range(count):
        batch = position.next()
        torch.rand(1)  # the training draws as well
        value = batch.value if isinstance(batch.value, list) else [batch.value]
        found.append(([each.tolist() for each in value], batch.epoch))
    return found


PASS = SAMPLES // SIZE
PLACES = [0, 1, 2, 4, 7, 8, 13]


@pytest.mark.parametrize("kept", [False, True], ids=["made anew", "kept"])
@pytest.mark.parametrize("kind", [Everywhere, Own, ByWorker, Many, Seldom, Mixed])
def test_going_on_elsewhere(kind: type[Dataset[Any]], kept: bool) -> None:
    """From places of the first two passes; and from there once more, in a third process."""
    first = cursor(kind, persistent_workers=kept)
    places = []
    for _ in range(2 * PASS + 1):
        places.append((first.position(), torch_data.random_state()))
        places[-1] += (take(first, 1),)
    following = take(first, PASS + 2)
    batches = [batch for *_, (batch,) in places] + following
    for done in PLACES if kind is Everywhere else (4, 8):
        position, random_state, _ = places[done]
        second = cursor(kind, persistent_workers=kept)
        second.load(position)
        assert not second.strayed, done
        torch_data.restore_random_state(random_state)
        assert take(second, 2) == batches[done : done + 2], done
        random_state, third = torch_data.random_state(), cursor(kind, persistent_workers=kept)
        third.load(second.position())
        torch_data.restore_random_state(random_state)
        assert take(third, PASS + 1) == batches[done + 2 : done + 3 + PASS], done
        assert not second.strayed
        assert not third.strayed


@pytest.mark.parametrize("kept", [False, True], ids=["made anew", "kept"])
@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_loader_that_keeps_its_place(done: int, kept: bool) -> None:
    first = cursor(ByWorker, StatefulDataLoader, persistent_workers=kept)
    take(first, done)
    random_state, second = torch_data.random_state(), cursor(ByWorker, StatefulDataLoader, persistent_workers=kept)
    second.load(first.position())
    torch_data.restore_random_state(random_state)
    after, random_state_after = take(second, PASS + 2), torch_data.random_state()
    torch_data.restore_random_state(random_state)
    assert take(first, PASS + 2) == after
    assert torch_data.random_state() == random_state_after


@pytest.mark.parametrize("kept", [False, True], ids=["made anew", "kept"])
@pytest.mark.parametrize("back", [0, 2, 7, 9])
def test_one_that_goes_back(back: int, kept: bool) -> None:
    """A rank whose workers are there is taken back with all others, and they have drawn for what comes once more."""
    first = cursor(Own, persistent_workers=kept)
    take(first, back)
    position, random_state = first.position(), torch_data.random_state()
    following = take(first, 9)
    for _ in range(2):
        first.load(position)
        torch_data.restore_random_state(random_state)
        assert take(first, 9) == following


def test_a_collate_function_that_draws() -> None:
    first = cursor(Everywhere, collate_fn=with_noise)
    take(first, 4)
    random_state, second = torch_data.random_state(), cursor(Everywhere, collate_fn=with_noise)
    second.load(first.position())
    torch_data.restore_random_state(random_state)
    after, torchs = take(second, 9), torch_data.random_state()
    torch_data.restore_random_state(random_state)
    assert take(first, 9) == after
    assert torch_data.random_state() == torchs


def test_the_same_numbers_as_without_us() -> None:
    ours, torchs = cursor(Everywhere), cursor(Everywhere).loader
    state = torch_data.random_state()
    expected = [each.tolist() for each in torchs]
    torch_data.restore_random_state(state)
    assert [batch for (batch,), _ in take(ours, PASS)] == expected
    assert torchs.collate_fn is ours.loader.collate_fn
    assert ours.loader.worker_init_fn is seeded_by_number
    assert [type(each) for each in ours.loader] == [torch.Tensor] * PASS, "the script may go through it as well"


def test_nothing_is_told_of_workers_that_draw_nothing() -> None:
    place = cursor(Seldom, worker_init_fn=None, shuffle=False)
    told = []
    for _ in range(PASS):
        told.append(len(place.position().workers))
        take(place, 1)
    assert told[2] < 200
    assert told[3] > 10_000
    assert max(told[3:]) - min(told[3:]) < 20


def test_batches_in_any_order_are_refused() -> None:
    with pytest.raises(ConfigError, match="in_order=False"):
        Cursor(DataLoader([1, 2], num_workers=1, in_order=False), torch_data)
    Cursor(DataLoader([1, 2], in_order=False), torch_data)


@pytest.mark.parametrize("kept", [False, True], ids=["made anew", "kept"])
@pytest.mark.parametrize("done", [2, 3, 4, 6, 9, 10])
def test_generators_that_do_not_come_back_are_told(done: int, kept: bool) -> None:
    """Or each worker that has drawn draws its batch once more, and so goes on right."""
    first = cursor(Set, persistent_workers=kept)
    take(first, done)
    random_state, second = torch_data.random_state(), cursor(Set, persistent_workers=kept)
    second.load(first.position())
    strayed, after = second.strayed, []
    for place in (first, second):
        torch_data.restore_random_state(random_state)
        after.append(take(place, PASS + 2))
    assert strayed or after[0] == after[1]


def test_the_script_goes_through_a_loader_that_keeps_its_workers() -> None:
    place = cursor(Everywhere, persistent_workers=True)
    take(place, PASS)
    assert [type(each) for each in place.loader] == [torch.Tensor] * PASS


def test_a_new_process_without_workers() -> None:
    first, second = cursor(Everywhere), cursor(Everywhere, num_workers=0, worker_init_fn=None)
    take(first, 3)
    second.load(first.position())
    numbers = [[row[0] for row in batch] for (batch,), epoch in take(second, 4)]
    assert second.strayed
    assert numbers == [[row[0] for row in batch] for (batch,), epoch in take(first, 4)]


def test_a_generator_that_is_not_there_is_told() -> None:
    """One that the data set has made itself since."""
    first = cursor(Own)
    take(first, 4)
    second = cursor(Own)
    second.loader.dataset.hold["more"] = random.Random(1)
    second.load(first.position())
    assert second.strayed
