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
from fusion.runtime.capture.python.eager_run import draws, require_same_values, restored_after
from fusion.runtime.capture.python.python_file import PythonFile
from fusion.runtime.capture.sources import Read
from fusion.runtime.job.errors import CaptureError, JobError
from fusion.runtime.job.spec import PythonConfig

OUTPUT = "output"  # the name of a model's only output


@dataclass(frozen=True, kw_only=True)
class PythonGraphs:
    training: Graph
    inference: Graph | None  # None where forward returns a loss, which cannot be served
    outputs: tuple[str, ...]  # of inference, by name
    read: Read


class PythonModel:
    """Runs the file and makes the module, with random weights from `seed`. `inputs`: the arrays of the data that its functions take. JobError, in
    one line, for an error in the file."""

    def __init__(self, config: PythonConfig, arrays: Collection[str], seed: int) -> None:
        self._file = file = PythonFile(config.path)
        make = file.function(config.function)
        self._loss = None if config.loss is None else file.function(config.loss)
        with file.running(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make(**config.arguments)
        if not isinstance(module, nn.Module):
            raise JobError(
                f"{config.path}: {config.function} must return an nn.Module, not {type(module).__name__}"
            )
        _check_tensors(module, str(config.path))
        self.module: nn.Module = module
        name = f"forward of {type(module).__name__}"
        self._module_inputs = _accepted_arrays(module.forward, arrays, f"{config.path}: {name}")
        self._loss_inputs: tuple[str, ...] = ()
        if self._loss is not None:
            where = f"{config.path}: {config.loss}"
            self._loss_inputs = _accepted_arrays(self._loss, arrays, where, given=1)
        self.inputs = tuple(dict.fromkeys((*self._module_inputs, *self._loss_inputs)))
        if not self._module_inputs:
            raise JobError(f"{config.path}: {name} takes none of the data ({', '.join(sorted(arrays))})")
        self._config = config

    def capture(self, example: Mapping[str, torch.Tensor], *, evaluated: bool = True) -> PythonGraphs:
        """The graphs. `example`: two or more samples of each of `inputs`. `evaluated`: whether samples are held out; then the trained graph also
        computes the loss of the model in evaluation mode. Raises CaptureError, JobError."""
        file, loss, names = self._file, self._loss, list[str]()
        total = _TotalLoss(loss, self._loss_inputs)

        def outputs(result: Any) -> tuple[torch.Tensor, ...]:
            named = _named_outputs(result)
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
                    outputs,
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
        """The graph of the loss in evaluation mode. CaptureError says that this one cannot be captured."""
        try:
            with self._file.running():
                graph = self._with_loss(total, example, training=False)
        except JobError as error:
            raise CaptureError(f"in evaluation, for the samples that are held out: {error}") from error
        trained_type, evaluated_type = (each.types[each.outputs[0]] for each in (training, graph))
        if trained_type != evaluated_type:
            raise CaptureError(
                f"the loss is {evaluated_type} in evaluation, for the samples that are held out, and not {trained_type}"
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
        """CaptureError where a graph returns other values than the file's code on these samples, or on the first of them alone."""
        samples = dict(example)

        def result() -> Any:
            return self.module(**{name: samples[name] for name in self._module_inputs})

        def loss() -> Sequence[torch.Tensor]:
            return (total(result(), *(samples[name] for name in self._loss_inputs)),)

        def outputs() -> Sequence[torch.Tensor]:
            return tuple(_named_outputs(result()).values())

        both = nn.ModuleList([self.module, total])
        for graph, captured, run, mode in (
            (training, training, loss, True),
            (training, in_evaluation, loss, False),
            (inference, inference, outputs, False),
        ):
            if graph is None or captured is None or draws(captured):
                continue
            for count in (None, 1):
                samples.update((name, each[:count]) for name, each in example.items())
                with self._file.running(), restored_after(both, mode):
                    require_same_values(graph, values, samples, run, training=mode)

    def _check_loss(self, graph: Graph) -> None:
        (loss,) = (graph.types[ref] for ref in graph.outputs)
        function = self._config.loss or f"forward of {type(self.module).__name__}, as no model.loss is named,"
        if loss.shape or "float" not in loss.dtype:
            hint = ": take its mean" if any(isinstance(d, Poly) for d in loss.shape) else ""
            raise JobError(
                f"{self._config.path}: {function} must return one number to train on, not {loss}{hint}"
            )
        if not any(variable.trainable for variable in graph.variables):
            raise JobError(f"{self._config.path}: no parameter is trainable")
        if graph.outputs[0] not in differentiable(graph):
            raise JobError(
                f"{self._config.path}: {function} must return a number with a gradient: no trainable parameter has a part in it, "
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


def _accepted_arrays(
    function: Callable[..., Any], arrays: Collection[str], where: str, given: int = 0
) -> tuple[str, ...]:
    """The arrays that the function takes as parameters of the same names, after its first `given` parameters. JobError for a parameter without a
    default that the data does not have."""
    parameters = _parameters(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)]
    if len(positional) < given:
        raise JobError(f"{where} must take what forward returned as its first argument")
    accepted, skipped = [], False
    for parameter in (*positional[given:], *(p for p in parameters if p.kind is p.KEYWORD_ONLY)):
        positional_only = parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.name in arrays and not (positional_only and skipped):
            accepted.append(parameter.name)
        elif parameter.default is parameter.empty:
            raise JobError(f"{where} takes {parameter.name!r}; the data has {', '.join(sorted(arrays))}")
        else:
            skipped = skipped or positional_only  # a later positional parameter would take its place
    return tuple(accepted)


class _TotalLoss(nn.Module):
    """The loss to train on, as a function of what forward returned and of the arrays called `names`, in this order."""

    def __init__(self, loss: Callable[..., Any] | None, names: tuple[str, ...]) -> None:
        super().__init__()
        self.loss, self._names = loss, names

    def forward(self, result: Any, *arrays: torch.Tensor) -> torch.Tensor:
        named = dict(zip(self._names, arrays, strict=True))
        return _total(result if self.loss is None else _called(self.loss, result, named))


def _called(loss: Callable[..., Any], result: Any, arrays: Mapping[str, torch.Tensor]) -> Any:
    """The loss of what forward returned, with `arrays` passed by name where the parameters allow it."""
    named = dict(arrays)
    positional = [
        named.pop(p.name) for p in _parameters(loss) if p.kind is p.POSITIONAL_ONLY and p.name in named
    ]
    return loss(result, *positional, **named)


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """The parameters of a function, or of a module's forward."""
    called = function.forward if isinstance(function, nn.Module) else function
    return list(inspect.signature(called).parameters.values())


def _total(loss: Any) -> torch.Tensor:
    """The sum of the losses, in their order."""
    parts: Iterable[Any] = loss.values() if isinstance(loss, Mapping) else loss
    if isinstance(loss, torch.Tensor):
        return loss
    if not isinstance(parts, Iterable) or not (losses := list(parts)):
        raise TypeError(f"a loss is a tensor, or several in a dict or tuple, not {type(loss).__name__}")
    total = losses[0]
    for part in losses[1:]:
        total = total + part
    if not isinstance(total, torch.Tensor):
        raise TypeError(f"a loss is a tensor, or several in a dict or tuple, not {type(total).__name__}")
    return total


def _named_outputs(result: Any) -> dict[str, torch.Tensor]:
    """A module's results by name: a dict as it is, one tensor as `output`, several as `output_0` and so on."""
    if isinstance(result, torch.Tensor):
        return {OUTPUT: result}
    named = (
        dict(result)
        if isinstance(result, Mapping)
        else {f"{OUTPUT}_{i}": value for i, value in enumerate(result)}
        if isinstance(result, list | tuple)
        else {}
    )
    outputs = {str(name): value for name, value in named.items() if value is not None}
    wrong = [
        f"{name} is of {type(v).__name__}" for name, v in outputs.items() if not isinstance(v, torch.Tensor)
    ]
    if not outputs or wrong:
        description = f"a {type(result).__name__} in which {wrong[0]}" if wrong else type(result).__name__
        raise TypeError(f"forward must return a tensor, or several in a dict or tuple, not {description}")
    return outputs
