"""Frames of a memory network as they are sent, stream by stream."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from fusion.swarm.memory.network import MemoryNetwork
from fusion.swarm.streams import frames
from fusion.swarm.transport import PeerId


class Recorder:
    def __init__(self, once: Sequence[str] = ()) -> None:
        self._once = once  # protocols of which equal streams stand there once, whoever opened them
        self._names: dict[PeerId, str] = {}
        self._streams: list[
            tuple[str, str, list[str], list[str]]
        ] = []  # protocol, ends, frames, and with payload

    def listen(self, network: MemoryNetwork, peers: Sequence[PeerId]) -> None:
        """To every stream that is opened from now on; the peers are called by their number."""
        self._names = {peer: f"peer {i}" for i, peer in enumerate(peers)}
        link = network.link

        def opened(opener: Any, peer: PeerId, protocol: str) -> Any:
            near = link(opener, peer, protocol)
            ends = f"{self._name(opener.peer_id)} -> {self._name(peer)}"
            control: list[str] = []
            tensors: list[str] = []
            self._streams.append((protocol, ends, control, tensors))
            for way, pipe in (("->", near._outgoing), ("<-", near._incoming)):
                pipe.put = _heard(pipe.put, way, control, tensors)
            return near

        network.link = opened  # type: ignore[method-assign]

    def text(self) -> str:
        """The streams by name, the frames of each in the order in which they were sent."""
        found = []
        for protocol, ends, control, tensors in self._streams:
            lines = "".join((*control, *tensors))
            if protocol not in self._once:
                found.append(f"{protocol} {ends}\n{lines}")
            elif lines and f"{protocol}\n{lines}" not in found:
                found.append(f"{protocol}\n{lines}")
        return "".join(sorted(found))

    def _name(self, peer: PeerId) -> str:
        return self._names.get(peer, "client")


def _heard(put: Any, way: str, control: list[str], tensors: list[str]) -> Any:
    def heard(head: bytes, payload: bytearray) -> None:
        kind, header = frames.decode_header(memoryview(head)[frames.HEAD_BYTES :])
        shown = json.dumps(header, default=bytes.hex, separators=(",", ":"))
        line = f"  {way} {kind} {_sha(head)} {len(payload)} {_sha(payload) if payload else '-'} {shown}\n"
        (tensors if payload else control).append(line)
        put(head, payload)

    return heard


def _sha(data: bytes | bytearray) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
