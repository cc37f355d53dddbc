"""The hand-written stub must stay true: its names and parameters are compared with the module."""

import ast
import inspect
import re
from pathlib import Path

from nanobind.stubgen import StubGen

import resilient_train
from resilient_train import _native

Signatures = dict[str, list[str]]


def signatures(source: str) -> Signatures:
    """Every public class, function and method, with the names of its parameters in order."""
    found: Signatures = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[prefix + node.name] = []
                visit(node.body, prefix + node.name + ".")
            elif isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args]
                names = [each.arg for each in arguments] + [f"*{each.arg}" for each in node.args.kwonlyargs]
                found[prefix + node.name] = [name for name in names if name not in {"self", "arg"}]
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
                found[prefix + node.target.id] = []

    visit(ast.parse(source).body, "")
    return found


def generated() -> str:
    generator = StubGen(_native)
    generator.put(_native)
    return generator.get()


def stub() -> str:
    folders = [Path(folder) for folder in resilient_train.__path__]
    return next(folder / "_native.pyi" for folder in folders if (folder / "_native.pyi").exists()).read_text()


def test_stub_has_the_names_and_parameters_of_the_module() -> None:
    assert signatures(stub()) == signatures(generated())


def test_stub_has_the_public_names_of_the_module() -> None:
    names = {name for name in dir(_native) if not name.startswith("_")}
    assert names == {name for name in signatures(stub()) if "." not in name}


def test_every_class_and_function_of_the_stub_is_documented() -> None:
    for node in ast.parse(stub()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert ast.get_docstring(node), node.name
    assert inspect.ismodule(_native)
    assert re.search(r"BOARD_VERSION: int", stub())
