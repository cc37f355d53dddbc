"""How an agent gets its node's holder: the one that is there, or a new one."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from resilient_train.errors import HolderLostError
from resilient_train.launch.holder import GRACE_S
from resilient_train.state.vault.client import REPLY_TIMEOUT_S, Vault

_READY_TIMEOUT_S = 20.0
_RETRY_S = 0.01


def ensure_holder(
    run_dir: Path,
    *,
    node: int = 0,
    grace_s: float = GRACE_S,
    works: Mapping[str, str] | None = None,
    reply_timeout_s: float = REPLY_TIMEOUT_S,
) -> tuple[Vault, subprocess.Popen[bytes] | None]:
    """A connection, as a member, to the holder of this run and node; and its process, if it had to be started.

    The caller reaps that process some time. ``works`` maps names to ``MODULE:FUNCTION``, see ``state/vault/work.py``.
    A holder that is there keeps the grace time and the works that it was started with. Raises HolderLostError if none
    comes up.
    """
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        with contextlib.suppress(HolderLostError):
            return Vault.connect(run_dir, node=node, reply_timeout_s=reply_timeout_s), None
        process = _start(run_dir, node, grace_s, works or {})
        if process is not None:
            return Vault.connect(run_dir, node=node, reply_timeout_s=reply_timeout_s), process
        if time.monotonic() > deadline:
            raise HolderLostError(f"no holder of memory snapshots came up; see {_log(run_dir, node)}")
        time.sleep(_RETRY_S)  # another one is just coming up, or just ending: it holds the lock, and does not listen


def _start(run_dir: Path, node: int, grace_s: float, works: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """None: there is another one by now."""
    log = _log(run_dir, node)
    log.parent.mkdir(parents=True, exist_ok=True)
    readable, writable = os.pipe()
    command = [sys.executable, "-P", "-m", "resilient_train.launch.holder", str(run_dir), "--node", str(node)]
    command += ["--grace-s", str(grace_s), "--ready-fd", str(writable)]
    command += [f"--work={name}={place}" for name, place in works.items()]
    try:
        with log.open("ab") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=(writable,),
                start_new_session=True,
            )
    except BaseException:
        os.close(readable)
        raise
    finally:
        os.close(writable)
    try:
        ready = select.select([readable], [], [], _READY_TIMEOUT_S)[0] and os.read(readable, 1)
    finally:
        os.close(readable)
    if ready:
        return process
    process.kill()  # no more than what it was about to do itself, unless it hangs
    if process.wait() not in {0, -9}:
        raise HolderLostError(f"the holder of memory snapshots ended with code {process.returncode}; see {log}")
    return None


def _log(run_dir: Path, node: int) -> Path:
    return run_dir / "logs" / f"holder-{node}.log"
