"""State from a replica: a source offers it, a rank without fetches it, out of the source's memory or over the group."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable

import msgspec

from resilient_train.errors import ConfigError, TransferError
from resilient_train.frameworks.roles import Damage, Groups, Sources, State, Window, WrittenInTail
from resilient_train.protocol.messages import Fetched, Offer, Plan, Pull
from resilient_train.session.agent_link import Link
from resilient_train.session.saves.publication import Publication
from resilient_train.state.transfer import Span, read_from

NOTHING_DAMAGED = Damage(frozenset(), (), 0)


class LoopsBegin(msgspec.Struct, array_like=True, frozen=True):
    """With how many updates the loops of all ranks began in this job, and whether their state was one that ``LoopHead``
    takes up.
    """

    commits: int = 0
    headed: bool = False


class Offered(msgspec.Struct, array_like=True):
    """What an Offer's manifest holds: the state's tree, where its bytes lie in the source's memory, and the layout."""

    tree: bytes
    spans: list[tuple[int, int]]
    layout: bytes
    loop: tuple[int, int]
    """With which ``total`` and ``start`` its loop has begun."""
    tail: WrittenInTail
    loops_begin: LoopsBegin


class FromReplica:
    """``transfer`` is the setting of that name. ``damaged``: what of this rank's state is lost, where not all is.
    ``publication`` is asked for what a tail has written.
    """

    def __init__(
        self, link: Link, state: State, window: Window, groups: Groups, publication: Publication, transfer: str
    ) -> None:
        self._link = link
        self._state = state
        self._window = window
        self._groups = groups
        self._publication = publication
        self._transfer = transfer
        self._sources: Sources | None = None
        self._layout: bytes | None = None
        self.damaged = NOTHING_DAMAGED
        self.loop = (0, 0)
        """As ``Offered.loop``, of this process ..."""
        self.loops_begin = LoopsBegin()
        """... and as ``Offered.loops_begin``."""

    def offer(self, generation: int, commits: int, targets: tuple[int, ...], *, within: bool) -> None:
        """Describes this rank's state to each rank that is to copy it, from before update ``commits``. Held unchanged
        until Resume. ``within``: see ``Step.layout``.
        """
        self._sources = sources = self._state.sources()
        spans = [(span.address, span.size) for span in sources.spans]
        layout, tail = self._window.layout(within=within), self._publication.around_tail(commits)
        changed = self._window.changed_beside()
        manifest = msgspec.msgpack.encode(Offered(sources.manifest, spans, layout, self.loop, tail, self.loops_begin))
        for target in targets:
            to = generation, self._link.rank, target
            self._link.channel.send(Offer(*to, os.getpid(), manifest, sources.digest, changed))

    def serve(self, pull: Pull) -> None:
        """Sends the state to a rank that can't read it. Raises RuntimeError."""
        assert self._sources is not None, "pulled without an offer"
        self._groups.send(self._sources.spans, pull.target)

    def forget(self) -> None:
        """Nobody copies any more."""
        self._sources = None

    def take(
        self, plan: Plan, offer: Offer, published: bytes | None, load: Callable[[bytes, WrittenInTail], int]
    ) -> int:
        """Takes a replica's state over, and with ``load`` what this rank had published. Returns what ``load`` does.

        Raises TransferError, RuntimeError or OSError: the source may have died under the copy; ConfigError if the
        loops are not the same one.
        """
        begun_ns = time.monotonic_ns()
        offered = _read(offer)
        self._check_loop(offer.source, offered.loop)
        self._window.forget()  # a rollback would mix what it remembers with the state that comes
        size, way = self._receive(offer, offered)
        took_ns = time.monotonic_ns() - begun_ns
        self._link.channel.send(Fetched(plan.generation, offer.source, size, took_ns, way))
        if published is None:
            raise TransferError(f"rank {self._link.rank} had published nothing from which update {plan.commits} starts")
        self._layout, self.loops_begin = offered.layout, offered.loops_begin
        return load(published, offered.tail)

    def _check_loop(self, source: int, theirs: tuple[int, int]) -> None:
        """A script that looks for its newest checkpoint finds, in a new process, what this very job has written."""
        if self.loop == theirs:
            return
        (total, start), (others_total, others_start) = self.loop, theirs
        raise ConfigError(
            f"since its new process has begun its loop with session.steps({total}, start={start}), and rank {source} "
            f"with session.steps({others_total}, start={others_start}). What "
            "a script reads (from a checkpoint that this job has written since, say) must be what its first process "
            "read: broadcast it from rank 0 before the Session (docs/how-to/after-the-update.md)"
        )

    def take_layout(self) -> bytes:
        """That of what was taken over last: see ``Step.rebuild_reducer``."""
        assert self._layout is not None, "nothing was copied"
        layout, self._layout = self._layout, None
        return layout

    def _receive(self, offer: Offer, offered: Offered) -> tuple[int, str]:
        remote = [Span(*pair) for pair in offered.spans]

        def read_memory(local: list[Span]) -> None:
            wanted = [Span(r.address, min(r.size, here.size)) for r, here in zip(remote, local, strict=True)]
            read_from(offer.pid, wanted, local)

        damaged, self.damaged = self.damaged, NOTHING_DAMAGED
        if self._transfer != "group":
            try:
                if damaged.lost:
                    with contextlib.suppress(TransferError):  # an update was begun: then all of it is fetched
                        return self._state.mend(offered.tree, read_memory, offer.digest, damaged), "memory"
                return self._state.receive(offered.tree, read_memory, offer.digest), "memory"
            except PermissionError:
                if self._transfer == "memory":
                    raise
        self._link.channel.send(Pull(offer.generation, offer.source, self._link.rank))
        fetch = functools.partial(self._groups.receive, source=offer.source)
        return self._state.receive(offered.tree, fetch, offer.digest), "group"


def _read(offer: Offer) -> Offered:
    try:
        return msgspec.msgpack.decode(offer.manifest, type=Offered)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the replica's offer can't be read: {error}") from None
