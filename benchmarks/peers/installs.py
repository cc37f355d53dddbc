"""The peers' own virtual environments, outside the repository: made when a benchmark first needs one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

VENVS = Path("~/.cache/resilient_train_peers").expanduser()
REQUIREMENTS = {"torchft": "torchft==0.2.0", "nvrx": "nvidia-resiliency-ext==0.4.1"}
_CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
_LIMIT_S = 900


def python_of(peer: str, venvs: Path) -> str:
    """The interpreter of a peer's environment. Raises CalledProcessError if it cannot be made.

    torch has the version that the project itself is tested with; without it pip might fetch another, with CUDA.
    """
    home = venvs / peer
    python = home / "bin" / "python"
    done = home / f"{REQUIREMENTS[peer]}.done"
    if not done.exists():
        print(f"installing {REQUIREMENTS[peer]} into {home} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=_LIMIT_S)
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(_CONSTRAINTS)]
        subprocess.run([*install, "torch", "numpy", REQUIREMENTS[peer]], check=True, timeout=_LIMIT_S)
        done.touch()
    return str(python)
