"""Directories of weights that others have quantised answer as the models that they stand for, with their matrices as they are and as
floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.captured_once import capture_once
from support.families import EXPERTS, GROUPED, POSITIONS, build, greedy
from support.packed_models import awq, compressed, gptq, numbers_of, save_packed, save_with

from fusion.dag.cutting.cuts import split
from fusion.dag.rewrites.expert_groups import group_experts, part_of
from fusion.dag.rewrites.quantise import MIN_ELEMENTS
from fusion.runtime.capture import huggingface, sources
from fusion.runtime.capture.quantised_weights import stored_model
from fusion.runtime.capture.serving_graph import serving_graph
from fusion.runtime.job.errors import JobError
from fusion.runtime.planes.plane import Piece
from fusion.runtime.planes.torch_decoding import TorchDecodingStage

Tensor = torch.Tensor
Parts = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
NEW = 12


@pytest.fixture(autouse=True)
def _captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_once(monkeypatch, huggingface)


def in_groups(write: Any, bits: int, group: int, **how: bool) -> Parts:
    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        made = numbers_of(weight, bits, group, **how)
        if write is compressed and made.scales.shape[1] == 1:
            made = type(made)(made.numbers, made.scales.bfloat16().half(), made.zeros, made.order)
        return write(made, bits), made.dense

    return packed


def bytes_of_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return {"weight": numbers, "weight_scale": scales}, numbers * scales.float()


def floats_of_blocks(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Blocks of 48 rows and 40 columns, which end beyond the matrix."""
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 48), -(-columns // 40)) * 0.01 + 0.005
    whole = scales.repeat_interleave(48, 0)[:rows].repeat_interleave(40, 1)[:, :columns]
    numbers = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * whole


def floats_of_rows(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    numbers = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales.float()


def scheme(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def group_of(size: int, bits: int = 4, **more: Any) -> dict[str, Any]:
    return scheme("pack-quantized", num_bits=bits, strategy="group", group_size=size, **more)


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "version": "gemm",
    "zero_point": True,
}
CASES: dict[str, tuple[Mapping[str, Any], Parts, bool]] = {  # and whether the matrices are served as they are
    "gptq": (GPTQ, in_groups(gptq, 4, 32), True),
    "gptq of 8 bits, all columns": ({**GPTQ, "bits": 8, "group_size": -1}, in_groups(gptq, 8, 0), True),
    "gptq, in another order": ({**GPTQ, "desc_act": True}, in_groups(gptq, 4, 16, shuffled=True), False),
    "awq": (AWQ, in_groups(awq, 4, 32), True),
    "compressed": (group_of(32), in_groups(compressed, 4, 32, symmetric=True), True),
    "compressed, with zero points": (group_of(16, symmetric=False), in_groups(compressed, 4, 16), True),
    "compressed, rows of 8 bits": (
        scheme("pack-quantized", num_bits=8, strategy="channel"), in_groups(compressed, 8, 0, symmetric=True), True,
    ),
    "compressed, bytes": (scheme("int-quantized", num_bits=8, strategy="channel"), bytes_of_rows, True),
    "compressed, floats": (scheme("float-quantized", type="float", num_bits=8, strategy="channel"), floats_of_rows, False),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [48, 40]}, floats_of_blocks, False),
}  # fmt: skip


