"""Whether a graph gives what the model itself gives, where both are run with the same samples: what a capture cannot see of a model's code
(that it asks who runs it, or what kind of tensor it was given) shows in the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fusion.dag.cutting.costs import node_costs
from fusion.dag.cutting.positional import written_buffers
from fusion.dag.ir.graph import Graph
from fusion.runtime.capture.exporting.tensors import tensors_of
from fusion.runtime.job.errors import CaptureError
from fusion.runtime.planes.codegen import compile_graph

MOST_FLOPS = 1 << 40  # of a run: beyond that it would hold up whoever launches the job
_DRAWING = ("fusion.dropout", "fusion.dropout_attention")
_NEAR = 1e-3  # the length of the difference, of that of what is wanted: rounding gives a thousandth of it


def require_same_values(
    graph: Graph,
    values: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    run: Callable[[], Sequence[Tensor]],
    *,
    training: bool,
) -> None:
    """CaptureError where `graph`, run in this mode with the variables `values` and the inputs `example`, does not give what `run` does,
    the model's own code, which draws no random numbers. Nothing is asked of one that takes more than MOST_FLOPS."""
    samples = min(len(example[each.name]) for each in graph.inputs)
    if sum(cost.forward_flops for cost in node_costs(graph, {"batch": samples})) > MOST_FLOPS:
        return
    program = compile_graph(graph, torch.device("cpu"), training=training)
    written = {ref.name for ref in written_buffers(graph)} if training else set()
    variables = [values[name].clone() if name in written else values[name] for name in program.variables]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            wanted = run()
        except Exception:  # with samples that are none for it, of which others say more
            return
        found = program.run([example[name] for name in program.inputs], variables, None)
    for ours, theirs in zip(found, wanted, strict=False):
        if not _is_near(ours, theirs):
            mode = "in training" if training else "in evaluation"
            raise CaptureError(
                f"the graph of the model gives {_shown(ours)} for the first samples, {mode}, and the model itself {_shown(theirs)}: its code does "
                "otherwise while it is captured than when it runs"
            )


def draws(graph: Graph) -> bool:
    """Whether it has random numbers, which the model's own code draws otherwise."""
    return any(node.op in _DRAWING for node in graph.nodes)


@contextmanager
def as_before(module: nn.Module, training: bool) -> Iterator[None]:
    """The module in this mode; afterwards it is as it was, whatever it has set or written meanwhile."""
    parts = [(part, dict(vars(part)), _tables(part)) for part in module.modules()]
    tensors = [(each, each.detach().clone()) for _, each in tensors_of(module) if not each.requires_grad]
    try:
        module.train(training)
        yield
    finally:
        for part, own, tables in parts:
            vars(part).clear()
            vars(part).update(own)
            for name, table in tables.items():
                own[name].clear()
                own[name].update(table)
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)


def _tables(part: nn.Module) -> dict[str, dict[str, object]]:
    return {name: dict(vars(part)[name]) for name in ("_parameters", "_buffers", "_modules")}


def _is_near(ours: Tensor, theirs: Tensor) -> bool:
    if ours.shape != theirs.shape:
        return False
    if not theirs.is_floating_point() or not bool(theirs.isfinite().all()):
        return True  # whole numbers are chosen by comparing others, which rounding decides
    apart, size = (ours.double() - theirs.double()).norm(), theirs.double().norm()
    return bool(apart <= _NEAR * size + 1e-6)


def _shown(value: Tensor) -> str:
    return (
        f"{value.item():.6g}"
        if value.dim() == 0
        else f"a tensor of length {value.double().norm().item():.6g}"
    )
