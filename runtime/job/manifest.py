"""A job as data: the manifest that the launcher stores as a blob and every peer reads. Its digest is the job's id."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from fusion.swarm.authority.law import Admission, JobLaw, Limits
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.transport import PeerId

MANIFEST_VERSION = 3  # 1 had no compression, 2 other names and no admission
MAX_STAGES = 4096

# (edge, codec of its values, codec of the gradients that come back), see `fusion.compression.spec`; or a tied variable
# and the codec of its gradient. Edges that are not named are not compressed.
EdgeCodecs = tuple[tuple[str, str, str], ...]


# Of products; weights, gradients and updates are float32 with each (`fusion.dag.rewrites.mixed_precision`).
Precision = Literal["float32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    kind: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    final_ratio: float = 0.1  # of the learning rate, at the last step of linear and cosine
    clip_norm: float | None = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from. `tokens`: one long row of token ids, samples are windows of sequence + 1, and the
    graph's inputs are input_ids, position_ids and targets. `arrays`: a safetensors blob whose tensors are named
    like the graph's inputs, the first dimension counting samples."""

    kind: Literal["tokens", "arrays"]
    train: Digest
    held_out: Digest | None = None
    token_bytes: int = 1  # width of a token id in the blob: 1, 2 or 4, little-endian unsigned


@dataclass(frozen=True, kw_only=True)
class CompressionConfig:
    """How the tensors that stages send each other are compressed. `uniform`: every edge with `codec`. `adaptive`: the slower a
    link, the more, and only as much as pays (AdaTopK, `fusion.compression.adaptive`)."""

    kind: Literal["none", "uniform", "adaptive"] = "none"
    codec: str = "int8"  # uniform: none, fp16, bf16, int8, int4 or topk:<density>
    ratio: float = 8.0  # adaptive: what the slowest link is compressed by at most
    families: tuple[str, ...] = ("bf16", "int8")  # adaptive: what may be chosen; "topk" allows any ratio
    # The gradient of a sparse edge at the positions that were sent; False: its own choice.
    reuse_mask: bool = True
    error_feedback: bool = False  # the compression error of a gradient is added to the next one
    # Codecs (adaptive) and stages follow the links; False: the job stays as it was launched.
    live: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int
    microbatches: int
    microbatch_size: int  # samples in a microbatch
    sequence: int  # 0 where the graph has no such symbol
    seed: int
    optimizer: OptimizerConfig
    data: DataConfig
    schedule: Literal["1f1b", "gpipe"] = "1f1b"
    depth: int = 2  # of 1f1b: microbatches in flight for each stage ahead; above 1 hides the latency of links
    snapshot_every: int = 0  # steps; 0: as often as the rate of observed failures makes worth while
    evaluate_every: int = 0  # 0: only at the end
    evaluate_batches: int = 8
    compression: CompressionConfig = CompressionConfig()
    codecs: EdgeCodecs = ()  # what the job begins with
    # The graph has the casts; "fp16": and gradients are scaled (`fusion.runtime.training.compute.loss_scale`).
    precision: Precision = "float32"

    @property
    def sizes(self) -> dict[str, int]:
        """Of the graph's symbols, in one microbatch."""
        return {"batch": self.microbatch_size, "sequence": self.sequence}


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """The encoder's input of an encoder-decoder: token ids, or features of audio. `start`: the tokens that the decoder begins
    with."""

    start: tuple[int, ...]
    length: int  # ids at most, or frames: exactly so many
    channels: int = 0  # numbers of a frame, float32, the frames of a channel together; 0: token ids
    suppress_tokens: tuple[int, ...] = ()  # tokens that are never sampled
    begin_suppress_tokens: tuple[int, ...] = ()  # nor these as the first one

    @property
    def unit_bytes(self) -> int:
        """Of an id, or of a frame."""
        return 4 * self.channels or 8


EMBEDDING = "embedding"  # the only output of a model that makes a vector of a text


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    cache: Literal["kv", "recompute"]
    max_sequence: int
    vocabulary: int
    end_tokens: tuple[int, ...] = ()
    prefill_chunk: int = 512
    hop_bytes: tuple[int, ...] = ()  # that cross each cut for one position; empty: not known
    source: SourceConfig | None = None  # of an encoder-decoder
    # Names for what a model gives that answers in one run and generates nothing
    outputs: tuple[str, ...] = ()
    batch: int = 1  # samples that such a model takes at once, at most

    @property
    def embeds(self) -> bool:
        """Whether it makes a vector of each text of `input_ids`."""
        return self.outputs == (EMBEDDING,)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a text that it is given."""
        return self.max_sequence if self.source is None else self.source.length

    @property
    def sizes(self) -> dict[str, int]:
        """Of the graph's symbols, in the longest session."""
        sizes = {"batch": self.batch, "sequence": self.max_sequence}
        return sizes if self.source is None else {**sizes, "source": self.source.length}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    name: str
    kind: Literal["train", "serve"]
    graph: Digest  # blob: canonical bytes of the whole graph (already rewritten)
    cuts: tuple[int, ...]  # node indices at which a new stage starts, ascending; stages = len(cuts) + 1
    opset: int = 1  # the op-set that the graph needs: peers with older ones leave the job alone
    weights: tuple[Digest, ...]  # blob per stage: safetensors of that stage's variables, by variable name
    proposed: tuple[PeerId, ...]  # proposed owner of each stage; a hint, anyone may fill a hole
    # By stage: who is proposed to serve it beside its owner; a hint
    replicas: tuple[tuple[PeerId, ...], ...] = ()
    memory_bytes: tuple[int, ...] = ()  # what each stage needs on its peer, as the launcher estimates it
    train: TrainConfig | None = None
    serve: ServeConfig | None = None
    tokenizer: Digest | None = None  # blob: tokenizer.json; None with byte_level False: prompts are ids
    byte_level: bool = False  # token ids are the bytes of UTF-8 text
    # What export writes beside the weights (config.json, ...); of a served model, for gateways, its chat template, and for the
    # first stage the draft model (`fusion.runtime.serving.drafts.draft_files`). Unknown names are ignored.
    files: tuple[tuple[str, Digest], ...] = ()
    author: PeerId  # the key of its launcher: it signs the launch, and may sign the job's stop
    admission: Admission = Admission()  # noqa: RUF009 - frozen
    limits: Limits = Limits()  # noqa: RUF009 - frozen
    launched_at: int = 0  # unix seconds
    salt: str = ""  # random: launching the same job twice makes two jobs
    version: int = MANIFEST_VERSION

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @cached_property
    def blobs(self) -> frozenset[Digest]:
        """Every blob that the manifest names."""
        named = [self.graph, *self.weights, *(digest for _, digest in self.files), self.tokenizer]
        if self.train is not None:
            named += [self.train.data.train, self.train.data.held_out]
        return frozenset(digest for digest in named if digest is not None)

    def law(self, job: JobId) -> JobLaw:
        """The part of it by which the swarm decides who may do what; `job` is its digest."""
        return JobLaw(
            job=job,
            author=self.author,
            stages=self.stages,
            admission=self.admission,
            limits=self.limits,
            launched_at=self.launched_at,
            steps=0 if self.train is None else self.train.steps,
            name=self.name,
            proposed=tuple(peer for peer in (*self.proposed, *chain.from_iterable(self.replicas)) if peer),
        )

    def needed_bytes(self, stage: int) -> int:
        """Of memory that a stage takes on its peer; 0 where the launcher did not declare it."""
        return self.memory_bytes[stage] if self.memory_bytes else 0
