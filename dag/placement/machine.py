"""What peers on one machine share: its cores, which compute, encode, decode and carry messages."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine, by its `name`, on which peers run. `cores` are those that are otherwise idle. A message costs sender and
    receiver together `message_seconds`, and `byte_seconds` and `packet_seconds` for each byte and packet."""

    name: str = ""
    cores: float = inf
    message_seconds: float = 0.0
    byte_seconds: float = 0.0
    packet_seconds: float = 0.0

    def carry_seconds(self, bytes_: float, bytes_per_second: float, messages: float = 1) -> float:
        """Core seconds for messages of `bytes_` in all over a link of that rate."""
        costs = self.message_seconds, self.byte_seconds, self.packet_seconds
        return float(carry_seconds(costs, messages, bytes_, bytes_per_second))


SEPARATE_MACHINE = Machine()  # every peer on a machine of its own, whose transport costs it nothing
BURST_SECONDS = 1e-3
MIN_PACKET, MAX_PACKET = 1448.0, 65536.0  # a segment of TCP over Ethernet; the largest IP packet


def packet_bytes(bytes_per_second: Any) -> Any:
    """Bytes that the stack hands to a link at once: Linux sizes it to about a millisecond (`tcp_tso_autosize`), so that a
    byte over a slow link costs the cores far more than one over a fast link."""
    return np.clip(np.multiply(BURST_SECONDS, bytes_per_second), MIN_PACKET, MAX_PACKET)


def carry_seconds(costs: Any, messages: Any, bytes_: Any, bytes_per_second: Any) -> Any:
    """Core seconds, of numbers or of arrays; `costs`: seconds for a message, for a byte and for a packet."""
    message, byte, packet = costs
    return messages * message + bytes_ * (byte + packet / packet_bytes(bytes_per_second))
