"""Native parts: the shared board, the death watch, the watchdog thread, and reading another process's memory.

Nothing in here needs the GIL to see a fault or to be seen. Words are unsigned 32 or 64 bits; a negative or
too large integer is a TypeError. A rank out of range is an IndexError, a closed board a ValueError, a failed
system call an OSError with its errno.
"""

from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Literal, TypeAlias

from typing_extensions import Buffer

BOARD_VERSION: int
DIGEST_CHUNK_BYTES: int

class Board:
    """Memory of the agent that outlives its ranks: one header page and one page per rank, in a sealed memfd.

    All stores and loads are sequentially consistent. The memory stays mapped as long as any call, Page,
    DeathWatch or Watchdog uses it; `close` only lets go of this object's share.
    """

    @staticmethod
    def create(world_size: int) -> Board:
        """Allocate a board (agent). Pass `fd` to the ranks by inheritance (`pass_fds`)."""
    @staticmethod
    def attach(fd: int) -> Board:
        """Map an existing board (rank). ValueError: none of this version, or one that could be shrunk under us."""
    @property
    def fd(self) -> int:
        """Descriptor of the memfd, closed with the board; close-on-exec."""
    @property
    def world_size(self) -> int: ...
    @property
    def stop_generation(self) -> int:
        """Newest generation that was announced by `raise_stop`; 0 at first."""
    def close(self) -> None:
        """Let go; every later access raises ValueError. Idempotent."""
    def announce(self, commits: int, what: int) -> None:
        """Rank 0: what (0..3) all ranks do at the head of update `commits`. An even and an odd one are held."""
    def announced(self, commits: int) -> int:
        """What was announced for update `commits`; 0 if nothing was."""
    def settle(self, commits: int) -> None:
        """Agent: it is done with the checkpoint from before update `commits`, whether it was written or not."""
    @property
    def settled(self) -> int:
        """The last word of `settle`; 0 at first."""
    def set_pause(self, word: int) -> None:
        """Agent: from step `word` - 1 on, all ranks stop where a window begins; 0: nobody wants it."""
    def ask_report(self) -> None:
        """Agent: all ranks are to write what they know of their newest collectives."""
    @property
    def report_asked(self) -> int:
        """How often `ask_report` was called."""
    def raise_stop(self, generation: int) -> None:
        """Announce a newer generation: wakes every watchdog and every waiter. ValueError unless it grows."""
    def standing(self, rank: int) -> tuple[int, int]:
        """(commits, phase): they change together, in one store."""
    def step(self, rank: int) -> int:
        """Loop number of the rank; for people, not for decisions."""
    def set_identity(self, rank: int, generation: int, incarnation: int, pid: int) -> None: ...
    def identity(self, rank: int) -> tuple[int, int, int]:
        """(generation, incarnation, pid). Three separate words: read it when the rank is quiet."""
    def set_tail(self, rank: int, entered: int, completed: int) -> None:
        """Count what the user's body does after the update: parts entered and parts completed."""
    def tail(self, rank: int) -> tuple[int, int]:
        """(entered, completed)."""
    def progress(self, rank: int) -> tuple[int, int, int, int]:
        """(commits, phase, collectives entered, activity), read one after the other."""
    def alarms(self, rank: int) -> list[tuple[Literal["hccl", "acl", "nccl", "nvml"], str]]:
        """(probe, kind) of what the rank's probes have found since `clear_alarms`; empty as a rule.

        Kinds are UCE (with addresses), HCCE, LINK, DEVICE (or memory lost in an unknown place), DISABLED.
        """
    def clear_alarms(self, rank: int) -> None:
        """Before the findings are taken, so that a new one in between raises its alarm again."""
    def order(self, rank: int) -> int:
        """The word of the rank's record by which a fault is ordered (32 bits, `protocol/orders.py`)."""
    def set_order(self, rank: int, order: int) -> None: ...
    def exchange_order(self, rank: int, expected: int, desired: int) -> bool:
        """`set_order`, if the word is as expected; in one step. False if it is not."""
    def asked(self, rank: int) -> int:
        """The signal by which somebody has asked the rank's process to end (`hear_terminate`); 0 if nobody has."""
    def set_asked(self, rank: int, number: int) -> None:
        """0: nobody has. Any other: the next SIGTERM ends the process."""
    def kept(self, rank: int) -> tuple[int, int]:
        """Updates from before which the rank holds a complete snapshot in memory; 0: none. Two separate words."""
    def set_kept(self, rank: int, first: int, second: int) -> None: ...
    def fingerprint(self, rank: int, commits: int) -> int:
        """What the rank has written of its replicated state from before update `commits` (64 bits); 0: nothing."""
    def set_fingerprint(self, rank: int, commits: int, value: int) -> None:
        """An even and an odd update are held. 0: nothing is known."""
    def reported(self, rank: int) -> int:
        """The `report_asked` that the rank has answered last; 0: none."""
    def set_reported(self, rank: int, number: int) -> None: ...
    def computed(self, rank: int, after: int) -> list[tuple[int, int, int]]:
        """(commits, step, duration_ns) of the rank's windows behind update `after`, oldest first: the last 128 at most.

        How long it has computed in each, without waiting for the others; 0: the window was not like others.
        """
    def stopped_generation(self, rank: int) -> int:
        """Newest stop for which the rank's watchdog is done with the older descriptors."""
    def beats(self, rank: int) -> int:
        """Heartbeats of the rank's watchdog thread; they go on while the GIL is held."""
    def wait_stop(self, generation: int, timeout_ms: int) -> bool:
        """Wait for a stop newer than `generation`; True if there is one. Without the GIL."""

