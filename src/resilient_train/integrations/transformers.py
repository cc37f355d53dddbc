"""transformers' Trainer: ``ResilientTrainer`` in its place.

The Trainer's loop makes an update in many lines: it draws the batches of a window, gathers the number of their tokens
from all ranks, calls ``training_step`` for each, clips, steps the optimizer. Here the first ``training_step`` of a
window makes all of it in one ``session.call``. What the loop does afterwards finds it done: ``training_step`` gives the
losses that were kept, clipping the norm that was kept, and accelerate's optimizer does not step a second time where
``sync_gradients`` is off. Scheduler, logging, evaluation and the Trainer's own checkpoints stand behind the update.

The Trainer's state and that of its callbacks are part of the replicated state: a new process takes them over from a
rank that lives, and skips the batches of the epoch that are done with, as the Trainer does when it resumes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import torch
import transformers
from accelerate.data_loader import DataLoaderDispatcher
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from resilient_train import config
from resilient_train.errors import ConfigError, UsageError
from resilient_train.protocol.messages import Refused
from resilient_train.session import Session
from resilient_train.session.agent_link import say_once

_SKIP = "the batches that are done with"
"""In place of a checkpoint's folder: the Trainer skips batches if there is one."""

_LOOP = ("_inner_training_loop", "_run_epoch", "_init_training_state", "_prepare_for_training", "_finalize_training")
"""What the order of things depends on. Nobody else may have changed them."""

_FREE = ("__init__", "train", "_save_checkpoint")
"""Of our methods, those that a subclass may have of its own."""

_COUNTS = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "_flos_stored",
)
"""Of the Trainer's attributes, those that it counts with on all ranks alike; the last is ours."""


