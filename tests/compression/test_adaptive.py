from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.compression.adaptive import Choice, CodecSpeed, Direction, EdgeUse, choose, payload_bytes
from fusion.compression.codec import codec
from fusion.compression.spec import MAX_MILLIONTHS, MIN_MILLIONTHS, parse

FAST = CodecSpeed(encode_bytes_per_second=math.inf, decode_bytes_per_second=math.inf)
TOPK = {"topk": FAST}
ALL = {"fp16": FAST, "int8": FAST, "topk": FAST}
MBPS = 1e6 / 8


def use(edge: str, mbps: float, direction: Direction = "forward", elements: int = 1 << 18) -> EdgeUse:
    return EdgeUse(
        edge=edge, direction=direction, elements=elements, itemsize=4, bytes_per_second=mbps * MBPS
    )


def both(edge: str, mbps: float, back: float | None = None, elements: int = 1 << 18) -> list[EdgeUse]:
    return [use(edge, mbps, "forward", elements), use(edge, back or mbps, "backward", elements)]


def finish(uses: list[EdgeUse], chosen: Choice, reuse_mask: bool) -> dict[str, float]:
    """Seconds in which each sparse edge (with `reuse_mask`) or sparse use is done."""
    found: dict[str, float] = {}
    for one in uses:
        spec = parse(chosen[one.edge, one.direction])
        if spec.family == "topk" and MIN_MILLIONTHS < spec.millionths < MAX_MILLIONTHS // 1000 * 1000:
            key = one.edge if reuse_mask else f"{one.edge} {one.direction}"
            busy = one.busy_seconds(payload_bytes(one, spec, reuse_mask=reuse_mask))
            found[key] = max(found.get(key, 0.0), busy)
    return found


@given(
    st.lists(
        st.tuples(st.floats(1, 10_000), st.floats(1, 10_000), st.integers(20_000, 1 << 22)),
        min_size=2,
        max_size=9,
    ),
    st.floats(1, 100),
    st.booleans(),
    st.sampled_from(("fp16", "int8")),
)
@settings(max_examples=examples(150))
def test_compressed_links_finish_within_a_tenth_of_each_other(
    links: list[tuple[float, float, int]], ratio: float, reuse_mask: bool, values: str
) -> None:
    uses = [u for i, (up, down, n) in enumerate(links) for u in both(f"edge{i}", up, down, n)]
    kept = "int8" if values == "int8" else "fp16"
    chosen = choose(uses, ratio, TOPK, reuse_mask=reuse_mask, values=kept)
    assert set(chosen) == {(u.edge, u.direction) for u in uses}
    target = max(u.busy_seconds(u.dense_bytes) for u in uses) / ratio
    seconds = finish(uses, chosen, reuse_mask)
    assert all(0.9 * target <= s <= target for s in seconds.values())
    assert not seconds or max(seconds.values()) <= 1.1 * min(seconds.values())
    for (
        one
    ) in uses:  # nothing that is chosen ends later than dense would, and what need not be is not touched
        spec = parse(chosen[one.edge, one.direction])
        busy, dense = one.busy_seconds(payload_bytes(one, spec)), one.busy_seconds(one.dense_bytes)
        assert busy <= dense
        if not reuse_mask and dense <= target:
            assert str(spec) == "none"


def test_the_slowest_is_compressed_by_the_ratio_and_the_fast_not_at_all() -> None:
    uses = [use("slow", 8), use("middle", 40), use("fast", 1000)]
    chosen = choose(uses, 20, TOPK)
    slow, middle = parse(chosen["slow", "forward"]), parse(chosen["middle", "forward"])
    assert (1 << 20) / slow.payload_bytes(1 << 18, 4) == pytest.approx(20, rel=0.02)
    assert (1 << 20) / middle.payload_bytes(1 << 18, 4) == pytest.approx(4, rel=0.02)
    assert chosen["fast", "forward"] == "none"


