"""Nothing that arrives in a message can become code: the package holds no loader of code or of pickled objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from imports import ROOT, modules

FORBIDDEN_MODULES = frozenset(
    {
        *(
            "pickle",
            "cPickle",
            "_pickle",
            "pickletools",
            "cloudpickle",
            "dill",
            "joblib",
            "marshal",
            "shelve",
            "copyreg",
        ),
        *("importlib", "imp", "runpy", "pkgutil", "code", "codeop", "zipimport", "yaml"),
    }
)
HARMLESS_MODULES = frozenset({"importlib.metadata"})  # reads the version of an installed distribution
# Runs a file that the user names in a job file, on the machine that launches the job. What a peer loads has no way to it.
OF_THE_USER = {"runtime/capture/python/python_file.py": {"importlib.util"}}
FORBIDDEN_BUILTINS = frozenset({"eval", "exec", "compile", "__import__"})
# Attribute calls that read pickles or run what a file says, by the name of the module they hang on.
FORBIDDEN_CALLS = frozenset(
    {
        *(
            "torch.load",
            "torch.save",
            "torch.jit.load",
            "torch.export.load",
            "torch.hub.load",
            "torch.package",
        ),
        *("numpy.load", "np.load", "yaml.load", "os.system", "os.popen"),
    }
)


def dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_forbidden_module(name: str) -> bool:
    return name not in HARMLESS_MODULES and name.partition(".")[0] in FORBIDDEN_MODULES


def sins(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in a file that could turn bytes into code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if is_forbidden_module(alias.name))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            if is_forbidden_module(module) and not set(names[1:]) <= HARMLESS_MODULES:
                yield node.lineno, module
            yield from ((node.lineno, name) for name in names if name in FORBIDDEN_CALLS)
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_BUILTINS:
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            name = dotted(node)
            if name in FORBIDDEN_CALLS or name.startswith("builtins.") or node.attr == "__import__":
                yield node.lineno, name
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "trust_remote_code"):
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                yield node.value.lineno, node.arg
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            yield node.value.lineno, "shell="


def test_no_way_from_bytes_to_code() -> None:
    found = {path.relative_to(ROOT).as_posix(): list(sins(path.read_text("utf-8"))) for path in modules()}
    assert (
        found
        and {path: {what for _, what in sinful} for path, sinful in found.items() if sinful} == OF_THE_USER
    )


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import importlib",
        "from importlib import import_module",
        "import importlib.util",
        "x = eval('1')",
        "run = exec",
        "compile('1', '', 'eval')",
        "__import__('os')",
        "import builtins\nbuiltins.eval('1')",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import torch\ntorch.jit.load('x')",
        "import numpy as np\nnp.load('x')",
        "f(allow_pickle=True)",
        "f(trust_remote_code=flag)",
        "import yaml",
        "subprocess.run('x', shell=True)",
    ],
)
def test_the_check_sees(source: str) -> None:
    assert list(sins(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)",
        "from importlib.metadata import version",
        "f(trust_remote_code=False)",
        "model.eval()",
        "from safetensors.torch import load_file",
    ],
)
def test_the_check_lets_pass(source: str) -> None:
    assert not list(sins(source))
