"""``Session``: wraps a training loop so that a fault in a step is repaired and the step goes on, or runs again.

::

    with rt.Session(model=model, optimizer=optimizer, loader=loader) as session:
        for step in session.steps(10_000):
            with step:
                loss = model(step.batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

A loop that owns its step (a Trainer of another library) gives its body to ``session.call`` instead. Without an agent
(plain ``python``, plain ``torchrun``) it is a plain loop: no thread, no signal handler, no hook.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

from resilient_train import config
from resilient_train.errors import ConfigError, UsageError
from resilient_train.frameworks import engine_for
from resilient_train.frameworks.roles import Engine, Objects, Problem
from resilient_train.observe.sinks import say_aside
from resilient_train.protocol.messages import Plain, Refused
from resilient_train.session.agent_link import say_once
from resilient_train.session.calls import ENDLESS, Calls, PlainCalls, Position
from resilient_train.session.carried import Carried, check_places, watch
from resilient_train.session.comparisons.anomalies import AnomalyLimits
from resilient_train.session.driver import LOOP_IS_OVER, Driver
from resilient_train.session.metrics import check_metrics
from resilient_train.session.reading.outer_loop import loop_of_sessions, made_here, outer_loop
from resilient_train.session.reading.static_lookup import Texts
from resilient_train.session.redo.kept_calls import BodyCall
from resilient_train.session.redo.loader import Cursor
from resilient_train.session.redo.randomness import BodiesRandom
from resilient_train.session.saves.cadence import wish
from resilient_train.session.step import Step
from resilient_train.standby_stage import standby_point

_HAD_ONE = (
    "this process has had its Session: under resilient-run a job has one Session, one loop; start a job for each (a "
    "fold, a trial)"
)
Groups = tuple[tuple[int, ...], ...]
P = ParamSpec("P")
R = TypeVar("R")

_open: Session | None = None
_ended = False


class Session:
    """One training loop. At most one is open in a process.

    ``model`` and ``optimizer`` (each one or a sequence), ``scheduler`` (likewise) and ``scaler`` are held by all
    replicas alike; so is everything in ``state``, a mapping of names to objects with ``state_dict()`` (an EMA of the
    model, say). ``rank_state`` is a mapping of things that every rank has its own of (a ``torch.Generator``, a
    sampler). ``replicas`` names the groups of ranks that hold bit-identical copies; all ranks are one group by default.
    ``undo=True`` keeps a copy of the state from before the update, so that a fault anywhere in the body, also after the
    update, is repaired by running the whole body again; it costs the memory and one copy a step. Loops that run
    backward between two optimizers' updates need it. ``norm_threshold`` and ``loss_threshold`` (``TRE``): from there on
    a gradient norm, or a loss, is an anomaly, for which the step runs again, once, before its update; as
    ``RESILIENT_NORM_THRESHOLD`` and ``RESILIENT_LOSS_THRESHOLD``. What is not finite always is one. With
    ``on_anomaly="skip"`` that second run counts without its update: it is made without gradients.

    Where the process group is one of an accelerator's (nccl, unless ``RESILIENT_NCCL=1``; hccl, unless
    ``RESILIENT_HCCL=1``), which can't be rebuilt, the Session is a plain loop, and says so. Raises ConfigError for
    other things that can't be repaired: no process group, a second Session, state that can't be carried.
    """

    def __init__(
        self,
        *,
        model: Any,
        optimizer: Any,
        loader: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        rank_state: Mapping[str, Any] | None = None,
        replicas: Sequence[Sequence[int]] = (),
        undo: bool = False,
        norm_threshold: float | None = None,
        loss_threshold: float | None = None,
        on_anomaly: Literal["redo", "skip"] = "redo",
    ) -> None:
        global _open
        standby_point()
        objects = Objects(
            _several(model), _several(optimizer), _several(scheduler), scaler, dict(state or {}), dict(rank_state or {})
        )
        link = agent = config.read_link()
        off = "no agent here (not started by resilient-run)"
        self._driver: Driver | None = None
        self._calls: Calls | PlainCalls | None = None
        self._calling = self._stepping = self._over = False
        self._made, self._link = made_here(), link
        self._number = 0
        try:
            if link is not None:
                off = config.why_off(config.read_settings(), config.read_switches())
                link = None if off else link
            if _open is not None:
                raise ConfigError(  # noqa: TRY301 - below, the agent is told of it too
                    "a Session is open already in this process; close it (leave its `with`) first"
                )
            if link is not None and _ended:
                raise ConfigError(_HAD_ONE)  # noqa: TRY301 - likewise
            _check_registered(objects)
            skips = _skips(on_anomaly)
            limits = _limits(norm_threshold, loss_threshold, config.Settings() if link is None else _planned())
            self._engine = engine = engine_for(objects)
            self._cursor = Cursor(
                loader, engine.data, engine.pass_order if objects.extra or objects.rank_extra else None
            )
            if link is not None and (problem := _problem(engine, link)) is not None:
                if not problem.plain:
                    raise ConfigError(problem.text)  # noqa: TRY301 - likewise
                off, link = problem.text, None
            if link is not None:
                groups = engine.state.replicas(_groups(replicas))
                if len(groups) > 1 and config.is_first_rank():
                    say_aside(_told(groups))
                self._driver = Driver(
                    link, engine, self._cursor, objects, groups, undo=undo, limits=limits, skips=skips
                )
                self._watch_carried(objects, self._driver)
        except ConfigError as error:
            if link is not None:
                say_once(link, Refused(str(error)))
            raise
        if self._driver is None:
            if config.is_first_rank():
                say_aside(f"{off}: the Session is a plain loop")
            if agent is not None:
                say_once(agent, Plain(off))
        _open = self

    def _watch_carried(self, objects: Objects, driver: Driver) -> None:
        for each in objects.rank_extra.values():
            if isinstance(each, Carried):
                each.registered(driver.before_its_update)
        watch(on=True)

    def steps(self, total: float, *, start: int = 0) -> Iterator[Step]:
        """The steps from ``start`` to ``total`` - 1, each to be used as ``with step:``; ``math.inf``: without end.

        ``start`` is the number of the first step, for a job that goes on from a checkpoint of its own. The loop's end
        is where the Session's protection ends: it waits there until all ranks have come. Raises UsageError if a step's
        ``with`` is left out or ``total`` is no number, and ConfigError within a ``for`` of epochs.
        """
        if self._calls is not None:
            raise UsageError(_MIXED)
        total, start = _whole(total), _whole(start)
        # A later process of the rank would not be there if the first had been refused, and others wait for it.
        is_first = self._link is None or not self._link.incarnation
        if is_first and not self._stepping:
            texts = Texts()
            if place := outer_loop(self._made, texts):
                raise self._refused(_NESTED.format(place=place))
            if self._driver is not None and config.is_first_rank() and (place := loop_of_sessions(self._made, texts)):
                say_aside(_SEVERAL.format(place=place))
        self._stepping = True
        return self._plain_steps(total, start) if self._driver is None else self._driver.steps(total, start)

    def _refused(self, text: str) -> ConfigError:
        """The job ends, and nobody starts it again."""
        if self._driver is not None and self._link is not None:
            say_once(self._link, Refused(text))
        return ConfigError(text)

    def _plain_steps(self, total: int, start: int) -> Iterator[Step]:
        if self._over:
            raise UsageError(LOOP_IS_OVER)
        self._number = max(self._number, start)
        while self._number < total:
            batch = self._cursor.next()
            self._number += 1  # now: a loop that is left in this step may be entered again
            yield Step(_PLAIN, self._number - 1, batch.value, batch.epoch)
        self._over = True

    def call(self, body: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls ``body``, one step of a loop that owns its step, and gives what it returns.

        A fault before the update: ``body`` is called again, with the same arguments, the same random numbers and this
        rank's own state as it was. From the update on it is repaired inside, and ``body`` runs to its end once. Where
        gradients are accumulated, the bodies of the window that have returned already are called again as well.

        So a body may run several times, up to the update: it must not change anything then that is not registered, and
        not its arguments. What stands between two calls runs once. An exception of ``body`` passes. Raises UsageError
        for a call within a call, after one that an exception has left before its update, or beside ``steps()``.
        """
        calls = self._called()
        if self._calling:
            raise UsageError("session.call() was called within a body of session.call(): one call is one step")
        self._calling = True
        try:
            result: R = calls.make(BodyCall(body, args, kwargs))
        finally:
            self._calling = False
        return result

    @property
    def position(self) -> Position:
        """Where the loop around ``call`` stands; a new process begins there. All ranks ask at the same place.

        Whoever asks for it before the first call meets the other ranks here: what is registered has its values then.
        Raises UsageError beside ``steps()``.
        """
        return self._called().position()

    def _called(self) -> Calls | PlainCalls:
        if self._stepping:
            raise UsageError(_MIXED)
        if self._calls is None:
            if self._cursor.loader is not None:
                raise UsageError(
                    "session.call() and session.position draw no batches: leave out Session(loader=...) and give each "
                    "body its batch as an argument"
                )
            random = BodiesRandom(self._engine.data)
            self._calls = PlainCalls(random) if self._driver is None else Calls(self._driver, random)
        return self._calls

    def save_every(
        self,
        mode: Literal["auto"] | None = None,
        *,
        steps: int | None = None,
        seconds: float | None = None,
        memory_steps: int | None = None,
    ) -> None:
        """Checkpoints under ``RUN/checkpoints``: after every ``steps`` updates, about every ``seconds``, or ``"auto"``:
        as often as costs least, by what is measured. To be called before ``steps()``.

        The state is copied into memory that outlives this process, behind the next window's forward and backward
        passes, and written from there to storage by another process. A job that is started again in the same run
        directory goes on from the newest checkpoint; one that loses all its ranks at once, from memory.
        ``memory_steps``, a divisor of ``steps``: snapshots that stay in memory in between. Without an agent nothing is
        saved. Raises ConfigError unless exactly one of the three is given, and for a number that can't be.
        """
        asked = wish(mode, steps, seconds, memory_steps)
        if self._driver is not None:
            self._driver.saving.every(asked)

    def slow(self, what: str = "") -> AbstractContextManager[None]:
        """For what takes long on this rank while the others may wait for it: ``with session.slow("evaluation"):``.

        While any rank is in one, no rank is taken for hung (``docs/how-to``). ``what`` stands in the run's events.
        """
        return self._driver.slow(what) if self._driver is not None else contextlib.nullcontext()

    def pause(self, at_step: int | None = None) -> None:
        """Asks all ranks to stand still before the next step, or before ``at_step``, until ``resilient-train resume``.

        Returns at once. One rank or all may ask. Raises UsageError for a step that has begun. Where the switch TSP is
        off, or there is no agent, there is no pause, and one line says so.
        """
        if self._driver is not None:
            self._driver.pause(at_step)
        elif config.is_first_rank():
            say_aside(
                "session.pause() has no effect: no agent stands behind this Session, and nobody could end the pause"
            )

    def resume(self) -> None:
        """Ends the pause in which this rank stands (from ``on_pause``, or another thread), or takes back a wish."""
        if self._driver is not None:
            self._driver.unpause()

    def on_pause(self, function: Callable[[int], object]) -> None:
        """``function(step)`` is called on this rank each time that all ranks have come to stand before ``step``.

        In the training thread, its device at rest, before the rank waits for the pause's end; a rank whose function
        takes longer than the pause is waited for. It may read everything, free and use memory, draw random numbers. It
        may not write what is registered (the job ends with exit code 2), nor call collectives (UsageError).
        An exception is told, and the job still stands.
        """
        if self._driver is not None:
            self._driver.on_pause(function)

    def check(self, loss: Any = None, *, norm: Any = None) -> None:
        """Has the loss of this body looked at, and the norm of its gradients where the loop does not clip them by
        ``torch.nn.utils.clip_grad_norm_``, which is seen without this. ``norm=True``: it is computed here, of all
        gradients of the registered models (behind ``backward()``; of a sharded model that is a collective).

        Each is one number, or a tensor of one, for which nobody waits here: it is looked at in front of the update.
        If it is at its threshold or not finite, on any rank, all ranks run the step again, once. To be called in the
        body before ``optimizer.step()``. Behind it the value is looked at in the call, which may wait for the device,
        and an anomaly is one that is noticed later, as by ``anomaly(step)``: all ranks go back to a saved state.
        UsageError elsewhere. Without ``TRE:1`` nothing is done.
        """
        if self._driver is not None:
            self._driver.check(loss, norm)

    def anomaly(self, step: int, reason: str = "") -> None:
        """Says that what was trained since ``step`` can't be right, as a later look has shown (a validation, say).

        Returns at once. All ranks go back to the newest saved state that is from before ``step`` or older
        (``save_every``), and train on from there; checkpoints behind it are set aside. Once for each step: who finds
        the same again has not been misled by a machine. Then, and where nothing of before is saved, it is written down
        and training goes on. One rank or all may call it. Raises UsageError for a step that has not begun. Without
        ``TRE:1``, or an agent, it has no effect, and one line says so.
        """
        if self._driver is not None:
            self._driver.anomaly(step, reason)
        elif config.is_first_rank():
            say_aside("session.anomaly() has no effect: no agent stands behind this Session")

    @property
    def recovering(self) -> bool:
        """Whether an agent stands behind this Session; False: a plain loop."""
        return self._driver is not None

    def close(self) -> None:
        """Ends the Session: waits until all ranks have come to their end; a rank lost until then needs the others."""
        self._end(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._driver is not None:
            self._driver.outlive_behind(error)
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        global _open, _ended
        if _open is self:
            _open = None
            _ended = True
        driver, self._driver = self._driver, None
        if driver is not None:
            watch(on=False)
            (self._calls if isinstance(self._calls, Calls) else driver).close(error)


def resilient(**registered: Any) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """For whole-function loops: ``@resilient(model=.., optimizer=..)`` calls ``train(session, ...)`` inside a Session.

    The arguments are those of ``Session``.
    """

    def decorate(train: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(train)
        def run(*args: Any, **kwargs: Any) -> R:
            with Session(**registered) as session:
                return train(session, *args, **kwargs)

        return run

    return decorate


_SEVERAL = (
    "this Session is made in the loop at {place}: a second pass would make a second one, which a job can't have, and "
    "would end it with exit code 2, the first being over; start a job for each (a fold, a trial)"
)
_NESTED = (
    "session.steps() is called in the loop at {place}, and a Session has one loop, which would be over behind the "
    "first pass: give steps() the number of all steps; step.epoch tells passes over the data (docs/how-to/loops.md, "
    "Epochs)"
)
_MIXED = "a Session has one loop: either session.steps(), or session.call() and session.position"


def _whole(number: float) -> int:
    """One that other processes can be told: NumPy has numbers of its own, and ``len(data) / batch`` is a float."""
    try:
        return ENDLESS if number == math.inf else math.ceil(number)
    except (TypeError, ValueError, OverflowError):
        raise UsageError(f"session.steps(): {number!r} is no number of steps") from None


def _problem(engine: Engine, link: config.AgentLink) -> Problem | None:
    """What this process has done before its Session that can't be repaired."""
    found = engine.groups.problem() if link.world_size > 1 else None
    if found is None and (text := engine.collectives.set_up_problem()):
        found = Problem(text)
    return found


def _groups(given: Sequence[Sequence[int]]) -> Groups:
    try:
        return tuple(map(tuple, given))
    except TypeError:
        raise ConfigError(f"replicas= takes lists of rank numbers, as [[0, 1], [2, 3]], not {given!r}") from None


def _told(groups: Groups) -> str:
    held = ", ".join(str(list(group)) for group in groups[:8]) + (", ..." if len(groups) > 8 else "")
    if all(len(group) > 1 for group in groups):
        return f"the state is in {len(groups)} parts; the ranks that hold the same: {held}"
    return (
        f"the state is in {len(groups)} parts, and some are held by one rank alone ({held}): when that one is lost, "
        "all ranks go back to the newest state that session.save_every() has kept (docs/how-to/sharded.md)"
    )


def _check_registered(objects: Objects) -> None:
    check_places(objects.extra)
    check_metrics({"state": objects.extra, "rank_state": objects.rank_extra})


def _skips(on_anomaly: str) -> bool:
    known = ("redo", "skip")
    if on_anomaly not in known:
        raise ConfigError(f"on_anomaly={on_anomaly!r}: one of the two, {' or '.join(map(repr, known))}")
    return on_anomaly == "skip"


def _planned() -> config.Settings:
    """The settings, with faults that something sees."""
    settings = config.read_settings()
    config.check_plan(settings, config.read_switches())
    return settings


def _limits(norm: float | None, loss: float | None, settings: config.Settings) -> AnomalyLimits:
    """What the user has said, or else the settings."""
    limits = AnomalyLimits(
        settings.norm_threshold if norm is None else norm, settings.loss_threshold if loss is None else loss
    )
    config.check_thresholds("norm_threshold", limits.norm, "loss_threshold", limits.loss)
    return limits


class _Plain:
    """The body of a plain loop: nobody is told anything."""

    def enter(self, step: Step) -> None:
        pass

    def leave(self, step: Step, error: BaseException | None) -> bool:  # noqa: ARG002 - a Body is asked so
        return False


_PLAIN = _Plain()


def _several(thing: Any) -> tuple[Any, ...]:
    if thing is None:
        return ()
    return tuple(thing) if isinstance(thing, (list, tuple)) else (thing,)
