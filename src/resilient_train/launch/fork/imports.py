"""What the zygote may import, which knows no rank: found in the script's text, without running it.

Two kinds of script are left alone: one that sets environment variables, for a library that is imported already has read
them; and, for its own imports, one that changes where modules are looked for. The user's own modules are read for
*their* imports, and never imported: what they do when they are imported is not ours to do twice. For the same reason
the imports end where the script, or a module of the user's on the way there, first does something: a default dtype, a
patch, a seed or a stub that stands above an import is there to change it.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from itertools import chain
from pathlib import Path

import msgspec

_LATE = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TOKENIZERS_PARALLELISM"})
_LATE_PREFIXES = ("GLOO_", "NCCL_", "WANDB_", "RESILIENT_")
"""Variables that nobody reads while a module is imported: a script may set them."""
_CHANGES = frozenset({"setdefault", "update", "pop", "popitem", "clear", "__setitem__", "__delitem__"})
_SETTERS = frozenset({"putenv", "unsetenv", "load_dotenv"})
_PATH_CHANGES = frozenset({"insert", "__setitem__", "reverse", "sort"})
_EARLY = frozenset({"__main__", "encodings", "sitecustomize", "usercustomize"})
_OF_ONE_PROCESS = frozenset({"mpi4py", "horovod", "pycuda", "torch_xla"})
_HARMLESS = frozenset({"getLogger", "TypeVar", "ParamSpec", "NewType", "namedtuple", "Path"})
"""What is often called between imports, and changes none."""
_FILES_MAX = 200
"""Files of the user's that are read; what lies behind them is imported after the fork."""


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What is imported stays. To look for garbage in it, each time that a few hundred objects more are there, takes a
    seventh of the time that torch's modules take.
    """
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


class Wanted(msgspec.Struct, frozen=True):
    """``import module``, or ``from module import names``."""

    module: str
    names: tuple[str, ...] = ()


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks run: ``python SCRIPT`` or ``python -m MODULE``."""

    script: str = ""
    module: str = ""
    arguments: tuple[str, ...] = ()

    def folder(self) -> str:
        """What such a Python puts in front of ``sys.path``; empty: nothing. Asked in a process like it."""
        if sys.flags.safe_path:
            return ""
        if self.module:
            return current_folder()
        return os.path.dirname(os.path.realpath(self.script))  # noqa: PTH120 - as Python itself does


def current_folder() -> str:
    """Where this process stands; empty: nowhere, since somebody has removed its folder."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


class ImportPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``refusal``: why no standby can stand in for this script; empty if one can."""

    imports: tuple[Wanted, ...] = ()
    refusal: str = ""


def scan(target: Script, folder: str) -> ImportPlan:
    """The installed modules that the script, and the user's modules (in ``folder``) that it imports, import at their
    top before anything else is done.
    """
    moved = False
    for path, tree in _sources(target, folder, _top_imports):
        where = _sets_environment(tree)
        if where:
            return ImportPlan(refusal=f"{path}:{where} sets environment variables, which libraries read when imported")
        moved = moved or _moves_path(tree)
    return ImportPlan(imports=() if moved else _first_imports(_files_of(target, folder), folder))


def _first_imports(files: Sequence[Path], folder: str) -> tuple[Wanted, ...]:
    """The installed modules in the order in which Python comes to them, up to where something else is done."""
    found: dict[Wanted, None] = {}
    seen: set[Path] = set()

    def goes_on(path: Path) -> bool:
        if path in seen:
            return True
        seen.add(path)
        tree = _tree(path)
        return tree is not None and len(seen) <= _FILES_MAX and all(map(passes, tree.body))

    def passes(node: ast.stmt) -> bool:
        if isinstance(node, ast.ImportFrom) and node.level:
            return False  # of a package of the user's
        if not isinstance(node, ast.Import | ast.ImportFrom):
            return _does_nothing(node)
        for each in _imports([node]):
            top = each.module.partition(".")[0]
            if folder and _is_local(top, folder):
                if not all(map(goes_on, list(_local_files(each, folder)))):
                    return False
            elif _is_installed(top):
                found[each] = None
        return True

    all(map(goes_on, files))
    return tuple(found)


