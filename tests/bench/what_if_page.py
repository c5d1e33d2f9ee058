"""The results of the study of `bench.what_if` as a page and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion.runtime.placing.device_table import device_table

Found = Mapping[str, Any]


def page(found: Found) -> str:
    parts = [
        _ABOUT.format(swarms=_swarms(found), alone=_alone(found)),
        _rows(found),
        "\n## Where memory decides\n\n",
        _fewest(found),
    ]
    return "".join(parts) + _READING.format(peaks=_peaks(), reached=_reached(found))


def _swarms(found: Found) -> str:
    return "; ".join(
        f"`examples/{name}.toml` ({each['peers']} x {each['device']}, ${each['price_usd']:,.0f})"
        for name, each in found["swarms"].items()
    )


def _alone(found: Found) -> str:
    """The table of throughputs that arithmetic alone would allow."""
    lines = [
        "If all did arithmetic all the time, sequences/s of the homes and of the machine, and their ratio:",
        "",
    ]
    for job, about in found["jobs"].items():
        homes, centre = about["compute_alone"].values()
        each = (f"{p} {homes[p]:.3g} and {centre[p]:.3g} ({homes[p] / centre[p]:.2f})" for p in homes)
        lines.append(f"* {job}: {', '.join(each)}")
    return "\n".join(lines)


def _rows(found: Found) -> str:
    head = ("job", "peers", "line", "precision", "codec", "sequences/s", "of 4 H100", "per $1000", "of 4 H100", "stages", "a step, s: model", "simulated", "bound", "what binds")  # fmt: skip
    lines = [_line(head), _line(["---"] * len(head))]
    told = set()
    for plan in found["plans"]:
        rate = "as it stands" if plan["mbps"] is None else _rate(plan["mbps"])
        first = (plan["job"], plan["swarm"], rate, plan["precision"], plan["codec"])
        if "misfit" in plan:
            if (plan["job"], plan["series"]) in told:
                continue
            told.add((plan["job"], plan["series"]))
            first = (*first[:2], "any", *first[3:])
            lines.append(_line((*first, "-", "", "", "", "", "", "", "", _short(plan["misfit"]))))
            continue
        base = _base(found, plan)
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


def _reached(found: Found) -> str:
    """The homes' best throughput with any codec over the machine's, absolute and for each dollar, by rate."""
    head = ("job", "precision", *map(_rate, found["mbps"]))
    lines = [_line(head), _line(["---"] * len(head))]
    for job in found["jobs"]:
        for precision in dict.fromkeys(plan["precision"] for plan in found["plans"]):
            plans = [p for p in found["plans"] if (p["job"], p["precision"]) == (job, precision)]
            homes = [p for p in plans if "misfit" not in p and p["swarm"] != plans[0]["swarm"]]
            if not homes:
                continue
            best = [
                max((p for p in homes if p["mbps"] == rate), key=lambda p: p["sequences_per_second"])
                for rate in found["mbps"]
            ]
            keys = ("sequences_per_second", "sequences_per_second_per_1000_usd")
            cells = (" / ".join(_ratio(p, _base(found, p), key) for key in keys) for p in best)
            lines.append(_line((job, precision, *cells)))
    return "\n".join(lines)


def _fewest(found: Found) -> str:
    if not found["fewest"]:
        return "Every model fits both swarms.\n"
    head = ("job", "device", "fewest that hold it", "stages", "price", "sequences/s, links free")
    lines = [_line(head), _line(["---"] * len(head))]
    for each in found["fewest"]:
        if each["peers"] is None:
            lines.append(_line((each["job"], each["device"], f"none: {_short(each['misfit'])}", "", "", "")))
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


def _base(found: Found, asked: Found) -> Found | None:
    """The plan on the machine of the swarm file, in the same precision."""
    for plan in found["plans"]:
        same = (plan["job"], plan["precision"]) == (asked["job"], asked["precision"])
        if same and plan["mbps"] is None and "misfit" not in plan:
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
                style = ":" if base["precision"] == "float32" else "--"
                at.axhline(base[key], color="black", linewidth=1, linestyle=style, label=base["series"])
            at.set(xscale="log", yscale="log", xlabel="each peer's line, Mbps", ylabel=label, title=job)
            at.grid(alpha=0.3)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
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

* **Devices**: peaks, memory and prices of `runtime/placing/devices.toml`, which names their sources (entered by hand, not checked against them again). Prices are those of the cards
  alone, at launch or as analysts put them, in dollars of their year: no machines, power, network or used cards.
* **Efficiency**: every device reaches half of its peak, whatever it computes and however small the pieces (FusionAI's lambda). It is the
  same for both sides, so it cancels where compute binds. A fiftieth of a model in microbatches of one sequence would in truth reach less.
* **Links**: a home has one line of the given rate up and down, which all its traffic shares, 10 ms from the exchange; the H100 have
  NVLink in one machine ("as it stands"), or lines as the homes have them. No loss, no ramp-up, no other traffic.
* **Training**: AdamW, one sequence a microbatch, 256 microbatches a step, 1F1B; what autograd keeps is kept, not recomputed; one
  pipeline, no data parallel copies. Steps are synchronous: the pipeline fills and drains in each. float32 is what the planes compute,
  without TF32; bf16 has float32 weights and optimizer state (`train.precision`), and two bytes an element on the wire.
* **BERT-Large** is a GPT of its shape: as many weights and products, but for the head over every position.
* **Codec** int8: activations and gradients in blocks of 8 bits, at the speeds of `compression/reference_speeds.py` on one CPU core.
* Peers never leave.

## Found

Sequences a second are those of the simulated step; "of 4 H100" is against the machine as it stands, in the same precision.

{alone}

"""

