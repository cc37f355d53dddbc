"""The verbs an engine must know. ``Framework`` is the plug-in point; ``frameworks/torch/engine.py`` is the first."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from resilient_train._native import Board, Copier
from resilient_train.protocol.rank_effects import Mode
from resilient_train.state.capture import Capture
from resilient_train.state.checkpoint.target import Target
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


class Conductor(Protocol):
    """What the engine reports to: implemented by the Session's runtime."""

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to write."""
        ...

    def after_update(self, optimizer: Any) -> None:
        """An optimizer has written."""
        ...

    def after_scaler(self) -> None:
        """The gradient scaler was updated, whether it let the optimizer write or not."""
        ...

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

    def note(self, kind: str, detail: dict[str, Any]) -> None:
        """Writes an event of this rank."""
        ...


class Call(NamedTuple):
    """What a rank has published of a collective of its tail.

    ``place``: among the calls of its tail, from 0. ``inputs`` None: they were too large (``header`` may be empty then).
    ``result``: what came of it, where this rank has published that.
    """

    header: bytes
    inputs: bytes | None
    place: int = 0
    result: bytes | None = None


class Tails(Protocol):
    """What an engine knows of the other ranks: their tails, which outlive them."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    def enter_collective(self) -> None:
        """One more collective of all ranks is entered (for the hang detector). May be called on any thread."""
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

    def call(self, rank: int, key: tuple[str, int], commits: int) -> Call | None:
        """What that rank, or its dead process, has published of a collective of the tail after ``commits`` updates."""
        ...


class Sources(NamedTuple):
    """Replicated state, ready to be read by another process: ``manifest`` describes it, ``spans`` are its bytes."""

    manifest: bytes
    digest: str
    spans: list[Span]
    keep_alive: Any


class Share(NamedTuple):
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


