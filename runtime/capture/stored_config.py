"""The configuration of a Hugging Face directory, and its tokenizer. `library`: transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.runtime.capture.config_bounds import check_counts, check_tables
from fusion.runtime.capture.rope import spelled_now
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import TOKENIZER_CONFIG_FILE, check_own, json_object
from fusion.runtime.job.text import TokenizerText

# Vocabularies of tokenizers that were written without a tokenizer.json, each with what it goes with.
_OLDER_TOKENIZERS = {
    "vocab.json": ("merges.txt",),
    **dict.fromkeys(("vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"), ()),
}


def stored_config(directory: Path, library: Any) -> Any:
    """The configuration as transformers reads it. Raises JobError for one that it cannot use."""
    values = json_object(directory / "config.json")
    check_counts(values, directory)
    try:
        now = spelled_now(values)
        if now is values:
            config = library.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        else:
            config = library.CONFIG_MAPPING[now["model_type"]].from_dict(now)
        # A file must not choose the code: names of kernels are downloaded and run where the package for them is installed.
        config._attn_implementation = config._experts_implementation = None
    except Exception as error:  # the library's own, and what its code makes of values that it trusts
        kind = values.get("model_type")
        reason = error_reason(error)
        if isinstance(kind, str) and kind not in library.CONFIG_MAPPING:
            reason = f"transformers {library.__version__} knows no models of the kind {kind!r:.80}"
            if values.get("auto_map"):
                reason += ", and code that comes with a model is not run"
        raise JobError(f"{directory}/config.json cannot be used: {reason}") from error
    check_tables(config, directory)
    return config


def stored_tokenizer(directory: Path, library: Any) -> Path | bytes | None:
    """tokenizer.json, or what transformers makes of the files of an older tokenizer; None where there is neither, or one that is
    written in Python. JobError for files that cannot be read: without them the model would answer no text."""
    path = directory / "tokenizer.json"
    if path.is_file():
        return path
    found = [
        name
        for name, more in _OLDER_TOKENIZERS.items()
        if all((directory / each).is_file() for each in (name, *more))
    ]
    if not found:
        return None
    for name in (*_OLDER_TOKENIZERS, "merges.txt"):
        check_own(directory / name, directory)
    files = " and ".join((found[0], *_OLDER_TOKENIZERS[found[0]]))
    without = f"{directory} has no tokenizer.json, and {files} cannot be made into one"
    if found[0].endswith(".model") and not library.utils.is_sentencepiece_available():
        raise JobError(f"{without}: that takes sentencepiece (pip install sentencepiece)")
    try:
        made = library.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        own = getattr(made, "vocab_files_names", {}).get("vocab_file")
        # Where its own files are not there, a class makes a tokenizer that knows special tokens and no text.
        if not made.is_fast or (own is not None and not (directory / own).is_file()):
            return None
        data: bytes = made.backend_tokenizer.to_str().encode()
        TokenizerText(data)
    except Exception as error:  # whatever the library's converters make of files that they cannot read
        own = isinstance(error, ValueError) and _has_own_tokenizer(directory)
        reason = (
            "its tokenizer is code that comes with the model, which is not run"
            if own
            else error_reason(error)
        )
        raise JobError(f"{without}: {reason}") from error
    return data


def _has_own_tokenizer(directory: Path) -> bool:
    """Whether the tokenizer needs code that comes with the model."""
    path = directory / TOKENIZER_CONFIG_FILE
    classes = json_object(path).get("auto_map") if path.is_file() else None
    return isinstance(classes, dict) and "AutoTokenizer" in classes


def error_reason(error: Exception) -> str:
    """An error of transformers in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # One that ends in a colon has its reason below it.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
