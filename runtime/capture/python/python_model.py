"""The model and the loss of a Python file as graphs (`fusion.runtime.job.spec.PythonConfig` says what the file holds)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fusion.dag.cutting.costs import differentiable
from fusion.dag.ir.dims import Poly
from fusion.dag.ir.graph import DTYPE_BYTES, Graph
from fusion.dag.rewrites.by_mode import by_mode
from fusion.runtime.capture.capture import capture_module, variables_from_module
from fusion.runtime.capture.lowering import complex_numbers
from fusion.runtime.capture.python.eager_run import as_before, draws, require_same_values
from fusion.runtime.capture.python.python_file import PythonFile
from fusion.runtime.capture.sources import Read
from fusion.runtime.job.errors import CaptureError, JobError
from fusion.runtime.job.spec import PythonConfig

OUTPUT = "output"  # what the only output of a model is called


@dataclass(frozen=True, kw_only=True)
class PythonGraphs:
    training: Graph
    inference: Graph | None  # None where forward gives a loss, which nobody can ask for
    outputs: tuple[str, ...]  # of inference, by name
    read: Read


class PythonModel:
    """Runs the file and makes the module, with the random weights that `seed` gives. JobError in one line for what the file
    does wrong. `inputs` are the arrays that it wants of those that there are."""

    def __init__(self, config: PythonConfig, arrays: Collection[str], seed: int) -> None:
        self._file = file = PythonFile(config.path)
        make = file.function(config.function)
        self._loss = None if config.loss is None else file.function(config.loss)
        with file.running(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(**config.arguments)
        if not isinstance(made, nn.Module):
            raise JobError(
                f"{config.path}: {config.function} must return an nn.Module, not {type(made).__name__}"
            )
        _check_tensors(made, str(config.path))
        self.module: nn.Module = made
        name = f"forward of {type(made).__name__}"
        self._module_inputs = _wanted(made.forward, arrays, f"{config.path}: {name}")
        self._loss_inputs: tuple[str, ...] = ()
        if self._loss is not None:
            where = f"{config.path}: {config.loss}"
            self._loss_inputs = _wanted(self._loss, arrays, where, given=1)
        self.inputs = tuple(dict.fromkeys((*self._module_inputs, *self._loss_inputs)))
        if not self._module_inputs:
            raise JobError(f"{config.path}: {name} takes none of the data ({', '.join(sorted(arrays))})")
        self._config = config

    def capture(self, example: Mapping[str, torch.Tensor], *, evaluated: bool = True) -> PythonGraphs:
        """`example`: two samples or more of each of `inputs`. `evaluated`: whether samples are held out, for which the graph that is
        trained gives the loss of the model in evaluation. Raises CaptureError, JobError."""
        file, loss, names = self._file, self._loss, list[str]()
        total = _TotalLoss(loss, self._loss_inputs)

        def shown(made: Any) -> tuple[torch.Tensor, ...]:
            named = _named(made)
            names[:] = named
            return tuple(named.values())

        with file.running():
            training = self._with_loss(total, example, training=True)
            self._check_loss(training)
            in_evaluation = self._evaluated(total, example, training) if evaluated else None
            if in_evaluation is not None:
                training = by_mode(training, in_evaluation)
            inference = None
            if loss is not None:
                inference = capture_module(
                    self.module,
                    {name: example[name] for name in self._module_inputs},
                    shown,
                    training=False,
                    loss_inputs=(),
                )
        values = variables_from_module(self.module, total)
        self._require_same_values(training, in_evaluation, inference, total, values, example)
        return PythonGraphs(
            training=training,
            inference=inference,
            outputs=tuple(names),
            read=lambda variables: {v.name: values[v.name] for v in variables},
        )

    def _with_loss(self, total: _TotalLoss, example: Mapping[str, torch.Tensor], *, training: bool) -> Graph:
        return capture_module(
            self.module,
            {name: example[name] for name in self.inputs},
            total,
            training=training,
            module_inputs=self._module_inputs,
            loss_inputs=self._loss_inputs,
        )

    def _evaluated(self, total: _TotalLoss, example: Mapping[str, torch.Tensor], training: Graph) -> Graph:
        """The graph of the loss in evaluation. CaptureError says that it is that which cannot be captured."""
        try:
            with self._file.running():
                graph = self._with_loss(total, example, training=False)
        except JobError as error:
            raise CaptureError(f"in evaluation, for the samples that are held out: {error}") from error
        ours, theirs = (each.types[each.outputs[0]] for each in (training, graph))
        if ours != theirs:
            raise CaptureError(
                f"the loss is {theirs} in evaluation, for the samples that are held out, and not {ours}"
            )
        return graph

    def _require_same_values(
        self,
        training: Graph,
        in_evaluation: Graph | None,
        inference: Graph | None,
        total: _TotalLoss,
        values: Mapping[str, torch.Tensor],
        example: Mapping[str, torch.Tensor],
    ) -> None:
        """CaptureError where a graph does not give what the file's code gives with these samples."""

        def made() -> Any:
            return self.module(**{name: example[name] for name in self._module_inputs})

        def loss() -> Sequence[torch.Tensor]:
            return (total(made(), *(example[name] for name in self._loss_inputs)),)

        def outputs() -> Sequence[torch.Tensor]:
            return tuple(_named(made()).values())

        both = nn.ModuleList([self.module, total])
        for graph, captured, run, mode in (
            (training, training, loss, True),
            (training, in_evaluation, loss, False),
            (inference, inference, outputs, False),
        ):
            if graph is not None and captured is not None and not draws(captured):
                with self._file.running(), as_before(both, mode):
                    require_same_values(graph, values, example, run, training=mode)

    def _check_loss(self, graph: Graph) -> None:
        (loss,) = (graph.types[ref] for ref in graph.outputs)
        made = self._config.loss or f"forward of {type(self.module).__name__}, as no model.loss is named,"
        if loss.shape or "float" not in loss.dtype:
            hint = ": take its mean" if any(isinstance(d, Poly) for d in loss.shape) else ""
            raise JobError(
                f"{self._config.path}: {made} must return one number to train on, not {loss}{hint}"
            )
        if not any(variable.trainable for variable in graph.variables):
            raise JobError(f"{self._config.path}: no parameter is trainable")
        if graph.outputs[0] not in differentiable(graph):
            raise JobError(
                f"{self._config.path}: {made} must return a number with a gradient: no trainable parameter has a part in it, "
                "but behind a detach, a comparison, an argmax or the like"
            )


