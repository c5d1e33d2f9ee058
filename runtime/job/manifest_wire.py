"""The bytes of a `Manifest`, and all checks of one that a peer reads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import msgpack

from fusion.compression import spec as codecs
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build, plain
from fusion.runtime.job.manifest import (
    MANIFEST_VERSION,
    MAX_STAGES,
    CompressionConfig,
    Manifest,
    OptimizerConfig,
    ServeConfig,
    SourceConfig,
    TrainConfig,
)
from fusion.runtime.job.protocol import MAX_SOURCE_BYTES
from fusion.swarm.authority.law import MAX_ADMITTED
from fusion.swarm.identity import is_peer_id

MAX_MANIFEST_BYTES = 1 << 20
MAX_SUPPRESSED = 4096  # tokens that an encoder-decoder never samples
MAX_OUTPUTS = 256  # of a model that answers in one run
MAX_REPLICAS = 64  # that are proposed for one stage
MAX_STEP_SAMPLES = 1 << 15  # in a step, and in an evaluation: the lead keeps their numbers
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,99}")
NAME_RULE = "letters, digits and _.:/@+- only, at most 100, a letter or digit first"


def encode(manifest: Manifest) -> bytes:
    """Canonical msgpack: the same manifest always has the same bytes, so its digest can be the job's id.
    Raises JobError for a manifest that `decode` would refuse."""
    validate(manifest)
    fields = plain(manifest)
    if manifest.serve is not None and manifest.serve.source is None:
        del fields["serve"]["source"]  # for releases without encoder-decoders
    if manifest.serve is not None and not manifest.serve.outputs:
        # For releases without models that answer in one run
        del fields["serve"]["outputs"], fields["serve"]["batch"]
    if manifest.train is not None and manifest.train.precision == "float32":
        del fields["train"]["precision"]  # for releases that train in float32 only
    packed: bytes = msgpack.packb(fields, use_bin_type=True)
    return packed


def decode(data: bytes) -> Manifest:
    """Raises JobError for anything but the bytes of a valid manifest of our version."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise JobError(f"a manifest of {len(data)} bytes: the limit is {MAX_MANIFEST_BYTES}")
    try:
        value: Any = msgpack.unpackb(
            data, raw=False, strict_map_key=True, max_str_len=4096, max_array_len=100_000, max_map_len=64,
            max_bin_len=0, max_ext_len=0,
        )  # fmt: skip
    except (ValueError, msgpack.UnpackException) as error:
        raise JobError(f"not a manifest: {str(error) or type(error).__name__}") from None
    version = value.get("version") if isinstance(value, dict) else None
    if version != MANIFEST_VERSION:
        raise JobError(f"a manifest of version {version!r:.40}: this peer knows {MANIFEST_VERSION}")
    try:
        manifest = build(Manifest, value)
    except ValueError as error:
        raise JobError(f"manifest: {error}") from None
    validate(manifest)
    return manifest


def is_name(text: str) -> bool:
    """Whether it is a valid name of a job."""
    return _NAME.fullmatch(text) is not None


def validate(manifest: Manifest) -> None:
    """Raises JobError naming the first field that breaks a rule."""
    try:
        _validate(manifest)
    except JobError as error:
        raise JobError(f"manifest: {error}") from None


def _validate(manifest: Manifest) -> None:
    _require(is_name(manifest.name), "name", NAME_RULE)
    _validate_stages(manifest)
    _validate_blobs(manifest)
    _require(is_peer_id(manifest.author), "author", "the peer id of whoever launched it")
    _validate_law(manifest)
    _require(1 <= manifest.opset < 2**31, "opset", "from 1 to 2**31")
    _require(len(manifest.salt) <= 64, "salt", "at most 64 characters")
    has = {"train": manifest.train is not None, "serve": manifest.serve is not None}
    _require(has == {"train": manifest.kind == "train", "serve": manifest.kind == "serve"}, manifest.kind,
             f"set in a manifest of kind {manifest.kind}, and the other one not")  # fmt: skip
    if manifest.train is not None:
        _validate_train(manifest.train)
    if manifest.serve is not None:
        _validate_serve(manifest.serve)
        _require(
            len(manifest.serve.hop_bytes) in (0, manifest.stages - 1),
            "serve.hop_bytes",
            "one number for each cut, or none",
        )


