"""Models in GGUF files, cut in three, against transformers with the weights that the file holds."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf.constants import GGMLQuantizationType
from support import gguf_files
from support.families import COMMON, GROUPED, POSITIONS, build, greedy
from support.gguf_serving import NEW, answer

from fusion.dag.ir.graph import TensorType, Variable
from fusion.dag.rewrites.quantise import Source
from fusion.runtime.capture import sources
from fusion.runtime.capture.gguf.config import model_config
from fusion.runtime.capture.gguf.header import read_header
from fusion.runtime.capture.gguf_model import open_gguf
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.products.quantised import dequantised

# Blocks of K-quants have 256 numbers, and no block goes over the end of a row.
WIDE: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 256,
    "initializer_range": 0.11,
}
SOFT: dict[str, Any] = {"head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}
FAR: dict[str, Any] = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3: dict[str, Any] = {**FAR, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def config(family: str) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(**WIDE)
        case "llama, tied, biased, its rotary embedding stretched":
            biased = {**WIDE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
            return transformers.LlamaConfig(**biased, rope_parameters=LLAMA3)
        case "llama, linear":
            return transformers.LlamaConfig(**WIDE, rope_parameters={**FAR, "rope_type": "linear"})
        case "llama, yarn":
            return transformers.LlamaConfig(**WIDE, rope_parameters={**FAR, "rope_type": "yarn"})
        case "qwen2":
            return transformers.Qwen2Config(**WIDE)
        case "qwen3":
            return transformers.Qwen3Config(**WIDE, head_dim=128)
        case "gemma":
            return transformers.GemmaConfig(**WIDE, head_dim=64)
        case "gemma2":
            return transformers.Gemma2Config(**WIDE, **SOFT)
        case "gemma3":
            return transformers.Gemma3TextConfig(**{**WIDE, "num_hidden_layers": 6}, **SOFT)
        case "phi3":
            return transformers.Phi3Config(**WIDE)
        case "phi3, by length":
            factors = {"short_factor": [1 + n / 16 for n in range(32)], "long_factor": [4.0] * 32}
            by_length = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
            far = {"max_position_embeddings": 4 * POSITIONS, "original_max_position_embeddings": POSITIONS}
            return transformers.Phi3Config(**{**WIDE, **far}, rope_parameters=by_length)
        case "granite":
            scaled = {"attention_multiplier": 0.03, "embedding_multiplier": 6.0, "residual_multiplier": 0.4}
            return transformers.GraniteConfig(**WIDE, **scaled, logits_scaling=0.5)
        case "smollm3":  # of four layers the last one rotates nothing
            return transformers.SmolLM3Config(**{**WIDE, "num_hidden_layers": 5, "tie_word_embeddings": True})
        case "mistral3":  # queries beyond the original context are longer
            yarn = {**FAR, "rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}
            yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.5}
            return transformers.Ministral3Config(**WIDE, head_dim=128, rope_parameters=yarn)
        case "mistral3, plain":
            plain = {"rope_type": "default", "rope_theta": 10_000.0, "llama_4_scaling_beta": 0.0}
            plain["original_max_position_embeddings"] = POSITIONS
            return transformers.Ministral3Config(**WIDE, head_dim=64, rope_parameters=plain)
        case "ernie4.5":
            return transformers.Ernie4_5Config(**WIDE, head_dim=128)
        case "olmo2":
            return transformers.Olmo2Config(**WIDE)
        case "seed-oss":
            return transformers.SeedOssConfig(**WIDE, head_dim=128)
        case "glm4":
            return transformers.Glm4Config(**WIDE, head_dim=64)
        case "starcoder2":
            return transformers.Starcoder2Config(**{**WIDE, "tie_word_embeddings": True}, sliding_window=None)
        case "command-r":
            return transformers.CohereConfig(**{**WIDE, "tie_word_embeddings": True}, logit_scale=2.0)
        case "command-r, normed":
            return transformers.CohereConfig(**WIDE, logit_scale=2.0, use_qk_norm=True)
        case "cohere2":  # of four layers the last one sees all positions and rotates nothing
            return transformers.Cohere2Config(
                **{**WIDE, "num_hidden_layers": 5, "tie_word_embeddings": True},
                sliding_window=16,
                logit_scale=2.0,
            )
        case "mixtral":
            return transformers.MixtralConfig(**WIDE, num_local_experts=5, num_experts_per_tok=2)
        case "qwen3-moe":
            chosen = {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}
            return transformers.Qwen3MoeConfig(**WIDE, **chosen, head_dim=128, moe_intermediate_size=256)
        case "qwen2-moe":
            chosen = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 512}
            return transformers.Qwen2MoeConfig(**WIDE, **chosen, moe_intermediate_size=256)
        case "gpt-oss":
            yarn = {**FAR, "rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
            chosen = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
            return transformers.GptOssConfig(**WIDE, **chosen, head_dim=64, rope_parameters=yarn)
        case "olmoe":
            return transformers.OlmoeConfig(**WIDE, num_experts=6, num_experts_per_tok=3)
        case "glm4-moe":  # the first layer has no experts
            shared = {"first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
            chosen = {"n_routed_experts": 6, "num_experts_per_tok": 2, "use_qk_norm": True}
            return transformers.Glm4MoeConfig(
                **{**WIDE, "num_hidden_layers": 3}, **shared, **chosen, head_dim=64, moe_intermediate_size=256
            )
        case "gpt2":
            return transformers.GPT2Config(**COMMON, n_embd=256, n_layer=2, n_head=4, n_positions=POSITIONS)
    raise ValueError(family)


def model(family: str) -> Any:
    """With norms and biases that are not all the same."""
    module = build(config(family))
    with torch.no_grad():
        if family.startswith(
            "gemma"
        ):  # whose embedding is its head as well: it would answer what it was given
            module.get_input_embeddings().weight.mul_(0.05)
        for value in module.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
        for name, value in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                value.normal_(std=0.3)
    return module


def check(family: str, kind: str, path: Path, lengths: tuple[int, ...] = (1, 7, 100)) -> None:
    held = gguf_files.write(path, model(family), kind)
    served = sources.gguf(path)
    varied = 0
    for length in lengths:
        prompt = torch.randint(0, 256, (length,)).tolist()
        wanted, whole = greedy(held, prompt, NEW)
        for kept in (False, *([True] if kind not in ("F32", "F16", "BF16") else [])):
            found, logits = answer(served, prompt, NEW, kept)
            assert max(float((a - b).abs().max()) for a, b in zip(logits, whole, strict=True)) <= 1e-3
            assert found == wanted
        varied = max(varied, len(set(found)))
    assert varied >= 6


QUICK = [("qwen3", "Q4_K"), ("mixtral", "Q8_0")]
KINDS = ("F32", "BF16", "Q8_0", "Q4_0", "Q4_K")
SLOW = [(family, kind) for family in ("llama", "qwen3", "gemma2") for kind in KINDS]
MIXTURES = ("mixtral", "qwen3-moe", "qwen2-moe", "olmoe", "gpt-oss", "glm4-moe")
SLOW += [*((family, "Q4_K") for family in MIXTURES), ("gpt-oss", "MXFP4")]
OTHERS = (
    ["qwen2", "gemma", "gemma3", "phi3", "phi3, by length", "gpt2", *MIXTURES]
    + [
        *(
            "granite",
            "smollm3",
            "olmo2",
            "seed-oss",
            "glm4",
            "starcoder2",
            "command-r",
            "command-r, normed",
            "cohere2",
        )
    ]
    + [f"llama, {more}" for more in ("linear", "yarn", "tied, biased, its rotary embedding stretched")]
)


@pytest.mark.parametrize(("family", "kind"), QUICK)
def test_a_file_answers_as_the_model_with_its_weights(family: str, kind: str, tmp_path: Path) -> None:
    check(family, kind, tmp_path / "model.gguf", (1, 7))


def test_the_shape_of_every_kind_of_model_is_read(tmp_path: Path) -> None:
    """Their modules, not yet captured, give the logits of the model."""
    for family in OTHERS:
        held = gguf_files.write(tmp_path / "model.gguf", model(family), "F16")
        opened = open_gguf(tmp_path / "model.gguf")
        with torch.no_grad():
            module = build(opened.module.config)
            for (_, table), (_, computed) in zip(
                module.named_buffers(), opened.module.named_buffers(), strict=True
            ):
                table.copy_(computed)
            weights = opened.read(_variables(opened.module))
            module.load_state_dict(weights, strict=False)
            ids = torch.randint(0, 256, (1, 90))
            assert (module(ids).logits - held(ids).logits).abs().max() <= 1e-4, family


def _variables(module: torch.nn.Module) -> list[Variable]:
    biases = {name: each for name, each in module.named_buffers() if name.endswith("correction_bias")}
    stored = {**dict(module.named_parameters()), **biases}
    return [Variable(name, TensorType(tuple(value.shape), "float32")) for name, value in stored.items()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kind"),
    [*(c for c in SLOW if c not in QUICK), *((family, "F16") for family in (*OTHERS, "llama"))],
)
def test_every_kind_of_file_answers_as_the_model_with_its_weights(
    family: str, kind: str, tmp_path: Path
) -> None:
    check(family, kind, tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("F16", "float16"), pytest.param("BF16", "bfloat16", marks=pytest.mark.slow)],
)
def test_a_file_in_half_precision_answers_as_the_model_does_in_it(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    """In half of the memory that it takes in float32."""
    path = tmp_path / "model.gguf"
    held = gguf_files.write(path, model("llama"), kind)
    # Not `held` in that dtype: its table of rotary frequencies stays float32.
    theirs = transformers.AutoModelForCausalLM.from_config(held.config, dtype=getattr(torch, dtype)).eval()
    theirs.load_state_dict(held.state_dict())
    served = sources.in_files(path, dtype)
    assert served.dtype == dtype
    prompt = torch.randint(0, 256, (7,)).tolist()
    wanted, _ = greedy(theirs, prompt, NEW)
    found, logits = answer(served, prompt, NEW, False)
    assert found == wanted and len(set(found)) >= 6 and str(logits[0].dtype) == f"torch.{dtype}"


def test_quantised_matrices_are_multiplied_in_float32(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, build(transformers.LlamaConfig(**GROUPED)), "Q8_0")
    with pytest.raises(
        JobError, match="has quantised matrices, which stay as they are: it is served in float32"
    ):
        sources.in_files(path, "bfloat16")


# --- what is said otherwise than by those models


def refused(path: Path, message: str) -> None:
    """In one line that says so."""
    with pytest.raises(JobError) as error:
        open_gguf(path)
    assert message in str(error.value) and str(error.value).isprintable()


def small(path: Path, **more: Any) -> None:
    gguf_files.write(path, build(transformers.LlamaConfig(**GROUPED)), "F16", more=more)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.expert_count": 8}, "does not say llama.expert_used_count"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "no tensor blk.0.ffn_down_exps.weight"),
        ({"llama.rope.scaling.type": "longrope"}, "none, linear and yarn are read"),
        ({"llama.rope.dimension_count": 8}, "the 16 of a head"),
        ({"llama.attention.sliding_window": 4096}, "attention.sliding_window' = 4096, which is not understood"),
        ({"llama.logit_scale": 0.5}, "which is not understood"),
        ({"llama.attention.head_count": [4, 4, 2]}, "for each layer, which is not supported"),
        ({"llama.attention.head_count": 8}, "blk.0.attn_q.weight has the shape"),
        ({"llama.attention.head_count": 0}, "at least 1"),
        ({"llama.block_count": 1 << 31}, "block_count = 2147483648: at most 1024"),
        ({"llama.block_count": 1025}, "block_count = 1025: at most 1024"),
        ({"llama.block_count": 1024}, "no tensor blk.3.ffn_norm.weight"),
        ({"llama.block_count": 2}, "has a tensor 'blk.2.attn_k.weight', which no llama model has"),
        ({"llama.embedding_length": 1 << 31}, "token_embd.weight has the shape"),
        ({"llama.feed_forward_length": 1 << 31}, "blk.0.ffn_gate.weight has the shape"),
        ({"llama.context_length": 1 << 31}, "at most 16777216"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "a number"),
        ({"llama.attention.layer_norm_rms_epsilon": -1e-5}, "at least 0"),
        ({"llama.rope.freq_base": 1e-30}, "llama.rope.freq_base = 1.0000000031710769e-30: at least 1"),
        ({"llama.rope.scaling.yarn_beta_fast": -32.0}, "llama.rope.scaling.yarn_beta_fast = -32.0: at least 0.001"),
        ({"llama.rope.scaling.factor": -2.0}, "llama.rope.scaling.factor = -2.0: at least 0"),
        ({"llama.vocab_size": 7}, "llama.vocab_size = 7: 256"),
        ({"general.type": "adapter"}, "not a model but 'adapter'"),
        ({"general.architecture": "rwkv7"}, "kind 'rwkv7'; llama, qwen2"),
        ({"tokenizer.ggml.model": "plamo2"}, "gpt2, llama, gemma4 and bert are read"),
        ({"split.count": 3}, "is one of '3' parts"),
        ({"split.count": "a\n" * 99}, "is one of 'a"),
        ({"general.alignment": "a\n\x1b[1m"}, "a power of two"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_in_one_line(more: Any, message: str, tmp_path: Path) -> None:
    small(tmp_path / "model.gguf", **more)
    refused(tmp_path / "model.gguf", message)


MIXED = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"expert_used_count": 7}, "expert_used_count = 7: at most 6"),
        ({"expert_used_count": 0}, "expert_used_count = 0: at least 1"),
        ({"expert_count": 7}, "blk.0.ffn_down_exps.weight has the shape (6, 64, 64)"),
        ({"expert_count": 1 << 31}, "expert_count = 2147483648: at most 65536"),
        ({"expert_count": 0}, "expert_used_count = 2: 0"),
        ({"expert_count": "8"}, "a whole number"),
        ({"expert_feed_forward_length": 32}, "expert_feed_forward_length = 32: 64"),
        ({"expert_weights_norm": False}, "expert_weights_norm = False: True"),
        ({"expert_weights_scale": 2.5}, "expert_weights_scale = 2.5: 1.0 or 0.0"),
        ({"expert_gating_func": 2}, "expert_gating_func = 2: 1 or 0"),
        ({"expert_group_count": 8}, "expert_group_count = 8: 0 or 1"),
        ({"expert_shared_count": 1}, "expert_shared_count' = 1, which is not understood"),
    ],
)
def test_a_mixture_that_is_not_understood_is_refused_in_one_line(
    more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    said = {f"llama.{key}": value for key, value in more.items()}
    gguf_files.write(path, build(transformers.MixtralConfig(**{**GROUPED, **MIXED})), "F16", more=said)
    refused(path, message)


@pytest.mark.parametrize("shape", [(6, 32, 64), (6 * 64 * 64,), (64, 6, 64)])
def test_experts_in_other_shapes_are_refused_in_one_line(
    shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where two tensors together have as many rows as the model's one."""
    path, added = tmp_path / "model.gguf", gguf.GGUFWriter.add_tensor

    def add(writer: Any, name: str, data: Any, **more: Any) -> None:
        if name == "blk.1.ffn_gate_exps.weight":
            data = np.resize(data, shape)
        added(writer, name, data, **more)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    gguf_files.write(path, build(transformers.MixtralConfig(**{**GROUPED, **MIXED})), "F32")
    with pytest.raises(JobError, match=r"'blk\.1\.ffn_gate_exps\.weight' and .*, not \(6, 128, 64\)$"):
        open_gguf(path)


