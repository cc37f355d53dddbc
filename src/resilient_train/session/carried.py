"""``Carried``: what flows from one step into the next, and must not do so in a local variable.

A batch that is fetched ahead, the hidden state of a recurrent model: whatever a body leaves behind for the next one.
In a local variable it is hardly seen. When a step is run again the variable holds what the cut body has put there, and
a new process has nothing of it: both end with other parameters, and no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from resilient_train.errors import ConfigError, UsageError

_NOTHING: Final = object()


class Carried:
    """A place for one value, filled in one step and emptied in the next. To be registered in ``rank_state``.

    ::

        ahead = rt.Carried(make=lambda: get_batch("train"))
        with rt.Session(model=model, optimizer=optimizer, rank_state={"ahead": ahead}) as session:
            for step in session.steps(10_000):
                with step:
                    inputs, targets = ahead.take()
                    ...
                    ahead.fetch()  # the next one, wherever there is time for it

    ``value`` is what the first step takes. With ``make`` a value is made where ``take`` finds none; so ``fetch`` may
    stand anywhere, also behind the update, which a lost rank's successor does not run. Without, the next value is
    ``put`` before ``optimizer.step()``.

    A value is a tensor, a number, text, a NumPy array, None, or tuples, lists and dicts of them. It is copied into
    shared memory before each update, three times a step in all. When a step is run again it is what it was, in new
    tensors on the same devices; a new process gets its predecessor's.
    """

    def __init__(self, value: Any = _NOTHING, *, make: Callable[[], Any] | None = None) -> None:
        if (value is _NOTHING) == (make is None):
            raise ConfigError("Carried: give a first value, or make=, which makes each")
        self._make = make
        self._value: Any = _NOTHING
        self._may_take: Callable[[], bool] | None = None
        if value is not _NOTHING:
            self.put(value)

    def take(self) -> Any:
        """The value; the place is empty then. Raises UsageError where there is none, or it would flow on unseen."""
        self._check_known()
        if self._may_take is not None and not self._may_take():
            raise UsageError(
                "Carried.take() was called after the update, or outside of a step: what it gives would flow into the "
                "next step in a local variable; take it in the body that uses it"
            )
        if self._value is _NOTHING:
            self.fetch()
        value, self._value = self._value, _NOTHING
        return value

    def put(self, value: Any) -> None:
        """What the next step takes. Raises UsageError for a tensor that hangs on a graph of this step's."""
        self._check_known()
        if any(getattr(leaf, "grad_fn", None) is not None for leaf in _leaves(value)):
            raise UsageError("Carried.put() got a tensor with a grad_fn, which can't leave its step: detach() it")
        self._value = value

    def fetch(self) -> None:
        """Makes the value that is taken next, unless there is one. Raises UsageError without ``make``."""
        if self._value is not _NOTHING:
            return
        if self._make is None:
            raise UsageError(
                "Carried.take() found nothing: put() the next value in the same step that has taken the one before, in "
                "front of optimizer.step()"
            )
        self.put(self._make())

    def registered(self, may_take: Callable[[], bool]) -> None:
        """A Session knows it; ``may_take``: whether the body of a step runs that has not been updated yet."""
        self._may_take = may_take

    def state_dict(self) -> dict[str, Any]:
        """For the Session, before each update. Raises UsageError if a step has taken the value and put no other."""
        if self._value is _NOTHING:
            if self._make is None:
                raise UsageError(
                    "a Carried is empty where its value must be known (at optimizer.step(), or when a step begins): "
                    "put() the next one before optimizer.step(), where a new process would find it; or give Carried a "
                    "make="
                )
            return {"full": False}
        devices = [str(getattr(leaf, "device", "")) for leaf in _leaves(self._value)]
        return {"full": True, "value": self._value, "devices": devices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse."""
        self._value = _NOTHING
        if state["full"]:
            devices = iter(state["devices"])
            self._value = _moved(state["value"], devices)

    def _check_known(self) -> None:
        if _session_open and self._may_take is None:
            raise UsageError(
                'this Carried is not registered, so nobody else sees what it holds: Session(rank_state={"name": it})'
            )


_session_open = False


def watch(*, on: bool) -> None:
    """While on, every Carried that is used must be known to the Session."""
    global _session_open
    _session_open = on


def check_places(state: Mapping[str, Any]) -> None:
    """Raises ConfigError for one among what all ranks share."""
    for name, each in state.items():
        if isinstance(each, Carried):
            raise ConfigError(f"state[{name!r}] is a Carried: each rank has its own, so register it in rank_state")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _moved(value: Any, devices: Iterator[str]) -> Any:
    """The value with its tensors where they were: what comes out of shared memory lies on the host."""
    if isinstance(value, Mapping):
        return {key: _moved(item, devices) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_moved(item, devices) for item in value])
    device = next(devices)
    return value if device in {"", "cpu"} else value.to(device)
