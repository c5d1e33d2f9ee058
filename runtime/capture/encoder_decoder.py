"""Encoder-decoders of transformers: which directories hold one, what it reads, and what its answers follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion.runtime.capture.generation import generation_settings
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import SourceConfig

TEXT, SPEECH = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"
_FRAMES_A_POSITION = 2  # of features: the second convolution of a speech encoder takes every other frame
_POSITIONS = ("max_source_positions", "max_target_positions")  # of what reads sound, and of what it writes


def architectures(config: Any) -> list[str]:
    """The classes of transformers whose weights a directory has, as it names them: whatever else stands in their place names none."""
    said = getattr(config, "architectures", None)
    return [name for name in said if isinstance(name, str)] if isinstance(said, list) else []


def reads_source(config: Any) -> bool:
    """Whether the directory's model has an encoder: such a family may also be saved as a decoder alone."""
    alone = any("ForCausalLM" in name for name in architectures(config))
    return bool(getattr(config, "is_encoder_decoder", False)) and not alone


def auto_class(config: Any) -> str:
    """The class of transformers that makes the module."""
    return SPEECH if _channels(config) else TEXT


def source_config(
    config: Any, directory: Path, longest: int, vocabulary: int, ends: Sequence[int] = ()
) -> SourceConfig:
    """`longest`: positions of a text that the model reads; `ends`: tokens that end an answer. JobError where nothing says what its
    answers begin with, for sound of a length that is not said, and for settings that are none or are not served."""
    if getattr(config, "decoder_vocab_size", None) not in (None, vocabulary):
        raise JobError(f"{directory}: a model whose encoder and decoder have other tokens is not served")
    said = generation_settings(config, directory)
    ways = (
        said.value("decoder_start_token_id"),
        getattr(config, "decoder_start_token_id", None),
        said.value("bos_token_id"),
    )
    first = next((token for token in ways if token is not None), None)
    forced = said.value("forced_bos_token_id")
    # (place, token): what speech models are told of language and task, from the second place on; None: the model says that.
    pairs = said.value("forced_decoder_ids") or []
    if not isinstance(pairs, list) or not all(map(_is_forced, pairs)):
        raise JobError(f"{directory}: forced_decoder_ids are a list of [place, token], not {pairs!r:.80}")
    told = [token for _, token in pairs]
    known = told[: told.index(None)] if None in told else told
    last = said.value("no_timestamps_token_id")
    if last is not None and last not in known and known == told and not said.value("is_multilingual"):
        known = [*known, last]
    start = [token for token in (first, forced, *known) if token is not None]
    if first is None or not all(isinstance(token, int) for token in start):
        raise JobError(
            f"{directory}: nothing says what its answers begin with: decoder_start_token_id in config.json"
        )
    channels = _channels(config)
    for name in _POSITIONS if channels else ():
        if not isinstance(getattr(config, name, None), int):
            raise JobError(f"{directory}: its configuration says no {name}, which sound is read by")
    length = _FRAMES_A_POSITION * int(config.max_source_positions) if channels else longest
    never = (*said.withheld("suppress_tokens", vocabulary), *said.bad_words(vocabulary, ends))
    return SourceConfig(
        start=tuple(start),
        length=length,
        channels=channels,
        suppress_tokens=tuple(dict.fromkeys(never)),
        begin_suppress_tokens=said.withheld("begin_suppress_tokens", vocabulary),
    )


def _is_forced(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int | None)


def longest_answer(config: Any, longest: int) -> int:
    """Positions of its decoder."""
    return min(longest, int(config.max_target_positions)) if _channels(config) else longest


def _channels(config: Any) -> int:
    return int(getattr(config, "num_mel_bins", 0) or 0)
