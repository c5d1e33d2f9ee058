"""Where a training job would run, how fast, and what holds it up (`plan`, `train`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusion.cli.terminal.output import Output, bytes_text, number_text, seconds_text
from fusion.runtime.placing.stage_count import listed

if TYPE_CHECKING:
    from fusion.runtime.placing.plan import Plan

NAMED = 10  # peers that a line for people lists before it only counts


def show(found: Plan, output: Output, names: Mapping[str, str] | None = None) -> None:
    """A plan for people; `names` are those that they know peers by."""
    called = names or {}
    output.table(
        "Stages (a step)",
        ("stage", "peer", "nodes", "FLOPs", "memory needed/lent", "computes", "busy"),
        [
            (
                str(stage.stage),
                called.get(stage.peer, stage.peer),
                f"{stage.first_node}-{stage.last_node}",
                f"{100 * stage.flops_share:.1f}%",
                f"{bytes_text(stage.memory_bytes)} / {bytes_text(stage.lent_bytes)}",
                seconds_text(stage.seconds),
                f"{100 * stage.busy:.0f}%",
            )
            for stage in found.stages
        ],
    )
    if found.links:
        output.table(
            "Links (a step)",
            ("from", "to", "activations", "gradients", "codec", "rate", "RTT", "sends for"),
            [
                (
                    called.get(link.sender, link.sender),
                    called.get(link.receiver, link.receiver),
                    bytes_text(link.activation_bytes),
                    bytes_text(link.gradient_bytes),
                    ", ".join(link.codecs),
                    _rate(link.mbps) + ("" if link.known else " (a guess)"),
                    f"{link.rtt_ms:.3g} ms",
                    seconds_text(link.seconds),
                )
                for link in found.links
            ],
        )
    for line in summary(found, called):
        output.print_line(line)


def summary(found: Plan, names: Mapping[str, str]) -> list[str]:
    """A summary of the tables, as text."""
    bottleneck = found.bottleneck
    for peer, name in names.items():
        bottleneck = bottleneck.replace(peer, name)
    lines = [
        f"a step: {seconds_text(found.predicted_seconds)} predicted, {seconds_text(found.simulated_seconds)} "
        f"simulated, and with these stages never less than {seconds_text(found.bound_seconds)}",
        f"bottleneck: {bottleneck}",
        *_throughput(found),
        f"schedule: {found.schedule}, {_count(found.microbatches, 'microbatch', 'microbatches')}, "
        f"{found.in_flight} in flight at most",
    ]
    if found.compression.kind != "none":
        lines.append(f"compression: {_compression(found)}")
    slow = [f"{names.get(line.peer, line.peer)} ({seconds_text(line.up_seconds)} up, {seconds_text(line.down_seconds)} down)"
            for line in sorted(found.lines, key=lambda line: -max(line.up_seconds, line.down_seconds))]  # fmt: skip
    if slow:
        lines.append(f"shared lines, busiest first: {listed(slow, NAMED)}")
    if found.left_out:
        lines.append(f"left out: {listed([names.get(peer, peer) for peer in found.left_out], NAMED)}")
    if not all(link.known for link in found.links):
        lines.append(
            "a guess: nobody has measured these links; in a swarm file, [[links]], [[sites]] or [default] would tell"
        )
    return lines


def _throughput(found: Plan) -> list[str]:
    if not found.samples:
        return []
    line = f"throughput: {number_text(found.samples_per_second)} sequences/s"
    if found.price_usd:
        line += f"; of peers for ${found.price_usd:,.0f}, {number_text(1000 * found.samples_per_second / found.price_usd)} for $1000"
    return [line]


def _compression(found: Plan) -> str:
    asked = found.compression
    if asked.kind == "uniform":
        return f"{asked.codec}, on every link"
    chosen = ", ".join(
        dict.fromkeys(codec for link in found.links for codec in link.codecs if codec != "none")
    )
    allowed = f"{', '.join(asked.families)}, at most {asked.ratio:g} times"
    return f"{chosen or 'none pays'} (allowed: {allowed})"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _rate(mbps: float) -> str:
    if mbps == float("inf"):
        return "no limit"
    return f"{mbps / 1000:.3g} Gbps" if mbps >= 1000 else f"{mbps:.3g} Mbps"
