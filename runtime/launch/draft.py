"""From a directory to the draft model of a job that serves another model: captured, checked against that model, stored whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from safetensors.torch import save
from tokenizers import Tokenizer

from fusion.dag.cutting.cuts import split
from fusion.dag.ir import serialise
from fusion.dag.ir.errors import UnsupportedModel
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.sources import LanguageModel
from fusion.runtime.datasets.sources import read_tokenizer
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.launch.weights import contiguous
from fusion.runtime.placing.stage_memory import fitted
from fusion.runtime.serving.drafts.draft_files import ABOUT_FILE, GRAPH_FILE, WEIGHTS_FILE, AboutDraft
from fusion.swarm.transport import PeerId


@dataclass(frozen=True)
class PreparedDraft:
    files: dict[str, bytes]  # by the names that the manifest gives them
    memory_bytes: int  # that it takes beside the first stage


def prepare_draft(draft: LanguageModel, model: LanguageModel, config: ServeConfig) -> PreparedDraft:
    """JobError, in one line, for a model that cannot be a draft of the other. Blocking, for seconds."""
    _check(draft, model)
    positions = draft.about.max_sequence
    try:
        graph = serving_graph(draft.inference, cache="kv", maximum_sequence=positions)
    except UnsupportedModel as reason:
        raise JobError(
            f"draft: it would have to compute its whole text anew for each token ({reason})"
        ) from None
    alone = replace(config, max_sequence=min(positions, config.max_sequence))
    _, (memory_bytes,) = fitted(graph, alone, (), (PeerId(""),), ())
    variables = draft.read(split(graph, ())[0].graph.variables)
    return PreparedDraft(
        files={
            GRAPH_FILE: serialise.encode(graph),
            WEIGHTS_FILE: save(contiguous(variables)),
            ABOUT_FILE: AboutDraft(positions).to_json(),
        },
        memory_bytes=memory_bytes,
    )


def _check(draft: LanguageModel, model: LanguageModel) -> None:
    drafting, target = draft.about, model.about
    if drafting.vocabulary != target.vocabulary:
        raise JobError(
            f"draft: a model of the same vocabulary of {target.vocabulary} tokens, not of {drafting.vocabulary}"
        )
    if drafting.byte_level != target.byte_level or _tokens(draft.tokenizer) != _tokens(model.tokenizer):
        raise JobError("draft: a model with the same tokenizer; these two give the same text other ids")


def _tokens(source: Path | bytes | None) -> dict[str, int] | None:
    tokenizer: Tokenizer | None = read_tokenizer(source)
    return None if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)
