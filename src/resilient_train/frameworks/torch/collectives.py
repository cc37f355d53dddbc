"""The collectives that the user's code calls, all groups together: see ``frameworks/roles.Collectives``."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import xxhash

from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Conductor, Given, Objects, Tails
from resilient_train.frameworks.torch.checks.unregistered import Unregistered
from resilient_train.frameworks.torch.communication import call_words
from resilient_train.frameworks.torch.communication import process_group as group_module
from resilient_train.frameworks.torch.communication.body_messages import BodyMessages
from resilient_train.frameworks.torch.communication.buckets import wrappers_in
from resilient_train.frameworks.torch.communication.collective_results import POINT_TO_POINT, VERBS, flat, root_of
from resilient_train.frameworks.torch.communication.ddp_traffic import synced
from resilient_train.frameworks.torch.communication.guarded_works import GuardedWork, NotBegun
from resilient_train.frameworks.torch.communication.process_group import ResilientGroup, works
from resilient_train.frameworks.torch.communication.tail_collectives import LoggedTail
from resilient_train.frameworks.torch.communication.waits import waits
from resilient_train.frameworks.torch.groups import TorchGroups
from resilient_train.frameworks.torch.rank_state import TorchRankState
from resilient_train.frameworks.torch.sharding.sharded import Sharding
from resilient_train.frameworks.torch.tensors.fingerprint import tensor_digest
from resilient_train.frameworks.torch.tensors.storages import Memory, gradients, registered
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.messages import MessageChannel
from resilient_train.protocol.rank_effects import Mode
from resilient_train.script_place import line

_FOREIGN = threading._DummyThread  # what Python makes of a thread that is not its own
_NO_PASS = -1
_LOOKS, _LOOK_S = 20, 0.001
"""Before a call is held to be another one."""
_pass_under_way = torch._C._current_graph_task_id


class TorchCollectives:
    """``check`` is told of each call, and raises UsageError for one that may not be. ``replicas``: the groups of ranks
    that hold the same parts of the model, where it is divided.
    """

    def __init__(
        self,
        objects: Objects,
        groups: TorchGroups,
        check: Callable[[str], None],
        unregistered: Unregistered,
        rank_state: TorchRankState,
        replicas: Callable[[], Sequence[Sequence[int]]] = tuple,
    ) -> None:
        self._unregistered = unregistered
        self._rank_state = rank_state
        self._replicas = replicas
        self._objects = objects
        self._groups = groups
        self._check = check
        self._mode = Mode.DIRECT
        self._tails: Tails | None = None
        self._tail: LoggedTail | None = None
        self._given: Given | None = None
        self._averaged_in: int | None = None
        """The backward pass in which replicas first had a part in a result, of the bodies that are noted."""
        self._messages = BodyMessages()
        self._conductor: Conductor | None = None
        self._loading = False
        self._thread = 0
        """That of the loop."""

    def set_up_problem(self) -> str:
        set_up = group_module.set_up()
        if set_up is None:
            return ""
        models = self._objects.models
        return set_up.problem(self._registered) or set_up.left_out(wrappers_in(models), models)

    def end_set_up(self) -> bytes:
        Sharding(self._objects.models).reshard()  # behind a forward pass alone there are whole tensors still
        set_up = group_module.set_up()
        record = set_up.finish(self._registered, self._unregistered, self._gradients) if set_up is not None else b""
        group_module.end_set_up()
        return record

    def end_head(self) -> None:
        self._unregistered.go_on(self._registered)

    def _gradients(self) -> Memory:
        return gradients(self._objects)

    def _registered(self) -> Memory:
        return registered(self._objects)

    def attach(self, conductor: Conductor, tails: Tails) -> None:
        self._tails, self._conductor, self._thread = tails, conductor, threading.get_ident()
        self._tail = LoggedTail(conductor, tails, self._groups.finish, self._replicas, self._rank_state.of_another)
        group_module.watch(self)

    def detach(self) -> None:
        group_module.watch(None)
        if self._tail is not None:
            self._tail.close()
        group_module.wait_for_droppers(max((each.frees_in_s for each in group_module.groups.values()), default=0.0))

    def set_mode(self, mode: Mode) -> None:
        self._mode = mode
        if self._groups.renewed and mode is Mode.DIRECT:
            self._groups.go_on()
            self._messages.forget()
        if self._tail is not None:
            if self._tail.mode is Mode.EXCHANGE and mode not in (Mode.EXCHANGE, Mode.LOOPBACK):
                self._tail.exchanged()
            self._tail.mode = mode

    def exchange(self, finishers: Sequence[int]) -> None:
        assert self._tail is not None
        self._tail.begin_exchange(finishers)
        self.set_mode(Mode.EXCHANGE)

    def begin_tail(self, commits: int) -> None:
        assert self._tail is not None
        self._tail.begin(commits)
        self._rank_state.tail_begins()
        self._messages.commit(commits)

    def messages(self) -> list[tuple[MessageChannel, int]]:
        return self._messages.words()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def note_into(self, given: Given | None) -> None:
        self._given, self._averaged_in = given, None

    def intact(self) -> bool:
        begun, works.since_update = works.since_update, []
        return all(work.intact() for work in begun)

    def waited_ns(self) -> int:
        return waits.total_ns()

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """A collective is called; see ``group.Watcher``."""
        assert self._tails is not None
        assert self._tail is not None
        if threading.get_ident() != self._thread:
            _check_thread(verb)
        self._check(verb)
        if self._loading:
            raise UsageError(
                f"{line()}: the loader called {verb}: a new process draws the batches of the one whose place it takes "
                "alone, and nobody would answer; agree on a seed before the loop or in a body, or make it from the "
                "epoch (set_epoch)"
            )
        mode = self._mode
        if mode is Mode.LOOPBACK:
            return group.run_alone(verb, args)
        if mode is Mode.BETWEEN:
            raise UsageError(
                f"{verb} was called between two session.call() of one accumulation window, and a fault would have some "
                "ranks call bodies again without what stands between them; call it in a body, or behind the update"
            )
        if mode is Mode.PAUSED:
            raise UsageError(
                f"{verb} was called in a function of session.on_pause: the pause may end, or a fault come, when some "
                "ranks have called it and others have not"
            )
        if verb in POINT_TO_POINT:
            self._check_place(verb)
            if self._given is not None:
                _note_message(self._given, group, verb, args)
            if mode not in (Mode.DIRECT, Mode.UPDATE):
                return self._tail.message(group, verb, args)
            work = _begin(group, verb, args)
            self._messages.begin(group, verb, args)
            return work
        if group.spans_job:
            self._tails.enter_collective()
        if mode is Mode.DIRECT:
            self._check_place(verb)
            if self._given is not None:
                self._note(self._given, group, verb, args)
            work = _begin(group, verb, args)
            if isinstance(work, GuardedWork):
                works.since_update.append(work)
                waits.begun()
            return work
        if mode is not Mode.UPDATE and verb == "monitored_barrier":
            return self._tail.call(group, "barrier", ())
        if mode is not Mode.UPDATE:
            work = self._tail.call(group, verb, args)
            if verb == "broadcast" and group.spans_job:
                self._rank_state.given_by(group.global_ranks[root_of(args)], _broadcast(args))
            return work
        raise UsageError(
            f"{verb} was called while the update of this step is only half done (one optimizer has written and another "
            "has not, or a closure that was given to optimizer.step() communicates): pass Session(undo=True), so that "
            "such a step can be redone"
        )

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        """Whether all members call the same; see ``group.Watcher``."""
        assert self._tails is not None
        if group.size() == 1:
            return
        word = call_words.word_of(verb, args)
        for _ in range(_LOOKS):
            found = self._tails.begin_call(group.tag, word, *group.neighbours())
            if found is None:
                return
            time.sleep(_LOOK_S)  # the other's may be one that its library is about to refuse, and that is taken back
        assert found is not None
        self._break_off(group, word, *found)

    def take_back(self, group: ResilientGroup) -> None:
        """See ``group.Watcher``."""
        assert self._tails is not None
        self._tails.take_back_call(group.tag, counted=group.spans_job)

    def _break_off(self, group: ResilientGroup, word: int, other: int, theirs: int) -> NoReturn:
        """For all members that is a fault: what the clock has decided (a log each ten seconds) may come out alike when
        the step runs again. What comes out otherwise again and again ends the job.
        """
        assert self._tails is not None
        assert self._conductor is not None
        group.break_off()
        mine, others, rank = call_words.told(word), call_words.told(theirs), self._tails.rank
        detail = {"calls": mine, "other": other, "others": others, "group": group.group_name, "call": line()}
        self._conductor.note("calls_differ", detail)
        told = f"{line()}: rank {rank} calls {mine} where rank {other} calls {others}"
        say_aside(
            f"{told}: all members of process group {group.group_name!r} must call the same collectives in the same "
            "order. Does what decides it hang on the clock, on a rank's data or on a variable that is not registered? "
            "(docs/how-to/debug-a-recovery.md)"
        )
        raise RuntimeError(told)

    def _note(self, given: Given, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        """What one backward pass gives is made of what came before it: averaged gradients go to the optimizer, not back
        into the pass. The results of other calls may go anywhere.
        """
        digests = _digest(group, verb, args)
        if not digests:
            return
        if given.alone is None and self._averaged_in not in (None, _pass_under_way()):
            given.alone = len(given.digests)
        given.digests += digests
        given.calls.append(f"{verb} of {group.size()}")
        if (
            self._averaged_in is None
            and given.replicas.intersection(group.global_ranks)
            and not (verb == "broadcast" and synced() is not None)
        ):
            under_way = _pass_under_way()
            self._averaged_in = under_way
            if under_way == _NO_PASS:
                given.alone = len(given.digests)

    def _check_place(self, verb: str) -> None:
        """Here a fault would raise in the user's loop, on all ranks: nothing could keep that in."""
        if self._conductor is not None and self._conductor.in_front():
            raise UsageError(
                f"{line()}: {verb} was called in front of `with step:`, where a fault that cuts it can't be repaired; "
                "call it in the body, or behind the `with` of the step before"
            )


