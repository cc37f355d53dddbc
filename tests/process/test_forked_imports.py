"""What an installed module does when it is imported is in a fork what it is in a new interpreter."""

import os
import sysconfig
from pathlib import Path

import pytest
from running import launch
from served import changed

COPIES = """
import os
ENV = dict(os.environ)

def rank():
    return int(ENV.get("RANK", 0))
"""
SETS = """
import os
os.environ.setdefault("LIB_HOME", "/x")

def home():
    return os.environ["LIB_HOME"]
"""
SCALE = """
import torch
SCALE = torch.tensor(0.1)
"""


SCRIPT = """
import os, torch
import copies
import sets
torch.set_default_dtype(torch.float64)
import scale
with open(f"{FOLDER}/{os.environ['RANK']}", "w") as file:
    file.write(f"{copies.rank()} {sets.home()} {scale.SCALE.dtype}")
"""


def said(folder: Path, *, forked: bool) -> list[str]:
    """What both ranks write, in their order, in a job that has those modules installed."""
    installed = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(folder)}))
    installed.mkdir(parents=True)
    for name, text in (("copies", COPIES), ("sets", SETS), ("scale", SCALE)):
        (installed / f"{name}.py").write_text(text)
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("{FOLDER}", str(folder)))
    if forked:
        with changed(code=f"import site, sys; site.USER_SITE = {str(installed)!r}; sys.path.append(site.USER_SITE)"):
            run = launch(folder / "run", script, ranks=2)
    else:
        environ = {"PYTHONUSERBASE": str(folder), "PYTHONPATH": str(installed)}
        run = launch(folder / "run", script, ranks=2, flags=("--standby", "0"), **environ)
    assert run.code == 0, run.explain()
    assert [event["detail"]["start"] for event in run.of("spawned")] == ["forked" if forked else "cold"] * 2
    return [(folder / str(rank)).read_text() for rank in range(2)]


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_fork_is_as_a_new_interpreter(tmp_path: Path, forked: bool) -> None:
    """A module that keeps a copy of all variables, one that sets a variable, and one that is imported below the line
    that sets the default type.
    """
    assert "LIB_HOME" not in os.environ
    assert said(tmp_path, forked=forked) == [f"{rank} /x torch.float64" for rank in range(2)]
