"""GGUF files of small models with random weights, converted from the checkpoint that transformers saves as llama.cpp converts it.

Docstrings name the modules of llama.cpp's `conversion` folder that the functions follow.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGUFWriter
from gguf.constants import (
    GGML_QUANT_SIZES,
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    RopeScalingType,
)
from gguf.quants import dequantize
from gguf.tensor_mapping import get_tensor_name_map
from safetensors.torch import load_file
from support.gguf_files import add, llama3_factors, quantize_as

Tensors = dict[str, torch.Tensor]
Modified = Iterable[tuple[str, torch.Tensor]]


def write(
    path: Path,
    model: Any,
    kind: str = "F16",
    *,
    more: Mapping[str, Any] | None = None,
    parts_of: int = 0,
    modify: Modify | None = None,
) -> Any:
    """`gguf_files.write` by way of a checkpoint. `parts_of`: split the file after so many tensors; `modify` replaces the
    family's modification of tensors.

    A second conversion, of a model whose weights are their own positions, tells where the file's numbers belong in the model
    that is returned. Weights in F32 stay unchanged, whatever the conversion computes from them.
    """
    config = model.config
    architecture, values, usual = FAMILIES[config.model_type]
    modify = modify or usual
    writer = GGUFWriter(str(path), architecture, split_max_tensors=parts_of)
    _common(writer, config)
    values(writer, config)
    more = {**(xielu(model) if config.model_type == "apertus" else {}), **(more or {})}
    for key, value in more.items():
        writer.kv_data[-1].pop(key, None)
        if value is not None:
            add(writer, key, value)
    held, numbered = copy.deepcopy(model), copy.deepcopy(model)
    begin, flat = 0, {}
    for name, value in numbered.state_dict(keep_vars=True).items():
        if value.data_ptr() in flat:  # tied
            continue
        flat[value.data_ptr()] = (begin, dict(held.state_dict(keep_vars=True))[name])
        value.data = torch.arange(begin, begin + value.numel()).view(value.shape).float()
        begin += value.numel()
    assert begin < 1 << 24  # float32 has them all
    data = _converted(model, architecture, modify)
    places = data if kind == "F32" else _converted(numbered, architecture, modify)
    for name, value in data.items():
        chosen = GGMLQuantizationType["F32" if _stays_wide(name, value, kind) else kind]
        blocks = quantize_as(value.detach().numpy(), chosen)
        writer.add_tensor(name, blocks, raw_dtype=chosen)
        if chosen != GGMLQuantizationType.F32:
            _put_back(
                flat, places[name].long().flatten(), torch.from_numpy(dequantize(blocks, chosen)).flatten()
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def _put_back(
    flat: Mapping[int, tuple[int, torch.Tensor]], places: torch.Tensor, numbers: torch.Tensor
) -> None:
    for begin, value in flat.values():
        inside = (places >= begin) & (places < begin + value.numel())
        value.data.view(-1)[places[inside] - begin] = numbers[inside]


def _stays_wide(name: str, value: torch.Tensor, kind: str) -> bool:
    wide = re.search(r"norm|ffn_gate_inp|conv|exp_probs_b|ssm_[adx]\b|ssm_dt|rope_f", name) is not None
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    return wide or value.ndim < 2 or value.shape[-1] % block != 0


def _converted(model: Any, architecture: str, modify: Modify) -> Tensors:
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory, safe_serialization=True)
        saved = load_file(Path(directory) / "model.safetensors")
    number = next(number for number, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, model.config.num_hidden_layers)
    found: Tensors = {}
    for name, value in _merged_experts(saved).items():
        for changed, given in modify(name, value, model.config):
            known = names.get_name(changed, try_suffixes=(".weight", ".bias"))
            assert known is not None or re.match(r"blk\.|rope_", changed), changed
            found[known or changed] = given.contiguous()
    return found


def _merged_experts(saved: Tensors) -> Tensors:
    """base.py and most models: those of a layer as one tensor; gemma.py: projections of a kind."""
    found: Tensors = {}
    experts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, value in saved.items():
        if expert := re.fullmatch(r"(.*experts|.*altup_\w+)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{expert[1]}.{expert[3]}", []).append((int(expert[2]), value))
        else:
            found[name] = value
    for name, each in experts.items():
        found[name] = torch.stack([value for _, value in sorted(each, key=lambda item: item[0])])
    return found


def _common(writer: GGUFWriter, config: Any) -> None:
    """base.py, `TextModel.set_gguf_parameters`"""
    said = config.to_dict()

    def first(*names: str) -> Any:
        return next((said[name] for name in names if said.get(name) is not None), None)

    writer.add_name("small")
    writer.add_file_type(1)
    writer.add_block_count(config.num_hidden_layers)
    for value, add_value in (
        (first("max_position_embeddings", "n_positions", "max_seq_len"), writer.add_context_length),
        (first("hidden_size", "n_embd", "d_model"), writer.add_embedding_length),
        (first("intermediate_size", "n_inner"), writer.add_feed_forward_length),
        (first("num_attention_heads", "n_head", "n_heads"), writer.add_head_count),
        (first("num_key_value_heads"), writer.add_head_count_kv),
        (first("rms_norm_eps", "norm_eps"), writer.add_layer_norm_rms_eps),
        (first("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"), writer.add_layer_norm_eps),
        (first("num_local_experts", "num_experts", "n_routed_experts"), writer.add_expert_count),
        (first("num_experts_per_tok"), writer.add_expert_used_count),
        (first("n_group"), writer.add_expert_group_count),
        (first("topk_group"), writer.add_expert_group_used_count),
    ):
        if value is not None and not isinstance(value, list):
            add_value(value)
    if said.get("head_dim"):
        writer.add_key_length(said["head_dim"])
        writer.add_value_length(said["head_dim"])
    rope = said.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_theta") is not None:
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32.0))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1.0))
    if rope.get("mrope_section") is not None:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0, 0][:4])


Values = Callable[[GGUFWriter, Any], None]
Modify = Callable[[str, torch.Tensor, Any], Modified]


def nothing(writer: GGUFWriter, config: Any) -> None: ...


def as_is(name: str, value: torch.Tensor, config: Any) -> Modified:
    yield name, value


def _expert_bias(name: str) -> str:
    return name.replace("e_score_correction_bias", "e_score_correction.bias")


# --- deepseek.py


def _deepseek2(writer: GGUFWriter, config: Any, *, apart: bool = True) -> None:
    key = config.qk_nope_head_dim + config.qk_rope_head_dim
    writer.kv_data[-1].pop("deepseek2.attention.head_count_kv")
    for old in ("key_length", "value_length"):
        writer.kv_data[-1].pop(f"deepseek2.attention.{old}", None)
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_vocab_size(config.vocab_size)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(key)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    v3 = config.model_type == "deepseek_v3"
    if v3 and config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID if v3 else ExpertGatingFuncType.SOFTMAX)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    if (stretched := config.rope_parameters.get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * stretched)


def _keys_and_values(name: str, value: torch.Tensor, config: Any) -> Modified:
    if not name.endswith("kv_b_proj.weight"):
        yield _expert_bias(name), value
        return
    nope, length = config.qk_nope_head_dim, config.v_head_dim
    heads = value.view(config.num_attention_heads, nope + length, value.shape[-1])
    keys, values = heads.split([nope, length], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


# --- qwen.py


def _qwen3_next_values(writer: GGUFWriter, config: Any) -> None:
    if getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _qwen3_next(name: str, value: torch.Tensor, config: Any) -> Modified:
    if name.endswith(".A_log"):
        value = -torch.exp(value)
    elif name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif "conv1d" in name:
        value = value.squeeze()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        value = value + 1
    if "in_proj_qkvz.weight" not in name:
        yield name, value
        return
    keys, heads = config.linear_key_head_dim, config.linear_num_key_heads
    each = config.linear_num_value_heads // heads * config.linear_value_head_dim
    parts = value.T.reshape(-1, heads, 2 * keys + 2 * each).split([keys, keys, each, each], dim=-1)
    *qkv, z = (part.reshape(config.hidden_size, -1) for part in parts)
    block = name.split(".layers.")[1].split(".")[0]
    yield f"blk.{block}.attn_qkv.weight", torch.cat(qkv, dim=-1).T
    yield f"blk.{block}.attn_gate.weight", z.T


def _qwen3_5(name: str, value: torch.Tensor, config: Any) -> Modified:
    """`_LinearAttentionVReorderBase`"""
    groups, heads = config.linear_num_key_heads, config.linear_num_value_heads
    length, before = config.linear_value_head_dim, 2 * groups * config.linear_key_head_dim

    def reordered(data: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        shape = list(data.shape)
        split = data.reshape(*shape[:dim], groups, heads // groups, length, *shape[dim + 1 :])
        return split.transpose(dim, dim + 1).reshape(*shape)

    if "linear_attn." in name:
        if ".in_proj_qkv." in name or ".conv1d" in name:
            value = value.squeeze()
            value = torch.cat([value[:before], reordered(value[before:], 0, length)])
        elif ".in_proj_z." in name:
            value = reordered(value, 0, length)
        elif re.search(r"in_proj_[ab]\.|A_log|dt_bias", name):
            value = reordered(value, 0, 1)
        elif ".out_proj." in name:
            value = reordered(value, 1, length)
    yield from _qwen3_next(name, value, config)


# --- lfm2.py


def _lfm2_values(writer: GGUFWriter, config: Any) -> None:
    architecture = FAMILIES[config.model_type][0]
    writer.kv_data[-1].pop(f"{architecture}.attention.head_count_kv")
    attends = [kind == "full_attention" for kind in config.layer_types]
    writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    if architecture == "lfm2moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _lfm2(name: str, value: torch.Tensor, config: Any) -> Modified:
    name = name.replace(".expert_bias", ".expert_bias.bias")
    name = re.sub(
        r"experts\.w([123])", lambda w: f"experts.{['gate', 'down', 'up'][int(w[1]) - 1]}_proj", name
    )
    yield name, value.squeeze(1) if "conv.conv" in name else value


# --- mamba.py, granite.py, falcon_h1.py


def _mamba_values(writer: GGUFWriter, config: Any) -> None:
    two = config.model_type == "mamba2"
    writer.add_context_length(2**20)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(2 * config.hidden_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(2 * config.hidden_size // config.head_dim if two else config.time_step_rank)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    if two:
        writer.add_ssm_group_count(config.n_groups)
    else:
        writer.add_ssm_dt_b_c_rms(False)
    for extra in ("attention.layer_norm_epsilon", "attention.key_length", "attention.value_length"):
        writer.kv_data[-1].pop(f"{config.model_type}.{extra}", None)


def _mamba(name: str, value: torch.Tensor, config: Any) -> Modified:
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return
    if name.endswith(".A_log"):
        value = -torch.exp(value)
    yield name, value.squeeze() if "conv1d.weight" in name else value


def _mamba2(name: str, value: torch.Tensor, config: Any) -> Modified:
    groups = getattr(config, "mamba_n_groups", None) or config.n_groups
    if name.endswith(".dt_bias"):
        name = name.removesuffix(".dt_bias") + ".dt_proj.bias"
    elif "conv1d.weight" in name:
        value = value.squeeze()
    elif name.endswith((".A_log", ".D")):
        value = value.reshape(-1, 1)
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        value = value.reshape(groups, -1)
    yield name, -torch.exp(value) if name.endswith(".A_log") else value


def _permuted(value: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.py, `permute`"""
    return value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def _llama(name: str, value: torch.Tensor, config: Any) -> Modified:
    if re.search(r"q_proj\.(weight|bias)$", name):
        value = _permuted(value, config.num_attention_heads)
    if re.search(r"k_proj\.(weight|bias)$", name):
        value = _permuted(value, config.num_key_value_heads)
    yield name, value