def _begin(group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
    """A call of a body. One that a fault refuses counts at the update too: the script may catch its error."""
    try:
        return group.run(verb, args)
    except RuntimeError as error:
        if group.cut(error):
            works.since_update.append(NotBegun())
        raise


def _broadcast(args: tuple[Any, ...]) -> Sequence[torch.Tensor]:
    """What the broadcast that is being called gives to all. DDP's own is of a copy that C++ lays out; a hook of the
    user's gives what it likes.
    """
    wrapper = synced()
    if wrapper is None or hasattr(wrapper, "buffer_hook"):
        return flat(args[0])
    buffers: Sequence[torch.Tensor] = wrapper.modules_buffers
    return buffers


def _check_thread(verb: str) -> None:
    """C++'s threads, which backward passes and hooks of DDP's run on, belong to the training; Python's are the user's.

    Raises UsageError.
    """
    me = threading.get_ident()
    names = [each.name for each in threading.enumerate() if each.ident == me and type(each) is not _FOREIGN]
    if names and _pass_under_way() == _NO_PASS:
        raise UsageError(
            f"{line()}: {verb} was called on thread {names[0]!r}, and not on that of the loop: a fault would come at "
            "another place there on each rank, and could not be repaired; call it in the loop (dcp.save in place of "
            "dcp.async_save), or on a group that has no part in this job's torch.distributed"
        )


def _note_message(given: Given, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
    """What comes from a replica, or may, may go into all that is given from now on."""
    given.calls.append(f"{verb} as {group.rank()}")
    if verb == "send" or given.alone is not None:
        return
    senders = group.global_ranks if verb == "recv_anysource" else (group.global_ranks[args[1]],)
    if given.replicas.intersection(senders):
        given.alone = len(given.digests)


def _digest(group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> list[str]:
    """Of what this member gives to a call, if that is about numbers that a model computes; empty where it gives
    nothing, so that members have the same places.

    DDP also sends how it has laid out its buckets, once, in the window behind the first: that window has a call less
    when it runs again, and these are whole numbers.
    """
    tensors = [tensor for each in args[:2] for tensor in flat(each) if isinstance(tensor, torch.Tensor)]
    if not any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
        return []
    given = VERBS[verb].given(args, group.rank())
    return [xxhash.xxh3_128_hexdigest("\n".join(map(tensor_digest, given)).encode()) if given else ""]
