from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import gguf_files
from support.captured_once import capture_once
from support.families import build, config
from support.source_tokenizer import tokenizer_of_sources

from fusion.cli.plans.serving_plan import summary as serving_summary
from fusion.dag.cutting.cuts import split
from fusion.dag.ir import serialise
from fusion.dag.ir.errors import PlacementError
from fusion.dag.placement.network import UNKNOWN_LINK
from fusion.runtime.capture import capture, gguf_model, huggingface, sources
from fusion.runtime.capture.models import GPT
from fusion.runtime.job import manifest_wire as manifests
from fusion.runtime.job import spec, text
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.manifest import CompressionConfig
from fusion.runtime.job.progress import LoadingPhase, StageLoading
from fusion.runtime.job.spec import DataSpec, GPTConfig
from fusion.runtime.job.stage_graphs import weights_bytes, whole_stage
from fusion.runtime.job.text import TokenizerText
from fusion.runtime.launch.handed_over import Held, Waiting
from fusion.runtime.launch.prepare import prepare_training
from fusion.runtime.launch.prepare_serving import prepare_serving as prepare
from fusion.runtime.launch.prepared import Prepared
from fusion.runtime.launch.servable import read_servable
from fusion.runtime.launch.serving_plan import plan_serving
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.launch.shard import ReportLine, silent
from fusion.runtime.placing.link_guess import SAME_MACHINE, SAME_NETWORK, link_guess
from fusion.runtime.placing.placed_job import as_requested
from fusion.runtime.serving.drafts.draft_files import AboutDraft, draft_files
from fusion.runtime.training.snapshots.snapshot_period import share
from fusion.swarm.blobs.store import BlobStore
from fusion.swarm.directory.records import JobId, LinkRecord, Pair, PeerRecord
from fusion.swarm.identity import Identity, friendly_name
from fusion.swarm.transport import PeerId

JOB = """
name = "small"
[model]
kind = "gpt"
blocks = 2
width = 16
heads = 2
[data]
files = ["*.txt"]
held_out = ["held.txt"]
[train]
steps = 10
sequence = 8
microbatches = 4
[placement]
stages = 2
"""


def prepare_serving(
    path: Path,
    name: str,
    peers: Sequence[PeerRecord],
    store: BlobStore,
    *,
    report: ReportLine = silent,
    note: ReportLine = silent,
    **options: Any,
) -> Prepared:
    return prepare(ServingSpec(path=path, name=name, **options), peers, store, report=report, note=note)


def peer(name: str, address: str = "/ip4/127.0.0.1/tcp/1", memory: int = 1 << 30) -> PeerRecord:
    return PeerRecord(
        peer=PeerId(name), name=friendly_name(name), addresses=(address,), role="peer", device="cpu",
        flops_per_second=1e9, memory_bytes=memory, free_memory_bytes=memory, software="0", opset=1, started_at=0.0,
    )  # fmt: skip


ME = Identity.generate()


@pytest.fixture(autouse=True)
def _each_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch, capture, huggingface, gguf_model)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs", 1 << 30)


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    for name in ("a", "b", "held"):
        (tmp_path / f"{name}.txt").write_text(f"the quick brown {name} " * 20)
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def prepared_job(job_file: Path, store: BlobStore, peers: list[PeerRecord]) -> Prepared:
    return prepare_training(spec.load(job_file), peers, store, author=ME)


def test_a_job_file_becomes_blobs_that_hold_everything(job_file: Path, store: BlobStore) -> None:
    (job_file.parent / "held.txt").write_text("held " * 8)
    lines: list[str] = []
    prepared = prepare_training(
        spec.load(job_file),
        [peer("A"), peer("B")],
        store,
        author=ME,
        report=lines.append,
        now=lambda: 1234.5,
    )
    manifest = manifests.decode(store.path(prepared.job).read_bytes())  # type: ignore[arg-type]
    assert manifest == prepared.manifest and manifest.author == ME.peer_id and manifest.byte_level
    assert manifest.stages == 2 and set(manifest.proposed) == {"A", "B"}
    assert manifest.launched_at == 1234
    assert all(b > 0 for b in manifest.memory_bytes) and prepared.predicted_seconds > 0
    assert all(store.has(digest) for digest in prepared.blobs)
    graph = serialise.decode(store.path(manifest.graph).read_bytes())
    names: set[str] = set()
    for digest in manifest.weights:
        with safe_open(store.path(digest), framework="pt") as file:
            names |= set(file.keys())
    assert names == {variable.name for variable in graph.variables}
    assert prepared.parameters == sum(
        p.numel() for p in GPT(GPTConfig(blocks=2, width=16, heads=2, sequence=8)).parameters()
    )
    assert manifest.train is not None and manifest.train.data.held_out is not None
    assert b"held" in store.path(manifest.train.data.held_out).read_bytes()
    assert manifest.train.evaluate_batches == 5  # of 8: four times each of the samples, which are five
    assert b"held" not in store.path(manifest.train.data.train).read_bytes()
    assert {name for name, _ in manifest.files} == {"inference.graph", "fusion.json"}
    assert any("placing" in line for line in lines)


