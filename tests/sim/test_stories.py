"""The stories in ``tests/stories`` go as they are written down. What is other now: ``python tests/sim/stories.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

import stories


@pytest.mark.parametrize("path", stories.stories(), ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_told(path: Path) -> None:
    text = path.read_text()
    assert stories.told(stories.read(text)) == text


def test_there_are_twenty() -> None:
    assert len(list(stories.stories())) >= 20
