"""The product's import graph: folders, the edges between them, circles, fan-outs and files.

`python tests/imports.py` prints it and exits with 1 when folders form a circle, a module imports more than 15 others or
a folder holds more than 20 Python files (its `__init__.py` is one of them). Every folder at any depth is a node of its
own: `dag` and `dag/rewrites` are two. Imports inside functions and under TYPE_CHECKING count like any others; what they
spare is time, not knowledge. tests/test_layering.py judges the same graph.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("swarm", "dag", "compression", "runtime", "cli")
MOST_IMPORTS = 15
MOST_FILES = 20


def modules() -> list[Path]:
    return sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def folder(module: str) -> str:
    """`runtime/planes` for `runtime/planes/cpu.py`."""
    return module.rpartition("/")[0]


def source(name: str) -> str | None:
    """The file of the dotted module or package `name`, relative to the root; None if it is none of the product's."""
    package, _, rest = name.partition(".")
    if package != "fusion" or not rest:
        return None
    path = ROOT.joinpath(*rest.split("."))
    if path.with_suffix(".py").is_file():
        return relative(path.with_suffix(".py"))
    return relative(path / "__init__.py") if path.is_dir() else None


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """(line, dotted name) of everything a file imports, inside functions and TYPE_CHECKING blocks as well.

    The name is that of a module or package: `from fusion.swarm import errors` is `fusion.swarm.errors`.
    """
    found = list[tuple[int, str]]()
    for node in _statements(ast.parse(path.read_text("utf-8"), str(path))):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.append((node.lineno, inner if source(inner) else node.module))
    return tuple(found)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Every statement of a file, whatever it lies in; its expressions, of which there are ten times as many, not."""
    rest = [tree]
    while rest:
        node = rest.pop()
        yield node
        for part in ("body", "orelse", "handlers", "finalbody", "cases"):
            below = getattr(node, part, ())
            if isinstance(below, list):
                rest += below


def fan_out() -> dict[str, set[str]]:
    """Every module of the product, and the others of them that it imports, as paths relative to the root."""
    known = {
        relative(path): {source(name) for _, name in imports(path)} - {None, relative(path)}
        for path in modules()
    }
    return {module: {other for other in others if other} for module, others in known.items()}


def folder_edges() -> Counter[tuple[str, str]]:
    """How many imports lead from one folder to another: pairs of modules, not lines."""
    return Counter(
        (folder(module), folder(other))
        for module, others in fan_out().items()
        for other in others
        if folder(module) != folder(other)
    )


def circles() -> list[list[str]]:
    """The groups of folders that all reach each other through imports; none, where imports point one way."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(list(folder_edges())))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def file_counts() -> Counter[str]:
    """Python files in each folder, without those of the folders below it."""
    return Counter(folder(relative(path)) for path in modules())


def complaints() -> Iterator[str]:
    edges = folder_edges()
    for group in circles():
        inside = sorted((count, *edge) for edge, count in edges.items() if {*edge} <= {*group})
        ways = ", ".join(f"{before} -> {after} ({count})" for count, before, after in inside)
        yield f"circle of {len(group)} folders: {ways}"
    for module, others in sorted(fan_out().items()):
        if len(others) > MOST_IMPORTS:
            yield f"{module} imports {len(others)} modules, at most {MOST_IMPORTS}"
    for name, count in sorted(file_counts().items()):
        if count > MOST_FILES:
            yield f"{name} holds {count} files, at most {MOST_FILES}"


def main() -> int:
    edges, fans, counts = folder_edges(), fan_out(), file_counts()
    print(f"{len(counts)} folders, {len(fans)} files, {len(edges)} edges between folders\n")
    for name, count in sorted(counts.items()):
        print(f"{name}  ({count} files)")
        for (before, after), times in sorted(edges.items()):
            if before == name:
                print(f"    -> {after}  {times}")
    print("\nmodules that import most")
    for module, others in sorted(fans.items(), key=lambda item: (-len(item[1]), item[0]))[:10]:
        print(f"    {len(others):3}  {module}")
    wrong = list(complaints())
    print("\n" + ("\n".join(wrong) or "no circle; no module and no folder is too large"))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