def test_what_is_not_trained_on_is_a_lasting_line(job_file: Path, store: BlobStore) -> None:
    """Lines on how far it is are written over."""
    job = spec.load(job_file)
    assert isinstance(job.data, DataSpec)
    notes: list[str] = []
    prepare_training(
        replace(job, data=replace(job.data, limit_bytes=700)),
        [peer("A"), peer("B")],
        store,
        note=notes.append,
    )
    assert [note.split(" (")[0] for note in notes] == [
        "read 630 of 720 bytes of text",
        "read 70 of 420 bytes of held-out text",
    ]


def test_the_same_seed_gives_the_same_weights_and_another_job_id(job_file: Path, store: BlobStore) -> None:
    one = prepared_job(job_file, store, [peer("A"), peer("B")])
    torch.manual_seed(123)
    two = prepared_job(job_file, store, [peer("A"), peer("B")])
    assert one.manifest.weights == two.manifest.weights and one.job != two.job


def test_what_cannot_be_placed_is_said(job_file: Path, store: BlobStore) -> None:
    with pytest.raises(PlacementError):
        prepared_job(job_file, store, [peer("A")])  # two stages were asked for
    with pytest.raises(PlacementError):
        prepared_job(job_file, store, [peer("A", memory=1000), peer("B", memory=1000)])
    job_file.write_text(JOB + 'peers = ["C"]\n')
    with pytest.raises(JobError, match="'C' is not in the swarm"):
        prepared_job(job_file, store, [peer("A"), peer("B")])


def test_the_pipeline_is_no_deeper_than_memory_allows(job_file: Path, store: BlobStore) -> None:
    job_file.write_text(JOB.replace("sequence = 8", "sequence = 8\nmicrobatch_size = 64"))
    roomy = prepared_job(job_file, store, [peer("A"), peer("B")]).manifest
    room = max(roomy.memory_bytes) - 1
    tight = prepared_job(job_file, store, [peer("A", memory=room), peer("B", memory=room)]).manifest
    assert roomy.train is not None and tight.train is not None
    assert roomy.train.depth == 2 and tight.train.depth == 1 and max(tight.memory_bytes) <= room


def test_only_the_peers_that_were_named_take_part(job_file: Path, store: BlobStore) -> None:
    job_file.write_text(JOB + f'peers = ["C", "{friendly_name("A")}"]\n')
    prepared = prepared_job(job_file, store, [peer("A"), peer("B"), peer("C")])
    assert set(prepared.manifest.proposed) == {"A", "C"}


def test_data_too_short_for_one_sample_is_refused(job_file: Path, store: BlobStore) -> None:
    for name in ("a", "b"):
        (job_file.parent / f"{name}.txt").write_text("x")
    with pytest.raises(JobError, match="one sample needs 9"):
        prepared_job(job_file, store, [peer("A"), peer("B")])


