"""A small GPT-2 with transformers' Trainer: dropout, clipping, a warm-up, targets of different numbers on the ranks,
evaluation, early stopping and a checkpoint of the Trainer's within each epoch, log lines.
"""

import argparse
import warnings
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--save", type=int, default=0)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    link = read_link()
    folder = Path(link.run_dir if link else "/tmp") / "transformers"
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, num_train_epochs=asked.epochs, per_device_train_batch_size=4,
        gradient_accumulation_steps=asked.accumulate, learning_rate=1e-2, warmup_steps=4, max_grad_norm=0.5,
        logging_steps=3, eval_strategy="steps", eval_steps=5, save_strategy="steps", save_steps=5, save_total_limit=2,
        load_best_model_at_end=True, include_num_input_tokens_seen="all", report_to="none", disable_tqdm=True,
        log_level="error",
    )  # fmt: skip
    shape = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    trainer = ResilientTrainer(
        GPT2LMHeadModel(shape), arguments, train_dataset=Data(80, 0), eval_dataset=Data(16, 1000),
        callbacks=[EarlyStoppingCallback(50)], save_every={"steps": asked.save} if asked.save else None,
    )  # fmt: skip
    trainer.train()
    state = trainer.state
    losses = [line["loss"] for line in state.log_history if "loss" in line]
    told = f"steps {state.global_step}, tokens {state.num_input_tokens_seen}, work {state.total_flos:.0f}"
    print(f"rank {trainer.args.process_index} ends: {told}, losses {losses}", flush=True)


if __name__ == "__main__":
    main()
