"""hivemind's three calls between nodes, as values: ping, store, find. The only file that knows its messages.

The calls keep hivemind's names and form, but not its servicer and decoding: messages are parsed only up to a cap for each call,
and only into numbers and bytes. `service` and `calls` interpret them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import DecodeError
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.proto import auth_pb2, dht_pb2

from fusion.swarm.dht.call_server import Caller, CallServer, Method
from fusion.swarm.dht.guard import Offer
from fusion.swarm.dht.lookup import Node
from fusion.swarm.dht.values import ID_BYTES, node_id
from fusion.swarm.streams.p2pd import Daemon
from fusion.swarm.streams.p2pd_control import public_network
from fusion.swarm.streams.peer_ids import from_bytes, to_bytes, to_hivemind
from fusion.swarm.swarm_key import Authorizer
from fusion.swarm.transport import PeerId
from fusion.swarm.yielding import yielding

logger = logging.getLogger(__name__)

# What a call to another node can raise, from the daemon's socket to the bytes of the answer.
CALL_ERRORS = (P2PDaemonError, P2PHandlerError, DecodeError, OSError, EOFError, TimeoutError, ValueError)

MAX_KEYS = 64  # in one find
MAX_OFFERS = 64  # in one store
MAX_NEIGHBOURS = 20  # near one key
_MAX_PING_BYTES = 1 << 10
_MAX_FIND_BYTES = 4 << 10
# Nodes of former versions offer all their records to a new node; an error would make them drop us, so they get a refusal.
_MAX_STORE_BYTES = 1 << 20
_MAX_ANSWER_BYTES = 2 << 20
_RESULTS_AT_ONCE = 2  # of an answer, before the event loop runs others: new ids take 0.2 ms each
_SUBNET_SECONDS = 1.0  # between two reads of the connected peers' addresses
_NAME = "DHTProtocol.rpc_{}"


@dataclass(frozen=True)
class FoundAt:
    """A node's result for one key: the packed value (None: nothing), and the nodes it knows near it."""

    value: bytes | None
    nearest: Sequence[Node]


class NotOfThisSwarm(ValueError):
    """A peer that has not proven that it holds the key of our swarm. It is sent an empty error."""

    def __repr__(self) -> str:  # sent to the peer by hivemind
        return ""


@dataclass(frozen=True)
class Sender:
    """The caller: `claimed` is the node id in its request, empty for a client. `subnet`: its public network, where that is known, which
    is charged as well, since peer ids are free."""

    peer: PeerId
    claimed: bytes = b""
    subnet: str | None = None


class Server(Protocol):
    """Answers the calls. An exception goes to the sender as one line."""

    def ping(self, sender: Sender) -> None: ...
    def store(self, sender: Sender, offers: Sequence[Offer]) -> list[bool]: ...
    def find(self, sender: Sender, keys: Sequence[int]) -> list[FoundAt]: ...


class P2P(Protocol):
    """hivemind's, over a p2pd that we started (`fusion.swarm.streams.p2pd_control.AttachedP2P`). `authorizer`: of a closed swarm, of which
    only members are called and answered."""

    daemon: Daemon
    authorizer: Authorizer | None

    async def call_protobuf_handler(self, peer_id: Any, name: str, request: Any, kind: Any) -> Any: ...
    async def list_peers(self) -> Any: ...


