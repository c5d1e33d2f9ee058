"""Tokens that a graph leaves out of answers."""

from __future__ import annotations

import numpy as np
import pytest

from fusion.dag.ir.graph import Graph, Input, Node, Ref, TensorType
from fusion.dag.ir.serialise import decode, encode
from fusion.runtime.capture.generation import MAX_SPANS, withhold
from fusion.runtime.capture.serving_graph import evaluate
from fusion.runtime.job.errors import JobError

VOCABULARY = 150
LOGITS = TensorType((2, 3, VOCABULARY), "float32")


def logits() -> Graph:
    """Under a name that the nodes of those that are withheld would have."""
    node = Node("withheld_1", "aten.neg", (Ref("x"),), (LOGITS,))
    return Graph((Input("x", LOGITS),), (), (node,), (Ref("withheld_1"),))


@pytest.mark.parametrize("tokens", [(7,), (0, 149), (3, 4, 5, 9, 4, 20, 21), tuple(range(VOCABULARY - 1))])
def test_tokens_are_withheld_and_no_others(tokens: tuple[int, ...]) -> None:
    graph = withhold(logits(), tokens)
    assert decode(encode(graph)) == graph
    x = np.random.default_rng(0).normal(size=(2, 3, VOCABULARY)).astype(np.float32)
    (found,) = evaluate(graph, {"x": x}, {})
    wanted = -x
    wanted[..., list(tokens)] = -np.inf
    assert np.array_equal(found, wanted)


def test_nothing_is_added_where_nothing_is_withheld() -> None:
    graph = logits()
    assert withhold(graph, ()) is graph


def test_more_comparisons_than_a_token_is_worth_are_refused() -> None:
    with pytest.raises(JobError, match=f"{MAX_SPANS + 1} spans from answers; the limit is {MAX_SPANS}"):
        withhold(logits(), range(0, 2 * MAX_SPANS + 1, 2))
