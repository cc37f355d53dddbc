"""A controller that asks MindX (taskd) what is done about a fault. No I/O, no clock.

Between LOCKING, when all stand, and STOPPING it asks, and waits for an answer to each but the last question:

    report_fault_ranks      who is faulty           answered by stop_train
    report_stop_complete    all stand               answered by on_global_rank, with all that MindX knows to be faulty
    report_strategies       what could be done      answered by change_strategy
    report_result           what has come of it

What MindX has answered stands for the whole recovery. A fault that comes before it has chosen is reported, and the open
question asked anew. One that comes while its choice is carried out is a result of that choice, other than 0: MindX
chooses again. Where it gives no answer, the state is saved and the job ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from resilient_train.integrations.mindio.controller import (
    Effect,
    MindioController,
    MindioStage,
    MindXCall,
    Notice,
    RankFault,
    Recoveries,
    Timer,
    To,
    outcome,
)
from resilient_train.integrations.mindio.frames import ExitOrder, FaultKind

DONE, FAILED, NO_RANKS, MAY_RECOVER, MAY_DUMP, MAY_EXIT = 0, 400, 404, 405, 406, 499
"""Results, as MindIO numbers them. The last three say what may be chosen now."""
_QUESTIONS = {
    MindioStage.REPORTING: ("report_fault_ranks", "tft_notify_controller_stop_train"),
    MindioStage.NAMING: ("report_stop_complete", "tft_notify_controller_on_global_rank"),
    MindioStage.CHOOSING: ("report_strategies or report_result", "tft_notify_controller_change_strategy"),
}
_BUSY = (MindioStage.STARTING, MindioStage.SAVING, MindioStage.RENAMING, MindioStage.OVER)


class OrderError(Exception):
    """What MindX wants can't be done now. Nothing has changed."""


