"""Where the data stand: the position of any batch, taken up elsewhere, gives the batches that would have followed."""

import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from resilient_train.errors import ConfigError
from resilient_train.frameworks.roles import Objects, Workers
from resilient_train.frameworks.torch import data as torch_data
from resilient_train.frameworks.torch.pass_order import TorchPassOrder
from resilient_train.session.redo.loader import Cursor


class Shuffling:
    """Draws its order from the global random state, as a DataLoader's RandomSampler does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.loaded = 0

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.size))
        random.shuffle(order)
        for item in order:
            self.loaded += 1
            yield item


class Distributed:
    """Has a sampler that wants to be told the epoch."""

    class Sampler:
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    def __init__(self, size: int) -> None:
        self.sampler, self.size = Distributed.Sampler(), size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter([(self.sampler.epoch, item) for item in range(self.size)])


class Stateful:
    """Keeps its own position, as torchdata's StatefulDataLoader."""

    def __init__(self, size: int) -> None:
        self.size, self.place, self.resumed = size, 0, False

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.place = 0
        self.resumed = False
        while self.place < self.size:
            self.place += 1
            yield self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.resumed = state["place"], True


class Data:
    """Without torch."""

    def random_state(self) -> bytes:
        return pickle.dumps(random.getstate())

    def restore_random_state(self, state: bytes) -> None:
        random.setstate(pickle.loads(state))

    def states(self, generators: Any) -> bytes:
        return pickle.dumps([each.get_state() for each in generators])

    def restore_states(self, generators: Any, states: bytes) -> None:
        for each, state in zip(generators, pickle.loads(states), strict=True):
            each.set_state(state)

    def look(self, batch: Any) -> bytes:
        return repr(batch).encode()

    def pack(self, tree: Any) -> bytes:
        return pickle.dumps(tree)

    def unpack(self, packed: bytes) -> Any:
        return pickle.loads(packed)

    def workers(self, loader: Any) -> Workers:
        there = getattr(loader, "workers", None)
        return Workers.MADE_ANEW if there is None else Workers.THERE if there else Workers.KEPT

    def iterate(self, loader: Any, told: Any, numbers: Any, *, anew: bool) -> Iterator[Any]:
        if anew and hasattr(loader, "workers"):
            loader.workers = False
        return iter(loader)

    def fast_forward(
        self, loader: Any, batches: int, samples: int, begin: Callable[[Any], Iterator[Any]], numbers: Any
    ) -> Iterator[Any]:
        iterator = begin(loader)
        next(itertools.islice(iterator, batches + samples, batches + samples), None)
        return iterator


def cursor(loader: Any) -> Cursor:
    made = Cursor(loader, Data())
    made.looks = True
    return made


def take(position: Cursor, count: int) -> list[tuple[Any, int]]:
    found = []
    for _ in range(count):
        batch = position.next()
        random.random()  # the training draws as well
        found.append((batch.value, batch.epoch))
    return found


@pytest.mark.parametrize("labels", ["as before", "others"])
def test_the_first_batch_of_a_pass_is_compared_with_what_it_was(labels: str) -> None:
    """A loop makes its data anew between two passes: the batch before is one of the old data, and says nothing."""
    first, second = (cursor([1, 2]) for _ in range(2))
    take(first, 2)
    before = first.position()
    assert not first.begun
    first.loader[:] = [3, 4]
    assert take(first, 1) == [(3, 1)]
    begun = first.begun
    assert begun
    second.load(before._replace(begun=begun))
    assert not second.strayed
    second.loader[:] = [3, 4] if labels == "as before" else [1, 2]
    take(second, 1)
    assert second.strayed == (labels == "others")
    second.strayed = False
    take(second, 2)
    assert not second.strayed, "of the next pass nothing is known"


