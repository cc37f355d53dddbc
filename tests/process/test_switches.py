"""``MS_ENABLE_TFT`` on its way to the ranks."""

from pathlib import Path

import pytest

from process.running import launch

TELLS = """
import os

print("given", os.environ.get("MS_ENABLE_TFT"))
"""
USES_MINDSPORE = """
def never():
    import mindspore
"""


@pytest.mark.parametrize("standby", ["0", "1"])
def test_ranks_get_the_normal_form_and_no_torch_user_hears_of_it(tmp_path: Path, standby: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    flags = ("--standby", standby)
    run = launch(tmp_path / "run", script, ranks=2, flags=flags, MS_ENABLE_TFT="{ 'ARF' : 1 HCCE:1}")
    assert run.code == 0, run.explain()
    assert run.out.count("given {TTP:1,HCCE:1,ARF:1}") == 2, run.explain()
    assert "MindSpore" not in run.err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "{ ARF : 1 , HCCE:1 }",
            "Python code would switch on HCCE, its C++ code HCCE, ARF; the ranks get {TTP:1,HCCE:1,ARF:1}",
        ),
        ("{TTP:1, HCCE:1,ARF:1}", ""),
    ],
)
def test_a_script_with_mindspore_is_told_where_it_had_meant_something_else(
    tmp_path: Path, text: str, told: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS + USES_MINDSPORE)
    run = launch(tmp_path / "run", script, ranks=1, MS_ENABLE_TFT=text)
    assert run.code == 0, run.explain()
    assert "given {TTP:1,HCCE:1,ARF:1}" in run.out
    assert told in run.err
    assert run.err.count("MS_ENABLE_TFT: as it stands") == bool(told), run.explain()


def test_what_is_not_set_stays_so(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    run = launch(tmp_path / "run", script, ranks=1)
    assert "given None" in run.out, run.explain()
