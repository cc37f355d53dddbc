"""A recorder in the place of torch_npu: the real signatures, and answers that a test chooses."""

import operator
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from pure.npu_signatures import VERBS, signature

ANSWERS = {"npu.is_initialized": True, "npu.current_device": 3, "npu.stop_device": 0, "npu.check_uce_in_memory": 0}


class RecordedNpu:
    """``module`` is what a test puts into ``sys.modules``; ``calls`` are (verb, its arguments by name)."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = dict(ANSWERS)
        self.module = ModuleType("torch_npu")
        self.module.__version__ = "2.13.0"
        self.module.npu = SimpleNamespace(_recovery=SimpleNamespace())
        self.module.distributed = SimpleNamespace()
        for verb in VERBS:
            place, _, name = verb.rpartition(".")
            setattr(operator.attrgetter(place)(self.module), name, self._recorder(verb))

    def _recorder(self, verb: str) -> Callable[..., Any]:
        takes = signature(verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = takes.bind(*args, **kwargs)
            if verb != "npu.get_rng_state":  # three times a step
                self.calls.append((verb.rpartition(".")[2], dict(bound.arguments)))
            answer = self.answers.get(verb)
            if isinstance(answer, Exception):
                raise answer
            return answer

        call.__signature__ = takes
        return call

    def answer(self, verb: str, value: Any) -> None:
        """From now on ``verb`` (as in VERBS) answers this; an exception is raised."""
        assert verb in VERBS
        self.answers[verb] = value

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """The calls since the last time."""
        taken, self.calls = self.calls, []
        return taken
