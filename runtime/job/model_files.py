"""Checks of a model's directory or file, before anything slow is loaded and any peer is contacted: a user who names the wrong one
gets the error at once. Loads no library."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError

GRAPH_FILE = "inference.graph"  # these three are in a directory that `jobs export` wrote
ABOUT_FILE = "fusion.json"
WEIGHTS_FILE = "model.safetensors"
# Prefix of variables that no state_dict of the module has: they are not in WEIGHTS_FILE
CONSTANT = "constant:"
CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
MAX_JSON_BYTES = 64 << 20  # the index of a model of 100,000 tensors has about 10 MB
# How a chat is written as a prompt, under Hugging Face's names and in its formats; both are files of a job, for gateways.
CHAT_TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TOOL_TEMPLATE_FILE = (
    "chat_template_tool_use.jinja"  # rendered instead of the other where tools are given; in jobs only
)
TEMPLATES_FOLDER = "additional_chat_templates"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"
CHAT_FILES = {
    **dict.fromkeys((CHAT_TEMPLATE_FILE, TOOL_TEMPLATE_FILE), 256 << 10),
    SPECIAL_TOKENS_FILE: 16 << 10,
}  # the most bytes of each
# Its path in a model's directory, if not its name.
WRITTEN_AS = {TOOL_TEMPLATE_FILE: f"{TEMPLATES_FOLDER}/tool_use.jinja"}
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = (2, 3)
_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of a Git LFS pointer file
# Names of files with weights in formats that are not read.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.onnx")
_WITHIN = ("*", "snapshots/*")  # folders of a run's checkpoints, and of a model in Hugging Face's cache
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def is_exported(variable: str) -> bool:
    """Whether the module's own state_dict has this variable; a constant (a rotary table, say) is not in it."""
    return not variable.startswith(CONSTANT)


def check_model(path: Path) -> None:
    """JobError in one line unless this looks like a directory or a GGUF file that can be served."""
    if path.is_file():
        check_gguf(path)
    elif not path.is_dir():
        raise JobError(f"{path} is not a directory or a GGUF file{_of_hub(path)}")
    elif not is_exported_directory(path):
        check_huggingface(path)
    elif not (path / WEIGHTS_FILE).is_file():
        raise JobError(f"{path} has no {WEIGHTS_FILE}")


def _of_hub(path: Path) -> str:
    """A hint for a name of the Hugging Face hub, OWNER/NAME, that is no path here."""
    parts = path.parts
    if len(parts) != 2 or not all(_HUB_NAME.fullmatch(part) for part in parts) or path.parent.exists():
        return ""
    return f"; for a model of the Hugging Face hub, fetch it first (hf download {path} --local-dir {path.name}) and serve {path.name}"


def check_fetched(path: Path) -> None:
    """JobError for a Git LFS pointer in the place of a file. Does not check whether the file can be read."""
    try:
        with path.open("rb") as file:
            start = file.read(len(_POINTER))
    except OSError:
        return
    if start == _POINTER:
        raise JobError(f"{path} is only git's pointer to a large file: fetch the file itself (git lfs pull)")


def check_whole(path: Path) -> None:
    """JobError for a safetensors file that ends before its tensors do, as after an interrupted download. Other errors are left to
    its reader."""
    check_fetched(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_JSON_BYTES:
                return
            header = file.read(length)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    if size < 8 + length:
        raise JobError(f"{path} ends in its header: it is not whole")
    whole = 8 + length + _end_of_tensors(header)
    if size < whole:
        raise JobError(f"{path} has {size} of its {whole} bytes: it is not whole")


def _end_of_tensors(header: bytes) -> int:
    """Where the last tensor ends, in bytes behind the header; 0 for an invalid header."""
    try:
        entries: dict[str, Any] = json.loads(header)
        return max(int(e["data_offsets"][1]) for key, e in entries.items() if key != "__metadata__")
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError, OverflowError):
        return 0


