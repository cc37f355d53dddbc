"""The state that replicas share: see ``frameworks/roles.State``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from resilient_train import _native, config
from resilient_train.errors import ConfigError, LayoutError, StateError, TransferError
from resilient_train.frameworks.accelerator import Accelerator
from resilient_train.frameworks.roles import Damage, Fill, Image, Objects, SavedTree, SaveShare, Sources, StateMark
from resilient_train.frameworks.torch.checks import admission
from resilient_train.frameworks.torch.communication.buckets import wrappers_in
from resilient_train.frameworks.torch.kept.buffers import key_of, write
from resilient_train.frameworks.torch.kept.kept_state import KeptState, zero
from resilient_train.frameworks.torch.kept.optimizer_entries import entries_of, order_of, put_entries
from resilient_train.frameworks.torch.kept.optimizer_groups import Groups, described, found, groups_of, places, regroup
from resilient_train.frameworks.torch.kept.watched_state import digest_of_state
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.sharding.sharded import Replicas, Sharding, placed_like
from resilient_train.frameworks.torch.sharding.zero import ZeroParts
from resilient_train.frameworks.torch.tensors import layout_check
from resilient_train.frameworks.torch.tensors.checkpoint_pieces import piece_of
from resilient_train.frameworks.torch.tensors.containers import copy_tree, dressed
from resilient_train.frameworks.torch.tensors.damage import move
from resilient_train.frameworks.torch.tensors.fingerprint import TorchFingerprint, rows_of
from resilient_train.frameworks.torch.tensors.leaves import (
    PLAIN,
    TENSORS,
    accelerator,
    check_has_state,
    dense,
    dtype_of,
    is_plainly_dense,
    is_sharded,
    laid_out,
    local,
    restore_object,
    span_of,
    state_of,
)
from resilient_train.frameworks.torch.tensors.nan import nan_in
from resilient_train.frameworks.torch.tensors.snapshot_images import Called, Images
from resilient_train.frameworks.torch.tensors.staging import Staging, on_host
from resilient_train.state.checkpoint.target import BlockTarget
from resilient_train.state.nan import NanFound
from resilient_train.state.transfer import Span, view
from resilient_train.state.transfer import digest as digest_of
from resilient_train.state.tree import Path, Slot, flatten, unflatten


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer's group says besides its parameters."""
    settings = group.copy()
    del settings["params"]
    return settings


class _Settings:
    """The settings of one group of an optimizer, to be kept from window to window.

    ``copy`` is taken again only where a value is another object than before, or one that can be changed.
    """

    __slots__ = ("copy", "of", "plain", "values")

    def __init__(self, group: dict[str, Any]) -> None:
        self.of = group
        self.copy = _settings(group)
        self.plain = True
        for key, value in self.copy.items():
            kind = type(value)
            if kind not in PLAIN and not (kind is tuple and PLAIN.issuperset(map(type, value))):
                self.copy[key] = copy_tree(value)
                self.plain = False
        self.values = list(group.values())

    def same(self, group: dict[str, Any]) -> bool:
        """Whether ``group`` says what it said when it was copied."""
        return (
            self.plain
            and group is self.of
            and len(group) == len(self.values)
            and all(map(operator.is_, group.values(), self.values))
            and group.keys() >= self.copy.keys()
        )


_Numbered = Sequence[Sequence[tuple[torch.nn.Parameter, dict[str, Any]]]]
_Landing = tuple[Path, torch.Tensor, torch.Tensor]
"""A tensor of the state by its path, and the host memory in which this rank's part of it arrives."""
_PARTS = "parts"
"""In what is saved: the numbers of optimizers of which each rank has the entries of its part, and those only."""