@pytest.mark.process  # its chat template is tried
def test_a_directory_as_export_writes_it_is_served(job_file: Path, store: BlobStore, tmp_path: Path) -> None:
    prepared = prepared_job(job_file, store, [peer("A"), peer("B")])
    directory = tmp_path / "exported"
    directory.mkdir()
    for name, digest in prepared.manifest.files:
        (directory / name).write_bytes(store.path(digest).read_bytes())
    module = GPT(GPTConfig(blocks=2, width=16, heads=2, sequence=8))
    save_file(
        {name: value.clone() for name, value in module.state_dict().items()}, directory / "model.safetensors"
    )
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    served = prepare_serving(directory, "small", [peer("A"), peer("B")], store, stages=2)
    chat = dict(served.manifest.files)
    assert store.path(chat["chat_template.jinja"]).read_text() == "{{ messages }}"
    assert set(chat) == {"chat_template.jinja", "special_tokens_map.json"} and {*chat.values()} <= {
        *served.blobs
    }
    assert served.manifest.kind == "serve" and served.manifest.byte_level
    assert served.manifest.serve is not None and served.manifest.serve.cache == "kv"
    assert served.manifest.serve.vocabulary == 256 and served.manifest.serve.max_sequence == 8
    about = json.loads((directory / "fusion.json").read_text())
    (directory / "fusion.json").write_text(json.dumps({**about, "format": 2}))
    with pytest.raises(JobError, match="format 2"):
        prepare_serving(directory, "small", [peer("A")], store)
    (directory / "fusion.json").write_text("{}")
    with pytest.raises(JobError, match="vocabulary is missing"):
        prepare_serving(directory, "small", [peer("A")], store)
    (directory / "fusion.json").write_text("[" * 100_000)
    with pytest.raises(JobError, match=r"fusion\.json"):
        prepare_serving(directory, "small", [peer("A")], store)


def test_what_is_not_followed_of_its_files_is_said(tmp_path: Path, store: BlobStore) -> None:
    directory, lines = exported_gpt(tmp_path / "m"), list[str]()
    prepare_serving(directory, "m", [peer("A")], store, note=lines.append)
    assert lines == []
    (directory / "generation_config.json").write_text('{"repetition_penalty": 1.3}')
    prepare_serving(directory, "m", [peer("A")], store, note=lines.append)
    (line,) = lines
    assert line.startswith("generation_config.json asks for repetition_penalty 1.3, which answers do not")


def test_an_export_runs_in_the_dtype_of_its_graph_alone(tmp_path: Path, store: BlobStore) -> None:
    directory = exported_gpt(tmp_path / "m")
    prepare_serving(directory, "m", [peer("A")], store, dtype="float32")
    with pytest.raises(
        JobError, match=r"--dtype: .* holds a graph in float32, which cannot be had in bfloat16"
    ):
        prepare_serving(directory, "m", [peer("A")], store, dtype="bfloat16")


def test_what_serving_would_take_is_said_before_anything_starts(tmp_path: Path, store: BlobStore) -> None:
    directory, lines = exported_gpt(tmp_path / "m"), list[str]()
    found = read_servable(ServingSpec(path=directory), lines.append)
    peers = [peer("A"), peer("B"), peer("C", memory=10)]
    plan = plan_serving(found, peers, (), 2, lines.append)
    assert not store.held()
    served = prepare_serving(directory, "m", peers, store, stages=2).manifest
    assert tuple(stage.weights for stage in plan.stages) == served.weights
    assert tuple(stage.memory_bytes for stage in plan.stages) == served.memory_bytes
    assert {stage.peer for stage in plan.stages} == set(served.proposed) and plan.able == 2
    assert plan.held_bytes == 0 and plan.fetch_bytes == sum(stage.weights_bytes for stage in plan.stages)
    assert plan.fetch_bytes > plan.weights_bytes  # both stages hold the tied embedding
    assert plan.token_seconds > 0 and plan.to_json()["fits"] and plan.dtype == "float32"
    lines = serving_summary(plan)
    assert len(lines) == 4 and "2 of 3 peers" in lines[2] and "tokens/s" in lines[3]
    there = replace(plan, stages=(replace(plan.stages[0], on_disk=True), plan.stages[1]))
    assert there.fetch_bytes == plan.stages[1].weights_bytes


def test_a_plan_that_does_not_fit_says_what_would(tmp_path: Path, store: BlobStore) -> None:
    found = read_servable(ServingSpec(path=exported_gpt(tmp_path / "m")), lambda line: None)
    plan = plan_serving(found, [peer("A", memory=1000), peer("B", memory=1000)], (), None, lambda line: None)
    assert not plan.stages and "does not fit" in plan.misfit and not plan.to_json()["fits"]
    assert len(plan.needed) == 6 and sorted(plan.needed, reverse=True) == [*plan.needed]
    alone, halves = plan.needed[:2]
    assert prepare_serving(tmp_path / "m", "m", [peer("A", memory=alone)], store).manifest.stages == 1
    peers = [peer("A", memory=halves), peer("B", memory=halves)]
    assert prepare_serving(tmp_path / "m", "m", peers, store).manifest.stages == 2
    with pytest.raises(PlacementError):
        prepare_serving(tmp_path / "m", "m", [replace(p, free_memory_bytes=halves - 1) for p in peers], store)
    plan = replace(plan, needed=(3 << 20, 2 << 20))
    assert (
        "peers that would do: " in serving_summary(plan)[-1] and "on each of 2" in serving_summary(plan)[-1]
    )


