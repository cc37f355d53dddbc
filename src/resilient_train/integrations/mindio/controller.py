"""The controller of ``mindio_ttp``: what is done about a fault, as events in and orders out. No I/O, no clock.

A job goes through stages. In each but the first two the controller has given orders and waits for the answers; when the
last is there, the next stage follows:

    STARTING     all ranks are to say ProcessorHello
    TRAINING     nobody reports anything
    LOCKING      all come to the end of the same update, and begin none behind it
    HALTING      the same, where nothing is wrong: all make one more update. A pause follows, or the end
    PAUSED       all stand, until somebody lets them go on
    REPORTING    MindX, where there is one, is to say that training stops (``mindx_controller.py``)
    NAMING       it is to name all ranks that are faulty
    CHOOSING     it is to choose what is done
    STOPPING     training threads raise, and wait
    CLEANING     devices are made ready; who lost memory says whether state was in it
    JOINING      lost ranks come back (ARF)
    REBUILDING   groups are made with them, and they come to their first step
    REPAIRING    state goes from those who hold it to those who don't
    ROLLING_BACK what is not state follows
    TRAINING     again, from behind that update

    SAVING       one complete set of ranks writes an end-of-life checkpoint
    RENAMING     one of them gives it its name
    OVER         all are told to end

A fault in any of them begins a new *round* at LOCKING: MindIO gives up there. What an older round is answered counts
for nothing. In RENAMING all is written, and what befalls a rank takes nothing of that away. The answer is waited for:

    answered, done                  the checkpoint has its name
    it has lost memory, or fails    a name needs no device: it still answers
    its process is gone             it may have renamed, or not: another one is asked
    no answer in time               likewise
    answered, failed                likewise: another one may be able to
    another one finds it renamed    the checkpoint has its name
    nobody is left to ask           perhaps it has: who looks, sees it. Nobody says that nothing is saved

``step`` is the number of updates that a rank's state has behind it; whether it is *whole* is all that
decides who gives state and who gets it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import msgspec

from resilient_train.integrations.mindio.frames import (
    NAMED,
    NOT_WHOLE,
    PASSED,
    AnyOrder,
    CleanOrder,
    Did,
    ExitOrder,
    FaultKind,
    GoOrder,
    HaltOrder,
    LockOrder,
    Order,
    Part,
    ProcessorWelcome,
    RebuildOrder,
    ReleaseOrder,
    RenameOrder,
    RepairOrder,
    RepairType,
    ReplicaGroup,
    ReportState,
    RollbackOrder,
    SaveOrder,
    Savers,
    StopOrder,
)
from resilient_train.protocol.replicas import assign_sources

_RENAMERS_MAX = 3
"""Storage on which so many ranks can't rename, or don't come back from it, lets nobody."""


class MindioStage(enum.Enum):
    """See above."""

    STARTING = enum.auto()
    TRAINING = enum.auto()
    LOCKING = enum.auto()
    HALTING = enum.auto()
    PAUSED = enum.auto()
    REPORTING = enum.auto()
    NAMING = enum.auto()
    CHOOSING = enum.auto()
    STOPPING = enum.auto()
    CLEANING = enum.auto()
    JOINING = enum.auto()
    REBUILDING = enum.auto()
    REPAIRING = enum.auto()
    ROLLING_BACK = enum.auto()
    SAVING = enum.auto()
    RENAMING = enum.auto()
    OVER = enum.auto()


class Recoveries(msgspec.Struct, frozen=True):
    """Which recoveries are on: without any a fault is the job's end, behind a checkpoint."""

    uce: bool = True
    hcce: bool = True
    arf: bool = True
    pause: bool = True
    """Ranks call ``tft_pause_train`` behind each update: nobody stands still in another place."""


class To(NamedTuple):
    """Send this to that rank."""

    rank: int
    frame: AnyOrder | ProcessorWelcome


class Timer(NamedTuple):
    """Call ``expired(round, stage)`` if the job is still there when that stage's time is over: ``limit_s``, or, if that
    is 0, as long as such a stage may take.
    """

    round: int
    stage: MindioStage
    limit_s: float = 0.0


class Notice(NamedTuple):
    """Something to tell people. ``detail``: more of it, for the event."""

    kind: str
    rank: int
    text: str
    detail: Mapping[str, object] = MappingProxyType({})


class TrainingEnded(NamedTuple):
    """The job is over; ``saved``: the step of its checkpoint, -1: there is none that is known of; ``failed``: the rank
    whose script has, -1: none. ``unnamed``: the step of a checkpoint of which all is written, but whether it has its
    name nobody has said; -1: there is none.
    """

    saved: int
    reason: str
    failed: int = -1
    unnamed: int = -1


