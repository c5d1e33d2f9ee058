"""A model in a directory or file, captured and rewritten so that it can be served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from fusion.dag.ir.errors import UnsupportedModel
from fusion.dag.ir.graph import Graph
from fusion.dag.rewrites.clean import clean
from fusion.runtime.capture import sources
from fusion.runtime.capture.model_dtype import FLOAT32, dtype_text
from fusion.runtime.capture.quantised_weights import quantised_model, stored_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import ServeConfig
from fusion.runtime.launch.draft import PreparedDraft, prepare_draft
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.placing.place_experts import place_model
from fusion.runtime.placing.placed_before import PlacementsBefore, as_before
from fusion.runtime.placing.placed_job import Placed
from fusion.swarm.directory.records import LinkRecord, PeerRecord

SAMPLES_AT_ONCE = 64  # of a batch of a model that answers in one run: its stages have memory for so many
TOKENS_AT_ONCE = 16384  # of a batch of a model that embeds texts, if one text is not longer


@dataclass(frozen=True, kw_only=True)
class Servable:
    model: sources.LanguageModel
    graph: Graph
    config: ServeConfig
    read: sources.Read  # values of the graph's variables
    parameters: int  # of the model, however they are stored
    draft: PreparedDraft | None = None

    @property
    def beside_bytes(self) -> int:
        """What the first stage needs beside its own memory."""
        return 0 if self.draft is None else self.draft.memory_bytes

    def placed(
        self,
        peers: Sequence[PeerRecord],
        links: Sequence[LinkRecord],
        stages: int | None,
        home: Path | None = None,
    ) -> tuple[Graph, Placed]:
        """The graph and its placement on as few of the peers as pay, or as the last time, by `home`, if that is nearly as good. The
        graph has its layers of experts in groups where whole ones fit no peer. PlacementError where it fits no peers."""
        beside = self.beside_bytes
        graph, found = place_model(beside, self.graph, self.config, peers, links, stages)
        last = None if home is None else PlacementsBefore(home).of(graph)
        return graph, as_before(found, last, graph, self.config, peers, links, beside)


def read_servable(
    spec: ServingSpec, report: Callable[[str], None], remember: sources.Remember | None = None
) -> Servable:
    """`remember`: as in `sources.in_files`. Raises JobError, CaptureError. Blocking, for seconds; of the weights only the headers are read."""
    path, draft, dtype, quantization = spec.path, spec.draft, spec.dtype, spec.quantization
    if quantization is not None:
        if dtype not in (None, FLOAT32):
            raise JobError(f"--dtype: a model with its matrices as {quantization} computes in {FLOAT32}")
        dtype = FLOAT32
    report("reading the model")
    model = sources.in_files(path, dtype, remember)
    if spec.context is not None:
        model = _of_context(model, spec.context)
    about = model.about
    if draft is not None and model.source is not None:
        raise JobError("draft: no model guesses for an encoder-decoder")
    report(f"it runs in {dtype_text(model.dtype, model.stored_dtypes)}")
    if about.outputs:
        return _one_run(spec, model)
    if model.tokenizer is None and not about.byte_level:
        report("it has no tokenizer: prompts are token ids")
    if (end := model.missing_end_token) is not None:
        report(
            f"its chats do not end at {end!r:.80}, its tokenizer's eos_token: like those of generate(), answers end where "
            "eos_token_id in generation_config.json says"
        )
    report("rewriting its graph for decoding")
    graph, cache = _decoding_graph(spec, model, report)
    model.check(graph.variables)
    read, parameters = model.read, graph.parameter_count
    if quantization is not None:
        report(f"storing its matrices as {quantization}")
        graph, read = quantised_model(graph, model.read, quantization)
    elif model.blocks is not None:
        graph, read = stored_model(graph, model.read, model.blocks)
    config = ServeConfig(
        cache=cache,
        max_sequence=about.max_sequence,
        vocabulary=about.vocabulary,
        # A configuration may keep ids of the model that it was written for: those outside this vocabulary are dropped.
        end_tokens=tuple(token for token in about.end_tokens if 0 <= token < about.vocabulary),
        source=model.source,
    )
    drafted = None
    if draft is not None:
        report("reading its draft model")
        drafted = prepare_draft(sources.in_files(draft, remember=remember), model, config)
    return Servable(model=model, graph=graph, config=config, read=read, parameters=parameters, draft=drafted)


def _decoding_graph(
    spec: ServingSpec, model: sources.LanguageModel, report: Callable[[str], None]
) -> tuple[Graph, Literal["kv", "recompute"]]:
    """The graph of one decoding step, and whether it has a KV cache."""
    source = model.source
    try:
        graph = serving_graph(
            model.inference,
            cache="kv",
            maximum_sequence=model.about.max_sequence,
            maximum_source=None if source is None else source.length,
        )
        return graph, "kv"
    except UnsupportedModel as reason:
        if source is not None:
            raise JobError(f"{spec.path} holds an encoder-decoder that cannot be served: {reason}") from None
        if spec.draft is not None:
            raise JobError(
                f"draft: nothing can be guessed for a model without a KV cache ({reason})"
            ) from None
        report(f"no KV cache for this model ({reason}): each token will compute the whole prefix")
        return serving_graph(model.inference, cache="recompute"), "recompute"


def _of_context(model: sources.LanguageModel, tokens: int) -> sources.LanguageModel:
    """The model, for texts of so many tokens at most."""
    about = model.about
    if model.source is not None or (about.outputs and about.max_sequence < 2):
        raise JobError("--context: goes with a model that reads its answer and its prompt as one text")
    if not 1 < tokens <= about.max_sequence:
        raise JobError(
            f"--context: from 2 to the {about.max_sequence} tokens that the model reads, not {tokens}"
        )
    return replace(model, about=replace(about, max_sequence=tokens))


def _one_run(spec: ServingSpec, model: sources.LanguageModel) -> Servable:
    """A model that does not generate: its graph is served as it is."""
    path = spec.path
    for option, value in (("--draft", spec.draft), ("--quantization", spec.quantization)):
        if value is not None:
            raise JobError(f"{option}: {path} holds a model that answers in one run and generates nothing")
    outputs = model.about.outputs
    if len(outputs) != len(model.inference.outputs):
        raise JobError(f"{path} names {len(outputs)} outputs; its graph has {len(model.inference.outputs)}")
    graph = clean(model.inference)
    model.check(graph.variables)
    config = ServeConfig(
        cache="recompute",
        max_sequence=max(1, model.about.max_sequence),
        vocabulary=max(1, model.about.vocabulary),
        outputs=outputs,
        batch=max(1, min(SAMPLES_AT_ONCE, TOKENS_AT_ONCE // max(1, model.about.max_sequence))),
    )
    return Servable(
        model=model, graph=graph, config=config, read=model.read, parameters=graph.parameter_count
    )
