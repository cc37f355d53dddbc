"""What a Session asks of a training framework: an ``Engine``, which is a few roles, each with its own callers.

A caller takes the roles it needs, and no role asks for another one. Everything runs in the training thread unless said
otherwise. ``frameworks/__init__.py`` finds the engine of a user's model; ``frameworks/torch/engine.py`` is the first.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from resilient_train._native import Copier, Probes
from resilient_train.protocol.messages import MessageChannel
from resilient_train.protocol.rank_effects import Mode
from resilient_train.state.capture import Capture
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.nan import NanFound
from resilient_train.state.transfer import Span
from resilient_train.state.tree import Path


class Objects(NamedTuple):
    """What the user registered with the Session. ``extra`` is replicated, ``rank_extra`` is each rank's own."""

    models: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    schedulers: tuple[Any, ...] = ()
    scaler: Any = None
    extra: Mapping[str, Any] = {}
    rank_extra: Mapping[str, Any] = {}


class Updates(Protocol):
    """What ``Window`` reports to: the driver."""

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to write; or it would be, if a gradient scaler had not refused."""
        ...

    def after_update(self, optimizer: Any) -> None:
        """An optimizer has written, or has not: what the user's code does from here on is done once."""
        ...

    def given(self) -> Collection[Any] | None:
        """What the script was given for the open window, and what will give it the next: with a redo that comes back.
        None: the script has what stands between two bodies run once, so nobody knows what that gives to them.
        """
        ...


class Conductor(Protocol):
    """What ``Collectives`` asks when one of a tail fails: the driver."""

    def survive(self, error: BaseException | None) -> bool:
        """A collective of the tail failed, or waits for who has gone (None). Takes part in the recovery; True if the
        collective is to be called again.
        """
        ...

    def stopped(self) -> bool:
        """Whether a recovery is under way that this rank does not take part in yet."""
        ...

    def give_up_tail(self, why: str) -> None:
        """Nobody can finish this tail: the job is to end with its state saved. Returns; a stop follows."""
        ...

    def in_front(self) -> bool:
        """Whether the user's code runs between the loop's head and the ``with`` of its step."""
        ...

    def note(self, kind: str, detail: dict[str, Any]) -> None:
        """Writes an event of this rank."""
        ...


class LoggedCall(NamedTuple):
    """What a rank has published of a collective of its tail.

    ``place``: among the calls of its tail, from 0. ``inputs`` None: they were too large (``header`` may be empty then).
    ``result``: what came of it, where this rank has published that.
    """

    header: bytes
    inputs: bytes | None
    place: int = 0
    result: bytes | None = None


class Tails(Protocol):
    """What ``Collectives`` knows of the other ranks: their tails, which outlive them. ``session/peers.py``."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    def enter_collective(self) -> None:
        """One more collective of all ranks is entered (for the hang detector). May be called on any thread."""
        ...

    def begin_call(self, tag: int, word: int, one: int, other: int) -> tuple[int, int] | None:
        """This rank begins a collective, at the place ``tag`` in the order of its group. Which of two other ranks has
        begun another one there, and its word; None: neither, as far as they have come.
        """
        ...

    def take_back_call(self, tag: int, *, counted: bool) -> None:
        """The collective of ``begin_call`` was refused where it was called. ``counted``: ``enter_collective`` too."""
        ...

    def log(self, key: tuple[str, int], header: bytes, inputs: bytes) -> bool:
        """Publishes what this rank gives to a collective of the tail. False: it is too large, and that is published."""
        ...

    def log_result(self, key: tuple[str, int], result: bytes) -> None:
        """Publishes the result of a collective of the tail, before ``completed``; not if it is too large."""
        ...

    def completed(self, count: int) -> None:
        """So many calls of the tail are over: the first ones that were published."""
        ...

    def completed_of(self, rank: int) -> int:
        """The last word of the rank's ``completed``."""
        ...

    def call(self, rank: int, key: tuple[str, int], commits: int) -> LoggedCall | None:
        """What that rank, or its dead process, has published of a collective of the tail after ``commits`` updates."""
        ...

    def call_at(self, rank: int, place: int, commits: int) -> LoggedCall | None:
        """The same of the one that was its ``place``-th, from 0."""
        ...

    def own_state(self, rank: int, commits: int) -> bytes | None:
        """What that rank alone had in front of it (``RankState.packed``); None if it has not published that."""
        ...


