"""The user's code as the job's first processes have read it, in the run directory, for all that come later.

A process that takes a rank's place reads the script hours after the others. By then somebody may have edited it, pulled
a newer version, or have made ``current`` point elsewhere; a file may be half written, or gone. Replicas would not even
differ, for gradients are averaged. So who first finds a module of the user's notes where, and who first reads a source
file leaves a copy, by its own path in a folder of the job's; everybody finds and reads what is there. A job that is
started again has a new folder.

A text that was written since this process began is read from the file itself: the job writes such files by itself, and
a new process writes them again. One that a process reads anew (``importlib.reload``) takes the copy's place.

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
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from resilient_train.observe.sinks import say_aside
from resilient_train.script_place import is_users

_PREFIX = "code-"
_MARK = ".resilient_train"
"""In folders that are ours to remove."""
_SCRIPTS_FOLDER = ".folder"
_PLACES, _BY_NAME = ".places", ".name"
"""Links to where modules were found: by their names and the folders in which they were looked for, and by their names
alone.
"""
_NAMESPACE = "namespace"
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
    """``folder`` is the copies'. Where none can be made or read, the file itself counts. ``late``: whether this
    process takes another one's place; one that waits in the script is not to be asked without need.
    """

    def __init__(self, folder: Path, late: Callable[[], bool] = lambda: False) -> None:
        self._folder = folder
        self._late = late
        self._began_ns = time.time_ns()
        self._copies: dict[str, str] = {}
        """Those that this process reads; empty: the file itself."""
        self._asked: dict[tuple[str, str], tuple[int, int]] = {}
        """Modules for which this process has asked for the time of a file, as it does in front of each import; and how
        that looked.
        """
        self._imported = set[str]()
        """Their names."""

    def install(self) -> None:
        """From now on imports find and read the copies."""
        get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

        def get_kept_data(loader: Any, path: str) -> bytes:
            return self.text(path) if _is_source(path) else get_data(loader, path)

        def kept_path_stats(loader: Any, path: str) -> Any:
            if _is_source(path):
                self.ask(loader.name, path)
                if not self._is_as_kept(path):
                    raise OSError(f"{path} is not what it was")  # a .pyc is of the other text: Python uses none then
            return path_stats(loader, path)

        SourceFileLoader.get_data = get_kept_data  # type: ignore[method-assign,assignment]
        SourceFileLoader.path_stats = kept_path_stats  # type: ignore[method-assign,assignment]
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    # -- where a module is

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """Where the first process that looked for it in these folders has found it; else as usual, by whatever finders
        come behind this one. So it is once it was imported here: who imports again wants what there is now.
        """
        usual = _usual(self, name, path, target)
        folders = [os.path.abspath(each) for each in (sys.path if path is None else path) if isinstance(each, str)]  # noqa: PTH100
        if target is not None or name in self._imported or not any(map(is_users, folders)):
            return usual
        found = _place_of(usual)
        first = self._first_place(xxhash.xxh3_64_hexdigest("\n".join([name, *folders]).encode()), found)
        if first and first != found and (spec := self._spec_at(name, first)):
            return spec
        by_name = self._first_place(f"{name}{_BY_NAME}", found)
        if by_name and not first and found and by_name != found:
            self._tell_if_elsewhere(name, by_name, found)
        return usual

    def _first_place(self, key: str, found: str) -> str:
        """What was noted by ``key``; of nothing, ``found`` is now, and the answer is empty."""
        note = self._folder / _PLACES / key
        try:
            return str(note.readlink())
        except OSError:
            if found and self._folder.is_dir():
                with contextlib.suppress(OSError):  # no room, no rights; or another process was quicker
                    note.parent.mkdir(exist_ok=True)
                    note.symlink_to(found)
            return ""

    def _spec_at(self, name: str, place: str) -> ModuleSpec | None:
        """None: it has no copy, and is gone."""
        if place.startswith(_NAMESPACE):
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = place.splitlines()[1:]
            return spec
        if not (Path(f"{self._folder}{place}").is_file() or Path(place).is_file()):
            return None
        within = [os.path.dirname(place)] if place.endswith("/__init__.py") else None  # noqa: PTH120
        return spec_from_file_location(
            name, place, loader=SourceFileLoader(name, place), submodule_search_locations=within
        )

    def _tell_if_elsewhere(self, name: str, first: str, now: str) -> None:
        """The folders in which it is looked for are others: a link was followed by the script itself."""
        with contextlib.suppress(OSError):
            if first.startswith(_NAMESPACE) or Path(f"{self._folder}{first}").read_bytes() == Path(now).read_bytes():
                return
            if not self._late():
                return
            say_aside(
                f"this process, which takes another one's place, imports {name} from {now}, and the job's first "
                f"process imported it from {first}, which is another text: the bits may not be those of the "
                "undisturbed run (docs/how-to/schedulers.md, New code)"
            )

    # -- what is in a file

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

    def ask(self, module: str, path: str) -> None:
        """It is about to be imported. Once more, and the file has changed: what it is now is kept, for all."""
        now, once = _looks_of(path), self._asked
        self._imported.add(module)
        key = module if module in sys.modules else "__main__", path  # `-m`: it may be imported by its name as well
        if once.setdefault(key, now) == now:
            return
        once[key] = now
        linecache.cache.pop(path, None)
        try:
            text, stats = _read(path)
            _leave(text, self._place_of_copy(path), stats, instead=True)
        except OSError:
            self._copies[path] = ""

    def _is_as_kept(self, path: str) -> bool:
        copy = self._copy_of(path)
        return not copy or (_is_as_it_was(path, copy) and Path(path).read_bytes() == Path(copy).read_bytes())

    def _place_of_copy(self, path: str) -> str:
        return f"{self._folder}{os.path.abspath(path)}"  # noqa: PTH100 - links are not followed

    def _copy_of(self, path: str) -> str:
        if path not in self._copies:
            copy = self._place_of_copy(path)
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


def _usual(this: KeptCode, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    """By the finders behind this one."""
    behind = sys.meta_path[sys.meta_path.index(this) + 1 :] if this in sys.meta_path else [PathFinder]
    for finder in behind:
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None


def _place_of(spec: ModuleSpec | None) -> str:
    """Of a module of the user's in a source file, that file; of a package without an ``__init__.py`` its folders; of
    any other nothing. A loader of a library's may change the text, so Python's alone counts.
    """
    if spec is None:
        return ""
    if type(spec.loader) is SourceFileLoader:
        origin = os.path.abspath(spec.origin or "")  # noqa: PTH100 - links are not followed
        return origin if _is_source(origin) else ""
    folders = [os.path.abspath(each) for each in spec.submodule_search_locations or ()]  # noqa: PTH100
    if spec.origin is None and folders and all(map(is_users, folders)):
        return "\n".join([_NAMESPACE, *folders])
    return ""


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


def _leave(text: bytes, copy: str, stats: os.stat_result | None = None, *, instead: bool = False) -> None:
    """Whoever comes first: a link is made only where there is nothing yet, and whole. ``instead``: of what is there."""
    made = f"{copy}.{os.getpid()}"
    Path(made).write_bytes(text)
    try:
        if stats is not None:
            os.utime(made, ns=(stats.st_mtime_ns, stats.st_mtime_ns))
        if instead:
            Path(made).replace(copy)
            return
        with contextlib.suppress(FileExistsError):
            os.link(made, copy)
    finally:
        Path(made).unlink(missing_ok=True)


def _looks_of(path: str) -> tuple[int, int]:
    """Of a file that is not there: no time."""
    try:
        stats = Path(path).stat()
    except OSError:
        return 0, 0
    return stats.st_mtime_ns, stats.st_size


def _is_as_it_was(path: str, copy: str) -> bool:
    return _looks_of(path) == _looks_of(copy)
