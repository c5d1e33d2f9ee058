"""What serving a model would take (`serve --plan`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusion.cli.terminal.output import Output, bytes_text, number_text, seconds_text

if TYPE_CHECKING:
    from fusion.runtime.launch.serving_plan import ServingPlan


def show(found: ServingPlan, output: Output, names: Mapping[str, str]) -> None:
    """`names`: those that people know peers by."""
    if found.stages:
        output.table(
            "Stages",
            ("stage", "peer", "memory needed/offered", "weights", "to fetch"),
            [
                (
                    str(stage.stage),
                    names.get(stage.peer, stage.peer),
                    f"{bytes_text(stage.memory_bytes)} / {bytes_text(stage.offered_bytes)}",
                    bytes_text(stage.weights_bytes),
                    "nothing: on its disk" if stage.on_disk else bytes_text(stage.weights_bytes),
                )
                for stage in found.stages
            ],
        )
    for line in summary(found):
        output.print_line(line)


def summary(found: ServingPlan) -> list[str]:
    """As text."""
    if found.one_run:
        how = "it answers in one run"
    elif found.cache == "kv":
        how = f"with a KV cache of up to {bytes_text(found.cache_bytes)}"
    else:
        how = "without a KV cache: each token runs the whole text"
    texts = f"texts of up to {found.max_sequence:,} tokens, " if found.max_sequence > 1 else ""
    lines = [f"{found.dtype}, {bytes_text(found.weights_bytes)} of weights, {texts}{how}"]
    if found.misfit:
        over = ", ".join(
            f"{bytes_text(most)} on each of {count}" for count, most in enumerate(found.needed, 1)
        )
        return [
            *lines,
            f"it does not fit: {found.misfit}",
            *([f"peers that would do: {over}"] if over else []),
        ]
    return [
        *lines,
        f"to fetch: {bytes_text(found.fetch_bytes)}; {bytes_text(found.held_bytes)} are on its peers' disks and "
        f"{bytes_text(found.here_bytes)} in this home already",
        f"{found.able} of {found.peers} peers have room for a stage",
        *([] if found.one_run else [_predicted(found.token_seconds)]),
    ]


def _predicted(token_seconds: float) -> str:
    if not token_seconds:
        return "how fast it would be is not known"
    rate = number_text(1 / token_seconds)
    return f"predicted: {rate} tokens/s for one answer ({seconds_text(token_seconds)} a token)"