def test_planned_bytes_are_what_the_codec_sends() -> None:
    import torch

    from fusion.compression.codec import Sparse

    uses = both("slow", 8)
    spec = choose(uses, 30, TOPK)["slow", "forward"]
    one = codec(spec)
    assert isinstance(one, Sparse)
    there = one.encode(torch.randn(1 << 18))
    back = one.encode_at(torch.randn(1 << 18), there.indices)
    assert [there.payload_bytes, back.payload_bytes] == [payload_bytes(u, parse(spec)) for u in uses]


def test_ratio_one_and_no_links_compress_nothing() -> None:
    assert choose([], 10, ALL) == {}
    assert set(choose(both("a", 8) + both("b", 80), 1, ALL).values()) == {"none"}
    assert set(choose([use("a", math.inf)], 10, ALL).values()) == {"none"}


def test_what_computing_hides_is_not_compressed() -> None:
    uses = [use("slow", 8), use("fast", 100)]
    dense = uses[0].busy_seconds(uses[0].dense_bytes)
    assert set(choose(uses, 100, ALL, compute_seconds=dense).values()) == {"none"}
    half = choose(uses, 100, ALL, compute_seconds=dense / 1.9)
    assert half == {("slow", "forward"): "fp16", ("fast", "forward"): "none"}


def test_the_gentlest_that_is_enough_is_taken() -> None:
    uses = [use("slow", 8), use("int8", 25), use("fp16", 45), use("none", 81)]
    chosen = choose(uses, 10, ALL)
    assert [chosen[name, "forward"] for name in ("int8", "fp16", "none")] == ["int8", "fp16", "none"]
    assert chosen["slow", "forward"].startswith("topk:")


def test_a_link_faster_than_the_codec_stays_dense() -> None:
    uses = [use("slow", 8), use("fast", 2000)]
    speed = CodecSpeed(encode_bytes_per_second=100e6, decode_bytes_per_second=300e6)
    chosen = choose(uses, 1000, {"topk": speed})
    assert chosen["slow", "forward"].startswith("topk:") and chosen["fast", "forward"] == "none"
    assert choose(uses, 1000, TOPK)["fast", "forward"].startswith("topk:")


def test_a_tensor_too_small_for_its_codec_stays_dense() -> None:
    chosen = choose([use("tiny", 0.001, elements=1), use("slow", 0.01)], 2, {"fp16": FAST, "topk": FAST})
    assert chosen["tiny", "forward"] == "none"


def test_without_topk_the_strongest_helps_as_far_as_it_can() -> None:
    assert choose([use("slow", 8)], 50, {"fp16": FAST, "int8": FAST})["slow", "forward"] == "int8"


def test_one_mask_serves_both_directions_of_a_link_that_is_slow_one_way() -> None:
    uses = [*both("slow", 8), *both("lopsided", 900, 20)]
    masked = choose(uses, 20, TOPK)
    assert masked["lopsided", "forward"] == masked["lopsided", "backward"] != "none"
    alone = choose(uses, 20, TOPK, reuse_mask=False)
    assert alone["lopsided", "forward"] == "none" != alone["lopsided", "backward"]


def test_a_shared_uplink_counts_as_the_part_that_an_edge_has() -> None:
    one = use("a", 80)
    assert replace(one, uplink_share=0.1).busy_seconds(1000) == pytest.approx(use("b", 8).busy_seconds(1000))


@pytest.mark.parametrize("ratio", [0.5, 0, -1, math.nan, math.inf])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(ValueError, match="ratio must be"):
        choose([use("a", 8)], ratio, ALL)


@pytest.mark.parametrize(
    "change", [{"bytes_per_second": 0}, {"uplink_share": 0}, {"uplink_share": 1.5}, {"elements": -1}]
)
def test_an_edge_that_cannot_be_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="edge 'a'"):
        replace(use("a", 8), **change)  # type: ignore[arg-type]


@pytest.mark.process
def test_choosing_needs_no_torch() -> None:
    code = "import sys, fusion.compression.adaptive; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
