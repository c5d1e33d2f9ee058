"""The configuration of a Hugging Face directory, and its tokenizer. `library`: transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.runtime.capture.config_bounds import check_counts, check_tables
from fusion.runtime.capture.rope import with_current_names
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import TOKENIZER_CONFIG_FILE, check_own, json_object
from fusion.runtime.job.text import TokenizerText

# Vocabulary files of tokenizers without a tokenizer.json, each with the other files that it needs.
_OLDER_TOKENIZERS = {
    "vocab.json": ("merges.txt",),
    **dict.fromkeys(("vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"), ()),
}


def stored_config(directory: Path, library: Any) -> Any:
    """The configuration as transformers reads it. JobError for one that it cannot use."""
    values = json_object(directory / "config.json")
    check_counts(values, directory)
    try:
        current = with_current_names(values)
        if current is values:
            config = library.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        else:
            config = library.CONFIG_MAPPING[current["model_type"]].from_dict(current)
        # A file must not choose the code: kernels that it names would be downloaded and run if the package for them is installed.
        config._attn_implementation = config._experts_implementation = None
    except Exception as error:  # the library's own, or whatever unchecked values cause in its code
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
    """tokenizer.json, or its content as transformers converts an older tokenizer; None where there is neither, or one that is written in
    Python. JobError for files that cannot be read: without a tokenizer the model could answer no text."""
    path = directory / "tokenizer.json"
    if path.is_file():
        return path
    vocabularies = [
        name
        for name, more in _OLDER_TOKENIZERS.items()
        if all((directory / each).is_file() for each in (name, *more))
    ]
    if not vocabularies:
        return None
    for name in (*_OLDER_TOKENIZERS, "merges.txt"):
        check_own(directory / name, directory)
    files = " and ".join((vocabularies[0], *_OLDER_TOKENIZERS[vocabularies[0]]))
    fault = f"{directory} has no tokenizer.json, and {files} cannot be made into one"
    if vocabularies[0].endswith(".model") and not library.utils.is_sentencepiece_available():
        raise JobError(f"{fault}: that takes sentencepiece (pip install sentencepiece)")
    try:
        tokenizer = library.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        vocabulary = getattr(tokenizer, "vocab_files_names", {}).get("vocab_file")
        # Without its vocabulary file, a class builds a tokenizer that has special tokens only.
        if not tokenizer.is_fast or (vocabulary is not None and not (directory / vocabulary).is_file()):
            return None
        data: bytes = tokenizer.backend_tokenizer.to_str().encode()
        TokenizerText(data)
    except Exception as error:  # whatever the library's converters raise for files that they cannot read
        has_code = isinstance(error, ValueError) and _has_own_tokenizer(directory)
        reason = (
            "its tokenizer is code that comes with the model, which is not run"
            if has_code
            else error_reason(error)
        )
        raise JobError(f"{fault}: {reason}") from error
    return data


def _has_own_tokenizer(directory: Path) -> bool:
    """Whether the tokenizer needs code that comes with the model."""
    path = directory / TOKENIZER_CONFIG_FILE
    classes = json_object(path).get("auto_map") if path.is_file() else None
    return isinstance(classes, dict) and "AutoTokenizer" in classes


def error_reason(error: Exception) -> str:
    """An error of transformers in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # After a first line that ends in a colon comes the reason.
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])[:200]
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"