def _granite_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    if shared := getattr(config, "shared_intermediate_size", 0):
        writer.add_expert_shared_feed_forward_length(shared)
    if config.model_type == "granitemoehybrid":
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
        attends = [kind in ("attention", "full_attention") for kind in config.layer_types]
        writer.kv_data[-1].pop("granitehybrid.attention.head_count_kv")
        writer.add_head_count_kv([config.num_key_value_heads if each else 0 for each in attends])
        writer.add_rope_scaling_finetuned(False)
        writer.kv_data[-1].pop("granitehybrid.context_length")
        writer.add_context_length(2**20)


def _granite(name: str, value: torch.Tensor, config: Any) -> Modified:
    block = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
    dense = "" if getattr(config, "num_local_experts", 0) else None
    for source, part in (("block_sparse_moe.input_linear", "exps"), ("shared_mlp.input_linear", "shexp")):
        if name.endswith(f"{source}.weight"):
            part = "" if dense is None and part == "shexp" else f"_{part}"
            gate, up = value.chunk(2, dim=-2)
            yield f"blk.{block}.ffn_gate{part}.weight", gate
            yield f"blk.{block}.ffn_up{part}.weight", up
            return
    if dense is None and name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{block}.ffn_down.weight", value
    elif ".mamba." in name:
        yield from _mamba2(name, value, config)
    else:
        yield from _llama(name, value, config)


