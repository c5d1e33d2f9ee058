"""Rotary positions whose frequencies depend on the length of the text, as transformers writes them.

Dynamic NTK scaling changes the frequencies of all positions once a text outgrows `max_position_embeddings`; longrope takes other
factors beyond `original_max_position_embeddings`. Up to there the frequencies are fixed, and attention may be cached; beyond, keys
that were computed before would be wrong. So a model is captured for the lengths at which its frequencies stay what they are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

_LONGER = "longrope"
_SU = "su"
_DYNAMIC = "dynamic"
_SHORT_SCALE = "short_mscale"  # of Phi-3.5-MoE
# What configurations call the most positions; the last, Whisper, whose decoder may be saved alone.
_MAXIMA = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def fixed_length(config: Any) -> int | None:
    """The longest text for which a configuration's frequencies are those of a short one; None where they never change."""
    lengths = [
        config.max_position_embeddings if _DYNAMIC in kind else parameters["original_max_position_embeddings"]
        for kind, parameters in _kinds(getattr(config, "rope_parameters", None))
        if _DYNAMIC in kind or kind == _LONGER
    ]
    return min(lengths, default=None)


def longest_text(config: Any) -> int:
    """The most positions of a text, all of which the model treats in one way."""
    named = (int(getattr(config, name, 0) or 0) for name in _MAXIMA)
    longest = next((n for n in named if n >= 1), 2048)  # XLNet, for one, has -1
    return min(longest, fixed_length(config) or longest)


def spelled_now(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a config.json with the current name of Phi-3's scaling for long texts: transformers accepts the former name, but then
    misses parameters that it reads under the current one alone."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = values.get(name)
        if values.get("model_type") != "phi3" or not isinstance(scaling, dict):
            continue
        if _SU in (scaling.get("type"), scaling.get("rope_type")):
            scaling = {key: value for key, value in scaling.items() if key != "type"}
            values = {**values, name: {**scaling, "rope_type": _LONGER}}
    return values


def unknown_kind(config: Any, error: Exception, known: Iterable[str]) -> str:
    """A line on a type of rotary positions that is none of the `known`, where a module could not be built because of it; else empty.
    `error`: that of the look-up."""
    kinds = [kind for kind, _ in _kinds(getattr(config.get_text_config(), "rope_parameters", None))]
    wrong = next((kind for kind in kinds if type(error) is KeyError and str(error.args[0]) == kind), None)
    if wrong is None:
        return ""
    return (
        f"its rotary positions (rope_scaling or rope_parameters in config.json) are of the type {wrong!r:.40}, which this kind of model "
        f"does not have; transformers knows {', '.join(sorted({'default', *known}))}"
    )


def fix_frequencies(module: nn.Module, maximum_sequence: int) -> None:
    """Change a module so that no rotary embedding depends on the length, where that makes no difference up to `maximum_sequence`."""
    for part in module.modules():
        config, kind = getattr(part, "config", None), getattr(part, "rope_type", None)
        if kind is None or config is None or not isinstance(part, nn.Module):
            continue
        fixed = fixed_length(config)
        if fixed is not None and maximum_sequence <= fixed:
            # transformers asks the module, each time it runs, whether its kind is one that changes.
            unchanging = "default" if isinstance(kind, str) else dict.fromkeys(kind, "default")
            setattr(part, "rope_type", unchanging)  # noqa: B010 - a module's type says that it has tensors and modules alone
            setattr(part, "config", _of_short_texts(config))  # noqa: B010


def _of_short_texts(config: Any) -> Any:
    """The configuration, which others share, as a rotary embedding is to read it that would ask for the length to know which of two
    numbers scales attention."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or _SHORT_SCALE not in parameters:
        return config
    found = copy.copy(config)
    found.rope_parameters = {
        **parameters,
        "rope_type": "default",
        "attention_factor": parameters[_SHORT_SCALE],
    }
    return found


def _kinds(parameters: Any) -> list[tuple[str, Any]]:
    """Kind and parameters, of each sort of layer where these differ."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [(str(parameters["rope_type"]), parameters)]
    return [(str(p["rope_type"]), p) for p in parameters.values() if isinstance(p, dict) and "rope_type" in p]