class Sources(NamedTuple):
    """Replicated state, ready to be read by another process: ``manifest`` describes it, ``spans`` are its bytes."""

    manifest: bytes
    digest: str
    spans: list[Span]
    keep_alive: Any


class SaveShare(NamedTuple):
    """Which part of its replica group's state a rank saves, and which shard of the checkpoint that is."""

    part: int
    parts: int
    shard: int
    shards: int


class Image(NamedTuple):
    """A rank's share of the replicated state, as it will lie in a checkpoint's shard (``state/image.py``)."""

    total_bytes: int
    begin: Callable[[memoryview, Copier], Capture]
    """Begins to copy into memory of that size. What an update changes is not copied before; all else is. Raises
    MemoryLimitError, with nothing begun.
    """
    tree: bytes
    """The state without its tensors ..."""
    names: tuple[str, ...]
    """... and what these are called in the shards, in the order of their numbers in ``tree``."""
    changed: Callable[[], str] = lambda: ""
    """The name of a tensor that was written since the image was described, though it may be only now; empty: none."""
    division: str = ""
    """How the model is divided among ranks, as a digest; empty: not at all."""


class SavedTree(NamedTuple):
    """What a replica group has saved without its tensors, and what these are called: see ``Image``."""

    tree: bytes
    names: Sequence[str]
    group: int = 0
    """Its number."""


Fill = Callable[[Sequence[BlockTarget], Sequence[int]], object]


class WrittenEarly(NamedTuple):
    """Replicated state that the script writes before its updates: from the next window on there is a copy of it."""

    names: list[str]
    kept_bytes: int
    """Of all that is copied for each window."""
    lost: str = ""
    """What it writes there besides, and nothing puts back."""
    hooks: Sequence[str] = ()
    """What a cut body had hung on the model, and the body that has run again has not."""


class StateMark(NamedTuple):
    """What an object of the user's is, as far as that can be seen without a copy of it."""

    what: Any
    held: Any = None
    """Keeps what it was in memory: nothing else may come to lie there, and be taken for it."""

    def same(self, other: StateMark) -> bool:
        """Whether nothing has changed it."""
        return bool(self.what == other.what)


class Strides(NamedTuple):
    """A loader whose ranks take every ``replicas``-th sample of an order that is the same in a job of any size."""

    batch: int
    """Samples in a batch of one rank."""
    replicas: int
    samples: int
    """Of one rank in an epoch."""


class Damage(NamedTuple):
    """Whose damaged memory was: which tensors owned it."""

    replicated: frozenset[Path]
    own: tuple[str, ...]
    elsewhere: int
    """Ranges in which no registered state lies."""

    @property
    def lost(self) -> bool:
        """Whether state was hit that the step's redo does not bring back."""
        return bool(self.replicated or self.own)

    def names(self) -> list[str]:
        """The tensors hit, for people."""
        return [*sorted(".".join(map(str, path)) for path in self.replicated), *self.own]


class Workers(enum.Enum):
    """Of a loader."""

    MADE_ANEW = 0
    """Each pass makes its own, or has none."""
    KEPT = 1
    """The first pass will make them, and the others go on with them."""
    THERE = 2
    """They are made."""


class Fingerprint(Protocol):
    """A digest that is being made on other threads; what it is of must stay as it is until it is there."""

    def digest(self) -> str:
        """Waits for it: hexadecimal digits."""
        ...


class Remembered(Protocol):
    """A batch as it was drawn."""

    def written(self) -> bool:
        """Whether some of its data is not what it was."""
        ...

    def put_back(self) -> bool:
        """The very objects get their contents back. False: some data was written and has no copy."""
        ...


class Addresses(Protocol):
    """How members of groups that are being built tell each other where they listen."""

    def tell(self, key: str, value: bytes, ranks: Sequence[int]) -> None:
        """To those ranks."""
        ...

    def wait_for(self, key: str) -> bytes:
        """What a rank has told. Blocks until it comes; RuntimeError if it won't, for a newer recovery has begun."""
        ...