def check_gguf(path: Path) -> None:
    """JobError in one line unless the file begins as a GGUF file that can be read, and what reads it is installed."""
    check_fetched(path)
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}") from error
    if start[:4] != GGUF_MAGIC:
        raise JobError(f"{path} is not a GGUF file; of other formats the directory is served, not one file")
    if len(start) < 8:
        raise JobError(f"{path} ends in its version: it is not whole")
    version = int.from_bytes(start[4:], "little")
    if version not in GGUF_VERSIONS:
        raise JobError(f"{path} is a GGUF file of version {version}; 2 and 3 are read, little-endian")
    _need("reading a GGUF file", "transformers", "gguf")


def is_exported_directory(directory: Path) -> bool:
    return (directory / ABOUT_FILE).is_file() and (directory / GRAPH_FILE).is_file()


def check_huggingface(directory: Path, *, weights: bool = True) -> None:
    """JobError in one line unless a Hugging Face model can be read from here, as far as its files' names tell."""
    if (directory / ADAPTER_FILE).is_file():
        raise JobError(
            f"{directory} holds an adapter ({ADAPTER_FILE}), which is not read: merge it into its model (merge_and_unload of peft) "
            "and serve the directory that this saves"
        )
    if not (directory / CONFIG_FILE).is_file():
        hint = _gguf_hint(directory) or _hint_within(directory)
        raise JobError(f"{directory} has no {CONFIG_FILE}: it is not a Hugging Face model directory{hint}")
    json_object(directory / CONFIG_FILE)
    if weights:
        found = indexed_files(directory)
        one = directory / WEIGHTS_FILE
        held = [one] if one.is_file() else directory.glob("*.safetensors")
        for path in sorted(set(held if found is None else found.values())):
            check_whole(path)
    _need("reading a Hugging Face model", "transformers")


def _gguf_hint(directory: Path) -> str:
    held = next(iter(sorted(directory.glob("*.gguf"))), None)
    return "" if held is None else f"; it holds {held.name}, which can be served as a file"


def _hint_within(directory: Path) -> str:
    found = (path for pattern in _WITHIN for path in sorted(directory.glob(f"{pattern}/{CONFIG_FILE}")))
    held = next(found, None)
    return "" if held is None else f"; {held.parent.relative_to(directory)} in it is one"


def _need(what: str, *packages: str) -> None:
    for package in packages:
        if not _installed(package):
            raise JobError(f'{what} needs {package}: pip install "fusion-peer[huggingface]"')


@functools.cache
def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version  # only now: it loads the parser of mails

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def indexed_files(directory: Path) -> dict[str, Path] | None:
    """The file of each stored tensor by the directory's index; None where there is none, or WEIGHTS_FILE, which goes before it, as
    in transformers. JobError where files are missing."""
    index = directory / INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file() or not index.is_file():
        held = sorted(directory.glob("*.safetensors"))
        if not held:
            raise JobError(f"{directory} has no *.safetensors{_other_weights(directory)}")
        for path in [] if (directory / WEIGHTS_FILE).is_file() else held:
            if not path.is_file():  # to open a pipe is to wait for ever
                raise JobError(f"{path} {'leads to no' if path.is_symlink() else 'is not a'} file")
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


def _other_weights(directory: Path) -> str:
    """A hint at weights of another format that the directory has."""
    found = (path for pattern in _OTHER_WEIGHTS for path in sorted(directory.glob(pattern)))
    other = next((path.name for path in found if path.name != "training_args.bin"), None)
    if other is None:
        return _gguf_hint(directory) or ": its weights are not there"
    return (
        f": {other!r:.80} is of a format that can run code, and is not read; save it as safetensors, with from_pretrained and "
        "save_pretrained of transformers where you trust it"
    )


def check_own(path: Path, directory: Path) -> None:
    """JobError unless a file of a model's directory is in it, or among the blobs of Hugging Face's cache: a link in a downloaded
    model may lead to any file that the user can read, and serving the model would publish it to the swarm."""
    own, found = directory.resolve(), path.resolve()
    if not any(found.is_relative_to(each) for each in (own, own.parent.parent / "blobs")):
        raise JobError(
            f"{path} is a link to {found}, which the whole swarm would be given: put a copy in its place"
        )


class NoJSON(JobError):
    """A file that holds no JSON."""


def json_object(path: Path) -> dict[str, Any]:
    """JobError for a file that holds no JSON object, or has more than MAX_JSON_BYTES."""
    found = json_value(path)
    if not isinstance(found, dict):
        raise JobError(f"{path} holds no JSON object")
    return found


