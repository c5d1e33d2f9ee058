"""Packets of a TUN device with IFF_VNET_HDR: IPv4 behind a `struct virtio_net_hdr`.

The kernel leaves the cutting of long TCP sends to the device (TSO): up to 64 KiB of payload come as one super-packet
with one header, to be cut into segments of `gso_size` bytes. On a fast link it goes on as it is, which is what makes
1 Gbps possible here; on a slow one it is cut, so that it does not pass as a burst. Its checksums are the kernel's to
finish (VIRTIO_NET_HDR_F_NEEDS_CSUM).
"""

from __future__ import annotations

import struct

VNET = struct.Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
IP = VNET.size  # where the IP header begins
GSO_NONE, GSO_TCP4, GSO_ECN = 0, 1, 0x80
FIN_PSH, CWR = 0x09, 0x80


def target(packet: bytes) -> bytes | None:
    """The destination address of an IPv4 packet; None for other packets."""
    return packet[IP + 16 : IP + 20] if packet[IP] >> 4 == 4 else None


def segments(packet: bytes) -> int:
    """How many packets the kernel would have sent without TSO."""
    gso_size = packet[4] | packet[5] << 8
    if packet[1] == GSO_NONE or not gso_size:
        return 1
    return -(-(len(packet) - IP - _header_bytes(packet)) // gso_size)


def wire_bytes(packet: bytes) -> int:
    """The IP bytes of a packet on the wire, where each segment has a header of its own."""
    size = len(packet) - IP
    count = segments(packet)
    return size if count == 1 else size + (count - 1) * _header_bytes(packet)


def part(packet: bytes, begin: int, end: int) -> bytes:
    """The segments begin .. end - 1 of a super-packet, as one packet."""
    flags, gso_type, header_bytes, gso_size, checksum_at, offset = VNET.unpack_from(packet)
    length = _header_bytes(packet)
    total = len(packet) - IP - length
    payload = packet[IP + length + begin * gso_size : IP + length + min(end * gso_size, total)]
    header = bytearray(packet[IP : IP + length])
    tcp = (header[0] & 15) * 4
    size = length + len(payload)
    identifier, sequence = (
        struct.unpack_from("!H", header, 4)[0],
        struct.unpack_from("!I", header, tcp + 4)[0],
    )
    struct.pack_into("!HH", header, 2, size, (identifier + begin) & 0xFFFF)
    struct.pack_into("!H", header, 10, 0)
    struct.pack_into("!H", header, 10, ~_sum(header[:tcp]) & 0xFFFF)
    struct.pack_into("!I", header, tcp + 4, (sequence + begin * gso_size) & 0xFFFFFFFF)
    if end * gso_size < total:
        header[tcp + 13] &= ~FIN_PSH
    if begin:
        header[tcp + 13] &= ~CWR
    # The kernel finishes the checksum from the sum of the pseudo-header, which holds the length.
    pseudo = bytes(header[12:20]) + struct.pack("!HH", header[9], size - tcp)
    struct.pack_into("!H", header, tcp + 16, _sum(pseudo))
    if end - begin == 1 or len(payload) <= gso_size:
        gso_type, gso_size = GSO_NONE, 0
    return VNET.pack(flags, gso_type, header_bytes, gso_size, checksum_at, offset) + bytes(header) + payload


def _header_bytes(packet: bytes) -> int:
    """The bytes of the IP and TCP headers of a super-packet."""
    tcp = (packet[IP] & 15) * 4
    return tcp + (packet[IP + tcp + 12] >> 4) * 4


def _sum(data: bytes | bytearray) -> int:
    """The one's complement sum of RFC 1071, not inverted, of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
