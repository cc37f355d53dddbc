"""The user's code as the job's first processes have read it, in the run directory, for all that come later.

A process that takes a rank's place reads the script hours after the others. By then somebody may have edited it, pulled
a newer version, or have made ``current`` point elsewhere; a file may be half written, or gone. Replicas would not even
differ, for gradients are averaged. So who first reads a source file of the user's leaves a copy, by its own path in a
folder of the job's, and everybody reads the copy. A job that is started again has a new folder.

A text that was written since this process began, or since it has read it (``importlib.reload``), is read from the file
itself. The job writes such files by itself, and a new process writes them again.

Of installed packages nothing is kept, nor of what is no Python source. Other programs that a rank starts (workers of a
data loader by ``spawn``, too) read what is there.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from resilient_train.observe.sinks import say_aside
from resilient_train.script_place import is_users

_PREFIX = "code-"
_MARK = ".resilient_train"
"""In folders that are ours to remove."""
_SCRIPTS_FOLDER = ".folder"
_TRIES = 3


def begin(run_dir: Path) -> Path | None:
    """The new folder of a job that begins; None: there can be none. Those of earlier jobs go."""
    for older in run_dir.glob(f"{_PREFIX}*"):
        if (older / _MARK).is_file() and not older.is_symlink():
            shutil.rmtree(older, ignore_errors=True)
    folder = run_dir / f"{_PREFIX}{time.time_ns()}"
    try:
        folder.mkdir(mode=0o700)
        (folder / _MARK).touch()
    except OSError:
        return None
    return folder


class KeptCode:
    """``folder`` is the copies'. Where no copy can be made or read, the file itself counts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._began_ns = time.time_ns()
        self._copies: dict[str, str] = {}
        """Those that this process reads; empty: the file itself."""
        self._asked: dict[str, tuple[int, int]] = {}
        """Files of which this process has asked for the time, as it does in front of each import; as they were then."""

    def install(self) -> None:
        """From now on imports read the copies."""
        get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

        def get_kept_data(loader: Any, path: str) -> bytes:
            return self.text(path) if _is_source(path) else get_data(loader, path)

        def kept_path_stats(loader: Any, path: str) -> Any:
            # Whether a .pyc is of that text is told by these.
            return path_stats(loader, self._imported(path) or path if _is_source(path) else path)

        SourceFileLoader.get_data = get_kept_data  # type: ignore[method-assign,assignment]
        SourceFileLoader.path_stats = kept_path_stats  # type: ignore[method-assign,assignment]
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, _: object = None) -> ModuleSpec | None:
        """Of a module that has a copy, and whose file has gone since, or has a package in its place. None: it is found
        as usual, with whatever loader is usual, also where another folder comes first by now.
        """
        for folder, file in self._copies_of(name, path):
            usual = PathFinder.find_spec(name, path)
            if usual is not None and not (
                _is_in(usual, folder) and file not in _places_of(usual) and self._is_new(usual)
            ):
                return None
            if file:
                within = [folder] if file.endswith("/__init__.py") else None
                loader = SourceFileLoader(name, file)
                return spec_from_file_location(name, file, loader=loader, submodule_search_locations=within)
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [folder]
            return spec
        return None

    def _is_new(self, spec: ModuleSpec) -> bool:
        """Whether it has come to where it is since the job began; a copied or an unpacked file has older times too."""
        try:
            began_ns = (self._folder / _MARK).stat().st_ctime_ns
            return any(Path(each).stat().st_ctime_ns >= began_ns for each in _places_of(spec))
        except OSError:
            return False

    def _copies_of(self, name: str, path: Iterable[Any] | None) -> Iterator[tuple[str, str]]:
        """Where copies are: the folder that a package of that name is or would be, and the file; empty: a package
        without an ``__init__.py``.
        """
        own = name.rpartition(".")[2]
        for entry in sys.path if path is None else path:
            if not isinstance(entry, str):  # Python passes by it as well
                continue
            folder = os.path.join(os.path.abspath(entry), own)  # noqa: PTH100, PTH118 - as in _copy_of
            if not is_users(folder):
                continue
            yield from ((folder, file) for file in (f"{folder}/__init__.py", f"{folder}.py") if self._has(file))
            if Path(f"{self._folder}{folder}").is_dir():
                yield folder, ""

    def _has(self, file: str) -> bool:
        return Path(f"{self._folder}{file}").is_file()

    def text(self, path: str) -> bytes:
        """Of the source file. Raises OSError if there is neither a copy nor the file."""
        copy = self._copy_of(path)
        if not copy:
            return Path(path).read_bytes()
        text = Path(copy).read_bytes()
        if not _is_as_it_was(path, copy):  # tracebacks, and whoever else asks for lines, shall have those that run
            lines = text.decode(errors="replace").splitlines(keepends=True)
            linecache.cache[path] = (len(text), None, lines, path)
        return text

    def scripts_folder(self, now: str) -> str:
        """What ``now`` was in the first process: a link may lead elsewhere now. If it is gone, that of the copies."""
        copy = f"{self._folder}/{_SCRIPTS_FOLDER}"
        try:
            if self._folder.is_dir():
                _leave(os.fsencode(now), copy)
            first = os.fsdecode(Path(copy).read_bytes())
            return first if Path(first).is_dir() else f"{self._folder}{first}"
        except OSError:
            return now

    def _imported(self, path: str) -> str:
        """Once more: for another module of the same file, or anew, since the file has changed."""
        now = _looks_of(path)
        if self._asked.setdefault(path, now) != now and self._copies.get(path):
            self._copies[path] = ""
            linecache.cache.pop(path, None)
        return self._copy_of(path)

    def _copy_of(self, path: str) -> str:
        if path not in self._copies:
            copy = f"{self._folder}{os.path.abspath(path)}"  # noqa: PTH100 - links are not followed
            try:
                self._copies[path] = copy if self._make(path, copy) else ""
            except OSError:  # no room, no rights, too long a name, the run directory is gone
                return ""
        return self._copies[path]

    def _make(self, path: str, copy: str) -> bool:
        """Whether there is one to be read."""
        with contextlib.suppress(OSError):
            if Path(path).stat().st_mtime_ns > self._began_ns:
                if Path(copy).exists():
                    self._tell_if_other(path, copy)
                else:
                    self._leave_copy(path, copy)
                return False
        if not Path(copy).exists():
            self._leave_copy(path, copy)
        return True

    def _leave_copy(self, path: str, copy: str) -> None:
        if not self._folder.is_dir():
            raise FileNotFoundError(self._folder)  # somebody has removed it: it is not made anew
        text, stats = _read(path)
        Path(copy).parent.mkdir(parents=True, exist_ok=True)
        _leave(text, copy, stats)

    def _tell_if_other(self, path: str, copy: str) -> None:
        """It is the job's own, as a rule. An editor may have been as quick, or the file system's clock be ahead."""
        if Path(copy).read_bytes() != Path(path).read_bytes():
            say_aside(
                f"{path} was written since this process began, and is not what the job's first process has read: it is "
                "taken as it is, so if the job has not written it itself the bits may not be those of the undisturbed "
                "run (docs/how-to/schedulers.md, New code)"
            )


