"""A run directory has one launcher: the second is told which."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resilient_train.errors import ConfigError
from resilient_train.launch.agent.run_dir_claim import LOCK, Claim

HOLD = (
    "import sys; from pathlib import Path; from resilient_train.launch.agent.run_dir_claim import Claim\n"
    "claim = Claim(Path(sys.argv[1])); print('mine', flush=True); sys.stdin.read()\n"
)


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(ConfigError, match=rf"another launcher.*process {owner.pid} on {socket.gethostname()}"):
            Claim(tmp_path)
        owner.kill()
        owner.wait()
        Claim(tmp_path).close()
    finally:
        owner.kill()
        owner.communicate()


def test_it_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        claim = Claim(tmp_path)
        assert claim.locked
        assert (tmp_path / LOCK).stat().st_mode & 0o777 == 0o600
        claim.close()


def test_an_owner_that_has_not_written_its_name_yet(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="another process"):
        Claim(tmp_path)
    os.close(descriptor)


def test_where_there_are_no_locks_what_is_written_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert not Claim(tmp_path).locked
    text = (tmp_path / LOCK).read_text()
    (tmp_path / LOCK).write_text(text.replace(f'"pid":{os.getpid()}', f'"pid":{os.getppid()}'))
    with pytest.raises(ConfigError, match=str(os.getppid())):
        Claim(tmp_path)
    (tmp_path / LOCK).write_text(text.replace('"boot_id":"', '"boot_id":"another'))
    assert not Claim(tmp_path).locked, "it is of another machine, or of a time before: nobody can see whether it lives"
