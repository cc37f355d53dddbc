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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.plugins.precision import Precision

from resilient_train import config
from resilient_train.errors import ConfigError
from resilient_train.protocol.messages import Refused
from resilient_train.session import Session
from resilient_train.session.agent_link import say_once


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
        if "trainer" in (state or {}):
            _refuse("the name 'trainer' is the integration's own: give your state another one")
        self._state = dict(state or {})
        self._rank_state = dict(rank_state or {})
        self._save_every = save_every
        self._session: Session | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop begins, or goes on where the ranks that live are."""
        _refuse(_problem(trainer, pl_module) or _problem_of_callbacks(trainer.callbacks, self))
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


def _refuse(problem: str) -> None:
    """The agent is told as well, and ends the job with exit code 2."""
    if not problem:
        return
    told = f"Lightning: {problem}"
    link = config.read_link()
    if link is not None:
        say_once(link, Refused(told))
    raise ConfigError(told)


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
    if isinstance(trainer.fit_loop._data_fetcher, _DataLoaderIterDataFetcher):  # noqa: SLF001 - no public one
        return (
            "training_step(self, dataloader_iter) draws its batches itself: one that runs again would get the next "
            "ones; write training_step(self, batch, batch_idx)"
        )
    return ""


_IN_BODIES = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks that a redo calls again."""


def _problem_of_callbacks(callbacks: Sequence[Callback], own: Callback) -> str:
    for place, each in enumerate(callbacks):
        if each is not own and (problem := _problem_of_callback(each)):
            return f"the callback {type(each).__name__} {problem}"
        if isinstance(each, GradientAccumulationScheduler) and own in callbacks[:place]:
            return "put Resilient behind GradientAccumulationScheduler, which looks whether the Trainer accumulates"
    return ""


def _problem_of_callback(callback: Callback) -> str:
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        if _has(callback, hook):
            return (
                f"has {hook}: what it keeps in Lightning's checkpoints a new process would begin anew; have it keep "
                "all of its state in state_dict()"
            )
    if isinstance(callback, StochasticWeightAveraging):
        return "puts another scheduler in the place of the one that the Session has; leave it out"
    if _has(callback, "state_dict"):
        for hook in _IN_BODIES:
            if _has(callback, hook):
                return (
                    f"has state_dict() and {hook}: a step that runs again would move its state twice; move it in "
                    "on_train_batch_end"
                )
    return ""


def _has(callback: Callback, name: str) -> bool:
    """A LambdaCallback has its hooks itself."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)


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


_LIGHTNINGS = ("lightning.", "pytorch_lightning.")


class _Place:
    """Where loops and callbacks are, as state that all ranks hold alike."""

    resilient_lives_on = True

    def resilient_carries(self) -> list[Callback]:
        """A script that names a callback of its own is not told of what that one's ``state_dict()`` gives."""
        return [*self._callbacks.values()]

    def resilient_shows(self) -> dict[str, Any]:
        """What the script's own have: whether a timer of Lightning's differs, nobody asks."""
        own = {key: each for key, each in self._callbacks.items() if not type(each).__module__.startswith(_LIGHTNINGS)}
        return {f"the callback {key}": each.state_dict() for key, each in own.items()}

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
        return {
            "loops": loops,
            "callbacks": {key: each.state_dict() for key, each in self._callbacks.items()},
            "accumulate": self._trainer.accumulate_grad_batches,
            "should_stop": bool(self._trainer.should_stop),
            "metrics": {k: v for k, v in _metrics(self._trainer).items() if isinstance(v, (torch.Tensor, float, int))},
        }

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
        self._trainer.accumulate_grad_batches = self._taken["accumulate"]  # on_train_epoch_start set it for the others
        self._trainer.should_stop |= self._taken["should_stop"]
        _metrics(self._trainer).update(self._taken["metrics"])
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


def _metrics(trainer: Trainer) -> dict[str, Any]:
    """What callbacks monitor. Where one of them is not there Lightning makes no collective, and other ranks do."""
    return trainer._logger_connector._callback_metrics  # type: ignore[no-any-return] # noqa: SLF001 - the public one computes
