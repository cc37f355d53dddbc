"""A small job with MindIO's functions, for the exploration of ``integrations/mindio/controller.py``.

A rank is what ``processor.py`` makes of it: a training thread that updates behind a collective, and orders that it
carries out. A state is the number of updates it has behind it, TORN, or None in a new process. Every message is a
transition of its own, so that a fault can come before and behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from resilient_train.integrations.mindio.controller import (
    Effect,
    MindioController,
    MindioStage,
    MindXCall,
    Recoveries,
    To,
    TrainingEnded,
)
from resilient_train.integrations.mindio.frames import (
    NAMED,
    NOT_WHOLE,
    PASSED,
    CleanOrder,
    Did,
    ExitOrder,
    GoOrder,
    HaltOrder,
    LockOrder,
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
    StopOrder,
)
from resilient_train.integrations.mindio.mindx_controller import MindXController

TORN = -1
SENDS = RepairType.RT_SEND.value


class Faults(NamedTuple):
    kills: int = 0
    uces: int = 0
    hcces: int = 0
    errors: int = 0
    lates: int = 0
    """A stage takes too long. Whoever is waited for may only be slow."""
    leaves: int = 0
    """Somebody wants the job to end."""
    pauses: int = 0
    """Somebody wants all to stand still."""
    stalls: int = 0
    """No rank seems to go on."""


class ViolationError(AssertionError):
    pass


def require(condition: bool, text: str) -> None:
    if not condition:
        raise ViolationError(text)


class SimRank:
    def __init__(self) -> None:
        self.alive, self.connected = True, True
        self.state: int | None = 0
        self.step = 0
        self.main = "trains"
        """trains, enters (a collective), updates, out (it has reported), boots, waits (to be let go), builds (a model),
        done, dead
        """
        self.limit: int | None = None
        self.stopped = False
        self.locking: LockOrder | HaltOrder | None = None
        self.saving: tuple[SaveOrder, int | None] | None = None
        """The order, and the state when it began to write."""
        self.renaming: tuple[RenameOrder, int | None] | None = None
        """The order, and what is answered to it when it is carried out."""
        self.hangs: RepairOrder | None = None
        """It waits for state from a rank that has not sent it."""
        self.down: tuple[Any, ...] = ()
        self.up: tuple[Any, ...] = ()
        self.round = 0
        self.rebuilt = -1

    def copy(self) -> SimRank:
        new = object.__new__(SimRank)
        new.__dict__.update(self.__dict__)
        return new

    def key(self) -> Any:
        return tuple(self.__dict__.values())


class World:
    """``heedless``: a rank that is refused an update makes it all the same, and tells, as MindSpore's C++ code does.
    ``by_itself``: one that came back goes to its first step at once, and makes its groups there, as MindSpeed-LLM's.

    ``mindx``: the controller asks, and is answered whatever may be answered.
    """

    def __init__(
        self,
        ranks: int,
        updates: int,
        faults: Faults,
        policy: Recoveries | None = None,
        *,
        heedless: bool = False,
        mindx: bool = False,
        by_itself: bool = False,
    ) -> None:
        self.updates, self.budget, self.heedless, self.by_itself = updates, faults, heedless, by_itself
        self.controller = MindXController(ranks, policy) if mindx else MindioController(ranks, policy)
        self.asked = ""
        """What MindX was called for last."""
        self.chosen = ""
        """Of what it waits for the result."""
        for rank in range(ranks):
            self.controller.hello(rank)
            self.controller.replicas(rank, (ReplicaGroup(tuple(range(ranks)), ranks),))
        self.ranks = [SimRank() for _ in range(ranks)]
        self.sent: frozenset[tuple[int, int, int, Any]] = frozenset()
        """(round, source, target, state)"""
        self.ended: TrainingEnded | None = None
        self.saved: frozenset[tuple[int, int, int | None]] = frozenset()
        """(round, rank, the state in its file)"""
        self.named = False
        self.was_late = False
        self.was_left = False
        """Somebody wants it to end: nobody lets it go on any more."""

    # -- transitions

    @property
    def final(self) -> bool:
        return self.ended is not None or all(rank.main == "done" for rank in self.ranks)

    def moves(self) -> list[tuple[str, int]]:
        if self.final:
            return []
        found = [(name, index) for index, rank in enumerate(self.ranks) for name in self._moves_of(index, rank)]
        alive = [index for index, rank in enumerate(self.ranks) if rank.alive]
        alive = [index for index in alive if self.ranks[index].main != "done"]
        found += [("kill", index) for index in alive if self.budget.kills]
        found += [(name, 0) for name in self._answers()]
        trains = [index for index in alive if self.ranks[index].main in ("trains", "enters")]
        found += [("uce", index) for index in trains if self.budget.uces]
        found += [("hcce", index) for index in trains if self.budget.hcces and self.ranks[index].main == "enters"]
        found += [("error", index) for index in trains if self.budget.errors]
        if self.budget.pauses and self.controller.stage is not MindioStage.OVER:
            found.append(("pauses", 0))
        stands = self.controller.stage is MindioStage.PAUSED
        if (stands or (self.controller.pauses and self.controller.stage is MindioStage.HALTING)) and not self.was_left:
            found.append(("unpauses", 0))
        if self.budget.stalls and self.controller.stage in (MindioStage.TRAINING, MindioStage.HALTING):
            found.append(("stalls", 0))
        if self.budget.leaves:
            found.append(("leaves", 0))
        if self.budget.lates and self.controller.stage not in (MindioStage.TRAINING, MindioStage.OVER):
            found.append(("expires", 0))
        return found

    def _answers(self) -> list[str]:
        """Of MindX."""
        if not isinstance(self.controller, MindXController):
            return []
        match self.controller.stage:
            case MindioStage.REPORTING:
                return ["MindX stops"]
            case MindioStage.NAMING:
                return ["MindX names"]
            case MindioStage.CHOOSING:
                return [f"MindX chooses {each}" for each in self.controller.offered]
            case MindioStage.JOINING:
                return ["MindX chooses dump"]
        return []

    def _moves_of(self, index: int, rank: SimRank) -> list[str]:
        if rank.up:
            said = ["says"]
        elif not rank.alive:
            said = ["is missed"] if rank.connected else ["comes back"]
        else:
            said = []
        if not rank.alive:
            return said
        if rank.main == "done":
            return said
        if rank.down:
            said.append("hears")
        if rank.locking is not None and rank.main != "updates":
            waits = rank.main not in ("trains", "enters")
            if isinstance(rank.locking, LockOrder) or waits or rank.step >= rank.locking.limit:
                said.append("stands")
        if rank.saving is not None:
            said.append("has saved")
        if rank.renaming is not None:
            said.append("renames" if rank.renaming[1] is None else "has renamed")
        if rank.hangs is not None and self._given(index, rank.hangs) is not None:
            said.append("gets state")
        if rank.main in ("trains", "enters") and rank.stopped:
            return [*said, "raises"]
        if rank.main == "trains":
            paused = rank.limit is not None and rank.step >= rank.limit  # in tft_pause_train
            said += [] if paused else ["enters" if rank.step < self.updates else "is done"]
        if rank.main == "enters" and all(self._took_part(each, rank.step) for each in self.ranks):
            said.append("updates")
        if rank.main == "updates":
            said.append("has updated")
        if rank.main == "builds" and self._all_rebuilt(rank.round):
            said.append("comes to its first step")
        return said

    def _took_part(self, rank: SimRank, step: int) -> bool:
        """In the collective behind that many updates."""
        return rank.step > step or (rank.alive and rank.step == step and rank.main in ("enters", "updates"))

    def _all_rebuilt(self, number: int) -> bool:
        return all(each.rebuilt == number for each in self.ranks if each.main not in ("builds", "boots", "waits"))

    def _given(self, index: int, order: RepairOrder) -> Any:
        sources = {part.sources[0] for part in order.parts if part.how != SENDS and part.sources}
        found = [s for n, source, to, s in self.sent if (n, to) == (order.round, index) and source in sources]
        return found[0] if found else None

    def step(self, move: tuple[str, int]) -> None:
        name, index = move
        rank = self.ranks[index] = self.ranks[index].copy()
        self.controller = self.controller.copy()
        if name.startswith("MindX chooses "):
            self._mindx_chooses(name.removeprefix("MindX chooses "))
        else:
            getattr(self, "_" + name.replace(" ", "_").lower())(index, rank)
        self._check()

    def _check(self) -> None:
        for index, rank in enumerate(self.ranks):
            if rank.alive and rank.main in ("enters", "updates"):
                torn = rank.main == "updates" and rank.state == TORN
                require(torn or rank.state == rank.step, f"rank {index} trains at {rank.step} with {rank.state}")

    # -- the training thread

    def _enters(self, _: int, rank: SimRank) -> None:
        rank.main = "enters"

    def _updates(self, _: int, rank: SimRank) -> None:
        if rank.limit is not None and rank.step >= rank.limit and not self.heedless:
            self._out(rank, ReportState.RS_NORMAL)
            return
        rank.main, rank.state = "updates", TORN
        rank.up += (("status", rank.step, True),)

    def _has_updated(self, _: int, rank: SimRank) -> None:
        rank.step += 1
        rank.state = rank.step
        rank.up += (("status", rank.step, False),)
        rank.main = "trains"

    def _is_done(self, _: int, rank: SimRank) -> None:
        rank.main = "done"
        rank.up += (("bye",),)

    def _raises(self, _: int, rank: SimRank) -> None:
        self._out(rank, ReportState.RS_NORMAL)

    def _out(self, rank: SimRank, state: ReportState) -> None:
        rank.main = "out"
        rank.up += (("reported", state),)

    def _comes_to_its_first_step(self, _: int, rank: SimRank) -> None:
        rank.rebuilt = rank.round
        self._out(rank, ReportState.RS_PREREPAIR_FINISH)

    # -- faults

    def _spend(self, name: str) -> None:
        self.budget = self.budget._replace(**{name: getattr(self.budget, name) - 1})

    def _kill(self, _: int, rank: SimRank) -> None:
        self._spend("kills")
        self._dies(rank)

    def _dies(self, rank: SimRank) -> None:
        rank.alive, rank.state, rank.main, rank.down = False, None, "dead", ()
        rank.locking = rank.hangs = rank.saving = rank.renaming = None

    def _uce(self, _: int, rank: SimRank) -> None:
        self._spend("uces")
        rank.state = None
        self._out(rank, ReportState.RS_UCE)

    def _hcce(self, _: int, rank: SimRank) -> None:
        self._spend("hcces")
        self._out(rank, ReportState.RS_HCCL_FAILED)

    def _expires(self, _: int, __: SimRank) -> None:
        self._spend("lates")
        self.was_late = True
        self._carry_out(self.controller.expired(self.controller.round, self.controller.stage))

    def _stalls(self, _: int, __: SimRank) -> None:
        self._spend("stalls")
        self._carry_out(self.controller.stalled("no end"))

    def _leaves(self, _: int, __: SimRank) -> None:
        self._spend("leaves")
        self.was_left = True
        self._carry_out(self.controller.leave("somebody wants it to end"))

    def _pauses(self, _: int, __: SimRank) -> None:
        self._spend("pauses")
        self._carry_out(self.controller.pause())

    def _unpauses(self, _: int, __: SimRank) -> None:
        self._carry_out(self.controller.unpause())

    def _error(self, _: int, rank: SimRank) -> None:
        self._spend("errors")
        self._out(rank, ReportState.RS_UNKNOWN)

    def _mindx_stops(self, _: int, __: SimRank) -> None:
        require(self.asked == "report_fault_ranks", f"it was asked for {self.asked}")
        self._carry_out(self.controller.stop_train({}))

    def _mindx_names(self, _: int, __: SimRank) -> None:
        require(self.asked == "report_stop_complete", f"it was asked for {self.asked}")
        self._carry_out(self.controller.on_global_rank({}))

    def _mindx_chooses(self, strategy: str) -> None:
        if self.controller.stage is MindioStage.CHOOSING:
            require(self.asked in ("report_strategies", "report_result"), f"it was asked for {self.asked}")
        self.chosen = strategy
        self._carry_out(self.controller.change_strategy(strategy))

    def _report(self, report: MindXCall) -> None:
        self.asked = report.action
        if report.action != "report_result":
            return
        code, _, faults, strategy = report.arguments
        if strategy == "dump":
            require(code != 0 or self.named, "a checkpoint is told of that has no name")
        else:
            require(strategy == self.chosen, f"{self.chosen} was chosen, and is told of as {strategy}")
            require(bool(faults), "it is told of no fault")
        self.chosen = ""

    # -- messages

    def _says(self, index: int, rank: SimRank) -> None:
        frame, rank.up = rank.up[0], rank.up[1:]
        match frame:
            case ("status", step, updating):
                self._carry_out(self.controller.status(index, step, updating=updating))
            case ("reported", state):
                self._carry_out(self.controller.reported(index, state))
            case ("bye",):
                self._carry_out(self.controller.bye(index))
            case Did():
                self._carry_out(self.controller.did(index, frame))

    def _is_missed(self, index: int, rank: SimRank) -> None:
        rank.connected = False
        self._carry_out(self.controller.gone(index))

    def _comes_back(self, index: int, _: SimRank) -> None:
        new = self.ranks[index] = SimRank()
        new.main, new.state = "boots", None
        self._carry_out(self.controller.hello(index))

    def _hears(self, index: int, rank: SimRank) -> None:
        order, rank.down = rank.down[0], rank.down[1:]
        if isinstance(order, ProcessorWelcome):
            require(order.reborn, "the job began long ago")
            if self.by_itself:
                self._out(rank, ReportState.RS_PREREPAIR_FINISH)
                return
            rank.main = "waits"
            rank.up += (("reported", ReportState.RS_INIT_FINISH),)
            return
        if order.round < rank.round:
            return
        rank.round = order.round
        match order:
            case HaltOrder(limit=limit) if rank.step > limit or (
                rank.step == limit and rank.main in ("enters", "updates")
            ):
                self._did(rank, order, PASSED)
            case LockOrder(limit=limit) | HaltOrder(limit=limit):
                rank.limit, rank.locking = limit, order
            case ReleaseOrder():
                rank.limit = rank.locking = None
            case StopOrder():
                rank.stopped, rank.hangs = True, None
                self._did(rank, order)
            case CleanOrder(uce=uce):
                require(rank.main == "out", f"rank {index} is cleaned while its training thread {rank.main}")
                require(uce == (rank.state is None) or not uce, f"rank {index} lost no memory")
                self._did(rank, order)
            case RebuildOrder():
                rank.rebuilt = order.round
                self._did(rank, order)
            case RepairOrder() | RollbackOrder() | SaveOrder() if self._lost_it(rank, order):
                self._did(rank, order, NOT_WHOLE)
            case RepairOrder():
                self._repairs(index, rank, order)
            case RollbackOrder(step=step):
                require(rank.state == step, f"rank {index} is rolled back to {step} with {rank.state}")
                self._did(rank, order)
            case GoOrder(step=step):
                self._goes(index, rank, step)
            case SaveOrder(step=step):
                require(rank.state == step, f"rank {index} saves {rank.state} as {step}")
                rank.saving = order, rank.state
            case RenameOrder(step=step):
                newest = max(number for number, _, _ in self.saved)
                files = {state for number, _, state in self.saved if number == newest}
                require(files == {step}, f"what is named {step} holds {files}")
                rank.renaming = order, None
            case ExitOrder():
                self._dies(rank)

    def _did(self, rank: SimRank, order: Any, code: int = 0) -> None:
        rank.up += (Did(order.round, order.name(), code, rank.step),)

    def _lost_it(self, rank: SimRank, order: RepairOrder | RollbackOrder | SaveOrder) -> bool:
        """It would have to hold the state behind that update, and does not any more (``Processor._holds``)."""
        if isinstance(order, RepairOrder) and not any(part.how == SENDS for part in order.parts):
            return False
        return rank.state != order.step and (self.heedless or rank.state is None)

    def _has_saved(self, index: int, rank: SimRank) -> None:
        """What is written while the state changes is torn."""
        assert rank.saving is not None
        order, before = rank.saving
        self.saved |= {(order.round, index, before if before == rank.state else TORN)}
        self._did(rank, order)
        rank.saving = None

    def _renames(self, _: int, rank: SimRank) -> None:
        """Between this and the answer a rank may die, and lose its memory."""
        assert rank.renaming is not None
        rank.renaming = rank.renaming[0], NAMED if self.named else 0
        self.named = True

    def _has_renamed(self, _: int, rank: SimRank) -> None:
        assert rank.renaming is not None
        order, code = rank.renaming
        assert code is not None
        self._did(rank, order, code)
        rank.renaming = None

    def _stands(self, _: int, rank: SimRank) -> None:
        """As soon as nothing is written: it may have waited too long for more."""
        assert rank.locking is not None
        rank.limit = rank.step
        rank.hangs = None  # whatever still comes counts for nothing
        if rank.locking.round == rank.round:
            self._did(rank, rank.locking, int(rank.state is None))
        rank.locking = None

    def _repairs(self, index: int, rank: SimRank, order: RepairOrder) -> None:
        sends = [target for part in order.parts if part.how == SENDS for target in part.targets]
        gets = [part for part in order.parts if part.how != SENDS and part.sources]
        require(not (sends and gets), f"rank {index} sends, and is to get")
        for target in sends:
            require(rank.state == order.step, f"rank {index} sends {rank.state} as {order.step}")
            self.sent |= {(order.round, index, target, rank.state)}
        if gets:
            rank.hangs = order
        else:
            rank.step = order.step
            self._did(rank, order)

    def _gets_state(self, index: int, rank: SimRank) -> None:
        assert rank.hangs is not None
        require(rank.main == "out", f"rank {index} is written to while its training thread {rank.main}")
        rank.state = self._given(index, rank.hangs)
        rank.step = rank.hangs.step
        self._did(rank, rank.hangs)
        rank.hangs = None

    def _goes(self, index: int, rank: SimRank, step: int) -> None:
        if rank.main == "waits":
            rank.main = "builds"
            return
        require(rank.main == "out", f"rank {index} is let go, and {rank.main}")
        require(rank.state == step, f"rank {index} goes on behind {step} with {rank.state}")
        made = {each.rebuilt for each in self.ranks if each.state is not None}
        require(len(made) == 1, f"ranks go on with groups that were made in rounds {made}")
        rank.main, rank.step, rank.limit, rank.stopped = "trains", step, None, False

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, To):
                target = self.ranks[effect.rank] = self.ranks[effect.rank].copy()
                if target.alive:
                    target.down += (effect.frame,)
            elif isinstance(effect, TrainingEnded):
                self.ended = effect
                self._check_end(effect)
            elif isinstance(effect, MindXCall):
                self._report(effect)

    def _check_end(self, end: TrainingEnded) -> None:
        if end.saved >= 0:
            require(self.named, "a checkpoint is told of that has no name")
        elif end.unnamed >= 0:
            able = [index for index, rank in enumerate(self.ranks) if rank.alive and rank.main in ("trains", "out")]
            # Who is on its way to a first step has no handlers yet; MindX may have let others go.
            untried = {index for index in able if index in self.controller.steady()} - set(self.controller.renamers)
            require(not untried, f"ranks {untried} were not asked to name what is written: {end}")
        else:
            require(not self.named, f"nothing is said of a checkpoint that has its name: {end}")
            there = [r for r in self.ranks if r.alive and r.main != "done"]
            whole = [r for r in there if r.state is not None and r.state >= 1 and r.main != "updates"]
            # At its first step a heedless rank may hold a first update, of which it has not told yet.
            sure = not self.was_late and self.chosen != "exit" and not (self.heedless and self.controller.target == 0)
            require(not whole or not sure, f"nothing is saved, and {len(whole)} ranks hold it: {end}")

    # -- branching

    def copy(self) -> World:
        new = object.__new__(World)
        new.__dict__.update(self.__dict__)
        new.ranks = list(self.ranks)
        return new

    def key(self) -> int:
        job = self.controller
        seats = tuple(tuple(seat.__dict__.values()) for seat in job.seats)
        named = (job.stage, job.round, job.target, job.pending, job.lost, bool(job.hopeless), job.low)
        named += (job.pauses, job.ahead, self.was_left, frozenset(job.faulty), self.asked, self.chosen)
        named += tuple(job.renamers.items())
        if isinstance(job, MindXController):
            named += (frozenset(job.faulty.items()), job.stops, job.named, job.offered, job.chosen, job.leaves)
        return hash((seats, named, job.savers, self.budget, self.sent, self.ended is None, self.named, self.saved,
                     tuple(rank.key() for rank in self.ranks)))  # fmt: skip
