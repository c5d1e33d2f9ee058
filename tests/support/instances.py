"""Random placement problems, the same for the same seed: chains and DAGs with skips, sites, homes and unusual links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Arg, Graph, Input, Node, Ref, TensorType, Variable
from fusion.dag.ir.opset import infer
from fusion.dag.placement.network import Device, Link, Links, Network

SIZES = {"batch": 32}
GIB = 1 << 30
MBPS = 1e6 / 8


@dataclass(frozen=True, kw_only=True)
class Instance:
    name: str
    graph: Graph
    network: Network
    microbatches: int


class Builder:
    """Builds a graph node by node, with an input of vectors of this width, or the input `given`."""

    def __init__(self, width: int, given: Input | None = None) -> None:
        self._input = given or Input("x", TensorType((symbol("batch"), width), "float32"))
        self._variables: list[Variable] = []
        self._nodes: list[Node] = []
        self.at = Ref(self._input.name)
        self._types: dict[Ref, TensorType] = {self.at: self._input.type}

    def add(self, op: str, *args: Arg) -> Ref:
        node = Node(f"n{len(self._nodes)}", op, args, infer(op, args, self._types))
        self._nodes.append(node)
        self._types[Ref(node.name)] = node.results[0]
        return Ref(node.name)

    def weight(self, outer: int, inner: int) -> Ref:
        variable = Variable(f"w{len(self._variables)}", TensorType((outer, inner), "float32"))
        self._variables.append(variable)
        self._types[Ref(variable.name)] = variable.type
        return Ref(variable.name)

    def block(self, inner: int, outer: int) -> None:
        self.at = self.add("aten.tanh", self.add("aten.linear", self.at, self.weight(outer, inner), None))

    def graph(self) -> Graph:
        return Graph((self._input,), tuple(self._variables), tuple(self._nodes), (self.at,), ("batch",))


def chain(widths: list[int]) -> Graph:
    """A chain of a linear layer and a tanh from each width to the next."""
    built = Builder(widths[0])
    for inner, outer in pairwise(widths):
        built.block(inner, outer)
    return built.graph()


def with_skips(blocks: int, width: int, random: np.random.Generator, share: float = 0.3) -> Graph:
    """Blocks of one width, some of which add the output of an earlier block, near or far."""
    built = Builder(width)
    outputs = [built.at]
    for _ in range(blocks):
        built.block(width, width)
        if random.random() < share:
            built.at = built.add("aten.add.Tensor", built.at, outputs[int(random.integers(len(outputs)))], 1)
        outputs.append(built.at)
    return built.graph()


def network(random: np.random.Generator, count: int, kind: str, memory: int = 64 * GIB) -> Network:
    speeds = 1e9 * 10 ** random.uniform(-1, 0) * 2.0 ** random.uniform(-1.5, 1.5, count)
    site = random.integers(1 + count // 3, size=count)
    up, down = np.full(count, np.inf), np.full(count, np.inf)
    if kind == "homes":
        up, down = random.uniform(8, 100, count) * MBPS, random.uniform(20, 300, count) * MBPS
    devices = tuple(
        Device(
            peer=f"p{i}",
            flops_per_second=float(speeds[i]),
            memory_bytes=int(memory * random.uniform(0.5, 2)),
            up_bytes_per_second=float(up[i]),
            down_bytes_per_second=float(down[i]),
        )
        for i in range(count)
    )
    links: dict[tuple[str, str], Link] = {}
    rtt = random.uniform(0.005, 0.03, count)
    for a in range(count):
        for b in range(count):
            if kind == "sites":
                near = bool(site[a] == site[b])
                link = Link(alpha_seconds=5e-4, bytes_per_second=1000 * MBPS) if near else Link(
                    alpha_seconds=0.01, bytes_per_second=80 * MBPS
                )  # fmt: skip
            elif kind == "homes":
                link = Link(alpha_seconds=float(rtt[a] + rtt[b]) / 2, bytes_per_second=1000 * MBPS)
            else:
                rate = 8 * MBPS * 10 ** random.uniform(0, 3)
                link = Link(alpha_seconds=float(random.uniform(0, 0.02)), bytes_per_second=float(rate))
            links[f"p{a}", f"p{b}"] = link
    return Network(devices=devices, links=links)


def instances(count: int, seed: int, most_devices: int = 12) -> Iterator[Instance]:
    for i in range(count):
        random = np.random.default_rng([seed, i])
        devices = int(random.integers(3, most_devices + 1))
        kind = ("sites", "homes", "stray")[int(random.integers(3))]
        if random.random() < 0.5:
            widths = [int(w) for w in random.choice([64, 128, 256, 512], size=int(random.integers(6, 15)))]
            shape, graph = "chain", chain(widths)
        else:
            shape, graph = "skips", with_skips(int(random.integers(6, 15)), 256, random)
        tight = bool(random.random() < 0.3)
        weights = sum(int(np.prod([int(str(d)) for d in v.type.shape])) * 16 for v in graph.variables)
        memory = int(3 * weights / devices) if tight else 64 * GIB
        yield Instance(
            name=f"{i}: {devices} devices, {shape}, {kind}" + (", tight" if tight else ""),
            graph=graph,
            network=network(random, devices, kind, memory),
            microbatches=int(random.choice([2, 4, 8, 16])),
        )


class Sites(Mapping[tuple[str, str], Link]):
    """The links of a large swarm, computed on demand: fast within a site, slower between sites."""

    def __init__(self, sites: Mapping[str, int], near: Link, far: Link) -> None:
        self._sites, self._near, self._far = sites, near, far

    def __getitem__(self, pair: tuple[str, str]) -> Link:
        return self._near if self._sites[pair[0]] == self._sites[pair[1]] else self._far

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return ((a, b) for a in self._sites for b in self._sites)

    def __len__(self) -> int:
        return len(self._sites) ** 2


def large_network(devices: int, sites: int, seed: int, flops: float = 1e12) -> Network:
    """Peers at home, grouped in sites: a few speeds, 20 to 100 Mbps up, 1 Gbps within a site."""
    random = np.random.default_rng(seed)
    found = tuple(
        Device(
            peer=f"p{i}",
            flops_per_second=float(flops * 2.0 ** random.uniform(-1.5, 1.5)),
            memory_bytes=int(random.choice([4, 8, 16])) * GIB,
            up_bytes_per_second=float(random.uniform(20, 100) * MBPS),
            down_bytes_per_second=float(random.uniform(50, 500) * MBPS),
        )
        for i in range(devices)
    )
    where = {d.peer: int(s) for d, s in zip(found, random.integers(sites, size=devices), strict=True)}
    near = Link(alpha_seconds=0.001, bytes_per_second=1000 * MBPS)
    links: Links = Sites(where, near, Link(alpha_seconds=0.02, bytes_per_second=200 * MBPS))
    return Network(devices=found, links=links)