def test_a_shorter_longest_text_takes_less_memory(tmp_path: Path, store: BlobStore) -> None:
    directory, lines = exported_gpt(tmp_path / "m"), list[str]()
    whole = read_servable(ServingSpec(path=directory), lines.append)
    half = read_servable(ServingSpec(path=directory, context=4), lines.append)
    assert whole.config.max_sequence == 8 and half.config.max_sequence == 4
    plans = [plan_serving(found, [peer("A")], (), None, lines.append) for found in (whole, half)]
    saved = plans[0].stages[0].memory_bytes - plans[1].stages[0].memory_bytes
    assert plans[0].cache_bytes == 8 * 2 * 2 * 16 * 4  # keys and values of two layers, 16 wide, in float32
    assert saved >= plans[1].cache_bytes == plans[0].cache_bytes // 2 and plans[1].max_sequence == 4
    served = prepare_serving(directory, "m", [peer("A")], store, context=4).manifest
    assert served.serve is not None and served.serve.max_sequence == 4
    assert served.memory_bytes == (plans[1].stages[0].memory_bytes,)
    tight = [peer("A", memory=plans[1].stages[0].memory_bytes)]
    with pytest.raises(PlacementError, match=r"a text of 8 tokens .* \(fewer with --context\)"):
        prepare_serving(directory, "m", tight, store)
    prepare_serving(directory, "m", tight, store, context=4)
    for tokens in (1, 9):
        with pytest.raises(JobError, match=f"--context: from 2 to the 8 tokens .* not {tokens}"):
            read_servable(ServingSpec(path=directory, context=tokens), lines.append)


def test_ends_that_a_model_cannot_say_end_nothing(tmp_path: Path, store: BlobStore) -> None:
    """As of one with fewer tokens than that whose configuration it has: 50256 ends the texts of any GPT-2."""
    directory = exported_gpt(tmp_path / "m")
    about = json.loads((directory / "fusion.json").read_text())
    (directory / "fusion.json").write_text(json.dumps({**about, "end_tokens": [-1, 3, 50256]}))
    served = prepare_serving(directory, "m", [peer("A")], store).manifest.serve
    assert served is not None and served.end_tokens == (3,)


def test_a_directory_that_is_no_model_is_refused_in_one_line(tmp_path: Path, store: BlobStore) -> None:
    with pytest.raises(JobError, match="is not a directory"):
        prepare_serving(tmp_path / "nowhere", "x", [peer("A")], store)
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match=r"no config\.json"):
        prepare_serving(tmp_path / "empty", "x", [peer("A")], store)