class Persistent(Shuffling):
    """Draws a seed for its workers when it makes them, and not when it goes on with them."""

    workers = False

    def __iter__(self) -> Iterator[int]:
        if not self.workers:
            random.random()
            self.workers = True
        return iter(super().__iter__())


class CountsItsPasses(Distributed):
    """Over what its sampler is told, as the loader of Lightning Fabric does."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._num_iter_calls = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.sampler.set_epoch(3 * self._num_iter_calls)
        self._num_iter_calls += 1
        return super().__iter__()


LOADERS = [
    lambda: CountsItsPasses(3),
    lambda: [10, 11, 12],
    lambda: Shuffling(4),
    lambda: Persistent(4),
    lambda: Distributed(3),
    lambda: Stateful(3),
]


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize("done", range(10))
def test_going_on_elsewhere(make: Any, done: int) -> None:
    random.seed(1)
    first = cursor(make())
    take(first, done)
    state, own = first.position(), random.getstate()
    expected = take(first, 8)

    random.seed(99)  # another process, somewhere else
    second = cursor(make())
    second.load(state)
    random.setstate(own)
    assert take(second, 8) == expected
    # Not by bytes: to pickle, one text in two places is not what two equal ones are.
    ends = [each.position() for each in (first, second)]
    assert len({each._replace(own=b"") for each in ends}) == 1
    assert len({repr(each.own and pickle.loads(each.own)) for each in ends}) == 1


def test_a_loader_that_keeps_its_place_says_when_its_pass_is_over() -> None:
    """A job of another size goes on with the next one then."""

    class Long(Stateful):
        def __len__(self) -> int:
            return self.size

    place = cursor(Long(3))
    told = []
    for _ in range(5):
        take(place, 1)
        told.append(place.is_over(place.position().own))
    assert told == [False, False, True, False, False]


@pytest.mark.parametrize("done", [2, 3, 7])
def test_what_a_loader_counts_goes_back_in_its_process(done: int) -> None:
    """Also to before it had counted anything."""
    first = cursor(CountsItsPasses(3))
    start = first.position()
    begun = take(first, done)
    there = first.position()
    further = take(first, 6)
    first.load(there)
    assert take(first, 6) == further
    first.load(start)
    assert take(first, done) == begun


@pytest.mark.parametrize("done", range(1, 8))
def test_a_loader_that_counts_its_passes_is_gone_through_elsewhere_too(done: int) -> None:
    """In an evaluation, in the middle of a pass: the next pass is another one by that."""
    first, second = cursor(CountsItsPasses(3)), cursor(CountsItsPasses(3))
    take(first, done)
    assert len([*first.loader]) == 3
    state = first.position()
    further = take(first, 6)
    second.load(state)
    assert take(second, 6) == further
    assert not second.strayed


def test_epochs_are_counted() -> None:
    assert take(cursor([1, 2]), 5) == [(1, 0), (2, 0), (1, 1), (2, 1), (1, 2)]


def test_epochs_are_told_to_the_sampler() -> None:
    assert [value for value, _ in take(cursor(Distributed(2)), 4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


class Wrapped:
    """What has a sampler, or a batch sampler, of another one's, as torch's BatchSampler and accelerate's shards do."""

    def __init__(self, **inner: Any) -> None:
        vars(self).update(inner)


class Counted:
    """Says how often it was told which epoch; knows a generator of its own."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.generator = Generator()

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)


class Generator:
    state = 0

    def get_state(self) -> int:
        return self.state

    def set_state(self, state: int) -> None:
        self.state = state


@pytest.mark.parametrize("deep", range(4))
def test_a_sampler_is_found_however_deep_it_lies(deep: int) -> None:
    inner = Counted()
    batches = Wrapped(sampler=inner)
    for _ in range(deep):
        batches = Wrapped(batch_sampler=batches, sampler=inner)
    loader = Listed(sampler=Wrapped(), batch_sampler=batches)
    first = cursor(loader)
    take(first, 5)
    assert inner.told == [0, 1, 2], "of each pass, once"
    inner.generator.state = 7
    take(first, 2)
    position = first.position()
    inner.generator.state = 9
    first.load(position)
    assert inner.generator.state == 7, "its order is drawn from there"


def test_a_dataset_is_told_the_epoch() -> None:
    loader = Listed(dataset=Counted())
    take(cursor(loader), 3)
    assert loader.dataset.told == [0, 1]


def test_samplers_that_know_each_other() -> None:
    one, other = Counted(), Wrapped()
    one.sampler, other.batch_sampler = other, one
    take(cursor(Listed(sampler=one)), 1)
    assert one.told == [0]


class Listed(Wrapped):
    """Two batches an epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 20))
