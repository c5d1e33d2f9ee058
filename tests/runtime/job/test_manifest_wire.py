from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import plain
from fusion.runtime.job.manifest import (
    DataConfig,
    Manifest,
    OptimizerConfig,
    ServeConfig,
    SourceConfig,
    TrainConfig,
)
from fusion.runtime.job.progress import Progress
from fusion.swarm.directory.records import Digest, JobId
from fusion.swarm.identity import Identity
from fusion.swarm.transport import PeerId

DIGEST = Digest("ab" * 32)
TRAIN = TrainConfig(
    steps=10,
    microbatches=2,
    microbatch_size=2,
    sequence=8,
    seed=3,
    optimizer=OptimizerConfig(clip_norm=None),
    data=DataConfig(kind="tokens", train=DIGEST, held_out=DIGEST),
)
SOUND = Manifest(
    name="gpt-2/tiny",
    kind="train",
    graph=DIGEST,
    cuts=(3, 9),
    weights=(DIGEST,) * 3,
    proposed=(PeerId("a"), PeerId("b"), PeerId("")),
    memory_bytes=(1, 2, 3),
    train=TRAIN,
    byte_level=True,
    files=(("config.json", DIGEST),),
    salt="pepper",
    author=Identity.generate().peer_id,
    launched_at=1_700_000_000,
)
SERVE = replace(
    SOUND,
    kind="serve",
    train=None,
    serve=ServeConfig(cache="kv", max_sequence=8, vocabulary=9, end_tokens=(1,)),
)


SOURCE = SourceConfig(start=(2, 3), length=20, suppress_tokens=(4,), begin_suppress_tokens=(5,))
assert SERVE.serve is not None
READING = replace(SERVE, serve=replace(SERVE.serve, source=SOURCE))


def test_who_knows_no_encoder_decoders_reads_the_manifest_of_any_other_model() -> None:
    fields = msgpack.unpackb(manifests.encode(SERVE))
    assert "source" not in fields["serve"]
    assert "source" in msgpack.unpackb(manifests.encode(READING))["serve"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"start": ()}, {"start": (9,)}, {"start": (1,) * 8}, {"length": 0}, {"length": 1 << 20}, {"channels": -1},
        {"channels": 80, "length": 1 << 15}, {"suppress_tokens": (9,)}, {"begin_suppress_tokens": (-1,)},
    ],
)  # fmt: skip
def test_a_source_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    assert READING.serve is not None
    serve = replace(READING.serve, source=replace(SOURCE, **wrong))
    with pytest.raises(JobError, match="manifest: serve"):
        manifests.encode(replace(READING, serve=serve))
    with pytest.raises(JobError, match=r"serve\.cache"):
        manifests.encode(replace(READING, serve=replace(READING.serve, cache="recompute")))


ONE_RUN = replace(
    SERVE, serve=ServeConfig(cache="recompute", max_sequence=1, vocabulary=1, outputs=("mask",), batch=64)
)


def test_who_knows_no_models_that_answer_in_one_run_reads_the_manifest_of_any_other() -> None:
    fields = msgpack.unpackb(manifests.encode(SERVE))
    assert not {"outputs", "batch"} & fields["serve"].keys()
    assert manifests.decode(manifests.encode(ONE_RUN)) == ONE_RUN


@pytest.mark.parametrize(
    "wrong",
    [
        {"outputs": ("a", "a")}, {"outputs": ("a b",)}, {"outputs": ("a",) * 300}, {"batch": 0}, {"batch": 5000},
        {"cache": "kv"}, {"max_sequence": 2}, {"outputs": (), "batch": 2}, {"source": SOURCE, "cache": "kv"},
    ],
)  # fmt: skip
def test_a_model_that_cannot_answer_in_one_run_is_refused(wrong: dict[str, Any]) -> None:
    assert ONE_RUN.serve is not None
    with pytest.raises(JobError, match="manifest: serve"):
        manifests.encode(replace(ONE_RUN, serve=replace(ONE_RUN.serve, **wrong)))


@pytest.mark.parametrize("manifest", [SOUND, SERVE, READING])
def test_round_trip_is_canonical(manifest: Manifest) -> None:
    data = manifests.encode(manifest)
    assert manifests.decode(data) == manifest
    assert manifests.encode(manifests.decode(data)) == data