class Problem(NamedTuple):
    """``plain``: nobody's mistake. The script runs as it would without us."""

    text: str
    plain: bool = False


class Groups(Protocol):
    """The process groups, from one recovery to the next.

    Called by ``session/driver.py`` (at the start, and where it quiesces and builds), ``rebuild.py``, ``explain.py``,
    ``from_replica.py``; and by ``session.py`` (``problem``).
    """

    def names(self) -> tuple[str, ...]:
        """Names of the process groups that can be rebuilt, in the order of their creation."""
        ...

    def problem(self) -> Problem | None:
        """Why a lost rank could not be replaced with the process groups that this process has."""
        ...

    def sockets(self) -> list[tuple[int, int]]:
        """(descriptor, inode) of the connections that must be shut to unblock a collective."""
        ...

    def waiters(self) -> Callable[[bool], int]:
        """What lets every waiter on a collective go, with an error, and the thread that waits for a device which was
        lent (``Device.lend``); but nobody who waits in groups that are built later. ``forgotten``, its argument: those
        only for whom nobody is left who would wake them. It returns how many there were. Asked for again and again
        behind a stop; both on any thread.
        """
        ...

    def recorded(self) -> bytes:
        """What the framework's own recorder has of this process's newest collectives, as torch's JSON; on any thread.

        May block, and may raise anything: nobody waits for it.
        """
        ...

    def broken(self) -> bool:
        """``cut``, or a wait's time ran out."""
        ...

    def cut(self) -> bool:
        """Whether a connection of a group is gone (a peer died, or closed it), or a fault has refused a call of the
        bodies since the last update. What failed by itself (a dtype that the library can't add up) is the script's.
        """
        ...

    def close(self) -> None:
        """Stops the device. Waits for collectives under way to fail (they write into gradients until they do). Then
        drops the inner groups of the old generation; collectives now fail until they are rebuilt. Raises DeviceError.
        """
        ...

    def build(self, generation: int, addresses: Addresses, *, replaced: bool) -> Any:
        """Builds all groups of a generation, for ``adopt``. Runs on a helper thread; may block and may raise.

        ``replaced``: as for ``adopt``.
        """
        ...

    def adopt(self, built: Any, *, replaced: bool) -> None:
        """Puts the groups that ``build`` built in the place of the old ones; the device computes again.

        ``replaced``: some ranks are new processes. Raises DeviceError.
        """
        ...

    def send(self, spans: list[Span], target: int) -> None:
        """Sends the bytes to rank ``target``, which calls ``receive``, over the rebuilt world group.

        Raises RuntimeError.
        """
        ...

    def receive(self, spans: list[Span], source: int) -> None:
        """Fills the spans with what rank ``source`` sends. Raises RuntimeError."""
        ...


@dataclass
class Given:
    """What a rank gives to the collectives of one run of a window's bodies, in the order of the calls.

    ``replicas``: the ranks that hold the same as this one.
    """

    replicas: frozenset[int] = frozenset()
    digests: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """Which calls these were, and the messages between them. Where those of two ranks are alike, the n-th digest of one
    stands beside the n-th of the other; ranks that send each other messages (stages) are never alike.
    """
    alone: int | None = None
    """So many digests are of what this rank has made of its own inputs; into the later ones a result has gone that its
    replicas had a part in. None: all of them.
    """


