"""How an agent gets its node's holder: the one that is there, or a new one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from resilient_train.errors import HolderLostError, HolderSilentError, VaultError
from resilient_train.state.vault.client import REPLY_TIMEOUT_S, Vault
from resilient_train.state.vault.holder import GRACE_S

_READY_TIMEOUT_S = 20.0
_AGAIN_S = 30.0
_GIVEN_UP_S = 3600.0
"""Then the ranks save nothing any more. Until then each tells of each snapshot that it leaves out, in an event."""
_RETRY_S = 0.02
_RETRY_MAX_S = 1.0

Found = tuple[Vault, "subprocess.Popen[bytes] | None"]


class HolderSearch:
    """Where no holder comes up, since the machine is at its end, one may later. Ranks wait for the answer, and ask at
    each step: so it is looked for now and then, and with patience for the first time only.
    """

    def __init__(self, run_dir: Path, works: Mapping[str, str], reply_timeout_s: float) -> None:
        self._run_dir = run_dir
        self._works = works
        self._reply_timeout_s = reply_timeout_s
        self._missing = ""
        """Why there was none when one was looked for last; empty: there was."""
        self._since_s = self._again_s = 0.0

    async def look(self) -> Found:
        """Raises HolderLostError if there is none at the moment, VaultError if it is given up."""
        now = time.monotonic()
        if self._missing and now < self._again_s:
            raise HolderLostError(self._missing)
        if not self._missing:
            self._since_s = now
        patience_s = 0.0 if self._missing else _READY_TIMEOUT_S
        try:
            found = await find_holder(
                self._run_dir, works=self._works, reply_timeout_s=self._reply_timeout_s, patience_s=patience_s
            )
        except (HolderLostError, OSError) as error:
            self._missing, self._again_s = str(error), time.monotonic() + _AGAIN_S
            given_up = now - self._since_s >= _GIVEN_UP_S
            raise (VaultError if given_up else HolderLostError)(self._missing) from error
        self._missing = ""
        return found


async def find_holder(
    run_dir: Path,
    *,
    node: int = 0,
    grace_s: float = GRACE_S,
    works: Mapping[str, str] | None = None,
    reply_timeout_s: float = REPLY_TIMEOUT_S,
    patience_s: float = _READY_TIMEOUT_S,
) -> Found:
    """A connection, as a member, to the holder of this run and node; and its process, if it had to be started.

    The caller reaps that process some time. ``works`` maps names to ``MODULE:FUNCTION``, see ``holder_work.py``.
    A holder that is there keeps the grace time and the works that it was started with. Raises HolderLostError if none
    comes up, or answers, within ``patience_s``. A holder that is stopped holds the event loop up by no more than
    ``reply_timeout_s`` at a time.
    """
    deadline = time.monotonic() + patience_s
    pause_s = _RETRY_S
    while True:
        silent = ""
        try:
            return Vault.connect(run_dir, node=node, timeout_s=reply_timeout_s, reply_timeout_s=reply_timeout_s), None
        except HolderSilentError as error:
            silent = str(error)
        except HolderLostError:
            pass  # one is made
        process = await _start(run_dir, node, grace_s, works or {})
        if process is not None:
            return Vault.connect(run_dir, node=node, reply_timeout_s=reply_timeout_s), process
        if time.monotonic() > deadline:
            raise HolderLostError(silent or f"no holder of memory snapshots came up; see {log_path(run_dir, node)}")
        # Another one is just coming up, or just ending: it holds the lock, and does not listen. Or it is stopped.
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, _RETRY_MAX_S)


async def _start(run_dir: Path, node: int, grace_s: float, works: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """None: there is another one by now."""
    log = log_path(run_dir, node)
    readable, writable = os.pipe()
    command = [sys.executable, "-P", "-m", "resilient_train.state.vault.holder", str(run_dir), "--node", str(node)]
    command += ["--grace-s", str(grace_s), "--ready-fd", str(writable)]
    command += [f"--work={name}={place}" for name, place in works.items()]
    try:
        stream = _open_log(log)
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - it returns when the program runs, in milliseconds
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=(writable,),
                start_new_session=True,
            )
        finally:
            os.close(stream)
    except BaseException:
        os.close(readable)
        raise
    finally:
        os.close(writable)
    if await _says_ready(readable):
        return process
    process.kill()  # no more than what it was about to do itself, unless it hangs
    if await _ended(process) not in {0, -9, None}:
        raise HolderLostError(f"the holder of memory snapshots ended with code {process.returncode}; see {log}")
    return None


async def _says_ready(readable: int) -> bool:
    """False when it has ended without a word, or takes too long."""
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    loop.add_reader(readable, heard.set)
    try:
        await asyncio.wait_for(heard.wait(), _READY_TIMEOUT_S)
        return bool(os.read(readable, 1))
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(readable)
        os.close(readable)


async def _ended(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit code; None if it does not end (it waits for storage that is gone), or another one has reaped it."""
    deadline = time.monotonic() + _RETRY_MAX_S
    while process.poll() is None and time.monotonic() < deadline:  # noqa: ASYNC110 - nothing tells it
        await asyncio.sleep(_RETRY_S)
    return process.returncode


def _open_log(log: Path) -> int:
    """Without a log it holds memory all the same."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)


def log_path(run_dir: Path, node: int = 0) -> Path:
    """What the holder says goes there."""
    return run_dir / "logs" / f"holder-{node}.log"
