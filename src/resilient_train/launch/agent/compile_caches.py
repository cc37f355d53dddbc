"""Compile caches that outlive a process, so that a replacement, or the next run in the same directory, need not compile
again what its predecessor has compiled.

``given`` says where they are for a job's ranks, ``look`` what ``resilient-train doctor`` should know of those places.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import psutil

from resilient_train.errors import ConfigError

PLACES = {
    "MS_COMPILER_CACHE_PATH": "mindspore",
    "ASCEND_CACHE_PATH": "ascend",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variable -> folder under ``RUN/compile_cache``. All are made to be used by many processes at once; MindSpore makes a
folder for each rank in its own, Inductor one for Triton."""
SWITCHES = {"MS_COMPILER_CACHE_ENABLE": "1", "ASCEND_MAX_OP_CACHE_SIZE": "-1"}
"""Variable -> value. -1: no entry is thrown out for its age, nor touched when it is read; MindCluster's advice for a
cache that many processes read."""
_FOLDER = "compile_cache"
_SHARED = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "gluster", "cifs", "smb", "9p", "virtiofs", "afs", "dpc", "weka"),
    *("panfs", "orangefs", "gfs2", "ocfs2", "juicefs", "sshfs"),
)
"""File systems that other nodes can mount: how their names begin, behind ``fuse.``."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
ROOM_BYTES = 1 << 30
"""Less than this may be used up by one model's kernels: Ascend's cache alone is made for 500 MB."""


class Cache(msgspec.Struct, frozen=True):
    """A place for a cache. ``filesystem`` and ``free_bytes`` are those of the part of the path that exists already."""

    variable: str
    path: str
    source: str
    """``environment``, or ``run directory``: then ``resilient-run`` sets it."""
    writable: bool
    filesystem: str
    free_bytes: int

    @property
    def shared(self) -> bool:
        """Whether other nodes can see it, as far as the file system's name tells."""
        return self.filesystem.removeprefix("fuse.").startswith(_SHARED)

    @property
    def in_memory(self) -> bool:
        """Whether it is gone when the machine starts again."""
        return self.filesystem in _IN_MEMORY


def given(run_dir: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the ranks of a run get: what the user has set himself is not among them. Makes the folders.

    They depend on the run directory alone, so every process of this run and of later ones there gets the same. Raises
    ConfigError if a folder can't be made.
    """
    found = {name: value for name, value in SWITCHES.items() if name not in environ}
    for name, folder in PLACES.items():
        if name in environ:
            continue
        path = run_dir / _FOLDER / folder
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            hint = f"make room for it, or set {name} to another place"
            raise ConfigError(f"the compile cache {path} can't be made: {error.strerror or error}; {hint}") from None
        found[name] = str(path)
    return found


def look(run_dir: Path, environ: Mapping[str, str]) -> tuple[Cache, ...]:
    """The places that a run with that directory would use; nothing is made."""
    mounts = {each.mountpoint: each.fstype for each in psutil.disk_partitions(all=True)}
    found = []
    for name, folder in PLACES.items():
        path = Path(environ[name]) if name in environ else run_dir / _FOLDER / folder
        source = "environment" if name in environ else "run directory"
        there = Path(os.path.realpath(path))
        while not there.exists():
            there = there.parent
        mount = next((str(each) for each in (there, *there.parents) if str(each) in mounts), "/")
        writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        filesystem, free_bytes = mounts.get(mount, "an unknown file system"), shutil.disk_usage(there).free
        found.append(Cache(name, str(path), source, writable, filesystem, free_bytes))
    return tuple(found)