class Page:
    """Rank side: the rank's own page of a board, which it writes in each step; the memory stays mapped meanwhile.

    A phase is a number from 0 to 255.
    """

    def __init__(self, board: Board, rank: int) -> None: ...
    def write(self, commits: int, phase: int, step: int) -> None:
        """Publish where the rank stands. `commits` and `phase` change together, in one store."""
    def begin(self, commits: int, phase: int, step: int) -> None:
        """An update is applied, and a tail begins: publishes `Board.computed`, then `restart` and `write`."""
    def restart(self) -> None:
        """A window or a tail begins, in which no collective was entered yet, and nothing computed."""
    def enter(self) -> None:
        """One more collective that spans the job is entered."""
    def begin_call(self, tag: int, word: int, one: int, other: int) -> tuple[int, int] | None:
        """A collective begins: its `word` is published at its place `tag`. Neither is 0.

        Returns which of two ranks has begun another one there, and its word; None: neither, as far as they have come.
        Of two that begin different ones, one at least gets the other.
        """
    def take_back_call(self, tag: int, *, counted: bool) -> None:
        """The collective at that place has not begun after all. `counted`: nor does `enter` count."""
    def add_computed(self, duration_ns: int) -> None:
        """A body of the window has computed for so long. The update, from `cross` to `begin`, is added by itself."""
    def excuse(self) -> None:
        """The window is not like others: how long it computes says nothing."""
    def set_activity(self, activity: int) -> None:
        """What the rank is at (32 bits, `protocol/progress.py`)."""
    def order(self) -> int:
        """`Board.order`."""
    def stop_raised(self, generation: int) -> bool:
        """Whether a generation newer than this one was announced."""
    def pause_due(self, step: int) -> bool:
        """Whether all are to stop before this step, or were to before an earlier one (`Board.set_pause`)."""
    def arrive(self, commits: int, phase: int, step: int) -> bool:
        """`write`, then ring if all ranks are there. True if so: no need to wait."""
    def cross(self, commits: int, phase: int, following: int, step: int, generation: int) -> bool:
        """Wait until every rank stands at (commits, phase) or beyond, then write `following`.

        False, with nothing written: a stop newer than `generation` is raised, and not all are there. Without the GIL;
        Python's signal handlers run meanwhile, and what they raise comes out of here.
        """

class DeathWatch:
    """Agent side: one native thread that sleeps on the life words of the ranks of a board.

    The kernel marks the word when the rank's watchdog thread dies and wakes us before it frees the memory of
    the process: 0.1 ms, where a pidfd needs 30 ms per GiB. Dying is also what `exec` and an exit without
    `Watchdog.stop` look like: ask the pidfd how the process ended.
    """

    def __init__(self, board: Board) -> None: ...
    @property
    def fd(self) -> int:
        """Readable when `take` has something (now and then when it has not)."""
    @property
    def supported(self) -> bool:
        """The kernel has futex_waitv (Linux 5.16); readable on the class too. Else `add` returns False."""
    def add(self, rank: int) -> bool:
        """Begin to watch. False: nobody lives there, no kernel support, or already 127 ranks watched."""
    def remove(self, rank: int) -> None:
        """Forget the rank, its death not yet taken, and a dead life word. Before a new incarnation starts."""
    def take(self) -> list[tuple[int, int]]:
        """(rank, time_ns) of deaths since the last call, CLOCK_REALTIME; each is reported once."""
    def close(self) -> None:
        """End the thread. Idempotent; later calls raise ValueError."""