def _is_in(spec: ModuleSpec, folder: str) -> bool:
    """Whether it is of that package, or of a module that stands in its place."""
    return any(f"{each}/".startswith((f"{folder}/", f"{folder}.")) for each in _places_of(spec))


def _places_of(spec: ModuleSpec) -> list[str]:
    return [*map(os.path.abspath, [spec.origin] if spec.origin else spec.submodule_search_locations or ())]


def _is_source(path: str) -> bool:
    return path.endswith(".py") and is_users(path)


def _read(path: str) -> tuple[bytes, os.stat_result]:
    """Once more where somebody writes it meanwhile."""
    for left in reversed(range(_TRIES)):
        with Path(path).open("rb") as file:
            stats, text, after = os.fstat(file.fileno()), file.read(), os.fstat(file.fileno())
        if not left or (stats.st_mtime_ns == after.st_mtime_ns and len(text) == after.st_size):
            break
    return text, stats


def _leave(text: bytes, copy: str, stats: os.stat_result | None = None) -> None:
    """Whoever comes first: a link is made only where there is nothing yet, and whole."""
    made = f"{copy}.{os.getpid()}"
    Path(made).write_bytes(text)
    try:
        if stats is not None:
            os.utime(made, ns=(stats.st_mtime_ns, stats.st_mtime_ns))
        with contextlib.suppress(FileExistsError):
            os.link(made, copy)
    finally:
        Path(made).unlink()


def _looks_of(path: str) -> tuple[int, int]:
    """Of a file that is not there: no time."""
    try:
        stats = Path(path).stat()
    except OSError:
        return 0, 0
    return stats.st_mtime_ns, stats.st_size


def _is_as_it_was(path: str, copy: str) -> bool:
    return _looks_of(path) == _looks_of(copy)