def _does_nothing(node: ast.stmt) -> bool:
    """Whether a statement only gives names to things: nothing that is imported behind it can tell."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Pass):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _appends_path(node.value)
    if isinstance(node, ast.If):
        return _is_named(node.test, "TYPE_CHECKING") and not node.orelse
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(each, ast.Name) for each in targets) and not any(map(_calls, ast.walk(node)))
    return False


def _appends_path(node: ast.expr) -> bool:
    call = node.func if isinstance(node, ast.Call) else None
    return isinstance(call, ast.Attribute) and call.attr in ("append", "extend") and _is_path(call.value)


def _calls(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and not any(_is_named(node.func, name) for name in _HARMLESS)


def uses_us(target: Script | str) -> bool:
    """Whether the script imports this library, see ``uses``."""
    return uses(target, "resilient_train")


def uses(target: Script | str, package: str) -> bool:
    """Whether the script, or a module of the user's that it imports, imports this package: at the top or elsewhere.

    What is imported in other ways than by a statement is not seen; nor is a command that runs no script (a text).
    """
    if isinstance(target, str):
        return False
    folder = target.folder()
    return any(
        each.module.partition(".")[0] == package
        for path, tree in _sources(target, folder, _all_imports)
        for each in _all_imports(path, tree)
    )


def _sources(
    target: Script, folder: str, imports: Callable[[Path, ast.Module], Iterator[Wanted]]
) -> Iterator[tuple[Path, ast.Module]]:
    """The script, and the modules of the user's (in ``folder``) that ``imports`` finds in what was read so far."""
    waiting = _files_of(target, folder)
    seen = set(waiting)
    while waiting and len(seen) <= _FILES_MAX:
        path = waiting.pop(0)
        tree = _tree(path)
        if tree is None:
            continue  # the rank itself will say what is wrong with it
        yield path, tree
        for each in imports(path, tree):
            if folder and _is_local(each.module.partition(".")[0], folder):
                fresh = [file for file in _local_files(each, folder) if file not in seen]
                seen.update(fresh)
                waiting += fresh


def _files_of(target: Script, folder: str) -> list[Path]:
    """What Python runs of it, first to last."""
    search = [folder, *sys.path] if folder else list(sys.path)
    files = [Path(target.script)] if target.script else list(_files(target.module, search))
    if target.module and files and files[-1].name == "__init__.py":
        files.append(files[-1].with_name("__main__.py"))
    return files


def _tree(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def hidden(folder: str) -> str:
    """A file of the user's in ``folder`` that ``python SCRIPT`` would find in place of a module that this process has
    imported; or empty. What every interpreter imports before it looks there can't be hidden.
    """
    if not folder:
        return ""
    for top in sorted({name.partition(".")[0] for name in tuple(sys.modules)} - _EARLY):
        module = sys.modules.get(top)
        own = getattr(module, "__spec__", None)
        if own is None or own.origin in ("frozen", "built-in"):
            continue
        spec = _spec(top, [folder])
        if spec is not None and spec.origin != getattr(module, "__file__", None):
            return f"{spec.origin} hides the module {top!r}"
    return ""


def foreign_to_forks(module: str) -> bool:
    """Whether a module sets up, when it is imported, what belongs to one process; such are left to the forks."""
    return module.partition(".")[0] in _OF_ONE_PROCESS


def _spec(name: str, search: Sequence[str]) -> ModuleSpec | None:
    """Where a module lies; a folder without ``__init__.py`` hides nothing, and counts as nothing."""
    spec = PathFinder.find_spec(name, list(search))
    return spec if spec is not None and spec.loader is not None and spec.origin is not None else None


def _is_local(top: str, folder: str) -> bool:
    if _spec(top, [folder]) is not None:
        return True
    return PathFinder.find_spec(top, [folder]) is not None and not _is_installed(top)


def _is_installed(top: str) -> bool:
    """Of the standard library, of site-packages, or ours."""
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "resilient_train":
        return True
    spec = _spec(top, sys.path)
    if spec is None or spec.origin is None:
        return False
    places = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    return any(Path(spec.origin).is_relative_to(place) for place in places)


def _local_files(each: Wanted, folder: str) -> Iterator[Path]:
    yield from _files(each.module, [folder])
    for name in each.names:
        yield from _files(f"{each.module}.{name}", [folder])


def _files(module: str, search: Sequence[str]) -> Iterator[Path]:
    """The sources of a module and of the packages that it lies in, outermost first."""
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, list(search))
        if spec is None:
            return
        if spec.origin is not None and spec.origin.endswith(".py"):
            yield Path(spec.origin)
        search = list(spec.submodule_search_locations or ())
        if not search:
            return