class Watchdog:
    """Rank side: a native thread that beats, hears the stop word, shuts sockets and interrupts the main thread.

    In a forked child every method does nothing (`start` raises RuntimeError) and `armed` is False.
    """

    def __init__(self, board: Board, rank: int, *, beat_ms: int = 50, grace_ms: int = 20, signal_number: int) -> None:
        """The calling thread is the one that will be interrupted."""
    def start(self, generation: int) -> None:
        """Take the life word and begin; stops newer than `generation` count. The word is taken on return."""
    def stop(self) -> None:
        """Give the life word back (not a death) and end the thread. Idempotent; `start` works again."""
    def guard_sockets(self, sockets: Sequence[tuple[int, int]]) -> None:
        """Replace the (descriptor, inode) list that the next stop shuts down.

        A descriptor that is no socket, listens, or has another inode by then is left alone. A list given after
        `Board.stopped_generation` has reached a stop is kept for the next one: look at the stop word afterwards.
        """
    def arm(self, generation: int) -> None:
        """Allow interrupts for stops newer than `generation`; one that is pending comes within `beat_ms`."""
    def disarm(self) -> None:
        """No signal is sent after this returns. One sent just before may still reach the Python handler."""
    @property
    def armed(self) -> bool: ...
    def acknowledge(self, generation: int) -> None:
        """The main thread knows of this stop: no more signals for it or for older ones."""

class Finding:
    """Something that a probe saw. It is published when it appears or changes, not at every poll."""

    @property
    def kind(self) -> Literal["UCE", "HCCE", "LINK", "DEVICE", "STOPPED", "DISABLED", "NOTICE"]:
        """STOPPED is the echo of an abort, mostly our own; DISABLED: the probe was given up; NOTICE is for people."""
    @property
    def probe(self) -> str: ...
    @property
    def code(self) -> int:
        """The library's own number (for an XID event, the XID); 0 where there is none."""
    @property
    def text(self) -> str:
        """For people; printable ASCII."""
    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(address, bytes) of poisoned device memory, for UCE."""
    @property
    def comm(self) -> int:
        """Handle of the communicator that failed, or 0."""
    @property
    def time_ns(self) -> int:
        """When it was seen, CLOCK_REALTIME."""

class ProbeStatus:
    """Where a probe stands, for `doctor`."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> Literal["waiting", "opening", "polling", "absent", "disabled", "stopped"]:
        """`absent`: no such library, driver or ability here, which is no fault."""
    @property
    def reason(self) -> str:
        """Why it is absent or disabled."""
    @property
    def missing(self) -> list[str]:
        """What this library cannot do: symbols it lacks, questions the device does not answer."""
    @property
    def polls(self) -> int: ...

def try_probe(device: int, uuid: str, name: str, library: str) -> None:
    """What the trial's process runs: the first calls, a byte into descriptor 3, the end of the process."""

