"""What a directory says of how its model generates: generation_config.json, or config.json where there is none; and tokens that a
graph leaves out of answers, as it says of some."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fusion.dag.ir.graph import Arg, Graph, Node, Ref
from fusion.dag.ir.opset import infer
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import CONFIG_FILE, json_object

GENERATION_FILE = "generation_config.json"
_WORDS = "bad_words_ids"
MAX_SPANS = 64  # of tokens that a graph leaves out; each is a comparison with all of them


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


def generation_settings(config: Any, directory: Path) -> GenerationSettings:
    """As `generate()` takes them. JobError for a file that cannot be read."""
    path = directory / GENERATION_FILE
    if path.is_file():
        return GenerationSettings(path, json_object(path))
    # Configurations drop what they read of these settings.
    return GenerationSettings(directory / CONFIG_FILE, json_object(directory / CONFIG_FILE), config)


def decoder_withholds(directory: Path, vocabulary: int, ends: Sequence[int]) -> tuple[int, ...]:
    """Tokens that no answer of a decoder has. JobError for settings that are none, and for words of several tokens."""
    said = generation_settings(None, directory)
    return (*said.withheld("suppress_tokens", vocabulary), *said.bad_words(vocabulary, ends))


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