def json_value(path: Path) -> Any:
    """NoJSON for a file that holds none; JobError for one that has more than MAX_JSON_BYTES."""
    data = read_capped(path, MAX_JSON_BYTES)
    try:
        return json.loads(data)  # UTF-8, whatever the locale is
    except (ValueError, RecursionError) as error:
        raise NoJSON(f"{path} cannot be read: {error}") from error


def read_capped(path: Path, most: int) -> bytes:
    """The bytes of a model's file. JobError where it cannot be read, or has more than `most`."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(most + 1) if size <= most else b""
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error}") from error
    if (size := max(size, len(data))) > most:  # a device has no size of its own
        raise JobError(f"{path} has {size} bytes; the limit is {most}")
    return data


def chat_files(directory: Path) -> dict[str, bytes]:
    """The contents of CHAT_FILES for the model in a directory, from whichever of its files has them; none for a model without a
    chat template. JobError for files that cannot be read, or a template that is too long."""
    path = directory / TOKENIZER_CONFIG_FILE
    config = json_object(path) if path.is_file() else {}
    templates = _chat_templates(directory, config)
    if "default" not in templates:
        return {}
    path = directory / SPECIAL_TOKENS_FILE
    tokens = {**special_tokens(json_object(path) if path.is_file() else {}), **special_tokens(config)}
    return chat_contents(templates["default"], tokens, directory, templates.get("tool_use"))


def chat_without_default(directory: Path) -> str:
    """A line for a model with named chat templates only, none of them "default"; empty for others."""
    config = directory / TOKENIZER_CONFIG_FILE
    templates = _chat_templates(directory, json_object(config) if config.is_file() else {})
    if not templates or "default" in templates:
        return ""
    names = ", ".join(f"{name!r:.40}" for name in sorted(templates)[:4])
    return f"its chat templates are {names}, and none is called default: it cannot be chatted with"


def chat_contents(
    template: str, tokens: Mapping[str, str], model: Path, tool_template: str | None = None
) -> dict[str, bytes]:
    """The contents of CHAT_FILES for a template and the special tokens that it may name. `tool_template`: instead of it where tools
    are given. JobError for one that is too long, or cannot be encoded."""
    try:
        contents = {CHAT_TEMPLATE_FILE: template.encode()}
        if tool_template is not None:
            contents[TOOL_TEMPLATE_FILE] = tool_template.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can hold
        raise JobError(f"{model}: chat_template cannot be read: {error}") from None
    contents[SPECIAL_TOKENS_FILE] = json.dumps(tokens).encode()
    for name, content in contents.items():
        if len(content) > CHAT_FILES[name]:
            raise JobError(f"{model}: {name} has {len(content)} bytes; the limit is {CHAT_FILES[name]}")
    return contents


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token that a chat template may name."""
    found = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name, in transformers' order of precedence: files of their own, then the tokenizer's configuration, then the processor's
    file."""
    written = {"default": directory / CHAT_TEMPLATE_FILE}
    written |= {path.stem: path for path in sorted((directory / TEMPLATES_FOLDER).glob("*.jinja"))}
    found = {name: _template_text(path) for name, path in written.items() if path.is_file()}
    templates, processor = config.get("chat_template"), directory / PROCESSOR_TEMPLATE_FILE
    if found:
        return found
    if templates is None and processor.is_file():
        check_own(processor, directory)
        templates = json_object(processor).get("chat_template")
    if isinstance(templates, list):
        templates = {str(t.get("name")): t.get("template") for t in templates if isinstance(t, dict)}
    if isinstance(templates, str):
        templates = {"default": templates}
    named = templates.items() if isinstance(templates, dict) else ()
    return {str(name): template for name, template in named if isinstance(template, str)}


def _template_text(path: Path) -> str:
    try:
        check_own(path, path.parent if path.parent.name != TEMPLATES_FOLDER else path.parent.parent)
        return read_capped(path, CHAT_FILES[CHAT_TEMPLATE_FILE]).decode()
    except (OSError, UnicodeError) as error:
        raise JobError(f"{path} cannot be read: {error}") from error
