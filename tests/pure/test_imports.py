"""What the zygote may import, which knows no rank: read from the script, nothing of it run."""

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resilient_train.config import (
    PER_RANK,
    Settings,
    read_settings,
    replace_environ,
    shared_environ,
    take_rank,
)
from resilient_train.errors import ConfigError
from resilient_train.launch.fork.environ_watch import ALL, EnvironWatch, noted
from resilient_train.launch.fork.imports import Script, Wanted, hidden, scan, script_of, target_of, uses_us


def write(folder: Path, **files: str) -> Script:
    for name, text in files.items():
        path = folder / (name.replace("__dot__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Script(script=str(folder / "train.py"))


def names(target: Script, folder: Path) -> list[str]:
    plan = scan(target, str(folder))
    assert not plan.refusal
    return [each.module for each in plan.imports]


def test_imports_at_the_top_are_found_in_their_order(tmp_path: Path) -> None:
    lines = (
        "from __future__ import annotations",
        "import json, email.message",
        "import torch as t",
        "from numpy import linalg, random as r",
        "from . import sibling",
        "from nowhere.at_all import thing",
    )
    assert scan(write(tmp_path, train="\n".join(lines)), str(tmp_path)).imports == (
        Wanted("json"),
        Wanted("email.message"),
        Wanted("torch"),
        Wanted("numpy", ("linalg", "random")),
    )


@pytest.mark.parametrize(
    "act",
    [
        "torch.set_default_dtype(torch.float64)",
        "sys.modules['apex'] = None",
        "torch.backends.mkldnn.enabled = False",
        "seed = random.seed(0)",
        "import patches",
        "with x: pass",
        "if True: import patches",
    ],
)
def test_what_stands_behind_an_act_is_the_forks_business(tmp_path: Path, act: str) -> None:
    """It may be there to change what is imported next."""
    patches = "import json\nimport torch\ntorch.nn.functional.gelu = None\nimport psutil\n"
    quiet = "import zlib\nLOG = getLogger('x')\n@dataclass\nclass C:\n    x: int = 1\n"
    lines = ['"""Trains."""', "import csv", "import quiet", "LIMIT: int = 3", "import torch", act, "import numpy"]
    folder = write(tmp_path, train="\n".join(lines), patches=patches, quiet=quiet)
    found = [each.module for each in scan(folder, str(tmp_path)).imports]
    assert found == ["csv", "zlib", "torch", *(["json"] if act == "import patches" else [])]


def test_what_is_not_at_the_top_is_left_alone(tmp_path: Path) -> None:
    target = write(tmp_path, train="import json\nif json:\n    import csv\ndef f():\n    import sqlite3\n")
    assert names(target, tmp_path) == ["json"]


def test_the_users_own_modules_are_read_and_never_imported(tmp_path: Path) -> None:
    target = write(
        tmp_path,
        train="from pack.deep import thing\nfrom flat import inner\nimport json\nimport mine\n",
        mine="import csv\nimport train\nraise SystemExit('it was run')\n",
        pack__dot____init__="import sqlite3\n",
        pack__dot__deep="import wave\n",
        flat__dot__inner="import zipapp\n",
    )
    assert sorted(names(target, tmp_path)) == ["csv", "json", "sqlite3", "wave", "zipapp"]
    assert "mine" not in sys.modules


def test_a_module(tmp_path: Path) -> None:
    write(
        tmp_path,
        pack__dot____init__="import csv\n",
        pack__dot____main__="import wave\n",
        pack__dot__run="import json\n",
    )
    assert names(Script(module="pack"), tmp_path) == ["csv", "wave"]
    assert names(Script(module="pack.run"), tmp_path) == ["csv", "json"]
    assert names(Script(module="not.there"), tmp_path) == []


def test_a_script_that_does_not_compile_is_the_ranks_business(tmp_path: Path) -> None:
    assert names(write(tmp_path, train="import json\ndef (\n"), tmp_path) == []


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch\n",
        "from os import environ\nenviron.setdefault('MKL_NUM_THREADS', '1')\n",
        "import os\ndef f():\n    os.environ.update(A='1')\n",
        "import os\nos.environ.update({'MASTER_ADDR': '::1', 'A': '1'})\n",
        "import os\nos.environ.update(given, MASTER_ADDR='::1')\n",
        "import os\ndel os.environ[name]\n",
        "import os\nos.environ |= {'A': '1'}\n",
        "import os\nos.putenv('A', '1')\n",
        "from dotenv import load_dotenv\nload_dotenv()\n",
    ],
)
def test_a_script_that_sets_variables_gets_no_standby(tmp_path: Path, text: str) -> None:
    assert "sets environment variables" in scan(write(tmp_path, train=text), str(tmp_path)).refusal
    nested = write(tmp_path, train="import mine\n", mine=text)
    assert f"{tmp_path}/mine.py:" in scan(nested, str(tmp_path)).refusal


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ.setdefault('MASTER_ADDR', '::1')\n",
        "import os\nos.environ['NCCL_DEBUG'] = 'INFO'\n",
        "import os\nos.environ.update(MASTER_ADDR='::1', MASTER_PORT='1')\nos.environ.update({'NCCL_DEBUG': 'INFO'})\n",
        "import os\nrank = os.environ['RANK'], os.environ.get('HOME'), os.environ.pop('RANK')\n",
    ],
)
def test_variables_that_are_read_late_may_be_set(tmp_path: Path, text: str) -> None:
    assert names(write(tmp_path, train=text), tmp_path) == ["os"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("sys.path.insert(0, 'x')", []),
        ("sys.path = ['x']", []),
        ("sys.path[:0] = ['x']", []),
        ("sys.path.append('x')", ["sys", "json"]),
    ],
)
def test_a_moved_search_path(tmp_path: Path, text: str, found: list[str]) -> None:
    assert names(write(tmp_path, train=f"import sys\n{text}\nimport json\n"), tmp_path) == found


