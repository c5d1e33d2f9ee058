"""Architectures of GGUF files, each as llama.cpp converts it, against the transformers model that was converted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as library
from support import gguf_conversion
from support.families import COMMON, FALCON, GROUPED, SMALL, build, greedy
from support.gguf_serving import NEW, answer

from fusion.dag.ir.graph import TensorType, Variable
from fusion.runtime.capture import sources
from fusion.runtime.capture.gguf_model import open_gguf
from fusion.runtime.job.errors import JobError

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
ROUTED = {
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
DEEPSEEK = {
    **GROUPED,
    "num_key_value_heads": 4,
    **LATENT,
    **ROUTED,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
DELTA = {"head_dim": 32, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
DELTA |= {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
CHOSEN = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3}
SHARED = {**CHOSEN, "shared_expert_intermediate_size": 32}
HYBRID = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_d_head": 16, "mamba_d_conv": 4}
SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.5,
}
POWERS = {
    "attention_in_multiplier": 0.5,
    "attention_out_multiplier": 2.0,
    "key_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "ssm_in_multiplier": 2.0,
    "ssm_out_multiplier": 0.5,
    "mlp_multipliers": [2.0, 0.5],
    "ssm_multipliers": [0.5, 2.0, 4.0, 0.25, 2.0],
}

GEMMA4 = {**GROUPED, "num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16}
GEMMA4 |= {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "initializer_range": 0.15,
}
GEMMA4 |= {
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
}

CONFIGS: dict[str, Any] = {
    "deepseek v2": lambda: library.DeepseekV2Config(
        **DEEPSEEK, q_lora_rank=None, topk_method="greedy", n_group=1, topk_group=1
    ),
    "deepseek v2, in groups": lambda: library.DeepseekV2Config(
        **DEEPSEEK,
        q_lora_rank=32,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        rope_parameters=SCALED,
    ),
    "deepseek v3": lambda: library.DeepseekV3Config(
        **DEEPSEEK, q_lora_rank=32, n_group=4, topk_group=2, rope_parameters=SCALED
    ),
    "qwen3-next": lambda: library.Qwen3NextConfig(**{**GROUPED, "num_hidden_layers": 4}, **DELTA, **SHARED),
    "qwen3.5": lambda: library.Qwen3_5TextConfig(**{**GROUPED, "num_hidden_layers": 4}, **DELTA),
    "qwen3.5 moe": lambda: library.Qwen3_5MoeTextConfig(
        **{**GROUPED, "num_hidden_layers": 4}, **DELTA, **SHARED
    ),
    "lfm2": lambda: library.Lfm2Config(
        **GROUPED, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "lfm2 moe": lambda: library.Lfm2MoeConfig(
        **GROUPED, **CHOSEN, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
    ),
    "mamba": lambda: library.MambaConfig(**COMMON, hidden_size=64, num_hidden_layers=3),
    "mamba2": lambda: library.Mamba2Config(
        **COMMON, hidden_size=64, num_hidden_layers=3, num_heads=8, head_dim=16, n_groups=2, state_size=16
    ),
    "granite hybrid": lambda: library.GraniteMoeHybridConfig(
        **GROUPED,
        **MAMBA,
        **SCALES,
        layer_types=HYBRID,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
    ),
    "granite hybrid, with experts": lambda: library.GraniteMoeHybridConfig(
        **GROUPED, **MAMBA, **SCALES, layer_types=HYBRID, num_local_experts=6, shared_intermediate_size=32
    ),
    "gemma3n": lambda: library.Gemma3nTextConfig(
        **{**GEMMA4, "initializer_range": 0.1},
        num_kv_shared_layers=3,
        laurel_rank=4,
        activation_sparsity_pattern=[0.9, 0.9, 0.0, 0.0, 0.0, 0.0],
    ),
    "gemma4": lambda: library.Gemma4TextConfig(**GEMMA4, num_kv_shared_layers=3, use_double_wide_mlp=True),
    "gemma4, keys as values": lambda: library.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 0}, attention_k_eq_v=True, num_global_key_value_heads=1
    ),
    "gemma4, with experts": lambda: library.Gemma4TextConfig(
        **{**GEMMA4, "hidden_size_per_layer_input": 0},
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=64,
    ),
    "llama4": lambda: library.Llama4TextConfig(
        **{**GROUPED, "intermediate_size": 64},
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
    ),
    "apertus": lambda: library.ApertusConfig(
        **GROUPED,
        rope_parameters={**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "granite moe": lambda: library.GraniteMoeConfig(**GROUPED, **SCALES, num_local_experts=6),
    "granite moe, shared": lambda: library.GraniteMoeSharedConfig(
        **GROUPED, **SCALES, num_local_experts=6, shared_intermediate_size=32
    ),
    "gpt-neox": lambda: library.GPTNeoXConfig(**SMALL),
    "gpt-neox, in turn": lambda: library.GPTNeoXConfig(**SMALL, use_parallel_residual=False),
    "bloom": lambda: library.BloomConfig(**COMMON, hidden_size=64, n_layer=3, n_head=4),
    "falcon": lambda: library.FalconConfig(**FALCON),
    "falcon, newer": lambda: library.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon, newest": lambda: library.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "phi2": lambda: library.PhiConfig(**SMALL),
    "stablelm": lambda: library.StableLmConfig(**GROUPED, use_qkv_bias=True),
    "nemotron": lambda: library.NemotronConfig(**GROUPED),
    "internlm2": lambda: library.LlamaConfig(**GROUPED),
    "arcee": lambda: library.ArceeConfig(**GROUPED),
    "exaone": lambda: library.ExaoneConfig(**GROUPED),
    "exaone4": lambda: library.Exaone4Config(
        **GROUPED, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "exaone4, windowed": lambda: library.Exaone4Config(
        **{**GROUPED, "num_hidden_layers": 4}, sliding_window=16
    ),
    "hunyuan": lambda: library.HunYuanDenseV1Config(**GROUPED, head_dim=16),
    "hunyuan moe": lambda: library.HunYuanMoEV1Config(**GROUPED, head_dim=16, num_experts=6, moe_topk=2),
    "qwen2-vl": lambda: library.Qwen2Config(**GROUPED),
    "qwen3-vl": lambda: library.Qwen3Config(**GROUPED, head_dim=16),
    "qwen3-vl moe": lambda: library.Qwen3MoeConfig(**GROUPED, **CHOSEN, head_dim=16, norm_topk_prob=True),
    "minimax-m2": lambda: library.MiniMaxM2Config(
        **GROUPED, head_dim=32, num_local_experts=8, num_experts_per_tok=3, rotary_dim=16
    ),
    "dots1": lambda: library.Dots1Config(
        **GROUPED, **ROUTED, n_shared_experts=2, routed_scaling_factor=1.5, norm_topk_prob=True
    ),
    "ernie 4.5 moe": lambda: library.Ernie4_5_MoeConfig(
        **GROUPED, moe_intermediate_size=64, moe_k=3, moe_num_experts=8, moe_num_shared_experts=1
    ),
    "falcon-h1": lambda: library.FalconH1Config(**GROUPED, **MAMBA, **POWERS, mamba_d_ssm=128),
}

COMPUTED = {"falcon-h1"}  # whose conversion multiplies matrices


@functools.cache
def model(name: str) -> Any:
    """With norms and biases that are not all the same."""
    module = build(CONFIGS[name]())
    with torch.no_grad():
        for value in module.parameters():
            if value.dim() == 1:
                value.add_(torch.randn_like(value) * 0.1)
        for buffer, value in module.named_buffers():
            if buffer.endswith("layer_scalar"):
                value.uniform_(0.5, 1.0)
            if buffer.endswith(("e_score_correction_bias", "expert_bias")):
                value.normal_(std=0.3)
    return module


@pytest.mark.slow
def test_keys_and_values_of_one_matrix_are_read_too(tmp_path: Path) -> None:
    """As conversions wrote them before there were two, with the lengths of heads."""
    path, held = tmp_path / "model.gguf", model("deepseek v2")
    config = held.config
    more = {
        "key_length": 48,
        "value_length": 32,
        "head_count_kv": 4,
        "key_length_mla": None,
        "value_length_mla": None,
    }
    said = {f"deepseek2.attention.{key}": value for key, value in more.items()}
    gguf_conversion.write(path, held, "F32", more=said, modify=gguf_conversion.as_is)
    ids = torch.randint(0, config.vocab_size, (1, 90))
    with torch.no_grad():
        assert (reopened(path)(ids).logits - held(ids).logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("deepseek v3", {"attention.kv_lora_rank": 1 << 31}, "deepseek2.attention.key_length = 48: 2147483664"),
        ("deepseek v3", {"expert_group_count": 3}, "expert_group_count = 3: a divisor of 8"),
        ("deepseek v3", {"expert_group_used_count": 1}, "expert_group_used_count = 1: at most 4, with 3 experts"),
        ("deepseek v3", {"expert_gating_func": 3}, "expert_gating_func = 3: 1 or 2"),
        ("deepseek v3", {"rope.scaling.yarn_log_multiplier": 0.0}, "yarn_log_multiplier: a number above 0"),
        ("qwen3.5", {"ssm.state_size": 1 << 31}, "blk.0.ssm_conv1d.weight has the shape (320, 4)"),
        ("qwen3.5", {"ssm.time_step_rank": 5}, "ssm.time_step_rank = 5: a divisor of 192, by 2 groups"),
        ("qwen3.5", {"full_attention_interval": 1 << 31}, "full_attention_interval = 2147483648: at most 4"),
        ("mamba", {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms = True: False"),
        ("lfm2", {"attention.head_count_kv": [0, 0, 0]}, "one number for all layers that attend"),
        ("lfm2", {"attention.head_count_kv": [2] * 7}, "a whole number for each of 3 layers"),
        ("lfm2", {"shortconv.l_cache": 1 << 31}, "blk.0.shortconv.conv.weight has the shape (64, 3)"),
        ("gemma4", {"attention.shared_kv_layers": 6}, "shared_kv_layers = 6: at most 5"),
        ("gemma4", {"attention.key_length_swa": 1 << 31}, "attention.value_length_swa = 16: 2147483648"),
        ("gemma4", {"feed_forward_length": [128] * 5 + [64]}, "feed_forward_length = 64: 128, or twice that"),
        ("phi2", {"rope.dimension_count": 64}, "rope.dimension_count = 64: the 16 of a head"),
        ("gemma4, with experts", {"expert_used_count": 9}, "expert_used_count = 9: at most 8"),
        ("llama4", {"interleave_moe_layer_step": 4}, "interleave_moe_layer_step = 4: at most 3"),
        ("llama4", {"attention.sliding_window": 0}, "attention.sliding_window = 0: 8192"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_in_one_line(
    name: str, more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    architecture = gguf_conversion.FAMILIES[CONFIGS[name]().model_type][0]
    said = {f"{architecture}.{key}": value for key, value in more.items()}
    gguf_conversion.write(tmp_path / "model.gguf", model(name), "F32", more=said)
    with pytest.raises(JobError) as error:
        open_gguf(tmp_path / "model.gguf")
    assert message in str(error.value) and str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "numbers"), [("alpha_p", [0.5]), ("eps", [0.0, float("inf"), 0.0]), ("beta", None)]
)
def test_numbers_of_an_activation_are_one_for_each_layer(name: str, numbers: Any, tmp_path: Path) -> None:
    more = {f"xielu.{name}": numbers}
    gguf_conversion.write(tmp_path / "model.gguf", model("apertus"), "F32", more=more)
    with pytest.raises(JobError, match=rf"xielu\.{name}.*: (a number for each of 3 layers|numbers)$"):
        open_gguf(tmp_path / "model.gguf")


def reopened(path: Path) -> Any:
    """The module of a file, with the weights that it has."""
    opened = open_gguf(path)
    module = build(opened.module.config)
    for (_, table), (_, computed) in zip(module.named_buffers(), opened.module.named_buffers(), strict=True):
        if computed.device.type != "meta":
            table.copy_(computed)
    kept = module.state_dict()
    tensors = {**dict(module.named_parameters()), **{n: b for n, b in module.named_buffers() if n in kept}}
    wanted = [Variable(name, TensorType(tuple(value.shape), "float32")) for name, value in tensors.items()]
    module.load_state_dict(opened.read(wanted), strict=False)
    return module


def same(name: str, kind: str, path: Path, *, parts_of: int = 0, length: int = 90) -> None:
    """The module of a file gives the logits of the one that was converted."""
    held = gguf_conversion.write(path, model(name), kind, parts_of=parts_of)
    path = path if not parts_of else next(path.parent.glob("*-00001-of-*.gguf"))
    found, ids = reopened(path), torch.randint(0, 256, (1, length))
    with torch.no_grad():
        theirs, ours = held(ids).logits, found(ids).logits
    assert theirs.std() > 0.1 and (ours - theirs).abs().max() <= 1e-4


# Keys and values of a short vector, in several files; a state, with its heads in another order.
QUICK = {"deepseek v3": 40, "qwen3.5": 0}


@pytest.mark.parametrize("name", QUICK)
def test_a_file_makes_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    same(name, "Q8_0", tmp_path / "model.gguf", parts_of=QUICK[name], length=20)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_makes_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    for kind in ("F32", *(["F16", "BF16", "Q4_0"] if name not in COMPUTED else [])):
        same(name, kind, tmp_path / "model.gguf")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_every_file_answers_as_the_model_that_was_converted(name: str, tmp_path: Path) -> None:
    """With its matrices in blocks."""
    kind = "F32" if name in COMPUTED else "Q8_0"
    held = gguf_conversion.write(tmp_path / "model.gguf", model(name), kind)
    served = sources.gguf(tmp_path / "model.gguf")
    varied = 0
    for length in (1, 50):
        prompt = torch.randint(0, 256, (length,)).tolist()
        wanted, whole = greedy(held, prompt, NEW)
        found, logits = answer(served, prompt, NEW, kept=name not in COMPUTED)
        assert max(float((a - b).abs().max()) for a, b in zip(logits, whole, strict=True)) <= 1e-3
        assert found == wanted
        varied = max(varied, len(set(found)))
    assert varied >= 4
