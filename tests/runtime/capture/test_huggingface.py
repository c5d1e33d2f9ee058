from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import chat_model
from support.captured_once import capture_once
from support.families import GROUPED
from support.source_tokenizer import tokenizer_of_sources

from fusion.dag.cutting.cuts import split
from fusion.dag.ir.graph import TensorType, Variable
from fusion.dag.ir.serialise import decode, encode
from fusion.dag.rewrites.expert_groups import group_experts, part_of
from fusion.dag.rewrites.quantise import quantise
from fusion.runtime.capture import huggingface, sources, stored_weights
from fusion.runtime.capture.capture import variables_from_module
from fusion.runtime.capture.generation import ignored_settings
from fusion.runtime.capture.huggingface import open_model
from fusion.runtime.capture.quantised_weights import quantised_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.capture.stored_weights import StoredWeights
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.model_files import is_exported
from fusion.runtime.job.spec import HuggingFaceConfig
from fusion.runtime.job.text import TokenizerText
from fusion.runtime.launch.prepare_serving import remarks
from fusion.runtime.launch.servable import read_servable
from fusion.runtime.launch.serving_spec import ServingSpec
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

transformers = pytest.importorskip("transformers")
initialization = pytest.importorskip("transformers.initialization")


@pytest.fixture(autouse=True)
def _each_model_is_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch, huggingface)


def saved(directory: Path, configuration: Any, **how: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configuration).eval()
    model.save_pretrained(directory, **how)
    return model


def gpt2(**more: Any) -> Any:
    return transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=48, **more)


def test_a_tokenizer_of_older_files_is_read(tmp_path: Path) -> None:
    """Of most models before tokenizer.json there was: without it a model would answer no text, and be trained on bytes."""
    tokenizer = tokenizer_of_sources()
    saved(tmp_path, gpt2())
    tokenizer.model.save(str(tmp_path))
    assert {"vocab.json", "merges.txt"} <= {path.name for path in tmp_path.iterdir()}
    found = open_model(tmp_path).tokenizer
    assert isinstance(found, bytes)
    prompt = "def main(argv: list[str]) -> None:"
    assert TokenizerText(found).encode(prompt) == tokenizer.encode(prompt).ids
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "vocab.json").rename(tmp_path / "vocab.txt")  # of another kind of model
    assert open_model(tmp_path).tokenizer is None


