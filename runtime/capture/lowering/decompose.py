"""Decomposes operators that the op-set does not have."""

from __future__ import annotations

import contextlib
import functools
import logging
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import _ops
from torch._decomp import decomposition_table
from torch._export import utils as _export_utils
from torch.export import ExportedProgram

from fusion.runtime.capture.exporting.decompositions.table import DECOMPOSITIONS, REMEDIES
from fusion.runtime.capture.exporting.export import EXPORT_ERRORS
from fusion.runtime.capture.exporting.model_code import first_line, line_of_node, names_before_decomposition
from fusion.runtime.capture.lowering.aten_names import (
    detach_region_inputs,
    op_name,
    operators,
    supported,
)
from fusion.runtime.job.errors import CaptureError

logger = logging.getLogger(__name__)

# Two functions that torch calls for each of its operators, again and again within one decomposition, and a faster form of each: the
# first lists the operators of all libraries, the second makes the type of an annotation. (module, name, faster form)
_FASTER: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (_export_utils, "_materialize_cpp_cia_ops", functools.cache),
    (_ops, "Callable", lambda _: typing.Callable),
)


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decomposition of each operator. torch takes a tenth of a second to list its own, as long as many a capture."""
    return {**decomposition_table, **torch.export.default_decompositions(), **DECOMPOSITIONS}


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """The program with operators that the op-set does not have decomposed, again and again until none is left. The others stay whole.
    CaptureError names an operator that cannot be decomposed."""
    table = dict(_decompositions())
    own_names = {(n.name, line_of_node(n)): op_name(n.target) for n in operators(exported)}
    tried = set[Any]()
    while unknown := _unsupported(exported):
        table.update((t, t.decompose) for t in unknown if t not in table and t._can_decompose())
        undecomposable = next((n for t, n in unknown.items() if t not in table or t in tried), None)
        if undecomposable is not None:
            line = line_of_node(undecomposable)
            candidates = (
                own_names[name, line]
                for name in names_before_decomposition(undecomposable)
                if (name, line) in own_names
            )
            name = next(candidates, op_name(undecomposable.target))
            remedy = f": {REMEDIES[name]}" if name in REMEDIES else ""
            raise CaptureError(f"the op-set has no operator {name}, which the model calls{line}{remedy}")
        logger.debug("decomposing %s", sorted(map(op_name, unknown)))
        tried.update(unknown)
        exported = run_decompositions(exported, {target: table[target] for target in unknown})
    return exported


def _unsupported(exported: ExportedProgram) -> dict[Any, torch.fx.Node]:
    """The first call of each operator that the op-set does not have."""
    first_calls = dict[Any, torch.fx.Node]()
    for node in operators(exported):
        if not supported(node):
            first_calls.setdefault(node.target, node)
    return first_calls


def run_decompositions(exported: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """The program with the operators of `table` decomposed, and without in-place writes. CaptureError where torch cannot."""
    detach_region_inputs(exported)
    with warnings.catch_warnings(), _faster_torch():
        warnings.simplefilter("ignore")
        try:
            decomposed: ExportedProgram = exported.run_decompositions(table)
        except EXPORT_ERRORS as error:
            raise CaptureError(
                f"torch cannot take the model's operators apart: {first_line(error)}"
            ) from error
    return decomposed


@contextlib.contextmanager
def _faster_torch() -> Iterator[None]:
    """Replace the functions of `_FASTER`, where this torch has them: a fifth of the time of a small capture."""
    originals = [(module, name, getattr(module, name, None), faster) for module, name, faster in _FASTER]
    present = [each for each in originals if each[2] is not None]
    for module, name, original, faster in present:
        setattr(module, name, faster(original))
    try:
        yield
    finally:
        for module, name, original, _ in present:
            setattr(module, name, original)
