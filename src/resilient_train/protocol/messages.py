"""The frames between a rank and its agent: msgspec structs, msgpack on the wire, never pickle.

Every frame that belongs to a recovery carries its generation; whoever speaks of an older one is not listened to.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

PROTOCOL_VERSION = 5


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """First frame on every connection. ``role`` is ``rank``, ``operator`` (a command line tool), ``set-up``: a rank
    that has no Session yet, and asks for its SetUp, or ``import``: its script imports this library. A Reply answers.

    ``token`` is a rank's: what its agent has given to its processes, and no other agent knows.
    """

    role: str
    rank: int = -1
    incarnation: int = -1
    pid: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    version: int = PROTOCOL_VERSION
    token: str = ""


class Source(msgspec.Struct, frozen=True):
    """Where all ranks take their state from when they start: snapshots in ``memory``, or the checkpoint at ``path``."""

    kind: Literal["memory", "storage"]
    commits: int
    path: str = ""


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    """Answer to a rank's Hello. Two descriptors come with it: the board, and the rank's arena."""

    generation: int
    attempt: int
    source: Source | None = None
    look_at: int = -1
    """The ranks say what they hold before this update (``Held``); -1: before none."""


class OpenVault(msgspec.Struct, tag="open_vault", frozen=True):
    """The rank will keep snapshots of its state: somebody must hold them. A VaultOpened frame answers."""


class VaultOpened(msgspec.Struct, tag="vault_opened", frozen=True):
    """There is a holder (``state/vault``), unless ``error`` says why not. ``later``: it is worth asking again."""

    error: str = ""
    later: bool = False


class Captured(msgspec.Struct, tag="captured", frozen=True):
    """This rank's snapshot from before update ``commits`` is complete. ``store``: it is to go to storage."""

    commits: int
    step: int
    sequence: int
    store: bool
    last: int = -1
    """Not -1: it is the rank's part of the end-of-life checkpoint of this generation."""
    fingerprint: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of the parameters and optimizer state that the rank holds, all of them; 0: not known, or nobody has the same."""


class Skipped(msgspec.Struct, tag="skipped", frozen=True):
    """A snapshot from before update ``commits`` was due, and this rank has none: nobody is to wait for it."""

    commits: int
    step: int
    reason: str


class Unsaved(msgspec.Struct, tag="unsaved", frozen=True):
    """This rank can't do its part in the end-of-life checkpoint of ``generation``."""

    generation: int
    reason: str


class Unrestorable(msgspec.Struct, tag="unrestorable", frozen=True):
    """The source named in Welcome did not do, and why. The rank ends; all start again from the next one.

    ``whole``: it is not damaged, but of a model that was divided in another way. Without a next one the job ends.
    ``passing``: it could not be reached, so it is tried again.
    """

    source: Source
    reason: str
    whole: bool = False
    passing: bool = False


class Reserve(msgspec.Struct, tag="reserve", frozen=True):
    """The rank's published state outgrew its arena; an ArenaFrame with a larger one answers."""

    slot_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 44)]


class Borrow(msgspec.Struct, tag="borrow", frozen=True):
    """The rank wants to read the arena of another one; an ArenaFrame answers."""

    rank: int


class ArenaFrame(msgspec.Struct, tag="arena", frozen=True):
    """An arena for the rank that asked; its descriptor comes with the frame."""

    rank: int


class SetUp(msgspec.Struct, tag="set_up", frozen=True):
    """What the collectives before this rank's loop gave it (``state/set_up_record.py``), at most some MiB.

    A rank's first process sends it before Started; the agent keeps it, and sends it to each that takes its place.
    ``changed``: what a process of that rank has told as Beside.
    """

    record: bytes
    changed: str = ""


class Beside(msgspec.Struct, tag="beside", frozen=True):
    """What is not registered has changed in training, for people: see ``roles.Window.changed_beside``. Told
    once by each process, so that a new one of the rank need not ask others, who may have none.
    """

    text: str


class Strayed(msgspec.Struct, tag="strayed", frozen=True):
    """On a ``set-up`` connection: the script did not do before its loop what it did in the process whose place this one
    takes. The survivors save the state and the job ends, with exit code 2 and this text. A Reply answers.
    """

    text: str


