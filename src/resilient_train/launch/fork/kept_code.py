"""The user's code as the job's first processes have read it, in the run directory, for all that come later.

A process that takes a rank's place reads the script hours after the others. By then somebody may have edited it, pulled
a newer version, or have made ``current`` point elsewhere; a file may be half written, or gone. Replicas would not even
differ, for gradients are averaged. So who first reads a source file of the user's leaves a copy, by its own path in a
folder of the job's, and everybody reads the copy. Who imports a module notes where it was, and who takes another one's
place imports it from there. A job that is started again has a new folder.

A text that was written since this process began is read from the file itself: the job writes such files by itself, and
a new process writes them again. One that a process reads anew (``importlib.reload``, or as a module of another name)
takes the copy's place.

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
from typing import Any, NamedTuple

import xxhash

from resilient_train.observe.sinks import say_aside
from resilient_train.script_place import is_users

_PREFIX = "code-"
_MARK = ".resilient_train"
"""In folders that are ours to remove."""
_SCRIPTS_FOLDER = ".folder"
_PLACES, _BY_NAME, _BY_OTHERS = ".places", ".name", ".other"
"""Links to where modules were found: by their names and the folders in which they were looked for, and by their names
alone. What a finder of somebody else's gives may be each rank's own: it counts only where nobody finds any.
"""
_NAMESPACE = "namespace"
_COPY = ".kept"
"""Behind the names of copies: the run directory may lie where a script looks for all ``*.py``."""
_SCRIPT = "__main__"
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


def take_place() -> None:
    """This process has waited in the script, and becomes a rank now: what was written meanwhile is not its job's."""
    for finder in sys.meta_path:
        if isinstance(finder, KeptCode):
            finder.take_place()


class _Asked(NamedTuple):
    looks: tuple[int, int]
    names: set[str]
    """Of the modules that it was read as. The script may be imported by its name as well, later (``-m``)."""
    is_told: bool = False


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
        self._asked: dict[str, _Asked] = {}
        """Files for whose time this process has asked, as it does in front of each import."""
        self._imported = set[str]()
        """Their names."""
        self._sought: dict[str, str] = {}
        """Modules that were looked for, and by what that is noted once they are imported."""

    def install(self) -> None:
        """From now on imports find and read the copies."""
        get_data, path_stats = SourceFileLoader.get_data, SourceFileLoader.path_stats

        def get_kept_data(loader: Any, path: str) -> bytes:
            return self.text(path) if _is_source(path) else get_data(loader, path)

        def kept_path_stats(loader: Any, path: str) -> Any:
            if _is_source(path):
                self.ask(loader.name, path, plainly=type(loader) is SourceFileLoader)
                if not self._is_as_kept(path):
                    raise OSError(f"{path} is not what it was")  # a .pyc is of the other text: Python uses none then
            return path_stats(loader, path)

        SourceFileLoader.get_data = get_kept_data  # type: ignore[method-assign,assignment]
        SourceFileLoader.path_stats = kept_path_stats  # type: ignore[method-assign,assignment]
        sys.meta_path.insert(sys.meta_path.index(PathFinder), self)

    # -- where a module is

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        """As usual. A process that takes another one's place finds it where the others have imported it from, by this
        name and out of these folders; but not once it has imported it itself: who imports again wants what there is.
        """
        usual = PathFinder.find_spec(name, path, target)
        folders = [_absolute(each) for each in (sys.path if path is None else path) if isinstance(each, str)]
        if not any(map(is_users, folders)):
            return usual
        key = xxhash.xxh3_64_hexdigest("\n".join([name, *folders]).encode(errors="surrogateescape"))
        found, again = _place_of(usual), target is not None or name in self._imported
        self._sought[name] = key if usual is not None else key + _BY_OTHERS
        if found.startswith(_NAMESPACE):
            self._note(key, found)
        first = "" if again else self._noted(key)
        if first and not _is_within(first, found) and self._late() and (spec := self._spec_at(name, first, found)):
            return spec
        if usual is None and not again and (other := self._noted(key + _BY_OTHERS)) and self._late():
            theirs = _by_others(self, name, path)
            self._tell_if_elsewhere(name, other, _place_of(theirs))
            return theirs or self._spec_at(name, other, "")
        if found and not again and not first:
            self._tell_if_elsewhere(name, self._noted(f"{name}{_BY_NAME}"), found)
        return usual

    def _noted(self, key: str) -> str:
        """Empty: nothing."""
        try:
            return str((self._folder / _PLACES / key).readlink())
        except (OSError, ValueError):  # a name may have anything in it
            return ""

    def _note(self, key: str, place: str) -> None:
        """The newest counts: a module that the job writes may come to stand before another one of its name."""
        before = self._noted(key)
        if before == place or (before and self._late()):  # what a late process finds is no news for others
            return
        note = self._folder / _PLACES / key
        made = note.with_name(f"{note.name}.{os.getpid()}")
        with contextlib.suppress(OSError, ValueError):  # no room, no rights, the run directory is gone
            if self._folder.is_dir():
                note.parent.mkdir(exist_ok=True)
                made.symlink_to(place)
                made.replace(note)

    def _spec_at(self, name: str, place: str, now: str) -> ModuleSpec | None:
        """Of what is noted, and of what stands there ``now``. None: it has no copy, and is gone."""
        if place.startswith(_NAMESPACE):
            spec = ModuleSpec(name, None, is_package=True)
            more = now.splitlines()[1:] if now.startswith(_NAMESPACE) else []
            spec.submodule_search_locations = [*dict.fromkeys((*place.splitlines()[1:], *more))]
            return spec
        if not (Path(self._place_of_copy(place)).is_file() or Path(place).is_file()):
            return None
        within = [os.path.dirname(place)] if place.endswith("/__init__.py") else None  # noqa: PTH120
        loader = SourceFileLoader(name, place)
        return spec_from_file_location(name, place, loader=loader, submodule_search_locations=within)

    def _tell_if_elsewhere(self, name: str, first: str, now: str) -> None:
        """The folders in which it is looked for are others: a link was followed by the script itself."""
        if not (first and now) or first == now:
            return
        with contextlib.suppress(OSError):
            if first.startswith(_NAMESPACE):
                return
            if Path(self._place_of_copy(first)).read_bytes() == Path(now).read_bytes():
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
        if not _is_as_it_was(path, copy):
            _show_lines(path, text)
        return text

    def take_place(self) -> None:
        """See the function of this name."""
        self._began_ns = time.time_ns()
        for path, copy in self._copies.items():
            with contextlib.suppress(OSError):
                if copy and not _is_as_it_was(path, copy):
                    _show_lines(path, Path(copy).read_bytes())

    def scripts_folder(self, now: str) -> str:
        """What ``now`` was in the first process: a link may lead elsewhere now. It may be gone: modules have copies."""
        copy = f"{self._folder}/{_SCRIPTS_FOLDER}"
        try:
            if self._folder.is_dir():
                _leave(os.fsencode(now), copy)
            return os.fsdecode(Path(copy).read_bytes())
        except OSError:
            return now

    def ask(self, module: str, path: str, *, plainly: bool = True) -> None:
        """It is about to be imported. Once more, and the file has changed: what it is now is kept, for all. Not
        ``plainly``: by a loader that may change the text, so that no other one could load it.
        """
        self._imported.add(module)
        if (key := self._sought.pop(module, "")) and plainly:
            self._note(key, _absolute(path))
            if not self._noted(f"{module}{_BY_NAME}"):
                self._note(f"{module}{_BY_NAME}", _absolute(path))
        is_listed = module in sys.modules
        is_script = _scripts_file("" if is_listed else path) == path  # it has none yet where `-m` begins
        name = _SCRIPT if is_script and not is_listed else module
        now = _looks_of(path)
        first = self._asked.setdefault(path, _Asked(now, {name}))
        is_first = name not in first.names
        if first.looks == now or (is_first and is_script):
            first.names.add(name)
            return
        if is_first and not first.is_told:
            say_aside(
                f"{path} is read once more, as the module {name}, and was written since: it is taken as it is, so if "
                "the job has not written it itself the bits may not be those of the undisturbed run "
                "(docs/how-to/schedulers.md, New code)"
            )
        self._asked[path] = _Asked(now, {*first.names, name}, is_first or first.is_told)
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
        return f"{self._folder}{_absolute(path)}{_COPY}"

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


