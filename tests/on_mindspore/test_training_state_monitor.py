"""Abnormal norms, as MindSpore Transformers documents them: its own monitor and ours read each other's file.

Their example: from 44 on a norm is abnormal, step 2 has 45.70, is run again and has 45.706, which stands.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindformers_monitor import with_norms

from resilient_train.integrations.mindspore.abnormal_steps import AbnormalSteps
from resilient_train.state import abnormal

THRESHOLD = 44.0
FIRST, AGAIN = np.float32(45.702465), np.float32(45.706)
FILE = "abnormal_global_norm.json"


class Parameters(SimpleNamespace):
    """What MindSpore gives to a callback."""

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


class Theirs:
    def __init__(self, folder: Path, *norms: float) -> None:
        self.monitor = with_norms(folder, 0, THRESHOLD, norms)

    def is_run_again(self, step: int) -> bool:
        parameters = Parameters(
            dataset_sink_mode=False, batch_num=5, cur_epoch_num=1, cur_step_num=step, net_outputs=ms.Tensor(1.0)
        )
        try:
            self.monitor.on_train_step_end(SimpleNamespace(original_args=lambda: parameters))
        except RuntimeError as error:
            return "TREError" in str(error)
        return False


class Ours:
    def __init__(self, folder: Path, *norms: float) -> None:
        limits = {"loss": float("inf"), "norm": THRESHOLD}
        self.steps, self.norms = AbnormalSteps(folder, limits, lambda outputs: outputs[1]), iter(norms)

    def is_run_again(self, step: int) -> bool:
        return bool(self.steps.look(step, (ms.Tensor(1.0), ms.Tensor(next(self.norms), ms.float32))))


def recorded(folder: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = json.loads((folder / FILE).read_text())
    return found


@pytest.mark.parametrize("who", [Theirs, Ours])
def test_the_documented_example(tmp_path: Path, who: Any) -> None:
    """Theirs has a second value in the file only with the next anomaly, ours at once."""
    rank = who(tmp_path, 40.0, FIRST, AGAIN, 44.0, 45.0)
    assert [rank.is_run_again(step) for step in (1, 2)] == [False, True]
    assert recorded(tmp_path) == {"2": [45.70246505737305]}
    assert not rank.is_run_again(2)
    assert recorded(tmp_path)["2"] in ([45.70246505737305], [45.70246505737305, 45.70600128173828])
    assert rank.is_run_again(3), "44 itself is abnormal"
    assert recorded(tmp_path) == {"2": [45.70246505737305, 45.70600128173828], "3": [44.0]}
    assert not rank.is_run_again(3)


@pytest.mark.parametrize(("first", "second"), [(Theirs, Ours), (Ours, Theirs)])
def test_one_goes_on_from_the_others_file(tmp_path: Path, first: Any, second: Any) -> None:
    """What one has run again, the other takes for the data's doing."""
    assert first(tmp_path, FIRST).is_run_again(2)
    assert abnormal.read(tmp_path) == {("norm", 2): (float(FIRST),)}
    rank = second(tmp_path, AGAIN, 44.0)
    assert [rank.is_run_again(step) for step in (2, 3)] == [False, True]
    assert recorded(tmp_path) == {"2": [float(FIRST), float(AGAIN)], "3": [44.0]}
