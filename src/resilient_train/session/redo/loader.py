"""Where the data stand: batches in order, and the position from which another process can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from resilient_train.errors import ConfigError, UsageError
from resilient_train.frameworks.roles import Data, PassOrder, Workers
from resilient_train.session.redo.worker_numbers import WorkerNumbers


class Batch(NamedTuple):
    """A batch and the pass over the data that it belongs to."""

    value: Any
    epoch: int


NO_BATCH = Batch(None, 0)


class Drawn(NamedTuple):
    """A batch of the open window, the random state right after it was drawn (None: the window's start has it), and the
    place in the data behind it: pass, and number of the next batch.
    """

    batch: Batch
    random: bytes | None
    place: tuple[int, int]


class DataPosition(NamedTuple):
    """Which batch comes next: pass over the data, batches taken of it, and the random state that the pass began with.

    ``own``: what the loader itself says of its position, the states of its generators, and what else of the user's
    the pass's order is drawn from, packed; empty if there is nothing of it.
    ``reused``: the pass began, or will begin, with workers that are there from the pass before.
    """

    epoch: int
    taken: int
    random: bytes
    own: bytes
    skipped: int = 0
    """Samples of this rank at the head of the pass that are left out: used already, in a world of another size."""
    reused: bool = False
    last: bytes = b""
    """A look at the batch before this position, as it was drawn; empty where there is nothing to see."""
    drawn_from: bytes = b""
    """The random state from which that one was drawn, if drawing it moved the random numbers."""
    begun: bytes = b""
    """A look at the first batch of the next pass to begin, if it has been drawn from here before."""
    workers: bytes = b""
    """What its workers draw from, see ``WorkerNumbers``."""


_PASSES = "_num_iter_calls"
"""Lightning Fabric's loader counts its passes here, and tells its sampler that number as one begins, whatever the
Session has told it.
"""
_NOWHERE = DataPosition(0, 0, b"", b"")


class MadeWorkers(NamedTuple):
    """With what the workers were made that the loader keeps: the pass, what they may read then of ``drawn_by``, and
    the random numbers that their seed was drawn from. They hold it for good, also in later passes.
    """

    epoch: int = -1
    entries: Mapping[str, bytes] = {}
    random: bytes = b""
    generators: bytes = b""


class Cursor:
    """Iterates over ``loader`` for ever, epoch after epoch, and can say and take up its position.

    A loader with ``state_dict()`` (torchdata's StatefulDataLoader) keeps its position itself. Any other loader is
    positioned by batch number: the order of an epoch is drawn again from the random state that it began with, and the
    batches before the position are skipped (by index, where the loader is a DataLoader).
    """

    def __init__(self, loader: Any, data: Data, order: PassOrder | None = None) -> None:
        """``order``: if something is registered that the loader may draw from (its sampler's generator, or weights)."""
        if loader is not None and not hasattr(loader, "__iter__"):
            raise ConfigError(f"loader is a {type(loader).__qualname__}, which can't be iterated over")
        if _used_up_once(loader):
            raise ConfigError(
                f"loader is a {type(loader).__qualname__}, which can't be started again, so no process finds its place "
                "in it: give the loader itself, or an object whose __iter__ makes a new one (docs/how-to/load-data.md)"
            )
        if any(each.__module__.partition(".")[0] == "accelerate" for each in type(loader).__mro__):
            raise ConfigError(
                f"loader is a {type(loader).__qualname__} of accelerate's, which communicates as a pass begins, and is "
                "a batch ahead: leave loader= out, loop over it yourself, and give the bodies to session.call "
                "(docs/how-to/trainers.md)"
            )
        workers = getattr(loader, "num_workers", 0)
        if workers and getattr(loader, "in_order", True) is False:
            raise ConfigError(
                f"loader is a {type(loader).__qualname__} with in_order=False: it gives batches as its workers are "
                "ready, so no process finds its place in it; leave in_order out"
            )
        self.loader = loader
        self._source = loader
        """What a pass is begun with: the loader, or one that stands for it, whose workers are kept."""
        self._stale = False
        """Workers that it has have drawn for batches that are to be drawn once more."""
        self._numbers = WorkerNumbers(workers if type(workers) is int else 0)
        self._data = data
        self._stateful = callable(getattr(loader, "state_dict", None)) and callable(
            getattr(loader, "load_state_dict", None)
        )
        self._iterator: Iterator[Any] | None = None
        self._epoch = 0
        self._index = 0
        self._skipped = 0
        self._epoch_random = b""
        self.looks = False
        """Somebody publishes the position, so each batch is looked at."""
        self.strayed = False
        """The position that was taken up last was not found: the batch before it is another one here."""
        self._last = self._drawn_from = self._expected = self._newest = b""
        self._goes_on = self._repeats = False
        self.begun = b""
        """A look at the first batch of a pass, if that was drawn last."""
        self._reused: bool | None = None
        """See ``DataPosition``; None: no pass has begun, and the loader is as the script has made it."""
        self._generators = _generators_of(loader)
        self._passes: tuple[int, ...] = ()
        """What its loader had counted when the pass began; (): it counts none."""
        self._told_passes: tuple[int, ...] = ()
        """The same, and what it has counted, as it was told last: an evaluation goes through it as well."""
        self._epoch_generators = b""
        """Their states when the pass began, and ..."""
        self._told_states = b""
        """... when its place was told last."""
        self._order = order
        self._before: dict[str, bytes] = {}
        """What it may draw from, when the pass began, as long as it has given no batch."""
        self._drawn_by: dict[str, bytes] = {}
        """What its order was drawn from: of that what the pass moved on before its first batch, and what the loader
        leads to. A body may change it later.
        """
        self._forked = MadeWorkers()
        self._packed: bytes | None = None
        """A position's ``own``, the same for the whole pass unless the loader itself says where it is."""

    def next(self) -> Batch:
        """The next batch; a new epoch begins where one ends. Raises ConfigError for a loader that gives nothing."""
        if self.loader is None:
            return NO_BATCH
        if self._iterator is None:
            self._begin_epoch()
        assert self._iterator is not None
        drawn_from = self._data.random_state() if self._looks else b""
        self._numbers.draw()
        try:
            value = next(self._iterator)
        except StopIteration:
            if self._index == 0 and not self._skipped:
                raise ConfigError("the loader gave no batch in a whole epoch") from None
            self._epoch, self._index, self._skipped, self._iterator = self._epoch + 1, 0, 0, None
            self._reused = self._data.workers(self.loader) is not Workers.MADE_ANEW
            return self.next()
        if self._before and self._order is not None:
            now, before, self._before = self._entries(), self._before, {}
            led_to = self._order.led_to(self.loader)
            self._drawn_by = {name: was for name, was in before.items() if now[name] != was or name in led_to}
            self._packed = None
        self._index += 1
        if self._looks:  # now: a body may write into it
            self._last = self._data.look(value)
            self._numbers.drawn(self._last)
            self.begun = self._last if self._index == 1 else b""
            if self.begun:
                self.strayed = self.strayed or self._expected not in (b"", self.begun)
                self._expected = b""
            self._drawn_from = drawn_from if drawn_from != self._data.random_state() else b""
        elif self.looks:
            self._look_for_repeats(self._data.look(value))
        self.strayed = self._numbers.are_missing() or self.strayed
        return Batch(value, self._epoch)

    def _look_for_repeats(self, look: bytes) -> None:
        """Of a loader that keeps its place: brought back, does it give the batch once more that was the last (for it
        counts behind its ``yield``)? Where one batch is like the one before in any case, that says nothing.
        """
        self.strayed = self._goes_on and look == self._last != b""
        self._repeats = self._repeats or (not self._goes_on and look == self._newest)
        self._goes_on, self._newest, self._last = False, look, b"" if self._repeats else look

    def sources(self) -> tuple[Any, ...]:
        """What gives the batches."""
        return self._iterator, self.loader, self._source

    @property
    def place(self) -> tuple[int, int]:
        """Pass over the data, and the number of its next batch."""
        return self._epoch, self._index

    def begins_pass(self) -> bool:
        """Whether the next batch is the first one of a pass, as far as the loader knows how many there are."""
        if self.loader is None:
            return False
        try:
            return self._index == 0 or self._index >= len(self.loader)
        except (TypeError, NotImplementedError):  # it has no length
            return False

    def position(self) -> DataPosition:
        """The position before the next batch."""
        if self.loader is None:
            return _NOWHERE
        own = self._told_of_pass() if self._index or self._skipped else self._told_of_next_pass()
        place = self._epoch, self._index, self._epoch_random, own, self._skipped, self._reuses()
        return DataPosition(*place, self._last, self._drawn_from, workers=self._numbers.packed())

    def _told_of_pass(self) -> bytes:
        before, self._told_states = (self._told_states, self._told_passes), self._states()
        self._told_passes = (*self._passes, *_passes_of(self.loader))
        now = self._told_states
        if self._stateful and self._index:
            return self._pack(self.loader.state_dict(), self._epoch_generators, now, self._drawn_by)
        # Another loader may draw from it, say that of an evaluation.
        if self._packed is None or (now, self._told_passes) != before:
            self._packed = self._pack(None, self._epoch_generators, now, self._drawn_by, self._told_passes)
        return self._packed

    def states(self) -> bytes:
        """Those of the loader's own generators, as they are now. Empty where it has none, or keeps its place itself."""
        return b"" if self._stateful else self._states()

    def told_states(self) -> bytes:
        """The same, as the newest ``position`` has them."""
        return b"" if self._stateful else self._told_states

    def _states(self) -> bytes:
        return self._data.states(self._generators) if self._generators else b""

    def _told_of_next_pass(self) -> bytes:
        now = self._told_states = self._states()
        return self._pack(None, now, now, {}, _passes_of(self.loader))

    def _pack(
        self, inner: Any, generators: bytes, now: bytes, drawn_by: dict[str, bytes], passes: tuple[int, ...] = ()
    ) -> bytes:
        if inner is None and not generators and not drawn_by and self._forked.epoch < 0 and not passes:
            return b""
        over = inner is not None and self.begins_pass()
        own = {"inner": inner, "over": over, "generators": generators, "now": now, "own": drawn_by, "passes": passes}
        return self._data.pack({**own, "forked": self._forked._asdict()})

    def own_of_newcomer(self, own: bytes) -> bytes:
        """That of a rank that was not there, which has what the script has made; but passes are counted alike."""
        passes = tuple(self._data.unpack(own).get("passes", ())) if own else ()
        now = self._states()
        return self._pack(None, now, now, {}, passes)

    def keeps_place(self, own: bytes) -> bool:
        """Whether in a position's ``own`` the loader itself says where it was (a StatefulDataLoader in an epoch)."""
        return bool(own) and self._data.unpack(own)["inner"] is not None

    def is_over(self, own: bytes) -> bool:
        """Whether all batches of the pass were drawn there, by a loader that says itself where it was."""
        return bool(own) and self._data.unpack(own).get("over", False)

    def _reuses(self) -> bool:
        return self._has_workers(self._source) if self._reused is None else self._reused

    def _has_workers(self, loader: Any) -> bool:
        return self._data.workers(loader) is Workers.THERE

    def load(self, position: DataPosition) -> None:
        """Takes up a position. The global random state is left as it was, and what else the order was drawn from."""
        self._epoch, self._index, self._epoch_random, packed, self._skipped, self._reused, *drawn = position
        self._last, self._drawn_from, self._expected, workers = drawn
        self._iterator, self.strayed = None, False
        self._numbers.take_up(workers)
        self._source = self.loader
        self._stale = True
        own = self._data.unpack(packed) if packed else {"inner": None, "generators": b"", "now": b"", "own": {}}
        self._epoch_generators, self._drawn_by, self._before = own["generators"], own["own"], {}
        self._forked = MadeWorkers(**own.get("forked", {}))
        self._packed = None
        passes = tuple(own.get("passes", ()))
        self._passes = passes[:1]
        if self._epoch_generators:
            self._data.restore_states(self._generators, self._epoch_generators)
        if self.loader is None or (self._index == 0 and not self._skipped):
            _set_passes(self.loader, passes[-1:])
            return
        self._set_epoch()
        _set_passes(self.loader, passes[:1])
        now, held = self._data.random_state(), _if_told(self._entries) if self._drawn_by else self._own_now()
        if self._order is not None:
            self._order.restore(self._drawn_by)
        if self._stateful:
            assert own["inner"] is not None, "a stateful loader's position without its state"
            self.loader.load_state_dict(own["inner"])
            self._iterator = self._data.iterate(self.loader, self._numbers.told, self._numbers.behind(), anew=True)
            self._goes_on, self._stale = True, False
        else:
            self._data.restore_random_state(self._epoch_random)
            self._iterator = self._go_on()
            if own["now"]:
                self._data.restore_states(self._generators, own["now"])
        _set_passes(self.loader, passes[-1:])
        self._data.restore_random_state(now)
        self._put_back(held)

    @property
    def _looks(self) -> bool:
        """A loader that keeps its position itself is believed, but for one thing (``_look_for_repeats``)."""
        return self.looks and not self._stateful

    def _go_on(self) -> Iterator[Any]:
        """From the position; the batch before it is drawn once more where it is known, and says whether this is it. Of
        workers, one of each: all of them begin with the same generators, and only those that have drawn with each since
        are others.

        It is drawn from the random numbers from which it was drawn: another augmentation is no other place. What the
        rank's own generators had then nobody knows, so a batch that is drawn from them says nothing; nor does one that
        is made of what bodies may have changed since.
        """
        looks = (self._numbers.undraw() or [self._last]) if self._last else []
        place = self._index - len(looks), self._skipped
        iterator = self._data.fast_forward(self.loader, *place, self._begin, self._numbers.behind())
        says = self._order is None or not self._order.in_samples(self.loader)
        for number, look in enumerate(looks, 1):
            if number == len(looks) and self._drawn_from:
                self._data.restore_random_state(self._drawn_from)
            before = self._own_now()
            self._numbers.draw()
            batch = next(iterator, NO_BATCH)
            self._numbers.drawn(look)
            other = look and self._data.look(batch) != look and before == self._own_now()
            self.strayed = self.strayed or batch is NO_BATCH or bool(other and says)
        self.strayed = self._numbers.are_missing() or self.strayed
        return iterator

    def _entries(self) -> dict[str, bytes]:
        return self._order.entries(self.loader) if self._order is not None else {}

    def _own_now(self) -> dict[str, bytes]:
        return _if_told(self._order.own) if self._order is not None else {}

    def _begin_epoch(self) -> None:
        self._set_epoch()
        self._epoch_random = self._data.random_state()
        self._epoch_generators = self._states()
        self._passes = _passes_of(self.loader)
        self._before, self._drawn_by, self._packed, self._goes_on = self._entries(), {}, None, False
        self._reused = self._reuses()
        anew = self._data.workers(self._source) is Workers.MADE_ANEW
        self._numbers.begin_pass(anew=anew)
        if not anew and not self._reused:
            led_to = self._order.led_to(self.loader) if self._order is not None else ()
            read = {name: each for name, each in self._before.items() if name in led_to}
            self._forked = MadeWorkers(self._epoch, read, self._epoch_random, self._epoch_generators)
        # Workers that are there, and of this place, have them.
        made = self._reused and (self._stale or not self._has_workers(self._source))
        numbers = self._numbers.behind() if made else {}
        self._iterator = self._data.fast_forward(self._source, 0, 0, self._begin, numbers)

    def _begin(self, loader: Any) -> Iterator[Any]:
        """Iterates over ``loader`` with the draws that this pass once began with.

        A loader that makes workers draws a seed for them. One that keeps them (``persistent_workers``) does so in the
        first pass of its process only, and a process that takes a place in a later one would draw once more.
        """
        if self._reused and (self._stale or not self._has_workers(loader)):
            self._make_workers(loader)
        self._stale = False
        if self._data.workers(loader) is not Workers.MADE_ANEW:
            self._source = loader
        return self._data.iterate(loader, self._numbers.told, {}, anew=not self._reused)

    def _make_workers(self, loader: Any) -> None:
        """With what those of the process were made whose place this one takes. What it draws for them, and for the
        first batches, does not count.
        """
        now, states = self._data.random_state(), self._states()
        forked = self._forked if self._forked.epoch >= 0 else MadeWorkers(self._epoch)
        entries = _if_told(self._entries) if forked.entries else self._own_now()
        if self._order is not None:
            self._order.restore(forked.entries)
        if forked.epoch != self._epoch:
            self._set_epoch_of_data(forked.epoch)
        if forked.random:
            self._data.restore_random_state(forked.random)
        if forked.generators:
            self._data.restore_states(self._generators, forked.generators)
        self._data.iterate(loader, self._numbers.told, {}, anew=True)
        if forked.epoch != self._epoch:
            self._set_epoch_of_data(self._epoch)
        self._data.restore_random_state(now)
        if states:
            self._data.restore_states(self._generators, states)
        self._put_back(entries)

    def _put_back(self, entries: Mapping[str, bytes]) -> None:
        """Registered objects as they were, of those that have been moved since."""
        if self._order is not None and entries:
            moved = self._own_now()
            self._order.restore({name: state for name, state in entries.items() if moved.get(name) != state})

    def _set_epoch(self) -> None:
        """What the user's own loop would do: a DistributedSampler shuffles by epoch number, as some datasets do."""
        for holder in _holders_of(self.loader):
            _set_epoch_of(holder, self._epoch)
        self._set_epoch_of_data(self._epoch)

    def _set_epoch_of_data(self, epoch: int) -> None:
        _set_epoch_of(getattr(self.loader, "dataset", None), epoch)


def _set_epoch_of(holder: Any, epoch: int) -> None:
    set_epoch = getattr(holder, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def _if_told(entries: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
    try:
        return entries()
    except UsageError:  # a body was cut that has taken what it carries
        return {}


def _used_up_once(loader: Any) -> bool:
    """Generators, and iterators of Python's own. A class of the user's may begin anew in ``__iter__``."""
    return isinstance(loader, Iterator) and not isinstance(type(loader).__iter__, FunctionType)


def _holders_of(loader: Any) -> list[Any]:
    """The loader, and the samplers that it draws its order from, however deep one wraps another."""
    found: list[Any] = []
    waiting = [loader]
    while waiting:
        holder = waiting.pop(0)
        if holder is not None and all(holder is not each for each in found):
            found.append(holder)
            waiting += [getattr(holder, name, None) for name in ("sampler", "batch_sampler")]
    return found


def _passes_of(loader: Any) -> tuple[int, ...]:
    counted = getattr(loader, "__dict__", {}).get(_PASSES)
    return (counted,) if type(counted) is int else ()


def _set_passes(loader: Any, counted: tuple[int, ...]) -> None:
    if counted and _passes_of(loader):
        vars(loader)[_PASSES] = counted[0]


def _generators_of(loader: Any) -> list[Any]:
    """The loader's own random generators: they draw the order of each epoch, and are in no global state."""
    found: list[Any] = []
    for holder in _holders_of(loader):
        generator = getattr(holder, "generator", None)
        if callable(getattr(generator, "get_state", None)) and all(generator is not each for each in found):
            found.append(generator)
    return found