class ResilientTrainer(Trainer):  # type: ignore[misc] # transformers is not there when types are checked
    """A Trainer that opens a Session over the whole of ``train()``: model, optimizer and scheduler are registered.

    ``state`` and ``rank_state``: more of them, see ``Session``. ``save_every``: the arguments of
    ``Session.save_every``, as ``{"steps": 100}``. A Trainer with methods of its own goes behind it: ``class
    Mine(ResilientTrainer, MyTrainer)``. Raises ConfigError for what can't be repaired, here or in ``train()``.
    """

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *more: Any,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        save_every: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        _refuse(_problem_of_class(type(self)))
        _refuse(_problem_of_arguments(args) or _problem_of_names(state or {}, rank_state or {}))
        super().__init__(model, args, *more, **named)
        _refuse(_problem_of_devices(self))
        self._more_state = dict(state or {})
        self._more_rank_state = dict(rank_state or {})
        self._save_every = save_every
        self._session: Session | None = None
        self._place = _Place(self)
        self._losses = _Losses(self, self._place)
        self._window: list[Any] = []
        self._grad_norm: Any = None
        self._flos_stored = 0

    # -- the training begins and ends

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's. Raises ConfigError for what can't be repaired, and for a checkpoint of the Trainer's."""
        if resume_from_checkpoint:
            _refuse(
                "train(resume_from_checkpoint=...) is not supported: the Session goes on from its own newest "
                "checkpoint in the run directory; to begin with other weights load them into the model"
            )
        return super().train(None, *args, **kwargs)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as self._until_end:
            return super()._inner_training_loop(*args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """The first to get the loader."""
        _refuse(_problem_of_training(self, dataloader))
        self._loader = dataloader
        return super().set_initial_training_values(args, dataloader)

    def _init_training_state(
        self, max_steps: int, updates: int, epochs: int, resume_from_checkpoint: Any, trial: Any
    ) -> tuple[int, int]:
        """Where the loop begins. The Session knows; so model and optimizer are prepared before, not after it."""
        super()._init_training_state(max_steps, updates, epochs, resume_from_checkpoint, trial)
        self._prepared = super()._prepare_for_training(max_steps, self._loader, resume_from_checkpoint)
        _refuse(_problem_of_model(self))
        self._session = session = self._until_end.enter_context(
            Session(
                model=self.model_wrapped,
                optimizer=self.optimizer.optimizer,
                scheduler=self.lr_scheduler,
                state={**self._more_state, "trainer": self._place},
                rank_state={**self._more_rank_state, "losses": self._losses},
            )
        )
        if self._save_every is not None:
            session.save_every(**self._save_every)
        over = session.position.over
        epoch, done = self._place.take_up(updates)
        return (epochs, 0) if over else (epoch, done * self.args.gradient_accumulation_steps)

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._prepared

    def _run_epoch(self, **where: Any) -> None:
        epoch, skipped = where["epoch"], 0
        if epoch == where["epochs_trained"]:
            self._count_on()
            where["resume_from_checkpoint"] = _SKIP
            skipped = where["steps_trained_in_current_epoch"] // self.args.gradient_accumulation_steps
        self._place.begin(epoch, skipped)
        if hasattr(where["train_dataloader"], "set_epoch"):
            # The Trainer does it behind the skipping, where it arrives nowhere.
            where["train_dataloader"].set_epoch(epoch)
        super()._run_epoch(**where)
        if self._losses.left:
            raise UsageError(
                "transformers: a callback has stopped the loop in the middle of a window, whose update was made with "
                "its first batch: set should_training_stop or should_epoch_stop in on_step_end"
            )

    def _count_on(self) -> None:
        """The loop has set all counts to their beginning."""
        self._losses.count_on()
        self._place.count_on()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """The Session has the random numbers."""

    def store_flos(self) -> None:
        """As the Trainer's. Where it was done last is known to a new process."""
        super().store_flos()
        self._flos_stored = self.state.global_step

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Rank 0 writes, and the others wait for it in their next update."""
        with self._session.slow("the Trainer's checkpoint") if self._session else contextlib.nullcontext():
            super()._save_checkpoint(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """All ranks come to the end before what they do there together."""
        self._count_on()
        self._until_end.close()
        self.accelerator.gradient_state._set_sync_gradients(True)  # noqa: SLF001 - as the Trainer sets it
        return super()._finalize_training(*args, **kwargs)

    # -- the update

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """The batches of one update. Their tokens are counted in the body: that takes all ranks."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._window = batches
        return batches, None

    def _get_num_items_in_batch(self, *_: Any) -> None:
        return None

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Likewise: counted in the body."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """The loss of one batch. With the first of a window comes its update."""
        if self._session is None:
            return super().training_step(model, inputs, num_items_in_batch)
        if self._window and inputs is self._window[0]:
            window, self._window = self._window, []
            self._place.before = before = _Before(self.state.num_input_tokens_seen, len(self.state.log_history))
            self._grad_norm = self._session.call(self._update, window, before)
            self._place.before = None
        self.accelerator.gradient_state._set_sync_gradients(False)  # noqa: SLF001 - or the loop would step again
        return self._losses.give()

    def _update(self, window: list[Any], before: _Before) -> Any:
        """The body: one update of all its batches. Gives the norm of the gradients."""
        model, step, track_tokens = self.model_wrapped, super().training_step, super()._track_num_input_tokens
        self.state.num_input_tokens_seen = before.tokens_seen
        del self.state.log_history[before.log_lines :]  # compute_loss may log, and may run again
        count = super()._get_num_items_in_batch(window, self.args.device)
        losses = []
        for place, inputs in enumerate(window, 1):
            last = place == len(window)
            self.accelerator.gradient_state._set_sync_gradients(last)  # noqa: SLF001 - as the Trainer sets it
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last  # no_sync() would not end within that of the loop
            losses.append((step(model, inputs, count), float(self.floating_point_ops(inputs))))
            track_tokens(inputs)
        norm = super()._clip_grad_norm(model) if self.args.max_grad_norm > 0 else None
        norm = super()._get_grad_norm(model, grad_norm=norm)
        self._losses.keep(losses)
        self.optimizer.step()
        return norm

    def _clip_grad_norm(self, model: Any) -> Any:  # noqa: ARG002 - the Trainer's
        return self._grad_norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:  # noqa: ARG002 - likewise
        return self._grad_norm


class _Before(NamedTuple):
    """Of the Trainer's state what a body moves, as it was where the body began. A new process runs it from there."""

    tokens_seen: int
    log_lines: int


def _names_of(trainer_class: type) -> frozenset[str]:
    """The attributes that its own methods write: a step leaves them as it must, or this file carries them."""
    methods = [each for each in vars(trainer_class).values() if isinstance(each, FunctionType)]
    writes = (each for method in methods for each in dis.get_instructions(method) if each.opname == "STORE_ATTR")
    return frozenset(each.argval for each in writes)


class _Place:
    """Where the loop is, as state that all ranks hold alike: in the form in which the Trainer itself saves it."""

    resilient_lives_on = True

    def resilient_settles(self) -> list[tuple[object, frozenset[str]]]:
        """A script that names its Trainer is not told of what that does with its own attributes, nor of what callbacks
        export.
        """
        callbacks = [(each, frozenset(each.state()["attributes"])) for each in self._callbacks()]
        return [(self._trainer, _names_of(Trainer) | _names_of(ResilientTrainer)), *callbacks]

    def resilient_shows(self) -> dict[str, Any]:
        """What callbacks export."""
        return {f"the callback {name}": each for name, each in self._exported().items()}

    def _exported(self) -> dict[str, Any]:
        callbacks = enumerate(self._callbacks())
        return {f"{place} {type(each).__name__}": each.state()["attributes"] for place, each in callbacks}

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch = self._first = self._updates = 0
        """The pass over the data, the number of its first update, and how many there are."""
        self.before: _Before | None = None
        """While a body runs."""
        self._taken: dict[str, Any] | None = None
        self._runs = False
        """The loop. What it counts itself is not taken back where it lives on."""

    def begin(self, epoch: int, skipped: int) -> None:
        """A pass over the data begins, behind so many updates of it."""
        self._epoch, self._first = epoch, self._trainer.state.global_step - skipped

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        if self.before is not None:
            state["num_input_tokens_seen"] = self.before.tokens_seen
            del state["log_history"][self.before.log_lines :]
        held = {
            "epoch": self._epoch,
            "first": self._first,
            "updates": self._updates,
            "counts": {name: getattr(trainer, name, 0) for name in _COUNTS},
            "state": state,
        }
        # Not as JSON: they are to be what they were, a tuple no list. What can't be carried is refused by its name.
        return {"place": json.dumps(held, default=_plain), "callbacks": self._exported()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not self._runs:
            self._taken = {**json.loads(state["place"]), "callbacks": copy.deepcopy(state["callbacks"])}

    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def take_up(self, updates: int) -> tuple[int, int]:
        """In a process that takes a place, or starts from a checkpoint. The epoch, and its updates that are done."""
        self._updates = updates
        if self._taken is None:
            return 0, 0
        if self._taken["updates"] != updates:
            raise ConfigError(
                f"transformers: an epoch has {updates} updates, and had {self._taken['updates']} where the state comes "
                "from (other data, batches, ranks): the place in the data can't be found; start in a new run directory"
            )
        state = self._trainer.state
        own = ("is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs")
        vars(state).update({name: value for name, value in self._taken["state"].items() if name not in own})
        for callback, attributes in zip(self._callbacks(), self._taken["callbacks"].values(), strict=True):
            vars(callback).update(attributes)
        epoch, done = self._taken["epoch"], state.global_step - self._taken["first"]
        return (epoch + 1, 0) if done >= updates else (epoch, done)

    def since(self, count: str) -> int:
        """How many updates there have been since the one that this count names."""
        if self._taken is None:
            return int(self._trainer.state.global_step - getattr(self._trainer, count))
        return int(self._taken["state"]["global_step"] - self._taken["counts"][count])

    def count_on(self) -> None:
        """The rest of it. The loop runs from here."""
        if self._taken is not None:
            vars(self._trainer).update(self._taken["counts"])
        self._taken, self._runs = None, True


class _Losses:
    """The losses, and the work, that no log line has told yet: each rank has its own.

    The loop adds them behind the update, which a rank may not live to see. So what it has to add is here before it.
    """

    def __init__(self, trainer: Any, place: _Place) -> None:
        self._trainer = trainer
        self._place = place
        self._kept: deque[tuple[torch.Tensor, float]] = deque()
        """Of the window's batches, those that the loop has not got yet."""
        self._taken: Mapping[str, Any] | None = None
        self._runs = False

    def keep(self, losses: Iterable[tuple[torch.Tensor, float]]) -> None:
        """For each batch its loss, and the floating-point operations that it took."""
        self._kept = deque(losses)

    def give(self) -> torch.Tensor:
        """The next loss, in the order of the batches."""
        return self._kept.popleft()[0]

    @property
    def left(self) -> bool:
        """Whether the loop has left out some."""
        return bool(self._kept)

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        total, work = (trainer._tr_loss, trainer.current_flos) if self._runs else self._added()  # noqa: SLF001 - as below
        return {"total": total, "work": work, "kept": [list(each) for each in self._kept]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._runs:
            self._kept.clear()  # of a body that was cut; the rest only the loop changes
        else:
            self._taken = state

    def count_on(self) -> None:
        """The loop runs from here."""
        if self._taken is not None:
            total, self._trainer.current_flos = self._added()
            self._trainer._tr_loss = total.to(self._trainer.args.device)  # noqa: SLF001 - no public one
        self._taken, self._runs = None, True

    def _added(self) -> tuple[torch.Tensor, float]:
        """As the loop of the process whose place this one takes would have added what was kept, and told it."""
        if self._taken is None:
            return torch.zeros(()), 0
        total, work = self._taken["total"], self._taken["work"]
        updates = self._place.since("_globalstep_last_logged")
        for loss, operations in self._taken["kept"]:
            left_out = self._trainer.args.logging_nan_inf_filter and not torch.isfinite(loss)
            total = total + (total / max(updates, 1) if left_out else loss)
            work += operations
        if not updates:
            total = total - total
        return total, work if self._place.since("_flos_stored") else 0  # an int, as in the Trainer: it is gathered


def _plain(value: Any) -> Any:
    """What people log and JSON does not know."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


# -- what is refused


def _refuse(problem: str) -> None:
    """Before the Session: the agent is told as well, and ends the job with exit code 2."""
    if not problem:
        return
    told = f"transformers: {problem}"
    link = config.read_link()
    if link is not None:
        say_once(link, Refused(told))
    raise ConfigError(told)


def _problem_of_class(kind: type) -> str:
    """The methods that make the update are ours, and the loop around them is the Trainer's as we know it."""
    for name, mine in vars(ResilientTrainer).items():
        if callable(mine) and name not in _FREE and getattr(kind, name) is not mine:
            return f"{kind.__name__}.{name} hides ResilientTrainer's: write class X(ResilientTrainer, YourTrainer)"
    for name in _LOOP:
        if not hasattr(Trainer, name):
            return f"transformers {transformers.__version__} has no Trainer.{name}; 5.23.0 was tried"
        owner = next(each for each in kind.__mro__ if each is not ResilientTrainer and name in vars(each))
        if owner is not Trainer:
            return f"{owner.__name__} has a {name} of its own, so nobody knows what its loop does"
    return ""


_ARGUMENTS = {
    "auto_find_batch_size": "it begins again with other batches",
    "deepspeed": "it shards and steps by itself",
    "fsdp": "sharded training was never tried",
    "fp16": "its scaler was never tried; use bf16",
    "torch_compile": "a compiled model was never tried",
    "push_to_hub": "a new process would push anew",
    "ignore_data_skip": "a new process could not find its place in the data",
    "metric_for_best_model": "a rank that is lost right before an evaluation leaves its part of the metric out, so the "
    "best model, the end of the training or the learning rate could be another one (load_best_model_at_end, early "
    'stopping, save_strategy="best", "reduce_lr_on_plateau")',
    "eval_on_start": "a new process would evaluate alone; call evaluate() before train()",
    "enable_jit_checkpoint": "SIGTERM is the agent's, which has the state saved",
}


def _problem_of_arguments(args: Any) -> str:
    for name, why in _ARGUMENTS.items():
        if getattr(args, name, None):
            return f"TrainingArguments({name}=...) is not supported: {why}"
    if any(word in str(getattr(args, "optim", "")).lower() for word in ("lomo", "layerwise")):
        return f"the optimizer {args.optim} updates within the backward pass"
    return ""


def _problem_of_names(state: Mapping[str, Any], rank_state: Mapping[str, Any]) -> str:
    for own, given in (("trainer", state), ("losses", rank_state)):
        if own in given:
            return f"the name {own!r} is the integration's own: give your state another one"
    return ""


def _problem_of_devices(trainer: Any) -> str:
    args, accelerator = trainer.args, trainer.accelerator
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        return "accelerate's configuration turns DeepSpeed or FSDP on, which is not supported"
    if getattr(accelerator, "parallelism_config", None) is not None or trainer.is_distributed_loading_by_transformers:
        return "a model or batches that are split over ranks were never tried"
    if args.n_gpu > 1 or trainer.is_model_parallel:
        return "one process with several devices is not supported: start one for each"
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return "accelerate's sync_each_batch is not supported"
    return ""


def _problem_of_training(trainer: Any, loader: Any) -> str:
    for callback in trainer.callback_handler.callbacks:
        for event in ("on_pre_optimizer_step", "on_substep_end"):
            if getattr(type(callback), event) is not getattr(TrainerCallback, event):
                return f"the callback {type(callback).__name__} has {event}, which would come behind the update"
    if isinstance(loader, DataLoaderDispatcher):
        return "dispatch_batches (and data without a length, which need it): rank 0 sends the batches between updates"
    if not has_length(loader):
        return "a loader without a length: a new process could not find its place in the data"
    sampler = loader.get_sampler() if hasattr(loader, "get_sampler") else loader.sampler
    if not (isinstance(sampler, SequentialSampler) or hasattr(sampler, "set_epoch")):
        return (
            f"the order of a {type(sampler).__name__} is in no epoch's number, so a new process would not find its "
            'place in the data: use_seedable_sampler, and train_sampling_strategy "random" or "sequential"'
        )
    return ""


def _problem_of_model(trainer: Any) -> str:
    model = trainer.model_wrapped
    if trainer.args.world_size > 1 and not isinstance(model, DistributedDataParallel):
        return f"several ranks train a {type(model).__name__}, and DistributedDataParallel alone was tried"
    return ""
