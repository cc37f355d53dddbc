"""Wrong commands: one line, exit code 2, nothing started."""

from pathlib import Path

import pytest
from running import LAUNCHER, start

from bad_inputs import BAD, Bad, complaint, words_of
from resilient_train.launch.cli.tool import main


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_one_line_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise SystemExit('started')\n")
    (tmp_path / "file").write_text("text\n")
    (tmp_path / "empty").mkdir()
    words = words_of(bad, {"SCRIPT": "script.py", "FILE": "file", "EMPTY": "empty"})
    if words[0] == "resilient-train":
        code = main(words[1:])
        out, err = capsys.readouterr()
    else:
        with start([*LAUNCHER, *words[1:]], **bad.environ) as process:
            out, err = process.communicate(timeout=60)
        code = process.returncode
    assert complaint(code, out, err, bad) == ""
