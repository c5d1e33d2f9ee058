"""Finding what a Kademlia DHT holds under some keys, and the nodes nearest to them (Maymounkov and Mazieres 2002,
section 2.3). Knows ids, distances and an `ask` function; no network, no records.

Made for a swarm in which nodes die without a word: a round of questions waits for slow nodes only as long as the
quick ones make likely, and a node that does not answer costs no more than its own answer.

And in which some nodes lie: a search goes along paths that share no node (S/Kademlia, Baumgart and Mies 2007, section 4.4). What
one node says leads only its own path astray, a path on which nobody answers any longer is left, and so is one that was
waited for in two rounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusion.swarm.cancelling import cancel_all
from fusion.swarm.transport import PeerId
from fusion.swarm.yielding import yielding

Key = int  # 160 bits, like a node's id

LEAST_PATIENCE = 0.2  # of all that there is, for a round after it has been used up
LATE_ROUNDS = 2  # of a path, after which it is left
KEYS_AT_ONCE = 32  # of a search, before others run: a few milliseconds


@dataclass(frozen=True)
class Node:
    id: int
    peer: PeerId


@dataclass(frozen=True)
class NodeReply:
    """What one node said: the values it holds (by subkey), and the nodes it knows near each key. Untrusted."""

    values: Mapping[Key, Mapping[str, bytes]]
    nearest: Mapping[Key, Sequence[Node]]


@dataclass(frozen=True)
class Found:
    """Every distinct value met, by key and subkey, with the nodes that have it, and the answering nodes nearest to each key, nearest first. `best`: of each
    path the nearest that answered, which nodes of another path cannot displace."""

    values: Mapping[Key, Mapping[str, Mapping[bytes, Collection[Node]]]]
    nearest: Mapping[Key, tuple[Node, ...]]
    best: Mapping[Key, tuple[Node, ...]]


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    breadth: int = 8  # nodes that must have answered, nearest to the key, before it counts as searched
    paths: int = 3  # that share no node; each has its part of the breadth
    rounds: int = 12  # a bound on what nodes that make up neighbours can cost
    known_per_key: int = 128
    # In all, for the rest of rounds in which one node has answered; machines may be busy
    patience_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name in ("breadth", "paths", "rounds", "known_per_key", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


# Answers None where the node failed. Must not raise; may be cancelled.
Ask = Callable[[Node, tuple[Key, ...]], Awaitable[NodeReply | None]]


@dataclass
class _Path:
    """One way to a key: the nodes that its own nodes named."""

    breadth: int  # its part of the search's
    known: dict[int, Node] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    late_rounds: int = 0
    left: bool = False


@dataclass
class _Search:
    """The state of one key's search."""

    paths: list[_Path]
    path_of: dict[int, _Path] = field(default_factory=dict)  # of each node that was asked
    answered: dict[int, Node] = field(default_factory=dict)
    values: dict[str, dict[bytes, list[Node]]] = field(default_factory=dict)
    turned_back: bool = False  # to what paths named that were left


async def lookup(
    keys: Iterable[Key], start: Callable[[Key], Iterable[Node]], ask: Ask, config: LookupConfig
) -> Found:
    """Search all keys at once, beginning with the nodes `start(key)` gives. A node that is near to several keys is
    asked for all of them in one question."""
    searches: dict[Key, _Search] = {}
    async for key in yielding(keys, KEYS_AT_ONCE):
        searches[key] = _Search(_paths(start(key), config))
    patience = config.patience_seconds
    for turn in range(config.rounds):
        questions: dict[Node, list[Key]] = {}
        asked: dict[Key, set[int]] = {}
        async for key in yielding(searches, KEYS_AT_ONCE):
            nodes = _next(key, searches[key], turn)
            asked[key] = {node.id for node in nodes}
            for node in nodes:
                questions.setdefault(node, []).append(key)
        if not questions:
            break
        answers, late, waited = await _ask_round(questions, ask, patience)
        # Never none: whoever answers a little later than the first is no liar, and must be heard.
        patience = max(patience - waited, config.patience_seconds * LEAST_PATIENCE)
        for node, answer in answers.items():
            async for key in yielding(questions[node], KEYS_AT_ONCE):
                _take(searches[key], key, node, answer, config.known_per_key)
        async for key in yielding(searches, KEYS_AT_ONCE):
            _leave(searches[key], asked[key], late)
    return Found(
        {key: search.values for key, search in searches.items()},
        {key: tuple(_nearest(key, s.answered.values())[: config.breadth]) for key, s in searches.items()},
        {key: _best(key, search) for key, search in searches.items()},
    )