class Collectives(Protocol):
    """What the user's code calls of the groups: how each call is carried out, and whether all went well.

    Called by ``session/driver.py``, ``computed_twice.py`` (``note_into``); and by ``session.py`` (``set_up_problem``).
    """

    def set_up_problem(self) -> str:
        """What of the collectives so far could not be given to a process that takes this one's place, and what to do
        about it; empty if there is nothing.
        """
        ...

    def end_set_up(self) -> bytes:
        """The loop begins: the record of the collectives before it, for such a process; empty in one.

        Raises ConfigError for a ``set_up_problem``, SystemExit in a process that has not done what its predecessor did.
        """
        ...

    def end_head(self) -> None:
        """A loop of calls comes to its first one. What it has made since it began is not registered either."""
        ...

    def attach(self, conductor: Conductor, tails: Tails) -> None:
        """From now on every collective is seen, and ``set_mode`` says what becomes of it."""
        ...

    def detach(self) -> None:
        """Undoes ``attach``."""
        ...

    def set_mode(self, mode: Mode) -> None:
        """How collectives of the user's are carried out from now on."""
        ...

    def exchange(self, finishers: Sequence[int]) -> None:
        """As ``set_mode(Mode.EXCHANGE)``. ``finishers``: the ranks that run what is left of the tail."""
        ...

    def begin_tail(self, commits: int) -> None:
        """The update is applied, the ``commits``-th; its tail begins."""
        ...

    def messages(self) -> list[tuple[MessageChannel, int]]:
        """For each channel that bodies have used a word, the same at both ends: see ``BodiesMessages``."""
        ...

    def intact(self) -> bool:
        """Whether every collective of the bodies since the last update has succeeded."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """Inside the block the loader draws, or takes up its place: collectives are refused."""
        ...

    def note_into(self, given: Given | None) -> None:
        """From now on what this rank gives to each collective of a body is noted there; None: no more."""
        ...

    def waited_ns(self) -> int:
        """How long the training has waited for collectives, since some moment. Asked between two backward passes."""
        ...


class Device(Protocol):
    """The device of this rank, and the errors of its memory.

    Called by ``session/driver.py`` and ``device_errors.py``.
    """

    def watch(self, alarm: Callable[[Probes], None]) -> None:
        """Begins to ask the device for its errors, where there is one. ``alarm``: tells native probes whose alarms to
        set when they find something.
        """
        ...

    def close(self) -> None:
        """Asks no more. Idempotent."""
        ...

    def lend(self) -> None:
        """A body begins. Until ``synchronize`` or ``take_back`` a stop may end what the device does, from any thread:
        all of it will be done again.
        """
        ...

    def take_back(self) -> None:
        """The body was left. A device that was stopped works again, for what stands behind the body. DeviceError."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given. Raises what an operation on it has failed with."""
        ...

    def name(self) -> str:
        """Which of its host's devices it is, for people; the same for each process of this rank."""
        ...

    def notes(self) -> list[dict[str, Any]]:
        """What was found since the last call, for people."""
        ...

    def errors(self, *, wait: bool) -> list[Span]:
        """Address ranges of device memory that have lost data since the last call.

        ``wait``: there is reason to expect some, so the device's next answer is waited for.
        """
        ...

    def kind_of(self, error: BaseException) -> str:
        """What an exception of the body means: ``UCE``, ``HCCE``, ``LINK``, ``STOPPED`` (another stopped the device, or
        we did), or ``DEVICE``, which nothing but a new process repairs. Empty: it is not the device's.
        """
        ...

    def assess(self, ranges: list[Span]) -> Damage:
        """Whose the ranges are. This rank's own tensors among them are lost; they get new memory if need be."""
        ...

    def confirm(self, damage: Damage) -> Damage:
        """After ``Groups.close``: the damage, as far as the stopped device itself knows of more than ``damage``.

        Raises DeviceError where the device can't be repaired.
        """
        ...