class Started(msgspec.Struct, tag="started", frozen=True):
    """The rank is about to run its first step: from now on it can be replaced.

    ``digest`` is that of the replicated state (equal on all ranks of a replica group, else nothing can be restored);
    ``groups`` are the names of its process groups; ``replicas`` the replica groups it was told, empty for "all ranks";
    ``step`` is the number of its first step, for the report; ``total`` what that of its last one is below.
    """

    digest: str
    groups: tuple[str, ...]
    replicas: tuple[tuple[int, ...], ...] = ()
    step: int = 0
    total: int = 0


class Trouble(msgspec.Struct, tag="trouble", frozen=True):
    """A collective of this rank failed and the rank doesn't know why."""

    generation: int
    detail: str


class LeftByException(msgspec.Struct, tag="raised", frozen=True):
    """An exception of the script's has left the rank's loop, and ends the job. What the rank holds is whole: it waits
    for a stop, takes part in saving it, and ends with ``code`` after that.

    ``text`` is the exception in a line; empty for one that only ends the process (SystemExit).
    """

    text: str
    code: int


class Unfinishable(msgspec.Struct, tag="unfinishable", frozen=True):
    """The tail of the last update can't be finished: a part of it went with a dead rank."""

    generation: int
    reason: str


class Damaged(msgspec.Struct, tag="damaged", frozen=True):
    """Memory of this rank's device lost data (UCE); what it held is lost, the process is well."""

    generation: int
    detail: str


class Anomaly(msgspec.Struct, tag="anomaly", frozen=True):
    """The gradient norm, or the loss, of a step is not below ``limit``, or not finite; its update is not applied.

    ``usual``: the median of the steps before, where it is they that set the limit, and not the user. ``raised``: there
    is no value, the script has left the body by an error that asks for the step once more, ``text``.

    The rank waits for a stop, unless the step has been run again for that already (``again``): then it goes on, or the
    error is its own.
    """

    generation: int
    step: Annotated[int, msgspec.Meta(ge=0)]
    what: Literal["norm", "loss", "raised"]
    value: float
    limit: float
    again: bool = False
    skips: bool = False
    """The step's update is left out when it runs again."""
    usual: float | None = None
    text: str = ""


class Late(msgspec.Struct, tag="late", frozen=True):
    """What was trained since ``step`` can't be right: the script has found it out (``reason``), or it shows behind the
    step's update (``seen``). Nothing is waited for.
    """

    step: Annotated[int, msgspec.Meta(ge=0)]
    reason: str = ""
    seen: Anomaly | None = None
    until: int = -1
    """It shows before this step: what shows again in between is the same. -1: nothing is known of that."""


class Computed(msgspec.Struct, tag="computed", frozen=True):
    """The rank has computed a window that is computed twice (``comparisons/computed_twice.py``); not applied yet.

    ``differs_at``: the first thing of ``of`` in which this is not what it was before; -1: there is none, or no before.
    Where there is one, and where the window is to be computed once more, the rank waits for a stop. Where there is one
    ``digests`` has what was there before and is now, ``batch`` a digest of the window's batches, and ``device`` says
    on which device. ``calls``: a digest of which collectives and messages there were. ``unshared``: why no other rank
    can compute from the same inputs, or this one could not from another's.
    """

    generation: int
    commits: int
    step: Annotated[int, msgspec.Meta(ge=0)]
    differs_at: int = -1
    of: int = 0
    digests: tuple[str, str] = ("", "")
    batch: str = ""
    device: str = ""
    calls: str = ""
    unshared: str = ""


class Joined(msgspec.Struct, tag="joined", frozen=True):
    """The rank has left its step (or just started) and takes part in the recovery of ``generation``.

    ``holds`` is False where the rank's replicated state is not usable (it just started, its update was cut, or its
    memory was damaged).
    ``tail_done`` counts the collectives that it completed after its last update.
    """

    generation: int
    commits: int
    phase: Annotated[int, msgspec.Meta(ge=0, le=3)]
    holds: bool
    tail_done: int
    groups: tuple[str, ...]
    stopped_ns: int = 0
    tail_failed: bool = False
    """The code behind its last update was left by an exception of the script's: it will not be run to its end."""
    doubts: bool = False
    """The last snapshot of this rank's replica group was not the same, and they have not compared since."""


class Plan(msgspec.Struct, tag="plan", frozen=True):
    """What everyone does in the recovery of ``generation``; each rank derives its own part, see ``rank``.

    All ranks go on from the start of update ``commits``. ``copies`` maps a rank without usable state to the replica it
    copies from. ``finishers`` are the ranks that run the tail before that update, or what is left of it. ``replaced``
    are the ranks whose process is another one than at the last Resume.
    """

    generation: int
    commits: int
    copies: dict[int, int]
    finishers: tuple[int, ...] = ()
    replaced: tuple[int, ...] = ()
    last: bool = False
    """At the head of the next window all ranks save the state, and the job ends."""


