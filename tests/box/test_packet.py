"""Super-packets counted and cut as the kernel would have cut them."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from box import packet
from hypothesis import given
from hypothesis import strategies as st

SOURCE, TARGET = bytes((10, 77, 0, 1)), bytes((10, 77, 0, 2))


def checksum(data: bytes) -> int:
    """RFC 1071, over whole words."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    return ~(total % 0xFFFF or 0xFFFF) & 0xFFFF


def super_packet(payload: bytes, gso_size: int, options: int = 12) -> bytes:
    """IPv4 and TCP (sequence 2^32 - 100, identifier 65535, CWR, PSH, FIN and ACK set), as from a TUN device."""
    tcp_bytes = 20 + options
    size = 20 + tcp_bytes + len(payload)
    ip = struct.pack("!BBHHHBBH4s4s", 0x45, 0, size, 65535, 0x4000, 64, 6, 0, SOURCE, TARGET)
    ip = ip[:10] + struct.pack("!H", checksum(ip)) + ip[12:]
    tcp = struct.pack("!HHIIBBHHH", 1, 2, 2**32 - 100, 7, tcp_bytes // 4 << 4, 0x99, 512, 0, 0)
    head = packet.VNET.pack(1, packet.GSO_TCP4, 20 + tcp_bytes, gso_size, 20, 16)
    return head + ip + tcp + bytes(options) + payload


@given(
    st.binary(min_size=1449, max_size=6000),
    st.integers(100, 1448),
    st.integers(0, 10).map(lambda n: 4 * n),
    st.data(),
)
def test_the_parts_of_a_packet_are_the_packet(
    payload: bytes, gso_size: int, options: int, data: st.DataObject
) -> None:
    whole = super_packet(payload, gso_size, options)
    count = packet.segments(whole)
    assert count == -(-len(payload) // gso_size)
    assert packet.wire_bytes(whole) == count * (40 + options) + len(payload)
    assert packet.target(whole) == TARGET
    cuts = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=4))})
    carried = wire = 0
    for begin, end in pairwise(cuts):
        piece = packet.part(whole, begin, end)
        ip, tcp = piece[packet.IP : packet.IP + 20], piece[packet.IP + 20 : packet.IP + 40 + options]
        body = piece[packet.IP + 40 + options :]
        assert body == payload[carried : carried + len(body)]
        assert struct.unpack_from("!HH", ip, 2) == (len(piece) - packet.IP, (65535 + begin) & 0xFFFF)
        assert checksum(ip) == 0
        assert struct.unpack_from("!I", tcp, 4)[0] == (2**32 - 100 + carried) % 2**32
        assert tcp[13] == 0x10 | (0x80 if begin == 0 else 0) | (0x09 if end == count else 0)
        pseudo = SOURCE + TARGET + struct.pack("!HH", 6, len(piece) - packet.IP - 20)
        assert struct.unpack_from("!H", tcp, 16)[0] == ~checksum(pseudo) & 0xFFFF
        assert packet.segments(piece) == end - begin
        assert (piece[1] == packet.GSO_NONE) == (end - begin == 1)
        carried += len(body)
        wire += packet.wire_bytes(piece)
    assert carried == len(payload) and wire == packet.wire_bytes(whole)


def test_what_is_not_ipv4_has_no_target() -> None:
    assert packet.target(bytes(packet.IP) + bytes([0x60]) + bytes(39)) is None


@pytest.mark.parametrize("size", [20, 1500])
def test_a_plain_packet_is_one_segment_of_its_size(size: int) -> None:
    plain = bytes(packet.IP) + bytes([0x45]) + bytes(size - 1)
    assert (packet.segments(plain), packet.wire_bytes(plain)) == (1, size)