def _check_tensors(module: nn.Module, where: str) -> None:
    """JobError for a parameter or buffer that a job cannot hold."""
    named = [("parameter", *each) for each in module.named_parameters()]
    for kind, name, tensor in (*named, *(("buffer", *each) for each in module.named_buffers())):
        if tensor.is_meta:
            raise JobError(f'{where}: {kind} {name} has no values: it is on device "meta"')
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_BYTES:
            remedy = f": {complex_numbers.REMEDY}" if tensor.is_complex() else ""
            raise JobError(
                f"{where}: {kind} {name} is of dtype {dtype}; a job has {', '.join(DTYPE_BYTES)}{remedy}"
            )


def _wanted(
    function: Callable[..., Any], arrays: Collection[str], where: str, given: int = 0
) -> tuple[str, ...]:
    """The arrays that the function takes by its parameters' names, after so many that it is `given`. JobError for a parameter
    without a default that the data does not have."""
    parameters = _parameters(function)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if len(plain) < given:
        raise JobError(f"{where} must take what forward returned as its first argument")
    found, skipped = [], False
    for parameter in (*plain[given:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)):
        by_place = parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.name in arrays and not (by_place and skipped):
            found.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise JobError(f"{where} takes {parameter.name!r}; the data has {', '.join(sorted(arrays))}")
        else:
            skipped = skipped or by_place  # those behind it that go by place too would take its place
    return tuple(found)


class _TotalLoss(nn.Module):
    """What is trained on: of what forward returned, and then arrays in the order of these `names`."""

    def __init__(self, loss: Callable[..., Any] | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.loss, self._names = loss, names

    def forward(self, made: Any, *arrays: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._names, arrays, strict=True))
        return _total(made if self.loss is None else _called(self.loss, made, named))


def _called(loss: Callable[..., Any], made: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The loss of what forward returned, with `arrays` by name where the parameter can be named."""
    named = dict(arrays)
    placed = [named.pop(p.name) for p in _parameters(loss) if p.kind is p.POSITIONAL_ONLY and p.name in named]
    return loss(made, *placed, **named)


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """Of what a module calls its forward, or of a function."""
    called = function.forward if isinstance(function, nn.Module) else function
    return list(inspect.signature(called).parameters.values())


def _total(loss: Any) -> torch.Tensor:
    """Several losses are added up, in their order."""
    parts: Iterable[Any] = loss.values() if isinstance(loss, Mapping) else loss
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(parts, Iterable) or not (found := list(parts)):
        raise TypeError(f"a loss is a tensor, or several in a dict or tuple, not {type(loss).__name__}")
    total = found[0]
    for part in found[1:]:
        total = total + part
    if not isinstance(total, torch.Tensor):
        raise TypeError(f"a loss is a tensor, or several in a dict or tuple, not {type(total).__name__}")
    return total


def _named(made: Any) -> dict[str, torch.Tensor]:
    """What a module returns: a dict as it is, one tensor as `output`, several as `output_0` and on."""
    if isinstance(made, torch.Tensor):
        return {OUTPUT: made}
    named = (
        dict(made)
        if isinstance(made, Mapping)
        else {f"{OUTPUT}_{i}": value for i, value in enumerate(made)}
        if isinstance(made, list | tuple)
        else {}
    )
    found = {str(name): value for name, value in named.items() if value is not None}
    wrong = [
        f"{name} is of {type(v).__name__}" for name, v in found.items() if not isinstance(v, torch.Tensor)
    ]
    if not found or wrong:
        said = f"a {type(made).__name__} in which {wrong[0]}" if wrong else type(made).__name__
        raise TypeError(f"forward must return a tensor, or several in a dict or tuple, not {said}")
    return found