def test_a_mixture_of_a_kind_that_is_not_read_says_which_are(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    gguf_files.write(path, build(config("qwen3")), "F16", more={"qwen3.expert_count": 8})
    with pytest.raises(JobError, match="a mixture of experts of the kind 'qwen3'; llama, llama4, qwen2moe"):
        open_gguf(path)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_some_experts_of_a_layer_are_read_alone(family: str, tmp_path: Path) -> None:
    """As numbers and as blocks; files have gates and what they gate apart, the module one behind the other, or by turns."""
    path = tmp_path / "model.gguf"
    held = gguf_files.write(path, model(family), "Q8_0")
    opened, own = open_gguf(path), dict(held.named_parameters())
    names = [name for name in own if ".1.mlp.experts." in name]
    assert len(names) == (4 if family == "gpt-oss" else 2)
    for name in names:
        exact = own[name]
        whole = Variable(name, TensorType(tuple(exact.shape), "float32"))
        part = Variable(f"{name}:1-3", TensorType((2, *exact.shape[1:]), "float32"))
        assert torch.equal(opened.read([whole])[name], exact)
        assert torch.equal(opened.read([part])[part.name], exact[1:3])
        layout = opened.layout(whole, frozenset({"expert_linear"}))
        assert (layout is None) == name.endswith("bias")
        for variable, values in ((whole, exact), (part, exact[1:3])) if layout is not None else ():
            turned = family == "gpt-oss"
            numbers, scales = opened.read_stored(Source(variable, layout, turned))
            assert torch.equal(dequantised(numbers, scales, None), values.mT if turned else values)


def test_a_shared_expert_of_no_width_is_none(tmp_path: Path) -> None:
    """As conversions write it of Qwen3-Coder, whose configuration says so."""
    path, key = tmp_path / "model.gguf", "qwen3moe.expert_shared_feed_forward_length"
    module = build(config("qwen3-moe"))
    gguf_files.write(path, module, "F16", more={key: 0})
    assert open_gguf(path).module.config.model_type == "qwen3_moe"
    gguf_files.write(path, module, "F16", more={key: 64})
    refused(path, f"{key} = 64: 0")


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("phi3", {"phi3.rope.scaling.type": "linear", "phi3.rope.scaling.factor": 2.0}),
        ("gemma2", {"gemma2.attention.scale": 0.3}),
    ],
)
def test_what_transformers_takes_for_no_configuration_is_refused_in_one_line(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    gguf_files.write(tmp_path / "model.gguf", build(config(family)), "F16", more=more)
    refused(tmp_path / "model.gguf", f"transformers knows no such {family} model")


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("granite", {"granite.rope.scaling.finetuned": False}, "rope.scaling.finetuned = False: True"),
        ("granite", {"granite.logit_scale": 0.0}, "logit_scale = 0.0: at least 0.001"),
        (
            "olmo2",
            {"olmo2.attention.sliding_window": 16},
            "attention.sliding_window' = 16, which is not understood",
        ),
        ("glm4", {"glm4.rope.dimension_count": 33}, "rope.dimension_count = 33: the 64 of a head"),
        ("cohere2", {"cohere2.attention.sliding_window_pattern": 6}, "sliding_window_pattern = 6: 4"),
    ],
)
def test_what_would_be_computed_otherwise_is_refused_in_one_line(
    family: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    gguf_files.write(tmp_path / "model.gguf", build(config(family)), "F16", more=more)
    refused(tmp_path / "model.gguf", message)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    held = gguf_files.write(
        tmp_path / "model.gguf", model("glm4-moe"), "F16", more={"glm4moe.nextn_predict_layers": 1}
    )
    held.model.layers = held.model.layers[:2]
    served = sources.gguf(tmp_path / "model.gguf")
    prompt = torch.randint(0, 256, (7,)).tolist()
    wanted, whole = greedy(held, prompt, 4)
    found, logits = answer(served, prompt, 4, kept=False)
    assert found == wanted
    assert max(float((a - b).abs().max()) for a, b in zip(logits, whole, strict=True)) <= 1e-3


@pytest.mark.parametrize("cap", [0.0, -30.0])
def test_a_cap_that_nothing_can_be_divided_by_is_refused_in_one_line(cap: float, tmp_path: Path) -> None:
    path, module = tmp_path / "model.gguf", build(transformers.Gemma2Config(**GROUPED, **SOFT))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        gguf_files.write(path, module, "F16", more={f"gemma2.{key}": cap})
        refused(path, f"gemma2.{key} = {cap}: at least 0.001")


@pytest.mark.parametrize("scale", [0.0, 2.0, 1e30, 1e-300])
def test_a_scale_of_queries_that_none_has_is_refused_in_one_line(scale: float, tmp_path: Path) -> None:
    path, module = tmp_path / "model.gguf", build(transformers.Gemma2Config(**GROUPED, **SOFT))
    gguf_files.write(path, module, "F16", more={"gemma2.attention.scale": scale})
    with pytest.raises(JobError, match=r"gemma2\.attention\.scale"):
        open_gguf(path)


def test_layers_that_a_file_says_and_does_not_have_are_not_counted_up(tmp_path: Path) -> None:
    """Also where it has the last of them: a list of as many as a number can say would fill the memory."""
    path = tmp_path / "model.gguf"
    small(path, **{"llama.block_count": 10})
    path.write_bytes(path.read_bytes().replace(b"blk.2.ffn_norm.weight", b"blk.9.ffn_norm.weight"))
    with pytest.raises(JobError, match=r"no tensor blk\.2\.ffn_norm\.weight$"):
        model_config(read_header(path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope.scaling.attn_factor": -1.0}, "attn_factor = -1.0: at least 0"),
        ({"rope.scaling.factor": 2.0}, "factor = 2.0: 1, beside rope_factors_short.weight"),
        ({"rope.dimension_count": 32}, "rope_factors_short.weight has the shape"),
    ],
)
def test_factors_that_do_not_fit_are_refused_in_one_line(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    more = {f"phi3.{key}": value for key, value in change.items()}
    gguf_files.write(path, build(config("phi3, by length")), "F16", more=more)
    with pytest.raises(JobError, match=message):
        open_gguf(path)


def test_factors_in_another_kind_of_number_are_refused(tmp_path: Path) -> None:
    """Of whole numbers, say, which the library turns into no others."""
    path = tmp_path / "model.gguf"
    gguf_files.write(path, build(config("phi3, by length")), "F16")
    name = b"rope_factors_short.weight"
    kind = len(name) + struct.calcsize("<IQ")  # after the name its dimensions, one here
    data, at = bytearray(path.read_bytes()), path.read_bytes().index(name) + kind
    data[at : at + 4] = struct.pack("<I", GGMLQuantizationType.I32)
    path.write_bytes(data)
    with pytest.raises(JobError, match=r"rope_factors_short\.weight is in I32, not in F32"):
        open_gguf(path)


def test_a_file_that_shrinks_while_it_is_read_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    small(path)
    opened = open_gguf(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(JobError, match="it is not whole"):
        opened.read(_variables(opened.module))
    path.unlink()
    with pytest.raises(JobError, match="cannot be read"):
        opened.read(_variables(opened.module))