class SaveLast(msgspec.Struct, tag="save_last", frozen=True):
    """In place of a Plan: the job ends, and ranks are gone. The state from before update ``commits`` is saved.

    This rank writes ``part`` of ``parts`` of its replica group's state, as ``shard`` of ``shards``; -1: it has none.
    ``others`` maps ranks that can't save to what they had published last: their own state.
    """

    generation: int
    commits: int
    part: int = -1
    parts: int = 0
    shard: int = -1
    shards: int = 0
    others: dict[int, bytes] = {}


class Built(msgspec.Struct, tag="built", frozen=True):
    """This rank's process groups are up in ``generation``."""

    generation: int


class Address(msgspec.Struct, tag="address", frozen=True):
    """Where this rank listens in a process group that is being built; the agent passes it on to ``ranks`` unread."""

    generation: int
    key: str
    value: bytes
    ranks: tuple[int, ...]


class Offer(msgspec.Struct, tag="offer", frozen=True):
    """A source's description of its state, for ``target``; the agent passes it on unread. ``changed``: see
    ``roles.Window.changed_beside``.
    """

    generation: int
    source: int
    target: int
    pid: int
    manifest: bytes
    digest: str
    changed: tuple[str, ...] = ()


class Pull(msgspec.Struct, tag="pull", frozen=True):
    """The target can't read the source's memory: send it over the process group. The agent passes it on."""

    generation: int
    source: int
    target: int


class Fetched(msgspec.Struct, tag="fetched", frozen=True):
    """How a copy went, for the report: the target tells the agent."""

    generation: int
    source: int
    bytes_copied: int
    duration_ns: int
    way: str


class Done(msgspec.Struct, tag="done", frozen=True):
    """This rank stands at the start of the plan's update and waits for Resume. ``over``: its loop has ended."""

    generation: int
    redone: bool
    step: int
    over: bool = False


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """A recovery begins (also raised in shared memory, which is faster)."""

    generation: int
    lost: tuple[int, ...]
    reason: str


class Differs(msgspec.Struct, tag="differs", frozen=True):
    """The rank has found that its replicas do not hold what it holds before update ``commits``. It waits for the end.

    ``rows`` are (name, digest) of all tensors and values that replicas have in common; ``averages``: the rank's models
    are wrapped by something that averages their gradients. ``since``: the update before which they did not seem to hold
    the same first, and ``held``, fingerprints of what they held then, in the order of the replica group. ``batch``: a
    digest of the batches of the rank's window, and ``device``: where they lie. The one large frame: it is sent once, as
    the job's last.
    """

    commits: int
    rows: list[tuple[str, str]]
    averages: bool
    since: int = -1
    held: tuple[int, ...] = ()
    batch: str = ""
    device: str = ""


class Held(msgspec.Struct, tag="held", frozen=True):
    """A fingerprint of what the rank holds before update ``commits``, up to which all have trained once more because
    replicas had held different things. Nobody waits for an answer.
    """

    commits: int
    held: int


EXCHANGED = " (the module)"
"""So the names of modules end that are not the ones that were built."""
KEPT_BACK = " (not given)"
"""And those of attributes in modules of which a new process gets nothing."""
HOOKS = "model.hooks"
"""All that the loop has hung on the model for good."""


class Shared(msgspec.Struct, tag="shared", frozen=True):
    """What the rank's objects in ``state=`` are before update ``commits``, its schedulers, those modules and their
    attributes that are not as they were built, and what was hung on the model: (name, digest). Sent before the updates
    that are 1, 2, 4, 8, ... behind a beginning; nobody waits for an answer.
    """

    commits: int
    rows: list[tuple[str, str]]


class MessageChannel(msgspec.Struct, array_like=True, frozen=True):
    """From one rank to another, in a group and with a tag (``where``)."""

    source: int
    target: int
    where: str


class BodiesMessages(msgspec.Struct, tag="messages", frozen=True):
    """What this rank has sent and received in the bodies of its steps before update ``commits``: for each channel a
    word, which is that of its other end if both have had as many messages behind each update.
    """

    commits: int
    words: list[tuple[MessageChannel, int]]


