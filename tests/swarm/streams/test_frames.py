from __future__ import annotations

import array
import os
import tracemalloc
from typing import Any

import msgpack
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from fusion.swarm.errors import FrameError
from fusion.swarm.streams.frame_parser import SCRATCH_BYTES, FrameParser
from fusion.swarm.streams.frames import (
    DEFAULT_LIMITS,
    END,
    HEAD_BYTES,
    MAX_VALUE_BYTES,
    SHORT_HEADER_BYTES,
    FrameLimits,
    decode_head,
    decode_header,
    encode,
)

SMALL = FrameLimits(header_bytes=200_000, payload_bytes=300_000)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
headers = st.dictionaries(st.text(max_size=10), values, max_size=5)


def wire(kind: str, header: dict[str, Any], *payload: bytes, limits: FrameLimits = DEFAULT_LIMITS) -> bytes:
    head, views, _ = encode(kind, header, payload, limits)
    return b"".join((head, *views))


def feed(parser: FrameParser, data: bytes, sizes: list[int]) -> None:
    """Hand `data` to the parser in reads of at most the given sizes, over and over."""
    at = turn = 0
    while at < len(data):
        room = parser.room()
        count = min(sizes[turn % len(sizes)], len(room), len(data) - at)
        assert count > 0
        room[:count] = data[at : at + count]
        parser.advance(count)
        at += count
        turn += 1


# The pure part.


@settings(max_examples=examples(100))
@given(
    kind=st.text(min_size=1, max_size=20),
    header=headers,
    payload=st.lists(st.binary(max_size=50), max_size=3),
)
def test_a_frame_survives_the_wire(kind: str, header: dict[str, Any], payload: list[bytes]) -> None:
    data = wire(kind, header, *payload)
    header_bytes, payload_bytes = decode_head(data)
    assert payload_bytes == len(b"".join(payload))
    assert decode_header(data[HEAD_BYTES : HEAD_BYTES + header_bytes]) == (kind, header)
    assert data[HEAD_BYTES + header_bytes :] == b"".join(payload)


@settings(max_examples=examples(300))
@given(data=st.binary(max_size=100))
def test_arbitrary_bytes_are_a_header_or_a_frame_error(data: bytes) -> None:
    try:
        kind, header = decode_header(data)
    except FrameError:
        return
    assert kind and all(isinstance(key, str) for key in header)


@pytest.mark.parametrize(
    "value",
    [
        ["k", {"a": msgpack.ExtType(5, b"x")}],
        ["k", {"a": msgpack.ExtType(5, b"")}],
        ["k", {"a": msgpack.Timestamp(5, 0)}],
        ["k", {b"bytes": 1}],
        ["k", {"deep": {1: 2}}],
        ["k", {"deep": [{b"x": 1}]}],
        ["k", []],
        ["k"],
        ["", {}],
        ["k" * 65, {}],
        [b"k", {}],
        {"k": {}},
        None,
    ],
)
def test_what_is_not_a_header(value: object) -> None:
    with pytest.raises(FrameError):
        decode_header(msgpack.packb(value))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92\xa1k",
        b"\x92\xa1k\x80\x80",
        b"\x92\xa1\xff\x80",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa1k\x81\xa1a" + b"\x91" * 100_000 + b"\xc0",
        b"\x92\xa1k\x81\xa1a" + b"\x91" * 500 + b"\xc0",
        b"\x92\xa1k\xdf\xff\xff\xff\xff",
    ],
)
def test_bytes_that_are_no_header(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_header(data)


@pytest.mark.parametrize("empty", [b"\x80", b"\x90"], ids=["maps", "lists"])
def test_a_header_of_empties_is_given_up_before_it_fills_the_memory(empty: bytes) -> None:
    count = 256 * 1024 - 20
    data = b"\x92\xa1k\x81\xa1a\xdd" + count.to_bytes(4, "big") + empty * count
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="lists and maps"):
            decode_header(data)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(data)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "element",
    [
        b"\x80",
        b"\x90",
        b"\xa2ab",
        b"\xa2\xc3\xa9",
        b"\x81\xa1a\x80",
        b"\x91\x91\x90",
        b"\xca\x3f\x80\x00\x00",
        b"\xcd\x7f\xff",
    ],
)
def test_a_short_header_has_no_room_for_too_much(element: bytes) -> None:
    """It is not looked at while it is made."""
    count = (SHORT_HEADER_BYTES - 8) // len(element)
    data = b"\x92\xa1k\x81\xa1a\xdc" + count.to_bytes(2, "big") + element * count
    tracemalloc.start()
    try:
        _, header = decode_header(data)
        assert len(header["a"]) == count and tracemalloc.get_traced_memory()[1] < MAX_VALUE_BYTES
    finally:
        tracemalloc.stop()


def test_a_header_of_short_texts_is_given_up_before_it_fills_the_memory() -> None:
    short = {"a": ["%02x" % (n % 256) for n in range(86_000)]}
    with pytest.raises(FrameError, match="bytes of memory"):
        decode_header(msgpack.packb(["k", short]))
    parts = {"a": [["%02x" % (n % 256) for n in range(500)] for _ in range(150)]}
    with pytest.raises(FrameError, match="bytes of memory"):
        decode_header(msgpack.packb(["k", parts]))
    names = {"a": {f"{n:x}": n for n in range(30_000)}}
    with pytest.raises(FrameError, match="bytes of memory"):
        decode_header(msgpack.packb(["k", names]))


