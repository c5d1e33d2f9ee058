"""What the codecs cost on this machine: bytes against the information bound, speed on one core, error, and how evenly
AdaTopK's links finish.

    python tests/bench/codec_rates.py [--elements 1048576] [--rounds 7] [--json]

Codecs are timed in turn, round after round, because machines drift; the table shows medians. Speeds are dense bytes a
second; "together" is dense bytes / (encode + decode seconds). The bound is 16 bits and H(d)/d bits for each value that
top-k keeps at density d (H: binary entropy), so "of bound" has a meaning where values are fp16.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from typing import Any

import torch

from fusion.compression.adaptive import CodecSpeed, EdgeUse, choose, payload_bytes
from fusion.compression.codec import codec
from fusion.compression.codec_speed import measure_codec
from fusion.compression.spec import MAX_MILLIONTHS, MILLION, MIN_MILLIONTHS, parse

SPECS = (
    *("none", "bf16", "fp16", "int8", "int4"),
    *(f"topk:{density}" for density in (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.5)),
    *("topk:0.01:int8", "topk:0.1:int8"),
)
NETWORKS = 300


def measure(elements: int, rounds: int) -> list[dict[str, Any]]:
    samples: dict[str, list[CodecSpeed]] = {spec: [] for spec in SPECS}
    for _ in range(rounds):
        for spec, found in samples.items():
            found.append(measure_codec(spec, elements, repeats=3))
    return [_row(spec, found, elements) for spec, found in samples.items()]


def _row(spec: str, samples: list[CodecSpeed], elements: int) -> dict[str, Any]:
    size = codec(spec).cost(elements, "float32")
    together = [1 / (1 / s.encode_bytes_per_second + 1 / s.decode_bytes_per_second) for s in samples]
    return {
        "codec": spec,
        "bytes": size,
        "ratio": 4 * elements / size,
        "of_bound": size / bound_bytes(spec, elements) if spec.startswith("topk:") else None,
        "encode_bytes_per_second": statistics.median(s.encode_bytes_per_second for s in samples),
        "decode_bytes_per_second": statistics.median(s.decode_bytes_per_second for s in samples),
        "together_bytes_per_second": statistics.median(together),
        "error": relative_error(spec, elements),
    }


def bound_bytes(spec: str, elements: int) -> float:
    kept = parse(spec).kept(elements)
    d = kept / elements
    entropy = -d * math.log2(d) - (1 - d) * math.log2(1 - d)
    return kept * (16 + entropy / d) / 8


def relative_error(spec: str, elements: int) -> float:
    """The norm of the error over the norm of normally distributed values."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    encoded = codec(spec).encode(tensor)
    payload = memoryview(bytearray().join(encoded.buffers))
    decoded = codec(spec).decode(payload, (elements,), "float32")
    return float((decoded - tensor).norm() / tensor.norm())


def spread(seed: int, reuse_mask: bool) -> float:
    """The largest ratio of two top-k links' seconds in one network, over random networks of 2 to 9 edges. With a common mask
    a link takes as long as its slower direction. Densities at their limits do not count."""
    draw, worst = random.Random(seed), 1.0
    fast = {"topk": CodecSpeed(encode_bytes_per_second=math.inf, decode_bytes_per_second=math.inf)}
    for _ in range(NETWORKS):
        uses = [
            EdgeUse(
                edge=str(edge),
                direction=direction,
                elements=elements,
                itemsize=4,
                bytes_per_second=1e6 / 8 * 10 ** draw.uniform(0, 4),
            )
            for edge, elements in enumerate(draw.choices(range(20_000, 1 << 21), k=draw.randint(2, 9)))
            for direction in ("forward", "backward")
        ]
        chosen = choose(uses, 10 ** draw.uniform(0, 2), fast, reuse_mask=reuse_mask)
        seconds: dict[str, float] = {}
        for use in uses:
            spec = parse(chosen[use.edge, use.direction])
            if spec.family == "topk" and MIN_MILLIONTHS < spec.millionths < MAX_MILLIONTHS:
                key = use.edge if reuse_mask else f"{use.edge} {use.direction}"
                busy = use.busy_seconds(payload_bytes(use, spec, reuse_mask=reuse_mask))
                seconds[key] = max(busy, seconds.get(key, 0.0))
        if seconds:
            worst = max(worst, max(seconds.values()) / min(seconds.values()))
    return worst


def table(results: dict[str, Any]) -> str:
    lines = [
        f"{'codec':15} {'ratio':>8} {'of bound':>8} {'encode':>8} {'decode':>8} {'together':>8} {'error':>8}"
    ]
    for row in results["codecs"]:
        speeds = (row[f"{key}_bytes_per_second"] / MILLION for key in ("encode", "decode", "together"))
        of_bound = f"{row['of_bound']:.3f}" if row["of_bound"] else ""
        lines.append(
            f"{row['codec']:15} {row['ratio']:8.2f} {of_bound:>8} "
            + " ".join(f"{speed:8.0f}" for speed in speeds)
            + f" {row['error']:8.1e}"
        )
    lines.append(f"(MB/s of dense float32 on one core, {results['elements']} elements)")
    for name, value in results["adaptive_spread"].items():
        lines.append(
            f"AdaTopK, {name}: top-k links of {NETWORKS} random networks finish within {value:.3f} x"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the JSON alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "elements": options.elements,
        "codecs": measure(options.elements, options.rounds),
        "adaptive_spread": {"common mask": spread(0, True), "independent": spread(0, False)},
    }
    print(json.dumps(results) if options.json else table(results))
