"""The documents say what the code says: protocols and their caps, messages, records, and files that there are."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from functools import cache

import pytest
from imports import ROOT

from fusion.runtime.job.protocol import PROTOCOLS
from fusion.runtime.training.step import messages
from fusion.swarm.directory.records import KIND_OF
from fusion.swarm.protocol import WireProtocol

TEXTS = sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
FOLDERS = ("cli", "compression", "dag", "docs", "examples", "runtime", "swarm", "tests")
# What a reader takes for a file or folder of ours: `swarm/blobs/`, `runtime/job/protocol.py`, `examples/*.toml`.
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./*-]*)")


@cache
def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def lines(name: str, start: str) -> list[str]:
    return [line for line in text(name).split("\n") if line.startswith(start)]


def names(made: type) -> str:
    return ", ".join(field.name for field in fields(made) if field.compare)  # what is on the wire


def row(protocol: WireProtocol) -> str:
    cap = protocol.payload_bytes
    size = "the job's plan says" if cap is None else f"{cap >> 20} MiB" if cap >> 20 else f"{cap >> 10} KiB"
    idle = protocol.idle_seconds
    quiet = f"{idle / 3600:g} h" if idle >= 3600 else f"{idle / 60:g} min"
    return f"| `{protocol.name}` | {protocol.about} | {size} | {quiet} | {protocol.stripes} |"


def test_the_list_of_protocols() -> None:
    assert lines("docs/protocols.md", "| `/fusion/") == [row(protocol) for protocol in PROTOCOLS]


def test_names_of_protocols_stand_in_the_lists_alone() -> None:
    homes = {ROOT / "swarm/protocol.py", ROOT / "runtime/job/protocol.py"}
    product = (path for folder in ("cli", "runtime", "swarm") for path in (ROOT / folder).rglob("*.py"))
    assert [
        str(path) for path in product if path not in homes and '"/fusion/' in path.read_text("utf-8")
    ] == []


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_every_protocol_has_a_section(protocol: WireProtocol) -> None:
    assert len(lines("docs/protocols.md", f"## `{protocol.name}`")) == 1


def test_the_messages_of_a_step() -> None:
    told = {f"| `{kind}` | {names(made)} |" for kind, made in messages.KINDS.items()}
    _missing("docs/protocols.md", told)
    for made in (messages.Hello, messages.TensorHeader):
        assert f"{{{names(made)}}}" in " ".join(text("docs/protocols.md").split())


def test_the_records_of_the_directory() -> None:
    told = lines("docs/protocols.md", "| ")
    for made, kind in KIND_OF.items():
        assert any(
            line.startswith(f"| {kind} | ") and line.endswith(f"| {names(made)} |") for line in told
        ), made


@pytest.mark.parametrize("name", TEXTS)
def test_the_files_that_are_named_are_there(name: str) -> None:
    if name == "CHANGELOG.md":
        pytest.skip("it tells of what was")
    roots = (ROOT, ROOT / "tests") if name == "docs/testing.md" else (ROOT,)
    wrong = [
        path
        for path in PATH.findall(text(name))
        if not any(list(root.glob(path.rstrip("/"))) for root in roots)
    ]
    assert wrong == [], f"{name} names files that are not there"


@pytest.mark.parametrize("name", TEXTS)
def test_links_between_documents_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    linked = [path for path in re.findall(r"\]\(([^)#]+)\)", text(name)) if "://" not in path]
    assert [path for path in linked if not (folder / path).exists()] == []


def _missing(name: str, starts: Iterable[str]) -> None:
    missing = [start for start in sorted(starts) if not lines(name, start)]
    assert missing == [], f"{name} should have lines that begin so"


def test_the_hops_of_the_walks_are_there() -> None:
    hops = re.findall(r"`([\w/]+\.py):(\w+)`", text("docs/design.md"))
    assert len(hops) > 40
    defined = {path: re.findall(r"^ *(?:async )?def (\w+)\(", text(path), re.M) for path, _ in hops}
    assert [f"{path}:{name}" for path, name in hops if name not in defined[path]] == []


def test_the_map_of_the_folder_without_a_docstring() -> None:
    mapped = {line.split("`")[1] for line in lines("docs/design.md", "| `compression/")}
    assert mapped == {str(path.relative_to(ROOT)) for path in (ROOT / "compression").glob("*.py")}


def mapped_folders() -> list[str]:
    files = (
        path for layer in ("cli", "dag", "runtime", "swarm") for path in (ROOT / layer).rglob("__init__.py")
    )
    return sorted(str(path.parent.relative_to(ROOT)) for path in files)


@pytest.mark.parametrize("folder", mapped_folders())
def test_the_map_of_a_folder_names_what_is_there(folder: str) -> None:
    docstring = ast.get_docstring(ast.parse(text(f"{folder}/__init__.py"))) or ""
    named = re.findall(r"^(\w+/?) {3,}\S", docstring, re.M)
    modules = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__"}
    rooms = {f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")}
    assert sorted(named) == sorted(modules | rooms), f"{folder}/__init__.py is the map of {folder}"


def test_the_versions_of_python_are_the_same_for_pip_for_make_and_for_readers() -> None:
    """pip would try on any newer one as well, and end with what some library of ours says of it."""
    assert tomllib.loads(text("pyproject.toml"))["project"]["requires-python"] == ">=3.11,<3.14"
    assert "(3, 11) <= sys.version_info < (3, 14)" in text("Makefile")
    assert "Needs Python 3.11 to 3.13" in text("README.md")