def _falcon_h1_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_d_ssm)
    writer.add_ssm_time_step_rank(config.mamba_d_ssm // config.mamba_d_head)


def _falcon_h1(name: str, value: torch.Tensor, config: Any) -> Modified:
    ((name, value),) = _mamba2(name, value, config)
    scales = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if "in_proj" in name:
        inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        parts = value.split([inner, inner, state, state, value.shape[0] - 2 * inner - 2 * state])
        value = config.ssm_in_multiplier * torch.cat(
            [part * scale for part, scale in zip(parts, config.ssm_multipliers, strict=True)]
        )
    for part, scale in scales.items():
        if f".{part}." in f".{name}":
            value = value * scale
    yield name, value


# --- llama4.py, apertus.py


def _llama4_values(writer: GGUFWriter, config: Any) -> None:
    writer.kv_data[-1].pop("llama4.feed_forward_length")
    writer.add_feed_forward_length(config.intermediate_size_mlp)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    writer.add_expert_feed_forward_length(config.intermediate_size)


def _llama4(name: str, value: torch.Tensor, config: Any) -> Modified:
    if name.endswith("gate_up_proj"):
        for part, half in zip(
            ("gate_proj", "up_proj"), value.transpose(-1, -2).chunk(2, dim=-2), strict=True
        ):
            yield name.replace("gate_up_proj", f"{part}.weight"), half
    elif name.endswith("down_proj"):
        yield f"{name}.weight", value.transpose(-1, -2)
    else:
        yield name, value


def _apertus_values(writer: GGUFWriter, config: Any) -> None:
    length = config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(length)
    writer.add_tensor("rope_freqs.weight", llama3_factors(config.rope_parameters, length))


def _apertus(name: str, value: torch.Tensor, config: Any) -> Modified:
    """The tensor, unless it is a parameter of the activation: the file has those as values (`xielu`)."""
    if ".act_fn." not in name:
        yield name, value


def xielu(model: Any) -> dict[str, list[float]]:
    return {
        f"xielu.{name}": [getattr(layer.mlp.act_fn, name).item() for layer in model.model.layers]
        for name in ("alpha_p", "alpha_n", "beta", "eps")
    }


# --- gpt_neox.py, bloom.py, falcon.py, phi.py, stablelm.py, nemotron.py


def _only(writer: GGUFWriter, *keys: str) -> None:
    """Delete the common values that this architecture's conversion does not write; `keys` are some that it does."""
    kept = {
        "name",
        "file_type",
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        *keys,
    }
    for key in list(writer.kv_data[-1]):
        if not key.startswith("general.") and key.split(".", 1)[1] not in kept:
            writer.kv_data[-1].pop(key)


_NORM = ("attention.head_count", "attention.layer_norm_epsilon")


def _partial(config: Any) -> int:
    length = config.hidden_size // config.num_attention_heads
    return int(config.rope_parameters["partial_rotary_factor"] * length)


def _gpt_neox_values(writer: GGUFWriter, config: Any) -> None:
    _only(writer, *_NORM)
    writer.add_rope_dimension_count(_partial(config))
    writer.add_parallel_residual(config.use_parallel_residual)


def _bloom_values(writer: GGUFWriter, config: Any) -> None:
    _only(writer, *_NORM)
    writer.add_context_length(2048)
    writer.add_feed_forward_length(4 * config.hidden_size)
    if "bloom.attention.head_count" not in writer.kv_data[-1]:
        writer.add_head_count(config.n_head)
    writer.add_head_count_kv(config.n_head)


def _fused_heads(name: str, value: torch.Tensor, config: Any) -> Modified:
    if "query_key_value" in name:
        heads = getattr(config, "num_attention_heads", None) or config.n_head
        split = value.reshape(heads, 3, -1, *value.shape[1:])
        value = torch.cat([split[:, part].reshape(-1, *value.shape[1:]) for part in range(3)])
    yield name.replace("transformer.", ""), value


def _falcon_values(writer: GGUFWriter, config: Any) -> None:
    _only(writer, *_NORM)
    writer.kv_data[-1].pop("falcon.context_length")
    writer.kv_data[-1].pop("falcon.feed_forward_length", None)
    writer.add_context_length(2048)
    writer.add_tensor_data_layout("jploski")
    writer.add_feed_forward_length(4 * config.hidden_size)
    writer.add_head_count_kv(config.num_kv_heads if config.new_decoder_architecture else 1)


def _falcon(name: str, value: torch.Tensor, config: Any) -> Modified:
    if "query_key_value" in name:
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        heads, length = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        qkv = value.view(groups, heads // groups + 2, length, -1)
        parts = (qkv[:, :-2], qkv[:, [-2]], qkv[:, [-1]])
        value = torch.cat([part.reshape(-1, value.shape[1]) for part in parts])
    yield name, value


def _phi2_values(writer: GGUFWriter, config: Any) -> None:
    _only(writer, *_NORM)
    writer.add_head_count_kv(config.num_attention_heads)
    writer.add_rope_dimension_count(_partial(config))


def _stablelm_values(writer: GGUFWriter, config: Any) -> None:
    _only(writer, *_NORM, "attention.head_count_kv")
    writer.add_rope_dimension_count(_partial(config))
    writer.add_parallel_residual(config.use_parallel_residual)


def _nemotron_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_rope_dimension_count(_partial(config))
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _nemotron(name: str, value: torch.Tensor, config: Any) -> Modified:
    yield name, value + 1 if name.endswith("norm.weight") else value


# --- llama.py, internlm.py, arcee.py, exaone.py, hunyuan.py, qwen3vl.py


def _llama_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)


def _exaone_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)