def _with(path: str, value: object) -> dict[str, Any]:
    whole = plain(SOUND)
    part, *rest = path.split(".")
    at = whole
    for name in rest:
        at, part = at[part], name
    at[part] = value
    return whole


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("version", 4, "version 4"),
        ("version", 2, "version 2"),
        ("version", None, "version None"),
        ("name", "x\nimport os", "name"),
        ("name", "", "name"),
        ("graph", "AB" * 32, "graph"),
        ("graph", 7, "graph"),
        ("cuts", [9, 3], "cuts"),
        ("cuts", [0, 3], "cuts"),
        ("cuts", [3.0, 9.0], "cuts[0]"),
        ("weights", [DIGEST], "weights"),
        ("proposed", [], "proposed"),
        ("memory_bytes", [1], "memory_bytes"),
        ("memory_bytes", [1, -2, 3], "memory_bytes"),
        ("files", [["../../etc/passwd", DIGEST]], "files"),
        ("files", [["a/b", DIGEST]], "files"),
        ("files", [[".profile", DIGEST]], "files"),
        ("files", [["config.json"]], "files[0]"),
        ("limits.stages_per_owner", -1, "limits.stages_per_owner"),
        ("limits.stages_per_subnet", 1, "limits.stages_per_subnet must be 0"),
        ("train", None, "train"),
        ("kind", "serve", "serve"),
        ("kind", "mine", "kind"),
        ("train.steps", 0, "train.steps"),
        ("train.steps", True, "train.steps"),
        ("train.microbatches", 10**9, "train.microbatches"),
        ("train.microbatch_size", 1 << 20, "train.microbatch_size"),
        ("train.microbatch_size", 1 << 15, "train.microbatches"),
        ("train.evaluate_batches", 1 << 15, "train.evaluate_batches"),
        ("train.sequence", 0, "train.sequence"),
        ("train.optimizer.learning_rate", float("nan"), "learning_rate"),
        ("train.optimizer.learning_rate", "fast", "learning_rate"),
        ("train.optimizer.clip_norm", -1.0, "clip_norm"),
        ("train.optimizer.kind", "__import__", "train.optimizer.kind"),
        ("train.data.token_bytes", 3, "token_bytes"),
        ("train.data.train", "x", "train.data.train"),
        ("extra", 1, "extra"),
        ("train.seed", 2**63, "seed"),
        ("train.compression.kind", "zip", "train.compression.kind"),
        ("train.compression.codec", "topk:2", "train.compression.codec"),
        ("train.compression.ratio", 0.5, "train.compression.ratio"),
        ("train.compression.families", ["none"], "train.compression.families"),
        ("train.codecs", [["a/0", "int8"]], "train.codecs[0]"),
        ("train.codecs", [["a/0", "int8", "int9"]], "train.codecs.a/0"),
        ("train.codecs", [["a/0", "topk:0.10", "none"]], "'topk:0.1'"),
        ("train.codecs", [["a/0", "int8", "none"]] * 2, "train.codecs"),
    ],
)
def test_an_unsound_manifest_is_refused_by_name(path: str, value: object, says: str) -> None:
    with pytest.raises(JobError) as error:
        manifests.decode(msgpack.packb(_with(path, value)))
    assert says in str(error.value) and "\n" not in str(error.value)


def test_end_tokens_lie_in_the_vocabulary() -> None:
    with pytest.raises(JobError, match="end_tokens"):
        manifests.encode(replace(SERVE, serve=replace(SERVE.serve, end_tokens=(9,))))


@given(st.binary(max_size=200))
@settings(max_examples=examples(100))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(JobError):
        manifests.decode(data)


@given(st.integers(0, 10**6), st.integers(0, 255))
@settings(max_examples=examples(100))
def test_damaged_bytes_give_another_sound_manifest_or_an_error(place: int, value: int) -> None:
    data = bytearray(manifests.encode(SOUND))
    data[place % len(data)] = value
    try:
        decoded = manifests.decode(bytes(data))
    except JobError:
        return
    manifests.validate(decoded)


def test_too_long_is_refused_unread() -> None:
    with pytest.raises(JobError, match="limit"):
        manifests.decode(bytes(manifests.MAX_MANIFEST_BYTES + 1))


def test_progress_survives_a_frame_and_newer_peers() -> None:
    progress = Progress(
        job=JobId(DIGEST),
        state="running",
        step=3,
        loss=1.5,
        recent=((1, 2.0), (2, 1.5)),
        owners=(None, "a"),
        busy=(0.5,),
    )
    header = msgpack.unpackb(msgpack.packb(progress.to_header()))
    assert Progress.from_header({**header, "mood": "good"}) == progress
    with pytest.raises(ValueError, match="state"):
        Progress.from_header({**header, "state": "odd"})


def test_a_job_in_float32_has_the_bytes_that_it_had_before_there_was_another_precision():
    fields = plain(SOUND)
    del fields["train"]["precision"]
    data = manifests.encode(SOUND)
    assert data == msgpack.packb(fields, use_bin_type=True) and manifests.decode(data) == SOUND
    half = replace(SOUND, train=replace(TRAIN, precision="bf16"))
    assert manifests.decode(manifests.encode(half)) == half and manifests.encode(half) != data
    fields["train"]["precision"] = "fp8"
    with pytest.raises(JobError, match=r"train\.precision must be one of float32, bf16, fp16"):
        manifests.decode(msgpack.packb(fields, use_bin_type=True))