_READING = """
## Beside the paper's claim

FusionAI ([arXiv 2309.01172](https://arxiv.org/abs/2309.01172)) says by its performance analysis that 50 RTX 3080 reach throughputs
comparable to those of 4 H100, which cost far more. Of the machine's throughput, and of what it gives for a dollar, the homes reach here:

{reached}

**Where it agrees.** By peaks 50 RTX 3080 have these multiples of 4 H100: {peaks}. "Comparable" is what half precision says, of the PCIe card
nearly to the digit. In float32, which a job computes in unless it says otherwise, the homes come to the machine's throughput over the fastest lines, and
for a dollar they give several times as much from 3 Gbps on.

**Where it does not.** Over lines that homes have, the machine is ahead by one to two orders of magnitude; in half precision it stays ahead at any
rate, as an H100's strength is in its matrix units. And of the third model neither swarm holds the weights, gradients and AdamW's state; a
matrix of its feed-forward layer alone is too large for an RTX 3080 however many there are.

**Why.**

* *Link model.* Every stage sends a microbatch's activations on and its gradients back over one line: for GPT-2 XL in float32 13 MB, 105 ms at
  1 Gbps, where a fiftieth of the arithmetic takes 14 ms. Lines bind below 3 Gbps, whatever the cards; int8 moves that by what it takes away.
* *What cannot be cut.* A stage is at least an operator. The product with the vocabulary is about an eleventh of BERT-Large's work and a
  twentieth of GPT-2 XL's, so once lines are fast a pipeline has no use for many more devices than that. An analysis in which fifty devices take a
  fiftieth each promises several times as much; four cards do not meet that limit.
* *Bubbles, latency and memory.* A step fills and drains; with 20 ms between homes a trip through the pipeline and back takes a second and
  more, and hiding it takes microbatches in flight, whose activations fill 10 GiB before the weights do ("latency between stages").
* *Efficiency.* One lambda for all hides what differs: small pieces of one sequence reach less of a peak than large ones, and lambda need not be the same
  for both cards.
* *Schedule.* No data parallelism and no recomputation of activations: eight pipelines of six cards with rare averaging would use more of
  the fifty than one pipeline can. Jobs do not do that yet.

**What the figures are worth.** The closed form by which placements are compared is too fast where a line is nearly always busy and memory allows
few microbatches in flight (columns "model" and "simulated"): both passes share a line, so each takes longer. And the search is no exact one: where a
faster line has a slower row, or int8 one slower than none, it has missed the better placement.
"""
