"""A process group that outlives its members.

``ResilientGroup`` hands every call to an inner group (gloo) that is replaced at each recovery, while the object that
the user, DDP or a DeviceMesh holds stays the same. In a process that is going to *join* a running job there is no inner
group yet: collectives act as if this rank were alone (``collective_results.py``), so that it can build its model and
its DDP wrapper without waiting for the others. In a standby that builds them ahead, the rank itself is not known yet.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Protocol, cast

import torch
import torch.distributed as dist
import xxhash
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import GroupName

from resilient_train import config, script_place, standby_stage
from resilient_train.errors import UsageError
from resilient_train.frameworks.roles import Addresses
from resilient_train.frameworks.torch.communication.address_store import AddressStore, FirstAddresses
from resilient_train.frameworks.torch.communication.call_forms import in_places
from resilient_train.frameworks.torch.communication.collective_results import POINT_TO_POINT, VERBS, run_alone
from resilient_train.frameworks.torch.communication.guarded_works import (
    GuardedMessage,
    GuardedWork,
    MonitoredBarrier,
    ScatteredWork,
    Works,
)
from resilient_train.frameworks.torch.communication.own_objects import take_own
from resilient_train.frameworks.torch.communication.set_up import SetUpCollectives
from resilient_train.frameworks.torch.communication.transports import gloo
from resilient_train.frameworks.torch.watching.uncompiled import all_uncompiled
from resilient_train.observe.sinks import say_aside

BACKEND = "resilient"
_NO_RANK = -1
_BATCHES_ASK = hasattr(dist.ProcessGroup, "supports_abort_hooks")
"""torch 2.15, or later: see NoBackend. Before, whoever asks for a backend wants what only a real one gives."""


class Watcher(Protocol):
    """Sees the collectives of all groups while a Session runs."""

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Carries ``verb`` out as the present moment of the step wants it, and returns its work."""
        ...

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        """The inner group is about to begin ``verb``, at ``group.tag``. If another member begins another one there, it
        breaks the group off and raises RuntimeError.
        """
        ...

    def take_back(self, group: ResilientGroup) -> None:
        """The collective at ``group.tag`` has not begun after all."""
        ...


_END_S = 5.0
"""A thread of gloo's that gets no processor for so long, or is held up by a collective that others never joined."""
_CPU = torch.device("cpu")
_TAGS = (1 << 64) - 1
groups: dict[str, ResilientGroup] = {}
"""All groups of this process by name, in the order of their creation."""
works = Works()
"""Those under way in all groups."""
_watcher: Watcher | None = None
_set_up: SetUpCollectives | None = None
"""Of the collectives before the loop; None behind its begin, and where no rank is ever replaced."""
_loop_has_begun = _told_late = False
_droppers: list[threading.Thread] = []


def watch(watcher: Watcher | None) -> None:
    """Lets ``watcher`` see every collective from now on; None ends it."""
    global _watcher
    _watcher = watcher
    if watcher is None:
        for name in [each for each, group in groups.items() if group.destroyed]:
            groups.pop(name).close_inner("it was destroyed")  # it may have been rebuilt since


