from __future__ import annotations

from fusion.compression.adaptive import EdgeUse, choose
from fusion.compression.codec_speed import FAMILIES, measure_families


def test_measured_families_are_what_choosing_takes() -> None:
    speeds = measure_families(elements=10_000)
    assert sorted(speeds) == sorted(FAMILIES)
    assert all(s.encode_bytes_per_second > 0 and s.decode_bytes_per_second > 0 for s in speeds.values())
    slow = EdgeUse(edge="a", direction="forward", elements=1 << 18, itemsize=4, bytes_per_second=1e4)
    assert choose([slow], 100, speeds)["a", "forward"].startswith("topk:")
