"""The stories in ``tests/stories`` go as they are written down. What is other now: ``python tests/sim/stories.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("stories", Path(__file__).with_name("stories.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
module = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = module
_SPEC.loader.exec_module(module)


@pytest.mark.parametrize("path", module.stories(), ids=lambda path: path.stem)
def test_a_story_goes_as_it_is_told(path: Path) -> None:
    text = path.read_text()
    assert module.told(module.read(text)) == text


def test_there_are_twenty() -> None:
    assert len(list(module.stories())) >= 20
