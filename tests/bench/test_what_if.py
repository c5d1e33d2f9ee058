"""The study of docs/what-if.md on small models and swarms: its structure, and models that do not fit."""

from __future__ import annotations

import pytest
from bench import what_if
from bench.what_if import Case, Study, captured, cases, compute_alone, fewest, outcome
from bench.what_if_page import page

from fusion.runtime.placing import swarm_file

JOB = """
name = "{name}"
[model]
kind = "gpt"
blocks = 2
width = 64
[data]
files = ["text.txt"]
held_out = 0.0
[train]
steps = 1
sequence = 32
microbatches = 4
"""
PEERS = '[[peers]]\nname = "{name}"\ncount = {count}\ndevice = "{device}"\nmemory = "{memory}"\n[default]\nrtt_ms = 1\n'


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("examples")
    (folder / "text.txt").write_text("a text")
    (folder / "small.toml").write_text(JOB.format(name="small"))
    for name, count, device, memory in (
        (what_if.HOMES, 3, "rtx-3080", "1GiB"),
        (what_if.CENTRE, 2, "h100-sxm", "1GiB"),
        ("short", 2, "h100-sxm", "1MiB"),
    ):
        text = PEERS.format(name="p", count=count, device=device, memory=memory)
        (folder / f"{name}.toml").write_text(text)
    return Study(folder, captured(folder, "small"))


def test_a_plan_for_each_rate_and_codec_faster_over_faster_lines_and_never_beyond_what_all_compute(study):
    asked = cases(["small"], (0.1, 1e5))
    found = [outcome(study, case) for case in asked]
    assert len(found) == 10 and all("misfit" not in plan for plan in found)
    swarm = swarm_file.load(study.examples / f"{what_if.HOMES}.toml")
    for precision, codec in (("float32", "none"), ("bf16", "none"), ("bf16", "int8")):
        most = compute_alone(study, "small", swarm, precision)
        kind = (what_if.HOMES, precision, codec)
        slow, fast = (p for p in found if (p["swarm"], p["precision"], p["codec"]) == kind)
        assert (
            slow["sequences_per_second"] <= fast["sequences_per_second"] * (1 + 1e-9)
            and fast["sequences_per_second"] <= most
        )
        per = slow["sequences_per_second"] / slow["price_usd"] * 1000
        assert slow["price_usd"] == 3 * 699 and slow["sequences_per_second_per_1000_usd"] == pytest.approx(
            per
        )


def test_what_does_not_fit_says_so_and_how_many_would_do(study, monkeypatch):
    found = outcome(study, Case(job="small", swarm="short"))
    assert "does not fit" in found["misfit"] and "sequences_per_second" not in found
    assert fewest(study, "small", "rtx-3080")["peers"] == 1
    tried = []

    def fits(study, job, device, count):
        tried.append(count)
        return {"stages": count} if count >= 11 else {"misfit": "too little"}

    monkeypatch.setattr(what_if, "_fits", fits)
    assert fewest(study, "small", "rtx-3080")["peers"] == 11
    assert fewest(study, "small", "rtx-3080", most=8)["peers"] is None
    assert len(tried) < 16


def test_the_page_has_a_row_for_every_plan(study):
    plans = [outcome(study, case) for case in cases(["small"], (100.0,))]
    plans.append(outcome(study, Case(job="small", swarm="short", mbps=10.0)))
    swarms = {n: {"peers": 1, "device": "d", "price_usd": 5.0} for n in (what_if.HOMES, what_if.CENTRE)}
    alone = {name: {"float32": 1.0, "bf16": 2.0} for name in swarms}
    text = page(
        {
            "mbps": [100.0],
            "jobs": {"small": {"compute_alone": alone}},
            "swarms": swarms,
            "plans": plans,
            "fewest": [],
        }
    )
    rows = [line for line in text.split("\n") if line.startswith("| small |") and line.count("|") == 15]
    assert len(rows) == len(plans)
    assert "does not fit with 4 microbatches: it needs at least" in text and "fits both" in text
