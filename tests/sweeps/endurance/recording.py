"""The frames of honest peers: recorded ones, and plain ones of kinds that the recording does not have."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from fusion.runtime.job.protocol import GENERATE, HOLD, JOB, STATUS
from fusion.swarm.protocol import BLOB, PROBE

FRAMES = Path(__file__).parents[2] / "runtime" / "recorded" / "frames.txt"

Message = tuple[str, dict[str, Any], bytes]  # kind, header, payload


def recorded() -> list[tuple[str, list[Message]]]:
    """Each recorded stream: its protocol, and the frames of its opener. Payloads are zeros of the recorded length."""
    streams: list[tuple[str, list[Message]]] = []
    for line in FRAMES.read_text().splitlines():
        if line.startswith("/"):
            streams.append((line.split()[0], []))
        elif line.startswith("  ->"):
            _, kind, _, size, _, header = line.split(maxsplit=5)
            streams[-1][1].append((kind, json.loads(header, object_hook=_bytes_again), bytes(int(size))))
    return [(protocol, said) for protocol, said in streams if said]


def _bytes_again(header: dict[str, Any]) -> dict[str, Any]:
    """The recording shows bytes as hexadecimal text: those of sealed claims and signatures are longer than a digest."""
    return {
        name: bytes.fromhex(value) if isinstance(value, str) and len(value) > 64 and _is_hex(value) else value
        for name, value in header.items()
    }


def _is_hex(text: str) -> bool:
    return len(text) % 2 == 0 and set(text) <= set("0123456789abcdef")


def plain() -> list[tuple[str, list[Message]]]:
    """Frames of the kinds that the recording does not have."""
    job, peer = "0" * 64, "12D3KooWPPnhV"
    stop = {"job": job, "time": 1e9, "signature": b"x" * 64}
    hold = {"job": job, "stage": 0, "peer": peer, "term": 2, "yours": True}
    ping = {"coordinate": [0.0, 0.0, 0.0, 1.0], "error": 0.5}
    report = {
        "bytes": 1 << 16,
        "seconds": 0.1,
        "bytes_per_second": 1e9,
        "sure": True,
        "sharers": 1,
        "together": 1,
    }
    return [
        (JOB.name, [("launch", {"job": job}, b"")]),
        (JOB.name, [("watch", {"job": job}, b"")]),
        (JOB.name, [("stop", stop, b"")]),
        (JOB.name, [("snapshot", {"record": b"\x94\xc4\x01\xc0"}, b"")]),
        (HOLD.name, [("holds", {"job": job, "stage": 0}, b"")]),
        (HOLD.name, [("suspect", hold, b"")]),
        (HOLD.name, [("take", {"job": job, "stage": 0, "term": 2, "handover": {"step": 1}}, b"")]),
        (STATUS.name, [("status", {}, b"")]),
        (PROBE.name, [("ping", ping, b""), ("want", {"bytes": 1 << 16, "pressed": True}, b""),
                      ("train", {}, bytes(4096)), ("report", report, b"")]),
        (BLOB.name, [("put", {"digest": job}, b"z" * 100)]),
        (GENERATE.name, [("generate", {"model": "answers", "prompt": "ids", "max_tokens": 10**12, "temperature": 0.0,
                                       "top_k": 0, "top_p": 1.0, "seed": 0, "logits": False}, struct.pack("<2q", -1, 2))]),
    ]  # fmt: skip
