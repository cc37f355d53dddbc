"""``tft_exception_handler``: a training function of PyTorch's that is called again when its fault is repaired.

What an exception means is read from its words, as MindIO does (``ttp_decorator.py`` of its SDK); the first that are
found count. A script may add some.
"""

from __future__ import annotations

import functools
import logging
import re
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from resilient_train.integrations.mindio.frames import Action, ReportState
from resilient_train.integrations.mindio.processor import Processor, free_cached_memory

log = logging.getLogger("resilient_train.mindio")

_CODE = re.compile(r"\bdevice error type\s*([0-9a-fA-F]+)\b")
_CODE_MAX = 15
_OF_DEVICES = frozenset((ReportState.RS_UCE, ReportState.RS_UCE_CORRUPTED, ReportState.RS_HCCL_FAILED))

Handle = Callable[[str], str]
"""Gets the exception's text; returns the name of another state, or what else it likes."""


class _Meaning(NamedTuple):
    state: ReportState
    handle: Handle | None = None


_meanings: dict[str, _Meaning] = {
    "FORCE STOP": _Meaning(ReportState.RS_NORMAL),
    "UCE ERROR": _Meaning(ReportState.RS_UCE),
    "HBM MULTI BIT ECC": _Meaning(ReportState.RS_UCE),
    "ARF FINISH": _Meaning(ReportState.RS_PREREPAIR_FINISH),
    "STEP FINISH": _Meaning(ReportState.RS_STEP_FINISH),
    "HCCL OP RETRY FAILED": _Meaning(ReportState.RS_HCCL_FAILED),
    "SUSPECT REMOTE ERROR": _Meaning(ReportState.RS_HCCL_FAILED),
    "UB LINK ERROR": _Meaning(ReportState.RS_HCCL_FAILED),
    "HCCS LINK ERROR": _Meaning(ReportState.RS_HCCL_FAILED),
}


def register(words: str, state: str, handle: Handle | None) -> None:
    """Adds words, or gives others a new meaning. Raises ValueError for a state that there is not."""
    if state not in ReportState.__members__:
        raise ValueError(f"{state!r} is no ReportState; there are {', '.join(ReportState.__members__)}")
    _meanings[words] = _Meaning(ReportState[state], handle)


def meaning_of(text: str, *, repairs_devices: bool = True) -> tuple[ReportState, str]:
    """What is reported of an exception with this text: the state, and the device's error code (empty: none)."""
    found = next((meaning for words, meaning in _meanings.items() if words in text), None)
    if found is None:
        return ReportState.RS_UNKNOWN, ""
    named = found.handle(text) if found.handle is not None else ""
    state = ReportState.__members__.get(named, found.state)
    code = _CODE.search(text)
    if state in _OF_DEVICES and not repairs_devices:
        state = ReportState.RS_UNKNOWN
    return state, code[1][:_CODE_MAX] if code else ""


def handled(
    function: Callable[..., Any], own: Callable[[], Processor], over: Callable[[], object]
) -> Callable[..., Any]:
    """``function``, called again behind each fault that was repaired, with the same arguments, but for those that a
    handler has put others in the place of: handlers get the list of them. Behind its return ``over`` is called.

    What can't be repaired is raised, behind the end-of-life checkpoint.
    """

    @functools.wraps(function)
    def train(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        own().set_args(given)
        while True:
            try:
                result = function(*given, **kwargs)
            except RuntimeError as error:
                processor = own()
                state, code = meaning_of(str(error), repairs_devices=processor.repairs_devices)
                log.warning("rank %d reports %s: %s", processor.rank, state.name, error)
                if state is not ReportState.RS_UNKNOWN:
                    _let_go_of_tensors(error)
                processor.report(state, code)
                if state is ReportState.RS_UNKNOWN or processor.wait_next_action() is Action.EXIT:
                    raise
            except Exception:
                own().report(ReportState.RS_UNKNOWN)
                raise
            else:
                over()
                return result
            free_cached_memory()

    return train


def _let_go_of_tensors(error: BaseException) -> None:
    """The frames that it came through keep their variables alive: a model that is made anew needs their room."""
    met: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in met:
        met.add(id(chain))
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