def _exaone4_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    if config.sliding_window is not None:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _hunyuan_values(writer: GGUFWriter, config: Any) -> None:
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_used_count(config.moe_topk)
        writer.add_expert_shared_count(1)
    writer.add_rope_scaling_type(RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)
    writer.add_rope_scaling_orig_ctx_len(256 * 1024)


def _of_images(writer: GGUFWriter, config: Any) -> None:
    writer.add_num_deepstack_layers(3)
    writer.add_rope_dimension_sections([3, 3, 2, 0])
    if wide := getattr(config, "moe_intermediate_size", None):
        writer.add_expert_feed_forward_length(wide)


# --- gemma.py


def _gemma4_values(writer: GGUFWriter, config: Any) -> None:
    layers, shared = config.num_hidden_layers, config.num_kv_shared_layers
    near = [kind == "sliding_attention" for kind in config.layer_types]
    full = config.per_layer_config[near.index(False)]
    for old in (
        "attention.key_length",
        "attention.value_length",
        "attention.head_count_kv",
        "feed_forward_length",
    ):
        writer.kv_data[-1].pop(f"gemma4.{old}", None)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0.0)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern(near)
    writer.add_key_length(full.head_dim)
    writer.add_value_length(full.head_dim)
    writer.add_key_length_swa(config.to_dict()["head_dim"])
    writer.add_value_length_swa(config.to_dict()["head_dim"])
    wide, double = config.intermediate_size, config.use_double_wide_mlp
    writer.add_feed_forward_length(
        [wide * (2 if n >= layers - shared else 1) for n in range(layers)] if double else wide
    )
    both = (config.to_dict()["num_key_value_heads"], full.num_key_value_heads)
    writer.add_head_count_kv(
        [both[0] if each else both[1] for each in near] if config.attention_k_eq_v else both[0]
    )
    writer.add_rope_dimension_count(full.head_dim)
    writer.add_rope_dimension_count_swa(config.to_dict()["head_dim"])
    if config.enable_moe_block:
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rotated = int(full.head_dim * config.rope_parameters["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (full.head_dim // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", torch.tensor(factors).numpy())


def _gemma3n_values(writer: GGUFWriter, config: Any) -> None:
    writer.kv_data[-1].pop("gemma3n.feed_forward_length", None)
    writer.add_feed_forward_length(list(config.intermediate_size))
    writer.add_sliding_window(config.sliding_window)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_altup_active_idx(config.altup_active_idx)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    normal, shares = torch.distributions.Normal(0, 1), torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(normal.icdf(shares).tolist())
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])


