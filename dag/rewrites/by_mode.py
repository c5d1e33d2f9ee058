"""One graph of the two that a model is, in training and in evaluation: what both compute is there once, and where they differ
`fusion.by_mode` chooses.

Whichever nodes of the two are taken for the same, the result computes what each of them does: a node that stands for two reads the
arguments of the one or of the other. What is found alike only decides how much is computed for one mode alone.
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

_PASSED_ON = frozenset({"aten.dropout", "aten.alias"})  # in evaluation, what they are given


def by_mode(training: Graph, evaluated: Graph) -> Graph:
    """`training`, whose nodes keep their names, that gives in evaluation what `evaluated` does there: graphs of the same inputs
    and variables, with outputs of the same types."""
    return clean(_Merged(clean(training), clean(evaluated)).graph())


class _Merged:
    def __init__(self, training: Graph, evaluated: Graph) -> None:
        self._training, self._evaluated = training, evaluated
        self._types = {**evaluated.types, **training.types}
        self._taken = {*training.input_names, *training.variable_names, *training.node_index}
        self._taken |= evaluated.variable_names
        self._same = _passed_on(training)  # of training's values, in evaluation
        self._own = _passed_on(evaluated)
        named: tuple[Input | Variable, ...] = (*evaluated.inputs, *evaluated.variables)
        self._found = {
            Ref(each.name): Ref(each.name) for each in named
        }  # of evaluated's values, in the merged graph
        self._chosen: dict[tuple[Ref, Ref], Ref] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        training, evaluated = self._training, self._evaluated
        partners = _partners(training, evaluated)
        ahead = iter(evaluated.nodes)
        for node in training.nodes:
            partner = partners.get(node.name)
            if partner is not None:
                for other in ahead:
                    if other is partner:
                        break
                    self._add_evaluated(other)
                node = self._joined(node, partner)
            self._nodes.append(node)
        for other in ahead:
            self._add_evaluated(other)
        pairs = zip(training.outputs, evaluated.outputs, strict=True)
        outputs = tuple(self._choice(ref, self._value(other)) for ref, other in pairs)
        known = training.variable_names
        more = (each for each in evaluated.variables if each.name not in known)
        variables = (*training.variables, *more)
        return replace(training, variables=variables, nodes=tuple(self._nodes), outputs=outputs)

    def _joined(self, node: Node, partner: Node) -> Node:
        """The node with the arguments of either; as it is, with the other beside it, where these are of other types."""
        pairs = [(ref, self._value(other)) for ref, other in zip(node.refs(), partner.refs(), strict=True)]
        if any(self._types[ref] != self._types[other] for ref, other in pairs):
            self._add_evaluated(partner)
            return node
        args = _with_refs(node.args, iter([self._choice(ref, other) for ref, other in pairs]))
        self._found.update((Ref(partner.name, i), Ref(node.name, i)) for i in range(len(node.results)))
        return replace(node, args=args)

    def _add_evaluated(self, node: Node) -> None:
        if Ref(node.name) in self._own:
            return
        name = self._unused(f"{node.name}_evaluated")
        values = {ref: self._value(ref) for ref in node.refs()}
        self._nodes.append(replace(node, name=name, args=substitute(node.args, values)))
        for i, type_ in enumerate(node.results):
            self._found[Ref(node.name, i)] = Ref(name, i)
            self._types[Ref(name, i)] = type_

    def _value(self, ref: Ref) -> Ref:
        return self._found[self._own.get(ref, ref)]

    def _choice(self, ref: Ref, other: Ref) -> Ref:
        """The one value in training, the other in evaluation."""
        if self._same.get(ref, ref) == self._same.get(other, other):
            return ref
        if (ref, other) not in self._chosen:
            name = self._unused(f"{ref.name}_by_mode")
            self._nodes.append(Node(name, BY_MODE, (ref, other), (self._types[ref],)))
            self._chosen[ref, other] = Ref(name)
            self._types[Ref(name)] = self._types[ref]
        return self._chosen[ref, other]

    def _unused(self, name: str) -> str:
        found = next(n for i in range(len(self._taken) + 1) if (n := f"{name}{i or ''}") not in self._taken)
        self._taken.add(found)
        return found


def _with_refs(args: tuple[Arg, ...], refs: Iterator[Ref]) -> tuple[Arg, ...]:
    """The arguments with their references replaced by these, in order."""
    return tuple(
        next(refs) if isinstance(a, Ref) else _with_refs(a, refs) if isinstance(a, tuple) else a for a in args
    )


def _passed_on(graph: Graph) -> dict[Ref, Ref]:
    """The values that are, in evaluation, another one."""
    same: dict[Ref, Ref] = {}
    for node in graph.nodes:
        op, args = evaluation(node.op, node.args)
        if op in _PASSED_ON:
            source = args[0]
            assert isinstance(source, Ref)
            same[Ref(node.name)] = same.get(source, source)
    return same


def _partners(training: Graph, evaluated: Graph) -> dict[str, Node]:
    """By the name of a node of `training` the one of `evaluated` that is like it: in the same order in both."""
    passed = [(graph, _passed_on(graph)) for graph in (training, evaluated)]
    left, right = ([n for n in graph.nodes if Ref(n.name) not in same] for graph, same in passed)
    places = _aligned([_sign(training, n) for n in left], [_sign(evaluated, n) for n in right])
    return {left[i].name: right[j] for i, j in places}


def _sign(graph: Graph, node: Node) -> object:
    """Equal for nodes that compute the same of what they are given, in evaluation; variables and inputs are a part of it."""
    op, args = evaluation(node.op, node.args)
    return op, argument_key(_without_names(graph, args)), node.results


def _without_names(graph: Graph, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    made = graph.node_index
    return tuple(
        Ref("", a.index)
        if isinstance(a, Ref) and a.name in made
        else _without_names(graph, a)
        if isinstance(a, tuple)
        else a
        for a in args
    )


def _aligned(left: Sequence[object], right: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Places of equal elements, ascending in both: around those that each has once, as layers with weights of their own are
    (Cohen's patience diff), so that long graphs take little time."""
    once = Counter(left), Counter(right)
    place = {each: j for j, each in enumerate(right)}
    unique = [(i, place[e]) for i, e in enumerate(left) if once[0][e] == 1 and once[1][e] == 1]
    ends = (-1, -1), (len(left), len(right))
    for (i, j), (i_end, j_end) in pairwise([ends[0], *_ascending(unique), ends[1]]):
        if i >= 0:
            yield i, j
        between = SequenceMatcher(None, left[i + 1 : i_end], right[j + 1 : j_end], autojunk=False)
        for block in between.get_matching_blocks():
            yield from ((i + 1 + block.a + k, j + 1 + block.b + k) for k in range(block.size))


def _ascending(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The most of them whose second numbers ascend as their first do."""
    ends: list[int] = []  # the least second number that so many pairs may end with
    last: list[int] = []  # which pair that is
    before: list[int] = []
    for k, (_, j) in enumerate(pairs):
        at = bisect_left(ends, j)
        before.append(last[at - 1] if at else -1)
        ends[at : at + 1] = [j]
        last[at : at + 1] = [k]
    found, k = list[tuple[int, int]](), last[-1] if last else -1
    while k >= 0:
        found.append(pairs[k])
        k = before[k]
    return found[::-1]
