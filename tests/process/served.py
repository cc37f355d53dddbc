"""Launchers, and plain scripts, from the test server (``server.py``), as if ``subprocess`` had started them."""

import atexit
import contextlib
import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from resilient_train._native import die_with_parent

LAUNCHER = [sys.executable, "-m", "resilient_train.launch.cli.run"]
TESTS = Path(__file__).parents[1]
HARMLESS = ("RESILIENT_", "MS_", "TORCHELASTIC_", "HCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE")
"""Variables that begin so are read when a job starts, and not when torch is imported."""
_changes: dict[str, Any] = {}


@contextlib.contextmanager
def changed(**how: Any) -> Iterator[None]:
    """The launchers that are started meanwhile have this ``umask``, these ``descriptors`` (limits: soft, hard), and
    run this ``code`` before they begin; as if a shell, or a Python of the test's own, had started them.
    """
    assert not _changes, "one block at a time"
    _changes.update(how)
    try:
        yield
    finally:
        _changes.clear()


def plain_environ() -> dict[str, str]:
    """This process's environment without switches of ours, with one thread and our launcher's hash seed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RESILIENT_", "MS_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def is_ours(path: str) -> bool:
    """Whether there are modules of the tests only: the server has not imported them, and its forks look there too."""
    return all(Path(each).is_relative_to(TESTS) for each in path.split(os.pathsep))


def popen(
    command: list[str], environ: dict[str, str], *, new: bool = False, forked: bool = False
) -> subprocess.Popen[str]:
    """The command with pipes, in a session of its own. ``new``: in a new interpreter, whatever it is.

    ``forked``: it is ``python SCRIPT ...``, and nothing hangs on how the script's interpreter comes to its imports.
    """
    plain = command[:3] == LAUNCHER and all(
        name.startswith(HARMLESS) or plain_environ().get(name) == value or (name == "PYTHONPATH" and is_ours(value))
        for name, value in environ.items()
    )
    # The server's jobs end with it. Others have to be told: a test run that is killed can end nobody.
    alone = functools.partial(subprocess.Popen, preexec_fn=functools.partial(die_with_parent, signal.SIGKILL))
    make: Any = Served if forked or (plain and not new) else alone
    assert make is Served or not _changes, "a new interpreter would have none of them"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process: subprocess.Popen[str] = make(command, start_new_session=True, env={**plain_environ(), **environ}, **pipes)
    return process


class _Server:
    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("server.py")), str(theirs.fileno())],
                env=plain_environ(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any], streams: tuple[int, ...] = ()) -> int:
        socket.send_fds(self._channel, [json.dumps(request).encode()], streams)
        answer = self._channel.recv(64)
        assert answer, "the test server has died"
        return int(json.loads(answer))

    def close(self) -> None:
        self._channel.close()
        self._process.wait(10)


@functools.cache
def server() -> _Server:
    """That of this test session."""
    return _Server()


class Served(subprocess.Popen):
    """A launcher or a script that the test server has forked: its child, so it is the one that reaps it."""

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(subprocess.Popen._execute_child).bind(self, *args, **kwargs).arguments
        command = list(asked["args"])
        script = None if command[:3] == LAUNCHER else command[1]
        arguments = command[2:] if script else command[3:]
        request = {
            "script": script,
            "arguments": arguments,
            "environ": asked["env"],
            "cwd": str(Path.cwd()),
            **_changes,
        }
        with Path(os.devnull).open("rb") as nothing:
            self.pid = server().ask(request, (nothing.fileno(), asked["c2pwrite"], asked["errwrite"]))
        self._pidfd = os.pidfd_open(self.pid)
        self._child_created = True
        os.close(asked["c2pwrite"])
        os.close(asked["errwrite"])
        self._closed_child_pipe_fds = True

    def _ended(self, timeout_s: float | None) -> bool:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout_s is None else max(0, int(timeout_s * 1000))):
                return False
            os.close(self._pidfd)
            self.returncode = server().ask({"reap": self.pid})
        return True

    def poll(self) -> int | None:
        self._ended(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self.poll() if hasattr(self, "_pidfd") else None