class TorchState:
    """``rank_state``: what it says of buffers counts where both know of one."""

    def __init__(
        self, objects: Objects, rank_state: TorchRankState, accelerator: Accelerator, staging: Staging | None = None
    ) -> None:
        self._objects = objects
        self._rank_state = rank_state
        self._accelerator = accelerator
        settings = config.read_settings()
        self._log_bytes = settings.tail_log_bytes
        self._staging = staging or Staging(settings.pinned_bytes)
        self._images = Images(self._staging)
        self.kept = KeptState(objects)
        self.sharding = Sharding(objects.models)
        self.divided_among: Replicas = ()
        """The groups of ranks that hold the same, where there are several."""
        self._zero = ZeroParts(objects.optimizers)
        self._group: tuple[int, tuple[int, ...]] | None = None
        """This rank's replica group and its number, where there are several."""
        self._checked_plans = 0
        self._shared: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
        """Tensors that an optimizer keeps beside several parameters, and their versions when that was seen."""
        self._copier = _native.Copier()
        self._fingerprint: TorchFingerprint | None = None
        self._built = layout_check.layout_of(objects.models)
        self._kept: list[list[_Settings]] = [[] for _ in objects.optimizers]
        self._kept_groups: list[Groups] = [[] for _ in objects.optimizers]
        given = {f"state[{name!r}]": thing for name, thing in objects.extra.items()}
        given |= {f"scheduler {number}": each for number, each in enumerate(objects.schedulers)}
        given |= {"scaler": objects.scaler} if objects.scaler is not None else {}
        for what, thing in given.items():
            check_has_state(what, thing)

    def tree(self, *, core: bool = False, found: bool = False) -> dict[str, Any]:
        """The state as a tree of references. ``core``: only what ``params_digest`` covers, without buffers.

        ``found``: as the open window found it.
        """
        objects = self._objects
        models, groups = self._parameters(), [groups_of(optimizer) for optimizer in objects.optimizers]
        found = found and self.kept.open
        if found:
            self.kept.parameters(models)
            groups = self.kept.small["parameters"]
        where = places(models)
        tree: dict[str, Any] = {
            "model": models,
            "optimizer": [entries_of(o, where, of_one) for o, of_one in zip(objects.optimizers, groups, strict=True)],
            "members": described(groups, where),
        }
        if found:
            self.kept.contents(tree["model"])
        if core:
            return tree
        tree["buffers"] = [dict(model.named_buffers()) for model in objects.models]
        tree["moved"] = self._rank_state.buffers.moved()
        optimizers = zip(objects.optimizers, tree["optimizer"], groups, strict=True)
        tree["ordered"] = [order_of(o, entries, where, of_one) for o, entries, of_one in optimizers]
        kept = self.kept.kept_states() if found else {}
        small = self.kept.small if found else self.small_tree()
        tree["small"] = {name: small[name] for name in ("scheduler", "scaler", "groups")}
        tree["extra"] = {name: kept[name] if name in kept else state_of(thing) for name, thing in objects.extra.items()}
        return tree

    def _parameters(self) -> list[dict[str, torch.nn.Parameter]]:
        named = [dict(model.named_parameters()) for model in self._objects.models]
        return [*map(self.sharding.divided, named)] if self.sharding else named

    def small_tree(self) -> dict[str, Any]:
        """Schedulers, scaler and the optimizers' settings: a few numbers, cheap enough to keep for each window."""
        objects = self._objects
        return {
            "scheduler": [state_of(scheduler) for scheduler in objects.schedulers],
            "scaler": state_of(objects.scaler) if objects.scaler is not None else None,
            "groups": [[_settings(group) for group in o.param_groups] for o in objects.optimizers],
        }

    def small_copy(self) -> dict[str, Any]:
        """A ``small_tree`` to be kept. Once a step: nearly all of it are plain settings, which need no copy."""
        objects = self._objects
        groups = []
        for optimizer, kept in zip(objects.optimizers, self._kept, strict=True):
            if len(kept) != len(optimizer.param_groups):
                kept[:] = map(_Settings, optimizer.param_groups)
            copies = []
            for index, group in enumerate(optimizer.param_groups):
                if not kept[index].same(group):
                    kept[index] = _Settings(group)
                copies.append(kept[index].copy)
            groups.append(copies)
        return {
            "scheduler": [copy_tree(state_of(each)) for each in objects.schedulers] if objects.schedulers else [],
            "scaler": copy_tree(state_of(objects.scaler)) if objects.scaler is not None else None,
            "groups": groups,
            "parameters": self.groups(),
        }

    def groups(self) -> list[list[list[torch.nn.Parameter]]]:
        """Of each optimizer the parameters of each of its groups."""
        self._kept_groups = [*map(groups_of, self._objects.optimizers, self._kept_groups)]
        return self._kept_groups

    def replicas(self, told: Replicas) -> Replicas:
        """See ``frameworks/roles.State``."""
        found = self._zero.replicas(self._log_bytes) or self.sharding.replicas()
        if found and told and {frozenset(group) for group in found} != {frozenset(group) for group in told}:
            how = "by its ZeroRedundancyOptimizer" if self._zero else "by the model's meshes"
            raise ConfigError(f"replicas={told}, but {how} the ranks that hold the same are {found}")
        groups = found or told
        self.divided_among = groups if len(groups) > 1 else ()
        numbered = enumerate(self.divided_among)
        self._group = next((each for each in numbered if dist.get_rank() in each[1]), None)
        return groups

    def _called(self, name: str, tensor: torch.Tensor) -> Called:
        """Under which name a rank of one of several groups saves a tensor. Each of them has in its own files whatever
        it needs: of a plain tensor a copy of its own, and its part of one copy of a DTensor (there are several of one
        that is replicated beside others that are divided; and stages of a pipeline call different tensors alike).

        But what one rank updates for all of them is saved by that one.
        """
        assert self._group is not None
        number, members = self._group
        if self._zero and (saver := self._zero.saver(name, tensor)) is not None:
            return Called(name, saver in members)
        if is_sharded(tensor):
            copy = self.sharding.copy_of(tensor, members)
            return Called(f"{name}@{copy}" if copy else name)
        return Called(f"{name}@{number}")

    def keep(self, *, whole: bool) -> None:
        """A window begins: what its redo goes back to, as far as bodies change it."""
        self.sharding.reshard()
        self.kept.begin(self.small_copy(), whole=whole)

    def cut(self) -> None:
        self.sharding.reset()
        self.kept.cut()

    def marks(self) -> dict[str, StateMark]:
        return self.kept.marks()

    def put_back(self, *, intact: bool) -> str:
        """The inverse. Returns the name of something that can't be put back. ``intact``: see ``Step.rollback``."""
        self.sharding.reset()
        self.kept.put_back(intact=intact)
        self._zero.reattach()
        self.restore_small(self.kept.small)
        return self.kept.lost

    def restore_small(self, small: Mapping[str, Any]) -> None:
        """Puts a ``small_tree`` back, or a ``small_copy``: with the groups that there were."""
        for optimizer, held in zip(self._objects.optimizers, small.get("parameters", ()), strict=False):
            regroup(optimizer, held)
        for scheduler, state in zip(self._objects.schedulers, small["scheduler"], strict=True):
            restore_object(scheduler, copy_tree(state))
        if self._objects.scaler is not None:
            restore_object(self._objects.scaler, copy_tree(small["scaler"]))
            # Not in its state_dict(): that gradients were unscaled in the step that is taken back.
            vars(self._objects.scaler).get("_per_optimizer_states", {}).clear()
        for optimizer, groups in zip(self._objects.optimizers, small["groups"], strict=True):
            _put_settings([*zip(optimizer.param_groups, groups, strict=True)])

    def _misplaced(self) -> str:
        """Of the optimizers' tensors: one that another process could not make. It would place a DTensor as the
        parameter that it is beside, and have one for each parameter where several share it (a table that nobody writes
        does no harm), and two where it has another one's memory, or the parameter's. Empty: none.
        """
        for number, optimizer in enumerate(self._objects.optimizers):
            seen, memories = set[int](), dict[int, torch.Tensor]()
            for parameter, entry in optimizer.state.items():
                for name, tensor in entry.items() if isinstance(entry, Mapping) else ():
                    if not isinstance(tensor, torch.Tensor):
                        continue
                    if id(tensor) in seen and self._is_written(number, name, tensor):
                        return (
                            f"optimizer {number} keeps one tensor as {name!r} of several parameters: another process "
                            "would have one for each"
                        )
                    seen.add(id(tensor))
                    if first := _first_there(memories, tensor, parameter):
                        return (
                            f"optimizer {number} keeps {name!r} in the memory of {first}: another process would have "
                            "two, and what is written to one would not be in the other (clone() it)"
                        )
                    if is_sharded(tensor) and not _placed_alike(tensor, parameter):
                        return (
                            f"optimizer {number} keeps {name!r} as a DTensor that is not placed as its parameter: no "
                            "other process could take it up"
                        )
        return ""

    def _is_written(self, optimizer: int, name: str, shared: torch.Tensor) -> bool:
        """Since it was seen first."""
        first, version = self._shared.setdefault((optimizer, name), (shared, shared._version))
        return first is not shared or shared._version != version

    def check(self, *, around: bool = True) -> None:
        models = self._objects.models
        if (
            told := self._misplaced()
            or admission.goes_on(models)
            or admission.reads_in_cpp(models)
            or (around and admission.cast_once(models))
        ):
            raise StateError(told)
        for path, tensor in flatten(self.tree(), TENSORS)[1].items():
            if is_sharded(tensor) and path[0] not in ("model", "optimizer"):
                raise StateError(
                    f"state at {'.'.join(map(str, path))!r} is a DTensor: of what is divided among ranks only "
                    "parameters and the state of their optimizers can be carried yet"
                )
        self._rank_state.packed()

    def sources(self) -> Sources:
        self.sharding.reshard()
        if told := self._misplaced():
            raise StateError(told)
        payload, tensors = flatten(self.tree(), TENSORS)
        kept = [dense(tensor) for tensor in tensors.values()]
        spans = [span_of(tensor) for tensor in kept]
        return Sources(payload, digest_of(payload, spans), spans, kept)

    def fingerprint(self, after: _native.Copier | None = None) -> TorchFingerprint:
        if self._fingerprint is not None:
            self._fingerprint.digest()
        self.sharding.reshard()
        self._fingerprint = TorchFingerprint(self.tree(core=True, found=True), self._copier, after)
        return self._fingerprint

    def nan(self) -> NanFound | None:
        self.sharding.reshard()
        return nan_in(self.tree(core=True, found=True))

    def on_host(self) -> bool:
        return all(on_host(local(each)) for model in self._objects.models for each in model.parameters())

    def rows(self, *, extra: bool = False) -> list[tuple[str, str]]:
        if not extra:
            return rows_of(self.tree(core=True))
        stepped = [(f"scheduler[{number}]", each) for number, each in enumerate(self._objects.schedulers)]
        return self.kept.digests() + [(name, digest_of_state(state_of(each))) for name, each in stepped]

    def tensors(self) -> dict[Path, torch.Tensor]:
        """All tensors of the state by path."""
        return flatten(self.tree(), TENSORS)[1]

    def _make_usable(self) -> None:
        """Before the content comes, because reading a marked tensor fails; the digest says whether it is right."""
        if self._accelerator.repairs_memory:
            held = (*self.tensors().values(), *self._rank_state.buffers.changed().values())
            self._accelerator.mark_safe([local(each) for each in held])  # a DTensor has no memory

    def mend(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str, damage: Damage) -> int:
        """The damaged tensors get new memory (of what is divided, this rank's parts). ``fetch`` gets empty spans for
        what stays.
        """
        self._make_usable()
        mine = self.tensors()
        # The source's own buffers come along for the digest's sake; this rank's are taken from its publication next.
        own = {id(buffer) for buffer in self._rank_state.buffers.changed().values()}
        lost = damage.replicated | {path for path, tensor in mine.items() if id(tensor) in own}
        landing: list[torch.Tensor] = []
        wanted: list[bool] = []

        def place(path: Path, slot: Slot) -> torch.Tensor:
            tensor = mine.get(path)
            told = (slot.shape, slot.divided)
            if (
                tensor is None
                or (tuple(tensor.shape), is_sharded(tensor)) != told
                or not is_plainly_dense(local(tensor))
            ):
                raise TransferError(f"{'.'.join(map(str, path))} is not here as it is on the replica")
            if not on_host(local(tensor)):  # all of the state comes, which `receive` takes by way of host memory
                raise TransferError(f"{'.'.join(map(str, path))} lies on a device, where nobody can write from here")
            if path in lost and not self.sharding.move(tensor):
                move(tensor)
            landing.append(local(tensor))
            wanted.append(path in lost)
            return tensor

        tree = unflatten(manifest, TENSORS, place)
        spans = [span_of(memory) for memory in landing]
        with torch.no_grad():
            fetch([span if want else Span(span.address, 0) for span, want in zip(spans, wanted, strict=True)])
        if digest_of(manifest, spans) != digest:
            raise TransferError("what was not damaged differs from the replica's")
        self._apply(self._dressed(tree))
        return sum(span.size for span, want in zip(spans, wanted, strict=True) if want)

    def receive(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str) -> int:
        """Parameters and buffers are filled where they lie; DDP holds on to them."""
        self._make_usable()
        tree, landing, uploads = self._land([manifest])
        spans = [span_of(memory) for _, _, memory in landing]
        with torch.no_grad():
            fetch(spans)
        arrived = digest_of(manifest, spans)
        if arrived != digest:
            raise TransferError(f"the replica's state arrived damaged: digest {arrived} instead of {digest}")
        self._upload(uploads)
        self._apply(self._dressed(tree))
        return sum(span.size for span in spans)

    def image(self, step: int, share: SaveShare) -> Image:
        self.sharding.reshard()
        self.kept.look()
        called = self._called if self._group is not None else None
        tree = self.tree(found=True)
        if self._zero:
            tree[_PARTS] = self._zero.numbers
        image = self._images.image(tree, step, share, self.kept.lost, called=called)
        if self._images.plans != self._checked_plans or self._shared:
            layout_check.check_unchanged(self._built, layout_check.layout_of(self._objects.models))
            if told := self._misplaced():
                raise LayoutError(told)
            self._checked_plans = self._images.plans
        return image._replace(division=self._division)

    @cached_property
    def _division(self) -> str:
        """See ``roles.Image``."""
        return self._zero.division(self._parameters()) if self._zero else self.sharding.division

    def outgrown(self) -> str:
        """See ``frameworks/roles.Window``."""
        self.sharding.reshard()
        return layout_check.difference(self._built, layout_check.layout_of(self._objects.models)) or self._misplaced()

    def load(self, saved: Callable[[str], Sequence[SavedTree]], fill: Fill) -> None:
        """What lies on an accelerator is written to when all has come whole, and not before."""
        trees = self._of_these_parameters(saved(self._division))
        loaded, landing, uploads = self._land([each.tree for each in trees], anew=True)
        names = dict(each for one in reversed(trees) for each in _named(one))
        targets = [
            BlockTarget(piece_of(names[path], tensor), view(span_of(memory))) for path, tensor, memory in landing
        ]
        fill(targets, [each.group for each in trees])
        self._upload(uploads)
        self._apply(self._dressed(loaded))
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Those of what the script does before its loop. Where it has laid them in one tensor of its own, they stay
        there: what it zeroes and reduces is that one.
        """
        of_buckets = any(wrapper.gradient_as_bucket_view for wrapper in wrappers_in(self._objects.models))
        parameters = [each for model in self._objects.models for each in model.parameters()]
        gradients = [(each, each.grad) for each in parameters if each.grad is not None]
        laid = {_memory(gradient) for _, gradient in gradients if not of_buckets and _is_part(gradient)}
        for parameter, gradient in gradients:
            if _memory(gradient) in laid:
                zero([(parameter, gradient)])
            else:
                parameter.grad = None

    def _of_these_parameters(self, trees: Sequence[SavedTree]) -> Sequence[SavedTree]:
        """Of those of all groups. The others are of other stages of a pipeline. Raises LayoutError if all are."""
        here = [sorted(named) for named in self._parameters()]
        named = [[sorted(each) for each in unflatten(tree.tree, TENSORS, lambda *_: None)["model"]] for tree in trees]
        if here not in named and any(each != named[0] for each in named):
            raise LayoutError(
                "it was written by ranks that held other parts of the model, and none of them had the parameters that "
                "this one has: another number of ranks may share a stage, but the stages have to be the same"
            )
        return [tree for tree, names in zip(trees, named, strict=True) if names == here] or trees

    def _land(
        self, manifests: Sequence[bytes], *, anew: bool = False
    ) -> tuple[Any, list[_Landing], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The state's tree, of the model's own tensors and new ones; each with the host memory to be filled; and what
        ``upload`` then has to do. The optimizers have its groups then. Raises LayoutError. ``anew``: it may have been
        divided in another way; ``manifests`` are of all its parts then.
        """
        parts = [unflatten(each, TENSORS, lambda _, slot: slot._replace(number=0)) for each in manifests]
        if len(parts) > 1:
            _check_parts(parts)
        told = _put_together(parts)
        layout_check.check(told, self._objects)
        slots = {key_of(i, name): slot for i, held in enumerate(told["buffers"]) for name, slot in held.items()}
        self._rank_state.buffers.renew(
            {key: slots[key].strides if key in slots else () for key in told.get("moved", ())}
        )
        self._rank_state.buffers.to_be_ordered(slots)
        self._regroup(told)
        numbered = [[(p, group) for group in o.param_groups for p in group["params"]] for o in self._objects.optimizers]
        here = self._own_tensors()
        own = {path: tensor for path, tensor in here.items() if is_plainly_dense(local(tensor))}
        was = {id(each): told["model"][path[1]][path[2]].divided for path, each in here.items() if path[0] == "model"}
        by_place = any(slot.on_device for held in told["model"] for slot in held.values())
        landing: list[_Landing] = []
        uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
        placed: dict[Path, torch.Tensor] = {}

        def place(path: Path, slot: Slot) -> torch.Tensor:
            if path not in placed:  # the same in each of the manifests
                placed[path] = final(path, slot)
            return placed[path]

        def final(path: Path, slot: Slot) -> torch.Tensor:
            mine = own.get(path)
            if anew:
                slot = _divided_as_here(path, slot, here, numbered, was)
            fits = (
                mine is not None
                and (tuple(mine.shape), str(mine.dtype), is_sharded(mine)) == (slot.shape, slot.dtype, slot.divided)
            )  # fmt: skip
            if fits and mine is not None and on_host(local(mine)):
                landing.append((path, mine, local(mine)))
                return mine
            there = mine if fits else _on_device(path, slot, numbered, told=by_place)
            if there is None and slot.strides:
                there = laid_out(slot)
            shape = slot.shape if there is None else local(there).shape
            host = torch.empty(shape, dtype=dtype_of(slot.dtype), device="cpu")
            _native.prefer_huge_pages(*span_of(host))
            if there is None:
                landing.append((path, host, host))
                return host
            landing.append((path, there, host))
            uploads.append((local(there), host))
            return there

        return _put_together([unflatten(each, TENSORS, place) for each in manifests]), landing, uploads

    def _upload(self, uploads: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Staged, where it lies in one piece in the order of its indices."""
        staged, others = list[tuple[torch.Tensor, torch.Tensor]](), list[tuple[torch.Tensor, torch.Tensor]]()
        for there, host in uploads:
            (staged if is_plainly_dense(there) and not on_host(there) else others).append((there, host))
        self._staging.upload(staged)
        for there, host in others:
            there.data.copy_(host)

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes over a tree of this same process (an undo copy). Buffers that change are the rank's own, and put back
        as such.
        """
        self._regroup(tree)
        own = self._rank_state.buffers.own()
        buffers = [
            {name: each for name, each in held.items() if key_of(index, name) not in own}
            for index, held in enumerate(tree["buffers"])
        ]
        self._apply({**tree, "buffers": buffers})

    def _regroup(self, tree: Mapping[str, Any]) -> None:
        groups = found(tree["members"], self._parameters())
        for optimizer, wanted in zip(self._objects.optimizers, groups, strict=True):
            regroup(optimizer, wanted)

    def _own_tensors(self) -> dict[Path, torch.Tensor]:
        own: dict[Path, torch.Tensor] = {}
        for index, (model, parameters) in enumerate(zip(self._objects.models, self._parameters(), strict=True)):
            own.update({("model", index, name): p for name, p in parameters.items()})
            own.update({("buffers", index, name): b for name, b in model.named_buffers()})
        return own

    def _dressed(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """A tree from elsewhere, as the objects here take it: see ``containers.py``."""
        extra = {name: dressed(tree["extra"][name], state_of(thing)) for name, thing in self._objects.extra.items()}
        return {**tree, "small": dressed(tree["small"], self.small_tree()), "extra": extra}

    def _apply(self, tree: Mapping[str, Any]) -> None:
        models = self._parameters()
        with torch.no_grad():
            for index, model in enumerate(self._objects.models):
                for name, value in tree["model"][index].items():
                    if models[index][name] is not value:
                        models[index][name].copy_(value)
                mine = dict(model.named_buffers())
                for name, value in tree["buffers"][index].items():
                    # Where it can't be written (``expand``) nobody has: who has put another there has moved it.
                    if name in mine and mine[name] is not value:
                        write(mine[name], value)
        orders = tree.get("ordered", [()] * len(tree["optimizer"]))  # a state may be older than that
        optimizers = zip(self._objects.optimizers, tree["optimizer"], orders, strict=True)
        for optimizer, entries, order in optimizers:
            put_entries(optimizer, entries, models, order)
        self.restore_small(tree["small"])
        for name, thing in self._objects.extra.items():
            restore_object(thing, tree["extra"][name])


def _put_settings(groups: Sequence[tuple[dict[str, Any], Mapping[str, Any]]]) -> None:
    """Gives groups their settings. A tensor is written where it lies: groups may share one, and a script may hold it (a
    learning rate). Where they share one here, and did not there, each gets its own.
    """
    in_place = list[tuple[dict[str, Any], str, torch.Tensor]]()
    for group, settings in groups:
        for key, value in settings.items():
            here = group.get(key)
            if isinstance(value, torch.Tensor) and isinstance(here, torch.Tensor) and _fit(here, value):
                in_place.append((group, key, value.to(here.device)))
            else:
                group[key] = copy_tree(value)
    with torch.no_grad():
        for group, key, value in in_place:
            group[key].copy_(value)
    for group, key, value in in_place:
        if not torch.equal(group[key], value):
            group[key] = value.clone()


def _first_there(memories: dict[int, torch.Tensor], tensor: torch.Tensor, parameter: Any) -> str:
    """What has that memory already; empty: nothing. ``memories``: of the tensors before it, by where they begin."""
    if is_sharded(tensor) or not _memory(tensor) or not tensor.numel():
        return ""
    here = tensor.data_ptr()
    if isinstance(parameter, torch.Tensor) and not is_sharded(parameter) and here == parameter.data_ptr():
        return "its parameter"
    return "" if memories.setdefault(here, tensor) is tensor else "another one"


def _is_part(tensor: torch.Tensor) -> bool:
    """Of a larger one."""
    return _memory(tensor) > 0 and tensor.untyped_storage().nbytes() > tensor.nbytes


def _memory(tensor: torch.Tensor) -> int:
    """Where that of a plain tensor begins; 0: it is none."""
    plain = tensor.layout is torch.strided and not is_sharded(tensor)
    return tensor.untyped_storage().data_ptr() if plain else 0


def _fit(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _check_parts(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raises LayoutError if what all replica groups have saved of one state is not the same in all of them."""
    if len({flatten(_without_parts(part), TENSORS)[0] for part in parts}) > 1:
        raise LayoutError(
            "it was written by ranks that held other parts of the model, and the state beside the tensors was not the "
            "same on all of them: it can't be divided anew"
        )


def _without_parts(part: Mapping[str, Any]) -> dict[str, Any]:
    """What is not one part's alone."""
    entries = list(part["optimizer"])
    for number in part.get(_PARTS, ()):
        entries[number] = {key: entry for key, entry in entries[number].items() if isinstance(key, str)}
    return {**part, "optimizer": entries, "moved": (), "ordered": ()}


def _put_together(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trees of the same state, each with the entries of its own part where an optimizer was divided."""
    entries = list(parts[0]["optimizer"])
    for number in parts[0].get(_PARTS, ()):
        entries[number] = {key: entry for part in parts for key, entry in part["optimizer"][number].items()}
    return {**parts[0], "optimizer": entries}


def _named(saved: SavedTree) -> Iterator[tuple[Path, str]]:
    """Its tensors by path, with their names."""
    paths: list[Path] = []
    unflatten(saved.tree, TENSORS, lambda path, _: paths.append(path))
    if len(paths) != len(saved.names):
        raise TransferError(f"the saved state has {len(paths)} tensors, and names for {len(saved.names)}")
    return zip(paths, saved.names, strict=True)


def _placed_alike(tensor: Any, parameter: Any) -> bool:
    return (
        isinstance(parameter, torch.Tensor)
        and is_sharded(parameter)
        and (tensor.device_mesh, tensor.placements, tensor.shape)
        == (parameter.device_mesh, parameter.placements, parameter.shape)
    )


def _divided_as_here(
    path: Path, slot: Slot, here: Mapping[Path, torch.Tensor], numbered: _Numbered, was: Mapping[int, bool]
) -> Slot:
    """A tensor's slot, with ``divided`` as it is here. ``was``: whether a parameter (by its id) was divided there.

    What an optimizer keeps beside a parameter is what it was, unless the parameter is not: then what has its shape goes
    with it. A count of steps has no shape, nor has a parameter that is one number.
    """
    if path in here:
        return slot._replace(divided=is_sharded(here[path]))
    if len(path) > 3 and path[0] == "optimizer" and isinstance(path[2], int):
        parameter, _ = numbered[path[1]][path[2]]
        divided = is_sharded(parameter)
        if was[id(parameter)] is not divided and tuple(parameter.shape) == slot.shape and path[3] != "step":
            return slot._replace(divided=divided)
    return slot


def _on_device(path: Path, slot: Slot, numbered: _Numbered, *, told: bool) -> torch.Tensor | None:
    """New memory of a device for a tensor, or for this rank's part of one; None if it is a whole tensor in the host's
    memory. Raises LayoutError.

    ``numbered`` are, for each optimizer, its parameters and their groups. ``told``: parameters lay on a device there,
    so that what lay on the host beside them was meant to (a count of steps; moments that are offloaded).
    """
    kind, index, number = path[:3] if len(path) > 3 else ("", 0, "")
    if kind != "optimizer" or not isinstance(number, int):
        if slot.divided:
            raise LayoutError(f"{'.'.join(map(str, path))} is divided among ranks there, and not here")
        return None if not slot.on_device or on_host(there := laid_out(slot, accelerator())) else there
    parameter, group = numbered[index][number]
    if slot.divided:
        if not is_sharded(parameter) or tuple(parameter.shape) != slot.shape:
            raise LayoutError(f"{'.'.join(map(str, path))} is not divided as its parameter is here")
        return placed_like(parameter, torch.empty_like(local(parameter), dtype=dtype_of(slot.dtype)))
    # As `Optimizer.load_state_dict` has it: step counts keep to the CPU, unless a kernel of the device reads them.
    counts_on_host = path[3] == "step" and not (group.get("fused") or group.get("capturable"))
    if on_host(parameter) or (not slot.on_device if told else counts_on_host):
        return None
    held = local(parameter)
    if slot.strides:
        return held.new_empty_strided(slot.shape, slot.strides, dtype=dtype_of(slot.dtype))
    return held.new_empty(slot.shape, dtype=dtype_of(slot.dtype))