def test_a_file_that_hides_a_module(tmp_path: Path) -> None:
    (tmp_path / "csv").mkdir()  # a folder hides nothing
    write(tmp_path, os="", encodings="", pathless="")  # nor what every interpreter imports first
    assert hidden(str(tmp_path)) == ""
    (tmp_path / "json.py").touch()
    assert hidden(str(tmp_path)) == f"{tmp_path}/json.py hides the module 'json'"
    assert hidden("") == ""


def test_commands_that_can_be_followed(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    Path(script).touch()
    python = (sys.executable, "-u")
    assert target_of((*python, script, "-m", "x")) == Script(script=script, arguments=("-m", "x"))
    assert target_of((*python, "-m", "pack.run", "--steps")) == Script(module="pack.run", arguments=("--steps",))
    for command in (
        (),
        ("/bin/sh", "x"),
        (sys.executable, script),
        (*python, "-X", "dev", script),
        (*python, "-c", "1"),
    ):
        assert isinstance(target_of(command), str), command
    for other in (str(tmp_path), str(tmp_path / "none.py"), str(tmp_path / "train.zip")):
        assert "not a Python source" in str(target_of((*python, other)))


def test_what_a_command_is_does_not_change_when_its_file_goes(tmp_path: Path) -> None:
    gone = (sys.executable, "-u", str(tmp_path / "none.py"), "x")
    assert script_of(gone) == Script(script=gone[2], arguments=("x",))
    for command in (("bash", "none.py"), (sys.executable, "-u", str(tmp_path / "train.zip"))):
        assert isinstance(script_of(command), str), command


def test_the_ranks_own_variables() -> None:
    environ = dict.fromkeys([*PER_RANK, "OMP_NUM_THREADS", "WORLD_SIZE"], "1")
    assert set(shared_environ(environ)) == {"OMP_NUM_THREADS", "WORLD_SIZE"}


def test_reads_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with noted(PER_RANK) as found:
        assert os.environ.get("RANK", "") == os.environ.get("RANK", "")
        assert "LOCAL_RANK" in os.environ
        assert os.environ["HOME"]
    assert found == {"RANK", "LOCAL_RANK"}
    assert os.getenv("ROLE_RANK") is None
    assert found == {"RANK", "LOCAL_RANK"}


@pytest.mark.parametrize("take", [lambda: dict(os.environ), os.environ.copy, lambda: {**os.environ}])
def test_a_copy_holds_the_ranks_variables_too(take: Callable[[], object]) -> None:
    with noted(PER_RANK) as found:
        take()
    assert found == {ALL}


def test_a_copy_for_a_program_is_kept_by_nobody() -> None:
    with noted(PER_RANK) as found:
        ctypes.util.find_library("m")
    assert found == set()


def test_the_environment_is_replaced() -> None:
    before = dict(os.environ)
    try:
        replace_environ({"ONE": "1"})
        assert dict(os.environ) == {"ONE": "1"}
    finally:
        replace_environ(before)


def test_every_use_of_a_variable_is_seen_before_it_happens() -> None:
    class Stopped(BaseException):
        pass

    def used(name: str) -> None:
        seen.append(name)
        raise Stopped

    uses: dict[str, Callable[[], object]] = {
        "RANK": lambda: os.environ["RANK"],
        "LOCAL_RANK": lambda: os.environ.setdefault("LOCAL_RANK", "0"),
        "ROLE_RANK": lambda: os.environb.get(b"ROLE_RANK"),
        "RESILIENT_AGENT": lambda: os.environ.pop("RESILIENT_AGENT", None),
        "RESILIENT_JOINING": lambda: os.environ.update(RESILIENT_JOINING="1"),
        "all variables": lambda: {**os.environ},
    }
    seen: list[str] = []
    watch = EnvironWatch(PER_RANK, used)
    watch.begin()
    try:
        for use in [*uses.values(), lambda: list(os.environ.items()), lambda: repr(os.environ), os.environ.copy]:
            with pytest.raises(Stopped):
                use()
        assert os.environ["PATH"] == os.getenv("PATH"), "others may be used"
    finally:
        watch.end()
    assert seen == [*uses, *["all variables"] * 3]
    assert type(os.environ) is type(os.environb)
    assert "RANK" not in os.environ


def test_a_rank_is_taken_over_and_what_the_script_has_set_is_kept() -> None:
    before = dict(os.environ)
    try:
        os.environ.update(OMP_NUM_THREADS="5", ROLE_RANK="7")
        take_rank({"RANK": "2", "OMP_NUM_THREADS": "1"})
        found = {name: os.environ.get(name) for name in ("RANK", "OMP_NUM_THREADS", "ROLE_RANK")}
        assert found == {"RANK": "2", "OMP_NUM_THREADS": "5", "ROLE_RANK": None}
    finally:
        replace_environ(before)


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("STANDBY", "-1", "0 or more"),
        ("STANDBY_DEPTH", "build", "did you mean 'built'"),
        ("STANDBY_DEPTH", "deep", "write forked, built"),
        ("STANDBY_LIMIT_S", "0", "above 0"),
    ],
)
def test_settings(variable: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_settings({f"RESILIENT_{variable}": value})
    assert Settings().standby == 1


USES_US = {
    "itself": {"train": "import resilient_train as rt"},
    "a part": {"train": "from resilient_train.testing import drill"},
    "in a function": {"train": "def main():\n    import resilient_train"},
    "if it is there": {"train": "try:\n    import resilient_train\nexcept ImportError:\n    pass"},
    "in a module": {
        "train": "from jobs.loop import run",
        "jobs__dot____init__": "",
        "jobs__dot__loop": "from . import inner",
        "jobs__dot__inner": "import resilient_train",
    },
    "called late": {"train": "def main():\n    import loop", "loop": "import resilient_train"},
    "sets variables": {"train": "import os, loop\nos.environ['X'] = '1'", "loop": "import resilient_train"},
}


@pytest.mark.parametrize("files", USES_US.values(), ids=USES_US)
def test_a_script_that_uses_this_library(files: dict[str, str], tmp_path: Path) -> None:
    assert uses_us(write(tmp_path, **files))


@pytest.mark.parametrize(
    "text", ["import torch", "# import resilient_train", "name = 'resilient_train'", "def f(:\n", "(" * 5000]
)
def test_a_script_that_does_not(text: str, tmp_path: Path) -> None:
    assert not uses_us(write(tmp_path, train=text, other="import resilient_train"))
    assert not uses_us("the ranks do not run a script")


def test_a_module_of_a_package_that_uses_this_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, pkg__dot____init__="", pkg__dot____main__="from .deep import run",
          pkg__dot__deep__dot____init__="from ..other import x", pkg__dot__other="import resilient_train")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert uses_us(Script(module="pkg"))


@pytest.mark.parametrize(
    ("act", "told"),
    [
        ("pass", ""),
        *(
            (
                f"sys.modules['{name}'] = Namespace(is_initialized=lambda: True)",
                f"initialises {kind} devices",
            )
            for kind, name in (("cuda", "torch.cuda"), ("xpu", "torch.xpu"), ("npu", "torch_npu.npu"))
        ),
        ("sys.modules['torch.cuda'] = Namespace(is_initialized=lambda: False)", ""),
        ("held = open('/dev/full', 'wb')", "opens the device /dev/full"),
    ],
)
def test_what_forks_could_not_live_with(act: str, told: str) -> None:
    """A fork has a device's context, and can't use it."""
    imports = (
        "import sys; from types import SimpleNamespace as Namespace; from resilient_train.launch.fork import zygote"
    )
    script = f"{imports}\n{act}\nprint(zygote._unfit_for_forks())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == told
