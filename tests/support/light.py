"""An environment with just the packages of `pip install fusion-peer`: links to the distributions that are installed here."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "hivemind",
    "numpy",
    "networkx",
    "fastapi",
    "tokenizers",
    "safetensors",
    "uvloop",
    "transformers",
    "pydantic",
)


def light_environment(folder: Path) -> list[str]:
    """Create the links in `folder`; returns the command that runs `fusion-peer` with them and the standard library alone."""
    site = folder / "site"
    site.mkdir(parents=True)
    for name in closure():
        found = distribution(name)
        for top in tops(found):
            link = site / top.name
            if not link.exists():
                link.symlink_to(top)
    (site / "fusion").mkdir()
    for name in ("cli", "compression", "dag", "runtime", "swarm", "bootstrap_peers.txt"):
        (site / "fusion" / name).symlink_to(ROOT / name)
    assert not {path.name for path in site.iterdir()} & set(HEAVY)
    start = f"import sys; sys.path.append({str(site)!r}); from fusion.cli.main import main; sys.exit(main())"
    return [sys.executable, "-I", "-S", "-c", start]


def closure() -> set[str]:
    """The project's dependencies and theirs, without the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, found = [named(text) for text in project["dependencies"]], set[str]()
    while waiting:
        name = waiting.pop()
        if name not in found:
            try:
                needs = distribution(name).requires or []
            except PackageNotFoundError:
                continue  # for another system, or another Python
            found.add(name)
            waiting += [named(text) for text in needs if "extra ==" not in text]
    return found


def named(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return match[0].lower().replace("_", "-")


def tops(found: Distribution) -> set[Path]:
    """A distribution's top-level files and folders in site-packages."""
    place = Path(str(found.locate_file(""))).resolve()
    names = {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}
    return {place / name for name in names}


def size_bytes(folder: Path) -> int:
    """The size of all files below `folder`; each link is followed once."""
    seen: set[Path] = set()
    for top in folder.iterdir():
        for path, _, files in os.walk(top, followlinks=True) if top.is_dir() else ():
            seen |= {Path(path, file).resolve() for file in files if not file.endswith(".pyc")}
        if top.is_file():
            seen.add(top.resolve())
    return sum(path.stat().st_size for path in seen if path.exists())
