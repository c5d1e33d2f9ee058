"""The iterative Kademlia lookup: the values of some keys, and the nodes nearest to them (Maymounkov and Mazieres 2002, section 2.3).
Knows ids, distances and a `query` function; no network, no records.

Nodes die without notice: once one node has answered, a round waits for the others only as long as its patience lasts, and a
node that does not answer costs only its own reply.

Some nodes lie: a search follows disjoint paths (S/Kademlia, Baumgart and Mies 2007, section 4.4). A reply can mislead only its
own path; a path is abandoned when nobody on it answers a round, or when it was late in two rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.transport import PeerId
from fusion.swarm.yielding import yielding

Key = int  # 160 bits, like a node's id

LEAST_PATIENCE = 0.2  # of `patience_seconds`, for each round after these are used up
LATE_ROUNDS = 2  # of a path, after which it is abandoned
KEYS_AT_ONCE = 32  # of a search, before the event loop runs others: a few milliseconds


@dataclass(frozen=True)
class Node:
    id: int
    peer: PeerId


@dataclass(frozen=True)
class NodeReply:
    """One node's reply: the values it holds (by subkey), and the nodes it knows near each key. Untrusted."""

    values: Mapping[Key, Mapping[str, bytes]]
    nearest: Mapping[Key, Sequence[Node]]