def _paths(start: Iterable[Node], config: LookupConfig) -> list[_Path]:
    """The start nodes dealt out to the paths; each has its part of the breadth."""
    nodes = list(start)
    count = max(1, min(config.paths, config.breadth, len(nodes)))
    paths = [_Path(config.breadth // count + (n < config.breadth % count)) for n in range(count)]
    for n, node in enumerate(nodes):
        paths[n % count].known[node.id] = node
    return paths


def _next(key: Key, search: _Search, turn: int) -> list[Node]:
    """The nodes to ask now: on each path, of the nearest that may still answer on it, those not asked yet."""
    chosen = []
    for n in range(len(search.paths)):
        path = search.paths[(n + turn) % len(search.paths)]  # whose turn it is takes first
        if path.left:
            continue
        hopeful = [
            node
            for node in path.known.values()
            if node.id not in search.path_of or (node.id in path.asked and node.id in search.answered)
        ]
        for node in _nearest(key, hopeful)[: path.breadth]:
            if node.id not in search.path_of:
                search.path_of[node.id] = path
                path.asked.add(node.id)
                chosen.append(node)
    return chosen or _passed_over(key, search)


def _passed_over(key: Key, search: _Search) -> list[Node]:
    """Where the paths have ended: the nodes nearer than some that answered that no path had a turn for. What a path names
    that was left may be made up: of that only what is nearer than all that answered, and once."""
    breadth = sum(path.breadth for path in search.paths)
    fresh = _unasked(search, left=False)
    nearest = _nearest(key, [*search.answered.values(), *fresh.values()])[:breadth]
    chosen = [node for node in nearest if node.id in fresh]
    if not chosen and not search.turned_back:
        search.turned_back = True
        named = _nearest(key, _unasked(search, left=True).values())[:breadth]
        best = min((id_ ^ key for id_ in search.answered), default=None)
        chosen = [node for node in named if best is None or node.id ^ key < best]
    for node in chosen:
        search.path_of[node.id] = next(path for path in search.paths if node.id in path.known)
    return chosen


def _unasked(search: _Search, *, left: bool) -> dict[int, Node]:
    """What the paths have named that go on, or that were left."""
    return {
        node.id: node
        for path in search.paths
        if path.left == left
        for node in path.known.values()
        if node.id not in search.path_of
    }


def _leave(search: _Search, asked: set[int], late: set[int]) -> None:
    """Leave the paths on which nobody answered who was asked in this round, and those with somebody who was waited for in
    vain a second time, but for the last one."""
    for path in search.paths:
        fresh = path.asked & asked
        others = any(not other.left for other in search.paths if other is not path)
        path.late_rounds += bool(fresh & late)
        if fresh and others and (path.late_rounds >= LATE_ROUNDS or not fresh & search.answered.keys()):
            path.left = True


def _best(key: Key, search: _Search) -> tuple[Node, ...]:
    answered = (
        [node for node in search.answered.values() if search.path_of[node.id] is path]
        for path in search.paths
    )
    return tuple(_nearest(key, nodes)[0] for nodes in answered if nodes)


def _nearest(key: Key, among: Iterable[Node]) -> list[Node]:
    return sorted(among, key=lambda node: node.id ^ key)


def _take(search: _Search, key: Key, node: Node, answer: NodeReply, known_per_key: int) -> None:
    search.answered[node.id] = node
    for subkey, value in answer.values.get(key, {}).items():
        search.values.setdefault(subkey, {}).setdefault(value, []).append(node)
    known = search.path_of[node.id].known
    for other in answer.nearest.get(key, ()):
        if len(known) >= known_per_key:
            break
        known.setdefault(other.id, other)


async def ask_all(
    questions: Mapping[Node, Sequence[Key]], ask: Ask, patience_seconds: float
) -> dict[Node, NodeReply]:
    """What the nodes answered that did, each to its own keys. Once one has, the others are given `patience_seconds`."""
    return (await _ask_round(questions, ask, patience_seconds))[0]


async def _ask_round(
    questions: Mapping[Node, Sequence[Key]], ask: Ask, patience_seconds: float
) -> tuple[dict[Node, NodeReply], set[int], float]:
    """As `ask_all`, with the ids of the nodes that had not answered by then, and how many seconds they were given."""
    tasks = {asyncio.ensure_future(ask(node, tuple(keys))): node for node, keys in questions.items()}
    waiting = set(tasks)
    answers: dict[Node, NodeReply] = {}
    loop = asyncio.get_running_loop()
    first: float | None = None  # when one answered; the round has no end before that
    try:
        while waiting and (first is None or loop.time() < first + patience_seconds):
            left = None if first is None else first + patience_seconds - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                if answer is not None:
                    answers[tasks[task]] = answer
                    first = loop.time() if first is None else first
        waited = 0.0 if first is None else loop.time() - first
    finally:
        await cancel_all(waiting)
    return answers, {tasks[task].id for task in waiting}, waited