def test_every_sample_once_an_epoch(size: int, done: int, more: int) -> None:
    random.seed(done)
    first = cursor(Shuffling(size))
    seen = [value for value, _ in take(first, done)]
    second = cursor(Shuffling(size))
    own = random.getstate()
    second.load(first.position())
    random.setstate(own)
    seen += [value for value, _ in take(second, more)]
    for start in range(0, len(seen) - size + 1, size):
        assert sorted(seen[start : start + size]) == list(range(size))


def test_loading_leaves_the_random_state_as_it_was() -> None:
    first = cursor(Shuffling(5))
    take(first, 3)
    random.seed(7)
    own = random.getstate()
    second = cursor(Shuffling(5))
    second.load(first.position())
    assert random.getstate() == own


def test_a_position_can_be_taken_up_twice() -> None:
    first = cursor(Shuffling(5))
    take(first, 2)
    state, own = first.position(), random.getstate()
    ahead = take(first, 4)
    first.load(state)
    random.setstate(own)
    assert take(first, 4) == ahead


def test_no_loader() -> None:
    position = cursor(None)
    assert take(position, 2) == [(None, 0), (None, 0)]
    position.load(position.position())
    assert position.next() == (None, 0)


def test_an_empty_loader_is_an_error_and_no_loop() -> None:
    with pytest.raises(ConfigError, match="no batch in a whole epoch"):
        cursor([]).next()


def test_a_loader_must_be_iterable() -> None:
    with pytest.raises(ConfigError, match="loader is a int"):
        cursor(3)


@pytest.mark.parametrize("loader", [(each for each in [1]), map(str, [1]), itertools.cycle([1]), iter([1])])
def test_what_can_be_gone_through_once_is_refused(loader: Any) -> None:
    with pytest.raises(ConfigError, match="which can't be started again"):
        cursor(loader)


def test_a_loader_of_accelerates_is_refused() -> None:
    prepared = type("DataLoaderShard", (DataLoader,), {"__module__": "accelerate.data_loader"})
    with pytest.raises(ConfigError, match=r"loader is a DataLoaderShard of accelerate's, .* leave loader= out"):
        cursor(prepared([1, 2]))


class Forever:
    """Never ends, and draws the order of each inner pass in the middle of the training."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from Shuffling(20)


class Noisy:
    """Draws for each batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return ((item, random.random()) for item in range(self.size))


def brought(first: Cursor, loader: Any, own: Any = None) -> Cursor:
    """To the same place, in another process."""
    state, numbers = first.position(), random.getstate()
    random.seed(99)
    second = Cursor(loader, Data(), own)
    second.load(state)
    random.setstate(numbers)
    return second


@pytest.mark.parametrize(("done", "strays"), [(5, False), (20, False), (25, True), (45, True)])
def test_a_place_that_is_not_found_is_seen(done: int, strays: bool) -> None:
    random.seed(1)
    first = cursor(Forever())
    take(first, done)
    assert brought(first, Forever()).strayed is strays


class CountsBehind(Stateful):
    """So the batch that it has given last is the next one for who takes its place."""

    def __init__(self, batches: Sequence[int]) -> None:
        super().__init__(len(batches))
        self.batches = batches

    def __iter__(self) -> Iterator[int]:
        if not self.resumed:
            self.place = 0
        self.resumed = False
        while self.place < self.size:
            yield self.batches[self.place]
            self.place += 1