def answer(graph: Any, read: Any, prompt: list[int]) -> list[int]:
    """Of two stages."""
    stages = [
        TorchDecodingStage(part, read(part.graph.variables)) for part in split(graph, [len(graph.nodes) // 2])
    ]
    for stage in stages:
        stage.open("s", POSITIONS)
    tokens, start = list(prompt), 0
    for _ in range(NEW):
        values = {
            "input_ids": torch.tensor([tokens[start:]]),
            "position_ids": torch.arange(start, len(tokens))[None],
        }
        for stage in stages:
            values.update(*stage.run([Piece("s", start, values)]))
        start = len(tokens)
        tokens.append(int(values["result/0"][0, -1].argmax()))
    return tokens[len(prompt) :]


QUICK = ("gptq", "awq", "compressed, with zero points", "fp8")


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_a_directory_answers_as_the_model_that_it_stands_for(case: str, tmp_path: Path) -> None:
    config, packed, kept = CASES[case]
    torch.manual_seed(0)
    held = save_packed(build(transformers.LlamaConfig(**GROUPED)), tmp_path, config, packed)
    served = sources.in_files(tmp_path)
    assert served.unread == () and served.blocks is not None
    graph = serving_graph(served.inference, maximum_sequence=POSITIONS)
    served.check(graph.variables)
    prompt = torch.randint(0, 256, (9,)).tolist()
    wanted = greedy(held, prompt, NEW)[0]
    assert answer(graph, served.read, prompt) == wanted
    stored, read = stored_model(graph, served.read, served.blocks)
    as_they_are = sum(node.op.startswith("fusion.linear_int") for node in stored.nodes)
    large = sum(
        name.endswith("_proj.weight") and value.numel() >= MIN_ELEMENTS
        for name, value in held.named_parameters()
    )
    assert as_they_are == (large if kept else 0)
    assert answer(stored, read, prompt) == wanted
    for variable in served.inference.variables:
        name = variable.name
        if name.endswith("_proj.weight"):
            assert torch.equal(served.read([variable])[name], held.get_parameter(name))


def save_experts(directory: Path, config: dict[str, Any], packed: Parts) -> Any:
    """Of a Qwen3-MoE all of whose matrices are quantised, those of experts one by one; the model with what they stand for."""
    moe = transformers.Qwen3MoeConfig(
        **EXPERTS, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2
    )
    torch.manual_seed(0)

    def dense(name: str) -> bool:
        return name.endswith("_proj.weight") and ".experts." not in name

    held = save_packed(build(moe), directory, config, packed, dense)
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        parts, value = packed(tensors.pop(name))
        tensors |= {name.removesuffix("weight") + part: each for part, each in parts.items()}
        layer, number, which = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
        own = held.model.layers[int(layer)].mlp.experts
        with torch.no_grad():
            if which == "down_proj":
                own.down_proj[number] = value
            else:
                own.gate_up_proj[number].chunk(2)[which == "up_proj"].copy_(value)
    save_with(tensors, directory, config)
    return held


JOINED: dict[str, tuple[dict[str, Any], Parts, str]] = {
    "gptq": (GPTQ, in_groups(gptq, 4, 32), "int4"),
    "awq": (AWQ, in_groups(awq, 4, 32), "int4"),
    "compressed": (group_of(32, bits=8, symmetric=False), in_groups(compressed, 8, 32), "int8"),
}


@pytest.mark.parametrize(
    "case", ["gptq", *(pytest.param(c, marks=pytest.mark.slow) for c in ("awq", "compressed"))]
)
def test_experts_that_are_quantised_one_by_one_are_joined_as_they_are(case: str, tmp_path: Path) -> None:
    """All of them, and in groups that may run on several peers."""
    config, packed, kind = JOINED[case]
    held = save_experts(tmp_path, config, packed)
    served = sources.in_files(tmp_path)
    graph = serving_graph(served.inference, maximum_sequence=POSITIONS)
    served.check(graph.variables)
    prompt = torch.randint(0, 256, (9,)).tolist()
    assert served.blocks is not None
    stored, read = stored_model(graph, served.read, served.blocks)
    ops = [node.op for node in stored.nodes]
    assert ops.count(f"fusion.expert_linear_{kind}") == 2 * 3 and "fusion.expert_linear" not in ops
    wanted = greedy(held, prompt, NEW)[0]
    for each in (stored, group_experts(stored, 2)):
        assert answer(each, read, prompt) == wanted
    assert any(part_of(variable.name) for variable in group_experts(stored, 2).variables)


def test_an_expert_that_the_files_lack_is_named(tmp_path: Path) -> None:
    save_experts(tmp_path, GPTQ, in_groups(gptq, 4, 32))
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.1.mlp.experts.2.up_proj"
    kept = {name: value for name, value in tensors.items() if not name.startswith(missing)}
    save_with(kept, tmp_path, GPTQ)
    served = sources.in_files(tmp_path)
    with pytest.raises(JobError, match=rf"no safetensors file has the weight {missing}"):
        served.check(served.inference.variables)


def test_experts_in_floats_of_four_bits_are_served_as_they_are(tmp_path: Path) -> None:
    """As GPT-OSS's own files have them; the reference is what transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    small = {**GROUPED, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = build(transformers.GptOssConfig(**small, head_dim=16, num_local_experts=4, num_experts_per_tok=2))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        with torch.no_grad():
            model.get_parameter(name).copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    save_with(tensors, tmp_path, {"quant_method": "mxfp4"})
    served = sources.in_files(tmp_path)
    graph = serving_graph(served.inference, maximum_sequence=POSITIONS)
    served.check(graph.variables)
    prompt = torch.randint(0, 256, (9,)).tolist()
    wanted = greedy(model, prompt, NEW)[0]
    assert served.blocks is not None and answer(graph, served.read, prompt) == wanted
    stored, read = stored_model(graph, served.read, served.blocks)
    assert sum(node.op == "fusion.expert_linear_int8" for node in stored.nodes) == 2 * 2
    assert answer(stored, read, prompt) == wanted


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, r"quantised already \(bitsandbytes\)"),
        ({}, r"quantised already \(no method named\)"),
        ({"quant_method": "a\n\x1b[1mb"}, r"quantised already \(a \[1mb\)"),
        (scheme("pack-quantized", num_bits=4, strategy="a\nb"), "int of 4 bits by a b"),
        ({**GPTQ, "bits": 3}, "gptq with bits 3; 4 or 8 is read"),
        ({**GPTQ, "group_size": 0}, "group_size 0"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, "dynamic"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'; gemm is read"),
        ({**AWQ, "zero_point": False}, "zero_point False"),
        ({"quant_method": "fp8"}, "weight_block_size None"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "other than one scheme"),
        ({**group_of(32), "transform_config": {"a": 1}}, "a transform_config"),
        (scheme("marlin-24", num_bits=4, strategy="channel"), "format 'marlin-24', int of 4 bits by channel"),
        (group_of(32, bits=3), "int of 3 bits"),
    ],
)
def test_what_is_not_known_of_quantised_weights_is_refused_in_one_line(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_packed(build(transformers.LlamaConfig(**GROUPED)), tmp_path, config, in_groups(gptq, 4, 32))
    with pytest.raises(JobError, match=message) as refused:
        sources.in_files(tmp_path)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("lacking", ["qzeros", "scales"])
def test_a_matrix_without_its_scales_is_refused(lacking: str, tmp_path: Path) -> None:
    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, dense = in_groups(gptq, 4, 32)(weight)
        return {name: value for name, value in parts.items() if name != lacking}, dense

    save_packed(build(transformers.LlamaConfig(**GROUPED)), tmp_path, GPTQ, packed)
    with pytest.raises(JobError, match=rf"no safetensors file has model\.layers\.0\.\S+\.{lacking}, beside"):
        sources.in_files(tmp_path)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [
        ("qweight", lambda value: value[:-1]),
        ("qweight", lambda value: value.float()),
        ("scales", lambda value: value[:, :-8]),
        ("g_idx", lambda value: value + 9),
    ],
)
def test_a_matrix_that_does_not_fit_together_is_refused_in_one_line(
    part: str, wrong: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, dense = in_groups(gptq, 4, 32)(weight)
        return {**parts, part: wrong(parts[part]).contiguous()}, dense

    save_packed(build(transformers.LlamaConfig(**GROUPED)), tmp_path, GPTQ, packed)
    served = sources.in_files(tmp_path)
    [variable] = [v for v in served.inference.variables if v.name == "model.layers.0.mlp.up_proj.weight"]
    assert served.blocks is not None
    stored, read = stored_model(served.inference, served.read, served.blocks)
    for values in (lambda: served.read([variable]), lambda: read(stored.variables)):
        with pytest.raises(JobError) as refused:
            values()
        assert "\n" not in str(refused.value) and "qweight" in str(refused.value)