def _gemma3n(name: str, value: torch.Tensor, config: Any) -> Modified:
    yield name + ".weight" if name.endswith("_scale") else name, value


def _gemma4(name: str, value: torch.Tensor, config: Any) -> Modified:
    block = name.split(".layers.")[1].split(".")[0] if ".layers." in name else ""
    if name.endswith("router.scale"):
        yield f"blk.{block}.ffn_gate_inp.scale", value
    elif name.endswith("per_expert_scale"):
        yield f"blk.{block}.ffn_down_exps.scale", value
    else:
        yield name + ".weight" if name.endswith("layer_scalar") or ".experts." in name else name, value


# --- minimax.py, dots1.py, ernie.py


def _minimax_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))


def _minimax(name: str, value: torch.Tensor, config: Any) -> Modified:
    name = re.sub(
        r"experts\.w([123])", lambda w: f"experts.{['gate', 'down', 'up'][int(w[1]) - 1]}_proj", name
    )
    yield _expert_bias(name).replace("block_sparse_moe.experts", "mlp.experts"), value


def _dots1_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_weights_norm(config.norm_topk_prob)


def _with_expert_bias(name: str, value: torch.Tensor, config: Any) -> Modified:
    yield _expert_bias(name), value


def _ernie_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_expert_count(config.moe_num_experts)
    writer.add_expert_used_count(config.moe_k)
    writer.add_interleave_moe_layer_step(config.moe_layer_interval)
    writer.add_leading_dense_block_count(config.moe_layer_start_index)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.moe_num_shared_experts)
    writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)