class MindXCall(NamedTuple):
    """Call what MindX has registered for ``action``."""

    action: str
    arguments: tuple[Any, ...]


Effect = To | Timer | Notice | TrainingEnded | MindXCall


class RankFault(NamedTuple):
    """What a rank was told of. ``code``: the device's."""

    kind: FaultKind
    code: str = ""


PROCESS = RankFault(FaultKind.PROCESS)


class Seat:
    """What is known of one rank."""

    def __init__(self) -> None:
        self.present = False
        """A process is connected."""
        self.reborn = False
        """It came in the place of a lost one, and has not trained yet."""
        self.left = False
        """It has come to its end."""
        self.builds = False
        """It was let go to its first step."""
        self.prepared = False
        """Such a process stands at its first step, with groups that all have made."""
        self.step = 0
        self.updating = False
        self.whole = True
        """Its memory holds the state behind ``step`` updates."""
        self.locked = False
        """It has answered that it stands. A device may update all the same: MindSpore's C++ code only tells of it."""
        self.reported: ReportState | None = None
        """Its training thread waits for what is done about this."""
        self.damaged = False
        """Its device has lost memory, and it is not known yet whether state was in it."""

    def copy(self) -> Seat:
        """An independent one in the same state."""
        new = object.__new__(Seat)
        new.__dict__.update(self.__dict__)
        return new