@pytest.mark.parametrize(
    ("loader", "strays"),
    [(Stateful(9), False), (CountsBehind(range(9)), True), (CountsBehind([3, 3, 5, 6, 6, 7, 7, 7, 7]), False)],
)
def test_a_loader_that_keeps_its_place_and_gives_a_batch_twice(loader: Stateful, strays: bool) -> None:
    """Where batches are alike in any case, nothing is said."""
    first = cursor(loader)
    take(first, 4)
    second = brought(first, copy(loader))
    second.looks = True
    take(second, 1)
    assert second.strayed is strays
    first, second = cursor(Stateful(1)), cursor(Stateful(1))
    take(first, 1)
    second.load(first.position())
    take(second, 1)
    assert not second.strayed, "it is the first one of the next pass"


def test_fewer_batches_than_there_were_are_seen() -> None:
    first = cursor([1, 2, 3])
    take(first, 3)
    assert brought(first, [1, 2]).strayed


def test_another_augmentation_is_no_other_place() -> None:
    random.seed(1)
    first = cursor(Noisy(9))
    take(first, 5)
    second = brought(first, Noisy(9))
    assert not second.strayed
    numbers = random.getstate()
    following = take(second, 3)
    random.setstate(numbers)
    assert take(first, 3) == following


def test_a_batch_that_its_body_has_written_into() -> None:
    first = cursor(Lists())
    first.next().value[0] = 7
    assert not brought(first, Lists()).strayed


class Lists:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1], [2]])


class Own:
    """A generator of the rank's own, in ``rank_state``."""

    def __init__(self, draws: random.Random) -> None:
        self.draws = draws

    def led_to(self, _: Any) -> tuple[str, ...]:
        return ()

    def in_samples(self, _: Any) -> bool:
        return False

    def entries(self, _: Any) -> dict[str, bytes]:
        return {"draws": pickle.dumps(self.draws.getstate())}

    def own(self) -> dict[str, bytes]:
        return self.entries(None)

    def restore(self, entries: dict[str, bytes]) -> None:
        for state in entries.values():
            self.draws.setstate(pickle.loads(state))


def test_what_is_drawn_from_generators_of_the_ranks_own_says_nothing() -> None:
    class Drawing:
        def __init__(self, seed: int) -> None:
            self.draws = random.Random(seed)

        def __iter__(self) -> Iterator[float]:
            return (self.draws.random() for _ in range(9))

    one, other = Drawing(1), Drawing(2)
    first = Cursor(one, Data(), Own(one.draws))
    first.looks = True
    take(first, 4)
    one.draws.random()  # in a body
    assert not brought(first, other, Own(other.draws)).strayed


class Weights:
    """What bodies find of the samples, and a sampler orders them by."""

    def __init__(self) -> None:
        self.of = dict.fromkeys(range(12), 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {"of": list(self.of.values())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.of = dict(enumerate(state["of"]))


class ByWeight:
    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self.weights.of, key=lambda sample: (self.weights.of[sample], sample)))


@pytest.mark.parametrize("registered", ["rank_extra", "extra"])
@pytest.mark.parametrize("done", [1, 12, 13, 20, 30])
def test_an_order_by_what_bodies_change_is_drawn_from_what_it_was(done: int, registered: str) -> None:
    """The state itself is put back by others, before that or behind it."""

    def process() -> tuple[Weights, Cursor, TorchPassOrder]:
        weights = Weights()
        objects = Objects((torch.nn.Linear(1, 1),), ())._replace(**{registered: {"weights": weights}})
        order = TorchPassOrder(objects)
        made = Cursor(ByWeight(weights), Data(), order)
        made.looks = True
        return weights, made, order

    def step(weights: Weights, position: Cursor) -> int:
        sample: int = position.next().value
        weights.of[sample] += (sample * 7 + 3) % 5
        return sample

    weights, first, order = process()
    for _ in range(done):
        step(weights, first)
    state, position = order.entries(first.loader), first.position()
    later, second, others = process()
    before = later.state_dict()
    second.load(position)
    assert later.state_dict() == before, "as it was found"
    others.restore(state)
    assert not second.strayed
    assert [step(later, second) for _ in range(30)] == [step(weights, first) for _ in range(30)]


