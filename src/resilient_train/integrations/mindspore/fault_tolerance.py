"""A callback for ``Model.train``: what MindSpore's ``TrainFaultTolerance`` does on Ascend alone, on any device target.

MindSpore enters and leaves its callbacks as context managers around the loop, so ``__exit__`` sees each error that
comes out of a step, a dataset or another callback.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import mindspore
from mindspore import nn
from mindspore.train import Callback, Model

from resilient_train import config
from resilient_train.errors import ConfigError, StateError, StorageError, UsageError
from resilient_train.integrations.mindspore import agreed_step, resume, ttp_directory
from resilient_train.integrations.mindspore.abnormal_steps import AbnormalSteps
from resilient_train.integrations.mindspore.agreed_step import STOP, AgreedStep, Asked
from resilient_train.integrations.mindspore.end_of_life import EndOfLife
from resilient_train.integrations.mindspore.host_copies import HostCopies
from resilient_train.integrations.mindspore.network_state import (
    State,
    own_optimizer,
    put_back,
    state_of,
    wait_for_device,
    written_by_forward,
)
from resilient_train.integrations.mindspore.preemption import SIGNALS, Preemption
from resilient_train.integrations.mindspore.rank_folder import NOBODY, RankFolder
from resilient_train.integrations.mindspore.replica_groups import check_groups, found_groups, own_ranks
from resilient_train.integrations.mindspore.resume import TrainingPosition
from resilient_train.integrations.mindspore.ttp_directory import Groups

log = logging.getLogger("resilient_train.mindspore")

_EX_TEMPFAIL = 75
"""The job is to be started again; 128 + n where this process was asked by signal n itself, but for SIGUSR1."""
_NO_SEED = 5489
"""MindSpore's default, with which it shuffles otherwise each time."""
_STANDS_S = 0.02
"""Between two looks whether a pause is over."""
_NOT_RETURNED = object()
"""``net_outputs`` while a step is computed."""


class _GoBackError(Exception):
    """Leaves ``Model.train`` for another one that begins behind an earlier step."""