def _validate_stages(manifest: Manifest) -> None:
    """What has one entry for each stage."""
    _require(manifest.stages <= MAX_STAGES, "cuts", f"at most {MAX_STAGES - 1}")
    ascending = all(a < b for a, b in zip((0, *manifest.cuts), manifest.cuts, strict=False))
    _require(ascending, "cuts", "ascending node indices above 0")
    _require(
        len(manifest.weights) == manifest.stages,
        "weights",
        f"one digest for each of {manifest.stages} stages",
    )
    _require(
        len(manifest.proposed) == manifest.stages, "proposed", "one peer (or an empty text) for each stage"
    )
    _require(all(len(peer) <= 128 for peer in manifest.proposed), "proposed", "peer ids")
    _require(len(manifest.replicas) in (0, manifest.stages), "replicas", "a list for each stage, or none")
    _require(
        all(
            len(peers) <= MAX_REPLICAS and all(len(peer) <= 128 for peer in peers)
            for peers in manifest.replicas
        ),
        "replicas",
        f"at most {MAX_REPLICAS} peer ids for each stage",
    )
    _require(
        len(manifest.memory_bytes) in (0, manifest.stages), "memory_bytes", "one for each stage, or none"
    )
    _require(all(b >= 0 for b in manifest.memory_bytes), "memory_bytes", "at least 0")


def _validate_blobs(manifest: Manifest) -> None:
    for field, digest in (
        ("graph", manifest.graph),
        *(("weights", w) for w in manifest.weights),
        *((f"files.{name:.40}", digest) for name, digest in manifest.files),
        *([("tokenizer", manifest.tokenizer)] if manifest.tokenizer is not None else []),
    ):
        _require(bool(_DIGEST.fullmatch(digest)), field, "a SHA-256 in hex")
    _require(len(manifest.files) <= 64, "files", "at most 64")
    for name, _ in manifest.files:
        _require(bool(_FILE_NAME.fullmatch(name)), "files", "plain file names, no folders")


def _validate_law(manifest: Manifest) -> None:
    admission, limits = manifest.admission, manifest.limits
    for name, peers in (("peers", admission.peers), ("roots", admission.roots)):
        _require(len(peers) <= MAX_ADMITTED, f"admission.{name}", f"at most {MAX_ADMITTED} peer ids")
        _require(all(map(is_peer_id, peers)), f"admission.{name}", "peer ids")
    _require(not admission.peers or admission.kind == "listed", "admission.peers", "for kind = listed only")
    _require(not admission.roots or admission.kind == "granted", "admission.roots", "for kind = granted only")
    _require(0 <= limits.stages_per_owner <= MAX_STAGES, "limits.stages_per_owner", f"from 0 to {MAX_STAGES}")
    _require(
        limits.stages_per_subnet == 0,
        "limits.stages_per_subnet",
        "0: readers see unlike addresses, so none holds it",
    )
    _require(0 <= manifest.launched_at < 2**40, "launched_at", "unix seconds")


def validate_amounts(train: Mapping[str, Any]) -> None:
    """Raises JobError naming the first field of a training, of a job file or a manifest, that is out of range."""
    for name, low, high in (
        ("steps", 1, 10**9), ("microbatches", 1, 4096), ("microbatch_size", 1, MAX_STEP_SAMPLES), ("sequence", 0, 1 << 24),
        ("seed", 0, 2**63 - 1), ("snapshot_every", 0, 10**9), ("evaluate_every", 0, 10**9),
        ("evaluate_batches", 1, 4096),
    ):  # fmt: skip
        _require(low <= train[name] <= high, f"train.{name}", f"from {low} to {high}")
    size = train["microbatch_size"]
    most = MAX_STEP_SAMPLES // size
    for name in ("microbatches", "evaluate_batches"):
        rule = f"at most {most} of {size} samples each ({MAX_STEP_SAMPLES} in all)"
        _require(train[name] <= most, f"train.{name}", rule)


def _validate_train(train: TrainConfig) -> None:
    validate_amounts(vars(train))
    _require(1 <= train.depth <= 64, "train.depth", "from 1 to 64")
    for name, digest in (("train", train.data.train), ("held_out", train.data.held_out)):
        _require(digest is None or bool(_DIGEST.fullmatch(digest)), f"train.data.{name}", "a SHA-256 in hex")
    _require(train.data.token_bytes in (1, 2, 4), "train.data.token_bytes", "1, 2 or 4")
    _require(train.data.kind == "arrays" or train.sequence > 0, "train.sequence", "at least 1 for tokens")
    validate_optimizer(train.optimizer, "train.optimizer.")
    validate_compression(train.compression, "train.compression.")
    _require(
        len({edge for edge, _, _ in train.codecs}) == len(train.codecs),
        "train.codecs",
        "one line for each edge",
    )
    for edge, *chosen in train.codecs:
        for text in chosen:
            _check_codec(text, f"train.codecs.{edge:.80}")