class _Alone:
    """The watcher of a process that is by itself for a while."""

    def issue(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> dist.Work:
        return group.run_alone(verb, args)

    def compare(self, group: ResilientGroup, verb: str, args: tuple[Any, ...]) -> None:
        """Nothing of it is another's."""

    def take_back(self, group: ResilientGroup) -> None:
        """Likewise."""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Inside the block each collective gives what it gives if all others contribute what this rank does."""
    global _watcher
    before, _watcher = _watcher, _Alone()
    try:
        yield
    finally:
        _watcher = before


def set_up() -> SetUpCollectives | None:
    """What has come of the collectives so far; None: nobody will want to know."""
    return _set_up


def end_set_up() -> None:
    """The loop begins."""
    global _set_up, _loop_has_begun
    _set_up, _loop_has_begun = None, True


class BuiltGroup(NamedTuple):
    """An inner group of a generation that is up, and its connections as (descriptor, inode)."""

    generation: int
    inner: Any
    sockets: list[tuple[int, int]]


class NoBackend:
    """That of a group which has none now. torch 2.15 asks in front of each batch of messages what it can do."""

    supports_splitting = supports_coalescing = False

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise UsageError(f"{self._why} ({name})")


class ResilientGroup(dist.ProcessGroup):
    """See the module's text. ``global_ranks`` are the members in the order of their group ranks.

    ``solo``: not joined yet. Other libraries than gloo are subclasses, in ``transports``.
    """

    backend_shown = "gloo"
    """As what it answers where the user has asked for that library, by name or by saying nothing."""
    adds_up_as_gloo = True
    """Whether one process can add up what all members give, bit for bit as the group does: see ``clique.py``."""
    frees_in_s = 0.25
    """How long a thread that frees an inner group takes, if it comes back at all."""

    def __init__(
        self, store: Store, rank: int, size: int, name: str, global_ranks: list[int], timeout: timedelta
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg] # torch's stub lacks the constructor without a store
        self._rank, self._size, self._name, self._desc = rank, size, name, "resilient"
        self.global_ranks = tuple(global_ranks) or tuple(range(size))
        self._store, self._timeout = store, timeout
        self._backend_name = BACKEND
        self.spans_job = not groups or len(self.global_ranks) == next(iter(groups.values())).size()
        """The first group of a process is that of all ranks."""
        self.inner: dist.ProcessGroup | None = None
        self._built_in = 0
        """The process whose threads serve it: a fork has none of them."""
        self.sockets: list[tuple[int, int]] = []
        self.solo = True
        self.begun = 0
        """Collectives of the present generation."""
        self._first_tag = 0
        self._nobody = standby_stage.stage is not None
        """It has no rank yet: what it was made with is only assumed."""
        self._hangups = select.epoll()
        self._hung_up = False
        self._closed_why = ""
        self._messages: dict[tuple[str, str], int] = {}
        self.takes_from_any = False
        """``recv_anysource`` was called: nobody knows which message is which any more."""
        self._before_loop = not _loop_has_begun
        self.destroyed = False
        """By the user, in the loop, and made before it."""

    # -- life of the inner group

    @property
    def device(self) -> torch.device:
        """Where the tensors lie that it carries."""
        return _CPU

    def build(self, generation: int, addresses: Addresses, *, replaced: bool) -> BuiltGroup:  # noqa: ARG002 - others'
        """Builds the inner group of a generation; ``adopt`` puts it in. Blocks until all members have come.

        ``replaced``: since the last Resume some ranks are new processes.

        Raises RuntimeError if a member dies meanwhile (gloo notices after about 5 s), or a newer recovery begins.
        """
        book = gloo.AddressBook()
        store = AddressStore(addresses, self._name, self.global_ranks, book.note)
        described = self._name, f"generation {generation}"
        return BuiltGroup(generation, *gloo.create(store, book, self._rank, self._size, self._timeout, *described))

    def adopt(self, built: BuiltGroup) -> None:
        """Puts a built group in. A peer may have died since it was built: then its first collective says so."""
        self._take_in(built)
        self._built_in = os.getpid()
        self._hangups.close()
        self._hangups = select.epoll()
        self._hung_up = not all(self._listen(fd, inode) for fd, inode in self.sockets)

    def _take_in(self, built: BuiltGroup) -> None:
        generation, self.inner, self.sockets = built
        self.solo, self._closed_why, self.begun = False, "", 0
        self._first_tag = xxhash.xxh3_64_intdigest(f"{place_of(generation)}/{self._name}".encode())

    @property
    def tag(self) -> int:
        """Of the collective that was begun last: the same one on all members, and no other one's."""
        return (self._first_tag + self.begun) % _TAGS or _TAGS

    def neighbours(self) -> tuple[int, int]:
        """The members before and behind this one, in a ring of all."""
        ranks, here = self.global_ranks, self._rank
        return ranks[here - 1], ranks[(here + 1) % len(ranks)]

    def _listen(self, fd: int, inode: int) -> bool:
        """Watches for a peer's hanging up. False: gloo has closed the connection already, as it does upon an error."""
        try:
            self._hangups.register(fd, select.EPOLLRDHUP)
        except OSError:
            return False
        return gloo.inode(fd) == inode  # the number may be another file's by now

    def suspend(self, why: str) -> None:
        """A recovery begins: until the next ``adopt`` no collective can be called."""
        self.close_inner(why)

    @property
    def closed(self) -> bool:
        return self.inner is None or bool(self._closed_why)

    def close_inner(self, why: str) -> None:
        """Drops the inner group. Another thread frees it: that joins gloo's threads, in milliseconds or never."""
        if self.inner is not None:
            self._timeout = self._get_backend(self.device).options._timeout  # the user may have set another one
        held = [self.inner] if self.inner is not None else []
        self.inner, self.sockets, self._closed_why = None, [], why
        drop(held)

    def end(self) -> None:
        """The process ends, and the user has not destroyed the group. One on devices stays: what is under way there
        would be cut.
        """
        if self._built_in == os.getpid() and self.device == _CPU:
            self.close_inner("the process ends")

    def broken(self) -> bool:
        """Whether a peer has closed, or lost, its end of one of the connections."""
        left, shut = self._connections()
        return shut > 0 or len(left) < len(self.sockets)

    def _connections(self) -> tuple[list[int], int]:
        """Those that gloo has not closed, and how many of them are shut at one of their ends."""
        poll = select.poll()
        left = [fd for fd, inode in self.sockets if gloo.inode(fd) == inode]
        for fd in left:
            poll.register(fd, select.POLLRDHUP)
        return left, len(poll.poll(0))

    def shut(self) -> None:
        """Has all that waits for a peer end with an error (decision 8). As a rule the watchdog has done so."""
        for fd, inode in self.sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                if gloo.inode(connection.fileno()) == inode:
                    connection.shutdown(socket.SHUT_RD)

    def break_off(self) -> None:
        """No collective can come of this group any more: for all its members that is a fault."""
        self.shut()

    def unread(self) -> tuple[int, ...] | None:
        """Bytes that have come and are not read, by connection; None: more may come. gloo closes one behind that, as a
        rule.
        """
        left, shut = self._connections()
        return tuple(map(gloo.unread, left)) if shut == len(left) else None

    def learn_rank(self, rank: int) -> None:
        """The process has become a rank, of a group that holds all ranks."""
        self._rank, self._nobody = rank, False

    # -- what torch asks of a group; the C++ base has its size, but keeps names only inside backends of its own

    def show_as_asked(self) -> None:
        """The user asked for the library, not for ours: so the group answers as one of the library's."""
        self._backend_name = self.backend_shown

    def name(self) -> str:
        return self._backend_name

    def _get_backend_name(self) -> str:
        return self._backend_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND  # in C++: where DDP hears "gloo", it looks for a backend in the base class

    def getRank(self) -> int:  # noqa: N802 - torch's name
        if self._nobody and standby_stage.stage is not None:
            return standby_stage.stage.rank_asked()
        return _NO_RANK if _set_up is not None and _set_up.takes_objects(self) else self._rank

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        return self._name

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        self._desc = desc

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        return self._desc

    @property
    def group_name(self) -> GroupName:
        return GroupName(self._name)

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [self.device]

    def _get_backend(self, device: torch.device) -> Any:
        """That of gloo, of the present generation."""
        if self.inner is None and _BATCHES_ASK:
            return NoBackend(self._why_not("_get_backend"))
        return self._running("_get_backend")._get_backend(device)

    get_backend = _get_backend
    """As torch 2.14 calls it."""

    def _running(self, asked: str) -> Any:
        if self.inner is None:
            raise UsageError(self._why_not(asked))
        return self.inner

    def _why_not(self, asked: str) -> str:
        why = "it has not joined the others yet" if self.solo else self._closed_why
        return f"process group {self._name!r} can't answer {asked}: {why}"

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self.inner is not None:
            self.inner.set_timeout(timeout)

    def _get_sequence_number_for_group(self) -> int:
        return cast("int", self._running("_get_sequence_number_for_group")._get_sequence_number_for_group())

    def _set_sequence_number_for_group(self) -> None:
        """A group of gloo's has one from the start."""

    def _backend_id(self, kind: Any) -> int:
        return cast("int", self._running("_backend_id")._backend_id(kind))

    use_pg_for_symm_mem_rendezvous = False

    def _enable_collectives_timing(self) -> None:
        """As gloo, which has none."""

    def _register_on_completion_hook(self, hook: Any) -> None:
        self._running("_register_on_completion_hook")._register_on_completion_hook(hook)

    def _start_coalescing(self, device: torch.device) -> None:
        self._running("_start_coalescing")._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return cast("dist.Work", self._running("_end_coalescing")._end_coalescing(device))

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("a part that is split from a group can't be rebuilt after a fault: use dist.new_group(ranks)")

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("a group that is merged from two can't be rebuilt after a fault: use dist.new_group(ranks)")

    supports_abort_hooks = supports_completion_hooks = False

    supports_window = supports_reconfigure = False
    """A window's memory is registered with connections, which a fault takes away."""

    def new_window(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("a window of a group can't be rebuilt after a fault")

    def _hooked(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError("a hook of a group that is rebuilt after a fault would be lost with the connections")

    register_pre_hook = unregister_pre_hook = register_post_hook = unregister_post_hook = _hooked
    register_abort_hook = unregister_abort_hook = _hooked

    def get_reconfigure_handle(self) -> NoReturn:
        raise UsageError("this group is rebuilt after a fault by itself: it can't be reconfigured by others")

    def reconfigure(self, *_: Any, **__: Any) -> NoReturn:
        self.get_reconfigure_handle()

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """After an update it is a plain barrier, which is finished from the logs."""
        if self.solo:
            return
        if _watcher is not None:
            _watcher.issue(self, "monitored_barrier", (timeout, wait_all_ranks)).wait()
        else:
            self._running("monitored_barrier").monitored_barrier(timeout, wait_all_ranks)

    def abort(self) -> None:
        self.close_inner("it was aborted")

    def shutdown(self) -> None:
        """The user destroys the group. In the loop it is rebuilt after a fault all the same: a process that takes a
        rank's place has made it again, and so has a member that has not come to this line, and they would wait there.
        """
        if _watcher is not None and self._before_loop:
            self.destroyed = True
        else:
            groups.pop(self._name, None)
        self.close_inner("it was destroyed")
        wait_for_droppers(1.0)

    def run(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Runs ``verb`` on the inner group, or alone where this process has not joined yet."""
        if self.inner is None and self.solo:
            return self.run_alone(verb, args)
        if verb in POINT_TO_POINT:
            self.number(verb, args)
        return self.run_inner(verb, args)

    def run_inner(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Runs ``verb`` on the inner group. Raises UsageError if there is none."""
        if self.closed:
            raise UsageError(f"process group {self._name!r} can't be used: {self._closed_why or 'it is not built'}")
        if verb not in POINT_TO_POINT:
            self.begun += 1
            if _watcher is not None:
                _watcher.compare(self, verb, args)
        try:
            return self.begin(verb, args)
        except Exception as error:
            if verb not in POINT_TO_POINT and not (isinstance(error, RuntimeError) and self.cut(error)):
                self._take_back()  # the library has refused what it was given: no other member will hear of it
            raise

    def _take_back(self) -> None:
        if _watcher is not None:
            _watcher.take_back(self)
        self.begun -= 1

    def begin(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """Has the library begin ``verb``."""
        if _watcher is None:
            return cast("dist.Work", getattr(self.inner, verb)(*args))
        if verb == "monitored_barrier":
            return GuardedMessage(MonitoredBarrier(self.inner, *args), works, 0)
        if verb in POINT_TO_POINT:
            source = -1 if verb == "recv_anysource" else args[1]
            return GuardedMessage(getattr(self.inner, verb)(*args), works, source, receives=verb != "send")
        if self._hung_up or self._hangups.poll(0, 1):
            # gloo would find out as well, but may forget a waiter over it (see guarded_works.py): don't even begin.
            raise RuntimeError(f"a peer of process group {self._name!r} has hung up")
        work = getattr(self.inner, verb)(*args)
        try:
            return GuardedWork(work, works.live)
        except RuntimeError:  # gloo has no future for a reduce-scatter
            return ScatteredWork(work, works.live)

    def cut(self, error: RuntimeError) -> bool:  # noqa: ARG002 - another library's groups know by the error
        """Whether a call that has raised ``error`` has failed for a fault, and not for what it was given."""
        return self.broken()

    def number(self, verb: str, args: tuple[Any, ...]) -> tuple[str, int]:
        """Which message between two members, with one tag, this call sends or takes; all are counted, on both sides."""
        if verb == "recv_anysource":
            self.takes_from_any = True
            return "", 0
        peer, tag = args[1], args[2]
        ends = (self._rank, peer) if verb == "send" else (peer, self._rank)
        channel = f"{self._name} {ends[0]}>{ends[1]} {tag}"
        number = self._messages.get((verb, channel), 0)
        self._messages[verb, channel] = number + 1
        return channel, number

    def forget_messages(self) -> None:
        """Counts anew: the connections are new ones."""
        self._messages.clear()
        self.takes_from_any = False

    def run_alone(self, verb: str, args: tuple[Any, ...]) -> dist.Work:
        """What ``verb`` gives if every other member contributed what this one does."""
        take_own(verb, self._rank, args)
        return run_alone(verb, self._rank, self._size, args)


def _make_verb(verb: str) -> Callable[..., dist.Work]:
    def call(self: ResilientGroup, *given: Any, **named: Any) -> dist.Work:
        args = in_places(verb, given, named)
        if _watcher is not None and not self.solo:
            return _watcher.issue(self, verb, args)
        if _set_up is not None:
            return _set_up.issue(self, verb, args)
        return self.run(verb, args)

    call.__name__ = verb
    return call


for _verb in (*VERBS, *POINT_TO_POINT):
    setattr(ResilientGroup, _verb, _make_verb(_verb))
all_uncompiled(ResilientGroup)


def create(options: Any, backend_options: Any, *, kind: type[ResilientGroup] = ResilientGroup) -> ResilientGroup:
    """Torch calls this for ``init_process_group`` and ``new_group``. Raises UsageError."""
    global _set_up, _told_late
    if backend_options is not None:
        raise UsageError(
            f"pg_options ({type(backend_options).__name__}) can't be kept for a group that is rebuilt after a fault: "
            "leave them out"
        )
    link = config.read_link() if standby_stage.stage is None else None
    if _set_up is None and not _loop_has_begun and _is_replaceable(link):
        _set_up = SetUpCollectives()
    group = kind(
        options.store,
        options.group_rank,
        options.group_size,
        str(options.group_id),
        list(options.global_ranks_in_group),
        options.timeout,
    )
    if not (link and link.joining) and standby_stage.stage is None:
        addresses = FirstAddresses(options.store, link.attempt if link else 0)
        group.adopt(group.build(0, addresses, replaced=False))
    groups[group.group_name] = group
    if _watcher is not None and link is not None and config.is_first_rank() and not _told_late:
        _told_late = True
        say_aside(
            f"{script_place.line()} makes a process group in the Session's loop: a process that takes a rank's place "
            "would not make it, and the others would wait for it there; make all groups before the loop "
            "(docs/how-to/loops.md)"
        )
    return group


def _is_replaceable(link: config.AgentLink | None) -> bool:
    """Whether another process may take this one's place, or this one takes another's."""
    if link is None:
        return standby_stage.stage is not None
    switches = config.read_switches()
    return switches.arf and not config.why_off(config.read_settings(), switches)


def place_of(generation: int) -> str:
    """Where, in a group's store of torch's, the members of a generation find each other."""
    link = config.read_link()
    return f"resilient/{link.attempt if link else 0}/{generation}"


def drop(held: list[dist.ProcessGroup]) -> None:
    """Frees groups, of which the caller keeps no other reference, on another thread."""
    if held:
        drop_by(held.clear)


def drop_by(work: Callable[[], None]) -> None:
    """Has ``work`` free what a group holds, on another thread."""
    dropper = threading.Thread(target=work, name="rt-drop-group", daemon=True)
    _droppers[:] = [thread for thread in _droppers if thread.is_alive()]
    try:
        dropper.start()
    except RuntimeError:  # Python 3.12 starts no thread any more as the interpreter ends
        work()
    else:
        _droppers.append(dropper)


def wait_for_droppers(timeout_s: float) -> None:
    """Lets the threads that free old groups end: one that came back while the interpreter goes down would abort it. One
    that gloo has forgotten does not end; nobody waits for it twice.
    """
    deadline_s = time.monotonic() + timeout_s
    for thread in tuple(_droppers):
        thread.join(max(0.0, deadline_s - time.monotonic()))
    _droppers.clear()


def end_all() -> None:
    """Ends gloo's threads while they can still have the GIL. One may come to let go of a finished collective's Python
    objects as late as the interpreter goes down: then it would end the process by SIGABRT, and a job that has done all.
    """
    for group in groups.values():
        group.end()
    wait_for_droppers(_END_S)


atexit.register(end_all)  # with the import: so it comes behind whatever the script has registered