def test_a_vocabulary_that_is_no_part_of_the_model_is_not_given_to_the_swarm(tmp_path: Path) -> None:
    tiny = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True
    )  # fmt: skip
    saved(tmp_path / "model", tiny)
    words = tmp_path / "words"
    words.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nsecret\n")
    (tmp_path / "model" / "vocab.txt").symlink_to(words)
    with pytest.raises(JobError, match="is a link to"):
        open_model(tmp_path / "model")
    (tmp_path / "model" / "vocab.txt").unlink()
    (tmp_path / "model" / "vocab.txt").write_text(words.read_text())
    found = open_model(tmp_path / "model").tokenizer
    assert isinstance(found, bytes) and b"secret" in found


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_a_tokenizer_that_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    for each in (name, "merges.txt"):
        (tmp_path / each).write_bytes(b"\x00\xff")
    with pytest.raises(JobError, match=f"no tokenizer.json, and {name}.* cannot be made into one: ") as error:
        open_model(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("said", [5, {"a": 1}, "GPT2LMHeadModel", [None], [["x"]], ["A\nB\x1b[31m"]])
def test_classes_that_are_none_are_passed_over_or_said_in_one_line(said: Any, tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    edited(tmp_path, architectures=said)
    opened = open_model(tmp_path)
    opened.check(opened.capture().variables)
    without(tmp_path, "ln_f.weight")
    with pytest.raises(
        JobError, match=r"no safetensors file has the weight transformer\.ln_f\.weight"
    ) as error:
        open_model(tmp_path).check(opened.capture().variables)
    assert str(error.value).isprintable()


def test_a_tokenizer_that_is_code_of_its_own_is_not_run(tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    said = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    with pytest.raises(
        JobError, match=r"vocab\.txt cannot be made into one: its tokenizer is code that comes with the"
    ):
        open_model(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("shard", ["10GB", "30KB"])
def test_weights_are_those_of_the_model_and_take_no_memory_before(tmp_path: Path, shard: str) -> None:
    tiny = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=96, eos_token_id=[3, 5],
    )  # fmt: skip
    model = saved(tmp_path, tiny, max_shard_size=shard)
    opened = open_model(tmp_path)
    assert all(p.is_meta for p in opened.module.parameters())
    assert (opened.vocabulary, opened.max_sequence, opened.end_tokens) == (64, 96, (3, 5))
    assert opened.tokenizer is None
    graph = opened.capture()
    found = opened.read(graph.variables)
    wanted = variables_from_module(model)
    assert found.keys() == {v.name for v in graph.variables}
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert {n for n in found if is_exported(n)} == set(model.state_dict())
    assert nn_parameter_registration_is_restored()


def test_of_several_files_those_are_read_that_transformers_reads(tmp_path: Path) -> None:
    wanted = saved(tmp_path, gpt2())
    others = {name: torch.zeros_like(value) for name, value in wanted.transformer.state_dict().items()}
    shard = "model-00001-of-00001.safetensors"
    for name in ("older.safetensors", shard):  # a checkpoint beside the model, or shards that it replaced
        save_file(others, tmp_path / name, metadata={"format": "pt"})
        if name == shard:
            index = {"metadata": {}, "weight_map": dict.fromkeys(others, shard)}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        opened = open_model(tmp_path)
        found = opened.read(opened.capture().variables)
        assert all(torch.equal(found[key], theirs[key]) for key in found if is_exported(key))


@pytest.mark.parametrize("said", ["another", None])
def test_a_weight_is_read_where_it_is_whatever_the_index_says(said: str | None, tmp_path: Path) -> None:
    """transformers reads the files that an index names, and what they hold."""
    model = saved(tmp_path, gpt2(), max_shard_size="20KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name, place = next(iter(index["weight_map"].items()))
    others = sorted(set(index["weight_map"].values()) - {place})
    index["weight_map"].pop(name)
    if said is not None:
        index["weight_map"][name] = others[0]
    path.write_text(json.dumps(index))
    opened = open_model(tmp_path)
    graph, wanted = opened.capture(), variables_from_module(model)
    opened.check(graph.variables)
    for key, value in opened.read(graph.variables).items():
        assert torch.equal(value, wanted[key])


def nn_parameter_registration_is_restored() -> bool:
    return not torch.nn.Linear(1, 1).weight.is_meta


def test_files_of_a_base_model_and_half_precision_are_read(tmp_path: Path) -> None:
    model = saved(tmp_path, gpt2())
    wanted = variables_from_module(model)
    model.transformer.half().save_pretrained(tmp_path)  # names without the prefix "transformer."
    opened = open_model(tmp_path, dtype="float32")
    assert "wte.weight" in opened.weights.files and opened.stored_dtypes.keys() == {"float16"}
    found = opened.read(opened.capture().variables)
    assert found["transformer.wte.weight"].dtype == torch.float32
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].float(), atol=1e-3, rtol=1e-3)


def test_a_model_runs_in_the_dtype_of_its_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(gpt2(), dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert opened.dtype == "bfloat16" and opened.stored_dtypes.keys() == {"bfloat16"}
    graph = opened.capture()
    assert {v.type.dtype for v in graph.variables} <= {"bfloat16", "bool", "int64"}
    assert graph.types[graph.outputs[0]].dtype == "bfloat16"
    found, wanted = opened.read(graph.variables), variables_from_module(model)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def test_what_the_library_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(gpt2(), dtype=torch.bfloat16).eval()
    model.save_pretrained(tmp_path)
    kind = type(model)
    kept, kind._keep_in_fp32_modules_strict = kind._keep_in_fp32_modules_strict, ["mlp.*weight"]
    try:
        opened = open_model(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    finally:
        kind._keep_in_fp32_modules_strict = kept
    wanted = {name: value.dtype for name, value in loaded.state_dict().items()}
    assert {name: value.dtype for name, value in opened.module.state_dict().items()} == wanted
    assert set(wanted.values()) == {torch.bfloat16, torch.float32}


class Tables(torch.nn.Module):
    """As transformers has it: one table that its code computes, and one that is drawn."""

    _keys_to_ignore_on_save = ("computed", r"drawn\.weight", "forgotten")

    def __init__(self) -> None:
        super().__init__()
        self.computed, self.drawn, self.forgotten, self.stored = (torch.nn.Embedding(4, 3) for _ in range(4))

    def _init_weights(self, module: torch.nn.Embedding) -> None:
        if module._parameters["weight"].dtype == torch.bfloat16:
            module.weight.copy_(torch.arange(12.0).view(4, 3).sin())
        elif module.padding_idx is not None:
            module.weight.normal_()


def test_a_table_that_files_leave_out_is_what_the_models_code_computes() -> None:
    model = Tables()
    model.computed.to(torch.bfloat16)
    model.drawn.padding_idx = 0
    model.to("meta")
    found = stored_weights.computed_parameter(model, "computed.weight")
    assert found is not None and torch.equal(found, torch.arange(12.0).view(4, 3).sin().bfloat16())
    assert model.computed.weight.is_meta
    before = torch.get_rng_state()
    # At random; not set at all; not said to be left out.
    for name in ("drawn.weight", "forgotten.weight", "stored.weight"):
        assert stored_weights.computed_parameter(model, name) is None
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_drawn_for_weights_that_are_read_from_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes transformers longer than all else that it does to build a deep model. Its tables are computed."""
    saved(tmp_path, transformers.LlamaConfig(**GROUPED))
    drawn: list[torch.Tensor] = []
    monkeypatch.setitem(
        initialization.TORCH_INIT_FUNCTIONS, "normal_", lambda tensor, **how: drawn.append(tensor)
    )
    tables = dict(open_model(tmp_path).module.named_buffers())
    assert not drawn
    assert bool((tables["model.rotary_emb.inv_freq"] > 0).all())


def test_without_weights_a_seed_says_what_they_are(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"has no \*\.safetensors"):
        open_model(tmp_path)

    torch.manual_seed(7)
    variables = open_model(tmp_path, weights=False).capture().variables

    def weights(seed: int) -> dict[str, torch.Tensor]:
        return open_model(tmp_path, weights=False, seed=seed).read(variables)

    one, same, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(one[n], same[n]) for n in one)
    assert not torch.equal(one["transformer.wte.weight"], other["transformer.wte.weight"])


def test_files_that_keep_the_names_of_older_versions_are_read(tmp_path: Path) -> None:
    tiny = transformers.GPTNeoXConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    model = saved(tmp_path, tiny)
    opened = open_model(tmp_path)
    found = opened.read(opened.capture().variables)
    assert "lm_head.weight" in found and "embed_out.weight" in opened.weights.files
    wanted = variables_from_module(model)
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def mixtral(**more: Any) -> Any:
    """More experts than ten: the files' names are not in the order of their numbers."""
    return transformers.MixtralConfig(
        hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=12, vocab_size=64, max_position_embeddings=48, **more,
    )  # fmt: skip


@pytest.mark.parametrize("groups", [1, 3])
def test_experts_that_files_hold_one_by_one_are_read(tmp_path: Path, groups: int) -> None:
    """Those of a stage alone, and of a part of a layer no others."""
    model = saved(tmp_path, mixtral(), max_shard_size="20KB")
    opened = open_model(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.11.w1.weight" in opened.weights.files
    graph = group_experts(serving_graph(opened.capture()), groups)
    wanted = variables_from_module(model)
    for stage in split(graph, [len(graph.nodes) // 2]):
        found = opened.read(stage.graph.variables)
        assert found.keys() == {v.name for v in stage.graph.variables}
        for name, value in found.items():
            part = part_of(name)
            whole = wanted[name] if part is None else wanted[part.name][part.start : part.stop]
            assert torch.equal(value, whole), name


def test_experts_are_quantised_where_they_are_read_whole_or_in_parts(tmp_path: Path) -> None:
    saved(tmp_path, mixtral(), max_shard_size="20KB")
    opened = open_model(tmp_path)
    graph, read = quantised_model(serving_graph(opened.capture()), opened.read, "int8")
    whole = read(graph.variables)
    stored = [name for name in whole if name.endswith("gate_up_proj:int8")]
    assert len(stored) == 2 and all(whole[name].shape == (12, 32, 32) for name in stored)
    grouped = group_experts(graph, 3)
    for stage in split(grouped, [len(grouped.nodes) // 2]):
        found = read(stage.graph.variables)
        assert found.keys() == {v.name for v in stage.graph.variables}
        for variable in stage.graph.variables:
            part, value = part_of(variable.name), found[variable.name]
            assert tuple(value.shape) == variable.type.shape
            exact = whole[variable.name] if part is None else whole[part.name][part.start : part.stop]
            assert torch.equal(value, exact), variable.name


def test_what_chooses_experts_is_not_quantised(tmp_path: Path) -> None:
    wide = transformers.MixtralConfig(
        hidden_size=128, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=32, vocab_size=64, max_position_embeddings=48,
    )  # fmt: skip
    saved(tmp_path, wide)
    graph = serving_graph(open_model(tmp_path).capture())
    (router,) = (v.name for v in graph.variables if v.name.endswith("mlp.gate.weight"))
    found = {source.variable.name for source in quantise(graph, "int4").sources}
    assert router not in found and any(name.endswith("experts.gate_up_proj") for name in found)


def test_a_part_of_a_layer_reads_its_own_experts_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Recorded:
        def __init__(self, *given: Any, **how: Any) -> None:
            self.file = safe_open(*given, **how)

        def __enter__(self) -> Recorded:
            self.file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def get_tensor(self, name: str) -> Any:
            read.append(name)
            return self.file.get_tensor(name)

    saved(tmp_path, mixtral())
    opened = open_model(tmp_path)
    monkeypatch.setattr(stored_weights, "safe_open", Recorded)
    name, type_ = "model.layers.1.mlp.experts.gate_up_proj:4-6", TensorType((2, 32, 32), "float32")
    opened.read([Variable(name, type_)])
    wanted = [f"model.layers.1.block_sparse_moe.experts.{e}.{w}.weight" for e in (4, 5) for w in ("w1", "w3")]
    assert sorted(read) == wanted


def test_experts_that_do_not_make_a_layer_are_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, mixtral())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = "model.layers.0.block_sparse_moe.experts.7.w1.weight"
    for damaged in ({k: v for k, v in weights.items() if k != name}, {**weights, name: torch.zeros(3)}):
        save_file(damaged, path)
        opened = open_model(tmp_path)
        with pytest.raises(
            JobError, match=r"model\.safetensors: .*experts\.0\.w1\.weight and others"
        ) as error:
            opened.read(opened.capture().variables)
        assert "\n" not in str(error.value)


def test_an_expert_that_is_missing_or_misshapen_is_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, mixtral())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    monkeypatch.setattr(StoredWeights, "read", None)

    def refused(kept: dict[str, torch.Tensor], match: str) -> None:
        save_file(kept, path)
        opened = open_model(tmp_path)
        graph = opened.capture()
        for variables in (graph.variables, group_experts(serving_graph(graph), 3).variables):
            with pytest.raises(JobError, match=match) as error:
                opened.check(variables)
            assert "\n" not in str(error.value)

    name = "model.layers.0.block_sparse_moe.experts.7.w1.weight"
    absent = re.escape(f"{tmp_path}: no safetensors file has the weight ")
    refused({k: v for k, v in weights.items() if k != name}, f"^{absent}{re.escape(name)}$")
    refused(
        {k: v for k, v in weights.items() if ".0.block_sparse_moe.experts.11." not in k},
        rf"^{absent}.*experts\.11\.",
    )
    refused({**weights, name: torch.zeros(3)}, r"experts\.0\.w1\.weight and others cannot be made into")
    refused({k: v for k, v in weights.items() if "0.w" not in k or ".w3." not in k}, f"^{absent}.*w3")
    refused({k: v for k, v in weights.items() if ".w3." not in k}, "and others")
    save_file(weights, path)
    opened = open_model(tmp_path)
    opened.check(opened.capture().variables)


def test_an_export_of_experts_is_loaded_by_transformers(tmp_path: Path) -> None:
    """`jobs export` writes the module's own names: a layer's experts in one tensor."""
    model = saved(tmp_path / "own", mixtral())
    (tmp_path / "exported").mkdir()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in values
    save_file(values, tmp_path / "exported" / "model.safetensors", {"format": "pt"})
    (tmp_path / "exported" / "config.json").write_bytes((tmp_path / "own" / "config.json").read_bytes())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert loaded.keys() == values.keys() and all(torch.equal(loaded[name], values[name]) for name in values)
    opened = open_model(tmp_path / "exported")
    found = opened.read(opened.capture().variables)
    assert all(torch.equal(found[name], values[name]) for name in values)


def test_weights_that_would_have_to_be_unpacked_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "quantised", gpt2())
    path = tmp_path / "quantised" / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "hqq"}})
    )
    with pytest.raises(JobError, match=r"quantised already \(hqq\).*--quantization int8 or int4"):
        open_model(tmp_path / "quantised")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_numbers_that_stand_for_weights_with_scales_alone_are_refused(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Also where config.json says nothing of them: converted as they are, they would make a model that answers."""
    model = saved(tmp_path, gpt2())
    values = {name: value.clone() for name, value in model.transformer.state_dict().items()}
    values["h.0.mlp.c_fc.weight"] = (values["h.0.mlp.c_fc.weight"] * 100).to(dtype)
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(
        JobError, match=r"h\.0\.mlp\.c_fc\.weight is stored as [IUF]8.*--quantization"
    ) as error:
        open_model(tmp_path)
    assert "\n" not in str(error.value)


def test_a_head_of_its_own_is_read_where_the_config_says_that_there_is_none(tmp_path: Path) -> None:
    """As transformers reads it: a config that leaves it unsaid may mean one matrix for the embedding and the head."""
    saved(tmp_path, gpt2(tie_word_embeddings=False))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not torch.equal(wanted.lm_head.weight, wanted.transformer.wte.weight)
    opened = open_model(tmp_path)
    found = opened.read(opened.capture().variables)
    assert torch.equal(found["lm_head.weight"], wanted.lm_head.weight)
    assert torch.equal(found["transformer.wte.weight"], wanted.transformer.wte.weight)


def variables(module: torch.nn.Module) -> tuple[Variable, ...]:
    """As a graph that reads all of the module has them."""
    return tuple(
        Variable(name, TensorType(tuple(tensor.shape), "float32"))
        for name, tensor in variables_from_module(module).items()
        if is_exported(name)
    )


def test_where_a_head_is_one_of_its_own_all_else_that_is_tied_stays_so(tmp_path: Path) -> None:
    """As of Flan-T5 and mT5: files have the head beside one matrix for both embeddings."""
    tiny = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    transformers.AutoModelForSeq2SeqLM.from_config(tiny).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    values = load_file(path)
    assert not values.keys() & {
        "lm_head.weight",
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
    }
    values["lm_head.weight"] = torch.randn(64, 32)
    save_file(values, path, metadata={"format": "pt"})
    opened = open_model(tmp_path)
    found = opened.read(variables(opened.module))
    assert torch.equal(found["lm_head.weight"], values["lm_head.weight"])
    assert torch.equal(found["shared.weight"], values["shared.weight"])
    assert sum(value.shape == (64, 32) for value in found.values()) == 2


def test_a_decoder_of_whisper_that_is_alone_reads_as_many_positions_as_it_has(tmp_path: Path) -> None:
    tiny = transformers.WhisperConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, num_mel_bins=8, max_target_positions=48,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
    )  # fmt: skip
    model = saved(tmp_path, tiny)
    assert model.model.decoder.embed_positions.num_embeddings == 48
    opened = open_model(tmp_path)
    assert opened.source is None and opened.max_sequence == 48


def test_a_matrix_that_is_stored_twice_is_read_once(tmp_path: Path) -> None:
    model = saved(tmp_path, gpt2())
    values = {name: value.clone() for name, value in model.state_dict().items()}
    assert "lm_head.weight" in values
    save_file(values, tmp_path / "model.safetensors")
    opened = open_model(tmp_path)
    variables = opened.capture().variables
    assert sum(v.name in ("lm_head.weight", "transformer.wte.weight") for v in variables) == 1
    assert all(torch.equal(value, values[n]) for n, value in opened.read(variables).items() if n in values)


ODD = [
    ("n_head", 0), ("n_head", "many"), ("n_embd", -1), ("n_embd", [1]), ("n_layer", None), ("n_layer", 1.5), ("n_layer", 10**9),
    ("vocab_size", {}), ("vocab_size", 0), ("activation_function", "nonsense"), ("n_positions", "x"),
    ("dtype", "int8"), ("dtype", "nonsense"), ("quantization_config", "gptq"), ("model_type", 3),
]  # fmt: skip


def test_a_config_that_makes_no_model_is_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    path = tmp_path / "config.json"
    plain = json.loads(path.read_text())
    for name, value in ODD:
        path.write_text(json.dumps({**plain, name: value}))
        with pytest.raises(JobError) as error:
            opened = open_model(tmp_path)
            opened.read(opened.capture().variables)
        assert "\n" not in str(error.value), (name, value)
    path.write_text("[" * 100_000)
    with pytest.raises(JobError, match="cannot be read"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("mamba", {"max_position_embeddings": "x"}),
        ("mamba", {"max_position_embeddings": {}, "max_seq_len": [1]}),
        ("mamba", {"max_seq_len": float("inf")}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "longrope"}}),
    ],
)
def test_values_that_the_library_lets_pass_are_refused_in_one_line(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    tiny = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 32, **said}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **tiny}))
    with pytest.raises(JobError, match=r"config\.json cannot be used: ") as error:
        open_model(tmp_path, weights=False)
    assert "\n" not in str(error.value)


FACTORS = {"short_factor": [1.0, 1.5] * 4, "long_factor": [2.0] * 8}


def tiny_phi3() -> Any:
    return transformers.Phi3Config(
        hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, vocab_size=64,
        max_position_embeddings=64, original_max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip


def test_the_older_name_of_a_scaling_for_long_texts_means_the_same(tmp_path: Path) -> None:
    saved(tmp_path, tiny_phi3())
    tables = []
    for kind in ("longrope", "su"):
        for form in ("type", "rope_type"):
            edited(tmp_path, rope_parameters=None, rope_scaling={form: kind, **FACTORS})
            opened = open_model(tmp_path)
            assert opened.max_sequence == 32
            tables.append(opened.module.get_buffer("model.rotary_emb.inv_freq"))
    assert all(torch.equal(each, tables[0]) for each in tables)


@pytest.mark.parametrize("kind", ["su", "nonsense", "mrope"])
def test_rotary_positions_of_a_type_that_nobody_knows_are_refused_in_one_line(
    kind: str, tmp_path: Path
) -> None:
    tiny = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "intermediate_size": 32,
        "num_attention_heads": 4,
    }
    said = {"model_type": "llama", **tiny, "rope_scaling": {"type": kind, **FACTORS}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(
        JobError, match=rf"are of the type '{kind}', .*; transformers knows default, .*yarn$"
    ) as error:
        open_model(tmp_path, weights=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("said", ["</s>", {"id": 3}, [None], 2.5])
def test_an_end_token_that_is_no_number_is_refused(said: Any, tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
    with pytest.raises(JobError, match="eos_token_id is a token's number"):
        open_model(tmp_path)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 5348\n"


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    def refused(match: str) -> None:
        with pytest.raises(JobError, match=match) as error:
            open_model(tmp_path)
        assert "\n" not in str(error.value)

    refused(r"no config\.json")
    (tmp_path / "config.json").write_text("{")
    refused("cannot be read")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    refused(r"cannot be used: transformers [\d.]+ knows no models of the kind 'no-such-model'$")
    edited(tmp_path, auto_map={"AutoConfig": "own.Config"})
    refused("of the kind 'no-such-model', and code that comes with a model is not run$")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": "two"}))
    refused(r"cannot be used: .*'n_layer' expected int, got str")
    saved(tmp_path, gpt2())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    refused("not a safetensors file, or not all of one")
    (tmp_path / "model.safetensors").write_bytes(POINTER)
    refused(r"model\.safetensors is only git's pointer to a large file: .*git lfs pull")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    refused(r"model\.safetensors leads to no file$")
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")  # whoever opened it would wait for ever
    refused(r"model\.safetensors is not a file$")
    (tmp_path / "model.safetensors").unlink()
    refused(r"has no \*\.safetensors: its weights are not there$")
    (tmp_path / "training_args.bin").write_bytes(b"pickled")
    (tmp_path / "model.gguf").touch()
    refused(r"has no \*\.safetensors; it holds model\.gguf, which can be served as a file$")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    refused(
        r"has no \*\.safetensors: 'pytorch_model\.bin' is of a format that can run code, .* save_pretrained"
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../../etc/passwd"}})
    )
    refused("names passwd, which is not there")


def test_a_missing_or_misshapen_weight_is_named(tmp_path: Path) -> None:
    saved(tmp_path, gpt2())
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    name = next(n for n in weights if n.endswith("h.1.mlp.c_fc.bias"))
    save_file({k: v for k, v in weights.items() if k != name}, path)
    opened = open_model(tmp_path)
    graph = opened.capture()
    with pytest.raises(JobError, match=r"h\.1\.mlp\.c_fc\.bias"):
        opened.read(graph.variables)
    save_file({**weights, name: torch.zeros(3)}, path)
    with pytest.raises(JobError, match="shape"):
        open_model(tmp_path).read(graph.variables)


def test_a_missing_or_misshapen_weight_is_named_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, gpt2())
    path, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights = load_file(path)
    name = "transformer.h.1.mlp.c_fc.bias"

    def refused(match: str) -> None:
        opened = open_model(tmp_path)
        monkeypatch.setattr(StoredWeights, "read", None)
        with pytest.raises(JobError, match=match):
            opened.check(opened.capture().variables)
        with pytest.raises(JobError, match=match):
            read_servable(ServingSpec(path=tmp_path), lambda line: None)

    save_file({**weights, name: torch.zeros(3)}, path)
    refused(rf"model\.safetensors: {name} has shape \(3,\), not \(128,\)$")
    save_file({f"_orig_mod.{k}": v for k, v in weights.items()}, path)
    refused(r"has the weight (\S+); the nearest is '_orig_mod\.\1', which the model has no place for$")
    save_file({k: v for k, v in weights.items() if k != name}, path)
    refused(rf"no safetensors file has the weight {name}$")
    edited(tmp_path, architectures=["GPT2ForSequenceClassification"])
    refused(
        rf"{name}; config.json says 'GPT2ForSequenceClassification', and GPT2LMHeadModel is what would be"
    )
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weights, "one.safetensors")}))
    path.rename(tmp_path / "one.safetensors")
    refused(rf"one\.safetensors has no {name}, which model\.safetensors\.index\.json says is there$")
    save_file(weights, tmp_path / "one.safetensors")
    read_servable(ServingSpec(path=tmp_path), lambda line: None)


def test_a_part_of_a_mixture_is_looked_at_before_it_is_read(tmp_path: Path) -> None:
    saved(tmp_path, mixtral())
    opened = open_model(tmp_path)
    graph = serving_graph(opened.capture())
    opened.check(graph.variables)
    path = tmp_path / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if "experts" not in k}, path, {"format": "pt"})
    opened = open_model(tmp_path)
    with pytest.raises(JobError, match=r"no safetensors file has the weight .*experts"):
        opened.check(graph.variables)


def test_tensors_that_the_model_has_no_place_for_are_known(tmp_path: Path) -> None:
    """As transformers, which warns of them, and passes over what its classes say."""
    saved(tmp_path, gpt2())
    assert open_model(tmp_path).weights.unread() == ()
    path = tmp_path / "model.safetensors"
    more = (
        "transformer.h.0.attn.bias",
        "transformer.h.0.attn.rotary_emb.inv_freq",
        "score.weight",
        "h.2.ln_1.weight",
    )
    save_file(load_file(path) | {name: torch.ones(2) for name in more}, path, {"format": "pt"})
    assert set(sources.in_files(tmp_path).unread) == {"score.weight", "h.2.ln_1.weight"}


# --- buffers that files are to have


def without(directory: Path, end: str) -> Variable:
    """A tensor that the directory's file no longer has."""
    path = directory / "model.safetensors"
    values = load_file(path)
    name = next(name for name in values if name.endswith(end))
    lost = values.pop(name)
    save_file(values, path, {"format": "pt"})
    return Variable(name, TensorType(tuple(lost.shape), "float32"), "buffer")


def test_a_buffer_that_chooses_experts_is_not_made_up(tmp_path: Path) -> None:
    tiny = transformers.DeepseekV3Config(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, first_k_dense_replace=0,
        num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
        q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, vocab_size=64,
        max_position_embeddings=48,
    )  # fmt: skip
    model = saved(tmp_path, tiny)
    (name,) = (name for name, _ in model.named_buffers() if name.endswith("e_score_correction_bias"))
    bias = Variable(name, TensorType((8,), "float32"), "buffer")
    assert torch.equal(open_model(tmp_path).read([bias])[name], model.get_buffer(name))
    lost = without(tmp_path, "e_score_correction_bias")
    assert lost == bias
    with pytest.raises(JobError, match=r"no safetensors file has the weight .*e_score_correction_bias"):
        open_model(tmp_path).read([lost])
    found = open_model(tmp_path, weights=False).read([lost])  # as the library begins
    assert not found[name].any()


def test_a_table_that_is_computed_of_the_configuration_needs_no_file(tmp_path: Path) -> None:
    tiny = transformers.MiniMaxConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
        num_local_experts=2, block_size=8, layer_types=["linear_attention", "full_attention"], vocab_size=64,
        max_position_embeddings=48,
    )  # fmt: skip
    model = saved(tmp_path, tiny)
    table = without(tmp_path, "slope_rate")
    assert torch.equal(open_model(tmp_path).read([table])[table.name], model.get_buffer(table.name))


def bart(directory: Path) -> None:
    tiny = transformers.BartConfig(
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, max_position_embeddings=48,
    )  # fmt: skip
    transformers.AutoModelForSeq2SeqLM.from_config(tiny).save_pretrained(directory)


def test_a_buffer_that_files_may_leave_out_is_as_the_library_begins_it(tmp_path: Path) -> None:
    bart(tmp_path)
    bias = without(tmp_path, "final_logits_bias")
    found = open_model(tmp_path).read([bias])[bias.name]
    assert found.shape == (1, 64) and not found.any()


# --- what a configuration may not say


def edited(directory: Path, **said: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("said", ["eager", "flash_attention_2", "nobody/kernels"])
def test_a_configuration_does_not_choose_the_code_that_computes(name: str, said: str, tmp_path: Path) -> None:
    model = saved(tmp_path, mixtral())
    edited(tmp_path, **{name: said, name.replace("attn", "experts"): said})
    opened = open_model(tmp_path).module.config
    assert opened._attn_implementation == model.config._attn_implementation
    assert opened._experts_implementation == model.config._experts_implementation


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "gpt_neo",
            {
                "num_layers": 2,
                "attention_types": [[["global", "local"], 1]],
                "max_position_embeddings": 16_385,
            },
        ),
        ("openai-gpt", {"n_layer": 2, "n_positions": 16_385}),
        ("gpt_bigcode", {"n_layer": 1, "n_positions": 23_171}),
        ("gptj", {"n_layer": 16, "n_embd": 64, "n_head": 1, "n_positions": 1 << 20}),
        ("xglm", {"num_layers": 1, "d_model": 64, "attention_heads": 1, "max_position_embeddings": 1 << 24}),
    ],
)
def test_a_configuration_does_not_fill_the_memory_with_tables(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    """Positions by positions, or a row of sines for each, which these kinds of models compute for each layer or for all."""
    transformers.AutoConfig.for_model(kind, vocab_size=64, **said).save_pretrained(tmp_path)
    with pytest.raises(JobError, match="positions are more than a model of the kind") as error:
        open_model(tmp_path, weights=False)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt_neo", {"attention_types": [[["global"], 1 << 40]]}),
        ("gpt2", {"num_labels": 1 << 40}),
        ("t5", {"num_decoder_layers": 1 << 40}),
        ("switch_transformers", {"num_experts": 1 << 40}),
        ("bert", {"max_position_embeddings": (1 << 24) + 1}),
    ],
)
def test_a_configuration_does_not_fill_the_memory_with_lists(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **said}))
    with pytest.raises(JobError, match=r"config\.json: \w+ is \d+; the limit is \d+") as error:
        open_model(tmp_path, weights=False)
    assert "\n" not in str(error.value)


