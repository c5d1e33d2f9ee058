"""Operators that the op-set does not have, as others that it has."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.export import ExportedProgram

from fusion.runtime.capture.exporting.decompositions.table import DECOMPOSITIONS, REMEDIES
from fusion.runtime.capture.exporting.export import EXPORT_ERRORS
from fusion.runtime.capture.exporting.model_code import first_line, line_of_node, names_before_decomposition
from fusion.runtime.capture.lowering.aten_names import (
    detach_what_regions_read,
    op_name,
    operators,
    supported,
)
from fusion.runtime.job.errors import CaptureError

logger = logging.getLogger(__name__)


@functools.cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """By operator, what it is taken apart into. torch takes a tenth of a second to list its own, as long as many a capture."""
    return {**decomposition_table, **torch.export.default_decompositions(), **DECOMPOSITIONS}


def decomposed(exported: ExportedProgram) -> ExportedProgram:
    """Ops that the op-set does not have, taken apart where torch knows how, and what they are made of in turn; the others
    are left whole."""
    table = dict(_decompositions())
    called = {(n.name, line_of_node(n)): op_name(n.target) for n in operators(exported)}
    tried = set[Any]()
    while unknown := _unsupported(exported):
        table.update((t, t.decompose) for t in unknown if t not in table and t._can_decompose())
        lost = next((n for t, n in unknown.items() if t not in table or t in tried), None)
        if lost is not None:
            line = line_of_node(lost)
            known = (
                called[name, line] for name in names_before_decomposition(lost) if (name, line) in called
            )
            name = next(known, op_name(lost.target))
            instead = f": {REMEDIES[name]}" if name in REMEDIES else ""
            raise CaptureError(f"the op-set has no operator {name}, which the model calls{line}{instead}")
        logger.debug("decomposing %s", sorted(map(op_name, unknown)))
        tried.update(unknown)
        exported = taken_apart(exported, {target: table[target] for target in unknown})
    return exported


def _unsupported(exported: ExportedProgram) -> dict[Any, torch.fx.Node]:
    """The first node that calls each operator that the op-set does not have."""
    found = dict[Any, torch.fx.Node]()
    for node in operators(exported):
        if not supported(node):
            found.setdefault(node.target, node)
    return found


def taken_apart(exported: ExportedProgram, table: dict[Any, Callable[..., Any]]) -> ExportedProgram:
    """In terms of `table`, without writes in place. CaptureError where torch cannot."""
    detach_what_regions_read(exported)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            apart: ExportedProgram = exported.run_decompositions(table)
        except EXPORT_ERRORS as error:
            raise CaptureError(
                f"torch cannot take the model's operators apart: {first_line(error)}"
            ) from error
    return apart
