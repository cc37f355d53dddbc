"""A step that is redone gets its batch as it was drawn, whatever its body has written into it."""

from typing import Any

import numpy as np
import pytest
import torch

from resilient_train.frameworks.torch import data
from resilient_train.session.kept_batches import KeptBatches
from resilient_train.session.loader import Batch


class Cursor:
    """Gives what it was given."""

    loader: Any = ()
    place = (0, 0)

    def __init__(self) -> None:
        self.value: Any = None

    def next(self) -> Batch:
        return Batch(self.value, 0)


class Pulse:
    def at(self, _: object) -> None:
        pass


class Job:
    def __init__(self) -> None:
        self.cursor = Cursor()
        self.kept = KeptBatches(self.cursor, data, Pulse(), lambda _: None)

    def draw(self, value: Any) -> Any:
        self.cursor.value = value
        assert self.kept.draw(0)
        return self.kept[0].batch.value

    def window(self, value: Any) -> bool:
        """A whole one. Returns whether a body was seen to write."""
        self.draw(value)
        return self.ends()

    def ends(self) -> bool:
        seen = self.kept.look()
        self.kept.forget()
        return seen


def by_torch(batch: Any) -> None:
    batch["x"].mul_(2)


def by_numpy(batch: Any) -> None:
    batch["x"].numpy()[:] *= 2


@pytest.mark.parametrize("how", [by_torch, by_numpy])
def test_a_batch_that_is_written_each_time(how: Any) -> None:
    job = Job()
    for turn in range(4):
        batch = job.draw({"x": torch.ones(8), "name": "a"})
        how(batch)
        for _ in range(2):
            assert job.kept.draw(0), "again"
            again = job.kept[0].batch.value
            assert torch.equal(again["x"], torch.ones(8))
            how(again)
        assert job.ends() == (turn == 0), "told once"
    assert job.kept.written


def test_a_batch_that_is_not_written_is_the_same_object() -> None:
    job = Job()
    for _ in range(4):
        batch = job.draw([torch.ones(8), np.ones(3), iter(())])
        assert job.kept.draw(0)
        assert job.kept[0].batch.value is batch
        assert not job.ends()


def test_a_batch_that_is_written_late_and_for_the_first_time_is_lost() -> None:
    job = Job()
    for _ in range(3):
        job.window([torch.ones(8)])
    job.draw([torch.ones(8)])[0].mul_(2)
    assert not job.kept.draw(0)
    assert job.ends(), "and from now on there is a copy"
    job.draw([torch.ones(8)])[0].mul_(2)
    assert job.kept.draw(0)
    assert torch.equal(job.kept[0].batch.value[0], torch.ones(8))


def test_a_batch_that_can_not_be_copied_and_is_written_is_lost() -> None:
    job = Job()
    batch = job.draw([torch.ones(8), (each for each in ())])
    batch[0].mul_(2)
    assert not job.kept.draw(0)