@pytest.mark.parametrize(
    "header",
    [
        {
            "answered": [150_000 + n for n in range(30_000)],
            "logit_bias": [[n + 300, 0.5] for n in range(1024)],
        },
        {
            "of": [
                {"session": f"{n:032x}", "start": 900, "length": 16, "sample": True, "number": 400}
                | {"guesses": [100_000 + k for k in range(15)]}
                for n in range(1024)
            ]
        },
        {"route": [[f"12D3KooW{n:044x}", 1000] for n in range(4090)]},
        {"owners": [f"12D3KooW{n:044x}" for n in range(4096)], "busy": [0.5] * 4096},
    ],
    ids=["answered", "chunks", "route", "progress"],
)
def test_the_largest_headers_that_are_sent_have_room(header: dict[str, Any]) -> None:
    data = wire("k", header)
    assert decode_header(data[HEAD_BYTES:]) == ("k", header)


@pytest.mark.parametrize("value", ["ab", []], ids=["texts", "lists"])
def test_unread_frames_take_no_more_memory_than_is_counted(value: object) -> None:
    data = wire("k", {"a": [value] * 4000}) * 4
    parser = FrameParser()
    tracemalloc.start()
    try:
        feed(parser, data, [1000])
        assert parser.ready == 4 and parser.ready_bytes == len(data)
        assert tracemalloc.get_traced_memory()[0] < len(data) + 8192
    finally:
        tracemalloc.stop()
    assert parser.take()[1] == len(data) // 4
    assert parser.ready_bytes == len(data) * 3 // 4


def test_a_header_msgpack_cannot_carry_is_the_callers_mistake() -> None:
    for bad in ({"a": object()}, {"a": 1 << 70}, {"a": {1, 2}}):
        with pytest.raises(ValueError, match="'k' frame"):
            encode("k", bad, ())
    for kind in ("", "k" * 65):
        with pytest.raises(FrameError, match="kind"):
            encode(kind, {}, ())


def test_caps_hold_for_what_we_send() -> None:
    with pytest.raises(FrameError, match="a header of"):
        encode("k", {"a": "x" * SMALL.header_bytes}, (), SMALL)
    with pytest.raises(FrameError, match="a payload of 300001 bytes"):
        encode("k", {}, (bytes(300_000), b"x"), SMALL)
    encode("k", {}, (bytes(300_000),), SMALL)


def test_payload_parts_are_flat_bytes_without_a_copy() -> None:
    numbers = array.array("f", [1.0, 2.0])
    _, views, size = encode("k", None, (numbers, b"", bytearray(b"xy")))  # type: ignore[arg-type]
    assert size == 10 and [view.nbytes for view in views] == [8, 2]
    numbers[0] = 3.0
    assert bytes(views[0]) == numbers.tobytes()
    with pytest.raises(ValueError, match="contiguous"):
        encode("k", None, (memoryview(b"abcd")[::2],))


@pytest.mark.parametrize(
    "limits",
    [{"header_bytes": 0}, {"header_bytes": 1 << 30}, {"payload_bytes": -1}, {"payload_bytes": 1 << 50}],
)
def test_limits_are_checked(limits: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        FrameLimits(**limits)


# The parser.


@settings(max_examples=examples(60))
@given(
    payloads=st.lists(st.one_of(st.integers(0, 40), st.integers(0, 200_000)), max_size=6),
    long_header=st.booleans(),
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=4),
    ends=st.booleans(),
)
def test_any_cut_of_the_bytes_gives_the_same_frames(
    payloads: list[int], long_header: bool, sizes: list[int], ends: bool
) -> None:
    if min(sizes) < 1000:
        payloads = [min(size, 5000) for size in payloads]  # a byte at a time is slow enough with these
    header = {"text": "x" * (100_000 if long_header and min(sizes) >= 1000 else 10)}
    bodies = [os.urandom(size) for size in payloads]
    data = b"\x03abc" + b"".join(wire(str(n), header, body) for n, body in enumerate(bodies, 1))
    parser = FrameParser(preamble=True)
    feed(parser, data + (END + b"whatever follows" if ends else b""), sizes)
    assert parser.preamble == b"abc"
    assert parser.ended is ends
    assert parser.ready_bytes == len(data) - 4
    for number, body in enumerate(bodies, 1):
        frame, size = parser.take()
        assert (frame.kind, frame.header, bytes(frame.payload)) == (str(number), header, body)
        assert not frame.payload.readonly and size > len(body)
    assert not parser.ready and parser.ready_bytes == 0


@pytest.mark.parametrize(
    "head",
    [
        (SMALL.header_bytes + 1).to_bytes(4, "big") + bytes(8),
        (5).to_bytes(4, "big") + (SMALL.payload_bytes + 1).to_bytes(8, "big"),
        (5).to_bytes(4, "big") + b"\xff" * 8,
        bytes(4) + (1).to_bytes(8, "big"),
    ],
)
def test_lengths_over_the_caps_are_refused_at_once(head: bytes) -> None:
    with pytest.raises(FrameError):
        feed(FrameParser(SMALL), head, [len(head)])


def test_a_preamble_has_a_cap() -> None:
    for start in (b"\xff\xff\xff\xff\xff\x01", b"\xff\xff\x7f"):
        with pytest.raises(FrameError):
            feed(FrameParser(preamble=True), start, [1])


def test_an_announced_payload_costs_nothing_until_it_arrives() -> None:
    head, _, _ = encode("k", {}, (b"x",))
    announced = head[:4] + (512 << 20).to_bytes(8, "big") + head[HEAD_BYTES:]
    before = psutil.Process().memory_info().rss
    parsers = [FrameParser() for _ in range(8)]
    for parser in parsers:
        feed(parser, announced + bytes(1000), [SCRATCH_BYTES])
    grown = psutil.Process().memory_info().rss - before
    assert len(parsers) == 8 and grown < 64 << 20  # of the 4 GiB announced
