"""Buffers that a model's code sets anew while it runs: torch.export sees this of the outermost module alone, which is ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.nn.modules.module import register_module_buffer_registration_hook

from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

# What gives the value of its first argument.
_SAME = ("to", "_to_copy", "alias", "detach", "clone", "contiguous")


@contextmanager
def no_state_in_buffers(wrapped: nn.Module) -> Iterator[None]:
    """CaptureError where the module, while it is exported, sets a buffer to what follows from its inputs or from the buffer's own
    value: it would remember that, and a graph does not. A table that is made again, or put on a device, is let through."""
    names = {id(part): prefix for prefix, part in wrapped.named_modules()}
    own = sum(
        len(list(each(remove_duplicate=False))) for each in (wrapped.named_parameters, wrapped.named_buffers)
    )

    def look(module: nn.Module, name: str, value: Any) -> None:
        had, mode = module._buffers.get(name), get_proxy_mode()
        if id(module) not in names or had is None or had is value or mode is None:
            return
        new, old = (_node(each, mode.tracer) for each in (value, had))
        unchanged = new
        while unchanged is not None and getattr(unchanged.target, "_opname", "") in _SAME:
            unchanged = unchanged.all_input_nodes[0]
        if new is None or unchanged is old:
            return
        inputs = [n for n in new.graph.nodes if n.op == "placeholder"][own:]
        if not _sources(new).isdisjoint({old, *inputs}):
            part = names[id(module)].partition(".")[2]
            raise CaptureError(
                f"the model sets its buffer {f'{part}.{name}' if part else name} anew each time it runs{line_of_caller()}, "
                "which a stage cannot keep"
            )

    handle = register_module_buffer_registration_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _node(value: Any, tracer: Any) -> fx.Node | None:
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
