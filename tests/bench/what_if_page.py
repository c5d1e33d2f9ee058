"""What the study of `bench.what_if` found, as a page and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion.runtime.placing.device_table import device_table

Found = Mapping[str, Any]


def page(found: Found) -> str:
    parts = [
        _ABOUT.format(swarms=_swarms(found)),
        _rows(found),
        "\n## Where memory decides\n\n",
        _fewest(found),
    ]
    return "".join(parts) + _READING.format(peaks=_peaks())


def _swarms(found: Found) -> str:
    return "; ".join(
        f"`examples/{name}.toml` ({each['peers']} x {each['device']}, ${each['price_usd']:,.0f})"
        for name, each in found["swarms"].items()
    )


def _rows(found: Found) -> str:
    head = ("job", "peers", "line", "codec", "sequences/s", "of 4 H100", "per $1000", "of 4 H100", "stages", "a step, s: model", "simulated", "bound", "what binds")  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head))]
    for plan in found["plans"]:
        rate = "as it stands" if plan["mbps"] is None else _rate(plan["mbps"])
        first = (plan["job"], plan["swarm"], rate, plan["codec"])
        if "misfit" in plan:
            lines.append(_line((*first, "-", "", "", "", "", "", "", "", _short(plan["misfit"]))))
            continue
        base = _base(found, plan["job"])
        lines.append(
            _line(
                (
                    *first,
                    f"{plan['sequences_per_second']:.3g}",
                    _ratio(plan, base, "sequences_per_second"),
                    f"{plan['sequences_per_second_per_1000_usd']:.3g}",
                    _ratio(plan, base, "sequences_per_second_per_1000_usd"),
                    plan["stages"],
                    f"{plan['predicted_seconds']:.3g}",
                    f"{plan['simulated_seconds']:.3g}",
                    f"{plan['bound_seconds']:.3g}",
                    plan["bottleneck"],
                )
            )
        )
    return "\n".join(lines) + "\n"


def _fewest(found: Found) -> str:
    if not found["fewest"]:
        return "Every model fits both swarms.\n"
    head = ("job", "device", "fewest that hold it", "stages", "price", "sequences/s, links free")
    lines = [_line(head), _line(["---"] * len(head))]
    for each in found["fewest"]:
        if each["peers"] is None:
            lines.append(
                _line((each["job"], each["device"], f"none: not {each['tried']} of them", "", "", ""))
            )
            continue
        lines.append(
            _line(
                (
                    each["job"],
                    each["device"],
                    each["peers"],
                    each["stages"],
                    f"${each['price_usd']:,.0f}",
                    f"{each['sequences_per_second']:.3g}",
                )
            )
        )
    return "\n".join(lines) + "\n"


def _base(found: Found, job: str) -> Found | None:
    """The machine as its swarm file has it."""
    for plan in found["plans"]:
        if plan["job"] == job and plan["mbps"] is None and "misfit" not in plan:
            return plan  # type: ignore[no-any-return]
    return None


def _ratio(plan: Found, base: Found | None, key: str) -> str:
    return f"{plan[key] / base[key]:.2f}" if base else ""


def _short(misfit: str) -> str:
    return misfit.replace("the model does not fit with", "does not fit with")


def _line(cells: Any) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _rate(mbps: float) -> str:
    return f"{mbps / 1000:g} Gbps" if mbps >= 1000 else f"{mbps:g} Mbps"


def draw(path: Path, found: Found) -> None:
    """Throughput, and throughput for $1000, against the rate of the lines; a column for each job that fits somewhere."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    jobs = [
        job for job in found["jobs"] if any(p["job"] == job and "misfit" not in p for p in found["plans"])
    ]
    figure, axes = pyplot.subplots(
        2, max(1, len(jobs)), figsize=(5.5 * max(1, len(jobs)), 7.5), layout="constrained", squeeze=False
    )
    rows = (
        ("sequences_per_second", "sequences/s"),
        ("sequences_per_second_per_1000_usd", "sequences/s for $1000"),
    )
    for column, job in enumerate(jobs):
        plans = [p for p in found["plans"] if p["job"] == job and "misfit" not in p]
        for row, (key, label) in enumerate(rows):
            at = axes[row][column]
            for series in dict.fromkeys(p["series"] for p in plans if p["mbps"] is not None):
                points = [(p["mbps"], p[key]) for p in plans if p["series"] == series]
                at.plot(*zip(*points, strict=True), marker=".", label=series)
            for base in (p for p in plans if p["mbps"] is None):
                at.axhline(base[key], color="black", linewidth=1, linestyle="--", label=base["series"])
            at.set(xscale="log", yscale="log", xlabel="each peer's line, Mbps", ylabel=label, title=job)
            at.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _peaks() -> str:
    table = device_table()
    card, sxm, pcie = (table[name] for name in ("rtx-3080", "h100-sxm", "h100-pcie"))
    rows = []
    for name, precision in (("float32", "float32"), ("bfloat16 with float32 sums", "bf16")):
        ratios = [
            50 * card.peak_flops_per_second(precision) / (4 * other.peak_flops_per_second(precision))  # type: ignore[arg-type]
            for other in (sxm, pcie)
        ]
        rows.append(f"{name} {ratios[0]:.2f} (SXM) and {ratios[1]:.2f} (PCIe)")
    return "; ".join(rows)


