"""A small GPT-2 with transformers' Trainer: dropout, clipping, a warm-up, targets of different numbers on the ranks,
evaluation and checkpoints of the Trainer's within each epoch, log lines.
"""

import argparse
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

from resilient_train.config import read_link
from resilient_train.integrations.transformers import ResilientTrainer


class Data(Dataset):
    """Random tokens; of each sample some are no targets."""

    def __init__(self, size: int, first: int) -> None:
        self.size, self.first = size, first

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.first + index)
        tokens = torch.randint(0, 64, (16,), generator=generator)
        labels = tokens.clone()
        labels[: int(torch.randint(0, 12, (), generator=generator))] = -100
        return {"input_ids": tokens, "labels": labels}


class Killed(ResilientTrainer):
    """Its rank 1 is killed in the second batch of the window behind the fourth update."""

    batches = 0
    """Of that window."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training and self.state.global_step == 4 and self.args.process_index == 1:
            self.batches += 1
            if self.batches == 2 and read_link().incarnation == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().compute_loss(*args, **kwargs)


class Logs(ResilientTrainer):
    """Its loss is logged where it is computed."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.model.training:
            self.log({"logged in the body": 1.0})
        return super().compute_loss(*args, **kwargs)


class Keeps(TrainerCallback, ExportableState):
    """Numbers as keys, and tuples: JSON makes text and lists of them. Or a set, which nobody carries."""

    def __init__(self, *, odd: bool) -> None:
        self.kept: Any = {} if not odd else {1}

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if isinstance(self.kept, dict):
            self.kept[state.global_step] = (state.global_step, 0.5)

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"kept": self.kept}}


KINDS = {
    "resilient": ResilientTrainer, "killed": Killed, "plain": Trainer, "logs": Logs, "keeps": ResilientTrainer,
    "odd": ResilientTrainer,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=int, default=0)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--eval-on-start", action="store_true")
    parser.add_argument("--kind", choices=KINDS, default="resilient")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    link = read_link()
    folder = Path(link.run_dir if link else "/tmp") / "transformers"
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=asked.epochs, per_device_train_batch_size=4,
        gradient_accumulation_steps=asked.accumulate, learning_rate=1e-2, warmup_steps=4, max_grad_norm=0.5,
        logging_steps=7, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5, save_total_limit=2,
        include_num_input_tokens_seen="all", report_to="none", disable_tqdm=True, log_level="error",
        eval_on_start=asked.eval_on_start,
    )  # fmt: skip
    set_seed(7)
    shape = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=asked.dropout, embd_pdrop=asked.dropout, attn_pdrop=asked.dropout,
    )  # fmt: skip
    ours = {"save_every": {"steps": asked.save}} if asked.save else {}
    keeps = Keeps(odd=asked.kind == "odd") if asked.kind in ("keeps", "odd") else None
    trainer = KINDS[asked.kind](
        GPT2LMHeadModel(shape),
        arguments,
        train_dataset=Data(80, 0),
        eval_dataset=Data(16, 1000),
        callbacks=[keeps] if keeps else None,
        **ours,
    )
    mean = trainer.train().training_loss
    state = trainer.state
    losses = [line["loss"] for line in state.log_history if "loss" in line]
    weights = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    told = f"steps {state.global_step}, tokens {state.num_input_tokens_seen}, losses {losses}, mean {mean}"
    told += f", lines {sum('logged in the body' in line for line in state.log_history)}, kept {keeps and keeps.kept}"
    print(f"rank {trainer.args.process_index} ends: {told}, weights {weights}\n", end="", flush=True)


if __name__ == "__main__":
    main()