def validate_compression(config: CompressionConfig, where: str = "compression.") -> None:
    """Raises JobError naming the field that no codec of ours has."""
    _check_codec(config.codec, where + "codec")
    _require(math.isfinite(config.ratio) and 1 <= config.ratio <= 1e6, where + "ratio", "from 1 to 1000000")
    known = (*codecs.PLAIN[1:], "topk")
    right = all(family in known for family in config.families) and len(config.families) == len(
        set(config.families)
    )
    _require(right, where + "families", f"some of {', '.join(known)}, each once")


def _check_codec(text: str, where: str) -> None:
    try:
        right = str(codecs.parse(text))
    except ValueError as error:
        raise JobError(f"{where}: {error}") from None
    _require(text == right, where, f"{right!r}, the one spelling")


def validate_optimizer(config: OptimizerConfig, where: str = "optimizer.") -> None:
    """Raises JobError naming the field whose value an optimizer cannot use."""
    for name, low, high in (
        ("learning_rate", 0.0, 1e6), ("eps", 0.0, 1.0), ("weight_decay", 0.0, 1e3), ("momentum", 0.0, 1.0),
        ("final_ratio", 0.0, 1.0), ("warmup_steps", 0, 10**9),
    ):  # fmt: skip
        value = getattr(config, name)
        _require(math.isfinite(value) and low <= value <= high, where + name, f"from {low} to {high}")
    _require(
        all(0.0 <= beta < 1.0 for beta in config.betas), where + "betas", "two numbers from 0 to below 1"
    )
    clip = config.clip_norm
    _require(clip is None or (math.isfinite(clip) and clip > 0), where + "clip_norm", "above 0, or left out")


def _validate_serve(serve: ServeConfig) -> None:
    _require(1 <= serve.max_sequence <= 1 << 24, "serve.max_sequence", "from 1 to 2^24")
    _require(1 <= serve.vocabulary <= 1 << 24, "serve.vocabulary", "from 1 to 2^24")
    _require(1 <= serve.prefill_chunk <= 1 << 20, "serve.prefill_chunk", "from 1 to 2^20")
    _require(len(serve.end_tokens) <= 64, "serve.end_tokens", "at most 64")
    _require(all(0 <= b <= 1 << 40 for b in serve.hop_bytes), "serve.hop_bytes", "from 0 to 2^40 each")
    inside = all(0 <= token < serve.vocabulary for token in serve.end_tokens)
    _require(inside, "serve.end_tokens", "ids below serve.vocabulary")
    if serve.source is not None:
        _validate_source(serve, serve.source)
    _require(len(serve.outputs) <= MAX_OUTPUTS, "serve.outputs", f"at most {MAX_OUTPUTS}")
    named = all(_FILE_NAME.fullmatch(name) for name in serve.outputs)
    _require(
        named and len(set(serve.outputs)) == len(serve.outputs), "serve.outputs", "plain names, each once"
    )
    _require(1 <= serve.batch <= 4096, "serve.batch", "from 1 to 4096")
    one_run = bool(serve.outputs)
    alike = serve.cache == "recompute" and serve.source is None
    _require(alike or not one_run, "serve.cache", "recompute, where there are outputs")
    texts = serve.embeds or serve.max_sequence == 1
    _require(texts or not one_run, "serve.max_sequence", "1 for a model that makes something else of texts")
    _require(one_run or serve.batch == 1, "serve.batch", "1 for a model that generates")


def _validate_source(serve: ServeConfig, source: SourceConfig) -> None:
    _require(serve.cache == "kv", "serve.cache", "kv for an encoder-decoder")
    _require(0 <= source.channels <= 1 << 12, "serve.source.channels", "from 0 to 4096")
    most = MAX_SOURCE_BYTES // source.unit_bytes
    _require(1 <= source.length <= most, "serve.source.length", f"from 1 to {most}")
    _require(1 <= len(source.start) <= 64, "serve.source.start", "1 to 64 tokens")
    inside = all(0 <= token < serve.vocabulary for token in source.start)
    _require(inside, "serve.source.start", "ids below serve.vocabulary")
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        tokens = getattr(source, name)
        inside = len(tokens) <= MAX_SUPPRESSED and all(0 <= token < serve.vocabulary for token in tokens)
        _require(inside, f"serve.source.{name}", f"at most {MAX_SUPPRESSED} ids below serve.vocabulary")
    _require(len(source.start) < serve.max_sequence, "serve.max_sequence", "more than serve.source.start")


def _require(condition: bool, field: str, rule: str) -> None:
    if not condition:
        raise JobError(f"{field} must be {rule}")
