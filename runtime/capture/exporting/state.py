"""What a model would remember from run to run: a graph does not. torch.export runs the model once, and writes down what it does then.

A buffer that its code sets anew is seen while it is exported: torch.export looks for this in the outermost module alone, which is ours. All
else (a counter of steps, a list that grows, the state of an earlier batch, Python's random numbers) is seen where two runs differ.
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

__all__ = ["Calls", "no_state_in_buffers", "node_of", "require_same_runs"]

# What gives the value of its first argument.
_SAME = ("to", "_to_copy", "alias", "detach", "clone", "contiguous")


@contextmanager
def no_state_in_buffers(wrapped: nn.Module) -> Iterator[None]:
    """While the module is exported in training mode, a buffer that it sets to what follows from its inputs or from the buffer's own value is
    written to, which a graph keeps; else CaptureError. A table that is made again, or put on a device, is let through."""
    names = {id(part): prefix for prefix, part in wrapped.named_modules()}
    own = sum(
        len(list(each(remove_duplicate=False))) for each in (wrapped.named_parameters, wrapped.named_buffers)
    )

    def look(module: nn.Module, name: str, value: Any) -> Tensor | None:
        had, mode = module._buffers.get(name), get_proxy_mode()
        if id(module) not in names or had is None or had is value or mode is None:
            return None
        new, old = (node_of(each, mode.tracer) for each in (value, had))
        unchanged = new
        while unchanged is not None and getattr(unchanged.target, "_opname", "") in _SAME:
            unchanged = unchanged.all_input_nodes[0]
        if new is None or unchanged is old:
            return None
        inputs = [n for n in new.graph.nodes if n.op == "placeholder"][own:]
        if not _sources(new).isdisjoint({old, *inputs}):
            if wrapped.training and _alike(value, had):
                had.copy_(value)
                return had
            part = names[id(module)].partition(".")[2]
            raise CaptureError(
                f"the model sets its buffer {f'{part}.{name}' if part else name} anew each time it runs{line_of_caller()}, "
                "which a stage cannot keep"
            )
        return None

    with register_module_buffer_registration_hook(look):  # type: ignore[arg-type]
        yield


def _alike(value: Tensor, had: Tensor) -> bool:
    return value.shape == had.shape and value.dtype == had.dtype


@contextmanager
def _buffers_written(wrapped: nn.Module) -> Iterator[None]:
    """In training mode a buffer that the module sets anew is the one that it had, with another value."""

    def write(module: nn.Module, name: str, value: Any) -> Tensor | None:
        had = module._buffers.get(name)
        if not wrapped.training or had is None or not isinstance(value, Tensor) or not _alike(value, had):
            return None
        with torch.no_grad():
            return had.copy_(value)

    with register_module_buffer_registration_hook(write):  # type: ignore[arg-type]
        yield


def node_of(value: Any, tracer: Any) -> fx.Node | None:
    """What makes the value in the graph that is traced."""
    if not isinstance(value, Tensor):
        return None
    if torch._is_functional_tensor(value):
        value = torch._from_functional_tensor(value)
    inner = value.from_functional() if hasattr(value, "from_functional") else value
    found = get_proxy_slot(inner, tracer, None)
    return None if found is None else found.proxy.node  # type: ignore[no-any-return]


def _sources(node: fx.Node) -> set[fx.Node]:
    """What a value is made of, itself among it."""
    found, ahead = set[fx.Node](), [node]
    while ahead:
        if (each := ahead.pop()) not in found:
            found.add(each)
            ahead += each.all_input_nodes
    return found


def require_same_runs(wrapped: nn.Module, example: Sequence[Tensor], exported: Calls | None = None) -> None:
    """CaptureError where a run of the module is unlike another one: for what the module remembers, for a batch of a single sample, or
    unlike that in which it was `exported`."""
    _require_no_memory(wrapped, example)
    require_same_of_one(wrapped, example, exported)


def _require_no_memory(wrapped: nn.Module, example: Sequence[Tensor]) -> None:
    """CaptureError where a run of the module, of whose tensors only the shapes are known, computes with other numbers than the run before, or
    with a tensor that the run before has made, or counts something. It is the third that is looked at: the first may make what all others
    read, but no parameter."""
    before, parameters = _generators(), {name for name, _ in wrapped.named_parameters()}
    try:
        with fake_mode(wrapped) as fake, _buffers_written(wrapped):
            given = [fake.from_tensor(value) for value in example]
            own = {id(each) for each in (*given, *(tensor for _, tensor in tensors_of(wrapped)))}
            first, second = _Calls(own), _Calls(own)
            wrapped(*given)
            drawn = _changed(before, _generators())
            with first:
                wrapped(*given)
            second.before, numbers = first, _numbers(wrapped)
            with second, _watched(drawn) as found:
                wrapped(*given)
    except CaptureError:
        raise
    except Exception:  # whatever it is, an export meets it as well, and says where
        return
    for name, line in found.items():
        raise CaptureError(
            f"the model draws from {name}{line}, which is run once, while it is captured: draw with torch (torch.rand, torch.randint)"
        )
    if second.found:
        raise CaptureError(second.found)
    after = _numbers(wrapped)
    counted = next((name for name, value in after.items() if numbers.get(name) != value), None)
    if counted is not None:
        raise CaptureError(
            f"the model sets its {counted} anew each time it runs, which a graph has no place for: leave it out"
        )
    made = {name for name, _ in wrapped.named_parameters()} - parameters
    if made:
        raise CaptureError(
            f"the model makes its parameter {_own_name(min(made))} while it runs: make it where the module is made, or run that once there"
        )


def _numbers(wrapped: nn.Module) -> dict[str, Any]:
    """What the module and its parts hold beside tensors and parts: numbers and texts, by name."""
    return {
        _own_name(f"{prefix}.{name}"): value
        for prefix, part in wrapped.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (int, float, str)) and name != "training"
    }


def _own_name(name: str) -> str:
    return name.removeprefix("module.").removeprefix(".")


class _Calls(TorchDispatchMode):
    """The operators that a run calls, with their numbers, and the tensors that they make, less those that were there before."""

    def __init__(self, own: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.made: dict[int, Tensor] = {}  # held, so that no other gets its id
        self.before: _Calls | None = None
        self.found = ""
        self._own = own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        if func.namespace == "aten" and not self.found:
            said = (tuple(each.shape) if isinstance(each, Tensor) else each for each in given)
            self.calls.append(f"{func} {list(said)}")
            if self.before is not None:
                self.found = self._unlike(self.before, given)
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and id(each) not in self._own:
                self.made[id(each)] = each
        return made

    def _unlike(self, before: _Calls, given: Sequence[Any]) -> str:
        if any(isinstance(each, Tensor) and id(each) in before.made for each in given):
            return f"the model reads what it has made the last time it ran{line_of_caller()}, which a stage cannot keep"
        at = len(self.calls) - 1
        if before.calls[at : at + 1] != self.calls[at:]:
            return (
                f"the model does not compute the same each time it runs{line_of_caller()}: a graph has no place for a number that "
                "changes from step to step (give it as an array of the data)"
            )
        return ""


_NUMPY, _PYTHON = "NumPy's random numbers", "Python's random numbers"


def _generators() -> Mapping[str, Any]:
    """The states of the random numbers that are not torch's."""
    numpy = sys.modules.get("numpy.random")
    return {_PYTHON: random.getstate(), **({} if numpy is None else {_NUMPY: numpy.get_state()})}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name in before if repr(before[name]) != repr(after[name]))


@contextmanager
def _watched(drawn: frozenset[str]) -> Iterator[Mapping[str, str]]:
    """Where the model draws random numbers that are not torch's, by whose they are: ", at FILE:LINE". `drawn`: those that somebody has
    drawn. From Python's other threads draw as well, as the loop of a peer beside it: what counts is what this one calls."""
    found: dict[str, str] = {}
    last, had, generator = "", _generators(), random.getrandbits.__self__  # type: ignore[attr-defined]

    def called(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            found.setdefault(_PYTHON, line_of_caller())

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal last
        if here := line_of_frame(frame):
            if last and _NUMPY not in found and _NUMPY in _changed(had, _generators()):
                found[_NUMPY] = last
            last = here
        return line

    tracing, profiling = sys.gettrace(), sys.getprofile()
    if _PYTHON in drawn:
        sys.setprofile(called)
    if _NUMPY in drawn:  # its functions are none that a profile is told of
        sys.settrace(lambda frame, event, arg: line if line_of_frame(frame) else None)
    try:
        yield found
    finally:
        sys.setprofile(profiling)
        sys.settrace(tracing)
