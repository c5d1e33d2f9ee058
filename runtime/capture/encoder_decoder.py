"""Encoder-decoders of transformers: which directories hold one, its source, and the first tokens of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion.runtime.capture.generation import generation_settings
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig

TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"
_FRAMES_PER_POSITION = 2  # of features: the second convolution of a speech encoder has stride 2
_POSITIONS = ("max_source_positions", "max_target_positions")  # of a speech encoder, and of its decoder


def architectures(config: Any) -> list[str]:
    """The class names in `architectures`; empty if that is malformed."""
    names = getattr(config, "architectures", None)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def reads_source(config: Any) -> bool:
    """Whether the directory's model has an encoder: families of encoder-decoders may also be saved as a decoder alone."""
    is_decoder = any("ForCausalLM" in name for name in architectures(config))
    return bool(getattr(config, "is_encoder_decoder", False)) and not is_decoder


def auto_class(config: Any) -> str:
    """The auto class of transformers for the model."""
    return SPEECH if _channels(config) else TEXT


def source_config(
    config: Any, directory: Path, longest: int, vocabulary: int, ends: Sequence[int] = ()
) -> SourceConfig:
    """The source of an encoder-decoder. `longest`: positions of the longest text; `ends`: tokens that end an answer. JobError where the first token
    of answers or the length of audio is not set, and for malformed or unsupported settings."""
    if getattr(config, "decoder_vocab_size", None) not in (None, vocabulary):
        raise JobError(f"{directory}: a model whose encoder and decoder have other tokens is not served")
    settings = generation_settings(config, directory)
    candidates = (
        settings.value("decoder_start_token_id"),
        getattr(config, "decoder_start_token_id", None),
        settings.value("bos_token_id"),
    )
    first = next((token for token in candidates if token is not None), None)
    forced = settings.value("forced_bos_token_id")
    # [position, token] pairs for language and task of speech models, from position 1 on; None: the model generates that token.
    pairs = settings.value("forced_decoder_ids") or []
    if not isinstance(pairs, list) or not all(map(_is_forced, pairs)):
        raise JobError(f"{directory}: forced_decoder_ids are a list of [place, token], not {pairs!r:.80}")
    tokens = [token for _, token in pairs]
    prompt = tokens[: tokens.index(None)] if None in tokens else tokens
    last = settings.value("no_timestamps_token_id")
    if last is not None and last not in prompt and prompt == tokens and not settings.value("is_multilingual"):
        prompt = [*prompt, last]
    start = [token for token in (first, forced, *prompt) if token is not None]
    if first is None or not all(isinstance(token, int) for token in start):
        raise JobError(
            f"{directory}: nothing says what its answers begin with: decoder_start_token_id in config.json"
        )
    channels = _channels(config)
    for name in _POSITIONS if channels else ():
        if not isinstance(getattr(config, name, None), int):
            raise JobError(f"{directory}: its configuration says no {name}, which sound is read by")
    length = _FRAMES_PER_POSITION * int(config.max_source_positions) if channels else longest
    suppressed = (*settings.suppressed("suppress_tokens", vocabulary), *settings.bad_words(vocabulary, ends))
    return SourceConfig(
        start=tuple(start),
        length=length,
        channels=channels,
        suppress_tokens=tuple(dict.fromkeys(suppressed)),
        begin_suppress_tokens=settings.suppressed("begin_suppress_tokens", vocabulary),
    )


def _is_forced(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int | None)


def longest_answer(config: Any, longest: int) -> int:
    """The number of positions of the decoder."""
    return min(longest, int(config.max_target_positions)) if _channels(config) else longest


def _channels(config: Any) -> int:
    return int(getattr(config, "num_mel_bins", 0) or 0)