class MindioController:
    """One job of ``world_size`` ranks."""

    def __init__(self, world_size: int, policy: Recoveries | None = None) -> None:
        self.policy = policy or Recoveries()
        self.seats = [Seat() for _ in range(world_size)]
        self.groups: list[list[ReplicaGroup]] = []
        """For each kind of optimizer the groups that hold a state together, as far as ranks have told."""
        self.stage = MindioStage.STARTING
        self.round = 0
        self.target = 0
        """The update behind which the job goes on, or is saved."""
        self.pending: frozenset[int] = frozenset()
        """Who has not answered yet."""
        self.lost: frozenset[int] = frozenset()
        """Ranks whose process is gone, in this recovery."""
        self.faulty: Mapping[int, RankFault] = MappingProxyType({})
        """All that a fault was told of, in this recovery, and the last of each."""
        self.hopeless = ""
        """Why this recovery can only be the job's end."""
        self.failed = -1
        """Who has failed by itself, first."""
        self.low: frozenset[int] = frozenset()
        """Who has lost memory in which no state was."""
        self.savers: tuple[Savers, ...] = ()
        self.renamers: Mapping[int, str] = MappingProxyType({})
        """Who was asked to give the checkpoint its name, in that order, and what has become of it."""
        self.pauses = False
        """A pause is wanted. A fault is repaired first."""
        self.ahead = 1
        """How many updates all were to make before they stand."""

    # -- events

    def hello(self, rank: int) -> list[Effect]:
        """A process has connected."""
        if self.stage is MindioStage.OVER:
            return [To(rank, ExitOrder(round=self.round))]
        seat = self.seats[rank]
        reborn = self.stage is not MindioStage.STARTING
        self.seats[rank] = Seat()
        self.seats[rank].present = True
        if not reborn:
            told: list[Effect] = [To(rank, ProcessorWelcome(reborn=False))]
            if all(each.present for each in self.seats):
                self.stage = MindioStage.TRAINING
                told.append(Notice("started", -1, "all ranks are there"))
            return told
        told = []
        if seat.present:  # its connection, or its end, was not heard of yet
            told += self.gone(rank)
        self.seats[rank].reborn, self.seats[rank].whole = True, False
        self.seats[rank].present = True
        return [*told, To(rank, ProcessorWelcome(reborn=True))]

    def leave(self, reason: str) -> list[Effect]:
        """Somebody wants the job to end, behind a checkpoint."""
        if self.stage in (MindioStage.SAVING, MindioStage.RENAMING, MindioStage.OVER):
            return []
        self.hopeless = self.hopeless or reason
        if self.stage is MindioStage.STARTING:
            return self._end(reason)
        if self.stage is MindioStage.HALTING:  # for a pause: all come to stand in any case
            return []
        if self.stage is not MindioStage.TRAINING:
            return self._begin_round()
        return self._halt()

    def pause(self) -> list[Effect]:
        """Somebody wants all to stand still. The policy says whether they can; who has come to its end does not."""
        assert self.policy.pause, "nobody would come to stand"
        if any(seat.left for seat in self.seats):
            return []
        self.pauses = True
        return self._halt() if self.stage is MindioStage.TRAINING else []

    def unpause(self) -> list[Effect]:
        """All are to go on."""
        self.pauses = False
        if self.stage is not MindioStage.PAUSED and (self.stage is not MindioStage.HALTING or self.hopeless):
            return []
        if self.stage is MindioStage.HALTING:
            return [*self._release(), Notice("pause_withdrawn", -1, "nobody wants it any more")]
        return [*self._release(), Notice("resumed", -1, "the pause is over", {"step": self.target})]

    def _halt(self, ahead: int = 1) -> list[Effect]:
        # Who is on the way to an update can't save before it is over: MindSpore's flag stands from the collective on.
        self.round += 1
        self._let_move()
        self.ahead = ahead
        limit = ahead + max(map(self._reaches, self.steady()), default=0)
        return self._give(
            MindioStage.HALTING, {rank: HaltOrder(round=self.round, limit=limit) for rank in self.steady()}
        )

    def _let_move(self) -> None:
        """Nobody counts any more on where ranks have said that they stand."""
        for seat in self.seats:
            seat.locked = False

    def _release(self) -> list[Effect]:
        """Whoever stands goes on; nothing has happened to it."""
        self.round += 1
        self.stage, self.pending = MindioStage.TRAINING, frozenset()
        self._let_move()
        return [To(rank, ReleaseOrder(round=self.round)) for rank in self.steady()]

    def status(self, rank: int, step: int, *, updating: bool) -> list[Effect]:
        """A rank tells how far it is."""
        seat = self.seats[rank]
        moved = seat.locked and (updating or step != seat.step)
        seat.step, seat.updating = step, updating
        # What was built on where it stood is built anew, and answers to orders of before count for nothing.
        return self._begin_round() if moved and self.stage not in (MindioStage.RENAMING, MindioStage.OVER) else []

    def replicas(self, rank: int, groups: Sequence[ReplicaGroup]) -> list[Effect]:
        """A rank tells in whose company it holds its state: one group for each kind of optimizer."""
        if not self.groups:
            self.groups = [[] for _ in groups]
        if wrong := self._wrong_groups(rank, groups):
            return self._end(f"rank {rank}: {wrong}")
        for kind, group in enumerate(groups):
            if group not in self.groups[kind]:
                self.groups[kind].append(group)
        return []

    def _wrong_groups(self, rank: int, groups: Sequence[ReplicaGroup]) -> str:
        """Why these can't be right; empty if they can."""
        if len(groups) != len(self.groups):
            return f"it has {len(groups)} kinds of optimizer, and others have {len(self.groups)}"
        for kind, group in enumerate(groups):
            if rank not in group.ranks or len(set(group.ranks)) < len(group.ranks):
                return f"its group {list(group.ranks)} is none that it is in, or names a rank twice"
            if not all(0 <= each < len(self.seats) for each in group.ranks):
                return f"its group {list(group.ranks)} has ranks that the job has not"
            if group.copies < 1 or len(group.ranks) % group.copies:
                return f"{len(group.ranks)} ranks can't hold {group.copies} copies"
            if group.shift:
                return f"replica_shift is {group.shift}, which is not understood here"
            for other in self.groups[kind]:
                if other != group and set(other.ranks) & set(group.ranks):
                    mine, theirs = (f"{list(each.ranks)} with {each.copies} copies" for each in (group, other))
                    return f"its group {mine} contradicts {theirs} of another rank's"
        return ""

    def reported(self, rank: int, state: ReportState, code: str = "") -> list[Effect]:
        """A training thread has left its loop, or has come back to it, and waits."""
        seat = self.seats[rank]
        match state:
            case ReportState.RS_INIT_FINISH:
                return self._came(rank)
            case ReportState.RS_PREREPAIR_FINISH:
                seat.reported = state
                if seat.reborn and not seat.builds:  # it makes its groups when all others do
                    return self._joined() if self.stage is MindioStage.JOINING else []
                seat.prepared = seat.reborn
                return self._answered_all() if self.stage is MindioStage.REBUILDING else []
            case ReportState.RS_NORMAL | ReportState.RS_STEP_FINISH:
                seat.reported = state
                if self.stage is MindioStage.STOPPING:
                    return self._answered_all()
                if self.stage is MindioStage.TRAINING:
                    return self._fault(rank, "left its loop, and nobody had stopped it", RankFault(FaultKind.NETWORK))
                return []
        seat.reported = state
        if state in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED):
            seat.damaged = True
            seat.whole = False
        if state is ReportState.RS_UNKNOWN:
            self.hopeless = self.hopeless or f"rank {rank} has failed by itself"
            self.failed = rank if self.failed < 0 else self.failed
        elif state is ReportState.RS_RETRY:
            self.hopeless = self.hopeless or f"rank {rank} wants to load a checkpoint, which nobody has registered"
        return self._fault(rank, f"{state.name} {code}".strip(), RankFault(_KINDS.get(state, FaultKind.PROCESS), code))

    def gone(self, rank: int) -> list[Effect]:
        """A process has ended, or is not heard any more."""
        seat = self.seats[rank]
        if not seat.present or self.stage is MindioStage.OVER:
            return []
        self._vacate(rank)
        if self.stage is MindioStage.STARTING:
            return []
        self.lost |= {rank}
        return self._fault(rank, "its process is gone")

    def _vacate(self, rank: int) -> None:
        """Its process holds nothing any more, whether it lives or not."""
        self.seats[rank] = Seat()
        self.seats[rank].whole = False

    def bye(self, rank: int) -> list[Effect]:
        """A rank's training is over: nobody who is lost from here on can train on, this one would not take part."""
        self.seats[rank].present, self.seats[rank].left = False, True
        if self.stage is MindioStage.HALTING:  # there is no update more: the others come to their ends as well
            self.hopeless, self.pauses = "", False
            return self._release()
        if self.stage in (MindioStage.TRAINING, MindioStage.STARTING, MindioStage.OVER):
            return []
        return self._fault(rank, "has come to its end in the middle of a recovery")

    def did(self, rank: int, answer: Did) -> list[Effect]:
        """An order is carried out."""
        if rank not in self.pending or not self._awaits(answer):
            return []
        if answer.code == PASSED:  # what is known here of a rank's step is always a little old
            self.seats[rank].step = answer.step
            return self._halt(ahead=self.ahead * 2)
        if self.stage is MindioStage.RENAMING:
            return self._answered_rename(rank, answer.code)
        if failure := self._took(rank, answer):
            kind = FaultKind.UCE if answer.code == NOT_WHOLE else FaultKind.PROCESS
            return self._fault(rank, failure, RankFault(kind))
        self.pending -= {rank}
        return self._answered_all()

    def _awaits(self, answer: Did) -> bool:
        order = _ORDER.get(self.stage)
        return order is not None and (answer.round, answer.order) == (self.round, order.name())

    def expired(self, number: int, stage: MindioStage) -> list[Effect]:
        """A stage has taken too long."""
        if (number, stage) != (self.round, self.stage) or stage in (
            MindioStage.STARTING,
            MindioStage.TRAINING,
            MindioStage.OVER,
        ):
            return []
        if stage is MindioStage.PAUSED or (stage is MindioStage.HALTING and not self.hopeless):
            return []
        late = sorted(self.pending or self.lost)
        if stage is MindioStage.RENAMING:
            return self._rename("did not answer in time")
        if stage is MindioStage.SAVING:
            return self._end(f"ranks {late} did not save in time")
        self.hopeless = self.hopeless or f"ranks {late} did not come through {stage.name}"
        if stage in (MindioStage.LOCKING, MindioStage.HALTING):
            # Who does not stand still may be writing: nothing that it holds is counted on.
            for rank in late:
                self.seats[rank].whole = False
            self.pending = frozenset()
        return self._leave()

    # -- hangs

    def stalled(self, why: str) -> list[Effect]:
        """No rank goes on, and nobody knows whose fault that is: all leave their step, and do it over."""
        if self.stage not in (MindioStage.TRAINING, MindioStage.HALTING):
            return []
        return [Notice("fault", -1, why), *self._begin_round()]

    def awaited(self) -> frozenset[int]:
        """Whose answer, or whose training thread, is waited for now."""
        if self.stage is not MindioStage.STOPPING:
            return self.pending
        return self.pending | {rank for rank in self.steady() if self.seats[rank].reported is None}

    def can_do_without(self, ranks: Collection[int]) -> bool:
        """Whether others hold all that these hold."""
        trial = self.copy()
        for rank in ranks:
            trial._vacate(rank)  # noqa: SLF001 - of one like this
        return trial._held_by_all_sets() > 0  # noqa: SLF001

    # -- rounds

    def _fault(self, rank: int, what: str, fault: RankFault = PROCESS) -> list[Effect]:
        """A round begins: where nobody can be helped, so does the end."""
        if self.stage is MindioStage.OVER:
            return []
        if self.stage is MindioStage.STARTING:
            return self._end(f"rank {rank}: {what}, before all were there")
        told: list[Effect] = [Notice("fault", rank, what)]
        self.faulty = MappingProxyType({**self.faulty, rank: fault})
        if self.stage is MindioStage.RENAMING:
            gone = rank in self.pending and not self.seats[rank].present
            return [*told, *(self._rename("was lost before it answered") if gone else [])]
        if self.stage is MindioStage.SAVING:
            # Where a script fails, it fails on all ranks, one after the other: those who save hold what they hold.
            if all(self._holds(each) for savers in self.savers for each in savers.ranks):
                return told
            # Whose part is written is not needed any more, where nobody else has that part.
            if self._complete_set() is None and all(map(self._holds, self.pending)):
                return told
            self.round += 1
            return [*told, *self._save()]
        if self.stage is MindioStage.LOCKING:
            self.pending &= frozenset(self.steady())
            return [*told, *self._answered_all()]
        return [*told, *self._begin_round()]

    def _begin_round(self) -> list[Effect]:
        """All are to stand."""
        self.round += 1
        self.stage = MindioStage.LOCKING
        told: list[Effect] = [To(each, ExitOrder(round=self.round)) for each in self._half_reborn()]
        self.lost -= set(self.steady())  # who came back in an earlier round is there as all others are
        self._let_move()
        self.pending = frozenset(self.steady())
        limit = max((self._reaches(each) for each in self.steady()), default=0)
        told += [To(each, LockOrder(round=self.round, limit=limit)) for each in sorted(self.pending)]
        return [*told, Timer(self.round, self.stage), *self._answered_all()]

    def steady(self) -> list[int]:
        """Ranks whose process was there before this recovery, or has come to its first step since."""
        return [rank for rank, seat in enumerate(self.seats) if seat.present and (seat.prepared or not seat.reborn)]

    def _half_reborn(self) -> list[int]:
        """Processes on their way to a first step with groups that will not be: they are started once more."""
        return [rank for rank, seat in enumerate(self.seats) if seat.builds and not seat.prepared]

    def _reaches(self, rank: int) -> int:
        seat = self.seats[rank]
        return seat.step + seat.updating

    def _took(self, rank: int, answer: Did) -> str:
        """Notes what an answer says. Returns what has failed, if anything."""
        seat = self.seats[rank]
        if self.stage in (MindioStage.LOCKING, MindioStage.HALTING):
            seat.step, seat.updating, seat.whole = answer.step, False, not answer.code  # it knows best
            seat.locked = True
            return ""
        if self.stage is MindioStage.CLEANING and seat.damaged and answer.code in (0, 2):
            seat.damaged = False
            seat.whole = answer.code == 2
            self.low |= {rank} if answer.code == 2 else frozenset()
            return ""
        if self.stage is MindioStage.REBUILDING and not answer.code:
            seat.prepared = seat.reborn
            return ""
        if answer.code == NOT_WHOLE:
            seat.whole = False
            return f"has lost its state before it could {answer.order}"
        if answer.code:
            seat.whole = seat.whole and self.stage is not MindioStage.SAVING
            self.hopeless = self.hopeless or f"rank {rank} failed to {answer.order} (code {answer.code})"
            return f"could not {answer.order} (code {answer.code})"
        return ""

    def _answered_all(self) -> list[Effect]:
        """Goes on if nothing is waited for."""
        if self.pending or not self._stands():
            return []
        return self._next()

    def _next(self) -> list[Effect]:
        match self.stage:
            case MindioStage.LOCKING | MindioStage.HALTING:
                return self._locked()
            case MindioStage.STOPPING:
                return self._stopped()
            case MindioStage.CLEANING:
                return self._cleaned()
            case MindioStage.REBUILDING:
                return self._repair()
            case MindioStage.REPAIRING:
                return self._repaired()
            case MindioStage.ROLLING_BACK:
                return self._goes_on()
            case MindioStage.SAVING:
                return self._rename()
        raise AssertionError(f"nothing is waited for in {self.stage.name}")

    def _stands(self) -> bool:
        if self.stage is MindioStage.STOPPING:
            return all(self.seats[rank].reported is not None for rank in self.steady())
        if self.stage is MindioStage.REBUILDING:
            return all(seat.prepared for seat in self.seats if seat.reborn)
        return True

    def _give(self, stage: MindioStage, orders: dict[int, AnyOrder]) -> list[Effect]:
        """The next stage, and its orders."""
        self.stage, self.pending = stage, frozenset(orders)
        told: list[Effect] = [To(rank, order) for rank, order in sorted(orders.items())]
        return [*told, Timer(self.round, stage), *self._answered_all()]

    # -- from stage to stage

    def _locked(self) -> list[Effect]:
        steady = self.steady()
        if self.stage is MindioStage.HALTING and not self.hopeless:
            self.stage, self.target = MindioStage.PAUSED, max(self.seats[rank].step for rank in steady)
            return self._paused()
        self.target = self._held_by_all_sets()
        return self._decide()

    def _paused(self) -> list[Effect]:
        return [Notice("paused", -1, "all stand", {"step": self.target})]

    def _decide(self) -> list[Effect]:
        """What is done about the fault, now that all stand."""
        if self.hopeless or self._no_way():
            return self._leave()
        return self._stop("recover" if self.lost else "retry")

    def _stop(self, repair: str) -> list[Effect]:
        return self._give(
            MindioStage.STOPPING, {rank: StopOrder(round=self.round, repair=repair) for rank in self.steady()}
        )

    def _no_way(self) -> str:
        """Why training can't go on in place."""
        left = [rank for rank, seat in enumerate(self.seats) if seat.left]
        if self.target == 0:
            self.hopeless = (
                "there is no update behind which somebody holds every part of the state, as far as ranks have told "
                "(tft_set_optimizer_replica)"
            )
        elif left:
            self.hopeless = f"ranks {left} have come to their end, and would not train on"
        elif self.lost and not self.policy.arf:
            self.hopeless = f"ranks {sorted(self.lost)} are lost, and replacing lost ranks is switched off (no ARF)"
        elif any(seat.damaged for seat in self.seats) and not self.policy.uce:
            self.hopeless = "memory has lost data, and is not repaired (no UCE)"
        elif not (self.lost or self.policy.hcce or self.policy.uce):
            self.hopeless = "groups are not repaired (no HCCE)"
        return self.hopeless

    def _stopped(self) -> list[Effect]:
        orders = {rank: CleanOrder(round=self.round, uce=self.seats[rank].damaged) for rank in self.steady()}
        return self._give(MindioStage.CLEANING, dict(orders))

    def _cleaned(self) -> list[Effect]:
        if self._sources() is None:
            self.hopeless = "nobody holds some part of the state any more"
            return self._leave()
        if not self.lost:
            return self._repair()
        self.stage, self.pending = MindioStage.JOINING, frozenset()
        return [Timer(self.round, self.stage), *self._joined()]

    def _came(self, rank: int) -> list[Effect]:
        seat = self.seats[rank]
        seat.reported = ReportState.RS_INIT_FINISH
        return self._joined() if self.stage is MindioStage.JOINING else []

    def _joined(self) -> list[Effect]:
        reborn = [rank for rank in sorted(self.lost) if self.seats[rank].reported in _CAME]
        if len(reborn) < len(self.lost):
            return []
        begun: list[Effect] = []
        with_all = []
        for rank in reborn:
            seat = self.seats[rank]
            seat.builds = True
            if seat.reported is ReportState.RS_PREREPAIR_FINISH:
                with_all.append(rank)
            else:
                seat.reported = None
                begun.append(To(rank, GoOrder(round=self.round, step=self.target)))
        order = RebuildOrder(round=self.round, lost=tuple(sorted(self.lost)))
        return [*begun, *self._give(MindioStage.REBUILDING, dict.fromkeys([*self.steady(), *with_all], order))]

    def _repair(self) -> list[Effect]:
        sources = self._sources()
        assert sources is not None, "was looked at when all were clean"
        for _, target in sources:
            self.seats[target].whole = False  # until it has all of what comes
        ranks = tuple(sorted({*sources.values(), *(target for _, target in sources)}))
        orders: dict[int, AnyOrder] = {
            rank: RepairOrder(round=self.round, step=self.target, parts=tuple(own), ranks=ranks)
            for rank, own in self._parts(sources).items()
        }
        return [
            Notice("plan", -1, "state is on its way", self._plan(sources)),
            *self._give(MindioStage.REPAIRING, orders),
        ]

    def _plan(self, sources: Mapping[tuple[int, int], int]) -> dict[str, object]:
        """For people: what all go on from, who gives state to whom, who runs the step behind it once more."""
        copies = {str(target): source for (_, target), source in sorted(sources.items())}
        redone = [rank for rank, seat in enumerate(self.seats) if not seat.reborn]
        return {"commits": self.target, "copies": copies, "rolled_forward": [], "redone": redone}

    def _parts(self, sources: dict[tuple[int, int], int]) -> dict[int, list[Part]]:
        """Who sends to whom, and how each gets it."""
        # A device that has lost memory is made ready before its state is given away.
        parts = {rank: [Part(0, RepairType.RT_UCE_LOWLEVEL.value, (), ())] for rank in sorted(self.low)}
        for kind in sorted({kind for kind, _ in sources}):
            pairs = [(source, target) for (each, target), source in sorted(sources.items()) if each == kind]
            for donor in sorted({source for source, _ in pairs}):
                targets = tuple(target for source, target in pairs if source == donor)
                send = RepairType.RT_SEND.value
                parts.setdefault(donor, []).append(Part(kind, send, (donor,) * len(targets), targets))
            for source, target in pairs:
                seat = self.seats[target]
                how = (
                    RepairType.RT_RECV_REPAIR
                    if seat.reborn or not self._had_uce(target)
                    else RepairType.RT_UCE_HIGHLEVEL
                )
                parts.setdefault(target, []).append(Part(kind, how.value, (source,), (target,)))
        return parts

    def _had_uce(self, rank: int) -> bool:
        return self.seats[rank].reported in (ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED)

    def _repaired(self) -> list[Effect]:
        for seat in self.seats:
            seat.whole, seat.step = True, self.target
        return self._give(
            MindioStage.ROLLING_BACK,
            {rank: RollbackOrder(round=self.round, step=self.target) for rank in range(len(self.seats))},
        )

    def _goes_on(self) -> list[Effect]:
        self.stage, self.pending, self.lost = MindioStage.TRAINING, frozenset(), frozenset()
        self.low, self.faulty = frozenset(), MappingProxyType({})
        for seat in self.seats:
            seat.reported, seat.reborn, seat.builds, seat.prepared, seat.locked = None, False, False, False, False
        ranks = range(len(self.seats))
        told: list[Effect] = [To(rank, GoOrder(round=self.round, step=self.target)) for rank in ranks]
        told.append(Notice("resumed", -1, f"all go on behind update {self.target}", {"commits": self.target}))
        return told + (self._halt() if self.pauses else [])

    # -- state

    def _holds(self, rank: int) -> bool:
        """The state that all go on from."""
        seat = self.seats[rank]
        return seat.present and seat.whole and seat.step == self.target

    def _held_by_all_sets(self) -> int:
        """The newest update behind which some rank holds each part; 0: there is none.

        Ranks that are further, or not so far, get what these hold. What a lost rank alone had applied is computed
        again.
        """
        company = self._company()
        if any(sum(map(len, sets)) < len(self.seats) for sets in company or [[]]):
            return 0  # what the others hold may be in nobody's hands, or be taken for what it is not
        steps = {seat.step for seat in self.seats if seat.whole and seat.present}
        for step in sorted(steps, reverse=True):
            able = {rank for rank, seat in enumerate(self.seats) if seat.whole and seat.present and seat.step == step}
            if all(able & set(members) for sets in company for members in sets):
                return step
        return 0

    def _company(self) -> list[list[tuple[int, ...]]]:
        """For each kind of optimizer the sets of ranks whose members hold the same."""
        return [[members for group in groups for members in replica_sets(group)] for groups in self.groups]

    def _sources(self) -> dict[tuple[int, int], int] | None:
        """(kind, rank without state) -> rank that gives it; None where nobody can."""
        found: dict[tuple[int, int], int] = {}
        load: dict[int, int] = {}
        for kind, sets in enumerate(self._company()):
            members = {rank for each in sets for rank in each}
            holders = set(filter(self._holds, members))
            sources = assign_sources(sets, members - holders, holders, load)
            if len(sources) < len(members - holders):
                return None
            found |= {(kind, rank): source for rank, source in sources.items()}
        return found

    def _complete_set(self) -> tuple[Savers, ...] | None:
        """Of each group of each kind one rank of each set, all whole and there; None: some part is nowhere."""
        chosen = []
        for kind, groups in enumerate(self.groups):
            for group in groups:
                able = [next(filter(self._holds, members), None) for members in replica_sets(group)]
                if None in able:
                    return None
                chosen.append(Savers(kind, tuple(rank for rank in able if rank is not None)))
        return tuple(chosen)

    # -- the end

    def _leave(self) -> list[Effect]:
        self.round += 1
        return [Notice("leaving", -1, self.hopeless), *self._save()]

    def _save(self) -> list[Effect]:
        self.target = self._held_by_all_sets()
        chosen = self._complete_set()
        if chosen is None or self.target == 0:
            return self._end(f"{self.hopeless}; no ranks hold a complete state, nothing is saved")
        self.savers = chosen
        orders: dict[int, AnyOrder] = {}
        for rank in sorted({each for savers in chosen for each in savers.ranks}):
            own = tuple(savers for savers in chosen if rank in savers.ranks)
            orders[rank] = SaveOrder(round=self.round, step=self.target, savers=own)
        return self._give(MindioStage.SAVING, orders)

    def _rename(self, before: str = "") -> list[Effect]:
        """All parts are written: somebody is asked to name the checkpoint who was not asked yet. ``before``: what has
        become of who was.
        """
        if before:
            self.round += 1
            self.renamers = MappingProxyType({**self.renamers, **dict.fromkeys(self.pending, before)})
        writers = {rank for savers in self.savers for rank in savers.ranks}
        able = [rank for rank in self.steady() if rank not in self.renamers]
        able.sort(key=lambda rank: rank not in writers)
        if not able or len(self.renamers) == _RENAMERS_MAX:
            told = "; ".join(f"rank {rank} {what}" for rank, what in self.renamers.items())
            return self._end(f"{self.hopeless}; asked to name the checkpoint, {told}", unnamed=self.target)
        self.renamers = MappingProxyType({**self.renamers, able[0]: ""})
        return self._give(MindioStage.RENAMING, {able[0]: RenameOrder(round=self.round, step=self.target)})

    def _answered_rename(self, rank: int, code: int) -> list[Effect]:
        if code == 0:
            return self._end(self.hopeless, self.target)
        before = [f"rank {each} {what}" for each, what in self.renamers.items() if what]
        if code == NAMED and before:
            found = f"{before[-1]}, and rank {rank} finds the checkpoint under its name. If the script keeps a file"
            found += f" that tells which is the newest, look whether that says {self.target}"
            return self._end(f"{self.hopeless}; {found}", self.target)
        return [Notice("fault", rank, f"could not rename (code {code})"), *self._rename(f"failed (code {code})")]

    def _end(self, reason: str, saved: int = -1, unnamed: int = -1) -> list[Effect]:
        self.stage, self.pending = MindioStage.OVER, frozenset()
        # From the last to the first: the controller runs in the process of rank 0 as a rule, and ends with it.
        present = [rank for rank, seat in enumerate(self.seats) if seat.present]
        exits: list[Effect] = [To(rank, ExitOrder(round=self.round)) for rank in reversed(present)]
        return [*exits, TrainingEnded(saved, reason, self.failed, unnamed)]

    def copy(self) -> Self:
        """An independent one in the same state."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.seats = [seat.copy() for seat in self.seats]
        new.groups = [list(groups) for groups in self.groups]
        return new


def outcome(saved: int, unnamed: int) -> str:
    """What a person is told of the checkpoint with which a job has ended; empty: there is none."""
    if saved >= 0:
        return f"its state from after {saved} updates is saved"
    if unnamed < 0:
        return ""
    return (
        f"its state from after {unnamed} updates is PERHAPS saved: every part of it is written, but nobody has said "
        f"that the checkpoint got its name. Look for step {unnamed} where your checkpoints are (MindSpore's: "
        f"ttp_saved_checkpoints-step_{unnamed}): if it is there without _tmp, it is whole. If it is there with _tmp, "
        "it is whole as well, and of this job even if one without stands beside it: take that ending off its name "
        "before you start again"
    )


@functools.cache
def replica_sets(group: ReplicaGroup) -> tuple[tuple[int, ...], ...]:
    """The sets of ranks whose members hold the same part."""
    parts = len(group.ranks) // group.copies
    return tuple(group.ranks[part::parts] for part in range(parts))


_KINDS = {
    ReportState.RS_UCE: FaultKind.UCE,
    ReportState.RS_UCE_CORRUPTED: FaultKind.UCE,
    ReportState.RS_HCCL_FAILED: FaultKind.NETWORK,
}

_CAME = (ReportState.RS_INIT_FINISH, ReportState.RS_PREREPAIR_FINISH)
"""What a rank that came back reports: before it makes its model, as MindSpore's, or at its first step, as
MindSpeed-LLM's.
"""

_ORDER: dict[MindioStage, type[Order]] = {
    MindioStage.LOCKING: LockOrder,
    MindioStage.HALTING: HaltOrder,
    MindioStage.STOPPING: StopOrder,
    MindioStage.CLEANING: CleanOrder,
    MindioStage.REBUILDING: RebuildOrder,
    MindioStage.REPAIRING: RepairOrder,
    MindioStage.ROLLING_BACK: RollbackOrder,
    MindioStage.SAVING: SaveOrder,
    MindioStage.RENAMING: RenameOrder,
}