_ABOUT = """# What if: fifty RTX 3080 against four H100

`make what-if` makes this page, `what-if.json` and the picture: nothing on it was measured. Each row is what
`fusion-peer plan JOB --swarm SWARM --line-mbps RATE` says, by the search, the step model and the simulator that place real jobs.
Swarms: {swarms}. Jobs: `examples/bert-large.toml`, `examples/gpt2-xl.toml`, `examples/gpt3-width.toml`.

![throughput and throughput per dollar against the rate of the lines](what-if.png)

## Assumptions

* **Devices**: peaks, memory and prices of `runtime/placing/devices.toml`, which names their sources. Prices are those of the cards
  alone, at launch or as analysts put them, in dollars of their year: no machines, power, network or used cards.
* **Efficiency**: every device reaches half of its peak, whatever it computes and however small the pieces (FusionAI's lambda). It is the
  same for both sides, so it cancels where compute binds. A fiftieth of a model in microbatches of one sequence would in truth reach less.
* **Links**: a home has one line of the given rate up and down, which all its traffic shares, 10 ms from the exchange; the H100 have
  NVLink in one machine ("as it stands"), or lines as the homes have them. No loss, no ramp-up, no other traffic.
* **Training**: float32 as the planes compute it (no TF32), AdamW, one sequence a microbatch, 512 microbatches a step, 1F1B; what autograd
  keeps is kept, not recomputed; one pipeline, no data parallel copies. Steps are synchronous: the pipeline fills and drains in each.
* **BERT-Large** is a GPT of its shape: as many weights and products, but for the head over every position.
* **Codec** int8: activations and gradients in blocks of 8 bits, at the speeds of `compression/reference_speeds.py` on one CPU core.
* Peers never leave.

## Found

Sequences a second are those of the simulated step; "of 4 H100" is against the machine as it stands.

"""

_READING = """
## Beside the paper's claim

FusionAI ([arXiv 2309.01172](https://arxiv.org/abs/2309.01172)) says by its performance analysis that 50 RTX 3080 reach throughputs
comparable to those of 4 H100.

* **By peaks alone** 50 RTX 3080 have these multiples of 4 H100: {peaks}. "Comparable" is what the peaks of matrix units in half precision
  say, most closely of the PCIe card; in float32, which a job computes in unless it says otherwise, the consumer cards are far ahead, as an H100's strength
  is in its matrix units. With one efficiency for both, a model in which compute binds must give the ratio of the peaks back.
"""
