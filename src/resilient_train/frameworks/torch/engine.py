"""The torch engine: the verbs of ``frameworks/base.Framework``, each handed to the file that knows about it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from resilient_train import config
from resilient_train._native import Board
from resilient_train.errors import UsageError
from resilient_train.frameworks.base import (
    Conductor,
    Damage,
    Fingerprint,
    Image,
    Objects,
    Share,
    Sources,
    Strides,
    Tails,
    Workers,
)
from resilient_train.frameworks.supported import torch_problem
from resilient_train.frameworks.torch import admission
from resilient_train.frameworks.torch import group as group_module
from resilient_train.frameworks.torch.arguments import look
from resilient_train.frameworks.torch.buckets import Buckets, wrappers_in
from resilient_train.frameworks.torch.by_name import taken_by_name
from resilient_train.frameworks.torch.damage import assess, move
from resilient_train.frameworks.torch.data import drop_workers, fast_forward, strides, workers
from resilient_train.frameworks.torch.device import DeviceErrors, accelerator
from resilient_train.frameworks.torch.generators import random_state, restore_random_state
from resilient_train.frameworks.torch.group import Built, ResilientGroup, groups, works
from resilient_train.frameworks.torch.layout import History, OfferTree, read_layout, read_offer
from resilient_train.frameworks.torch.leaves import pack, unpack
from resilient_train.frameworks.torch.parts import parts
from resilient_train.frameworks.torch.rank_state import RankState
from resilient_train.frameworks.torch.replicated import Replicated, copy_tree
from resilient_train.frameworks.torch.samples import Samples
from resilient_train.frameworks.torch.saved import Saved
from resilient_train.frameworks.torch.steps import Steps
from resilient_train.frameworks.torch.storages import Memory, registered
from resilient_train.frameworks.torch.tail import Tail
from resilient_train.frameworks.torch.verbs import POINT_TO_POINT
from resilient_train.frameworks.torch.works import GuardedWork
from resilient_train.protocol.rank_effects import Mode
from resilient_train.state.checkpoint.target import Target
from resilient_train.state.transfer import Span, chunks, digest, view

_GROUP_CHUNK_BYTES = 16 << 20
_DRAIN_S = 0.25


class _Start(NamedTuple):
    """What a redo of the window goes back to; the parameters have not changed by then."""

    random: bytes
    gradients: bool
    ranks_own: bytes
    small: dict[str, Any]
    shares_buffers: list[bool]


class TorchEngine:
    """See ``frameworks/base.Framework``."""

    def __init__(self, objects: Objects) -> None:
        admission.check(objects)
        self._objects = objects
        self._steps = Steps(objects)
        self._samples = Samples(objects.models)
        self._replicated = Replicated(objects)
        self._ranks_own = RankState(objects.models, objects.rank_extra)
        self._saved = Saved(self._replicated)
        self._checked_plans = 0
        self._buckets = Buckets(objects.models)
        self._works: list[GuardedWork] = []
        self._handles: list[Any] = []
        self._mode = Mode.DIRECT
        self._renewed = False
        """The groups' connections are new ones, and the tail before them may not be over yet."""
        self._peers: Tails | None = None
        self._tail: Tail | None = None
        self._start: _Start | None = None
        self._undo: dict[str, Any] | None = None
        self._errors = DeviceErrors(config.read_settings())
        self._device = accelerator(dist.get_rank() if dist.is_initialized() else 0)

    # -- process groups

    def group_names(self) -> tuple[str, ...]:
        return tuple(groups)

    def group_problem(self) -> str:
        if problem := torch_problem(torch.__version__):
            return problem
        if not dist.is_initialized():
            return "this process has no process group: call torch.distributed.init_process_group first"
        if not isinstance(dist.group.WORLD, ResilientGroup):
            refused = f"the process group's backend is {dist.get_backend()!r}, which cannot take a replacement in"
            if where := taken_by_name():
                return (
                    f"{refused}: {where} imports init_process_group by its name before resilient_train is imported, so "
                    "it is torch's own: move `import resilient_train` above that line"
                )
            return f'{refused}: import resilient_train before init_process_group, or pass it backend="resilient"'
        strange = group_module.strange_backend()
        if strange:
            return (
                f"a process group of this process has the backend {strange!r}, which can't be rebuilt after a fault: "
                "make it with gloo, after resilient_train is imported"
            )
        return ""

    def sockets(self) -> list[tuple[int, int]]:
        return [pair for group in groups.values() for pair in group.sockets]

    def release_waiters(self) -> int:
        return works.release()

    def set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if self._renewed and mode is Mode.DIRECT:  # all ranks go on from here: what was on its way is lost
            self._renewed = False
            for group in groups.values():
                group.forget_messages()
        if self._tail is not None:
            self._tail.mode = mode

    def exchange(self, finishers: Sequence[int]) -> None:
        assert self._tail is not None
        self._tail.begin_exchange(finishers)
        self.set_mode(Mode.EXCHANGE)

    def close_groups(self) -> None:
        if not any(group.solo for group in groups.values()):  # a process that joins has had no peer to wait for
            self._device.stop()
        works.drain(_DRAIN_S)
        self._works.clear()
        for group in groups.values():
            group.close_inner("a recovery is under way")

    def build_groups(self, generation: int, attempt: int, cancelled: threading.Event) -> list[Built]:
        return [group.build(generation, attempt, cancelled) for group in groups.values()]

    def adopt_groups(self, built: list[Built], *, replaced: bool) -> None:
        if self._device.stopped:
            self._device.restart(group_module.hccl_groups(), replaced=replaced)
        for group, each in zip(groups.values(), built, strict=True):
            group.adopt(each)
        self._renewed = True

    def groups_broken(self) -> bool:
        return any(group.inner is None or group.broken() for group in groups.values())

    def break_collectives(self) -> None:
        for descriptor, _ in self.sockets():
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)  # gloo may have closed it over another fault

    def collectives_intact(self) -> bool:
        works, self._works = self._works, []
        try:
            for work in works:
                if not work.succeeded:
                    work.wait()
        except RuntimeError:
            return False
        self._device.synchronize()
        return True

    def synchronize(self) -> None:
        self._device.synchronize()

    # -- before the loop

    def set_up_problem(self) -> str:
        set_up = group_module.set_up()
        return set_up.problem(self._registered) if set_up is not None else ""

    def end_set_up(self) -> bytes:
        set_up = group_module.set_up()
        record = set_up.finish(self._registered) if set_up is not None else b""
        group_module.end_set_up()
        return record

    def _registered(self) -> Memory:
        return registered(self._objects)

    # -- the step

    def attach(self, conductor: Conductor, peers: Tails) -> None:
        self._peers = peers
        self._tail = Tail(conductor, peers)
        self._steps.attach(conductor)
        scaler = self._objects.scaler
        if scaler is not None:
            update = scaler.update

            def update_and_tell(*args: Any, **kwargs: Any) -> None:
                update(*args, **kwargs)
                conductor.after_scaler()

            scaler.update = update_and_tell
        group_module.watch(self)

    def detach(self) -> None:
        self._errors.stop()
        group_module.watch(None)
        if self._tail is not None:
            self._tail.close()
        group_module.wait_for_droppers(_DRAIN_S)
        self._steps.detach()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buckets.forget()
        if self._objects.scaler is not None:
            vars(self._objects.scaler).pop("update", None)

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """A collective is called; see ``group.Watcher``."""
        assert self._peers is not None
        assert self._tail is not None
        self._steps.check_collective(verb)
        mode = self._mode
        if mode is Mode.LOOPBACK:
            return group.run_alone(verb, args)
        if mode is Mode.BETWEEN:
            raise UsageError(
                f"{verb} was called between two session.call() of one accumulation window, and a fault would have some "
                "ranks call bodies again without what stands between them; call it in a body, or behind the update"
            )
        if verb in POINT_TO_POINT:
            return (
                group.run(verb, args) if mode in (Mode.DIRECT, Mode.UPDATE) else self._tail.message(group, verb, args)
            )
        if group.spans_job:
            self._peers.enter_collective()
        if mode is Mode.DIRECT:
            work = group.run(verb, args)
            if isinstance(work, GuardedWork):
                self._works.append(work)
            return work
        if mode is not Mode.UPDATE and verb == "monitored_barrier":
            return self._tail.call(group, "barrier", ())
        if mode is not Mode.UPDATE:
            return self._tail.call(group, verb, args)
        raise UsageError(
            f"{verb} was called while the update of this step is only half done (one optimizer has written and another "
            "has not, or a closure that was given to optimizer.step() communicates): pass Session(undo=True), so that "
            "such a step can be redone"
        )

    def begin(self) -> None:
        self._works.clear()
        self._steps.begin()
        self._samples.take()
        self._undo = None
        shares = self._buckets.shares_buffers
        small = self._replicated.small_copy()
        self._start = _Start(random_state(), torch.is_grad_enabled(), self.rank_state(), small, shares)
        if not self._buckets.known:
            self._buckets.record()

    def rollback(self) -> None:
        start = self._start
        self._steps.begin()
        if start is None:
            return
        if self._undo is not None:
            self._replicated.restore(self._undo)
            self._undo = None
        # `with torch.set_grad_enabled(False)` switches before its `with` begins; cut in between, nobody switches back.
        torch.set_grad_enabled(start.gradients)
        for optimizer in self._objects.optimizers:
            optimizer.zero_grad(set_to_none=True)
        for model in self._objects.models:
            model.zero_grad(set_to_none=True)
        self._ranks_own.rollback(start.ranks_own)
        self._replicated.restore_small(start.small)
        self._buckets.shares_buffers = start.shares_buffers
        restore_random_state(start.random)

    def committed(self, commits: int) -> None:
        self._start = None
        self._undo = None
        if self._tail is not None:
            self._tail.begin(commits)

    def changed_unasked(self) -> str:
        return self._samples.changed()

    def without_optimizer(self) -> list[str]:
        return admission.without_optimizer(self._objects)

    def save_undo(self) -> None:
        if self._undo is None:
            self._undo = copy_tree(self._replicated.tree())

    # -- state

    def rank_state(self) -> bytes:
        return self._ranks_own.packed() if self._ranks_own.any else b""

    def load_rank_state(self, state: bytes) -> None:
        self._ranks_own.restore(state)

    def adopt_rank_state(self, state: bytes) -> None:
        self._ranks_own.adopt(state)

    def pack(self, tree: Any) -> bytes:
        return pack(tree)

    def unpack(self, payload: bytes) -> Any:
        return unpack(payload)

    def gradients_ready(self, update: int) -> None:
        if not self._buckets.known:
            self._buckets.recorded(update)

    def sources(self) -> Sources:
        inner = self._replicated.sources()
        manifest = OfferTree(inner.manifest, [(span.address, span.size) for span in inner.spans], self._history())
        return Sources(msgspec.msgpack.encode(manifest), inner.digest, inner.spans, inner.keep_alive)

    def remote_spans(self, manifest: bytes) -> list[Span]:
        """Where the source's bytes lie in its own address space."""
        return [Span(*pair) for pair in read_offer(manifest).spans]

    def watch_device(self, board: Board, rank: int) -> None:
        self._errors.start(board, rank)

    def device_notes(self) -> list[dict[str, Any]]:
        return self._errors.take_notes()

    def device_errors(self, *, wait: bool) -> list[Span]:
        return self._errors.take(wait=wait)

    def assess(self, ranges: list[Span]) -> Damage:
        own = self._ranks_own.buffers.changed()
        damage = assess(ranges, self._replicated.tensors(), own)
        if not self._device.repairs_memory:
            self._errors.repair(ranges)
            for name in damage.own:
                move(own[name])
        return damage

    def confirm(self, damage: Damage) -> Damage:
        if not self._device.stopped:
            return damage
        persistent = self._device.check(reported=self._errors.unchecked)
        self._errors.unchecked = False
        if damage.lost or not persistent:
            return damage
        # No tensor is known to be hit, and yet one is: the device did not say which, or it is not registered.
        everything = frozenset(self._replicated.tensors())
        return Damage(everything, tuple(self._ranks_own.buffers.changed()), damage.elsewhere)

    def poison(self, target: str) -> None:
        parameters = [p for model in self._objects.models for p in model.parameters() if p.requires_grad]
        middle = parameters[len(parameters) // 2]
        state = self._objects.optimizers[0].state.get(middle, {})
        moments = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim()]
        buffers = [b for model in self._objects.models for b in model.buffers() if b.dim()]
        victims = {"optimizer": moments, "buffer": buffers, "gradient": [middle.grad], "param": [middle.data]}
        found = [tensor for tensor in victims.get(target, []) if tensor is not None]
        # An activation belongs to nobody that the Session knows; so does what this step does not have (a gradient).
        self._errors.poison(found[0] if found else torch.zeros(64))
        raise RuntimeError(f"UCE ERROR (injected: {target}), error code is 507053")

    def mend(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str, damage: Damage) -> int:
        # The source's own buffers come along for the digest's sake; this rank's are taken from its publication next.
        self._begin_anew()
        mine = {id(buffer) for buffer in self._ranks_own.buffers.changed().values()}
        own = {path for path, tensor in self._replicated.tensors().items() if id(tensor) in mine}
        return self._replicated.mend(read_offer(manifest).tree, fetch, digest, damage.replicated | own)

    def receive(self, manifest: bytes, fetch: Callable[[list[Span]], None], digest: str) -> int:
        self._begin_anew()
        return self._replicated.receive(read_offer(manifest).tree, fetch, digest)

    def _begin_anew(self) -> None:
        self._start = self._undo = None  # a rollback would mix what was remembered with the state that comes
        if not self._device.repairs_memory:
            return
        # Before the content comes, because reading a marked tensor fails; the digest says whether the content is right.
        self._device.mark_safe([*self._replicated.tensors().values(), *self._ranks_own.buffers.changed().values()])

    def send_over_group(self, sources: Sources, target: int) -> None:
        world = groups[next(iter(groups))]
        for piece in chunks(sources.spans, _GROUP_CHUNK_BYTES):
            world.run("send", ([_as_tensor(piece)], target, 0)).wait()

    def fetch_over_group(self, source: int) -> Callable[[list[Span]], None]:
        world = groups[next(iter(groups))]

        def fetch(spans: list[Span]) -> None:
            for piece in chunks(spans, _GROUP_CHUNK_BYTES):
                world.run("recv", ([_as_tensor(piece)], source, 0)).wait()

        return fetch

    def check_state(self) -> None:
        self._replicated.check()
        self._ranks_own.packed()

    def digests(self) -> tuple[str, str]:
        return self._replicated.core_digest(), digest(self._ranks_own.packed() + random_state(), [])

    def parts(self, more: Mapping[str, Any]) -> dict[str, str]:
        return parts(self._replicated, self._objects.rank_extra, more)

    def fingerprint(self) -> Fingerprint:
        return self._replicated.fingerprint()

    def on_host(self) -> bool:
        return self._replicated.on_host()

    def rows(self) -> list[tuple[str, str]]:
        return self._replicated.rows()

    def averages(self) -> bool:
        trained = (model for model in self._objects.models if any(p.requires_grad for p in model.parameters()))
        return all(wrappers_in((model,)) for model in trained)

    def settle(self, manifest: bytes | None, commits: int) -> None:
        self._settle(read_offer(manifest).history if manifest is not None else None, commits)

    def _settle(self, history: History | None, commits: int) -> None:
        before, self._mode = self._mode, Mode.LOOPBACK
        try:
            self._buckets.restore(history.passes if history is not None else None, commits)
        finally:
            self._mode = before
        if history is not None:
            self._buckets.shares_buffers = history.shares_buffers
        self._works.clear()

    def _history(self) -> History:
        return History(self._buckets.passes, self._buckets.shares_buffers)

    def image(self, step: int, share: Share) -> Image:
        image = self._saved.image(step, share)
        if self._saved.plans != self._checked_plans:
            self._replicated.check_unchanged()
            self._checked_plans = self._saved.plans
        return image

    def layout(self) -> bytes:
        return msgspec.msgpack.encode(self._history())

    def restore_layout(self, layout: bytes, commits: int) -> None:
        self._settle(read_layout(layout), commits)

    def load(self, tree: bytes, names: Sequence[str], fill: Callable[[Sequence[Target]], object]) -> None:
        self._saved.load(tree, names, fill)

    # -- data

    def look(self, arguments: Any) -> bytes:
        return look(arguments)

    def random_state(self) -> bytes:
        return random_state()

    def restore_random_state(self, state: bytes) -> None:
        restore_random_state(state)

    def workers(self, loader: Any) -> Workers:
        return workers(loader)

    def drop_workers(self, loader: Any) -> None:
        drop_workers(loader)

    def fast_forward(
        self, loader: Any, batches: int, samples: int, begin: Callable[[Any], Iterator[Any]]
    ) -> Iterator[Any]:
        return fast_forward(loader, batches, samples, begin)

    def strides(self, loader: Any) -> Strides | None:
        return strides(loader)

    def call_in_forward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each forward pass (for fault injection)."""
        leaves = [m for model in self._objects.models for m in model.modules() if not any(m.children())]
        self._handles.append(leaves[len(leaves) // 2].register_forward_hook(lambda *_: call()))

    def call_in_backward(self, call: Callable[[], None]) -> None:
        """Calls ``call`` in the middle of each backward pass, some gradients being ready and some not."""
        parameters = [p for model in self._objects.models for p in model.parameters() if p.requires_grad]
        self._handles.append(parameters[len(parameters) // 2].register_post_accumulate_grad_hook(lambda _: call()))


def _as_tensor(span: Span) -> torch.Tensor:
    return torch.frombuffer(view(span), dtype=torch.uint8)
