"""transformers' Trainer under faults: the bits of the undisturbed run; and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from trained import (
    EVERYWHERE,
    IN_WINDOWS,
    assert_mended,
    assert_repaired,
    assert_resumed,
    assert_same,
    assert_started_again,
    ends,
    train,
)
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from resilient_train.errors import ConfigError, UsageError
from resilient_train.integrations.transformers import ResilientTrainer

JOB = "with_transformers.py"
BEHIND_THE_LAST = "; kill rank=1 step=29 phase=APPLIED at=end incarnation=2"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("accumulate", "plan"), [(1, EVERYWHERE + BEHIND_THE_LAST), (3, IN_WINDOWS)])
def test_trainer(tmp_path: Path, accumulate: int, plan: str) -> None:
    """With evaluations and the Trainer's checkpoints between the updates, also where a rank was lost right before."""
    assert_repaired(tmp_path, JOB, "--accumulate", str(accumulate), plan=plan)


@pytest.mark.timeout(1200)
def test_killed_in_the_second_batch_of_a_window(tmp_path: Path) -> None:
    quiet = train(tmp_path / "quiet", JOB, "--accumulate", "3")
    run = train(tmp_path / "run", JOB, "--accumulate", "3", "--kind", "killed")
    assert run.recoveries() == 1, run.explain()
    assert_same(run, quiet)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("accumulate", ["1", "3"])
def test_the_bits_are_those_of_the_plain_trainer(tmp_path: Path, accumulate: str) -> None:
    """Without dropout: the loop's random numbers and those of the updates are two streams."""
    arguments = (JOB, "--accumulate", accumulate, "--dropout", "0")
    plain = train(tmp_path / "plain", *arguments, "--kind", "plain")
    assert ends(train(tmp_path / "run", *arguments)) == ends(plain)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["logs", "keeps"])
def test_lines_of_bodies_and_attributes_of_callbacks(tmp_path: Path, kind: str) -> None:
    """A line that a body logs is there once; what JSON would change is the same in a new process."""
    plan = "hcce rank=1 step=5; kill rank=1 step=12 phase=COMPUTE at=backward"
    assert_repaired(tmp_path, JOB, "--kind", kind, plan=plan)


@pytest.mark.timeout(1200)
def test_an_attribute_that_cannot_be_carried_is_named(tmp_path: Path) -> None:
    run = train(tmp_path / "run", JOB, "--kind", "odd", code=2)
    assert "Keeps.kept' is a set, which cannot be carried" in run.err


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_devices_that_compute_wrongly(tmp_path: Path, accumulate: int) -> None:
    assert_mended(tmp_path, JOB, "--accumulate", str(accumulate))


@pytest.mark.timeout(1200)
def test_all_ranks_lost(tmp_path: Path) -> None:
    assert_started_again(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_a_job_that_ended_is_started_again(tmp_path: Path) -> None:
    assert_resumed(tmp_path, JOB)


@pytest.mark.timeout(1200)
def test_a_refusal_ends_the_job(tmp_path: Path) -> None:
    run = train(tmp_path / "run", JOB, "--eval-on-start", code=2)
    (end,) = run.of("job_end")
    assert end["detail"]["reason"].count("transformers: TrainingArguments(eval_on_start=...) is not supported") == 1


class Data(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= len(self):
            raise IndexError(index)  # who iterates ends here
        tokens = torch.arange(4) + index
        return {"input_ids": tokens, "labels": tokens}


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        return iter([Data()[0]] * 8)


class Gradients(TrainerCallback):
    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        pass


class Stops(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


class InFront(ResilientTrainer):
    def training_step(self, *args: Any) -> torch.Tensor:
        return super().training_step(*args)


class Behind(Trainer):
    def training_step(self, *args: Any) -> torch.Tensor:
        return super().training_step(*args)


class AnotherLoop(Trainer):
    def _run_epoch(self, **where: Any) -> None:
        super()._run_epoch(**where)


class ResilientBehind(ResilientTrainer, Behind):
    pass


class ResilientLoop(ResilientTrainer, AnotherLoop):
    pass


def trainer(
    folder: Path, kind: type = ResilientTrainer, data: Any = None, callbacks: Any = None, ours: Any = None, **named: Any
) -> Any:
    shape = GPT2Config(vocab_size=16, n_positions=4, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, max_steps=2, report_to="none", **named)
    return kind(GPT2LMHeadModel(shape), arguments, train_dataset=data or Data(), callbacks=callbacks, **(ours or {}))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("push_to_hub", {"push_to_hub": True}),
        ("torch_compile", {"torch_compile": True}),
        ("ignore_data_skip", {"ignore_data_skip": True}),
        ("eval_on_start", {"eval_on_start": True}),
        ("enable_jit_checkpoint", {"enable_jit_checkpoint": True}),
        ("metric_for_best_model", {"metric_for_best_model": "loss"}),
        ("metric_for_best_model", {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}),
        ("updates within the backward pass", {"optim": "lomo"}),
        ("InFront.training_step hides ResilientTrainer's", {"kind": InFront}),
        ("AnotherLoop has a _run_epoch of its own", {"kind": ResilientLoop}),
        ("'trainer' is the integration's own", {"ours": {"state": {"trainer": torch.Generator()}}}),
    ],
)
def test_what_is_refused_when_it_is_built(tmp_path: Path, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **options)


@pytest.mark.parametrize(
    ("words", "options", "arguments"),
    [
        ("Gradients has on_pre_optimizer_step", {"callbacks": [Gradients()]}, {}),
        ("the order of a RandomSampler", {"accelerator_config": {"use_seedable_sampler": False}}, {}),
        ("the order of a LengthGroupedSampler", {"train_sampling_strategy": "group_by_length"}, {}),
        ("without a length", {"data": Endless(), "accelerator_config": {"dispatch_batches": False}}, {}),
        ("dispatch_batches", {"accelerator_config": {"dispatch_batches": True}}, {}),
        ("resume_from_checkpoint", {}, {"resume_from_checkpoint": "a folder"}),
    ],
)
def test_what_is_refused_when_it_trains(
    tmp_path: Path, words: str, options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, **options).train(**arguments)


def test_a_window_that_is_left_in_its_middle(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[Stops()], gradient_accumulation_steps=2, per_device_train_batch_size=2)
    with pytest.raises(UsageError, match="a callback has stopped the loop in the middle of a window"):
        run.train()


@pytest.mark.parametrize("kind", [ResilientTrainer, ResilientBehind])
def test_without_an_agent_it_is_a_trainer(tmp_path: Path, kind: type) -> None:
    run = trainer(tmp_path, kind)
    run.train()
    assert run.state.global_step == 2
