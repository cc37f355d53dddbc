"""Reads the signatures of torch_npu's recovery verbs out of its sources, without importing it (that needs CANN).

``python tests/pure/npu_signatures.py FOLDER`` prints what ``npu_signatures.json`` holds. FOLDER is the package itself,
say the ``torch_npu`` of an unpacked wheel.
"""

import ast
import contextlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

VERBS = (
    "npu.is_initialized",
    "npu.current_device",
    "npu.set_device",
    "npu.synchronize",
    "npu.stop_device",
    "npu.check_uce_in_memory",
    "npu.restart_device",
    "npu._recovery.update_npu_tensor_to_safe",
    "distributed.reinit_process_group",
    "npu.get_rng_state",
    "npu.set_rng_state",
)
COMMITTED = Path(__file__).with_suffix(".json")


def read(package: Path) -> dict[str, Any]:
    """``{"version": ..., "verbs": {name: {"file": ..., "parameters": [[name, kind, default or null], ...]}}}``."""
    return {
        "version": _version(package),
        "verbs": {verb: _verb(package, *verb.rpartition(".")[::2]) for verb in VERBS},
    }


def _version(package: Path) -> str:
    for node in ast.parse((package / "version.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise LookupError(f"{package} says no version")


def _verb(package: Path, module: str, name: str) -> dict[str, Any]:
    """Where ``module.name`` is defined, following the module's own imports of it, and what it takes."""
    file = _file(package / Path(*module.split(".")))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return {"file": str(file.relative_to(package.parent)), "parameters": _parameters(node.args)}
        names = [alias.asname or alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.ImportFrom) and (name in names or "*" in names):
            if node.module is None or not (node.level or node.module.startswith(package.name)):
                continue
            here = module if file.name == "__init__.py" else module.rpartition(".")[0]
            target = f"{here}.{node.module}" if node.level else node.module.removeprefix(f"{package.name}.")
            with contextlib.suppress(LookupError if "*" in names else ()):
                return _verb(package, target, name)
    raise LookupError(f"{module}.{name} is neither defined nor imported in {file}")


def _file(path: Path) -> Path:
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parameters(args: ast.arguments) -> list[list[str | None]]:
    assert [args.vararg, *args.posonlyargs, args.kwarg] == [None, None], "a kind of parameter that is not read here"
    defaults: list[ast.expr | None] = [None] * (len(args.args) - len(args.defaults)) + list(args.defaults)
    either = inspect.Parameter.POSITIONAL_OR_KEYWORD
    found = [(arg, either, default) for arg, default in zip(args.args, defaults, strict=True)]
    found += [(a, inspect.Parameter.KEYWORD_ONLY, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [[arg.arg, kind.name, ast.unparse(default) if default else None] for arg, kind, default in found]


def signature(verb: str) -> inspect.Signature:
    """The committed signature."""
    parameters = []
    for name, kind, default in json.loads(COMMITTED.read_text())["verbs"][verb]["parameters"]:
        value = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        parameters.append(inspect.Parameter(name, inspect._ParameterKind[kind], default=value))
    return inspect.Signature(parameters)


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1])), indent=2))
