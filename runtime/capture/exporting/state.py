"""State that a model keeps from run to run, which a graph cannot: torch.export runs the model once and records what that run does.

A buffer that the model replaces is seen during the export: torch.export checks for this in the outermost module alone, which is our
wrapper. All else (a step counter, a list that grows, values of an earlier batch, Python's random numbers) shows up as a difference between two runs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion.runtime.capture.exporting.model_code import line_of_caller, line_of_frame
from fusion.runtime.capture.exporting.one_sample import Calls, require_same_of_one
from fusion.runtime.capture.exporting.tensors import fake_mode, tensors_of
from fusion.runtime.job.errors import CaptureError

# Operators that return the value of their first argument.
_IDENTITY_OPS = ("to", "_to_copy", "alias", "detach", "clone", "contiguous")


@contextmanager
def no_state_in_buffers(wrapped: nn.Module) -> Iterator[None]:
    """While the module is exported in training mode, a new value that it assigns to a buffer, computed from its inputs or from the buffer's old
    value, is copied into the buffer, which a graph keeps. Outside of training mode: CaptureError. A table that is recomputed, or moved to a
    device, passes."""
    names = {id(part): prefix for prefix, part in wrapped.named_modules()}
    tensor_count = sum(
        len(list(each(remove_duplicate=False))) for each in (wrapped.named_parameters, wrapped.named_buffers)
    )

    def check(module: nn.Module, name: str, value: Any) -> Tensor | None:
        buffer, mode = module._buffers.get(name), get_proxy_mode()
        if id(module) not in names or buffer is None or buffer is value or mode is None:
            return None
        new_node, old_node = (node_of(each, mode.tracer) for each in (value, buffer))
        origin = new_node
        while origin is not None and getattr(origin.target, "_opname", "") in _IDENTITY_OPS:
            origin = origin.all_input_nodes[0]
        if new_node is None or origin is old_node:
            return None
        inputs = [n for n in new_node.graph.nodes if n.op == "placeholder"][tensor_count:]
        if not _ancestors(new_node).isdisjoint({old_node, *inputs}):
            if wrapped.training and _same_type(value, buffer):
                buffer.copy_(value)
                return buffer
            part = names[id(module)].partition(".")[2]
            raise CaptureError(
                f"the model sets its buffer {f'{part}.{name}' if part else name} anew each time it runs{line_of_caller()}, "
                "which a stage cannot keep"
            )
        return None

    with register_module_buffer_registration_hook(check):  # type: ignore[arg-type]
        yield


def _same_type(value: Tensor, buffer: Tensor) -> bool:
    return value.shape == buffer.shape and value.dtype == buffer.dtype


@contextmanager
def _buffers_written(wrapped: nn.Module) -> Iterator[None]:
    """Copies values that the module assigns to buffers in training mode into these buffers."""

    def write(module: nn.Module, name: str, value: Any) -> Tensor | None:
        buffer = module._buffers.get(name)
        if (
            not wrapped.training
            or buffer is None
            or not isinstance(value, Tensor)
            or not _same_type(value, buffer)
        ):
            return None
        with torch.no_grad():
            return buffer.copy_(value)

    with register_module_buffer_registration_hook(write):  # type: ignore[arg-type]
        yield


def node_of(value: Any, tracer: Any) -> fx.Node | None:
    """The node that computes the value in the graph that is being traced; None for a value that it does not compute."""
    if not isinstance(value, Tensor):
        return None
    if torch._is_functional_tensor(value):
        value = torch._from_functional_tensor(value)
    inner = value.from_functional() if hasattr(value, "from_functional") else value
    proxy = get_proxy_slot(inner, tracer, None)
    return None if proxy is None else proxy.proxy.node  # type: ignore[no-any-return]


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """The node and every node that its value depends on."""
    sources, pending = set[fx.Node](), [node]
    while pending:
        if (source := pending.pop()) not in sources:
            sources.add(source)
            pending += source.all_input_nodes
    return sources


def require_fixed_tables(wrapped: nn.Module) -> None:
    """CaptureError for an embedding that changes its table as it is read."""
    for path, part in wrapped.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise CaptureError(
                f"the model's {_own_name(path)} has a max_norm, which changes its table as it is read: leave it out, or normalise what is read"
            )


def require_same_runs(wrapped: nn.Module, example: Sequence[Tensor], exported: Calls | None = None) -> None:
    """CaptureError where runs of the module differ: because it keeps state, because it treats a batch of one sample otherwise, or because it
    calls other functions than when it was `exported`."""
    _require_no_state(wrapped, example)
    require_same_of_one(wrapped, example, exported)


def _require_no_state(wrapped: nn.Module, example: Sequence[Tensor]) -> None:
    """CaptureError where a run of the module, on fake tensors, computes with other numbers than the run before or with a tensor that the run
    before made, or where it changes a number or text that the module holds. The third run is compared with the second: the first may make
    what all later ones read, but no parameter."""
    generators, parameters = _generators(), {name for name, _ in wrapped.named_parameters()}
    try:
        with fake_mode(wrapped) as fake, _buffers_written(wrapped):
            inputs = [fake.from_tensor(value) for value in example]
            known = {id(each) for each in (*inputs, *(tensor for _, tensor in tensors_of(wrapped)))}
            second_run, third_run = _OperatorCalls(known), _OperatorCalls(known)
            wrapped(*inputs)
            drawn_from = _changed(generators, _generators())
            with second_run:
                wrapped(*inputs)
            third_run.previous, attributes = second_run, _plain_attributes(wrapped)
            with third_run, _generator_draws(drawn_from) as draw_lines:
                wrapped(*inputs)
    except CaptureError:
        raise
    except Exception:  # the export raises it too, with its line
        return
    for name, line in draw_lines.items():
        raise CaptureError(
            f"the model draws from {name}{line}, which is run once, while it is captured: draw with torch (torch.rand, torch.randint)"
        )
    if third_run.difference:
        raise CaptureError(third_run.difference)
    attributes_after = _plain_attributes(wrapped)
    changed = next((name for name, value in attributes_after.items() if attributes.get(name) != value), None)
    if changed is not None:
        raise CaptureError(
            f"the model sets its {changed} anew each time it runs, which a graph has no place for: leave it out"
        )
    new_parameters = {name for name, _ in wrapped.named_parameters()} - parameters
    if new_parameters:
        raise CaptureError(
            f"the model makes its parameter {_own_name(min(new_parameters))} while it runs: make it where the module is made, or run that once there"
        )


def _plain_attributes(wrapped: nn.Module) -> dict[str, Any]:
    """The numbers and texts that the module and its parts hold as attributes, by name."""
    return {
        _own_name(f"{prefix}.{name}"): value
        for prefix, part in wrapped.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (int, float, str)) and name != "training"
    }


def _own_name(name: str) -> str:
    return name.removeprefix("module.").removeprefix(".")


class _OperatorCalls(TorchDispatchMode):
    """Records the operators that a run calls, with their arguments, and the tensors that they make, except those of the module and its inputs."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.outputs: dict[int, Tensor] = {}  # kept alive, so that no other tensor gets its id
        self.previous: _OperatorCalls | None = None
        self.difference = ""
        self._known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if func.namespace == "aten" and not self.difference:
            arguments = (tuple(each.shape) if isinstance(each, Tensor) else each for each in leaves)
            self.calls.append(f"{func} {list(arguments)}")
            if self.previous is not None:
                self.difference = self._difference(self.previous, leaves)
        outputs = func(*args, **(kwargs or {}))
        for each in tree_leaves(outputs):
            if isinstance(each, Tensor) and id(each) not in self._known:
                self.outputs[id(each)] = each
        return outputs

    def _difference(self, previous: _OperatorCalls, leaves: Sequence[Any]) -> str:
        if any(isinstance(each, Tensor) and id(each) in previous.outputs for each in leaves):
            return f"the model reads what it has made the last time it ran{line_of_caller()}, which a stage cannot keep"
        index = len(self.calls) - 1
        if previous.calls[index : index + 1] != self.calls[index:]:
            return (
                f"the model does not compute the same each time it runs{line_of_caller()}: a graph has no place for a number that "
                "changes from step to step (give it as an array of the data)"
            )
        return ""


