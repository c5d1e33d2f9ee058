"""What a directory says of how its model generates: generation_config.json, or config.json where there is none; tokens that a
graph leaves out of answers, as it says of some; and what of it answers do not follow."""

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
_WORDS = "bad_words_ids"
MAX_SPANS = 64  # of tokens that a graph leaves out; each is a comparison with all of them

# Settings that `generate()` follows without sampling and that serving does not, each with the value that changes no token, beside
# none: 0 stands for what is below it as well. How long an answer may be, each request says. Those of beams, and of how the
# tokens are computed, are not here: without `num_beams` the former do nothing, and the latter lead to the same tokens.
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
# The graph of an export is the one that was trained, which withholds nothing.
_OF_EXPORTS: Mapping[str, int | None] = {"suppress_tokens": None, _WORDS: None}
_OF_ENDS = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
_ASKED = "repetition_penalty"  # what a request can ask for
# Whose settings transformers takes where the configuration of all of it has none: the first that there is.
_WITHIN = ("decoder", "generator", "text_config")
_SHOWN = 40  # characters of a value
_NAMED = 3  # tensors


@dataclass(frozen=True)
class GenerationSettings:
    """`config`: transformers' configuration, for what config.json leaves unsaid; None where that does not count."""

    path: Path
    said: Mapping[str, Any]
    config: Any = None

    def value(self, name: str) -> Any:
        """A list where it is one, whatever it is to Python; None where nothing says it."""
        found = self.said.get(name, getattr(self.config, name, None))
        return list(found) if isinstance(found, tuple) else found

    def withheld(self, name: str, vocabulary: int) -> tuple[int, ...]:
        """Tokens below `vocabulary`, of a list of them. JobError for another value."""
        tokens = self.value(name) or []
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise JobError(f"{self.path}: {name} are a list of tokens' numbers, not {tokens!r:.80}")
        return tuple(token for token in tokens if 0 <= token < vocabulary)

    def bad_words(self, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
        """Tokens below `vocabulary` that are no part of an answer, of which `generate()` never withholds those that end one.
        JobError for words of several tokens, and for another value."""
        words = self.value(_WORDS) or []
        if not isinstance(words, list) or not all(map(_is_word, words)):
            raise JobError(f"{self.path}: {_WORDS} are lists of tokens' numbers, not {words!r:.80}")
        if any(len(word) > 1 for word in words):
            raise JobError(f"{self.path}: {_WORDS} of more than one token each are not withheld from answers")
        return tuple(token for (token,) in words if token < vocabulary and token not in ends)


def _is_word(word: Any) -> bool:
    return isinstance(word, list) and bool(word) and all(type(token) is int and token >= 0 for token in word)


def generation_file(directory: Path) -> dict[str, Any] | None:
    """What generation_config.json says; None where there is none, or one that holds no JSON, which transformers passes over as well.
    JobError for one that cannot be read otherwise."""
    path = directory / GENERATION_FILE
    try:
        return json_object(path) if path.is_file() else None
    except NoJSON:
        return None


def generation_settings(config: Any, directory: Path) -> GenerationSettings:
    """As `generate()` takes them. JobError for a file that cannot be read."""
    said = generation_file(directory)
    if said is not None:
        return GenerationSettings(directory / GENERATION_FILE, said)
    # Configurations drop what they read of these settings.
    return GenerationSettings(directory / CONFIG_FILE, json_object(directory / CONFIG_FILE), config)


def decoder_withholds(directory: Path, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Tokens that no answer of a decoder has. JobError for settings that are none, and for words of several tokens."""
    said = generation_settings(None, directory)
    return (*said.withheld("suppress_tokens", vocabulary), *said.bad_words(vocabulary, ends))


def passed_over(path: Path, served: ServeConfig, unread: Sequence[str]) -> list[str]:
    """Lines on what the files of a model say, or hold, and answers do not follow. `path`, `served`: as of `not_followed`; `unread`:
    tensors of its files that it has no place for."""
    held, more = ", ".join(f"{name!r:.80}" for name in unread[:_NAMED]), len(unread) - _NAMED
    held += f" and {more} more" if more > 0 else ""
    place = f"its files hold tensors that the model has no place for: {held}" if held else ""
    chat = "" if path.is_file() else chat_without_default(path)
    lines = (_unreadable(path), not_followed(path, served), prompt_left_out(path), chat, place)
    return [line for line in lines if line]


def _unreadable(path: Path) -> str:
    """A line on a generation_config.json that is passed over; empty where it is not."""
    try:
        if not (path / GENERATION_FILE).is_file() or generation_file(path) is not None:
            return ""
    except JobError:
        return ""  # an export may have one that nothing reads
    return f"{GENERATION_FILE} holds no JSON and is passed over: {CONFIG_FILE} alone says how answers begin and end"


def not_followed(path: Path, served: ServeConfig) -> str:
    """A line on what the files of a model ask of greedy answers, and answers of `served` do not follow; empty where there is
    nothing. `path`: its directory or GGUF file."""
    if path.is_file() or served.outputs:
        return ""
    try:
        said = generation_settings(None, path)
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
    found = {name: value for name in neutral if _changes(value := _loaded(said, name), neutral[name])}
    if not found:
        return ""
    values = [f"{name} {json.dumps(value):.{_SHOWN}}" for name, value in found.items()]
    named = " and ".join(part for part in (", ".join(values[:-1]), values[-1]) if part)
    asked = f"; a request may ask for {_ASKED}" if _ASKED in found else ""
    return f"{said.path.name} asks for {named}, which answers do not follow{asked}"


def _loaded(said: GenerationSettings, name: str) -> Any:
    """The value that transformers loads."""
    value = said.value(name)
    if value is None and said.path.name == CONFIG_FILE:
        within = next((part for each in _WITHIN if (part := said.said.get(each))), None)
        return within.get(name) if isinstance(within, dict) else None
    return value


def _changes(value: Any, neutral: int | None) -> bool:
    if value is None or value in ([], {}):
        return False
    if neutral == 0 and isinstance(value, int | float):
        return value > 0
    return neutral is None or bool(value != neutral)


def withhold(graph: Graph, tokens: Iterable[int]) -> Graph:
    """The graph of logits (..., vocabulary) with minus infinity for these tokens, so that whoever chooses takes none of them.
    JobError for tokens in more than MAX_SPANS spans."""
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
    """First and last of each row of tokens one behind the other."""
    found: list[tuple[int, int]] = []
    for token in sorted(set(tokens)):
        if found and found[-1][1] == token - 1:
            found[-1] = (found[-1][0], token)
        else:
            found.append((token, token))
    return found
