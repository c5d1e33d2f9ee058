"""Finding what a Kademlia DHT holds under some keys, and the nodes nearest to them (Maymounkov and Mazieres 2002,
section 2.3). Knows ids, distances and an `ask` function; no network, no records.

Made for a swarm in which nodes die without a word: a round of questions waits for slow nodes only as long as the
quick ones make likely, and a node that does not answer costs no more than its own answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fusion.swarm.transport import PeerId

Key = int  # 160 bits, like a node's id


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
    """Every distinct value met, by key and subkey, and the answering nodes nearest to each key, nearest first."""

    values: Mapping[Key, Mapping[str, frozenset[bytes]]]
    nearest: Mapping[Key, tuple[Node, ...]]


@dataclass(frozen=True, kw_only=True)
class LookupConfig:
    breadth: int = 8  # nodes that must have answered, nearest to the key, before it counts as searched
    rounds: int = 12  # a bound on what nodes that make up neighbours can cost
    known_per_key: int = 128
    patience_seconds: float = 2.0  # for the rest of a round, once one node has answered; machines may be busy

    def __post_init__(self) -> None:
        for name in ("breadth", "rounds", "known_per_key", "patience_seconds"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")


# Answers None where the node failed. Must not raise; may be cancelled.
Ask = Callable[[Node, tuple[Key, ...]], Awaitable[NodeReply | None]]


@dataclass
class _Search:
    """The state of one key's search."""

    known: dict[int, Node]
    asked: set[int] = field(default_factory=set)
    answered: set[int] = field(default_factory=set)
    values: dict[str, set[bytes]] = field(default_factory=dict)


async def lookup(
    keys: Iterable[Key], start: Callable[[Key], Iterable[Node]], ask: Ask, config: LookupConfig
) -> Found:
    """Search all keys at once, beginning with the nodes `start(key)` gives. A node that is near to several keys is
    asked for all of them in one question."""
    searches = {key: _Search({node.id: node for node in start(key)}) for key in keys}
    for _ in range(config.rounds):
        questions: dict[Node, list[Key]] = {}
        for key, search in searches.items():
            for node in _next(key, search, config.breadth):
                questions.setdefault(node, []).append(key)
                search.asked.add(node.id)
        if not questions:
            break
        for node, answer in (await ask_all(questions, ask, config.patience_seconds)).items():
            for key in questions[node]:
                _take(searches[key], key, node, answer, config.known_per_key)
    return Found(
        {key: {sub: frozenset(values) for sub, values in s.values.items()} for key, s in searches.items()},
        {key: tuple(_nearest(key, s, s.answered)[: config.breadth]) for key, s in searches.items()},
    )


def _next(key: Key, search: _Search, breadth: int) -> list[Node]:
    """The nodes to ask now: of the nearest `breadth` that may still answer, those not asked yet."""
    hopeful = {node for node in search.known if node not in search.asked or node in search.answered}
    return [node for node in _nearest(key, search, hopeful)[:breadth] if node.id not in search.asked]


def _nearest(key: Key, search: _Search, among: set[int]) -> list[Node]:
    return [search.known[node] for node in sorted(among, key=lambda node: node ^ key)]


def _take(search: _Search, key: Key, node: Node, answer: NodeReply, known_per_key: int) -> None:
    search.answered.add(node.id)
    for subkey, value in answer.values.get(key, {}).items():
        search.values.setdefault(subkey, set()).add(value)
    for other in answer.nearest.get(key, ()):
        if len(search.known) >= known_per_key:
            break
        search.known.setdefault(other.id, other)


async def ask_all(
    questions: Mapping[Node, Sequence[Key]], ask: Ask, patience_seconds: float
) -> dict[Node, NodeReply]:
    """What the nodes answered that did, each to its own keys. Once one has, the others are given `patience_seconds`."""
    tasks = {asyncio.ensure_future(ask(node, tuple(keys))): node for node, keys in questions.items()}
    waiting = set(tasks)
    answers: dict[Node, NodeReply] = {}
    loop = asyncio.get_running_loop()
    deadline: float | None = None  # of the round; none before the first answer
    try:
        while waiting and (deadline is None or loop.time() < deadline):
            left = None if deadline is None else deadline - loop.time()
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                answer = task.result()
                if answer is not None:
                    answers[tasks[task]] = answer
                    deadline = deadline or loop.time() + patience_seconds
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return answers
