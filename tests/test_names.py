"""Every name that a tool of the tests imports from the product, or replaces in it, exists. Benchmarks, sweeps and attacks are commands,
so no other test would find out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from imports import ROOT, source


@cache
def defined(file: str) -> frozenset[str]:
    """The names that a module binds, at any depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found.update((alias.asname or alias.name).split(".")[0] for alias in names)
    return frozenset(found)


def missing(tree: ast.AST) -> Iterator[str]:
    """The product's names that a file uses and that do not exist."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("fusion."):
            file = source(str(node.module))
            for alias in node.names:
                if inner := source(f"{node.module}.{alias.name}"):
                    modules[alias.asname or alias.name] = inner
                elif file is None or alias.name not in defined(file):
                    yield f"line {node.lineno}: {node.module} has no {alias.name}"
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                pass
            case ast.Call(
                func=ast.Attribute(attr="setattr"), args=[ast.Name(id=module), ast.Constant(name), *_]
            ) if module in modules:
                pass
            case _:
                continue
        if not name.startswith("__") and name not in defined(modules[module]):
            yield f"line {node.lineno}: {modules[module]} has no {name}"


def test_the_tools_of_the_tests_name_what_exists() -> None:
    files = [file for file in sorted((ROOT / "tests").rglob("*.py")) if not file.name.startswith("test_")]
    found = [
        f"{file.relative_to(ROOT)}, {what}" for file in files for what in missing(ast.parse(file.read_text()))
    ]
    assert len(files) > 150 and not found, "\n".join(found)


def test_a_name_that_is_gone_is_found() -> None:
    gone = "from fusion.swarm import errors\nfrom fusion.swarm.errors import SwarmError, Gone\nerrors.Lost = 1\nmonkeypatch.setattr(errors, 'Old', 1)\n"
    assert [line.split(": ")[0] for line in missing(ast.parse(gone))] == ["line 2", "line 3", "line 4"]
    assert list(missing(ast.parse("from fusion.nowhere import x"))) == ["line 1: fusion.nowhere has no x"]
