"""State from a replica: a source offers it, a rank without fetches it, out of the source's memory or over the group."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from resilient_train.errors import TransferError
from resilient_train.frameworks.base import Damage, Framework, Sources
from resilient_train.protocol.messages import Fetched, Offer, Plan, Pull
from resilient_train.session.link import Link
from resilient_train.state.transfer import Span, read_from

NOTHING_DAMAGED = Damage(frozenset(), (), 0)


class Handover:
    """``transfer`` is the setting of that name. ``damaged``: what of this rank's state is lost, where not all is."""

    def __init__(self, link: Link, engine: Framework, transfer: str) -> None:
        self._link = link
        self._engine = engine
        self._transfer = transfer
        self._sources: Sources | None = None
        self._layout: bytes | None = None
        self.damaged = NOTHING_DAMAGED

    def offer(self, generation: int, targets: tuple[int, ...]) -> None:
        """Describes this rank's state to each rank that is to copy it. Held unchanged until Resume."""
        self._sources = self._engine.sources()
        for target in targets:
            manifest, digest = self._sources.manifest, self._sources.digest
            self._link.channel.send(Offer(generation, self._link.rank, target, os.getpid(), manifest, digest))

    def serve(self, pull: Pull) -> None:
        """Sends the state to a rank that can't read it. Raises RuntimeError."""
        assert self._sources is not None, "pulled without an offer"
        self._engine.send_over_group(self._sources, pull.target)

    def forget(self) -> None:
        """Nobody copies any more."""
        self._sources = None

    def take(self, plan: Plan, offer: Offer, published: bytes | None, load: Callable[[bytes], int]) -> int:
        """Takes a replica's state over, and with ``load`` what this rank had published. Returns what ``load`` does.

        Raises TransferError, RuntimeError or OSError: the source may have died under the copy.
        """
        begun_ns = time.monotonic_ns()
        size, way = self._receive(offer)
        took_ns = time.monotonic_ns() - begun_ns
        self._link.channel.send(Fetched(plan.generation, offer.source, size, took_ns, way))
        if published is None:
            raise TransferError(f"rank {self._link.rank} had published nothing from which update {plan.commits} starts")
        self._layout = offer.manifest
        return load(published)

    def take_layout(self) -> bytes:
        """The manifest of what was taken over last, for the engine to read the layout from."""
        assert self._layout is not None, "nothing was copied"
        layout, self._layout = self._layout, None
        return layout

    def _receive(self, offer: Offer) -> tuple[int, str]:
        remote = self._engine.remote_spans(offer.manifest)

        def read_memory(local: list[Span]) -> None:
            wanted = [Span(r.address, min(r.size, here.size)) for r, here in zip(remote, local, strict=True)]
            read_from(offer.pid, wanted, local)

        damaged, self.damaged = self.damaged, NOTHING_DAMAGED
        if self._transfer != "group":
            try:
                if damaged.lost:
                    with contextlib.suppress(TransferError):  # an update was begun: then all of it is fetched
                        return self._engine.mend(offer.manifest, read_memory, offer.digest, damaged), "memory"
                return self._engine.receive(offer.manifest, read_memory, offer.digest), "memory"
            except PermissionError:
                if self._transfer == "memory":
                    raise
        self._link.channel.send(Pull(offer.generation, offer.source, self._link.rank))
        fetch = self._engine.fetch_over_group(offer.source)
        return self._engine.receive(offer.manifest, fetch, offer.digest), "group"
