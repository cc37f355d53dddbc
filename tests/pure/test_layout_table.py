"""``docs/reference/layouts.md`` is what the tests show."""

import subprocess
import sys

import pytest

from layout_table import PAGE, ROOT

pytestmark = pytest.mark.torch


def test_the_page_is_what_the_tests_show() -> None:
    # In a process of its own: to collect tests is to import them.
    command = "from layout_table import collected, page; print(page(collected()), end='')"
    done = subprocess.run(
        [sys.executable, "-c", command], cwd=ROOT / "tests", capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == PAGE.read_text(), "run `python tests/layout_table.py`"
