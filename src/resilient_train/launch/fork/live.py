"""Runs a script as ``python SCRIPT`` or ``python -m MODULE`` would, in a process that began as something else.

That is a fork of the zygote, or a new interpreter that has looked at this package first, so that
``init_process_group`` is ours before the script takes it by its name (``from torch.distributed import ...``).
"""

from __future__ import annotations

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from resilient_train import config
from resilient_train._imported import BOOT, watch
from resilient_train.integrations.mindio import finder
from resilient_train.launch.fork.imports import Script, hidden, script_of, target_of
from resilient_train.launch.fork.kept_code import KeptCode


def cold(command: Sequence[str]) -> tuple[str, ...]:
    """The command that starts ``command``'s script in a new interpreter; the command itself where it is no script.

    Behind ``BOOT`` stands what ``python -u`` would have been given.
    """
    if isinstance(target_of(command), str):
        return tuple(command)
    return (command[0], "-u", "-c", BOOT, *command[2:])


def begin() -> None:
    """The main module's one call in a new interpreter, see ``BOOT``."""
    if not sys.flags.safe_path:
        del sys.path[0]  # the current directory, which `-c` puts there
    if config.is_hosted():
        finder.install()
    command = (sys.executable, "-u", *sys.argv[1:])
    target = script_of(command)
    if isinstance(target, str):
        sys.exit(f"resilient-run: {target}")
    if hidden(target.folder()):  # by what this package has imported already: then as if it had not
        os.execv(command[0], command)  # noqa: S606 - no shell
    live(command, target)


def live(command: Sequence[str], target: Script) -> None:
    """Runs the script. What it raises passes through: to be called with as little beneath as there can be."""
    main = ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=builtins)
    sys.modules["__main__"] = main
    sys.orig_argv[:] = command
    kept = KeptCode(Path(config.kept_code()), config.joins_late) if config.kept_code() else None
    folder = target.folder()
    if kept is not None:
        kept.install()
        folder = folder and kept.scripts_folder(folder)
    if folder:
        sys.path.insert(0, folder)
    sys.argv[:] = [target.script or "-m", *target.arguments]
    watch()
    try:
        if target.module:
            runpy._run_module_as_main(target.module)  # type: ignore[attr-defined] # noqa: SLF001 - what -m itself calls
        else:
            exec(_compiled(target.script, main, kept), main.__dict__)  # noqa: S102 - what this process is for
    except BaseException as error:
        if not isinstance(error, SystemExit):
            sys.excepthook = _Hook(sys.excepthook)
        raise


def _compiled(script: str, main: ModuleType, kept: KeptCode | None) -> CodeType:
    path = script if os.path.isabs(script) else f"{Path.cwd()}/{script}"  # noqa: PTH117 - not normalized, like Python's
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    text = kept.text(path) if kept is not None else Path(path).read_bytes()
    return compile(text, path, "exec", dont_inherit=True)


class _Hook:
    """The hook that was there, told of the script's frames only."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.excepthook = self._hook
        inner = trace
        while inner is not None and inner.tb_frame.f_code is not live.__code__:
            inner = inner.tb_next
        if inner is not None:
            trace = inner.tb_next
        sys.last_traceback = trace
        self._hook(kind, error.with_traceback(trace), trace)
