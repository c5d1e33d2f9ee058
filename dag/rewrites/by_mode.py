"""Merge the training graph and the evaluation graph of a model: nodes that both compute are shared, and `fusion.by_mode` chooses
where they differ.

The merge is correct whichever nodes are matched: a shared node reads the arguments of the one mode or of the other. The matching
only decides how much is computed for one mode alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import pairwise

from fusion.dag.cutting.mode import evaluation
from fusion.dag.cutting.references import substitute
from fusion.dag.ir.graph import Arg, Graph, Input, Node, Ref, Variable
from fusion.dag.ir.opset_pointwise import BY_MODE
from fusion.dag.rewrites.clean import argument_key, clean

_IDENTITIES = frozenset({"aten.dropout", "aten.alias"})  # identities in evaluation


def by_mode(training: Graph, evaluated: Graph) -> Graph:
    """`training`, whose nodes keep their names, merged with `evaluated`, which it computes in evaluation. Both have the same inputs
    and outputs of the same types."""
    return clean(_Merged(clean(training), clean(evaluated)).graph())


class _Merged:
    def __init__(self, training: Graph, evaluated: Graph) -> None:
        self._training, self._evaluated = training, evaluated
        self._types = {**evaluated.types, **training.types}
        self._taken = {*training.input_names, *training.variable_names, *training.node_index}
        self._taken |= evaluated.variable_names
        self._training_identities = _identities(training)  # of training's values, in evaluation
        self._evaluated_identities = _identities(evaluated)
        named: tuple[Input | Variable, ...] = (*evaluated.inputs, *evaluated.variables)
        self._merged_refs = {
            Ref(each.name): Ref(each.name) for each in named
        }  # of evaluated's values, in the merged graph
        self._choices: dict[tuple[Ref, Ref], Ref] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        training, evaluated = self._training, self._evaluated
        matches = _matching_nodes(training, evaluated)
        evaluated_nodes = iter(evaluated.nodes)
        for node in training.nodes:
            match = matches.get(node.name)
            if match is not None:
                for other in evaluated_nodes:
                    if other is match:
                        break
                    self._add_evaluated(other)
                node = self._merge_nodes(node, match)
            self._nodes.append(node)
        for other in evaluated_nodes:
            self._add_evaluated(other)
        pairs = zip(training.outputs, evaluated.outputs, strict=True)
        outputs = tuple(self._choice(ref, self._merged_ref(other)) for ref, other in pairs)
        known = training.variable_names
        added = (each for each in evaluated.variables if each.name not in known)
        variables = (*training.variables, *added)
        return replace(training, variables=variables, nodes=tuple(self._nodes), outputs=outputs)

    def _merge_nodes(self, node: Node, match: Node) -> Node:
        """One node for both, with arguments chosen by mode; if their types differ, both nodes."""
        pairs = [(ref, self._merged_ref(other)) for ref, other in zip(node.refs(), match.refs(), strict=True)]
        if any(self._types[ref] != self._types[other] for ref, other in pairs):
            self._add_evaluated(match)
            return node
        args = _with_refs(node.args, iter([self._choice(ref, other) for ref, other in pairs]))
        self._merged_refs.update((Ref(match.name, i), Ref(node.name, i)) for i in range(len(node.results)))
        return replace(node, args=args)

    def _add_evaluated(self, node: Node) -> None:
        if Ref(node.name) in self._evaluated_identities:
            return
        name = self._unused(f"{node.name}_evaluated")
        values = {ref: self._merged_ref(ref) for ref in node.refs()}
        self._nodes.append(replace(node, name=name, args=substitute(node.args, values)))
        for i, type_ in enumerate(node.results):
            self._merged_refs[Ref(node.name, i)] = Ref(name, i)
            self._types[Ref(name, i)] = type_

    def _merged_ref(self, ref: Ref) -> Ref:
        return self._merged_refs[self._evaluated_identities.get(ref, ref)]

    def _choice(self, ref: Ref, other: Ref) -> Ref:
        """`ref` in training, `other` in evaluation."""
        if self._training_identities.get(ref, ref) == self._training_identities.get(other, other):
            return ref
        if (ref, other) not in self._choices:
            name = self._unused(f"{ref.name}_by_mode")
            self._nodes.append(Node(name, BY_MODE, (ref, other), (self._types[ref],)))
            self._choices[ref, other] = Ref(name)
            self._types[Ref(name)] = self._types[ref]
        return self._choices[ref, other]

    def _unused(self, name: str) -> str:
        unused = next(n for i in range(len(self._taken) + 1) if (n := f"{name}{i or ''}") not in self._taken)
        self._taken.add(unused)
        return unused


def _with_refs(args: tuple[Arg, ...], refs: Iterator[Ref]) -> tuple[Arg, ...]:
    """The arguments with their references replaced by these, in order."""
    return tuple(
        next(refs) if isinstance(a, Ref) else _with_refs(a, refs) if isinstance(a, tuple) else a for a in args
    )


def _identities(graph: Graph) -> dict[Ref, Ref]:
    """The values that equal another one in evaluation, mapped to it."""
    same: dict[Ref, Ref] = {}
    for node in graph.nodes:
        op, args = evaluation(node.op, node.args)
        if op in _IDENTITIES:
            source = args[0]
            assert isinstance(source, Ref)
            same[Ref(node.name)] = same.get(source, source)
    return same


def _matching_nodes(training: Graph, evaluated: Graph) -> dict[str, Node]:
    """For names of nodes of `training`, the matching node of `evaluated`; matches are in the same order in both."""
    graphs = [(graph, _identities(graph)) for graph in (training, evaluated)]
    left, right = ([n for n in graph.nodes if Ref(n.name) not in same] for graph, same in graphs)
    places = _align([_signature(training, n) for n in left], [_signature(evaluated, n) for n in right])
    return {left[i].name: right[j] for i, j in places}


def _signature(graph: Graph, node: Node) -> object:
    """Equal for nodes that compute the same function in evaluation, of the same variables and inputs."""
    op, args = evaluation(node.op, node.args)
    return op, argument_key(_without_names(graph, args)), node.results


def _without_names(graph: Graph, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    node_index = graph.node_index
    return tuple(
        Ref("", a.index)
        if isinstance(a, Ref) and a.name in node_index
        else _without_names(graph, a)
        if isinstance(a, tuple)
        else a
        for a in args
    )


def _align(left: Sequence[object], right: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Pairs of indices of equal elements, ascending in both: Cohen's patience diff, anchored at elements that are unique in both,
    as layers with their own weights are, so that long graphs take little time."""
    counts = Counter(left), Counter(right)
    right_index = {each: j for j, each in enumerate(right)}
    unique = [(i, right_index[e]) for i, e in enumerate(left) if counts[0][e] == 1 and counts[1][e] == 1]
    ends = (-1, -1), (len(left), len(right))
    for (i, j), (i_end, j_end) in pairwise([ends[0], *_longest_increasing(unique), ends[1]]):
        if i >= 0:
            yield i, j
        between = SequenceMatcher(None, left[i + 1 : i_end], right[j + 1 : j_end], autojunk=False)
        for block in between.get_matching_blocks():
            yield from ((i + 1 + block.a + k, j + 1 + block.b + k) for k in range(block.size))


def _longest_increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest run of pairs whose second numbers ascend as their first do."""
    tails: list[int] = []  # the least second number that a chain of so many pairs can end with
    last: list[int] = []  # the index of that pair
    predecessor: list[int] = []
    for k, (_, j) in enumerate(pairs):
        at = bisect_left(tails, j)
        predecessor.append(last[at - 1] if at else -1)
        tails[at : at + 1] = [j]
        last[at : at + 1] = [k]
    chain, k = list[tuple[int, int]](), last[-1] if last else -1
    while k >= 0:
        chain.append(pairs[k])
        k = predecessor[k]
    return chain[::-1]
