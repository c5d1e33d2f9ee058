"""How a model is chatted with, wherever its files say it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fusion.runtime.capture import sources
from fusion.runtime.capture.generation import ignored_settings
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.model_files import (
    CHAT_FILES,
    chat_files,
    chat_without_default,
    check_model,
    read_capped,
)
from fusion.runtime.job.text import check_tokenizer

TEMPLATE = "{{ messages[0].content }}\u00e9\n"
NAMED = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": TEMPLATE}]


def write(directory: Path, **files: Any) -> None:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        path = directory / name.replace("___", "/").replace("__", ".")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"chat_template": TEMPLATE}},
        {"tokenizer_config__json": {"chat_template": NAMED}},
        {"tokenizer_config__json": {"chat_template": {"default": TEMPLATE}}},
        {"chat_template__jinja": TEMPLATE},
        {"chat_template__json": {"chat_template": TEMPLATE}},
        {
            "chat_template__json": {"chat_template": "other"},
            "tokenizer_config__json": {"chat_template": TEMPLATE},
        },
        {"chat_template__json": {"chat_template": "other"}, "chat_template__jinja": TEMPLATE},
        {"chat_template__jinja": TEMPLATE, "additional_chat_templates___rag__jinja": "other"},
        {"chat_template__jinja": TEMPLATE, "additional_chat_templates___tool_use__jinja": "other"},
        {"chat_template__jinja": TEMPLATE, "tokenizer_config__json": {"chat_template": "older"}},
    ],
)
def test_where_a_template_stands(files: dict[str, Any], tmp_path: Path) -> None:
    write(tmp_path, **files)
    found = chat_files(tmp_path)
    assert found["chat_template.jinja"].decode() == TEMPLATE
    tools = found.get("chat_template_tool_use.jinja")
    assert {*found, "chat_template_tool_use.jinja"} == CHAT_FILES.keys()
    assert (tools == b"other") == ("tool_use" in str(files)) and (tools is None) == (tools != b"other")
    assert chat_without_default(tmp_path) == ""


@pytest.mark.process
def test_a_file_is_utf_8_whatever_the_locale_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes('{"begins": "<\uff5cUser\uff5c>"}'.encode())
    code = "from pathlib import Path; from fusion.runtime.job.model_files import json_object as f; print(ascii(f(Path('config.json'))))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "{'begins': '<\\uff5cUser\\uff5c>'}\n", done.stderr


def test_the_special_tokens_that_it_may_name(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": None,
        "x": "y",
    }
    tokens = {"unk_token": "<unk>", "eos_token": "older", "additional_special_tokens": ["<a>"]}
    write(tmp_path, chat_template__jinja="x", tokenizer_config__json=config, special_tokens_map__json=tokens)
    tokens = json.loads(chat_files(tmp_path)["special_tokens_map.json"])
    assert tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    "config",
    [
        *({}, {"chat_template": None}, {"chat_template": [{"name": "rag"}]}),
        *({"chat_template": [{"name": []}]}, {"chat_template": {"default": 3}}, {"chat_template": 3}),
    ],
)
def test_a_model_without_one(config: Any, tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config__json=config)
    assert chat_files(tmp_path) == {}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config__json": {"chat_template": [*NAMED[:1], {"name": "rag", "template": "x"}]}},
        {f"additional_chat_templates___{name}__jinja": "x" for name in ("rag", "tool_use")},
    ],
)
def test_templates_of_which_none_is_the_default_are_said(files: dict[str, Any], tmp_path: Path) -> None:
    """transformers raises, too."""
    write(tmp_path, **files)
    assert chat_files(tmp_path) == {}
    line = "its chat templates are 'rag', 'tool_use', and none is called default: it cannot be chatted with"
    assert chat_without_default(tmp_path) == line
    served = ServeConfig(cache="kv", max_sequence=8, vocabulary=50)
    (tmp_path / "config.json").write_text("{}")
    assert ignored_settings(tmp_path, served, ()) == [line]


def test_one_that_is_too_long_or_no_text(tmp_path: Path) -> None:
    write(tmp_path, chat_template__jinja="x" * (CHAT_FILES["chat_template.jinja"] + 1))
    with pytest.raises(JobError, match="the limit is 262144"):
        chat_files(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(JobError, match="cannot be read"):
        chat_files(tmp_path)
    write(tmp_path, chat_template__jinja="x", tokenizer_config__json="{")
    with pytest.raises(JobError, match="cannot be read"):
        chat_files(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, tokenizer_config__json={"chat_template": "\ud800"})
    with pytest.raises(JobError, match="chat_template"):
        chat_files(tmp_path)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_one_for_all_of_the_memory_is_not_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, (64 << 20) + 1)
    tracemalloc.start()
    try:
        with pytest.raises(JobError, match=r"has 67108865 bytes; the limit is \d+"):
            chat_files(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_device_in_the_place_of_a_file_has_no_end_and_is_not_read_to_it(tmp_path: Path) -> None:
    (tmp_path / "zero").symlink_to("/dev/zero")
    with pytest.raises(JobError, match="has 1001 bytes; the limit is 1000"):
        read_capped(tmp_path / "zero", 1000)


@pytest.mark.parametrize("name", ["fusion.json", "inference.graph"])
def test_files_of_an_export_that_are_too_large_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "fusion.json").write_text('{"vocabulary": 8, "max_sequence": 8}')
    (tmp_path / name).touch()
    os.truncate(tmp_path / name, (64 << 20) + 1)
    with pytest.raises(JobError, match=rf"{name} has 67108865 bytes; the limit is 67108864"):
        sources.exported(tmp_path)


def test_a_link_to_what_is_no_part_of_the_model_is_not_followed(tmp_path: Path) -> None:
    """A template is given to the whole swarm, and a directory may come from anybody."""
    cache = tmp_path / "models--a--b"
    model, blobs = cache / "snapshots" / "1", cache / "blobs"
    for folder in (model, blobs, tmp_path / "home"):
        folder.mkdir(parents=True)
    (tmp_path / "home" / "key").write_text("secret")
    (blobs / "2").write_text(TEMPLATE)
    (model / "other.jinja").write_text(TEMPLATE)
    link = model / "chat_template.jinja"
    for target in ("other.jinja", "../../blobs/2"):
        link.symlink_to(target)
        assert chat_files(model)["chat_template.jinja"] == TEMPLATE.encode()
        link.unlink()
    link.symlink_to(tmp_path / "home" / "key")
    with pytest.raises(JobError, match=r"is a link to \S*key, which the whole swarm would") as error:
        chat_files(model)
    assert "\n" not in str(error.value)
    blobs.rename(cache / "gone")
    blobs.symlink_to(tmp_path / "home")
    link.unlink()
    link.symlink_to("../../blobs/key")
    with pytest.raises(JobError, match="is a link to"):
        chat_files(model)


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_is_not_left_out_in_silence(whole: bool, tmp_path: Path) -> None:
    write(tmp_path, adapter_config__json={"peft_type": "LORA"})
    if whole:
        write(tmp_path, config__json={"model_type": "llama"}, model__safetensors="weights")
    with pytest.raises(JobError, match=r"holds an adapter .* which is not read: merge it") as error:
        check_model(tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_no_model_itself_says_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("run/checkpoint-10", "models--a--b/snapshots/4d7a"):
        held, top = tmp_path / place, tmp_path / place.partition("/")[0]
        held.mkdir(parents=True)
        (held / "config.json").write_text("{}")
        with pytest.raises(
            JobError, match=f"not a Hugging Face model directory; {held.relative_to(top)} in it is one$"
        ):
            check_model(top)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(JobError, match=r"hf download owner/a-1\.5B --local-dir a-1\.5B\) and serve a-1\.5B$"):
        check_model(Path("owner/a-1.5B"))
    for name in ("run/gone", "gone", "/owner/gone", "../gone"):  # not as the hub has them
        with pytest.raises(JobError, match=r"is not a directory or a GGUF file$"):
            check_model(Path(name))


@pytest.mark.parametrize("name", ["model.gguf", "tokenizer.json"])
def test_a_pointer_in_the_place_of_a_file_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5348\n")
    with pytest.raises(JobError, match=f"{name} is only git's pointer to a large file"):
        (check_model if name.endswith("gguf") else check_tokenizer)(tmp_path / name)