class FaultTolerance(Callback):  # type: ignore[misc] # MindSpore is not there when types are checked
    """Saves the state of a training that ends too early, and resumes it from there.

    ``folder`` is shared by all ranks. ``rank`` and ``world_size``: by default those of MindSpore's communication.
    ``replica_groups``: ranks with the same state, of which one saves; by default found from the parallel mode, and
    printed. ``snapshot_every``: a copy of the state is kept in host memory, and renewed every so many steps (0: none);
    it is saved where the network's own state can't be trusted or reached. ``step_grace_s``: how long a step may take
    to end after a signal, before that copy is saved; after ``exit_grace_s`` (a setting) the process ends.

    ``norm`` takes the global norm from what the network that trains returns, for TRE, see ``train``.

    SIGTERM or SIGUSR1: all ranks finish the same step, save it, and leave ``Model.train`` by ``SystemExit``. Raises
    ConfigError for what can't be saved, UsageError for a training that does not begin where its data does, and
    StorageError for a checkpoint that could not be written.
    """

    signals: ClassVar[tuple[signal.Signals, ...]] = SIGNALS

    def __init__(
        self,
        folder: str | Path,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        replica_groups: Groups | None = None,
        snapshot_every: int = 0,
        step_grace_s: float = 10.0,
        norm: Callable[[Any], Any] | None = None,
    ) -> None:
        self._settings, switches = config.read_settings(), config.read_switches()
        if not switches.ttp:
            raise ConfigError("FaultTolerance: TTP is off; write MS_ENABLE_TFT={TTP:1}, or leave the callback out")
        if not 0 < step_grace_s < self._settings.exit_grace_s:
            raise ConfigError(
                f"step_grace_s={step_grace_s} must be above 0 and below RESILIENT_EXIT_GRACE_S, which is "
                f"{self._settings.exit_grace_s}"
            )
        if snapshot_every < 0:
            raise ConfigError(f"snapshot_every must be 0 or more, not {snapshot_every}")
        self._folder, self._grace_s = Path(folder), step_grace_s
        self._ranks = own_ranks(rank, world_size)
        if replica_groups is not None:
            check_groups(replica_groups, self._ranks.world_size)
        self._given_groups = replica_groups
        self._abnormal: AbnormalSteps | None = None
        if switches.tre:
            if not snapshot_every:
                raise ConfigError("TRE goes back to a copy in host memory: give FaultTolerance(snapshot_every=...)")
            own = self._folder if self._ranks.rank == 0 else self._folder / f"rank_{self._ranks.rank}"
            limits = {"norm": self._settings.norm_threshold, "loss": self._settings.loss_threshold}
            self._abnormal = AbnormalSteps(own, limits, norm)
        self._start: TrainingPosition | None = None
        self._dataset: Any = None
        self._params: Any = None
        self._preemption: Preemption | None = None
        self._agreed: AgreedStep | None = None
        told_in = config.ranks_folder()
        self._told_in = RankFolder(Path(told_in), self._ranks.rank) if told_in else None
        self._can_stand = switches.tsp or switches.arf
        self._first, self._done, self._last_step = 0, 0, 0
        """The step behind which this life begins, the last that has ended, and the last of the training."""
        self._optimizer: nn.Optimizer | None = None
        self._updates = 0
        """What the optimizer had counted when that step ended."""
        self._in_step, self._stopping = False, False
        self._copies = HostCopies(snapshot_every)
        self._wrong = ""
        """Why the last step is to be run again."""
        self._going_back, self._can_go_back = False, False
        self._turn = threading.Lock()
        """Held by whoever saves: the training thread between steps, or that of ``Preemption``."""

    def resume(self, network: nn.Cell | Model, dataset: Any) -> TrainingPosition:
        """The newest whole checkpoint goes into ``network`` (the one that trains, or its Model) and ``dataset``.

        Returns where training goes on: ``Model.train`` is given its ``epoch`` as ``initial_epoch``. Step 0 where there
        never was a checkpoint. Raises CheckpointError where all are damaged, LayoutError for another model's state,
        UsageError for other data or another number of ranks.
        """
        network = network.train_network if isinstance(network, Model) else network
        found = resume.find(self._folder, self._ranks, self._tell)
        self._start = TrainingPosition(0, 0) if found is None else resume.fill(network, dataset, found)
        self._dataset = dataset
        self._tell(f"training begins behind step {self._start.step}" + ("" if found else ": there is no checkpoint"))
        return self._start

    def train(self, model: Model, epoch: int, dataset: Any, callbacks: Any = (), **options: Any) -> None:
        """``model.train`` with this callback; and again, from an earlier step, where TRE (``MS_ENABLE_TFT``) wants it.

        A loss or norm that is not finite, or from RESILIENT_LOSS_THRESHOLD or RESILIENT_NORM_THRESHOLD on, is noticed
        behind the update: all go back to the last copy from before that step. The same in a second run stands.
        """
        self._can_go_back = True
        given = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        while True:
            try:
                model.train(epoch, dataset, callbacks=[*given, self], **options)
            except _GoBackError:
                options["initial_epoch"] = self._done // dataset.get_dataset_size()
            else:
                return

    def __enter__(self) -> Self:
        """Before the data workers of MindSpore are started."""
        if self._going_back:
            return self
        if self._params is not None:
            raise UsageError("a FaultTolerance counts the steps of one Model.train: make another, with another folder")
        ttp_directory.clear(self._folder, *self._ranks)
        self._folder.mkdir(parents=True, exist_ok=True)
        limit_s = self._settings.exit_grace_s
        self._preemption = Preemption(self._late, self._grace_s, self._over, limit_s, self.signals)
        return self

    def on_train_begin(self, run_context: Any) -> None:
        """The steps are counted on from where the data begins: all callbacks see absolute ones."""
        if self._going_back:
            self._going_back = False
            self._params = run_context.original_args()
            self._params.cur_step_num = self._done
            return
        if self._abnormal is not None and not self._can_go_back:
            raise UsageError("TRE goes back by another Model.train: call FaultTolerance.train(model, ...) in its place")
        self._params = params = run_context.original_args()
        dataset, network = params.train_dataset, params.train_network
        step = dataset.get_init_step()
        if params.dataset_sink_mode:
            raise ConfigError("FaultTolerance needs each step's end: pass dataset_sink_mode=False")
        if self._start is not None and (dataset is not self._dataset or step != self._start.step):
            raise UsageError("resume() was given another dataset than Model.train, or it was changed in between")
        if dataset.is_shuffled() and mindspore.dataset.config.get_seed() == _NO_SEED:
            raise ConfigError(
                "the dataset is shuffled without a seed, so what is resumed would see other samples: "
                "call mindspore.set_seed(n), n not 5489, before the dataset is made"
            )
        ahead = [each for each, _ in ttp_directory.complete(self._folder) if each > step]
        if ahead:
            raise UsageError(
                f"{self._folder} has a checkpoint of step {ahead[0]}, and this training begins behind step {step}: "
                "call resume() first, or give another folder"
            )
        state_of(network)  # raises for what can't be saved
        groups, why = found_groups(network, self._ranks.world_size)
        groups, why = (groups, why) if self._given_groups is None else (self._given_groups, "as given")
        self._end = EndOfLife(self._folder, self._ranks, groups, self._tell, self._file_name)
        if self._ranks.world_size > 1:
            if self._ranks.rank == 0:
                self._tell(f"replica groups {[list(each) for each in groups]}, of each the first rank saves: {why}")
            self._agreed = AgreedStep(self._folder, *self._ranks)
        params.cur_step_num = self._done = self._first = step
        self._last_step = (step // params.batch_num + params.epoch_num) * params.batch_num
        self._optimizer = own_optimizer(network)
        self._updates = self._count_updates()
        if self._abnormal is not None:
            self._copies.keep(step, self._state(), self._notes())
        if self._told_in is not None:
            self._told_in.tell(0)  # none has ended in this life: until then nobody is taken for hung

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Looks whether the first epoch is the one that the data is in."""
        params = run_context.original_args()
        if params.cur_epoch_num != self._done // params.batch_num + 1:
            raise UsageError(
                f"the data begins in epoch {self._done // params.batch_num}, and training in {params.cur_epoch_num - 1}"
                " (counted from 0): pass Model.train(initial_epoch=...) what resume() returned as epoch"
            )

    def on_train_step_begin(self, run_context: Any) -> None:
        """From here on the state is no step's."""
        with self._turn:
            self._in_step = True
        run_context.original_args().net_outputs = _NOT_RETURNED

    def on_train_step_end(self, run_context: Any) -> None:
        """Saves, and stops, if that is asked for and all ranks do."""
        with self._turn:
            params = run_context.original_args()
            self._ended(params.cur_step_num)
            if self._abnormal is not None:
                self._wrong = self._abnormal.look(self._done, params.net_outputs)
            asked, stood = self._asked(self._wrong), False
            if asked is not None and asked.is_pause:
                asked, stood = self._stand(asked), True
            if asked is not None and asked.back_to != STOP:
                self._go_back(asked.back_to)
            if self._wrong:
                self._tell(f"{self._wrong}: all go back at the end of the next step")
            elif self._copies.is_due(self._done):
                self._copies.keep(self._done, self._state(), self._notes())
            if asked is not None:
                self._stopping = True
                # In a pause a rank may be gone, and it is the first of its group.
                limit_s = self._settings.exit_grace_s
                self._end.save_with_others(self._state(), self._notes(), limit_s, all_write=stood)
                run_context.request_stop()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Saves if an error leaves the loop. Raises SystemExit where the job was asked to end."""
        if isinstance(error, _GoBackError):
            return
        got = None
        if self._preemption is not None:
            self._preemption.close()
            got = self._preemption.got
        if error is not None and self._params is not None and not self._stopping:
            self._save_after(error)
        self._tell_agent(left=True)
        if self._params is not None:
            self._params.train_dataset.set_init_step(0)  # an iterator that is made later begins at the beginning
        if self._stopping and error is None:
            raise SystemExit(_EX_TEMPFAIL if got in (None, signal.SIGUSR1) else 128 + got)
        if got is not None and error is None:
            self._tell(f"signal {got} came in the last step: training is over, and its result is the script's to save")

    def _tell_agent(self, *, left: bool = False) -> None:
        if self._told_in is not None:
            self._told_in.tell(self._done, left=left)

    def _ended(self, step: int) -> None:
        self._done, self._in_step = step, False
        self._tell_agent()
        self._updates = self._count_updates()

    def _asked(self, wrong: str) -> Asked | None:
        """What all do now. At the end of the very last step nobody stops: training is over anyway."""
        stops = self._preemption is not None and self._preemption.got is not None
        is_last = self._done == self._last_step
        number = self._told_in.wanted() if self._told_in is not None and self._can_stand else NOBODY
        wish = STOP if stops else None if number == NOBODY else agreed_step.pause(number)
        if self._agreed is None:
            if wrong:
                self._tell(wrong)
                return Asked(self._done, self._target())
            return None if wish is None or is_last else Asked(self._done, wish)
        asked = self._agreed.look(self._done)
        if wrong and (is_last or asked == (self._done, STOP)):
            raise StateError(f"{wrong}: in the last step it is too late for all ranks to go back")
        if wrong:
            wish = self._target()
        if wish is not None and not is_last and (asked is None or asked.step > self._done):
            self._agreed.ask(Asked(self._done + 1, wish))
        return asked if asked is not None and asked.step == self._done else None

    def _stand(self, asked: Asked) -> Asked | None:
        """Until the pause is over, or this rank or another one is to end. Returns what all do then."""
        assert self._told_in is not None, "another rank was started by another command"
        number, stop = agreed_step.pause(asked.back_to), Asked(self._done, STOP)
        wait_for_device()
        self._told_in.stand(number, self._done)
        while not self._told_in.goes_on(number):
            if self._preemption is not None and self._preemption.got is not None:
                if self._agreed is not None:
                    self._agreed.ask(stop)
                return stop
            if self._agreed is not None and self._agreed.look(self._done) == stop:
                return stop
            time.sleep(_STANDS_S)
        if self._agreed is not None:
            self._agreed.next_turn()
        return None

    def _target(self) -> int:
        """With TRE on there is a copy from the beginning on."""
        copy = self._copies.newest()
        assert copy is not None
        return copy.step

    def _go_back(self, step: int) -> None:
        """The state of a copy, in place; the data is set back for the ``Model.train`` that follows."""
        copy = self._copies.back_to(step)
        if copy is None:
            raise StateError(f"another rank goes back to step {step}, and this one has no copy of it")
        self._tell(f"back from step {self._done} to step {step}")
        put_back(self._state(), copy.values)
        self._done, self._going_back, self._wrong = step, True, ""
        self._updates = self._count_updates()
        resume.set_back(self._params.train_dataset, step)
        if self._agreed is not None:
            self._agreed.next_turn()
        raise _GoBackError

    def _save_after(self, error: BaseException) -> None:
        """Which state is it that an error has left?"""
        told = f"{type(error).__name__} ends the training behind step"
        try:
            if self._in_step and self._params.net_outputs is not _NOT_RETURNED:
                self._ended(self._params.cur_step_num)
            doubt = self._wrong or (self._doubt() if self._in_step else "")
            if self._done == self._first:
                self._tell(f"{told} {self._done}: no step has ended, nothing is saved")
            elif doubt:
                self._tell(f"{told} {self._done}, and the state can't be trusted: {doubt}")
                self._save_copies()
            else:
                self._tell(f"{told} {self._done}")
                self._end.save(self._state(), self._notes())
        except (StorageError, OSError, RuntimeError) as failed:
            error.add_note(f"resilient_train: nothing was saved: {failed}")
            self._tell(f"nothing was saved: {failed}")

    def _doubt(self) -> str:
        """Why the state may not be that of the last step's end; empty if it is.

        MindSpore's optimizers count an update in ``global_step`` before they write a parameter.
        """
        if self._optimizer is None:
            return "no optimizer of mindspore.nn tells whether it has begun to write"
        if others := written_by_forward(self._params.train_network, self._optimizer):
            return f"the step may have written {others[0]}"
        try:
            wait_for_device()
            updates = self._count_updates()
        except RuntimeError as error:
            return f"the device does not say ({error})"
        return "" if updates == self._updates else "the optimizer has begun to write"

    def _count_updates(self) -> int:
        return 0 if self._optimizer is None else int(self._optimizer.global_step.asnumpy().item())

    def _save_copies(self) -> None:
        if self._copies.newest() is None:
            self._tell("nothing is saved: there is no copy in host memory either (snapshot_every)")
        for copy in self._copies:  # if others are a step behind this one, its older copy goes with theirs
            if copy.step > self._first and self._end.save(copy.as_state(), copy.notes):
                return

    def _state(self) -> State:
        return state_of(self._params.train_network)

    def _notes(self) -> dict[str, Any]:
        return self._end.notes(self._done, self._params.batch_num, self._params.get("net_outputs"))

    def _late(self) -> None:
        """In the thread of ``Preemption``: the step has not ended in time."""
        with self._turn:
            if not self._stopping:
                self._tell(f"step {self._done + 1} has not ended {self._grace_s} s after the signal")
                self._save_from_thread()

    def _over(self) -> None:
        with self._turn:
            if self._stopping:
                return
            self._tell(f"the process ends: {self._settings.exit_grace_s} s after the signal its step has not ended")
            sys.stderr.flush()
            os._exit(_EX_TEMPFAIL)

    def _save_from_thread(self) -> None:
        """Of a step that is being computed only copies can be saved. Between steps nobody writes."""
        try:
            if self._in_step:
                self._save_copies()
            elif self._done > self._first:
                self._end.save(self._state(), self._notes())
        except (StorageError, OSError) as failed:
            self._tell(f"nothing was saved: {failed}")

    def _file_name(self, rank: int, epoch: int, step: int) -> str:
        """As MindSpore's callback names it."""
        return f"ttp_rank_{rank}-{epoch}_{step}.ckpt"

    def _tell(self, text: str) -> None:
        log.warning("rank %d: %s", self._ranks.rank, text)
