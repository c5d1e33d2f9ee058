"""What must lie in a model's directory, looked at before anything slow is loaded or anybody is asked: whoever names the
wrong directory hears of it at once. Loads no library."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError

GRAPH_FILE = "inference.graph"  # these three are in a directory that `jobs export` wrote
ABOUT_FILE = "fusion.json"
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"


def check_directory(directory: Path) -> None:
    """JobError in one line unless this looks like a directory that can be served."""
    if not directory.is_dir():
        raise JobError(f"{directory} is not a directory")
    if not is_exported_directory(directory):
        check_huggingface(directory)
    elif not (directory / WEIGHTS_FILE).is_file():
        raise JobError(f"{directory} has no {WEIGHTS_FILE}")


def is_exported_directory(directory: Path) -> bool:
    return (directory / ABOUT_FILE).is_file() and (directory / GRAPH_FILE).is_file()


def check_huggingface(directory: Path, *, weights: bool = True) -> None:
    """JobError in one line unless a Hugging Face model can be read from here, as far as its files' names tell."""
    if not (directory / CONFIG_FILE).is_file():
        raise JobError(f"{directory} has no {CONFIG_FILE}: it is not a Hugging Face model directory")
    json_object(directory / CONFIG_FILE)
    if weights:
        indexed_files(directory)
    try:
        version("transformers")
    except PackageNotFoundError:
        raise JobError(
            'reading a Hugging Face model needs transformers: pip install "fusion-peer[huggingface]"'
        ) from None


def indexed_files(directory: Path) -> dict[str, Path] | None:
    """The file of each stored tensor as the directory's index has it; None where there is no index, and every
    *.safetensors counts. JobError where files are missing."""
    index = directory / INDEX_FILE
    if not index.is_file():
        if not any(directory.glob("*.safetensors")):
            raise JobError(
                f"{directory} has no *.safetensors: other formats of weights can run code and are not read"
            )
        return None
    names = json_object(index).get("weight_map", {})
    if not isinstance(names, dict):
        raise JobError(f"{index}: weight_map must be an object")
    # Only the file's name counts: an index cannot point outside the directory.
    found = {str(tensor): directory / Path(str(name)).name for tensor, name in names.items()}
    for path in sorted(set(found.values())):
        if not path.is_file():
            raise JobError(f"{index} names {path.name}, which is not there")
    return found


def json_object(path: Path) -> dict[str, Any]:
    """JobError for a file that holds no JSON object."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise JobError(f"{path} holds no JSON object")
    return found