class Framework(Protocol):
    """See the methods. Everything runs in the training thread unless said otherwise."""

    # -- process groups

    def group_names(self) -> tuple[str, ...]:
        """Names of the process groups that can be rebuilt, in the order of their creation."""
        ...

    def group_problem(self) -> str:
        """Why a lost rank could not be replaced with the process group that this process has; empty if it can."""
        ...

    def sockets(self) -> list[tuple[int, int]]:
        """(descriptor, inode) of the connections that must be shut to unblock a collective."""
        ...

    def release_waiters(self) -> int:
        """Lets every waiter on a collective go, with an error; on any thread. Returns how many there were."""
        ...

    def set_mode(self, mode: Mode) -> None:
        """How collectives of the user's are carried out from now on."""
        ...

    def exchange(self, finishers: Sequence[int]) -> None:
        """As ``set_mode(Mode.EXCHANGE)``. ``finishers``: the ranks that run what is left of the tail."""
        ...

    def close_groups(self) -> None:
        """Stops the device. Waits for collectives under way to fail (they write into gradients until they do). Then
        drops the inner groups of the old generation; collectives now fail until they are rebuilt. Raises DeviceError.
        """
        ...

    def build_groups(self, generation: int, attempt: int, cancelled: threading.Event) -> Any:
        """Builds all groups of a generation, for ``adopt_groups``. Runs on a helper thread; may block and may raise."""
        ...

    def adopt_groups(self, built: Any, *, replaced: bool) -> None:
        """Puts the groups that ``build_groups`` built in the place of the old ones; the device computes again.

        ``replaced``: some ranks are new processes. Raises DeviceError.
        """
        ...

    def collectives_intact(self) -> bool:
        """Whether every collective since ``begin`` has succeeded. Then synchronizes."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given. Raises what an operation on it has failed with."""
        ...

    def groups_broken(self) -> bool:
        """Whether a connection of a group is gone: a peer died, or closed it."""
        ...

    def break_collectives(self) -> None:
        """Shuts this rank's connections (fault injection): collectives fail, here and on its peers."""
        ...

    # -- before the loop

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

    # -- the step

    def attach(self, conductor: Conductor, peers: Tails) -> None:
        """Hooks the optimizers, the scaler and the process groups."""
        ...

    def detach(self) -> None:
        """Undoes ``attach``."""
        ...

    def begin(self) -> None:
        """A window (the steps up to and including one update) begins: remember what a redo must restore."""
        ...

    def rollback(self) -> None:
        """Back to ``begin``, if nothing was committed since: gradients dropped; RNG, unsynchronised buffers, schedulers
        and scaler as they were.
        """
        ...

    def save_undo(self) -> None:
        """Keeps a copy of the replicated state, so that ``rollback`` can also take an update back."""
        ...

    def committed(self, commits: int) -> None:
        """The update is applied, the ``commits``-th: nothing before it can be rolled back, and its tail begins."""
        ...

    def changed_unasked(self) -> str:
        """The name of a parameter that has changed since ``begin`` without an update; empty if none was seen. A look at
        a few words, other ones for each window.
        """
        ...

    def without_optimizer(self) -> list[str]:
        """The names of parameters that want to be trained, and are in no registered optimizer."""
        ...

    def gradients_ready(self, update: int) -> None:
        """All backward passes of ``update`` are over; the first ones decide the layout of DDP's buckets."""
        ...

    def call_in_forward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each forward pass (for fault injection)."""
        ...

    def call_in_backward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each backward pass, some gradients being ready and some not."""
        ...

    # -- state

    def rank_state(self) -> bytes:
        """What this rank alone has, now, beside its random numbers: buffers that are not synchronised, rank_extra.

        Empty if it has nothing. Raises StateError for values that can't be carried.
        """
        ...

    def load_rank_state(self, state: bytes) -> None:
        """Puts back what ``rank_state`` returned, in this process or another."""
        ...

    def adopt_rank_state(self, state: bytes) -> None:
        """Takes up of another rank's ``rank_state`` what any rank may have: its buffers."""
        ...

    def pack(self, tree: Any) -> bytes:
        """A tree of state as bytes. Raises StateError for values that can't be carried."""
        ...

    def unpack(self, payload: bytes) -> Any:
        """The inverse of ``pack``."""
        ...

    def sources(self) -> Sources:
        """The replicated state, for a replacement to copy."""
        ...

    def image(self, step: int, share: Share) -> Image:
        """What to copy, until the next update begins, for a snapshot of the state from before ``step``.

        Raises LayoutError for a state that no new process could take up.
        """
        ...

    def layout(self) -> bytes:
        """What an undisturbed process has learnt in its first steps, and a new one needs for the same bits."""
        ...

    def restore_layout(self, layout: bytes, commits: int) -> None:
        """Brings a new process to where an undisturbed one is before update ``commits``. Raises TransferError."""
        ...

    def load(self, tree: bytes, names: Sequence[str], fill: Callable[[Sequence[Target]], object]) -> None:
        """Takes up a saved state: ``fill`` fills the tensors. Raises LayoutError if the state isn't this model's."""
        ...

    def watch_device(self, board: Board, rank: int) -> None:
        """Begins to ask the device for its errors, where there is one; what is found sets the rank's alarms."""
        ...

    def device_notes(self) -> list[dict[str, Any]]:
        """What was found since the last call, for people."""
        ...

    def device_errors(self, *, wait: bool) -> list[Span]:
        """Address ranges of device memory that have lost data since the last call.

        ``wait``: there is reason to expect some, so the device's next answer is waited for.
        """
        ...

    def assess(self, ranges: list[Span]) -> Damage:
        """Whose the ranges are. This rank's own tensors among them are lost; they get new memory if need be."""
        ...

    def confirm(self, damage: Damage) -> Damage:
        """After ``close_groups``: the damage, as far as the stopped device itself knows of more than ``damage``.

        Raises DeviceError where the device can't be repaired.
        """
        ...

    def poison(self, target: str) -> None:
        """Destroys a tensor of that kind (``faults.TARGETS``) and raises, as an operation on it would (injection)."""
        ...

    def mend(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str, damage: Damage) -> int:
        """Like ``receive``, for the damaged tensors only. TransferError if the others differ from the replica's."""
        ...

    def receive(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str) -> int:
        """Takes over a replica's state: ``fetch`` fills the local spans. Returns bytes. Raises TransferError, a
        LayoutError where the replica has another model.
        """
        ...

    def remote_spans(self, manifest: bytes) -> list[Span]:
        """Where the bytes of an offer lie in its source's address space."""
        ...

    def send_over_group(self, sources: Sources, target: int) -> None:
        """Sends the spans to ``target`` over the rebuilt world group."""
        ...

    def fetch_over_group(self, source: int) -> Callable[[list[Span]], None]:
        """A ``fetch`` for ``receive`` that reads from ``source`` over the rebuilt world group."""
        ...

    def check_state(self) -> None:
        """Raises StateError if some of the registered state can't be carried to another process."""
        ...

    def digests(self) -> tuple[str, str]:
        """Digests of parameters with optimizer state, and of this rank's own state."""
        ...

    def parts(self, more: Mapping[str, Any]) -> dict[str, str]:
        """A digest of each tensor, generator and other part of this rank's state by its name, and of the trees in
        ``more``. For drills: it reads all of the state.
        """
        ...

    def fingerprint(self) -> Fingerprint:
        """Begins the first of the ``digests``: equal on all ranks of a replica group, and nowhere else by chance."""
        ...

    def on_host(self) -> bool:
        """Whether the state lies in the host's memory, which other threads read beside the training."""
        ...

    def rows(self) -> list[tuple[str, str]]:
        """What that digest covers: (name, digest) of each tensor and each value."""
        ...

    def averages(self) -> bool:
        """Whether the models that are trained are wrapped by what averages gradients among replicas."""
        ...

    def settle(self, manifest: bytes | None, commits: int) -> None:
        """The recovery is nearly over: make what depends on the history (DDP's buckets) as if nothing had happened."""
        ...

    # -- data

    def look(self, arguments: Any) -> bytes:
        """A digest of a few words of the data in nested ``arguments``, without waiting for a device; empty if none."""
        ...

    def random_state(self) -> bytes:
        """The state of the global random number generators."""
        ...

    def restore_random_state(self, state: bytes) -> None:
        """Puts a ``random_state`` back."""
        ...

    def workers(self, loader: Any) -> Workers:
        """Where the workers of the loader's next pass come from."""
        ...

    def drop_workers(self, loader: Any) -> None:
        """The next ``iter(loader)`` begins with new ones."""
        ...

    def fast_forward(
        self, loader: Any, batches: int, samples: int, begin: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        """An iterator over ``loader`` that starts at batch ``batches``, without loading what it skips if possible.

        ``begin`` is called in place of ``iter``, for the loader or one that stands for it.

        Batches are counted behind this rank's first ``samples`` samples: above 0 only where ``strides`` knows the
        loader.
        """
        ...

    def strides(self, loader: Any) -> Strides | None:
        """How the ranks divide an epoch among them; None where that can't be known from outside."""
        ...