# --- bert.py, and the encoders that are decoders


def _encoder_values(writer: GGUFWriter, config: Any) -> None:
    writer.add_causal_attention(False)
    writer.add_token_type_count(config.type_vocab_size)
    for extra in ("attention.key_length", "attention.value_length"):
        writer.kv_data[-1].pop(f"{FAMILIES[config.model_type][0]}.{extra}", None)


def _bert(name: str, value: torch.Tensor, config: Any) -> Modified:
    if not name.startswith("pooler."):
        yield name, value


def _nomic_bert() -> Modify:
    waiting: dict[str, torch.Tensor] = {}

    def modify(name: str, value: torch.Tensor, config: Any) -> Modified:
        found = re.fullmatch(
            r"layers\.(\d+)\.(self_attn\.[qkv]_proj|\w+layernorm|[\w.]+)\.(weight|bias)", name
        )
        owner = found[2] if found else ""
        if found and owner.startswith("self_attn.") and "o_proj" not in owner:
            waiting[owner] = value
            if len(waiting) == 3:
                parts = [waiting.pop(f"self_attn.{part}_proj") for part in "qkv"]
                yield f"blk.{found[1]}.attn_qkv.{found[3]}", torch.cat(parts)
        elif found and owner in ("post_attention_layernorm", "post_mlp_layernorm"):
            norm = "attn_output_norm" if "attention" in owner else "layer_output_norm"
            yield f"blk.{found[1]}.{norm}.{found[3]}", value
        else:
            yield f"model.{name}" if found else name, value

    return modify


