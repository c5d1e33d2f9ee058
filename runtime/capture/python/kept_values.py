"""A model that writes to its buffers while it is trained. Held-out samples are given to the graph that is trained, in which a value that is
kept is then the buffer as it is: that must be what the model computes in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from fusion.dag.cutting.positional import written_buffers
from fusion.dag.ir.graph import Graph, Variable
from fusion.dag.ir.opset_pointwise import KEEP
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

_TOLERANCE = 1e-3  # of a loss, whose sums may have another order


def keeps_values(graph: Graph) -> bool:
    return any(node.op == KEEP for node in graph.nodes)


def require_same_evaluated(
    training: Graph,
    evaluated: Graph,
    variables: Mapping[str, torch.Tensor],
    example: Mapping[str, torch.Tensor],
) -> None:
    """CaptureError where the loss that the graph `training` gives in evaluation is not that of the graph `evaluated`, for an example and
    other values of the buffers than they begin with."""
    draw = torch.Generator().manual_seed(1)
    names = {ref.name for ref in written_buffers(training)}
    found = dict(variables)
    for name in sorted(names):
        value = found[name]
        drawn = torch.rand(value.shape, generator=draw) + 0.5
        found[name] = (value + drawn if value.is_floating_point() else value).to(value.dtype)
    own, wanted = (_evaluated(graph, found, example) for graph in (training, evaluated))
    if not torch.allclose(own, wanted, rtol=_TOLERANCE, atol=1e-6, equal_nan=True):
        raise CaptureError(
            f"the model writes to its buffers ({', '.join(sorted(names)[:4])}) while it is trained, and computes its loss otherwise in evaluation, "
            "by more than what it has written: held-out samples are given to what is trained"
        )


def _evaluated(
    graph: Graph, variables: Mapping[str, torch.Tensor], example: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    read = {ref.name for node in graph.nodes for ref in node.refs()} | {ref.name for ref in graph.outputs}
    own: tuple[Variable, ...] = tuple(v for v in graph.variables if v.name in read)
    program = compile_graph(replace(graph, variables=own), torch.device("cpu"), training=False)
    with torch.no_grad():
        return program.run(
            [example[name] for name in program.inputs], [variables[name] for name in program.variables], None
        )[0]