_NUMPY, _PYTHON = "NumPy's random numbers", "Python's random numbers"


def _generators() -> Mapping[str, Any]:
    """The states of the random number generators that are not torch's."""
    numpy = sys.modules.get("numpy.random")
    return {_PYTHON: random.getstate(), **({} if numpy is None else {_NUMPY: numpy.get_state()})}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name in before if repr(before[name]) != repr(after[name]))


@contextmanager
def _generator_draws(drawn_from: frozenset[str]) -> Iterator[Mapping[str, str]]:
    """Collect where the model draws random numbers that are not torch's: generator name -> ", at FILE:LINE". `drawn_from`: the generators
    whose state has changed. Python's may be drawn from by other threads too, such as a peer's event loop: only calls of this thread count."""
    lines: dict[str, str] = {}
    last_line, states, generator = "", _generators(), random.getrandbits.__self__  # type: ignore[attr-defined]

    def on_call(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            lines.setdefault(_PYTHON, line_of_caller())

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last_line
        if current := line_of_frame(frame):
            if last_line and _NUMPY not in lines and _NUMPY in _changed(states, _generators()):
                lines[_NUMPY] = last_line
            last_line = current
        return on_line

    tracing, profiling = sys.gettrace(), sys.getprofile()
    if _PYTHON in drawn_from:
        sys.setprofile(on_call)
    if _NUMPY in drawn_from:  # a profile function does not see its calls
        sys.settrace(lambda frame, event, arg: on_line if line_of_frame(frame) else None)
    try:
        yield lines
    finally:
        sys.setprofile(profiling)
        sys.settrace(tracing)