def headless(name: str, value: torch.Tensor, config: Any) -> Modified:
    yield f"model.{name}", value


FAMILIES: Mapping[str, tuple[str, Values, Modify]] = {
    "gemma3n_text": ("gemma3n", _gemma3n_values, _gemma3n),
    "gemma4_text": ("gemma4", _gemma4_values, _gemma4),
    "gpt_neox": ("gptneox", _gpt_neox_values, _fused_heads),
    "bloom": ("bloom", _bloom_values, _fused_heads),
    "falcon": ("falcon", _falcon_values, _falcon),
    "phi": ("phi2", _phi2_values, as_is),
    "stablelm": ("stablelm", _stablelm_values, as_is),
    "nemotron": ("nemotron", _nemotron_values, _nemotron),
    "bert": ("bert", _encoder_values, _bert),
    "nomic_bert": ("nomic-bert", _encoder_values, _nomic_bert()),
    "llama": ("internlm2", _llama_values, _llama),
    "llama4_text": ("llama4", _llama4_values, _llama4),
    "apertus": ("apertus", _apertus_values, _apertus),
    "arcee": ("arcee", _llama_values, _llama),
    "exaone": ("exaone", _exaone_values, as_is),
    "exaone4": ("exaone4", _exaone4_values, as_is),
    "hunyuan_v1_dense": ("hunyuan-dense", _hunyuan_values, as_is),
    "hunyuan_v1_moe": ("hunyuan-moe", _hunyuan_values, as_is),
    "qwen2": ("qwen2vl", _of_images, as_is),
    "qwen3": ("qwen3vl", _of_images, as_is),
    "qwen3_moe": ("qwen3vlmoe", _of_images, as_is),
    "minimax_m2": ("minimax-m2", _minimax_values, _minimax),
    "dots1": ("dots1", _dots1_values, _with_expert_bias),
    "ernie4_5_moe": ("ernie4_5-moe", _ernie_values, _with_expert_bias),
    "granitemoe": ("granitemoe", _granite_values, _granite),
    "granitemoeshared": ("granitemoe", _granite_values, _granite),
    "deepseek_v2": ("deepseek2", _deepseek2, _keys_and_values),
    "deepseek_v3": ("deepseek2", _deepseek2, _keys_and_values),
    "qwen3_next": ("qwen3next", _qwen3_next_values, _qwen3_next),
    "qwen3_5_text": ("qwen35", _qwen3_next_values, _qwen3_5),
    "qwen3_5_moe_text": ("qwen35moe", _qwen3_next_values, _qwen3_5),
    "lfm2": ("lfm2", _lfm2_values, _lfm2),
    "lfm2_moe": ("lfm2moe", _lfm2_values, _lfm2),
    "mamba": ("mamba", _mamba_values, _mamba),
    "mamba2": ("mamba2", _mamba_values, _mamba2),
    "granitemoehybrid": ("granitehybrid", _granite_values, _granite),
    "falcon_h1": ("falcon-h1", _falcon_h1_values, _falcon_h1),
}
