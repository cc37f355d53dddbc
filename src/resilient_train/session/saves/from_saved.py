"""A rank's way back: its share of the saved state, out of memory or from storage, and what only it had."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resilient_train._native import Copier
from resilient_train.errors import (
    CheckpointError,
    ConfigError,
    HolderLostError,
    LayoutError,
    ProtocolError,
    TransferError,
    VaultError,
)
from resilient_train.frameworks.roles import SavedTree, State, Window
from resilient_train.frameworks.set_up_recall import HOW_TO_KEEP
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.messages import Refused, Source, Unrestorable
from resilient_train.protocol.replicas import alike
from resilient_train.session.agent_link import Link
from resilient_train.session.saves.publication import Publication
from resilient_train.state.checkpoint.restore import Checkpoint, read_checkpoint
from resilient_train.state.checkpoint.restore_from_memory import HeldImage, fill_from
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.vault import trailer
from resilient_train.state.vault.client import Vault


class Own(msgspec.Struct, frozen=True, array_like=True):
    """What a rank needs besides the tensors: its publication, and what decided the layout of DDP's buckets.

    Without the latter, DDP reduces the first step in another order, and with three or more ranks the bits differ.
    ``division``: how the model was divided among ranks, see ``roles.Image``. ``changed``: ``Window.changed_beside``.
    """

    published: bytes
    layout: bytes
    division: str = ""
    changed: tuple[str, ...] = ()


def beside(changed: Sequence[str]) -> str:
    """That what is not registered has changed, for people; empty if none has."""
    return f"{changed[0]}, which is not registered, has changed in training" if changed else ""


class _OtherPartsError(VaultError):
    """A snapshot in memory has what this rank held; storage has it all, and divides it anew."""


class FromSaved:
    """Takes up what ``Saving`` has saved. ``groups`` are the replica groups, ``event`` writes an event of this rank."""

    def __init__(
        self,
        link: Link,
        state: State,
        window: Window,
        publication: Publication,
        run_dir: Path,
        groups: tuple[tuple[int, ...], ...],
        event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._link = link
        self._state = state
        self._window = window
        self._publication = publication
        self._run_dir = run_dir
        self._groups = groups
        self._event = event

    def restore(self, source: Source) -> bytes:
        """Takes the saved state up; returns what this rank had published. Does not return if the source won't do:
        all ranks start again from another one.
        """
        try:
            own = self._from_memory(source) if source.kind == "memory" else self._from_storage(source)
        except (ConfigError, LayoutError) as error:
            # The state is whole, and another job's. To begin anew beside it would be worse than to end.
            told = (
                f"the state saved in {self._run_dir} can't be taken up: {error}. To begin anew, give another --run-dir"
            )
            self._link.channel.send(Refused(told))
            self._link.wait_for_the_end()
        except (CheckpointError, ProtocolError, TransferError, VaultError, OSError) as error:
            whole, passing = isinstance(error, _OtherPartsError), isinstance(error, (HolderLostError, OSError))
            self._link.channel.send(Unrestorable(source, f"rank {self._link.rank}: {error}", whole, passing))
            self._link.wait_for_the_end()
        if own.changed:
            self._look_beside(beside(own.changed))
        # A job that people start again may have another script, which freezes other layers.
        otherwise = self._window.rebuild_reducer(own.layout, source.commits, modes=self._link.attempt > 0)
        if otherwise and self._link.rank == 0:
            more = f" and {len(otherwise) - 3} more" if len(otherwise) > 3 else ""
            say_aside(
                f"{', '.join(otherwise[:3])}{more}: what no checkpoint holds was otherwise when this state was saved; "
                "if nothing but the loop has switched it, the loop must do so again, by the step's number "
                "(docs/how-to/loops.md, State that is written before the update)"
            )
        self._event("restored", {"source": source.kind, "commits": source.commits, "path": source.path})
        return own.published

    def _look_beside(self, changed: str) -> None:
        """What is not registered begins anew, and had changed. People may have started the job again because of that,
        or bring it back by themselves; nobody has if all ranks were lost.
        """
        if self._link.attempt == 0:
            if self._link.rank == 0:
                say_aside(f"where the state was saved, {changed}; here it begins anew")
            return
        told = f"all ranks have been started again, and {changed}, so that nobody brings it back: {HOW_TO_KEEP}"
        self._link.channel.send(Refused(told))
        self._link.wait_for_the_end()

    def _from_storage(self, source: Source) -> Own:
        with read_checkpoint(Path(source.path)) as checkpoint:
            old = checkpoint.manifest.replica_groups
            own_of = functools.cache(functools.partial(self._own_of, checkpoint))
            alike = len(old) == len(self._groups)
            group = self._group() if alike else 0

            def saved(division: str) -> list[SavedTree]:
                nonlocal alike
                # The same on all ranks, or on those of a stage, which its groups have among them.
                alike = alike and own_of(group)[1].division == division
                trees = {number: checkpoint.tree(number) for number in ([group] if alike else range(len(old)))}
                return [SavedTree(each.tree, each.names, number) for number, each in trees.items()]

            def fill(targets: Sequence[BlockTarget], groups: Sequence[int]) -> None:
                nonlocal group
                group = groups[0]
                if not alike and (odd := checkpoint.differing(groups)):
                    raise ConfigError(
                        f"{checkpoint.path} was written by ranks that held other parts of the model, and {odd} was not "
                        f"the same on all of them ({len(old)} replica groups, here {len(self._groups)}): it can't be "
                        "divided anew"
                    )
                checkpoint.load(targets)

            self._state.load(saved, fill)
            held, first = own_of(group)
            if alike and old == self._groups and self._link.rank in held:  # it may have died with the rank
                return held[self._link.rank]
            place = self._groups[group].index(self._link.rank) if alike else len(old[group])
            return self._from_another_world(checkpoint, held, first, *old[group][place : place + 1])

    def _own_of(self, checkpoint: Checkpoint, group: int) -> tuple[dict[int, Own], Own]:
        """Of an old replica group: the own state of each rank, and of the first one that has left it."""
        ranks = checkpoint.manifest.replica_groups[group]
        held = {rank: _unpacked(own) for rank in ranks if (own := checkpoint.rank_state(rank)) is not None}
        if not held:
            raise CheckpointError(str(checkpoint.path), f"lacks the own state of all ranks of group {group}")
        return held, next(iter(held.values()))

    def _from_another_world(self, checkpoint: Checkpoint, held: dict[int, Own], first: Own, mine: int = -1) -> Own:
        """The part of a rank's own state, see ``resharding``. ``mine``: the old rank whose place this one has, if any;
        none where the parts are others: who computes what together may have changed.
        """
        published, found = self._publication.elsewhere(held[mine].published if mine in held else None, first.published)
        worlds = {"old_world_size": checkpoint.manifest.world_size, "world_size": self._link.world_size}
        self._event("resharded", {**worlds, "own_state_of": mine if mine in held else -1, **found})
        return Own(published, first.layout, changed=first.changed)

    def _from_memory(self, source: Source) -> Own:
        with contextlib.ExitStack() as stack:
            vault = stack.enter_context(contextlib.closing(Vault.connect(self._run_dir)))
            held = {
                rank: stack.enter_context(self._held(vault, rank, source.commits))
                for rank in self._groups[self._group()]
            }
            if not alike(each.fingerprint for _, each in held.values()):
                raise VaultError(
                    f"the snapshots from before update {source.commits} are parts of replicas that differed"
                )
            images = [image for image, _ in held.values()]
            mine = held[self._link.rank][1]
            if not {place.piece.name for image in images for place in image.header.places}.issuperset(mine.names):
                # A rank that updates something for all of them has saved it for all of them.
                others = (rank for rank in range(self._link.world_size) if rank not in held)
                images += [stack.enter_context(self._held(vault, rank, source.commits))[0] for rank in others]
            own = _unpacked(mine.own[self._link.rank])

            def saved(division: str) -> list[SavedTree]:
                if own.division != division:  # another launcher's job, whose script has changed
                    raise _OtherPartsError("its snapshot is of other parts of the model")
                return [SavedTree(mine.tree, mine.names)]

            self._state.load(saved, lambda targets, _: fill_from(images, targets, Copier()))
        return own

    @contextlib.contextmanager
    def _held(self, vault: Vault, rank: int, commits: int) -> Iterator[tuple[HeldImage, trailer.Trailer]]:
        with vault.newest(rank, commits=commits) as found:
            if found is None:
                raise VaultError(f"the snapshot of rank {rank} from before update {commits} is gone")
            pair, snapshot = found
            name = f"the snapshot of rank {rank} from before update {commits}"
            image = HeldImage(name, pair.fd, pair.start_of(snapshot.slot), snapshot.image_bytes, snapshot.digest)
            with pair.region(snapshot.slot) as region:
                yield image, trailer.read(region, snapshot)

    def _group(self) -> int:
        return next(number for number, ranks in enumerate(self._groups) if self._link.rank in ranks)


def _unpacked(own: bytes) -> Own:
    try:
        return msgspec.msgpack.decode(own, type=Own)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"a rank's own state can't be read: {error}") from None