@dataclass(frozen=True)
class Found:
    """Every distinct value found, by key and subkey, with the nodes that have it; the answering nodes nearest to each key, nearest
    first; `best`: the nearest answering node of each path, which nodes of other paths cannot displace."""

    values: Mapping[Key, Mapping[str, Mapping[bytes, Collection[Node]]]]
    nearest: Mapping[Key, tuple[Node, ...]]
    best: Mapping[Key, tuple[Node, ...]]


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    breadth: int = 8  # the nearest nodes that must have answered before a key counts as searched
    paths: int = 3  # disjoint; each has its part of the breadth
    rounds: int = 12  # bounds the cost of nodes that make up neighbours
    known_per_key: int = 128
    # Of all rounds together, to wait for more replies after the first of a round
    patience_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("breadth", "paths", "rounds", "known_per_key", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


# Returns None where the node failed. Must not raise; may be cancelled.
Query = Callable[[Node, tuple[Key, ...]], Awaitable[NodeReply | None]]


@dataclass
class _Path:
    """One path to a key: the nodes that its own nodes named."""

    breadth: int  # its part of the search's
    known: dict[int, Node] = field(default_factory=dict)
    queried: set[int] = field(default_factory=set)
    late_rounds: int = 0
    abandoned: bool = False


@dataclass
class _Search:
    """The state of one key's search."""

    paths: list[_Path]
    path_of: dict[int, _Path] = field(default_factory=dict)  # of each queried node
    answered: dict[int, Node] = field(default_factory=dict)
    values: dict[str, dict[bytes, list[Node]]] = field(default_factory=dict)
    retried_abandoned: bool = False  # nodes that abandoned paths named


async def lookup(
    keys: Iterable[Key], start: Callable[[Key], Iterable[Node]], query: Query, config: LookupConfig
) -> Found:
    """Search for all keys at once, from the nodes `start(key)` gives. A node that is near several keys is queried for all of them
    in one call."""
    searches: dict[Key, _Search] = {}
    async for key in yielding(keys, KEYS_AT_ONCE):
        searches[key] = _Search(_paths(start(key), config))
    patience = config.patience_seconds
    for turn in range(config.rounds):
        queries: dict[Node, list[Key]] = {}
        queried: dict[Key, set[int]] = {}
        async for key in yielding(searches, KEYS_AT_ONCE):
            nodes = _next(key, searches[key], turn)
            queried[key] = {node.id for node in nodes}
            for node in nodes:
                queries.setdefault(node, []).append(key)
        if not queries:
            break
        replies, late, waited = await _query_round(queries, query, patience)
        # Never zero: a node that answers a little after the first is no liar and must count.
        patience = max(patience - waited, config.patience_seconds * LEAST_PATIENCE)
        for node, reply in replies.items():
            async for key in yielding(queries[node], KEYS_AT_ONCE):
                _add_reply(searches[key], key, node, reply, config.known_per_key)
        async for key in yielding(searches, KEYS_AT_ONCE):
            _abandon_paths(searches[key], queried[key], late)
    return Found(
        {key: search.values for key, search in searches.items()},
        {key: tuple(_nearest(key, s.answered.values())[: config.breadth]) for key, s in searches.items()},
        {key: _best(key, search) for key, search in searches.items()},
    )


def _paths(start: Iterable[Node], config: LookupConfig) -> list[_Path]:
    """The start nodes dealt to the paths in turn; each path has its part of the breadth."""
    nodes = list(start)
    count = max(1, min(config.paths, config.breadth, len(nodes)))
    paths = [_Path(config.breadth // count + (n < config.breadth % count)) for n in range(count)]
    for n, node in enumerate(nodes):
        paths[n % count].known[node.id] = node
    return paths


def _next(key: Key, search: _Search, turn: int) -> list[Node]:
    """The nodes to query in this round: on each path, of its nearest nodes that may still answer on it, those not queried yet."""
    chosen = []
    for n in range(len(search.paths)):
        path = search.paths[(n + turn) % len(search.paths)]  # each path chooses first in turn
        if path.abandoned:
            continue
        hopeful = [
            node
            for node in path.known.values()
            if node.id not in search.path_of or (node.id in path.queried and node.id in search.answered)
        ]
        for node in _nearest(key, hopeful)[: path.breadth]:
            if node.id not in search.path_of:
                search.path_of[node.id] = path
                path.queried.add(node.id)
                chosen.append(node)
    return chosen or _skipped(key, search)


def _skipped(key: Key, search: _Search) -> list[Node]:
    """Once the paths have ended: nodes nearer than some that answered, which no path has queried. Nodes named on an abandoned path
    may be made up: of those only such that are nearer than all that answered, and once."""
    breadth = sum(path.breadth for path in search.paths)
    fresh = _unqueried(search, abandoned=False)
    nearest = _nearest(key, [*search.answered.values(), *fresh.values()])[:breadth]
    chosen = [node for node in nearest if node.id in fresh]
    if not chosen and not search.retried_abandoned:
        search.retried_abandoned = True
        named = _nearest(key, _unqueried(search, abandoned=True).values())[:breadth]
        best = min((id_ ^ key for id_ in search.answered), default=None)
        chosen = [node for node in named if best is None or node.id ^ key < best]
    for node in chosen:
        search.path_of[node.id] = next(path for path in search.paths if node.id in path.known)
    return chosen


def _unqueried(search: _Search, *, abandoned: bool) -> dict[int, Node]:
    """The nodes that the active paths have named, or the abandoned ones."""
    return {
        node.id: node
        for path in search.paths
        if path.abandoned == abandoned
        for node in path.known.values()
        if node.id not in search.path_of
    }


def _abandon_paths(search: _Search, queried: set[int], late: set[int]) -> None:
    """Abandon the paths on which no node queried in this round answered, and those late for the second time; but not the last active
    one."""
    for path in search.paths:
        fresh = path.queried & queried
        others = any(not other.abandoned for other in search.paths if other is not path)
        path.late_rounds += bool(fresh & late)
        if fresh and others and (path.late_rounds >= LATE_ROUNDS or not fresh & search.answered.keys()):
            path.abandoned = True


def _best(key: Key, search: _Search) -> tuple[Node, ...]:
    answered = (
        [node for node in search.answered.values() if search.path_of[node.id] is path]
        for path in search.paths
    )
    return tuple(_nearest(key, nodes)[0] for nodes in answered if nodes)


def _nearest(key: Key, among: Iterable[Node]) -> list[Node]:
    return sorted(among, key=lambda node: node.id ^ key)


def _add_reply(search: _Search, key: Key, node: Node, reply: NodeReply, known_per_key: int) -> None:
    search.answered[node.id] = node
    for subkey, value in reply.values.get(key, {}).items():
        search.values.setdefault(subkey, {}).setdefault(value, []).append(node)
    known = search.path_of[node.id].known
    for other in reply.nearest.get(key, ()):
        if len(known) >= known_per_key:
            break
        known.setdefault(other.id, other)


async def query_all(
    queries: Mapping[Node, Sequence[Key]], query: Query, patience_seconds: float
) -> dict[Node, NodeReply]:
    """The replies of the nodes that answered, each for its own keys. After the first reply it waits `patience_seconds` for more."""
    return (await _query_round(queries, query, patience_seconds))[0]


async def _query_round(
    queries: Mapping[Node, Sequence[Key]], query: Query, patience_seconds: float
) -> tuple[dict[Node, NodeReply], set[int], float]:
    """As `query_all`, with the ids of the nodes that had not answered, and the seconds waited after the first reply."""
    tasks = {asyncio.ensure_future(query(node, tuple(keys))): node for node, keys in queries.items()}
    waiting = set(tasks)
    replies: dict[Node, NodeReply] = {}
    loop = asyncio.get_running_loop()
    first: float | None = None  # when the first reply arrived; until then the round does not end
    try:
        while waiting and (first is None or loop.time() < first + patience_seconds):
            left = None if first is None else first + patience_seconds - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                reply = task.result()
                if reply is not None:
                    replies[tasks[task]] = reply
                    first = loop.time() if first is None else first
        waited = 0.0 if first is None else loop.time() - first
    finally:
        await cancel_all(waiting)
    return replies, {tasks[task].id for task in waiting}, waited