def test_a_tokenizer_that_no_peer_could_read_is_refused_before_anything_starts(
    tmp_path: Path, store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = exported_gpt(tmp_path / "model")
    for content in ("{}", "", "[" * 100_000):
        (directory / "tokenizer.json").write_text(content)
        with pytest.raises(JobError, match=r"tokenizer\.json: the model's tokenizer cannot be read"):
            prepare_serving(directory, "x", [peer("A")], store)
    monkeypatch.setattr(text, "MAX_TOKENIZER_BYTES", 1000)
    with pytest.raises(JobError, match="has 100000 bytes; the limit is 1000"):
        prepare_serving(directory, "x", [peer("A")], store)


def exported_gpt(
    directory: Path, *, blocks: int = 2, sequence: int = 8, vocabulary: int = 256, width: int = 16
) -> Path:
    """As `jobs export` writes a model that reads bytes."""
    config = GPTConfig(blocks=blocks, width=width, heads=2, sequence=sequence, vocabulary=vocabulary)
    model = sources.builtin(config, 0, byte_level=True, tokenizer=None)
    directory.mkdir()
    (directory / "fusion.json").write_bytes(model.about.to_json())
    (directory / "inference.graph").write_bytes(serialise.encode(model.inference))
    values = {name: value.clone() for name, value in GPT(config).state_dict().items()}
    save_file(values, directory / "model.safetensors")
    return directory


def test_a_draft_goes_with_the_model_and_its_memory_with_the_first_stage(
    store: BlobStore, tmp_path: Path
) -> None:
    directory, small = exported_gpt(tmp_path / "m"), exported_gpt(tmp_path / "d", blocks=1)
    peers = [peer("A"), peer("B")]
    plain = prepare_serving(directory, "m", peers, store, stages=2).manifest
    drafted = prepare_serving(directory, "m", peers, store, stages=2, draft=small)
    files = draft_files(drafted.manifest)
    assert draft_files(plain) is None and files is not None
    assert {files.graph, files.weights, files.about} <= {*drafted.blobs}
    assert AboutDraft.from_json(store.path(files.about).read_bytes()).max_sequence == 8
    whole = whole_stage(store.path(files.graph).read_bytes(), "d")
    held = load_file(store.path(files.weights))
    assert {v.name for v in whole.graph.variables} == set(held)
    more = drafted.manifest.memory_bytes[0] - plain.memory_bytes[0]
    assert more >= weights_bytes(whole) > 0 and drafted.manifest.memory_bytes[1:] == plain.memory_bytes[1:]


def test_a_model_is_placed_where_its_first_stage_has_room_for_the_draft(
    store: BlobStore, tmp_path: Path
) -> None:
    directory, small = exported_gpt(tmp_path / "m"), exported_gpt(tmp_path / "d", blocks=1)
    both = prepare_serving(directory, "m", [peer("A")], store, draft=small).manifest.memory_bytes[0]
    alone = prepare_serving(directory, "m", [peer("A")], store).manifest.memory_bytes[0]
    assert prepare_serving(directory, "m", [peer("A", memory=alone)], store).manifest.proposed == ("A",)
    peers = [peer("A", memory=alone), peer("B", memory=both)]
    assert prepare_serving(directory, "m", peers, store, draft=small).manifest.proposed == ("B",)
    with pytest.raises(PlacementError):
        prepare_serving(directory, "m", peers[:1], store, stages=1, draft=small)


def test_a_draft_that_cannot_guess_for_the_model_is_refused_in_one_line(
    store: BlobStore, tmp_path: Path
) -> None:
    directory = exported_gpt(tmp_path / "m")
    other = exported_gpt(tmp_path / "d", vocabulary=260)
    with pytest.raises(JobError, match="draft: a model of the same vocabulary of 256 tokens, not of 260"):
        prepare_serving(directory, "m", [peer("A")], store, draft=other)
    spelled = exported_gpt(tmp_path / "e")
    tokenizer_of_sources().save(str(spelled / "tokenizer.json"))
    with pytest.raises(JobError, match="draft: a model with the same tokenizer"):
        prepare_serving(directory, "m", [peer("A")], store, draft=spelled)
    with pytest.raises(JobError, match="is not a directory"):
        prepare_serving(directory, "m", [peer("A")], store, draft=tmp_path / "nowhere")


def test_a_layer_of_experts_that_fits_no_peer_lies_on_several(store: BlobStore, tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=16, vocab_size=256, max_position_embeddings=32,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    layer_bytes = 16 * 3 * 128 * 64 * 4
    plain = prepare_serving(tmp_path, "m", [replace(peer("A"), opset=2)], store).manifest
    assert plain.stages == 1
    small = [replace(peer(name, memory=layer_bytes // 2), opset=2) for name in "ABCD"]
    manifest = prepare_serving(tmp_path, "m", small, store).manifest
    assert manifest.stages > 2 and max(manifest.memory_bytes) <= layer_bytes // 2
    held = [load_file(store.path(digest)) for digest in manifest.weights]
    ups = sorted(name for values in held for name in values if "gate_up_proj:" in name)
    assert [name.rpartition(":")[2] for name in ups] == ["0-8", "8-16"]
    with pytest.raises(PlacementError, match="does not fit"):
        prepare_serving(tmp_path, "m", [replace(each, free_memory_bytes=1 << 15) for each in small], store)


def test_links_are_guessed_from_addresses() -> None:
    here, beside = peer("A", "/ip4/192.168.1.7/tcp/1"), peer("B", "/ip4/192.168.1.8/tcp/1")
    twin, far = peer("C", "/ip4/192.168.1.7/tcp/2"), peer("D", "/ip4/1.2.3.4/tcp/1")
    guess = link_guess([here, beside, twin, far])
    assert guess("A", "C") == SAME_MACHINE and guess("A", "B") == SAME_NETWORK
    assert guess("A", "D") == guess("D", "B") == UNKNOWN_LINK
    assert link_guess([peer("E"), peer("F")])("E", "F") == SAME_MACHINE
    assert link_guess([here, peer("G", "/dns4/example.org/tcp/1")])("A", "G") == UNKNOWN_LINK


def apart(*names: str, mbps: float) -> list[LinkRecord]:
    """What such peers have measured."""
    return [
        LinkRecord(peer=PeerId(a), pairs=tuple(Pair(PeerId(b), 40.0, mbps, 1.0) for b in names if a != b))
        for a in names
    ]


def test_codecs_are_chosen_for_the_links_that_were_measured(job_file: Path, store: BlobStore) -> None:
    peers, links = [peer("A"), peer("B")], apart("A", "B", mbps=0.2)
    job_file.write_text(JOB + '[compression]\nkind = "adaptive"\n')
    prepared = prepare_training(spec.load(job_file), peers, store, links=links, author=ME)
    train, plan = prepared.manifest.train, prepared.plan
    assert train is not None and plan is not None
    assert train.compression == CompressionConfig(kind="adaptive")
    assert train.codecs and {codec for _, *both in train.codecs for codec in both} <= {"none", "bf16", "int8"}
    assert all(link.known and link.mbps == pytest.approx(0.2) for link in plan.links)
    assert all(link.rtt_ms == pytest.approx(40) for link in plan.links)
    assert {codec for link in plan.links for codec in link.codecs} & {"bf16", "int8"}
    assert plan.compression == train.compression
    assert prepared.predicted_seconds == pytest.approx(plan.simulated_seconds * (1 + share(0)))
    assert manifests.decode(store.path(prepared.job).read_bytes()) == prepared.manifest  # type: ignore[arg-type]

    job_file.write_text(JOB)
    dense = prepare_training(spec.load(job_file), peers, store, links=links, author=ME)
    assert dense.manifest.train is not None and dense.manifest.train.codecs == ()
    assert prepared.predicted_seconds < dense.predicted_seconds
    # Nothing was measured, and all are on one machine: that is faster than any codec.
    job_file.write_text(JOB + '[compression]\nkind = "adaptive"\n')
    guessed = prepare_training(spec.load(job_file), peers, store, author=ME)
    assert guessed.manifest.train is not None and guessed.manifest.train.codecs == ()
    assert guessed.plan is not None and not any(link.known for link in guessed.plan.links)


def test_a_uniform_codec_is_on_every_edge_and_error_feedback_needs_memory(
    job_file: Path, store: BlobStore
) -> None:
    peers = [peer("A"), peer("B")]
    uniform = JOB + '[compression]\nkind = "uniform"\ncodec = "int4"\n'
    job_file.write_text(uniform)
    plain = prepared_job(job_file, store, peers).manifest
    assert plain.train is not None
    edges = [both for name, *both in plain.train.codecs if name != "tokens.weight"]
    assert edges and all(both == ["int4", "int4"] for both in edges)
    assert ("tokens.weight", "int4", "none") in plain.train.codecs  # both stages hold it
    # At the same cuts: codecs are timed anew for each placement.
    feedback = replace(plain.train, compression=replace(plain.train.compression, error_feedback=True))
    kept = as_requested(serialise.decode(store.path(plain.graph).read_bytes()), feedback, plain.cuts)
    more = [a - b for a, b in zip(kept.memory_bytes, plain.memory_bytes, strict=True)]
    tied, edge = 4 * 256 * 16, 4 * (4 * 8 * 16)  # 4 samples of 8 positions, 16 wide
    assert more[0] == tied and more[1] > tied and (more[1] - tied) % edge == 0


def test_held_is_complete_once_all_is_loaded_and_copied() -> None:
    assert Held(claimed=2, ready=2, stages=2, copied=5, blobs=5).complete
    assert not Held(claimed=2, ready=1, stages=2, copied=5, blobs=5).complete
    assert not Held(claimed=2, ready=2, stages=2, copied=4, blobs=5).complete


def test_an_owner_that_loads_by_a_byte_at_a_time_does_not_get_on() -> None:
    def at(fetched: int, phase: LoadingPhase = "fetching") -> Held:
        loading = StageLoading(
            job=JobId("j"), stage=0, phase=phase, bytes=fetched, of_bytes=1 << 30, seconds=float(fetched)
        )
        waiting = (Waiting(stage=0, owner=PeerId("A"), loading=loading),)
        return Held(claimed=1, ready=0, stages=1, copied=0, blobs=2, waiting=waiting)

    assert len({at(fetched).mark for fetched in range(1000)}) == 1
    assert len({at(fetched).mark for fetched in range(0, 1 << 30, 1 << 20)}) == 64
    assert at(0).mark != at(0, "loading").mark


def test_sources_read_only_what_a_stage_asks_for(tmp_path: Path) -> None:
    model = sources.builtin(
        GPTConfig(blocks=1, width=8, heads=1, sequence=8), 0, byte_level=True, tokenizer=None
    )
    wanted = [v for v in model.inference.variables if v.name.startswith("blocks.0")]
    assert set(model.read(wanted)) == {v.name for v in wanted}


def test_a_model_is_served_quantised(store: BlobStore, tmp_path: Path) -> None:
    directory = exported_gpt(tmp_path / "m", width=64)
    peers = [replace(peer(name), opset=2) for name in "ABC"]
    plain = prepare_serving(directory, "m", peers, store, stages=3)
    found = {
        kind: prepare_serving(directory, "m", peers, store, stages=3, quantization=kind)
        for kind in ("int8", "int4")
    }
    assert plain.manifest.opset == 1
    sizes = {}
    for kind, prepared in found.items():
        manifest = prepared.manifest
        assert manifest.opset == 2 and prepared.parameters == plain.parameters
        graph = serialise.decode(store.path(manifest.graph).read_bytes())
        assert any(node.op == f"fusion.linear_{kind}" for node in graph.nodes)
        for stage, digest in zip(split(graph, manifest.cuts), manifest.weights, strict=True):
            held = load_file(store.path(digest))
            assert {v.name: v.type.shape for v in stage.graph.variables} == {
                n: tuple(v.shape) for n, v in held.items()
            }
        assert sum(manifest.memory_bytes) < sum(plain.manifest.memory_bytes)
        sizes[kind] = sum(store.size(digest) for digest in manifest.weights)
    assert sizes["int4"] < sizes["int8"] < 0.4 * sum(store.size(digest) for digest in plain.manifest.weights)
    with pytest.raises(
        JobError, match=r"^--quantization: the model has no matrix that can be stored as int8[^\n]*$"
    ):
        prepare_serving(exported_gpt(tmp_path / "s"), "m", peers, store, quantization="int8")


@pytest.mark.process  # its chat template is tried
def test_a_gguf_file_is_served_as_it_is_stored(store: BlobStore, tmp_path: Path) -> None:
    tokenizer = tokenizer_of_sources()
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    llama = config("llama")
    llama.vocab_size = len(vocabulary)
    path = tmp_path / "model.gguf"
    write = gguf_files.byte_level(
        vocabulary, gguf_files.merges_of(tokenizer), "gpt-2", kinds={}, template="{{ messages }}"
    )
    gguf_files.write(path, build(llama), "Q8_0", tokenizer=write)
    peers = [replace(peer(name), opset=2) for name in ("A", "B")]
    lines: list[str] = []
    served = prepare_serving(path, "m", peers, store, stages=2, draft=path, report=lines.append).manifest
    assert served.serve is not None and served.serve.cache == "kv" and served.opset == 2
    files = dict(served.files)
    assert store.path(files["chat_template.jinja"]).read_text() == "{{ messages }}"
    assert served.tokenizer is not None
    text = TokenizerText(store.path(served.tokenizer).read_bytes())
    assert text.encode("def f(x): return") == tokenizer.encode("def f(x): return").ids
    weights = sum(store.path(digest).stat().st_size for digest in served.weights)
    assert weights <= 1.2 * path.stat().st_size  # matrices of a few numbers are not kept so
    (path.with_suffix(".bad")).write_bytes(path.read_bytes()[:-9000])
    with pytest.raises(JobError, match="it is not whole"):
        prepare_serving(path.with_suffix(".bad"), "m", peers, store)
