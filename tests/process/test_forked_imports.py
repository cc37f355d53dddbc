"""What an installed module does when it is imported is in a fork what it is in a new interpreter."""

import os
import sysconfig
from pathlib import Path

import pytest
from running import Run, launch

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


def said(folder: Path, library: str, script: str, *flags: str) -> tuple[list[str], Run]:
    """What both ranks write with ``say(text)``, in the order of ranks, in a job that has ``library`` installed."""
    installed = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(folder)}))
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "lib.py").write_text(library)
    say = f"def say(text):\n    open({str(folder)!r} + '/' + os.environ['RANK'], 'w').write(str(text))\n"
    (folder / "script.py").write_text(script.replace("def say()", say))
    environ = {"PYTHONUSERBASE": str(folder), "PYTHONPATH": str(installed)}
    run = launch(folder / f"run{len(flags)}", folder / "script.py", ranks=2, flags=flags, **environ)
    assert run.code == 0, run.explain()
    return [(folder / str(rank)).read_text() for rank in range(2)], run


SCRIPTS = {
    "the module keeps a copy of all variables": (COPIES, "import os\nimport lib\ndef say()\nsay(lib.rank())\n"),
    "the script sets the default type above": (
        SCALE,
        "import os, torch\ntorch.set_default_dtype(torch.float64)\nimport lib\ndef say()\nsay(lib.SCALE.dtype)\n",
    ),
    "the module sets a variable": (SETS, "import os\nimport lib\ndef say()\nsay(lib.home())\n"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_fork_is_as_a_new_interpreter(tmp_path: Path, name: str) -> None:
    library, script = SCRIPTS[name]
    assert "LIB_HOME" not in os.environ
    cold, _ = said(tmp_path, library, script, "--standby", "0")
    forked, run = said(tmp_path, library, script)
    assert [event["detail"]["start"] for event in run.of("spawned")] == ["forked"] * 2, run.explain()
    assert forked == cold
