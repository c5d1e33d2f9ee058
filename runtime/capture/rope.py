"""Rotary positions whose frequencies depend on the length of the text, as transformers implements them.

Dynamic NTK scaling changes the frequencies of all positions once a text is longer than `max_position_embeddings`; longrope has other factors
beyond `original_max_position_embeddings`. Up to that length the frequencies are fixed and attention may be cached; beyond it, keys that are
cached would be wrong. So a model is captured only for lengths at which its frequencies do not change.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

_LONGROPE = "longrope"
_SU = "su"
_DYNAMIC = "dynamic"
_SHORT_SCALE = "short_mscale"  # of Phi-3.5-MoE
# Configuration keys of the largest length; the last is Whisper's, whose decoder may be saved alone.
_MAXIMA = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def fixed_length(config: Any) -> int | None:
    """The longest text up to which a configuration's frequencies are fixed; None where they never change."""
    lengths = [
        config.max_position_embeddings if _DYNAMIC in kind else parameters["original_max_position_embeddings"]
        for kind, parameters in _types_and_parameters(getattr(config, "rope_parameters", None))
        if _DYNAMIC in kind or kind == _LONGROPE
    ]
    return min(lengths, default=None)


def longest_text(config: Any) -> int:
    """The longest text, in positions, for which the frequencies are fixed."""
    lengths = (int(getattr(config, name, 0) or 0) for name in _MAXIMA)
    longest = next((n for n in lengths if n >= 1), 2048)  # XLNet has -1
    return min(longest, fixed_length(config) or longest)


def with_current_names(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json with the current name of Phi-3's long-text scaling: transformers accepts the former name, but then misses
    parameters that it reads under the current one."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = values.get(name)
        if values.get("model_type") != "phi3" or not isinstance(scaling, dict):
            continue
        if _SU in (scaling.get("type"), scaling.get("rope_type")):
            scaling = {key: value for key, value in scaling.items() if key != "type"}
            values = {**values, name: {**scaling, "rope_type": _LONGROPE}}
    return values


def unknown_kind(config: Any, error: Exception, known: Iterable[str]) -> str:
    """A line on a rotary type that is none of `known` and made building the module fail; else empty. `error`: that of the failure."""
    kinds = [
        kind for kind, _ in _types_and_parameters(getattr(config.get_text_config(), "rope_parameters", None))
    ]
    unknown = next((kind for kind in kinds if type(error) is KeyError and str(error.args[0]) == kind), None)
    if unknown is None:
        return ""
    return (
        f"its rotary positions (rope_scaling or rope_parameters in config.json) are of the type {unknown!r:.40}, which this kind of model "
        f"does not have; transformers knows {', '.join(sorted({'default', *known}))}"
    )


def fix_frequencies(module: nn.Module, maximum_sequence: int) -> None:
    """Change a module's rotary embeddings so that none depends on the length, where that makes no difference up to `maximum_sequence`."""
    for part in module.modules():
        config, kind = getattr(part, "config", None), getattr(part, "rope_type", None)
        if kind is None or config is None or not isinstance(part, nn.Module):
            continue
        fixed = fixed_length(config)
        if fixed is not None and maximum_sequence <= fixed:
            # The module compares this type with the dynamic ones each time it runs.
            fixed_type = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
            setattr(part, "rope_type", fixed_type)  # noqa: B010 - a module's type says that it has tensors and modules alone
            setattr(part, "config", _fixed_config(config))  # noqa: B010


def _fixed_config(config: Any) -> Any:
    """A copy of the configuration for a rotary embedding that would compare the length to choose its attention scale: with the scale of short
    texts. Others share the original."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or _SHORT_SCALE not in parameters:
        return config
    fixed = copy.copy(config)
    fixed.rope_parameters = {
        **parameters,
        "rope_type": "default",
        "attention_factor": parameters[_SHORT_SCALE],
    }
    return fixed


def _types_and_parameters(parameters: Any) -> list[tuple[str, Any]]:
    """The rotary type and its parameters; several where kinds of layers differ."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [(str(parameters["rope_type"]), parameters)]
    return [(str(p["rope_type"]), p) for p in parameters.values() if isinstance(p, dict) and "rope_type" in p]