class Probes:
    """Polls the libraries of the accelerator for errors, one native thread each, without the GIL.

    A call that does not return within `call_limit_ms`, an impossible answer, or a crash in the trial (the first
    calls, made in a process of their own where nobody has loaded the library yet) costs the probe, not the job: one
    finding of kind DISABLED. A library that crashes later takes the process along.

    Verbs return the library's own code (0 is success in all of them). With `limit_ms` they run on a thread of
    their own and raise TimeoutError when they take longer, leaving that thread behind; with 0 they run in the
    calling thread, however long that takes. A verb that the library does not have is a RuntimeError, a probe that
    is switched off a ValueError.

    In a forked child `take` and `status` are empty, `stop` and `rearm` do nothing, all else raises RuntimeError.
    """

    def __init__(
        self,
        *,
        hccl: str = "libhccl.so",
        acl: str = "libascendcl.so",
        nccl: str = "libnccl.so.2",
        nvml: str = "libnvidia-ml.so.1",
        device: int = 0,
        uuid: str = "",
        poll_ms: int = 50,
        call_limit_ms: int = 2000,
        open_limit_ms: int = 30000,
        trial: bool = True,
    ) -> None:
        """Name the libraries as for dlopen; an empty name switches that probe off.

        `device` is the number for ACL and NVML; with `uuid` NVML looks for that instead, which it should where
        CUDA_VISIBLE_DEVICES renumbers.
        """
    def alarm(self, board: Board, rank: int) -> None:
        """Before `start`: clear the rank's alarms, and from then on set one for every finding, without the GIL."""
    def start(self) -> None:
        """Begin, once. Returns at once; libraries are loaded by the threads."""
    def stop(self) -> list[str]:
        """End the threads within `call_limit_ms`. Names the probes whose thread does not come back. Idempotent."""
    @property
    def fd(self) -> int:
        """Readable when `take` has something (now and then when it has not)."""
    def take(self) -> list[Finding]:
        """Findings since the last call, oldest first. Beyond 1024 that nobody takes, later ones are dropped."""
    def rearm(self) -> None:
        """After a recovery: what is still wrong is news again."""
    def status(self) -> list[ProbeStatus]: ...
    def add_comm(self, library: str, comm: int) -> None:
        """Look at this communicator of "hccl" or "nccl" from now on."""
    def remove_comm(self, library: str, comm: int, limit_ms: int = 5000) -> bool:
        """Look no more, and wait for the call that is under way. False: it does not return; do not destroy it."""
    def suspend_comm(self, comm: int, limit_ms: int = 5000) -> int:
        """Call HcclCommSuspend."""
    def resume_comm(self, comm: int, limit_ms: int = 5000) -> int:
        """Call HcclCommResume."""
    def destroy_comm(self, comm: int, limit_ms: int = 5000) -> int:
        """Call HcclCommDestroy, after `remove_comm`; RuntimeError if the probe is stuck in it."""
    def abort_comm(self, comm: int, limit_ms: int = 5000) -> int:
        """Call ncclCommAbort, after `remove_comm`; RuntimeError if the probe is stuck in it. It also frees."""
    def repair_memory(self, ranges: Sequence[tuple[int, int]], limit_ms: int = 5000) -> int:
        """Call aclrtMemUceRepair with 1 to 128 ranges as they stood in a finding."""

ASCEND_WORDS: tuple[tuple[str, str], ...]
"""What stands in texts of errors of an Ascend device, and the kind of finding that it means; the first one counts."""

def ascend_kind(library: Literal["acl", "hccl"], code: int) -> str:
    """What an error of that number means, as the kind of a finding; empty: it is the program's own."""

def function_variables(frame: FrameType) -> dict[str, Any]:
    """Of a function that runs: what its names hold now, those of functions around it as well."""

def same_objects(one: Sequence[object], other: Sequence[object]) -> bool:
    """Whether both are of the very same objects. Does not touch these."""

def entries(dicts: Sequence[dict[str, Any]], names: Sequence[str], missing: object) -> list[Any]:
    """What stands in each dictionary behind the name at the same place; ``missing``: nothing."""

def entries_are(
    dicts: Sequence[dict[str, Any]], names: Sequence[str], known: Sequence[object], missing: object
) -> bool:
    """Whether these very objects stand there, ``missing`` for nothing."""

def columns(objects: Sequence[Any], getters: tuple[str | Callable[[Any], Any], ...]) -> list[list[Any]]:
    """Of all objects what each getter gives: the attribute of that name, or what it returns for the object."""

class Glance:
    """Spans of this process's memory as (address, bytes), and what they held when they were last looked at.

    Nothing checks the addresses; the caller keeps what lies there alive.
    """

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None: ...
    def changed(self) -> bool:
        """Whether they hold something else now. True the first time."""
    def seen(self) -> list[bytes]:
        """What each held at the last look."""

_Pieces: TypeAlias = Sequence[tuple[int, int, int]]

class Copier:
    """Copies pieces of memory into an image, or out of one, on native threads, and hashes the image in the same pass.

    A piece is (address, bytes, offset in the image). Pieces come by offset, don't overlap and lie inside the image,
    else ValueError; nothing checks the addresses. `gather` and `scatter` return at once; one copy at a time, a second
    is a RuntimeError. Until it is over the image stays exported (its mapping can't be closed), and `owner` alive.
    Copies do not follow each other in any order, so a piece that changes meanwhile arrives torn.

    The threads are started by the first copy, and take no signal. A fork has none, and gets its own when it copies.
    """

    def __init__(self, threads: int = 2, *, nice: int = 0) -> None:
        """`nice` (0..19) is added to the niceness of the threads, for copies behind other work."""
    def gather(self, image: Buffer, pieces: _Pieces, *, hashed: bool = True, owner: object = None) -> None:
        """Pieces to image, zeros where no piece is. The image is writable, at a multiple of 64 bytes (ValueError)."""
    def hash(self, pieces: _Pieces, *, owner: object = None, after: Copier | None = None) -> None:
        """`gather` into an image that is only hashed, and ends with the last piece.

        It begins when what `after` is at is over, however that ends; begin no other copy there meanwhile.
        """
    def scatter(self, image: Buffer, pieces: _Pieces, *, hashed: bool = True, owner: object = None) -> None:
        """Image to pieces. Without pieces the image is only hashed."""
    def read(
        self, fd: int, offset: int, size: int, pieces: _Pieces, *, hashed: bool = True, owner: object = None
    ) -> None:
        """`scatter` of the image of `size` bytes at `offset` in a file. Keep it open until the copy is over."""
    def wait(self, timeout_ms: int) -> bool:
        """Whether the copy is over within that time. Without the GIL; Python's signal handlers run meanwhile.

        OSError if the file can't be read; ENODATA: it ends before the image does.
        """
    @property
    def done(self) -> bool:
        """Whether the copy is over, or was aborted. RuntimeError if none was started in this process."""
    def abort(self) -> None:
        """Begin nothing new, and wait for what is under way (4 MiB for each thread). Nothing happens without a copy."""
    def digests(self) -> bytes:
        """xxh3_128 of each `DIGEST_CHUNK_BYTES` of the image, joined. RuntimeError unless it was hashed to its end."""

