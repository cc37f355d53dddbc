"""How often failures come, as far as it is known: a guess from the number of devices, and what has been seen since."""

from __future__ import annotations

import math

import msgspec

from resilient_train.errors import ConfigError

DEVICE_MTBF_S = 50_000 * 3600.0
"""Of one accelerator with its share of host and network, where nobody knows better: 419 unexpected interruptions in 54
days of 16,384 GPUs, see "The Llama 3 Herd of Models" (2024), section 3.3.4."""

GUESS_FAILURES = 0.5
"""A guess counts as that many failures seen: the shape of Jeffreys' prior for a Poisson rate. What is seen outweighs it
from the first failure on. Guesses wrong by ten times, both ways, lose least with it (``benchmarks/advice.py``)."""

TRUSTED_FAILURES = 10
"""From so many failures on only what is seen counts, however wrong the guess was; ``ATO_THRESHOLD`` in MindSpore, with
the same default. (There, no advice is given before.)"""


MEMORY_SHARE = 0.9
"""Of the failures that no replica repairs, how many a snapshot in the memory of the same node does for, where nobody
knows better: all processes are gone far more often than the node."""


class FailureRate(msgspec.Struct, frozen=True):
    """A Gamma distribution of the failures' rate: as if ``failures`` had been seen in ``exposure_s`` seconds.

    It is the conjugate of the Poisson process: the posterior after n failures in t seconds is the same with n and t
    added, and n and t are all that matters of the times at which they came.
    """

    failures: float
    exposure_s: float

    @property
    def mtbf_s(self) -> float:
        """The mean time between failures to compute the interval with: 1 / the mean of the rate.

        Costs grow linearly with the rate (to the first order), so its mean leads to the least expected cost.
        """
        return self.exposure_s / self.failures

    def seen(self, failures: int, during_s: float, trusted: int = TRUSTED_FAILURES) -> FailureRate:
        """What is known after that many failures in that time, all in all; from ``trusted`` on, they alone count.

        Raises ConfigError for a number that can't be.
        """
        if failures < 0 or not 0 <= during_s < math.inf:
            raise ConfigError(f"{failures} failures in {during_s} s: both must be numbers from 0")
        if failures >= max(trusted, 1) and during_s > 0:
            return FailureRate(failures, during_s)
        return FailureRate(self.failures + failures, self.exposure_s + during_s)


def guess(devices: int, device_mtbf_s: float = DEVICE_MTBF_S, share: float = 1.0) -> FailureRate:
    """What is supposed of a job of so many devices before it runs.

    ``share``: the part of the failures that count, from above 0 to 1. Raises ConfigError for a number that can't be.
    """
    if devices < 1:
        raise ConfigError(f"there must be 1 device or more, not {devices}")
    if not 0 < device_mtbf_s < math.inf:
        raise ConfigError(f"the mean time between a device's failures must be above 0, not {device_mtbf_s} s")
    if not 0 < share <= 1:
        raise ConfigError(f"a share must be above 0, and at most 1, not {share}")
    return FailureRate(GUESS_FAILURES, GUESS_FAILURES * device_mtbf_s / devices / share)


class AtoInfo(msgspec.Struct, frozen=True):
    """What MindSpore keeps in the file ``ATO_PATH`` from run to run: failures, and the steps until each, summed up."""

    failure_count: int
    total_steps: int


def parse_ato_info(content: bytes, name: str) -> AtoInfo:
    """The file's content; ``name`` is for the error. Raises ConfigError if it is something else."""
    try:
        info = msgspec.json.decode(content, type=AtoInfo)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is no file of ATO's (failure_count, total_steps): {error}") from None
    if info.failure_count < 0 or info.total_steps < 0:
        raise ConfigError(f"{name}: failure_count and total_steps must be 0 or more")
    return info
