"""What a rank computes a window from, and what it comes to: for a replica of it to do the same.

A device that always errs in the same way comes to the same bits twice, and all replicas take them over. It does not
come to those of another device. So in the window that is verified each rank leaves its batches, its random numbers, and
what else it alone has, in a file; then all compute the window from another one's. Nothing of that is applied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from resilient_train.errors import ProtocolError, StateError
from resilient_train.frameworks.roles import Data, Given, RankState
from resilient_train.protocol.neighbours import neighbour
from resilient_train.session.redo.loader import NO_BATCH, Batch, Drawn


class _Inputs(msgspec.Struct, frozen=True):
    commits: int
    batches: list[bytes]
    epochs: list[int]
    random: list[bytes]
    """In front of each body."""
    own: bytes
    digests: list[str]
    """Of what the rank has made of it; as far as that is its own doing (``roles.Given.alone``)."""


class Theirs(NamedTuple):
    """Another rank's inputs, unpacked."""

    batches: list[Batch]
    random: list[bytes]
    own: bytes
    digests: list[str]


class NeighbourInputs:
    """One rank's part. ``group``: the ranks that hold what it holds."""

    def __init__(self, folder: str, rank: int, group: Sequence[int], data: Data, rank_state: RankState) -> None:
        self._folder, self._rank, self._group = Path(folder), rank, tuple(group)
        self._data, self._rank_state = data, rank_state
        self._batches: list[bytes] = []
        self._epochs: list[int] = []
        self._start = b""
        self._random: list[bytes] = []
        """In front of the first body, and of the later ones."""
        self._own = b""
        self._why_not = ""

    def add(self, place: int, drawn: Drawn) -> None:
        """What the body at ``place`` of the window gets, before it can write into it."""
        if place == 0:
            self._batches, self._epochs, self._random, self._why_not = [], [], [], ""
        if drawn.batch is NO_BATCH:
            self._why_not = "the Session has no loader, so what a body computes from is not known"
        try:
            self._batches.append(self._data.share(drawn.batch.value))
        except StateError as error:
            self._why_not = f"step.batch can't be given to another rank: {error}"
        self._epochs.append(drawn.batch.epoch)
        if drawn.random is not None:
            self._random.append(drawn.random)

    def begin(self) -> None:
        """The window begins, or begins again: its first batch is drawn."""
        self._start, self._own = self._data.random_state(), self._rank_state.packed()

    def write(self, commits: int, given: Given, *, calls: bool) -> str:
        """The bodies are over. Returns why another rank can't compute from that; empty if it can. ``calls``: the loop
        gives its bodies their arguments itself.
        """
        if calls:
            self._why_not = "the arguments of session.call() come from the loop"
        if self._why_not:
            return self._why_not
        digests = given.digests[: given.alone]
        inputs = _Inputs(commits, self._batches, self._epochs, [self._start, *self._random], self._own, digests)
        path = self._path(self._rank)
        try:
            path.with_suffix(".new").write_bytes(msgspec.msgpack.encode(inputs))
            os.replace(path.with_suffix(".new"), path)  # noqa: PTH105 - as short
        except OSError as error:
            return f"{path}: {error.strerror}"
        return ""

    def read(self, commits: int, distance: int) -> Theirs | str:
        """Those of the replica that stands so many places behind this one; a text: why not."""
        path = self._path(neighbour(self._group, self._rank, distance))
        try:
            inputs = msgspec.msgpack.decode(path.read_bytes(), type=_Inputs)
            values: list[Any] = [self._data.unpack(batch) for batch in inputs.batches]
        except (OSError, msgspec.MsgspecError, ProtocolError) as error:
            return f"{path}: {error}"
        if inputs.commits != commits:
            return f"{path} is of update {inputs.commits}"
        batches = [Batch(value, epoch) for value, epoch in zip(values, inputs.epochs, strict=True)]
        return Theirs(batches, inputs.random, inputs.own, inputs.digests)

    def put_on(self, theirs: Theirs) -> None:
        """The window begins with what that rank alone had. A rollback brings back what is this one's."""
        if theirs.own:
            self._rank_state.restore(theirs.own)
        self._data.restore_random_state(theirs.random[0])

    def draw(self, theirs: Theirs, place: int) -> Batch:
        """What that rank's body at ``place`` got."""
        if place:
            self._data.restore_random_state(theirs.random[place])
        return theirs.batches[place]

    def close(self) -> None:
        """Removes this rank's file."""
        for path in (self._path(self._rank), self._path(self._rank).with_suffix(".new")):
            with contextlib.suppress(OSError):
                path.unlink()

    def _path(self, rank: int) -> Path:
        return self._folder / f"inputs-{rank}.msgpack"
