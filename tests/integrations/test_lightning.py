"""Lightning's Trainer under faults: the bits of the undisturbed run."""

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 - as everybody writes it
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    StochasticWeightAveraging,
    Timer,
)
from torch.utils.data import DataLoader
from trained import EVERYWHERE, assert_mended, assert_repaired, assert_resumed, assert_started_again

from resilient_train.errors import ConfigError
from resilient_train.frameworks.roles import Objects
from resilient_train.integrations.lightning import Resilient, ResilientPrecision, _Place
from resilient_train.session.reading.known_objects import own_of
from resilient_train.session.reading.static_lookup import Texts

JOB = "with_lightning.py"
IN_CALLS = (
    "kill rank=1 step=4 phase=COMPUTE at=backward; kill rank=0 step=8 phase=UPDATING; "
    "hcce rank=1 step=14 incarnation=1; kill rank=1 step=18 phase=APPLIED at=end incarnation=1; "
    "kill rank=0 step=24 incarnation=1"
)
"""A step is a batch. Windows of three batches, and of one at each epoch's end."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE), (3, IN_CALLS)])
def test_trainer(tmp_path: Path, accumulate: int, plan: str) -> None:
    assert_repaired(tmp_path, JOB, "--accumulate", str(accumulate), plan=plan)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "every"), [(1, 5), (3, 2)])
def test_devices_that_compute_wrongly(tmp_path: Path, accumulate: int, every: int) -> None:
    assert_mended(tmp_path, JOB, "--accumulate", str(accumulate), every=every)


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    assert_started_again(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_a_job_that_ended_is_started_again(tmp_path: Path) -> None:
    assert_resumed(tmp_path, JOB)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("schedules", "kill rank=1 step=14 phase=COMPUTE at=backward; kill rank=0 step=22 phase=UPDATING"),
        ("monitors", "kill rank=1 step=14 phase=COMPUTE at=backward; kill rank=0 step=22 phase=UPDATING"),
        ("stops", "kill rank=1 step=8 phase=COMPUTE at=backward"),
    ],
)
def test_what_a_new_process_would_lack(tmp_path: Path, kind: str, plan: str) -> None:
    """How many batches make a window in this epoch; what callbacks monitor; a wish to stop that must wait."""
    assert_repaired(tmp_path, JOB, "--kind", kind, plan=plan)


class Counts(Callback):
    """How often it is called for."""

    count = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Kept(Callback):
    """Each rank's own losses, as a script keeps them."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self.losses]}


def test_what_callbacks_give_is_known_and_compared() -> None:
    kept = Kept()
    own = Resilient()
    trainer = L.Trainer(accelerator="cpu", devices=1, callbacks=[own, kept, Timer()], logger=False)
    place = _Place(trainer, own)
    kept.losses.append(0.5)
    assert place.resilient_shows() == {"the callback Kept": {"losses": [0.5]}}, "a timer of Lightning's always differs"
    settled = own_of(Objects((), (), extra={"trainer": place}), (), (), Texts()).settled
    assert [names for each, names in settled if each is kept] == [{"losses"}]


class Draws(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        return self.layer(next(dataloader_iter)[0]).sum()


def fit(folder: Path, *callbacks: Callback, module: type[L.LightningModule] = Module) -> None:
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, callbacks=[*callbacks], plugins=[ResilientPrecision()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module(), DataLoader(torch.ones(4, 2)))


@pytest.mark.parametrize(
    ("words", "callback"),
    [
        ("EMAWeightAveraging has on_save_checkpoint", EMAWeightAveraging()),
        ("LambdaCallback has on_load_checkpoint", LambdaCallback(on_load_checkpoint=lambda *_: None)),
        ("StochasticWeightAveraging puts another scheduler", StochasticWeightAveraging(0.1, 1)),
        ("Counts has state_dict.. and on_before_optimizer_step", Counts()),
        ("put Resilient behind GradientAccumulationScheduler", GradientAccumulationScheduler({1: 3})),
    ],
)
def test_callbacks_that_are_refused(tmp_path: Path, words: str, callback: Callback) -> None:
    with pytest.raises(ConfigError, match=words):
        fit(tmp_path, Resilient(), callback)


def test_batches_that_are_drawn_in_the_body_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataloader_iter"):
        fit(tmp_path, Resilient(), module=Draws)


def test_the_name_of_the_integration_is_refused() -> None:
    with pytest.raises(ConfigError, match="'trainer' is the integration's own"):
        Resilient(state={"trainer": torch.Generator()})


def test_without_an_agent_it_trains(tmp_path: Path) -> None:
    fit(tmp_path, LambdaCallback(on_after_backward=lambda *_: None), Resilient())
