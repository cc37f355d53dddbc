"""What a rank has that no replica does: its random numbers, its unsynchronised buffers, what else its modules write in
forward passes (``extra_state.py``), what the user calls its own.

All of it is published before the commit point of each update, so it is kept small: a buffer counts only from the moment
that it changes for the first time (masks and tables never do; a replica's or the constructor's are as good), unless it
is a small one that ranks may have built differently (``Buffers.claim``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from resilient_train._native import Glance, columns
from resilient_train.frameworks.roles import GIVEN_HERE, NOTHING_WRITTEN, TailsWrite, WrittenInTail
from resilient_train.frameworks.torch.kept.buffers import Buffers, lies_here, same_bits
from resilient_train.frameworks.torch.kept.module_entries import same_objects
from resilient_train.frameworks.torch.tensors.containers import dressed, worn
from resilient_train.frameworks.torch.tensors.extra_state import ExtraState
from resilient_train.frameworks.torch.tensors.leaves import (
    TENSORS,
    check_has_state,
    is_plainly_dense,
    pack,
    restore_object,
    span_of,
    state_of,
    unpack,
)
from resilient_train.frameworks.torch.watching.compiled_shapes import CompiledShapes
from resilient_train.state.tree import flatten

_MEMORY = (torch.Tensor.data_ptr, "shape")
_KINDS = ("buffers", "extra_state", "extra")


class TorchRankState:
    """All of it together, as one tree: see ``frameworks/roles.RankState``."""

    def __init__(self, models: tuple[torch.nn.Module, ...], extra: Mapping[str, Any], rank: int = 0) -> None:
        self._rank = rank
        self.buffers = Buffers(models)
        for name, thing in extra.items():
            check_has_state(f"rank_state[{name!r}]", thing)
        self._extra = extra
        self._same: _SameBuffers | None = None
        self._modules = ExtraState(models)
        self._more = bool(extra) or self._modules.any()
        """Whether there is something beside buffers."""
        self._kept = _Packed(b"", None)
        self._given = dict[str, _Given]()
        """What was broadcast in the newest tail; see ``WrittenInTail``."""
        self._in_tail = False
        self._compiled = CompiledShapes()

    def compiled_for_shapes(self) -> str:
        return self._compiled.changing()

    def tail_begins(self) -> None:
        self._given.clear()
        self._in_tail = True

    def given_by(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        """A rank has broadcast them in a tail. Its own are as before then, and all others have these."""
        places = {(each.data_ptr(), each.nbytes) for each in tensors}
        for key, each in self.buffers.published().items():
            # The first version that is seen: while DDP has several parts under way it is a higher one, for a while.
            if each is not None and (each.data_ptr(), each.nbytes) in places:
                self._given.setdefault(key, _Given(rank, each, each._version))

    def _given_here(self) -> set[str]:
        """What this rank has broadcast, and not written since, not even back: where it has, others have done so too."""
        here = {key: each for key, each in self._given.items() if each.by == self._rank}
        return {key for key, each in here.items() if not self._in_tail or each.buffer._version == each.version}

    def _tail_ends(self) -> None:
        here = self._given_here()
        self._given = {key: each for key, each in self._given.items() if each.by != self._rank or key in here}
        self._in_tail = False

    def of_another(self, theirs: bytes, mine: bytes, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """What another rank had in their places when it packed ``theirs``. None if they are not what they were when
        this one packed ``mine``: the other's are not either then.
        """
        own, keys = self.buffers.published(), self.buffers.keys()
        had, held = (unpack(each, placed=True).get("buffers", {}) if each else {} for each in (mine, theirs))
        found = []
        for each in buffers:
            key = keys.get(id(each), "")
            still = key not in own if key not in had else same_bits(had[key], each)
            if not still or (key in had and key not in held):
                return None
            found.append(held[key].to(each.device) if key in held else each)
        return found

    def packed(self) -> bytes:
        return self._packed().state

    def _packed(self, own: dict[str, torch.Tensor | None] | None = None) -> _Packed:
        own = self.buffers.published(own)
        if not own and not self._more:
            return _Packed(b"", None)
        if self._same is not None and self._same.are([*own.values()]):
            return _Packed(self._same.packed(), None)
        buffers = {key: buffer for key, buffer in own.items() if buffer is not None}
        if len(buffers) == len(own) and not self._more and all(map(lies_here, buffers.values())):
            self._same = _SameBuffers({"buffers": buffers, **self._moved(), "extra": {}})
            return _Packed(self._same.packed(), None)
        held = self._held()
        return _Packed(pack({"buffers": own, **self._moved(), **held}), worn(held))

    def _moved(self) -> dict[str, list[str]]:
        moved = self.buffers.moved()
        return {"moved": moved} if moved else {}

    def _held(self) -> dict[str, Any]:
        """What there is beside buffers, as it gives itself; not copied."""
        modules = {"extra_state": self._modules.held()} if self._modules.any() else {}
        return {"extra": {name: state_of(each) for name, each in self._extra.items()}, **modules}

    def restore(self, state: bytes, tail: WrittenInTail = NOTHING_WRITTEN) -> tuple[str, ...]:
        """In another process than that which packed it: one that has built the same model. Raises ProtocolError."""
        mine, was, now = (self._read(each) for each in (state, tail.before, tail.after))
        behind, moved = list(tail.own), {*mine["moved"], *now["moved"]}
        given, sent = ({key for key, giver in tail.given if giver == who} for who in (GIVEN_HERE, self._rank))
        first = {key for key in now["buffers"] if self.buffers.is_as_built(key, mine["buffers"].get(key))} - given
        put: Mapping[str, Callable[[dict[str, Any]], None]] = {
            "buffers": lambda values: self.buffers.restore(values, moved),
            "extra_state": self._modules.restore,
        }
        for kind in put:
            shared = {
                key: each
                for key, each in now[kind].items()
                if key in given or (key not in tail.seen.apart and _alike(mine[kind], was[kind], key))
            }
            put[kind]({**mine[kind], **shared})
            # What is written for the first time may be another value on each rank, or the same on all. What this rank
            # itself has given to the others it has.
            lost = [key for key in now[kind] if key not in shared or key not in was[kind] or key in first]
            behind += [key for key in lost if key not in sent]
        for name, each in mine["extra"].items():
            restore_object(self._extra[name], each)
        written = {*now["buffers"], *now["extra_state"], *behind}
        return (*behind, *(each for each in tail.seen.alone if each not in written))

    def written_since(self, before: bytes, after: bytes | None = None) -> WrittenInTail:
        now = self.packed() if after is None else after
        if now == before and not self._given:
            return NOTHING_WRITTEN
        had, has = self._read(before), self._read(now)
        here = self._given_here() & has["buffers"].keys()
        given = {key for key in here if _alike(had["buffers"], has["buffers"], key)}
        kept: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for kind in ("buffers", "extra_state"):
            written = [key for key in has[kind] if key in given or not _alike(had[kind], has[kind], key)]
            for keep, held in zip(kept, (had, has), strict=True):
                keep[kind] = {key: held[kind][key] for key in written if key in held[kind]}
        own = tuple(_told("extra", name) for name in had["extra"] if not _alike(had["extra"], has["extra"], name))
        if not any(kept[1].values()):
            return WrittenInTail(b"", b"", own)
        told = {key: each.by for key, each in self._given.items() if each.by != self._rank}
        told.update(dict.fromkeys(given, GIVEN_HERE))
        after = pack({**kept[1], **self._moved()})
        return WrittenInTail(pack(kept[0]), after, own, given=tuple(sorted(told.items())))

    def tail_wrote(self, before: bytes, after: bytes, others: Sequence[tuple[bytes, bytes]]) -> TailsWrite:
        had, has = self._read(before), self._read(after)
        written = [(kind, key) for kind in _KINDS for key in has[kind] if not _alike(had[kind], has[kind], key)]
        apart, by_others = set[tuple[str, str]](), set[tuple[str, str]]()
        for theirs in others:
            was, now = map(self._read, theirs)
            apart |= {(kind, key) for kind, key in written if not _alike(has[kind], now[kind], key)}
            by_others |= {(kind, key) for kind, key in written if not _alike(was[kind], now[kind], key)}
        of_modules = sorted(key for kind, key in apart if kind != "extra")
        return TailsWrite(tuple(of_modules), tuple(sorted(_told(*each) for each in apart - by_others)))

    def _read(self, state: bytes) -> dict[str, Any]:
        tree = dressed(unpack(state, placed=True), self._held()) if state else {}
        return {"buffers": {}, "moved": [], "extra_state": {}, "extra": {}, **tree}

    def adopt(self, state: bytes) -> None:
        tree = self._read(state)
        self.buffers.restore(tree["buffers"], tree["moved"])
        self._modules.restore(tree["extra_state"])

    def keep(self) -> None:
        """Remembers it, at the begin of a window."""
        if self._in_tail:
            self._tail_ends()
        self._kept = self._packed(self.buffers.keep())

    def rollback(self) -> None:
        """Puts back what ``keep`` found. The objects are not asked for what they hold by now, not even for its classes:
        a body was cut anywhere, also where they can't tell it (a ``Carried`` between ``take`` and ``put``).
        """
        state, classes = self._kept
        tree = dressed(unpack(state, placed=True), classes) if state else {"buffers": {}, "extra": {}}
        self.buffers.rollback(tree["buffers"])
        self._put_back(tree)

    def without_buffers(self) -> bytes:
        """All but the buffers."""
        return pack(self._held()) if self._more else b""

    def put_own(self, state: bytes) -> None:
        """What ``without_buffers`` was, in this very process."""
        if state:
            self._put_back(dressed(unpack(state, placed=True), self._held()))

    def _put_back(self, tree: Mapping[str, Any]) -> None:
        self._modules.restore(tree.get("extra_state", {}))
        for name, state in tree["extra"].items():
            restore_object(self._extra[name], state)


def _told(kind: str, key: str) -> str:
    return f"rank_state[{key!r}]" if kind == "extra" else key


def _alike(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Whether both have it and it is the same, bit for bit, or none has it."""
    if key not in one or key not in other:
        return (key in one) == (key in other)
    mine, theirs = one[key], other[key]
    if type(mine) is type(theirs) is torch.Tensor and is_plainly_dense(mine) and is_plainly_dense(theirs):
        return same_bits(mine, theirs)
    return pack(mine) == pack(theirs)


class _Given(NamedTuple):
    """A buffer that a rank has broadcast, and its version then."""

    by: int
    buffer: torch.Tensor
    version: int


class _Packed(NamedTuple):
    """What there was at a time."""

    state: bytes
    classes: Any
    """See ``containers.worn``."""


class _SameBuffers:
    """Packs the same buffers over and over, three times a step: they are described once, and while they stand still,
    which a look at their memory tells, what was packed last is still true. (160 buffers: 40 us instead of 750.)
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tensors = list(tree["buffers"].values())
        self._memory = columns(self._tensors, _MEMORY)
        self._description, _ = flatten(tree, TENSORS)
        self._glance = Glance([span_of(each) for each in self._tensors])
        self._packed = b""

    def are(self, buffers: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are the buffers, where they were."""
        return same_objects(buffers, self._tensors) and columns(self._tensors, _MEMORY) == self._memory

    def packed(self) -> bytes:
        """As ``leaves.pack`` does it."""
        if self._glance.changed():
            self._packed = msgspec.msgpack.encode((self._description, self._glance.seen()))
        return self._packed