def _show_lines(path: str, text: bytes) -> None:
    """Tracebacks, ``torch.jit.script`` and whoever else asks for lines shall have those that run."""
    linecache.cache[path] = (len(text), None, text.decode(errors="replace").splitlines(keepends=True), path)


def _is_within(first: str, now: str) -> bool:
    """A package without an ``__init__.py`` may have got more folders."""
    return first == now or (first.startswith(_NAMESPACE) and {*first.splitlines()} <= {*now.splitlines()})


def _by_others(this: KeptCode, name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """By the finders behind Python's."""
    for finder in sys.meta_path[sys.meta_path.index(this) + 1 :] if this in sys.meta_path else ():
        find = getattr(finder, "find_spec", None)
        if find is not None and finder is not PathFinder and (spec := find(name, path, None)) is not None:
            found: ModuleSpec = spec
            return found
    return None


def _place_of(spec: ModuleSpec | None) -> str:
    """Of a module of the user's in a source file, that file; of a package without an ``__init__.py`` its folders; of
    any other nothing. A loader of a library's may change the text, so Python's alone counts.
    """
    if spec is None:
        return ""
    if type(spec.loader) is SourceFileLoader:
        origin = _absolute(spec.origin or "")
        return origin if _is_source(origin) else ""
    folders = [_absolute(each) for each in spec.submodule_search_locations or ()]
    if spec.origin is None and folders and all(map(is_users, folders)):
        return "\n".join([_NAMESPACE, *folders])
    return ""


def _scripts_file(default: str) -> Any:
    """A script may have put an object into its module's place: that is not asked."""
    main = sys.modules.get(_SCRIPT)
    return vars(main).get("__file__", default) if type(main) is ModuleType else default


def _absolute(path: str) -> str:
    """Links are not followed."""
    try:
        return os.path.abspath(path)  # noqa: PTH100
    except OSError:  # the working directory is gone
        return path


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
