"""Encoder-decoders of transformers: which directories hold one, what it reads, and what its answers follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.job.model_files import json_object

TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"
_FRAMES_A_POSITION = 2  # of features: the second convolution of a speech encoder takes every other frame


def reads_source(config: Any) -> bool:
    """Whether the directory's model has an encoder: such a family may also be saved as a decoder alone."""
    named = getattr(config, "architectures", None) or []
    return bool(getattr(config, "is_encoder_decoder", False)) and not any("ForCausalLM" in n for n in named)


def auto_class(config: Any) -> str:
    """The class of transformers that makes the module."""
    return SPEECH if _channels(config) else TEXT


def source_config(config: Any, directory: Path, longest: int, vocabulary: int) -> SourceConfig:
    """`longest`: positions of a text that the model reads. JobError where nothing says what its answers begin with."""
    if getattr(config, "decoder_vocab_size", None) not in (None, vocabulary):
        raise JobError(f"{directory}: a model whose encoder and decoder have other tokens is not served")
    path = directory / "generation_config.json"
    said = json_object(path) if path.is_file() else None

    def setting(name: str) -> Any:
        return getattr(config, name, None) if said is None else said.get(name)

    ways = (
        setting("decoder_start_token_id"),
        getattr(config, "decoder_start_token_id", None),
        setting("bos_token_id"),
    )
    first = next((token for token in ways if token is not None), None)
    forced = setting("forced_bos_token_id")
    # (place, token): what speech models are told of language and task, from the second place on; None: the model says that.
    pairs = setting("forced_decoder_ids") or []
    if not isinstance(pairs, list) or not all(map(_is_forced, pairs)):
        raise JobError(f"{directory}: forced_decoder_ids are a list of [place, token], not {pairs!r:.80}")
    told = [token for _, token in pairs]
    known = told[: told.index(None)] if None in told else told
    last = setting("no_timestamps_token_id")
    if last is not None and last not in known and known == told and not setting("is_multilingual"):
        known = [*known, last]
    start = [token for token in (first, forced, *known) if token is not None]
    if first is None or not all(isinstance(token, int) for token in start):
        raise JobError(
            f"{directory}: nothing says what its answers begin with: decoder_start_token_id in config.json"
        )
    channels = _channels(config)
    length = _FRAMES_A_POSITION * int(config.max_source_positions) if channels else longest

    def withheld(name: str) -> tuple[int, ...]:
        tokens = setting(name) or []
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise JobError(f"{directory}: {name} are a list of tokens' numbers, not {tokens!r:.80}")
        return tuple(token for token in tokens if 0 <= token < vocabulary)

    return SourceConfig(
        start=tuple(start),
        length=length,
        channels=channels,
        suppress_tokens=withheld("suppress_tokens"),
        begin_suppress_tokens=withheld("begin_suppress_tokens"),
    )


def _is_forced(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int | None)


def longest_answer(config: Any, longest: int) -> int:
    """Positions of its decoder."""
    return min(longest, int(config.max_target_positions)) if _channels(config) else longest


def _channels(config: Any) -> int:
    return int(getattr(config, "num_mel_bins", 0) or 0)
