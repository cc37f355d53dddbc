"""A CUDA device of a rank whose groups are NCCL's: see ``frameworks/accelerator.Accelerator``.

Nothing stops a CUDA device. What can be stopped is what it waits for: aborted communicators have the kernels end that
wait in them, and whoever waits for the device goes on. Behind an abort all looks as if it had come about: a stream that
was cut has its next kernels compute from what lay there. So ``synchronize`` says whether it was (decision 56).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from resilient_train.errors import DeviceError
from resilient_train.frameworks.torch.communication.transports.nccl import CUT, NcclGroup

_REST_S = 60.0
"""For what the device was given before the fault, which it computes to its end."""
_LOST = (
    "uncorrectable ECC error",
    "uncorrectable NVLink error",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "hardware stack error",
    "unspecified launch failure",
    "invalid program counter",
    "launch timed out",
    "unknown error",
)
"""In texts of CUDA errors after which a process computes nothing on its device any more, that may be the device's
fault. A failed assertion of a kernel is as final, and the script's.
"""
_MISUSE = ("ncclInvalidUsage", "ncclInvalidArgument")


class CudaDevice:
    """The device with that index. ``groups``: those whose communicators it has."""

    repairs_memory = False

    def __init__(self, rank: int, index: int, groups: Callable[[], Sequence[NcclGroup]]) -> None:
        self._rank = rank
        self._groups = groups
        self._index = NcclGroup.index = index
        self._stopped = False
        self._lent = False
        self._between = threading.Lock()
        """Nobody cuts the device while the training thread takes it back, and the other way round."""

    @property
    def stopped(self) -> bool:
        return self._stopped

    def lend(self) -> None:
        self._lent = True

    def cut(self) -> int:
        with self._between:
            if not self._lent or self._stopped:
                return 0
            self._abort()
            return 1

    def take_back(self) -> None:
        with self._between:
            self._lent = False

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)
        with self._between:
            self._lent = False
            # Not this object's own word alone: a drill aborts a group, and so may the script.
            cut = self._stopped or any(group.was_cut for group in self._groups())
            for group in self._groups() if not cut else ():
                group.hand_in()
        if cut:
            raise RuntimeError(f"rank {self._rank} waited for collectives of NCCL, and {CUT}")

    def kind_of(self, error: BaseException) -> str:
        text = str(error)
        if not isinstance(error, RuntimeError):
            return ""
        if CUT in text:
            return "STOPPED"
        if isinstance(error, dist.DistBackendError):
            return "" if any(words in text for words in _MISUSE) else "HCCE"
        return "DEVICE" if "CUDA error" in text and any(words in text for words in _LOST) else ""

    def stop(self) -> None:
        with self._between:
            self._lent = False
            self._abort()
        self._come_to_rest()

    def _abort(self) -> None:
        self._stopped = True
        for group in self._groups():
            group.abort_communicators()

    def _come_to_rest(self) -> None:
        """What was under way may not write into what comes next. Raises DeviceError."""
        failure: list[Exception] = []

        def wait() -> None:
            try:
                torch.cuda.synchronize(self._index)
            except RuntimeError as error:
                failure.append(error)

        waiter = threading.Thread(target=wait, name="rt-device-at-rest", daemon=True)
        waiter.start()
        waiter.join(_REST_S)
        if waiter.is_alive() or failure:
            what = str(failure[0]) if failure else f"it has not come to rest within {_REST_S:.0f} s"
            raise DeviceError(
                f"rank {self._rank}, CUDA device {self._index}: {what}; this process cannot go on, and ends so that it "
                "is replaced"
            )

    def check(self, *, reported: bool) -> bool:  # noqa: ARG002 - the protocol's
        """A device that has lost memory has lost the process."""
        return False

    def restart(self, groups: Sequence[Any], *, replaced: bool) -> None:  # noqa: ARG002 - the protocol's
        """The groups have new communicators."""
        self._stopped = False

    def random_state(self) -> None:
        """Those of CUDA devices torch knows, see ``generators.py``."""

    def restore_random_state(self, state: Any) -> None:
        """It is of another kind of device."""

    def mark_safe(self, tensors: Iterable[Any]) -> None:
        """Nothing was marked."""