class SampledWords:
    """One word of each of many pieces of the process's memory, another one at each `take`: were they written since?

    A piece is (address, bytes). Of one without an address, or of less than a word, nothing is looked at. The memory
    must be there at each call.
    """

    def __init__(self, pieces: list[tuple[int, int]]) -> None: ...
    def take(self) -> None:
        """Remember what they are. 20 to 100 ns for each."""
    def changed(self) -> list[int]:
        """The places in `pieces` of those whose word is another one now."""

class Word:
    """64 bits of shared memory on which processes agree. Sequentially consistent. ValueError once it is closed."""

    def __init__(self, buffer: Buffer, offset: int) -> None:
        """At a multiple of 8 inside a writable buffer (else ValueError), which stays exported until `close`."""
    @property
    def value(self) -> int: ...
    def exchange_if(self, expected: int, desired: int) -> bool:
        """Store `desired` if the value is `expected`, in one step. False if it is not."""
    def close(self) -> None:
        """Let go of the buffer. Idempotent."""

def populate(buffer: Buffer) -> None:
    """Have the kernel back and map every page of a writable mapping now; what is in it stays. Without the GIL.

    OSError if there are no pages to be had. Beyond a control group's limit the kernel kills a process instead.
    """

def holds_nan(numbers: Buffer, item_bytes: int, largest: int) -> bool:
    """Whether one of the numbers is a NaN: its bits without the sign are above those of `largest`. Without the GIL.

    ValueError for a number of `item_bytes` bytes that is none of 1, 2, 4, 8.
    """

def limit_instructions(name: str) -> bool:
    """Hash with "avx2", "sse2", "neon" or "portable" instructions from now on; False if this machine can't.

    For tests.
    """

def death_watch_supported() -> bool:
    """Whether the kernel has futex_waitv."""

def keep_thread_state() -> None:
    """In a thread that Python has not made, which calls Python often: keep what Python makes for a call until it ends.

    Otherwise each call costs 100 to 200 us of CPU time. To be called by the outermost Python function of such a call;
    elsewhere, and in Python's own threads, it does nothing.
    """

def hear_terminate(board: Board, rank: int) -> bool:
    """From now on a first SIGTERM or SIGUSR1 to this process is only written down (`Board.asked`).

    A second SIGTERM ends it, and so does one after the agent has set the word, and any that a forked child gets. There
    a SIGUSR1 does nothing.
    A signal with another handler than the system's own keeps it; False if SIGTERM has one.
    """

def leave_terminate() -> None:
    """Give the signals back to the system. Idempotent."""

def shield_worker() -> None:
    """In a child forked by a process that hears (`hear_terminate`): only its parent's SIGTERM ends it from now on.

    Does nothing in any other process.
    """

def read_process_memory(pid: int, spans: Sequence[tuple[int, int, int]]) -> None:
    """Copy (remote address, local address, bytes) spans out of another process, on several threads, without the GIL.

    Nothing checks the local addresses. OSError: what was copied until then stays.
    """

def prefer_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages there, before the memory is written for the first time. Small spans: no effect."""

def allow_readers() -> None:
    """Let any process of this user read our memory, where Yama would forbid it."""

def die_with_parent(signal_number: int) -> None:
    """Have the kernel send us this signal when the thread that started us ends."""

def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends; whoever does so has to reap them."""

def fork_orphan() -> int:
    """As ``os.fork``; the fork leads a session of its own, and is the child of whoever adopts our orphans. OSError."""