def _top_imports(_path: Path, tree: ast.Module) -> Iterator[Wanted]:
    return _imports(tree.body)


def _all_imports(path: Path, tree: ast.Module) -> Iterator[Wanted]:
    """In functions, conditions and packages as well."""
    nodes = list(ast.walk(tree))
    yield from _imports(nodes)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.level:
            yield from _relative(path, node)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[Wanted]:
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Wanted(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != "__future__":
            yield Wanted(node.module, tuple(alias.name for alias in node.names if alias.name != "*"))


def _relative(path: Path, node: ast.ImportFrom) -> Iterator[Wanted]:
    """``from .sibling import name`` in a file of a package, by its full name."""
    package = path.parent
    for _ in range(node.level - 1):
        package = package.parent
    parts: list[str] = [node.module] if node.module else []
    while (package / "__init__.py").is_file():
        parts.insert(0, package.name)
        package = package.parent
    if parts:
        yield Wanted(".".join(parts), tuple(alias.name for alias in node.names if alias.name != "*"))


def _is_named(node: ast.expr, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def _is_late(key: ast.expr | str | None) -> bool:
    name = key.value if isinstance(key, ast.Constant) else key
    return isinstance(name, str) and (name in _LATE or name.startswith(_LATE_PREFIXES))


def _changes_late(call: ast.Call) -> bool:
    """Whether all that it names are such variables: the first thing that it is given, or entries of a dict there."""
    keys: list[ast.expr | str | None] = [*call.args[:1]]
    if isinstance(call.func, ast.Attribute) and call.func.attr == "update":
        given = (each.keys if isinstance(each, ast.Dict) else [each] for each in call.args)
        keys = [*chain.from_iterable(given), *(each.arg for each in call.keywords)]
    return bool(keys) and all(map(_is_late, keys))


def _sets_environment(tree: ast.Module) -> int:
    """The line that does, in a function as well; 0: none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_named(node.value, "environ"):
            if not _is_late(node.slice):
                return node.lineno
        elif isinstance(node, ast.Attribute) and node.attr == "environ" and not isinstance(node.ctx, ast.Load):
            return node.lineno
        elif isinstance(node, ast.Call):
            call = node.func
            of_environ = isinstance(call, ast.Attribute) and call.attr in _CHANGES and _is_named(call.value, "environ")
            if (of_environ or any(_is_named(call, name) for name in _SETTERS)) and not _changes_late(node):
                return node.lineno
    return 0


def _is_path(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "path" and _is_named(node.value, "sys")


def _moves_path(tree: ast.Module) -> bool:
    """Whether something may come to stand in front of ``sys.path``. What is appended hides nothing."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _PATH_CHANGES and _is_path(node.func.value):
                return True
        elif (
            isinstance(node, ast.Attribute | ast.Subscript)
            and not isinstance(node.ctx, ast.Load)
            and _is_path(node.value if isinstance(node, ast.Subscript) else node)
        ):
            return True
    return False


def target_of(command: Sequence[str]) -> Script | str:
    """``script_of``, where the script's file is there to be read now."""
    target = script_of(command)
    if isinstance(target, Script) and target.script and not Path(target.script).is_file():
        return _no_source(target.script)
    return target


def script_of(command: Sequence[str]) -> Script | str:
    """What ``python -u SCRIPT ARGUMENTS`` or ``python -u -m MODULE ARGUMENTS`` runs; else why that is not known. By the
    command alone: while a job runs, its script's file may go (an editor, a checkout), and the ranks stay what they are.
    """
    if not command or command[0] != sys.executable:
        return "the ranks are started by a command of their own (--no-python, PYTHON_EXEC), and not by this Python"
    rest = list(command[1:])
    if not rest or rest.pop(0) != "-u":
        return "the ranks are started by a command of their own (--no-python), and not as `python -u SCRIPT`"
    if len(rest) >= 2 and rest[0] == "-m":
        return Script(module=rest[1], arguments=tuple(rest[2:]))
    if not rest or rest[0].startswith("-"):
        return "the ranks do not run a script"
    script = Path(rest[0])
    if script.suffix != ".py":
        return _no_source(str(script))
    return Script(script=str(script), arguments=tuple(rest[1:]))


def _no_source(script: str) -> str:
    return f"{script} is not a Python source file (.py)"