# --- what its files say of answers


def test_an_end_that_only_the_tokenizer_knows_is_said(tmp_path: Path) -> None:
    made = chat_model.tokenizer()
    chat_model.save_model(tmp_path, made)
    assert sources.in_files(tmp_path).missing_end_token == "<|im_end|>"
    end = made.token_to_id("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    assert sources.in_files(tmp_path).missing_end_token is None
    (tmp_path / "generation_config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert sources.in_files(tmp_path).missing_end_token is None  # nobody chats with it


def test_tokens_that_only_the_tokenizer_has_are_said(tmp_path: Path) -> None:
    """A prompt with one of them is refused, of which the one who serves the model would hear from users alone."""
    tokenizer, model = tokenizer_of_sources(), gpt2()
    tokenizer.add_special_tokens(["<|added|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    saved(tmp_path, model)

    def said() -> list[str]:
        return remarks(tmp_path, read_servable(ServingSpec(path=tmp_path), lambda line: None))

    unknown = tokenizer.get_vocab_size() - model.vocab_size
    assert said() == [
        f"its tokenizer has tokens that the model does not have ({unknown}): a text with one of them is refused"
    ]
    model.vocab_size = tokenizer.get_vocab_size()
    saved(tmp_path, model)
    assert said() == []


def test_tokens_that_end_an_answer_may_stand_beside_the_configuration_of_its_text(tmp_path: Path) -> None:
    """As Gemma 3 has them, whose text has a default of its own."""
    text = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 16, "vocab_size": 64, "max_position_embeddings": 48,
    }  # fmt: skip
    image = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip
    tiny = transformers.Gemma3Config(text_config=text, vision_config=image, mm_tokens_per_image=4)
    tiny.save_pretrained(tmp_path)
    edited(tmp_path, eos_token_id=[1, 7])
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    wanted = transformers.GenerationConfig.from_model_config(config).eos_token_id
    assert open_model(tmp_path, weights=False).end_tokens == tuple(wanted) == (1, 7)
    edited(tmp_path, eos_token_id=None)
    assert open_model(tmp_path, weights=False).end_tokens == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    assert open_model(tmp_path, weights=False).end_tokens == (5,)


def test_a_file_on_generation_that_names_no_end_leaves_answers_without_one(tmp_path: Path) -> None:
    saved(tmp_path, gpt2(eos_token_id=3))
    (tmp_path / "generation_config.json").write_text(json.dumps({"bos_token_id": 1}))
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    assert wanted is None and open_model(tmp_path).end_tokens == ()


@pytest.mark.parametrize("written", [b"{", b"", b"\xff\xfe"])
def test_a_file_on_generation_that_is_no_json_is_passed_over_and_said(written: bytes, tmp_path: Path) -> None:
    """transformers takes config.json in its place."""
    saved(tmp_path, gpt2(eos_token_id=3))
    (tmp_path / "generation_config.json").write_bytes(written)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.eos_token_id
    found = read_servable(ServingSpec(path=tmp_path), lambda line: None)
    assert wanted == 3 and found.model.about.end_tokens == (3,)
    [line] = ignored_settings(tmp_path, found.config, ())
    assert line.startswith("generation_config.json holds no JSON and is passed over")
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(JobError, match=r"generation_config\.json holds no JSON object"):
        open_model(tmp_path)


def test_an_answer_begins_as_an_old_configuration_says(tmp_path: Path) -> None:
    """The library drops such settings from a configuration, and reads them of its file again where they have none of their own."""
    bart(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    edited(tmp_path, forced_bos_token_id=7, bad_words_ids=[[5]])
    source = open_model(tmp_path).source
    assert source is not None and source.start == (2, 7) and source.suppress_tokens == (5,)


def answered(directory: Path, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens of two stages, the whole text anew for each."""
    served = sources.huggingface(HuggingFaceConfig(path=directory), training=False)
    graph = serving_graph(served.inference, cache="recompute")
    decode(encode(graph))
    stages = [
        TorchDecodingStage(s, served.read(s.graph.variables)) for s in split(graph, [len(graph.nodes) // 2])
    ]
    for stage in stages:
        stage.open("s", 48)
    tokens = list(prompt)
    for _ in range(new):
        values = {"input_ids": torch.tensor([tokens]), "position_ids": torch.arange(len(tokens))[None]}
        for stage in stages:
            values.update(*stage.run([Piece("s", 0, values)]))
        tokens.append(int(values["result/0"][0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_tokens_that_a_decoder_withholds_are_in_no_answer(file: str, tmp_path: Path) -> None:
    saved(tmp_path, gpt2(eos_token_id=None, bos_token_id=None, initializer_range=0.3))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    prompt, never = [1, 2, 3], set[int]()
    first = answered(tmp_path, prompt, 8)
    for name in ("suppress_tokens", "bad_words_ids"):
        never |= set(answered(tmp_path, prompt, 8)[:2])
        said = sorted(never) if name == "suppress_tokens" else [[token] for token in never]
        path = tmp_path / file
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), name: said}))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        with torch.inference_mode():
            wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
        found = answered(tmp_path, prompt, 8)
        assert found == wanted[0, 3:].tolist() and found != first and not never & set(found)


TEXT = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 64, "max_position_embeddings": 48, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
IMAGE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}  # fmt: skip


def of_images(kind: str) -> Any:
    match kind:
        case "llava":
            text, image = transformers.LlamaConfig(**TEXT), transformers.CLIPVisionConfig(**IMAGE)
            return transformers.LlavaConfig(text_config=text, vision_config=image, image_token_index=7)
        case "aya_vision":  # makes a cache where its text's configuration says so, whatever it is called with
            text, image = transformers.Cohere2Config(**TEXT), transformers.SiglipVisionConfig(**IMAGE)
            return transformers.AyaVisionConfig(text_config=text, vision_config=image, image_token_index=7)
        case "qwen2_vl":  # positions in three dimensions
            rope = {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [1, 1, 2]}
            image = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
            return transformers.Qwen2VLConfig(
                text_config={**TEXT, "rope_parameters": rope}, vision_config=image
            )
        case "paligemma":
            text = transformers.GemmaConfig(**TEXT, head_dim=8)
            image = transformers.SiglipVisionConfig(**IMAGE)
            return transformers.PaliGemmaConfig(
                text_config=text, vision_config=image, image_token_index=7, projection_dim=32
            )
    raise ValueError(kind)


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "aya_vision"])
def test_a_model_of_images_and_texts_answers_texts(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    library = transformers.AutoModelForImageTextToText
    model = library.from_config(of_images(kind)).eval()
    model.save_pretrained(tmp_path)
    prompt = [1, 9, 33, 2, 60]
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    found = answered(tmp_path, prompt, 8)
    assert found == wanted[0, len(prompt) :].tolist() and len(set(found)) > 1


def test_a_model_of_images_and_texts_that_reads_prompts_from_both_sides_is_refused(tmp_path: Path) -> None:
    of_images("paligemma").save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"images and texts; .* and paligemma is not among them$"):
        open_model(tmp_path, weights=False)


def test_one_that_reads_sound_in_another_way_than_whisper_is_refused(tmp_path: Path) -> None:
    transformers.MoonshineConfig().save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"of the kind moonshine: served are .* num_mel_bins channels$"):
        open_model(tmp_path, weights=False)


def test_a_model_that_writes_no_text_is_refused(tmp_path: Path) -> None:
    transformers.ViTConfig(**IMAGE).save_pretrained(tmp_path)
    with pytest.raises(
        JobError, match=r"not a language model that transformers can build: it is of the kind vit$"
    ):
        open_model(tmp_path, weights=False)
    edited(tmp_path, architectures=["ViTForImageClassification"])
    with pytest.raises(JobError, match=r"it is of the kind vit, a 'ViTForImageClassification'$"):
        open_model(tmp_path, weights=False)


def test_words_that_a_decoder_is_not_served_without_are_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, gpt2(eos_token_id=3))
    path, config = tmp_path / "generation_config.json", HuggingFaceConfig(path=tmp_path)
    odd = ({"bad_words_ids": [[5, 6]]}, {"suppress_tokens": "all"})
    for said in odd:
        path.write_text(json.dumps({"eos_token_id": 3, **said}))
        with pytest.raises(JobError, match=next(iter(said))) as error:
            sources.huggingface(config, training=False)
        assert "\n" not in str(error.value)
    # What withholds nothing: tokens that there are none of, and the end of an answer, which no word is.
    path.write_text(json.dumps({"eos_token_id": 3, "suppress_tokens": [64], "bad_words_ids": [[3]]}))
    served = sources.huggingface(config, training=False)
    assert served.about.end_tokens == (3,) and served.inference == open_model(tmp_path).capture()