class MindXController(MindioController):
    """``wait_s``: how long MindX may take to answer (MINDIO_WAIT_MINDX_TIME)."""

    def __init__(self, world_size: int, policy: Recoveries | None = None, wait_s: float = 30.0) -> None:
        super().__init__(world_size, policy)
        self.wait_s = wait_s
        self.stops = False
        """MindX has said that training stops, in this recovery."""
        self.named = False
        """It has named the faulty ranks."""
        self.choosing_s = wait_s
        """How long it may take to choose."""
        self.offered: tuple[str, ...] = ()
        self.chosen = ""
        """What is carried out now."""
        self.leaves = False
        """Somebody wants the job to end: there is nothing to ask."""
        self.pausing_s = 0.0
        """How long a pause that MindX wants may last; 0: it wants none."""

    # -- orders of MindX

    def stop_train(self, faults: Mapping[int, int]) -> list[Effect]:
        """Training stops: an answer, or because MindX knows of a fault that nobody else has seen."""
        self._refuse_if(self.stage in _BUSY, "stop_train")
        told = self._add(faults)
        self.stops = True
        if self.stage is MindioStage.REPORTING:
            return [*told, *self._ask()]
        if self.stage in (MindioStage.TRAINING, MindioStage.HALTING, MindioStage.PAUSED):
            self.pauses, self.pausing_s = False, 0.0
            return [*told, *self._begin_round()]
        return told

    def on_global_rank(self, faults: Mapping[int, int], choosing_s: float = 1.0) -> list[Effect]:
        """These are all faulty ranks. MindX may take ``choosing_s`` to choose, or ``wait_s`` if that is longer."""
        self._refuse_if(not self.stops or self.stage not in (MindioStage.LOCKING, MindioStage.NAMING), "on_global_rank")
        told = self._add(faults)
        self.named, self.choosing_s = True, max(choosing_s, self.wait_s)
        return [*told, *self._ask()] if self.stage is MindioStage.NAMING else told

    def change_strategy(self, strategy: str) -> list[Effect]:
        """This is done. While lost ranks are waited for, MindX may give them up."""
        if strategy == "continue":
            return self._continue()
        able = {MindioStage.CHOOSING: self.offered, MindioStage.JOINING: ("dump", "exit")}.get(self.stage, ())
        if strategy not in able:
            raise OrderError(f"change_strategy({strategy!r}) in {self.stage.name}, where {list(able)} can be chosen")
        self.chosen = strategy
        if strategy == "exit":
            return self._end("MindX has chosen exit")
        if strategy == "dump":
            self.hopeless = self.hopeless or "MindX has chosen dump"
            return self._leave()
        told = self._let_go(self._replaced()) if strategy == "recover" else []
        self.target = self._held_by_all_sets()
        return [*told, *self._stop(strategy)]

    def pause_train(self, limit_s: float) -> list[Effect]:
        """All are to stand, until ``change_strategy("continue")``, for ``limit_s`` at most."""
        self._refuse_if(self.stage is not MindioStage.TRAINING or self.pauses or not self.policy.pause, "a pause")
        self._refuse_if(any(seat.left for seat in self.seats), "a pause, with ranks at their end,")
        self.pausing_s = max(limit_s, 1.0)
        return self.pause()

    def _continue(self) -> list[Effect]:
        self._refuse_if(not self.pausing_s or self.stage not in (MindioStage.HALTING, MindioStage.PAUSED), "continue")
        self.pausing_s = 0.0
        return [*self.unpause(), self._result(DONE, "training goes on", "continue")]

    def _refuse_if(self, condition: bool, what: str) -> None:
        if condition:
            raise OrderError(f"{what} can't be done in {self.stage.name}")

    def _add(self, faults: Mapping[int, int]) -> list[Effect]:
        """What MindX knows of. Memory that it says to be lost is looked at when devices are cleaned."""
        known = [kind.value for kind in FaultKind]
        for rank, kind in faults.items():
            if rank not in range(len(self.seats)) or kind not in known:
                raise OrderError(
                    f"fault {kind!r} of rank {rank!r}: there are ranks 0 to {len(self.seats) - 1}, {known}"
                )
        told: list[Effect] = []
        for rank, kind in faults.items():
            if rank in self.faulty and self.faulty[rank].kind == kind:
                continue
            told.append(Notice("fault", rank, f"MindX says so ({FaultKind(kind).name})"))
            self.faulty = MappingProxyType({**self.faulty, rank: RankFault(FaultKind(kind))})
            if kind == FaultKind.UCE:
                self.seats[rank].damaged, self.seats[rank].whole = True, False
        return told

    # -- questions

    def _decide(self) -> list[Effect]:
        if (self.leaves and self.hopeless) or not (self.faulty or self.stops):
            return super()._decide()
        if self.chosen:
            return self._ask_again()
        codes = {rank: fault.code for rank, fault in self.faulty.items()}
        return [MindXCall("report_fault_ranks", (self._kinds(), codes)), *self._ask()]

    def _ask(self) -> list[Effect]:
        """What is not answered yet."""
        if not self.stops:
            return self._wait_in(MindioStage.REPORTING, self.wait_s)
        if not self.groups:
            self.hopeless = "a fault came before any rank had told of its replicas"
            return [MindXCall("report_stop_complete", (NO_RANKS, self.hopeless, self._kinds())), *self._leave()]
        if not self.named:
            stands = f"all ranks stand behind update {self.target}"
            told = MindXCall("report_stop_complete", (DONE, stands, self._kinds()))
            return [told, *self._wait_in(MindioStage.NAMING, self.wait_s)]
        self.target = self._held_by_all_sets()  # MindX may have named ranks that were counted on
        self.offered = self._ways()
        told = MindXCall("report_strategies", (self._kinds(), list(self.offered)))
        return [told, *self._wait_in(MindioStage.CHOOSING, self.choosing_s)]

    def _ask_again(self) -> list[Effect]:
        self.offered = self._ways()
        code = MAY_RECOVER if "recover" in self.offered else MAY_DUMP if "dump" in self.offered else MAY_EXIT
        told = self._result(code, self.hopeless or "a fault came before it was over", self.chosen)
        self.chosen = ""
        return [told, *self._wait_in(MindioStage.CHOOSING, self.choosing_s)]

    def _wait_in(self, stage: MindioStage, limit_s: float) -> list[Effect]:
        self.stage, self.pending = stage, frozenset()
        return [Timer(self.round, stage, limit_s)]

    def _ways(self) -> tuple[str, ...]:
        """What can be chosen. The best is the last: MindSpore's own stand-in for MindX takes that."""
        ways = ["exit"]
        if self.target > 0 and self._complete_set() is not None:
            ways.append("dump")
        if self.hopeless or self._no_way():
            return tuple(ways)
        if self.policy.arf and self.can_do_without(self._replaced()):
            ways.append("recover")
        if not self.lost and not self._dead():
            ways.append("retry")
        return tuple(ways)

    def _dead(self) -> list[int]:
        """Who lives, and is said to be of no use any more."""
        return [rank for rank, each in self.faulty.items() if each.kind is FaultKind.PROCESS and rank not in self.lost]

    def _replaced(self) -> list[int]:
        """Who gets a new process besides the lost, if that is chosen: the faulty, where nobody needs one."""
        return self._dead() if self.lost or self._dead() else list(self.faulty)

    def _let_go(self, ranks: list[int]) -> list[Effect]:
        """They end, and are lost."""
        told: list[Effect] = [To(rank, ExitOrder(round=self.round)) for rank in ranks if self.seats[rank].present]
        for rank in ranks:
            self._vacate(rank)
        self.lost |= set(ranks)
        return told

    def _kinds(self) -> dict[int, int]:
        return {rank: fault.kind.value for rank, fault in sorted(self.faulty.items())}

    def _result(self, code: int, text: str, strategy: str) -> MindXCall:
        return MindXCall("report_result", (code, text, self._kinds(), strategy))

    # -- no answer

    def forsaken(self, reason: str) -> list[Effect]:
        """A callback has failed: what was asked will not be answered."""
        if self.stage not in _QUESTIONS:
            return []
        self.hopeless = self.hopeless or reason
        return self._leave()

    def expired(self, number: int, stage: MindioStage) -> list[Effect]:
        """A stage has taken too long."""
        if (number, stage) != (self.round, self.stage):
            return []
        if stage in _QUESTIONS:
            asked, answer = _QUESTIONS[stage]
            return self.forsaken(f"MindX has not answered {asked} by {answer} in time")
        if stage is MindioStage.PAUSED and self.pausing_s:
            return self.leave(f"MindX has not let the job go on within {self.pausing_s:g} s")
        return super().expired(number, stage)

    def leave(self, reason: str) -> list[Effect]:
        """Somebody wants the job to end, behind a checkpoint."""
        self.leaves = True
        return super().leave(reason)

    # -- what has come of it

    def _paused(self) -> list[Effect]:
        if not self.pausing_s:
            return super()._paused()
        stands = MindXCall("report_stop_complete", (DONE, f"all ranks stand behind update {self.target}", {}))
        return [*super()._paused(), stands, Timer(self.round, MindioStage.PAUSED, self.pausing_s)]

    def _goes_on(self) -> list[Effect]:
        result = [self._result(DONE, f"all go on behind update {self.target}", self.chosen)] if self.chosen else []
        self.stops, self.named, self.chosen = False, False, ""
        self.offered, self.choosing_s = (), self.wait_s
        return [*super()._goes_on(), *result]

    def _end(self, reason: str, saved: int = -1, unnamed: int = -1) -> list[Effect]:
        told = f"{reason}; {outcome(-1, unnamed)}" if unnamed >= 0 else reason
        result = self._result(DONE if saved >= 0 else FAILED, told, "dump")
        return [*super()._end(reason, saved, unnamed), *([] if self.chosen == "exit" else [result])]