class Wire:
    """Calls to other nodes over `p2p`, and the server for theirs. `client`: we have no node and answer no calls."""

    def __init__(
        self,
        p2p: P2P,
        peer: PeerId,
        client: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._p2p = p2p
        self._authorizer = p2p.authorizer
        self._peer = peer
        self._client = client
        self._subnet_of: dict[PeerId, str] = {}
        self._subnets_at = float("-inf")
        self._info = dht_pb2.NodeInfo(node_id=b"" if client else node_id(peer).to_bytes(ID_BYTES, "big"))
        self._now = now
        self._answering: CallServer | None = None

    async def serve(self, server: Server) -> None:
        """Serve the three calls. Raises TransportError where p2pd refuses."""
        if self._client:
            return

        def ping(sender: Sender, request: Any) -> Any:
            server.ping(sender)
            return dht_pb2.PingResponse(peer=self._info, dht_time=self._now(), auth=self._answer_auth())

        def store(sender: Sender, request: Any) -> Any:
            taken = server.store(sender, _offers(request))
            taken += [False] * (len(request.keys) - len(taken))
            return dht_pb2.StoreResponse(store_ok=taken, peer=self._info, auth=self._answer_auth())

        def find(sender: Sender, request: Any) -> Any:
            if len(request.keys) > MAX_KEYS or any(len(key) != ID_BYTES for key in request.keys):
                raise ValueError(f"at most {MAX_KEYS} keys of {ID_BYTES} bytes")
            found = server.find(sender, [int.from_bytes(key, "big") for key in request.keys])
            return dht_pb2.FindResponse(
                results=map(_result, found), peer=self._info, auth=self._answer_auth()
            )

        def method(answer: Callable[[Sender, Any], Any], kind: Any, most_bytes: int) -> Method:
            def answered(caller: Caller, data: bytes) -> bytes:
                request = _Capped(kind, most_bytes).FromString(data)
                self._check_member(caller.peer, request)
                sender = Sender(caller.peer, request.peer.node_id, caller.subnet)
                packed: bytes = answer(sender, request).SerializeToString()
                return packed

            return Method(answered, most_bytes)

        methods = {
            "ping": method(ping, dht_pb2.PingRequest, _MAX_PING_BYTES),
            "store": method(store, dht_pb2.StoreRequest, _MAX_STORE_BYTES),
            "find": method(find, dht_pb2.FindRequest, _MAX_FIND_BYTES),
        }
        self._answering = await CallServer.start(
            self._p2p.daemon, {_NAME.format(name): each for name, each in methods.items()}
        )

    async def aclose(self) -> None:
        """Raises TransportError where p2pd does not answer."""
        if self._answering is not None:
            answering, self._answering = self._answering, None
            await answering.aclose()

    async def ping(self, peer: PeerId, seconds: float) -> float | None:
        """The remote clock, in unix seconds. Raises one of CALL_ERRORS, as do the other two calls."""
        response = await self._call(
            peer, "ping", dht_pb2.PingRequest(peer=self._info), dht_pb2.PingResponse, seconds
        )
        return response.dht_time if math.isfinite(response.dht_time) and response.dht_time > 0 else None

    async def store(self, peer: PeerId, offers: Sequence[Offer], seconds: float) -> list[bool]:
        request = dht_pb2.StoreRequest(
            keys=[offer.key for offer in offers],
            subkeys=[offer.subkey for offer in offers],
            values=[offer.data for offer in offers],
            expiration_time=[offer.until for offer in offers],
            in_cache=[False] * len(offers),
            peer=self._info,
        )
        response = await self._call(peer, "store", request, dht_pb2.StoreResponse, seconds)
        return list(response.store_ok)

    async def find(self, peer: PeerId, keys: Sequence[int], seconds: float) -> list[FoundAt]:
        """The node's results for the first of the keys, as many as fitted into its answer."""
        packed = [key.to_bytes(ID_BYTES, "big") for key in keys]
        request = dht_pb2.FindRequest(keys=packed, peer=self._info)
        response = await self._call(peer, "find", request, dht_pb2.FindResponse, seconds)
        if not 0 < len(response.results) <= len(keys):
            raise ValueError(f"{len(response.results)} results for {len(keys)} keys")
        return [_found(result, self._peer) async for result in yielding(response.results, _RESULTS_AT_ONCE)]

    async def subnets(self) -> Mapping[PeerId, str]:
        """The public networks of connected peers."""
        if time.monotonic() - self._subnets_at >= _SUBNET_SECONDS:
            self._subnets_at = time.monotonic()
            try:
                connected = await self._p2p.list_peers()
            except CALL_ERRORS as error:
                logger.debug("p2pd does not say who is connected: %r", error)
                return self._subnet_of
            found = (
                (info.peer_id, public_network(address.to_bytes()))
                for info in connected
                for address in info.addrs
            )
            self._subnet_of = {from_bytes(peer.to_bytes()): subnet for peer, subnet in found if subnet}
        return self._subnet_of

    async def _call(self, peer: PeerId, name: str, request: Any, kind: Any, seconds: float) -> Any:
        if self._authorizer is not None:
            request.auth.client_access_token.signature = self._authorizer.token
        try:
            async with asyncio.timeout(seconds):
                response = await self._p2p.call_protobuf_handler(
                    to_hivemind(peer), _NAME.format(name), request, _Capped(kind, _MAX_ANSWER_BYTES)
                )
        except P2PHandlerError as error:
            if str(error):
                raise
            raise NotOfThisSwarm(f"{peer} answers members of its swarm alone") from error
        if self._authorizer is not None:
            shown = response.auth.service_access_token.signature
            if not self._authorizer.admits(peer, shown):
                raise NotOfThisSwarm(f"{peer} is of another swarm")
        return response

    # Closed swarms, in hivemind's authorisation fields of the messages.

    def _check_member(self, sender: PeerId, request: Any) -> None:
        """Raises NotOfThisSwarm unless the sender has proven that it is a member."""
        if self._authorizer is not None:
            shown = request.auth.client_access_token.signature
            if not self._authorizer.admits(sender, shown):
                raise NotOfThisSwarm

    def _answer_auth(self) -> Any:
        """Our own token, for an answer; None in an open swarm."""
        if self._authorizer is None:
            return None
        token = auth_pb2.AccessToken(signature=self._authorizer.token)
        return auth_pb2.ResponseAuthInfo(service_access_token=token)


class _Capped:
    """A message type that refuses to parse more than `most_bytes`. hivemind uses only FromString of a type."""

    def __init__(self, kind: Any, most_bytes: int) -> None:
        self._kind = kind
        self._most_bytes = most_bytes

    def FromString(self, data: bytes) -> Any:
        if len(data) > self._most_bytes:
            raise ValueError(f"a message of {len(data)} bytes; at most {self._most_bytes}")
        return self._kind.FromString(data)


def _offers(request: Any) -> list[Offer]:
    columns = (request.keys, request.subkeys, request.values, request.expiration_time, request.in_cache)
    if len({len(column) for column in columns}) != 1:
        raise ValueError("keys, subkeys, values and times are not as many")
    return [Offer(*row) for row in zip(*(column[:MAX_OFFERS] for column in columns), strict=True)]


def _result(found: FoundAt) -> Any:
    ids = [node.id.to_bytes(ID_BYTES, "big") for node in found.nearest]
    peers = [to_bytes(node.peer) for node in found.nearest]
    if found.value is None:
        return dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, nearest_node_ids=ids, nearest_peer_ids=peers)
    return dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY,
        value=found.value,
        nearest_node_ids=ids,
        nearest_peer_ids=peers,
    )


def _found(result: Any, own: PeerId) -> FoundAt:
    nearest = []
    reported = zip(
        result.nearest_node_ids[:MAX_NEIGHBOURS], result.nearest_peer_ids[:MAX_NEIGHBOURS], strict=False
    )
    for claimed, peer_bytes in reported:
        if 34 <= len(peer_bytes) <= 64:
            peer = from_bytes(peer_bytes)
            if claimed == node_id(peer).to_bytes(ID_BYTES, "big") and peer != own:
                nearest.append(Node(node_id(peer), peer))
    value = result.value if result.type == dht_pb2.FOUND_DICTIONARY else None
    return FoundAt(value, nearest)