class State(Protocol):
    """What replicas share: parameters, buffers, optimizers, schedulers, scaler, and what else was registered.

    Called by ``session/driver.py``, ``session.py`` (before the loop), ``from_replica.py``, ``saving.py`` and
    ``from_saved.py`` (to storage and back), ``replica_comparison.py`` and ``computed_twice.py`` (is it the same?) and
    ``nan_watch.py``.
    """

    def check(self, *, around: bool = True) -> None:
        """Raises StateError if some of it can't be carried to another process. ``around``: what is switched on now is
        so for the whole loop.
        """
        ...

    def replicas(self, told: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that hold the same, each of which saves its own; () where each rank holds all.

        Where the state is divided among ranks, it says which they are, and ``told`` (the user's) is compared; else
        it is what is told. Raises ConfigError if these differ, and for what is divided in a way that can't be
        recovered.
        """
        ...

    def sources(self) -> Sources:
        """It, for a replacement to copy."""
        ...

    def receive(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str) -> int:
        """Takes over a replica's ``sources``: ``fetch`` fills the local spans, which are in the order of the replica's.
        Returns bytes. Raises TransferError, a LayoutError where the replica has another model.

        What ``Step.begin`` remembers must be forgotten before.
        """
        ...

    def mend(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str, damage: Damage) -> int:
        """Like ``receive``, for the damaged tensors only. TransferError if the others differ from the replica's."""
        ...

    def cut(self) -> None:
        """A body is left, and its step will run again: what the script changes until then ``Step.rollback`` takes back
        too.
        """
        ...

    def marks(self) -> dict[str, StateMark]:
        """Of each object of the user's that replicas share, and a redo puts back: has something changed it?"""
        ...

    def image(self, step: int, share: SaveShare) -> Image:
        """What to copy, until the next update begins, for a snapshot of the state from before ``step``.

        Raises LayoutError for a state that no new process could take up.
        """
        ...

    def load(self, saved: Callable[[str], Sequence[SavedTree]], fill: Fill) -> None:
        """Takes up a saved state: ``fill`` fills the tensors, divided among ranks as they are here, however they were.
        It is given with them the groups whose state that is.

        ``saved`` is given the ``division`` of here (see ``Image``), and gives what this rank's replica group has saved;
        if the state was divided in another way, what all groups have.
        Raises LayoutError if the state isn't this model's, or those of the groups are no one state.
        """
        ...

    def fingerprint(self, after: Copier | None = None) -> Fingerprint:
        """Begins a digest of parameters and optimizer state: equal on all ranks of a replica group, and nowhere else by
        chance. ``after``: memory is read when that copy is over.
        """
        ...

    def nan(self) -> NanFound | None:
        """NaN in what this rank holds of parameters and optimizer state."""
        ...

    def on_host(self) -> bool:
        """Whether it lies in the host's memory, which other threads read beside the training."""
        ...

    def rows(self, *, extra: bool = False) -> list[tuple[str, str]]:
        """What ``fingerprint`` covers: (name, digest) of each tensor and each value. ``extra``: of the user's
        own objects instead.
        """
        ...


class TailsWrite(NamedTuple):
    """What tails have been seen to write, by name."""

    apart: tuple[str, ...] = ()
    """What modules hold, and was not the same on all ranks behind it."""
    alone: tuple[str, ...] = ()
    """What this rank's has written, others' have not, and was not the same on all behind it."""


NOTHING_OF_ITS_OWN = TailsWrite()


class WrittenInTail(NamedTuple):
    """What modules hold that a tail has written, as it was before it and as it is behind it; as ``packed`` does it.
    ``own``: names of what else it has written that each rank has for itself; ``drawn``: random numbers are such.
    ``given``: what of modules was broadcast there, with the rank that gave it; it is everybody's then. With
    ``GIVEN_HERE`` the one that says so gave it, and has not written it since. ``seen``: of earlier tails.
    """

    before: bytes
    after: bytes
    own: tuple[str, ...] = ()
    drawn: bool = False
    given: tuple[tuple[str, int], ...] = ()
    seen: TailsWrite = NOTHING_OF_ITS_OWN


GIVEN_HERE = -1
NOTHING_WRITTEN = WrittenInTail(b"", b"")


class RankState(Protocol):
    """What this rank alone has, beside its random numbers: buffers that are not synchronised, ``rank_state``.

    Called by ``session/saves/publication.py``, ``tails_seen.py``, ``resharding.py`` and ``neighbour_inputs.py``.
    """

    def packed(self) -> bytes:
        """It, now; empty if there is nothing. Raises StateError for values that can't be carried."""
        ...

    def restore(self, state: bytes, tail: WrittenInTail = NOTHING_WRITTEN) -> tuple[str, ...]:
        """Puts back what ``packed`` returned, in this process or another.

        ``tail``: a replica's, behind which this rank goes on, and which it may not have run itself. What modules hold,
        and was the same on both before it, becomes what it is there behind it, but for what was seen to come out apart.
        Returns the names of what that tail has written, or this rank's alone does, and no replica has for this rank: it
        is as it was before.
        """
        ...

    def written_since(self, before: bytes, after: bytes | None = None) -> WrittenInTail:
        """What is not any more what ``packed`` had returned, or was not when it returned ``after``."""
        ...

    def tail_wrote(self, before: bytes, after: bytes, others: Sequence[tuple[bytes, bytes]]) -> TailsWrite:
        """What a tail of this rank's has written, and others' have not, or otherwise: each by what ``packed`` has
        returned in front of it and behind it.
        """
        ...

    def adopt(self, state: bytes) -> None:
        """Takes up of another rank's what any rank may have: its buffers."""
        ...

    def compiled_for_shapes(self) -> str:
        """Where code stands that was compiled by the order in which shapes came, since this was asked first; empty:
        none. In each step.
        """
        ...


class PassOrder(Protocol):
    """What of the user's objects a loader may draw from: each of ``rank_state``, which it may move on as well, and of
    ``state`` what it leads to.

    Called by ``session/redo/loader.py`` and ``kept_batches.py``.
    """

    def led_to(self, loader: Any) -> Collection[str]:
        """What the loader draws its order from, and what its workers hold, by whatever way; looked for once, which may
        take some milliseconds.
        """
        ...

    def in_samples(self, loader: Any) -> bool:
        """Whether what makes its batches in no worker leads to one: they are made of what that was at the time."""
        ...

    def entries(self, loader: Any) -> dict[str, bytes]:
        """Each alone, packed. Raises UsageError where one can't tell it now."""
        ...

    def own(self) -> dict[str, bytes]:
        """Of these the rank's own."""
        ...

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Puts some of ``entries`` back."""
        ...


class Data(Protocol):
    """Random numbers, and loaders: what decides which batch comes next.

    Called by ``session/redo/loader.py``, ``driver.py``, ``publication.py``, ``resharding.py`` (``strides``),
    ``kept_batches.py`` (what it keeps of a batch), ``randomness.py`` and ``pauses.py`` (random numbers),
    ``neighbour_inputs.py`` (both).
    """

    def look(self, arguments: Any, variables: Iterable[Any] = (), *, plain: bool = True) -> bytes:
        """A digest of a few words of the data in nested ``arguments``, and of those of ``variables`` that are data,
        without waiting for a device; empty if none. ``plain``: numbers and texts are data, too.
        """
        ...

    def remember(self, batch: Any, *, copies: bool, looks: bool) -> Remembered:
        """What is in a nested ``batch`` now. ``copies``: so that all of it can be put back; ``looks``: so that what the
        framework does not count is found to have been written, too.
        """
        ...

    def random_state(self) -> bytes:
        """The state of the global random number generators."""
        ...

    def restore_random_state(self, state: bytes) -> None:
        """Puts a ``random_state`` back."""
        ...

    def states(self, generators: Sequence[Any]) -> bytes:
        """Those of generators that a loader draws from: objects with ``get_state()``."""
        ...

    def restore_states(self, generators: Sequence[Any], states: bytes) -> None:
        """Puts ``states`` back."""
        ...

    def workers(self, loader: Any) -> Workers:
        """Where the workers of the loader's next pass come from."""
        ...

    def iterate(
        self, loader: Any, told: Callable[[int, bytes], None], numbers: Mapping[int, bytes], *, anew: bool
    ) -> Iterator[Any]:
        """``iter(loader)``. ``told`` is called as a batch is given for which a worker has drawn random numbers: which
        worker, and what it goes on from; empty if it could not go on from what it was given.

        ``numbers``: by worker, what it goes on from, of a loader that takes up its place itself. ``anew``: not with the
        workers that it may have kept.
        """
        ...

    def fast_forward(
        self,
        loader: Any,
        batches: int,
        samples: int,
        begin: Callable[[Any], Iterator[Any]],
        numbers: Mapping[int, bytes],
    ) -> Iterator[Any]:
        """An iterator over ``loader`` that starts at batch ``batches``, without loading what it skips if possible.

        ``begin`` is called in place of ``iter``, for the loader or one that stands for it. ``numbers``: by worker, what
        it goes on from, as ``iterate`` has told it.

        Batches are counted behind this rank's first ``samples`` samples: above 0 only where ``strides`` knows the
        loader.
        """
        ...

    def strides(self, loader: Any) -> Strides | None:
        """How the ranks divide an epoch among them; None where that can't be known from outside."""
        ...

    def pack(self, tree: Any) -> bytes:
        """What a loader says of its position, and the framework's tensors in it. Raises StateError for values that
        can't be carried.
        """
        ...

    def share(self, batch: Any) -> bytes:
        """Like ``pack``, of a batch that another rank is to compute from. Raises StateError for one that would not be
        the very same thing there.
        """
        ...

    def unpack(self, packed: bytes) -> Any:
        """The inverse of ``pack`` and ``share``. Raises ProtocolError."""
        ...


class Window(Protocol):
    """A window (the steps up to and including one update): its updates are seen, and it can be taken back.

    Called by ``session/driver.py``, ``from_replica.py``, ``saving.py`` and ``from_saved.py`` (the layout that travels
    with the state), ``bodies_without_update.py``, ``loop_head.py``, ``kept_beside.py``.
    """

    def attach(self, updates: Updates) -> None:
        """Hooks the optimizers and the scaler."""
        ...

    def detach(self) -> None:
        """Undoes ``attach``."""
        ...

    def begin(self, *, whole: bool = False) -> None:
        """A window begins: remember what a redo must restore. ``whole``: there will be one, so all is kept that bodies
        could write.
        """
        ...

    def rollback(self, *, intact: bool = True) -> str:
        """Back to ``begin``, unless ``forget`` was called since: gradients dropped; RNG, unsynchronised buffers, and
        state that bodies write as it was. Returns the name of some that can't be brought back; empty: all is.

        ``intact`` False: an update that was cut, or damage, has changed other state.
        """
        ...

    def save_undo(self) -> WrittenEarly | None:
        """Keeps a copy of the replicated state, so that ``rollback`` can also take an update back. Returns what
        ``gradients_ready`` does.
        """
        ...

    def forget(self) -> None:
        """Nothing can be rolled back any more: the update is applied, or other state takes the place of this one."""
        ...

    def gradients_ready(self, update: int) -> WrittenEarly | None:
        """All backward passes of ``update`` are over; the first ones decide the layout of DDP's buckets.

        Returns what was seen to be written before its update, for the first time.
        """
        ...

    def layout(self, *, within: bool = False) -> bytes:
        """What an undisturbed process has learnt in its first steps, and a new one needs for the same bits. ``within``:
        the script is in a step.
        """
        ...

    def rebuild_reducer(self, layout: bytes | None, commits: int, *, modes: bool = True) -> list[str]:
        """Brings this process to where an undisturbed one is before update ``commits``. ``layout``: that of whoever
        this rank's state comes from; None: it is its own. ``modes``: what the script has switched while it ran (what
        evaluates, what is frozen) is as it was there; if not, returns what is otherwise. Raises TransferError.
        """
        ...

    def changed_unasked(self) -> str:
        """The name of a parameter that has changed since ``begin`` without an update, and which ``rollback`` leaves
        so; empty if none was seen. A look at a few words, other ones for each window.
        """
        ...

    def settled(self) -> list[tuple[object, frozenset[str]]]:
        """Parts of the models, and of each the attributes (plain values) that a redo and a new process get as they
        were.
        """
        ...

    def outgrown(self) -> str:
        """How the models are not built any more as they were for the Session; empty: they are."""
        ...

    def changed_beside(self, *, sometimes: bool = False, elsewhere: Sequence[str] = ()) -> tuple[str, ...]:
        """The parameters and schedulers, for people, that are not registered and have changed since the loop began:
        a new process would have them as they were. ``sometimes``: most calls only say what an earlier one has seen.
        ``elsewhere``: not what has changed here, but of those that have in another process what this one has as well.
        """
        ...


class Between(Protocol):
    """What stands between two bodies of one window of ``session.call``, which a redo does not run again.

    Called by ``session/driver.py`` and ``loop_head.py``. Places are counted from 0 in each window.
    """

    def left(self, place: int) -> None:
        """A body has ended, and its window goes on."""
        ...

    def look(self) -> None:
        """What was changed since is kept, if nobody has looked yet: a redo is about to take it back."""
        ...

    def begins(self, place: int, base: int) -> bool:
        """The body at ``place`` begins, of the window that began with step ``base``: what was changed before it is as
        it was then. Returns whether tensors of the models were, in this window.
        """
        ...

    def modes(self) -> Callable[[], object]:
        """What sets modes and plain attributes of modules as they are now."""
        ...

    def head_is_repeated(self) -> None:
        """A new process runs its loop up to its first call: what ``with`` statements around calls switch, and switch
        back behind them, is as the script has made it.
        """
        ...

    def written_in_head(self) -> str:
        """Of optimizers' states, which nothing puts back: what was written since then; empty: nothing."""
        ...


class Gradients(Protocol):
    """What the loop computes of its gradients and its loss.

    Called by ``anomaly_reports.py`` and ``session/driver.py`` for the anomaly check (``TRE``), and only where that is
    on; whatever is on, by ``replica_comparison.py`` (``averages``), ``computed_twice.py`` (``digest``) and
    ``bodies_without_update.py`` (``without_optimizer``).
    """

    def without_optimizer(self) -> list[str]:
        """The names of parameters that want to be trained, and are in no registered optimizer."""
        ...

    def averages(self) -> bool:
        """Whether the models that are trained are wrapped by what averages gradients among replicas."""
        ...

    def watch(self, tell: Callable[[Any], None]) -> None:
        """Until ``close``, ``tell`` is given the norm that the loop computes when it clips gradients of the registered
        models: as ``kept`` returns it.
        """
        ...

    def close(self) -> None:
        """Undoes ``watch``. Idempotent."""
        ...

    def begin(self) -> None:
        """A window begins: ``drop`` was for the update of another one."""
        ...

    def digest(self) -> str:
        """Of all gradients of the registered models. It reads them."""
        ...

    def drop(self) -> None:
        """An optimizer is about to write: without gradients it changes no parameter."""
        ...

    def norm(self) -> Any:
        """The norm of all gradients of the registered models together, as clipping would compute it. Raises UsageError
        where there are none yet.
        """
        ...

    def kept(self, value: Any) -> Any:
        """A number of the loop's as it is now, for ``float`` later; nobody waits for the device. Raises UsageError."""
        ...

    def scales(self) -> bool:
        """Whether a gradient scaler refuses updates whose gradients are not finite."""
        ...


class Drill(Protocol):
    """Faults on request, and a look at all of the state.

    Called by ``session/injection.py``, ``drill_records.py``, ``pauses.py`` (has it changed?) and ``driver.py``.
    """

    def cut(self) -> None:
        """Shuts this rank's connections: collectives fail, here and on its peers."""
        ...

    def poison(self, target: str) -> None:
        """Destroys a tensor of that kind (``faults.TARGETS``) and raises, as an operation on it would."""
        ...

    def flip(self, target: str, index: int, mask: int) -> dict[str, object]:
        """Inverts these bits of one element (``index``, modulo their number) of this rank's tensors of that kind.

        Returns, for an event, where it lies and what it was and is. Raises ConfigError, with nothing changed, if there
        is no such tensor, or if an element has not all of these bits.
        """
        ...

    def call_in_forward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each forward pass, until ``close``."""
        ...

    def call_in_backward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each backward pass, some gradients being ready and some not."""
        ...

    def close(self) -> None:
        """Takes its hooks away."""
        ...

    def parts(self, more: Mapping[str, Any]) -> dict[str, str]:
        """A digest of each tensor, generator and other part of this rank's state by its name, and of the trees in
        ``more``. It reads all of the state. What a process brings up to date by itself is left out.
        """
        ...


class Engine(NamedTuple):
    """One framework, for the objects of one Session."""

    groups: Groups
    collectives: Collectives
    device: Device
    state: State
    rank_state: RankState
    data: Data
    pass_order: PassOrder
    window: Window
    between: Between
    gradients: Gradients
    drill: Drill


class Plugin(Protocol):
    """What an entry point of the group ``resilient_train.engines`` names: a module, or an object, with two functions.

    It is imported for every Session, so it should import its framework in ``engine_for`` only.
    """

    def claims(self, objects: Objects) -> bool:
        """Whether these are objects of its framework. At most one engine may say so."""
        ...

    def engine_for(self, objects: Objects) -> Engine:
        """The engine for them. Raises ConfigError for what it can't take, and says why."""
        ...
