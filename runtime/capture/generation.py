"""Generation settings of a directory: generation_config.json, or config.json where there is none. Suppressed tokens become part of the graph;
settings that are not supported are reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset import infer
from fusion.runtime.capture.text_encoder import unapplied_prompt
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.job.model_files import (
    CONFIG_FILE,
    NoJSON,
    chat_without_default,
    is_exported_directory,
    json_object,
)

GENERATION_FILE = "generation_config.json"
_BAD_WORDS = "bad_words_ids"
MAX_SPANS = 64  # of suppressed tokens; each takes a comparison over the vocabulary

# Settings that greedy `generate()` applies and serving does not, with the neutral value of each (besides None); 0 covers negative values.
# Not listed: the length of answers, which a request sets; settings of beams, without effect unless `num_beams` is set; and those of how
# tokens are computed, which do not change them.
_NEUTRAL: Mapping[str, int | None] = {
    "num_beams": 1,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "exponential_decay_length_penalty": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "watermarking_config": None,
    "token_healing": 0,
    "stop_strings": None,
    "max_time": None,
}
_NEUTRAL_FOR_DECODERS: Mapping[str, int | None] = {"forced_bos_token_id": None, "begin_suppress_tokens": None}
_NEUTRAL_FOR_TEXT_SOURCES: Mapping[str, int | None] = {
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
}
_NEUTRAL_FOR_AUDIO: Mapping[str, int | None] = {"return_timestamps": 0}
# An exported graph is the trained one, which suppresses nothing.
_NEUTRAL_FOR_EXPORTS: Mapping[str, int | None] = {"suppress_tokens": None, _BAD_WORDS: None}
_END_SETTINGS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_REQUESTABLE = "repetition_penalty"  # a parameter of requests
# Nested configurations in which transformers looks for a setting that the outer one lacks: the first that exists.
_NESTED = ("decoder", "generator", "text_config")
_MAX_VALUE_TEXT = 40  # characters of a value
_MAX_NAMES = 3  # tensors


@dataclass(frozen=True)
class GenerationSettings:
    """`config`: transformers' configuration, for defaults that config.json omits; None where they do not apply."""

    path: Path
    values: Mapping[str, Any]
    config: Any = None

    def value(self, name: str) -> Any:
        """The value, tuples as lists; None where it is not set."""
        value = self.values.get(name, getattr(self.config, name, None))
        return list(value) if isinstance(value, tuple) else value

    def suppressed(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """A setting that is a list of tokens, without those beyond `vocabulary`. JobError for another value."""
        tokens = self.value(name) or []
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise JobError(f"{self.path}: {name} are a list of tokens' numbers, not {tokens!r:.80}")
        return tuple(token for token in tokens if 0 <= token < vocabulary)

    def bad_words(self, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
        """Tokens below `vocabulary` that answers must not contain; as in `generate()`, without end tokens. JobError for words of several tokens,
        and for another value."""
        words = self.value(_BAD_WORDS) or []
        if not isinstance(words, list) or not all(map(_is_word, words)):
            raise JobError(f"{self.path}: {_BAD_WORDS} are lists of tokens' numbers, not {words!r:.80}")
        if any(len(word) > 1 for word in words):
            raise JobError(
                f"{self.path}: {_BAD_WORDS} of more than one token each are not withheld from answers"
            )
        return tuple(token for (token,) in words if token < vocabulary and token not in ends)


def _is_word(word: Any) -> bool:
    return isinstance(word, list) and bool(word) and all(type(token) is int and token >= 0 for token in word)


def generation_file(directory: Path) -> dict[str, Any] | None:
    """The values of generation_config.json; None where there is none, or it is not JSON, which transformers ignores too. JobError for one that
    cannot be read otherwise."""
    path = directory / GENERATION_FILE
    try:
        return json_object(path) if path.is_file() else None
    except NoJSON:
        return None


def generation_settings(config: Any, directory: Path) -> GenerationSettings:
    """The settings that `generate()` uses. JobError for a file that cannot be read."""
    values = generation_file(directory)
    if values is not None:
        return GenerationSettings(directory / GENERATION_FILE, values)
    # transformers drops such settings when it loads a configuration.
    return GenerationSettings(directory / CONFIG_FILE, json_object(directory / CONFIG_FILE), config)


def suppressed_tokens(directory: Path, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Tokens that a decoder must not generate. JobError for malformed settings, and for words of several tokens."""
    settings = generation_settings(None, directory)
    return (*settings.suppressed("suppress_tokens", vocabulary), *settings.bad_words(vocabulary, ends))


def ignored_settings(path: Path, served: ServeConfig, unread: Sequence[str]) -> list[str]:
    """Lines on settings and tensors in a model's files that are not used. `path`, `served`: as in `unsupported_settings`; `unread`: tensors of its
    files that the model has no place for."""
    names, more = ", ".join(f"{name!r:.80}" for name in unread[:_MAX_NAMES]), len(unread) - _MAX_NAMES
    names += f" and {more} more" if more > 0 else ""
    tensors = f"its files hold tensors that the model has no place for: {names}" if names else ""
    chat = "" if path.is_file() else chat_without_default(path)
    lines = (
        _unreadable_file(path),
        unsupported_settings(path, served),
        unapplied_prompt(path),
        chat,
        tensors,
    )
    return [line for line in lines if line]


def _unreadable_file(path: Path) -> str:
    """A line on a generation_config.json that is ignored; empty otherwise."""
    try:
        if not (path / GENERATION_FILE).is_file() or generation_file(path) is not None:
            return ""
    except JobError:
        return ""  # an export may have one that nothing reads
    return f"{GENERATION_FILE} holds no JSON and is passed over: {CONFIG_FILE} alone says how answers begin and end"


def unsupported_settings(path: Path, served: ServeConfig) -> str:
    """A line on settings of greedy decoding that serving does not apply; empty where there are none. `path`: the model's directory or GGUF
    file."""
    if path.is_file() or served.outputs:
        return ""
    try:
        settings = generation_settings(None, path)
    except JobError:
        return ""  # an export may have none of these files
    neutral = dict(_NEUTRAL)
    if served.source is None:
        neutral |= _NEUTRAL_FOR_DECODERS
    else:
        neutral |= _NEUTRAL_FOR_AUDIO if served.source.channels else _NEUTRAL_FOR_TEXT_SOURCES
    if is_exported_directory(path):
        neutral |= _NEUTRAL_FOR_EXPORTS
    if not served.end_tokens:
        neutral = {name: value for name, value in neutral.items() if name not in _END_SETTINGS}
    unsupported = {
        name: value
        for name in neutral
        if _has_effect(value := _effective_value(settings, name), neutral[name])
    }
    if not unsupported:
        return ""
    values = [f"{name} {json.dumps(value):.{_MAX_VALUE_TEXT}}" for name, value in unsupported.items()]
    listing = " and ".join(part for part in (", ".join(values[:-1]), values[-1]) if part)
    remedy = f"; a request may ask for {_REQUESTABLE}" if _REQUESTABLE in unsupported else ""
    return f"{settings.path.name} asks for {listing}, which answers do not follow{remedy}"


def _effective_value(settings: GenerationSettings, name: str) -> Any:
    """The value that transformers loads."""
    value = settings.value(name)
    if value is None and settings.path.name == CONFIG_FILE:
        nested = next((values for key in _NESTED if (values := settings.values.get(key))), None)
        return nested.get(name) if isinstance(nested, dict) else None
    return value


def _has_effect(value: Any, neutral: int | None) -> bool:
    if value is None or value in ([], {}):
        return False
    if neutral == 0 and isinstance(value, int | float):
        return value > 0
    return neutral is None or bool(value != neutral)


def suppress(graph: Graph, tokens: Iterable[int]) -> Graph:
    """The graph with logits (..., vocabulary) of minus infinity for these tokens, so that they are never sampled. JobError for tokens in more than
    MAX_SPANS spans."""
    (logits,), spans = graph.outputs, _spans(tokens)
    if not spans:
        return graph
    if len(spans) > MAX_SPANS:
        raise JobError(
            f"the model's files withhold tokens in {len(spans)} spans from answers; the limit is {MAX_SPANS}"
        )
    types, nodes = dict(graph.types), list(graph.nodes)
    taken = {*graph.input_names, *graph.variable_names, *graph.node_index}

    def add(op: str, *args: Arg) -> Ref:
        name = f"withheld_{len(nodes)}"
        while name in taken:
            name += "_"
        node = Node(name, op, args, infer(op, args, types))
        nodes.append(node)
        types[Ref(name)] = node.results[0]
        return Ref(name)

    ids = add("aten.arange", types[logits].shape[-1], None)
    suppressed_mask: Ref | None = None
    for first, last in spans:
        if first == last:
            span = add("aten.eq.Scalar", ids, first)
        else:
            span = add(
                "aten.logical_and", add("aten.ge.Scalar", ids, first), add("aten.le.Scalar", ids, last)
            )
        suppressed_mask = span if suppressed_mask is None else add("aten.logical_or", suppressed_mask, span)
    masked = add("aten.masked_fill.Scalar", logits, suppressed_mask, -math.inf)
    return replace(graph, nodes=tuple(nodes), outputs=(masked,))


def _spans(tokens: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last token of each run of consecutive tokens."""
    spans: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if spans and spans[-1][1] == token - 1:
            spans[-1] = (spans[-1][0], token)
        else:
            spans.append((token, token))
    return spans
