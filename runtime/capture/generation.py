"""Generation settings of a directory: generation_config.json, or config.json where there is none. Suppressed tokens become part of the
graph; settings that answers do not follow are reported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset import infer
from fusion.runtime.capture.text_encoder import prompt_left_out
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
MAX_SPANS = 64  # of suppressed tokens; each costs a comparison over the vocabulary

# Settings that greedy `generate()` follows and serving does not, with the neutral value of each, beside None; 0 covers negative values.
# The length of answers is up to the request. Settings of beams do nothing without `num_beams`, and those of how tokens are computed
# lead to the same tokens, so they are not listed.
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
_OF_DECODERS: Mapping[str, int | None] = {"forced_bos_token_id": None, "begin_suppress_tokens": None}
_OF_TEXT_SOURCES: Mapping[str, int | None] = {
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
}
_OF_SOUND: Mapping[str, int | None] = {"return_timestamps": 0}
# The graph of an export is the trained one, which suppresses nothing.
_OF_EXPORTS: Mapping[str, int | None] = {"suppress_tokens": None, _BAD_WORDS: None}
_OF_ENDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_REQUESTABLE = "repetition_penalty"  # a parameter of requests
# Parts of a configuration whose settings transformers takes where the whole has none: the first that exists.
_WITHIN = ("decoder", "generator", "text_config")
_SHOWN = 40  # characters of a value
_NAMED = 3  # tensors


@dataclass(frozen=True)
class GenerationSettings:
    """`config`: transformers' configuration, for defaults that config.json omits; None where these do not count."""

    path: Path
    values: Mapping[str, Any]
    config: Any = None

    def value(self, name: str) -> Any:
        """The value, tuples as lists; None where it is not set."""
        value = self.values.get(name, getattr(self.config, name, None))
        return list(value) if isinstance(value, tuple) else value

    def withheld(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """A list of tokens, without those beyond `vocabulary`. Raises JobError for another value."""
        tokens = self.value(name) or []
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise JobError(f"{self.path}: {name} are a list of tokens' numbers, not {tokens!r:.80}")
        return tuple(token for token in tokens if 0 <= token < vocabulary)

    def bad_words(self, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
        """Tokens below `vocabulary` that answers must not have; as in `generate()`, without those that end one. Raises JobError for
        words of several tokens, and for another value."""
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
    """The values of generation_config.json; None where there is none, or it is not JSON, which transformers ignores as well. Raises
    JobError for one that cannot be read otherwise."""
    path = directory / GENERATION_FILE
    try:
        return json_object(path) if path.is_file() else None
    except NoJSON:
        return None


def generation_settings(config: Any, directory: Path) -> GenerationSettings:
    """The settings as `generate()` takes them. Raises JobError for a file that cannot be read."""
    values = generation_file(directory)
    if values is not None:
        return GenerationSettings(directory / GENERATION_FILE, values)
    # Configuration objects drop such settings when they read them.
    return GenerationSettings(directory / CONFIG_FILE, json_object(directory / CONFIG_FILE), config)


def decoder_withholds(directory: Path, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Tokens that no answer of a decoder has. Raises JobError for malformed settings, and for words of several tokens."""
    settings = generation_settings(None, directory)
    return (*settings.withheld("suppress_tokens", vocabulary), *settings.bad_words(vocabulary, ends))


def passed_over(path: Path, served: ServeConfig, unread: Sequence[str]) -> list[str]:
    """Lines on settings and tensors in a model's files that answers do not follow. `path`, `served`: as in `not_followed`; `unread`:
    tensors of its files that the model has no place for."""
    held, more = ", ".join(f"{name!r:.80}" for name in unread[:_NAMED]), len(unread) - _NAMED
    held += f" and {more} more" if more > 0 else ""
    place = f"its files hold tensors that the model has no place for: {held}" if held else ""
    chat = "" if path.is_file() else chat_without_default(path)
    lines = (_unreadable(path), not_followed(path, served), prompt_left_out(path), chat, place)
    return [line for line in lines if line]


def _unreadable(path: Path) -> str:
    """A line on a generation_config.json that is ignored; empty otherwise."""
    try:
        if not (path / GENERATION_FILE).is_file() or generation_file(path) is not None:
            return ""
    except JobError:
        return ""  # an export may have one that nothing reads
    return f"{GENERATION_FILE} holds no JSON and is passed over: {CONFIG_FILE} alone says how answers begin and end"


def not_followed(path: Path, served: ServeConfig) -> str:
    """A line on settings of greedy answers that answers of `served` do not follow; empty where there are none. `path`: the model's
    directory or GGUF file."""
    if path.is_file() or served.outputs:
        return ""
    try:
        settings = generation_settings(None, path)
    except JobError:
        return ""  # an export may have none of these files
    neutral = dict(_NEUTRAL)
    if served.source is None:
        neutral |= _OF_DECODERS
    else:
        neutral |= _OF_SOUND if served.source.channels else _OF_TEXT_SOURCES
    if is_exported_directory(path):
        neutral |= _OF_EXPORTS
    if not served.end_tokens:
        neutral = {name: value for name, value in neutral.items() if name not in _OF_ENDS}
    unlike = {name: value for name in neutral if _changes(value := _loaded(settings, name), neutral[name])}
    if not unlike:
        return ""
    values = [f"{name} {json.dumps(value):.{_SHOWN}}" for name, value in unlike.items()]
    named = " and ".join(part for part in (", ".join(values[:-1]), values[-1]) if part)
    asked = f"; a request may ask for {_REQUESTABLE}" if _REQUESTABLE in unlike else ""
    return f"{settings.path.name} asks for {named}, which answers do not follow{asked}"


def _loaded(settings: GenerationSettings, name: str) -> Any:
    """The value that transformers loads."""
    value = settings.value(name)
    if value is None and settings.path.name == CONFIG_FILE:
        within = next((part for each in _WITHIN if (part := settings.values.get(each))), None)
        return within.get(name) if isinstance(within, dict) else None
    return value


def _changes(value: Any, neutral: int | None) -> bool:
    if value is None or value in ([], {}):
        return False
    if neutral == 0 and isinstance(value, int | float):
        return value > 0
    return neutral is None or bool(value != neutral)


def withhold(graph: Graph, tokens: Iterable[int]) -> Graph:
    """The graph with logits (..., vocabulary) of minus infinity for these tokens, so that none of them is ever sampled. Raises JobError
    for tokens in more than MAX_SPANS spans."""
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
    hidden: Ref | None = None
    for first, last in spans:
        if first == last:
            span = add("aten.eq.Scalar", ids, first)
        else:
            span = add(
                "aten.logical_and", add("aten.ge.Scalar", ids, first), add("aten.le.Scalar", ids, last)
            )
        hidden = span if hidden is None else add("aten.logical_or", hidden, span)
    kept = add("aten.masked_fill.Scalar", logits, hidden, -math.inf)
    return replace(graph, nodes=tuple(nodes), outputs=(kept,))


def _spans(tokens: Iterable[int]) -> list[tuple[int, int]]:
    """First and last token of each run of consecutive ones."""
    spans: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if spans and spans[-1][1] == token - 1:
            spans[-1] = (spans[-1][0], token)
        else:
            spans.append((token, token))
    return spans
