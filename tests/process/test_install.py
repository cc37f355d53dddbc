"""``pip install resilient-train`` and nothing else: an environment without torch, and with another one.

Every day with links to what is installed here, of this package and of those that it asks for; else with a real wheel,
and packages from where pip is configured to look.
"""

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from running import JOBS, LAUNCHER, start
from saved_jobs import wait_for

from pure import checkpoint_rig
from pure.stories import whole_run, write

ROOT = Path(__file__).parents[2]
NO_TORCH = "torch is not installed: pip install torch==2.13.0"


def run(command: list[str | Path], cwd: Path, *, code: int) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENT_", "PYTHON"))}
    done = subprocess.run(command, cwd=cwd, env=plain, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, (command, done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def needed(name: str, known: set[str]) -> set[str]:
    """Adds the distribution and what it asks for to ``known``, without extras."""
    known.add(name)
    for each in map(Requirement, distribution(name).requires or ()):
        if each.name not in known and (each.marker is None or each.marker.evaluate({"extra": ""})):
            needed(each.name, known)
    return known


def link_packages(folder: Path) -> Path:
    """An environment with links to what this one has. Its commands are those of here."""
    run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], folder, code=0)
    (packages,) = (folder / "venv/lib").glob("python*/site-packages")
    for name in needed("resilient_train", set()):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(found.locate_file(top).resolve())
    commands = folder / "venv/bin"
    for command in ("resilient-train", "resilient-run"):
        _, _, rest = Path(sys.executable).with_name(command).read_text().partition("\n")
        (commands / command).write_text(f"#!{commands}/python\n{rest}")
        (commands / command).chmod(0o755)
    return commands


def install_wheel(folder: Path) -> Path:
    tools = os.path.relpath(Path(sys.executable).parent, ROOT)
    run(["make", "-s", "-o", "setup", "wheel", f"WHEEL={folder}", f"BIN={tools}"], ROOT, code=0)
    (wheel,) = folder.glob("*.whl")
    run([sys.executable, "-m", "venv", folder / "venv"], folder, code=0)
    run([folder / "venv/bin/pip", "install", "-q", "--disable-pip-version-check", wheel], folder, code=0)
    return folder / "venv/bin"


@pytest.fixture(scope="module", params=["links", pytest.param("wheel", marks=pytest.mark.long)])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with this package and what it depends on."""
    make = {"links": link_packages, "wheel": install_wheel}[request.param]
    return make(tmp_path_factory.mktemp(request.param))


def test_without_torch(installed: Path, tmp_path: Path) -> None:
    """What needs no torch works; what does says so in one line."""
    tool, launcher = installed / "resilient-train", installed / "resilient-run"
    for command in (tool, launcher):
        assert run([command, "--version"], tmp_path, code=0).stdout.startswith("resilient_train 0.1.0, torch not inst")
    doctor = json.loads(run([tool, "doctor", "--json"], tmp_path, code=1).stdout)
    assert [each["text"] for each in doctor["findings"] if each["grade"] == "problem"] == [NO_TORCH]
    for refused in ([launcher, "train.py"], [tool, "demo"], [tool, "drill", "--", "train.py"]):
        assert run(refused, tmp_path, code=2).stderr == f"{Path(refused[0]).name}: {NO_TORCH}\n"
    over = write(tmp_path / "over", whole_run())
    assert "rank 2 lost" in run([tool, "report", over], tmp_path, code=0).stdout
    checkpoint_rig.write(over / "checkpoints", 3)
    assert "step_3: complete" in run([tool, "verify", over], tmp_path, code=0).stdout
    job = [*LAUNCHER, "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), str(JOBS / "train.py")]
    with start([*job, "--steps", "100000", "--pace", str(tmp_path / "never")]) as process:
        wait_for(tmp_path / "run", process, "started")
        status = json.loads(run([tool, "status", tmp_path / "run", "--json"], tmp_path, code=0).stdout)
        assert len(status["ranks"]) == 2


def test_mindspores_libraries_are_there_and_hide_no_mindio(installed: Path, tmp_path: Path) -> None:
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    assert not list(packages.glob("mindio*"))
    looks = """
import ctypes, resilient_train.integrations.mindio.finder as finder
finder.install()
import mindio_ttp
for each in ("framework_ttp/libttp_framework.so", "mindspore_api/libttp_c_api.so"):
    library = ctypes.CDLL(f"{mindio_ttp.__path__[0]}/{each}")
print(library.MindioTtpSetOptimStatusFinished(1))
"""
    assert run([installed / "python", "-c", looks], tmp_path, code=0).stdout == "2\n"


def test_with_another_torch(installed: Path, tmp_path: Path) -> None:
    """One that nobody has tried is refused where the job begins."""
    (packages,) = (installed.parent / "lib").glob("python*/site-packages")
    (packages / "torch").mkdir()
    (packages / "torch/__init__.py").write_text("__version__ = '2.12.1'\n")
    (packages / "torch-2.12.1.dist-info").mkdir()
    (packages / "torch-2.12.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.1\n")
    told = "torch 2.12.1 is installed, and recoveries need 2.13, 2.14 or 2.15, whose internals they use: "
    told += "pip install torch==2.13.0"
    assert told in run([installed / "resilient-train", "doctor"], tmp_path, code=1).stdout
    refused = run([installed / "resilient-run", "train.py"], tmp_path, code=2).stderr
    assert refused.startswith(f"resilient-run: {told}")
    assert refused.count("\n") == 1
