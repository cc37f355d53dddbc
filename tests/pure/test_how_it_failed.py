"""Why a rank failed, read from the end of its log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilient_train.launch.agent.how_it_failed import how_it_failed

IN_HANDLER = "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise RuntimeError('second')"
IN_JSON = "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
SCRIPTS = {
    "raise ValueError('bad sample 12')": "ValueError: bad sample 12 (train.py:1)",
    "raise ValueError('two\\nlines')": "ValueError: two (train.py:1)",
    "def f():\n    return {}['key']\nf()": "KeyError: 'key' (train.py:2)",
    "import json\njson.loads('nonsense')": f"json.decoder.{IN_JSON} (train.py:2)",
    f"{IN_HANDLER} from None": "RuntimeError: second (train.py:4)",
    IN_HANDLER: "RuntimeError: second (train.py:4)",
    "import atexit\natexit.register(lambda: 1 / 0)\nraise ValueError('first')": "ValueError: first (train.py:3)",
    "class A:\n    def __del__(self):\n        1 / 0\na = A()\nraise ValueError('1st')": "ValueError: 1st (train.py:5)",
    "x = (": "SyntaxError: '(' was never closed (train.py:1)",
    "raise ValueError": "ValueError (train.py:1)",
    "raise ValueError('w ' * 400)": " w ... (train.py:1)",
}
BEFORE = 'Traceback (most recent call last):\n  File "other.py", line 3, in f\nOldError: handled\n'


def log_of(tmp_path: Path, script: str, *, before: str = "") -> tuple[Path, int]:
    """A script's standard error, as the agent has it, and its exit code."""
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, check=False)
    log = tmp_path / "0.err"
    log.write_text(before + done.stderr)
    return log, done.returncode


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_exception_that_ended_it(tmp_path: Path, script: str) -> None:
    log, code = log_of(tmp_path, script, before=BEFORE)
    told = how_it_failed(log, code)
    assert told.startswith(": ")
    assert told.endswith(f"{SCRIPTS[script]}; its traceback: {log}"), told
    assert len(told) < 520 + len(str(log))


def test_with_the_prefix_of_torch(tmp_path: Path) -> None:
    log, code = log_of(tmp_path, "raise ValueError('mine')")
    log.write_text("".join(f"[rank12]: {line}\n" for line in log.read_text().splitlines()))
    assert how_it_failed(log, code).startswith(": ValueError: mine (train.py:1);")


@pytest.mark.parametrize(
    "script", ["import sys; sys.exit(3)", "import sys; sys.exit('text')", "import os; os._exit(1)"]
)
def test_without_a_traceback_the_code_is_told(tmp_path: Path, script: str) -> None:
    log, code = log_of(tmp_path, script)
    assert code == (3 if "3" in script else 1)
    assert how_it_failed(log, code) == f" with exit code {code}; its log: {log}"


def test_one_that_failed_first_and_has_not_ended_yet(tmp_path: Path) -> None:
    for name, script in (
        ("one", "raise RuntimeError('Connection closed by peer')"),
        ("two", "raise ValueError('mine')"),
    ):
        (tmp_path / name).mkdir()
        log_of(tmp_path / name, script)
    first, other = tmp_path / "one/0.err", tmp_path / "two/0.err"
    told = how_it_failed(first, 1, {1: other, 2: first, 3: tmp_path / "none"})
    assert told == (
        f": RuntimeError: Connection closed by peer (train.py:1); its traceback: {first}"
        "; rank 1 ends with ValueError: mine (train.py:1)"
    )


def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    log = tmp_path / "none"
    assert how_it_failed(log, 1) == f" with exit code 1; its log: {log}"
