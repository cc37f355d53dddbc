"""Lightning's Trainer: ``Trainer(callbacks=[Resilient()], plugins=[ResilientPrecision()])``.

The callback gives the Trainer's automatic optimization of one batch to ``session.call``. The precision plugin has
forward and backward run before ``optimizer.step()``: Lightning runs them inside, where the update has begun.

A body runs again with what Lightning counts as it was. Loops and callbacks are part of the replicated state: a new
process takes them over from a rank that lives, and skips the batches of the epoch that are done with.
"""

from __future__ import annotations

import copy
import functools
import signal
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision

from resilient_train.errors import ConfigError
from resilient_train.session import Session


class ResilientPrecision(Precision):  # type: ignore[misc] # Lightning is not there when types are checked
    """Precision "32-true", with forward and backward in front of ``optimizer.step()``."""

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """As Lightning's, but for the order."""
        result = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return result


class Resilient(Callback):  # type: ignore[misc] # likewise
    """Opens a Session over the whole of ``trainer.fit()``, of which model, optimizers and schedulers are registered.

    ``state`` and ``rank_state``: more of them, see ``Session``. ``save_every``: the arguments of
    ``Session.save_every``, as ``{"steps": 100}``. Raises ConfigError for a Trainer that can't be repaired.
    """

    def __init__(
        self,
        *,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        save_every: Mapping[str, Any] | None = None,
    ) -> None:
        self._state = dict(state or {})
        self._rank_state = dict(rank_state or {})
        self._save_every = save_every
        self._session: Session | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins, or goes on where the ranks that live are."""
        if problem := _problem(trainer, pl_module):
            raise ConfigError(f"Lightning: {problem}")
        place = _Place(trainer, self)
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._session = session = Session(
            model=trainer.strategy.model,
            optimizer=trainer.optimizers,
            scheduler=schedulers,
            state={**self._state, "trainer": place},
            rank_state=self._rank_state,
        )
        if session.recovering:
            _leave_sigterm_to_the_agent(trainer)
        if self._save_every is not None:
            session.save_every(**self._save_every)
        if session.position.over:
            trainer.should_stop = True
        place.take_up()
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        optimization.run = functools.partial(_call, session, trainer, type(optimization).run.__get__(optimization))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - a hook of Lightning's
        """All ranks have come to the end."""
        self._leave(None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:  # noqa: ARG002 - likewise
        """Nobody waits for anybody."""
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _problem(trainer: Trainer, module: LightningModule) -> str:
    if not module.automatic_optimization:
        return "manual optimization is not supported: write such a loop with Session.steps()"
    if not isinstance(trainer.precision_plugin, ResilientPrecision):
        return "pass Trainer(plugins=[ResilientPrecision()]), so that backward does not run inside optimizer.step()"
    if trainer.strategy.handles_gradient_accumulation:
        return f"{type(trainer.strategy).__name__} accumulates gradients by itself"
    if trainer.reload_dataloaders_every_n_epochs:
        return "reload_dataloaders_every_n_epochs: a new process could not find its place in the data"
    if trainer.num_training_batches == float("inf"):
        return "a loader without a length: a new process could not find its place in the data; set limit_train_batches"
    return ""


def _leave_sigterm_to_the_agent(trainer: Trainer) -> None:
    """It has the state saved, and ends the job. Lightning asks rank 0 before each batch whether it got the signal:
    behind an update in which rank 0 was lost nobody could answer.
    """
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # noqa: SLF001 - no public way
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _nothing() -> None:
    pass


class _Counts(NamedTuple):
    """What one batch's optimization reads and moves in the Trainer."""

    batches: dict[str, Any]
    optimizers: dict[str, Any]
    hook: str | None

    @classmethod
    def of(cls, trainer: Trainer) -> _Counts:
        loop = trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress
        hook = trainer.lightning_module._current_fx_name  # noqa: SLF001 - left as it is where a hook is cut
        return cls(loop.batch_progress.state_dict(), progress.state_dict(), hook)

    def put_back(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop
        loop.batch_progress.load_state_dict(copy.deepcopy(self.batches))
        loop.automatic_optimization.optim_progress.load_state_dict(copy.deepcopy(self.optimizers))
        trainer.lightning_module._current_fx_name = self.hook  # noqa: SLF001 - likewise


def _call(session: Session, trainer: Trainer, run: Callable[..., Any], *args: Any) -> Any:
    return session.call(_body, trainer, _Counts.of(trainer), run, *args)


def _body(trainer: Trainer, counts: _Counts, run: Callable[..., Any], *args: Any) -> Any:
    counts.put_back(trainer)
    return run(*args)


class _Place:
    """Where loops and callbacks are, as state that all ranks hold alike."""

    resilient_lives_on = True

    def __init__(self, trainer: Trainer, own: Callback) -> None:
        self._trainer = trainer
        self._callbacks = {each.state_key: each for each in trainer.callbacks if each is not own}
        self._taken: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        loops = {k: v for k, v in self._trainer.fit_loop.state_dict().items() if k != "state_dict"}
        behind = self._within_window()
        for counts in loops["epoch_loop.batch_progress"].values():
            if isinstance(counts, dict):
                counts.update({name: count - behind for name, count in counts.items()})
        return {"loops": loops, "callbacks": {key: each.state_dict() for key, each in self._callbacks.items()}}

    def _within_window(self) -> int:
        """How many batches of the present window are behind the one that is at hand: a new process begins with them."""
        counts = self._trainer.fit_loop.epoch_loop.batch_progress.current
        at_hand = counts.ready > counts.completed
        return int(counts.completed % self._trainer.accumulate_grad_batches) if at_hand else 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Taken up later: what this rank counts itself is not taken back where it lives on."""
        self._taken = copy.deepcopy(state)

    def take_up(self) -> None:
        """In a process that takes a place, or starts from a checkpoint: the next batch is the first that counts."""
        if self._taken is None:
            return
        fit, batches = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop.batch_progress
        fit.load_state_dict(self._taken["loops"])
        for key, each in self._callbacks.items():
            each.load_state_dict(self._taken["callbacks"][key])
        if fit.done:
            return
        fit.reset()
        # The rank that it comes from has this batch in its hands. Lightning takes that for a step that is not counted.
        fit.epoch_loop._batches_that_stepped -= not fit.epoch_loop._should_accumulate()  # noqa: SLF001 - no public one
        batches.is_last_batch = False
        batches.total.ready = batches.total.started = batches.total.processed = batches.total.completed
        self._skip(batches.current.completed)

    def _skip(self, count: int) -> None:
        """Of the epoch's batches."""
        fit = self._trainer.fit_loop
        fetcher = fit._data_fetcher  # noqa: SLF001 - no public way to it
        for loader in fetcher.combined_loader.flattened:
            _set_sampler_epoch(loader, fit.epoch_progress.current.processed)
        iter(fetcher)
        for _ in range(count):
            next(fetcher)
        fetcher.fetched = 0  # Lightning adds what is behind it
