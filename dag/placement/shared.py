"""What peers share that run on one machine: its cores, which compute, code and carry messages."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Shared:
    """One machine, by its `name`, on which peers run. `cores` are those that nothing else keeps busy; a message costs
    its sender and its reader together `message_seconds`, `byte_seconds` for each byte and `packet_seconds` for each
    packet, whatever it is sent with."""

    name: str = ""
    cores: float = inf
    message_seconds: float = 0.0
    byte_seconds: float = 0.0
    packet_seconds: float = 0.0

    def carry_seconds(self, bytes_: float, bytes_per_second: float, messages: float = 1) -> float:
        """Of the cores, for messages of so many bytes in all over a link of that rate."""
        costs = self.message_seconds, self.byte_seconds, self.packet_seconds
        return float(carry_seconds(costs, messages, bytes_, bytes_per_second))


ALONE = Shared()  # every peer on a machine of its own, whose transport costs it nothing
SPAN_SECONDS = 1e-3
LEAST_PACKET, MOST_PACKET = 1448.0, 65536.0  # a segment of TCP over Ethernet; what IP can say


def packet_bytes(bytes_per_second: Any) -> Any:
    """That go over a link of that rate at once: Linux gives a link about a millisecond's worth (`tcp_tso_autosize`), so
    that a byte over a slow link costs the cores far more than one over a fast link."""
    return np.clip(np.multiply(SPAN_SECONDS, bytes_per_second), LEAST_PACKET, MOST_PACKET)


def carry_seconds(costs: Any, messages: Any, bytes_: Any, bytes_per_second: Any) -> Any:
    """Of numbers or of arrays; `costs`: those of a message, of a byte and of a packet."""
    message, byte, packet = costs
    return messages * message + bytes_ * (byte + packet / packet_bytes(bytes_per_second))