class HoldsNan(msgspec.Struct, tag="holds_nan", frozen=True):
    """There is NaN in what the rank holds before update ``commits`` and step ``step``, as ``told`` says, and there was
    none before. Nothing is waited for.
    """

    commits: int
    step: Annotated[int, msgspec.Meta(ge=0)]
    told: str
    without: int = -1
    """Before which update it had looked last, and found none; -1: this process never had."""
    since: int = -1
    """Before which step that was, if all are to go back to it."""


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Everyone is done: train. ``over``: a loop has ended, by a ``break`` that who copied its state did not see.

    ``tolerated``: steps that were run again for an anomaly, and are not for another one; of those behind which all are,
    the last one at the most. ``verified``: the update for which all compute, or have computed, a second time; -1: there
    was none. ``distance``: they do so from the inputs of the replica so many places behind them, and this does not
    count; 0: from their own. ``verifies``: the recovery was begun for that, and for nothing else.
    """

    generation: int
    over: bool = False
    tolerated: frozenset[int] = frozenset()
    verified: int = -1
    distance: int = 0
    verifies: bool = False


class Reached(msgspec.Struct, tag="reached", frozen=True):
    """The rank stands at the head of the window before which all are to pause, and waits for the stop."""

    generation: int


class Paused(msgspec.Struct, tag="paused", frozen=True):
    """All ranks stand at one head, and their Resume is held back: somebody wants it so."""

    generation: int


class LoopOver(msgspec.Struct, tag="finish", frozen=True):
    """The rank's loop is over. Nobody leaves before everybody has said so.

    ``left_at``: the rank's step record (``protocol/progress.py``) of then, with FINISHED where the loop has come to its
    last number; None where the rank has only heard that the loops are over. ``exits``: it was left by ``sys.exit(0)``.
    """

    generation: int
    left_at: tuple[int, int, int, int] | None = None
    exits: bool = False


class Finished(msgspec.Struct, tag="finished", frozen=True):
    """All ranks' loops are over: leave."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The user's Session is wrong (a ConfigError); the job will end with exit code 2 and this text."""

    text: str


class Plain(msgspec.Struct, tag="plain", frozen=True):
    """The script's Session is a plain loop: nothing will come from this rank, and nothing can be repaired."""

    reason: str


class End(msgspec.Struct, tag="end", frozen=True):
    """The job ends."""

    code: int
    reason: str


class Inject(msgspec.Struct, tag="inject", frozen=True):
    """An operator asks to hit a rank: ``kind`` and ``target`` (empty but for ``uce``) are those of ``faults``."""

    kind: str
    rank: int
    target: str = ""


class Pause(msgspec.Struct, tag="pause", frozen=True):
    """An operator, or the script of a rank (-1: none), asks all ranks to stop before ``step``, -1: the next one.

    An operator is told where it is asked for already, or too late; a script asks on all ranks, one after the other.
    """

    step: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)] = -1
    rank: int = -1


class Unpause(msgspec.Struct, tag="unpause", frozen=True):
    """The pause is to end. ``generation``: a script means this one, and no later pause; -1: an operator."""

    generation: int = -1


class Query(msgspec.Struct, tag="query", frozen=True):
    """An operator asks for the job's state."""


class Reply(msgspec.Struct, tag="reply", frozen=True):
    """Answer to an operator; ``error`` is empty when it worked."""

    error: str = ""
    status: dict[str, object] = {}


FromRank = (
    Hello
    | Reserve
    | Borrow
    | SetUp
    | Beside
    | Strayed
    | Started
    | Trouble
    | LeftByException
    | Unfinishable
    | Damaged
    | Anomaly
    | Late
    | Computed
    | Joined
    | Built
    | Address
    | Offer
    | Pull
    | Fetched
    | Done
    | Reached
    | LoopOver
    | Refused
    | Plain
    | Differs
    | Held
    | Shared
    | BodiesMessages
    | HoldsNan
    | OpenVault
    | Captured
    | Skipped
    | Unsaved
    | Unrestorable
    | Inject
    | Pause
    | Unpause
    | Query
)
"""Every frame that an agent reads."""

FromAgent = (
    Welcome
    | SetUp
    | ArenaFrame
    | VaultOpened
    | Stop
    | Plan
    | SaveLast
    | Address
    | Offer
    | Pull
    | Resume
    | Paused
    | Finished
    | End
    | Reply
)
"""Every frame that a rank or an operator reads."""
