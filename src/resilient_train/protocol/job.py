"""What is known of a job that is watched over, and what is done to all of it at once.

The controller writes down here what happened; a strategy acts on it. Whatever a recovery must remember that is cut by
another one is in ``Job``, and nowhere else.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping

from resilient_train.protocol.commands import Command, EndJob, Kill, Note, RaiseStop, Send
from resilient_train.protocol.difference_report import Doubt
from resilient_train.protocol.holders import Holders
from resilient_train.protocol.messages import Computed, End, Finished, Joined, Paused, Plan, Resume, Started, Stop
from resilient_train.protocol.neighbours import Round
from resilient_train.protocol.policy import Policy, why_give_up
from resilient_train.protocol.progress import Progress
from resilient_train.protocol.replicas import ReplicaTable
from resilient_train.protocol.retry_budget import RetryBudget
from resilient_train.protocol.savers import Leaving
from resilient_train.protocol.standing import Standing

EXIT_UNRECOVERABLE = 75
"""The job could not go on after a fault: EX_TEMPFAIL, "try again later", which schedulers may requeue."""
NOBODY_LEFT = "no living rank holds a replica of its state, so it cannot be rebuilt"


class Stage(enum.StrEnum):
    """Where the job as a whole stands."""

    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    PAUSED = "PAUSED"
    FINISHED = "FINISHED"
    LEAVING = "LEAVING"
    ENDED = "ENDED"


class Job:
    """Methods return the commands to carry out, in order.

    What is saved, and what the script is, the agent knows: it puts the first five in.
    """

    can_go_back: Callable[[], bool] = staticmethod(lambda: False)
    """Whether all ranks could start again from a saved state, or the loss of theirs costs nothing that was ever to be
    kept. Asked only where nothing else is left.
    """
    newest_saved: Callable[[], int] = staticmethod(lambda: -1)
    """From before which update the newest state is that is saved, its replicas being equal; -1: there is none."""
    saved_before: Callable[[int], bool] = staticmethod(lambda _step: False)
    """Whether a state from before that step, or an older one, is known to be saved. Asked last, where all go back to
    it if it is.
    """
    agreed_step: Callable[[], int] = staticmethod(lambda: -1)
    """What was saved before that step counts, since all had come to the same from each other's inputs then; -1: nothing
    is known to be saved from before.
    """
    newest_without_nan: Callable[[], int] = staticmethod(lambda: -1)
    """The step of the newest saved state that is known to hold no NaN; -1: none is."""
    uses_us: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the script imports this library, as far as its text tells. Asked where no rank has said so yet."""

    def __init__(self, world_size: int, policy: Policy | None = None) -> None:
        assert world_size >= 1
        self.world_size = world_size
        self.policy = policy or Policy()
        self.stage = Stage.STARTING
        self.generation = 0
        self.attempt = 0
        """How often all ranks were started again."""
        self.replacements = 0
        """How often one rank's process took the place of another, the others going on."""
        self.aware = False
        """Some rank has said so: the script uses this library."""
        self.plain = False
        """Its Session is a plain loop."""
        self.incarnations = [0] * world_size
        self.replicas = ReplicaTable(world_size)
        self.holders = Holders(self.replicas.groups)
        self.retries = RetryBudget(self.policy)
        self.evidence: dict[int, Standing] = {}
        """The step records of the ranks that were lost since the job last ran."""
        self.leaving: Leaving | None = None
        """The job is to end."""
        self.started: dict[int, Started] = {}
        self.never_started: set[int] = set()
        """Those that have ended by ``sys.exit(0)`` before all were ready for the first step."""
        self.joined: dict[int, Joined] = {}
        self.plan: Plan | None = None
        self.done: set[int] = set()
        self.finished: set[int] = set()
        self.left: dict[int, Progress] = {}
        """Of those the ranks that did not come to their loop's last number, and where they were."""
        self.exited: set[int] = set()
        """Of those the ranks that leave by ``sys.exit(0)``."""
        self.over = False
        """Some rank's loop has ended, see ``messages.Resume``. That rank may be lost before it."""
        self.doubt: Doubt | None = None
        """Replicas have held different things: all are to train up to there once more, and to say what they hold."""
        self.differed_at = -1
        """Before which update replicas were found to differ last; -1: they never were."""
        self.gone_back_to: set[int] = set()
        """Steps since which the script has said that all is wrong: once each, all have gone back for that."""
        self.gone_back_until = -1
        """Before which step that showed last for which all went back, if that is known."""
        self.nan_told = -1
        """In which attempt people were told of NaN last."""
        self.late_told: set[tuple[int, int]] = set()
        """Attempt and step, where people were told of it and nobody went back."""
        self.pause_at: int | None = None
        """All are to stop before this step, or at the next head behind it; None: nobody wants it."""
        self.step = 0
        """The next one of all ranks, when they were at one head last."""
        self._begin_to_look()

    def _begin_to_look(self) -> None:
        """Nothing is known of anomalies yet, nor of windows that are computed twice."""
        self.anomalies: dict[tuple[str, int], tuple[float, ...]] = {}
        """What was anomalous ("norm", "loss") at which step, and its value each time that the step ran. Also of the
        runs before this one in the same run directory.
        """
        self._anomalous_steps: list[int] = []
        """Which these are, in their order."""
        self.computed: dict[tuple[int, int], Computed] = {}
        """By update and rank: who has come to the end of a window that is computed twice, in this generation."""
        self.verified = -1
        """The update before which that was asked for last; -1: it was not."""
        self.carries = ""
        """Why a body that runs again would not be the same: a message was on its way from another one."""
        self.deviated_at = -1
        """The update for which all ranks came to other bits when they computed it again, or nobody knows which."""
        self.deviated_everywhere = self.once_only_told = False
        """So it was on every rank; and that nobody came to the first bits again was told."""
        self.given_up_at: dict[int, list[int]] = {}
        """By that update, for the newest one only: the ranks that alone came to other bits, and were replaced."""
        self.deviations: dict[tuple[int, str], int] = {}
        """How often a rank came to other bits on a device; also in the runs before this one in the same directory."""
        self.condemned: dict[int, str] = {}
        """Ranks whose device has done so too often, and what is told of it."""
        self.verifying = False
        """The newest recovery was begun for that, and for nothing else."""
        self.distance = 0
        """In the run that it has begun, ranks compute from the inputs of the replica so many places behind them."""
        self.rounds: tuple[Round, ...] = ()
        """What has come of such runs of the window that is verified."""
        self.neighbours_agreed = -1
        """The newest update before which all had come to the same from each other's inputs."""
        self.unshared_told = False
        self.anomalies_told: dict[tuple[str, int], tuple[int, int]] = {}
        """The attempt and the generation of the last of those values."""

    # -- what is done to all

    def begin(
        self, lost: tuple[int, ...], reason: str, *, by: str, kind: str = "fault", culprit: int = -1
    ) -> list[Command]:
        """A new recovery, in the place of one that is under way. For the event: ``by``, the strategy, and ``culprit``,
        whose doing it is where nobody is lost.
        """
        self.generation += 1
        self.stage = Stage.RECOVERING
        self.plan = None
        self.end_verifying()
        for answers in (self.joined, self.done, self.finished, self.left, self.exited, self.computed):
            answers.clear()
        detail: dict[str, object] = {"lost": list(lost), "reason": reason, "strategy": by}
        return [
            RaiseStop(self.generation),
            Note(kind, rank=lost[0] if lost else culprit, detail=detail),
            *self.to_all(Stop(self.generation, lost, reason)),
        ]

    def kill(self, ranks: Collection[int], reason: str) -> list[Command]:
        """Gives up processes that may still run: their deaths come back as losses. Nobody else kills a rank.

        The caller has made sure that they are not the last that hold the state of a replica group.
        """
        assert self.stage is Stage.STARTING or not self.holders.last(ranks), ranks
        commands: list[Command] = []
        for rank in sorted(ranks):
            self.holders.killed(rank)
            commands += [Note("fenced", rank=rank, detail={"reason": reason}), Kill(rank, reason)]
        return commands

    def end(self, code: int, reason: str) -> list[Command]:
        """Now, with nothing saved. Nothing is left to do if it has ended."""
        if self.stage is Stage.ENDED:
            return []
        self.stage = Stage.ENDED
        return [
            Note("job_end", detail={"code": code, "reason": reason}),
            *self.to_all(End(code, reason)),
            EndJob(code, reason),
        ]

    def resume(self) -> list[Send]:
        """All train. Of the steps that were anomalous they need those that may still come, and the one before: its
        update may be looked at once more, from behind.
        """
        tolerated = frozenset(self._anomalous_steps[bisect_left(self._anomalous_steps, self.step - 1) :])
        resume, self.over = (
            Resume(self.generation, self.over, tolerated, self.verified, self.distance, self.verifying),
            False,
        )
        return self.to_all(resume)

    def to_all(self, message: Stop | Plan | Resume | Paused | Finished | End) -> list[Send]:
        """A frame for each rank."""
        return [Send(rank, message) for rank in range(self.world_size)]

    # -- what is known

    def current(self, rank: int, incarnation: int) -> bool:
        """Messages of a dead incarnation are dropped: they may arrive after the death that they were sent before."""
        return self.incarnations[rank] == incarnation

    def spent(self, rank: int, *, goes_back: bool = False) -> str:
        """Why the rank's process is not replaced once more; empty if it may be. ``goes_back``: see ``why_give_up``."""
        if rank in self.condemned:
            return self.condemned[rank]
        used, stuck = self.replacements + self.attempt, self.retries.deaths(rank)
        return why_give_up(self.policy, used=used, lost=1, stuck=stuck, goes_back=goes_back)

    def count_deviation(self, rank: int, device: str) -> None:
        """The rank has come to other bits than before from the same inputs, on that device."""
        count = self.deviations.get((rank, device), 0) + 1
        self.deviations[rank, device] = count
        if 0 < self.policy.max_deviations <= count:
            self.condemned[rank] = (
                f"{device} has computed other bits for it {count} times (RESILIENT_DEVIATIONS="
                f"{self.policy.max_deviations}): take that device out of use"
            )

    def end_verifying(self) -> None:
        """Something else has begun than what a window that is computed twice wants."""
        self.verifying, self.distance, self.rounds = False, 0, ()

    def know_anomalies(self, known: Mapping[tuple[str, int], tuple[float, ...]]) -> None:
        """These steps were anomalous, and are not run again for it once more."""
        self.anomalies.update(known)
        for _, step in known:
            place = bisect_left(self._anomalous_steps, step)
            if self._anomalous_steps[place : place + 1] != [step]:
                self._anomalous_steps.insert(place, step)

    def left_out(self) -> set[int]:
        """The ranks without which the job ends."""
        return self.leaving.gone if self.leaving else set()

    def waits_for(self) -> list[int]:
        """The ranks that the present stage waits for."""
        everybody = set(range(self.world_size)) - self.left_out()
        if self.stage is Stage.STARTING:
            return sorted(everybody - self.started.keys())
        if self.stage in (Stage.RECOVERING, Stage.LEAVING):
            return sorted(everybody - (self.done if self.plan is not None else self.joined.keys()))
        return sorted(everybody - self.finished) if self.stage is Stage.RUNNING and self.finished else []

    def on_its_way(self, rank: int) -> str:
        """What a process does that has not come to its loop; empty if it has."""
        if self.stage is Stage.STARTING:
            return "" if rank in self.started else "STARTING"
        return "JOINING" if rank in self.holders.absent else ""

    def uses_a_session(self) -> bool:
        """Whether a Session protects the training, or is to be expected."""
        return not self.plain and (self.aware or self.uses_us())

    def awaited(self) -> list[int]:
        """Survivors that a recovery waits for: they have heard of it, or should have, and have not joined."""
        if self.stage not in (Stage.RECOVERING, Stage.LEAVING) or self.plan is not None:
            return []
        return [rank for rank in self.waits_for() if rank not in self.holders.absent]

    def copy(self) -> Job:
        """An independent one in the same state."""
        new = object.__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = value.copy() if type(value) in _MUTABLE else value
        return new


_MUTABLE = frozenset((list, dict, set, RetryBudget, Holders, Leaving, Doubt))
