"""A small model with Lightning's Trainer: dropout, BatchNorm, clipping, a scheduler, validation, early stopping, logged
means, a checkpoint at each epoch's end.
"""

import argparse
import logging
import warnings
from pathlib import Path

import lightning as L  # noqa: N812 - as everybody writes it
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resilient_train.config import read_link
from resilient_train.integrations.lightning import Resilient, ResilientPrecision


class Data(Dataset):
    def __init__(self, size: int, first: int) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(12, generator=torch.Generator().manual_seed(self.first + index)), index % 4


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.3), nn.Linear(48, 4)]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Stops(Callback):
    """Says it once, in the fourth step. Whether the loop may stop then is asked again and again."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 4:
            trainer.should_stop = True


def more_callbacks(kind: str, folder: Path) -> list[Callback]:
    match kind:
        case "schedules":
            return [GradientAccumulationScheduler({0: 1, 1: 3})]
        case "monitors":
            return [ModelCheckpoint(folder / "monitored", monitor="val_loss", every_n_train_steps=4, save_top_k=2)]
        case "stops":
            return [Stops()]
    return []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--kind", default="", choices=["", "schedules", "monitors", "stops"])
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    link = read_link()
    folder = Path(link.run_dir if link else "/tmp") / "lightning"
    L.seed_everything(7, verbose=False)
    more = more_callbacks(asked.kind, folder)
    callbacks = [
        *more,
        Resilient(save_every={"steps": asked.save} if asked.save else None),
        ModelCheckpoint(folder, monitor="val_loss", save_top_k=2),
        EarlyStopping("val_loss", patience=50),
    ]
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=asked.epochs, callbacks=callbacks, logger=False,
        plugins=[ResilientPrecision()], accumulate_grad_batches=asked.accumulate, gradient_clip_val=0.5,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=1,
        min_steps=15 if asked.kind == "stops" else None,
    )  # fmt: skip
    train, validation = DataLoader(Data(100, 0), batch_size=5, shuffle=True), DataLoader(Data(20, 1000), batch_size=5)
    trainer.fit(Module(), train, validation)
    told = f"steps {trainer.global_step}, epochs {trainer.current_epoch}"
    if asked.kind == "monitors":
        told += f", best {[sorted(map(float, each.best_k_models.values())) for each in more]}"
    print(f"rank {trainer.global_rank} ends: {told}\n", end="", flush=True)


if __name__ == "__main__":
    main()