class Stream(IterableDataset):
    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.labels)


class Labels(torch.nn.Module):
    def __init__(self, labels: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("labels", labels)


class Holder(Weights):
    """``more``: what it holds, or what its state is made of."""

    def __init__(self, more: Any) -> None:
        super().__init__()
        self.more = more


class Given(Weights):
    def state_dict(self) -> dict[str, Any]:
        return {"global": GLOBAL}


class ByGlobal(ByWeight):
    def __iter__(self) -> Iterator[int]:
        return iter([*map(int, GLOBAL)])


def led_to(thing: Any, more: Any, loader: Any = None) -> bool:
    loader = ByWeight(Weights()) if loader is None else loader
    loader.more = more
    objects = Objects((torch.nn.Linear(1, 1),), ())._replace(extra={"weights": thing})
    return bool(TorchPassOrder(objects).led_to(loader))


def test_what_a_loader_leads_to() -> None:
    tensor, array, numbers, module = torch.zeros(2, 3), np.zeros(3), {"pivot": 3}, torch.nn.Linear(1, 1)
    thing = Weights()
    assert led_to(thing, thing)
    assert led_to(thing, lambda: thing)
    assert led_to(Holder(array), [array[1:]])
    assert led_to(Holder(tensor), tensor[1])
    assert led_to(Holder(tensor.numpy()), tensor)
    assert led_to(Holder(numbers), numbers), "Python's collector does not know it"
    assert led_to(module, module)
    assert led_to(Given(), GLOBAL)
    assert led_to(Given(), None, ByGlobal(Weights()))


def test_what_a_loader_does_not_lead_to() -> None:
    module = torch.nn.Linear(1, 1)
    thing = Holder(module)
    assert not led_to(Holder(10**9), 10**9)
    assert not led_to(Holder(step_by), step_by)
    assert not led_to(Holder((1, "a", torch.float32)), (1, "a", torch.float32))
    assert not led_to(thing, torch.nn.Linear(1, 1))
    assert not led_to(Given(), torch.zeros(3))


class Pool(Dataset[Any]):
    """As many samples as the weights know; each is asked for its weight."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.epoch = weights, 0

    def __len__(self) -> int:
        return self.count()

    def count(self) -> int:
        return len(self.weights.of)

    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, self.weights.of[number]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Shuffled:
    """Torch's asks at the end of a pass once more how many there are."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.pool)).tolist())

    def __len__(self) -> int:
        return len(self.pool)


class Counting(Pool):
    def __getitem__(self, number: int) -> tuple[int, float]:
        return number, self.weights.of[number] * (1 + self.epoch)


@pytest.mark.parametrize("registered", ["rank_extra", "extra"])
@pytest.mark.parametrize("workers", ["none", "each pass", "kept"])
@pytest.mark.parametrize("done", [2, 7, 9, 15])
def test_a_data_set_that_bodies_change(done: int, workers: str, registered: str) -> None:
    """They make it longer, and so its order another one; workers hold what there was when they were forked."""

    def process() -> tuple[Weights, Cursor, TorchPassOrder]:
        weights = Weights()
        objects = Objects((torch.nn.Linear(1, 1),), ())._replace(**{registered: {"weights": weights}})
        order = TorchPassOrder(objects)
        more = {"num_workers": 1, "persistent_workers": workers == "kept", "prefetch_factor": 2}
        torch.manual_seed(7)
        pool = Counting(weights)
        order_of: dict[str, Any] = {"shuffle": True} if workers == "kept" else {"sampler": Shuffled(pool)}
        made = DataLoader(pool, batch_size=2, **order_of, **({} if workers == "none" else more))
        return weights, Cursor(made, torch_data, order), order

    def step(weights: Weights, position: Cursor) -> list[Any]:
        numbers, values = position.next().value
        for number in numbers.tolist():
            weights.of[number] += (number * 7 + 3) % 5
        if workers != "kept":
            weights.of[len(weights.of)] = 1.0
        return [numbers.tolist(), values.tolist()]

    weights, first, order = process()
    first.looks = True
    for _ in range(done):
        step(weights, first)
    state, position, random_state = order.entries(first.loader), first.position(), torch_data.random_state()
    expected = [step(weights, first) for _ in range(16)]
    weights, second, order = process()
    second.looks = True
    order.restore(state)
    second.load(position)
    torch_data.restore_random_state(random_state)
    assert not second.strayed
    assert [step(weights, second) for _ in range(16)] == expected


@pytest.mark.parametrize("done", [3, 6, 8])
def test_a_generator_from_which_an_evaluation_draws_too(done: int) -> None:
    """As on PyTorch's page on reproducibility: one for both loaders."""

    def process() -> tuple[Cursor, DataLoader[Any]]:
        generator = torch.Generator().manual_seed(3)
        samples = list(range(12))
        made = Cursor(DataLoader(samples, batch_size=2, shuffle=True, generator=generator), torch_data)
        made.looks = True
        return made, DataLoader(samples, batch_size=6, generator=generator)

    def step(place: Cursor, evaluation: DataLoader[Any]) -> list[int]:
        if place.place[1] in (2, 3):
            assert len([*evaluation]) == 2
        numbers: list[int] = place.next().value.tolist()
        return numbers

    first, evaluation = process()
    for _ in range(done):
        step(first, evaluation)
    second, others = process()
    second.load(first.position())
    assert not second.strayed
    assert [step(second, others) for _ in range(20)] == [step(first, evaluation) for _ in range(20)]


def test_a_pass_that_ends_before_its_place_is_told() -> None:
    """Torch's sampler makes more of a data set that has grown in the pass; nothing says how much that was when."""
    weights = Weights()
    order = TorchPassOrder(Objects((torch.nn.Linear(1, 1),), (), rank_extra={"weights": weights}))
    first = Cursor(DataLoader(Pool(weights), batch_size=2, shuffle=True), torch_data, order)
    first.looks = True
    for _ in range(7):
        first.next()
        weights.of[len(weights.of)] = 1.0
    second = Cursor(DataLoader(Pool(weights), batch_size=2, shuffle=True), torch_data, order)
    second.looks = True
    second.load(first.position())
    assert second.strayed


@pytest.mark.parametrize("kind", [TensorDataset, Stream])
def test_samples_are_no_order(kind: Any) -> None:
    """What bodies make of soft labels may be large, and a sampler that knows its data set does not draw from them."""
    labels = torch.zeros(8)
    objects = Objects((torch.nn.Linear(1, 1),), ())._replace(extra={"labels": Labels(labels)})
    loader = DataLoader(kind(labels), batch_size=2)
    assert bool(TorchPassOrder(objects).led_to(loader)) is (kind is Stream)
    assert TorchPassOrder(objects).in_samples(loader)
    forks = DataLoader(kind(labels), batch_size=2, num_workers=1)
    assert TorchPassOrder(objects).led_to(forks)
    assert not TorchPassOrder(objects).in_samples(forks), "they are those of the pass's begin"


GLOBAL = torch.zeros(3)


def step_by(number: int) -> int:
    return number


def test_without_an_agent_nothing_is_looked_at() -> None:
    first = Cursor([1, 2], Data())
    take(first, 1)
    assert first.position().last == b""
