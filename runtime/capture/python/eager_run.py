"""Compares the results of a graph with those of the model itself on the same samples: behaviour of the code that a capture cannot see (a check of
who runs it, or of the type of a tensor) shows in the numbers."""

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

MOST_FLOPS = 1 << 40  # of a run: more would delay the launch of a job
_RANDOM_OPS = ("fusion.dropout", "fusion.dropout_attention")
_TOLERANCE = 1e-3  # of the norm of the expected values; rounding causes a thousandth of that


def require_same_values(
    graph: Graph,
    values: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    run: Callable[[], Sequence[Tensor]],
    *,
    training: bool,
) -> None:
    """CaptureError where `graph`, run in this mode with the variables `values` and the inputs `example`, returns other values than `run`, the
    model's own code without random numbers. Skipped for a graph that takes more than MOST_FLOPS."""
    samples = min(len(example[each.name]) for each in graph.inputs)
    if sum(cost.forward_flops for cost in node_costs(graph, {"batch": samples})) > MOST_FLOPS:
        return
    program = compile_graph(graph, torch.device("cpu"), training=training)
    written = {ref.name for ref in written_buffers(graph)} if training else set()
    variables = [values[name].clone() if name in written else values[name] for name in program.variables]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            expected = run()
        except Exception:  # it cannot run with these samples; the capture reports that better
            return
        try:
            results = program.run([example[name] for name in program.inputs], variables, None)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CaptureError(
                f"the graph of the model cannot be run with {_samples_text(samples)}: {error}"
            ) from error
    for result, wanted in zip(results, expected, strict=False):
        if samples == 1:  # its dimension may be gone (squeeze)
            result, wanted = result.flatten(), wanted.flatten()
        if not _is_near(result, wanted):
            mode = "in training" if training else "in evaluation"
            raise CaptureError(
                f"the graph of the model gives {_text_of(result)} for {_samples_text(samples)}, {mode}, and the model itself {_text_of(wanted)}: its code does "
                f"otherwise {'with one sample than with several' if samples == 1 else 'while it is captured than when it runs'}"
            )


def draws(graph: Graph) -> bool:
    """Whether the graph draws random numbers, which differ from those of the model's own code."""
    return any(node.op in _RANDOM_OPS for node in graph.nodes)


@contextmanager
def restored_after(module: nn.Module, training: bool) -> Iterator[None]:
    """The module in this mode; afterwards attributes and tensors are restored to what they were."""
    parts = [(part, dict(vars(part)), _registries(part)) for part in module.modules()]
    tensors = [(each, each.detach().clone()) for _, each in tensors_of(module) if not each.requires_grad]
    try:
        module.train(training)
        yield
    finally:
        for part, attributes, tables in parts:
            vars(part).clear()
            vars(part).update(attributes)
            for name, table in tables.items():
                attributes[name].clear()
                attributes[name].update(table)
        with torch.no_grad():
            for tensor, value in tensors:
                tensor.copy_(value)


def _registries(part: nn.Module) -> dict[str, dict[str, object]]:
    return {name: dict(vars(part)[name]) for name in ("_parameters", "_buffers", "_modules")}


def _is_near(result: Tensor, expected: Tensor) -> bool:
    if result.shape != expected.shape:
        return False
    if not expected.is_floating_point() or not bool(expected.isfinite().all()):
        return True  # integers come from comparisons, which rounding may decide
    difference, size = (result.double() - expected.double()).norm(), expected.double().norm()
    return bool(difference <= _TOLERANCE * size + 1e-6)


def _samples_text(samples: int) -> str:
    return "the first sample alone" if samples == 1 else "the first samples"


def _text_of(value: Tensor) -> str:
    return (
        f"{value.item():.6g}"
        if value.dim() == 0
        else f"a tensor of length {value.double().norm().item():.6g}"
    )
