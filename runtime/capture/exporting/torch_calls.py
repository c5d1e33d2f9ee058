"""Patches of torch's functions for the time of an export: where they would read values that a fake tensor does not have, where they draw
random numbers or do what the op-set expresses otherwise, and where an export would silently lose how the model changes a gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import opt_einsum
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn import functional
from torch.nn.modules import batchnorm, transformer
from torch.utils.checkpoint import CheckpointFunction

from fusion.runtime.capture.exporting import (
    ctc,
    dense_experts,
    expert_loops,
    fourier,
    layers,
    masked_rows,
    random_draws,
    sorted_experts,
    topk_masks,
)
from fusion.runtime.capture.exporting.blocks import batch_choice
from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.job.errors import CaptureError

_Patch = tuple[Any, str, Callable[[Any], Any]]  # owner, attribute, original -> replacement


@contextmanager
def patched_torch(module: nn.Module) -> Iterator[None]:
    """While open, torch's functions are those that the module can be exported with. In training mode, CaptureError where the model's code
    defines a gradient itself."""
    with ExitStack() as stack:
        stack.enter_context(topk_masks.sizes_at_most(module))
        stack.enter_context(expert_loops.without_loops(module))
        stack.enter_context(dense_experts.without_dense_experts(module))
        stack.enter_context(sorted_experts.without_sorting(module))
        for owner, name, replacement in [
            *_PATCHES,
            *_RANDOM_PATCHES,
            *((*_GRADIENT_PATCHES, *_autograd_function_patches()) if module.training else ()),
        ]:
            original = getattr(owner, name)
            stack.callback(_restore, owner, name, vars(owner).get(name))
            setattr(owner, name, replacement(original))
        yield


def require_plain_gradients(module: nn.Module) -> None:
    """CaptureError where the module, a part or a parameter of it has a hook that may change a gradient: peers do not run hooks."""
    owners: list[tuple[str, Any]] = [*module.named_modules(), *module.named_parameters()]
    for name, owner in owners:
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"):
            if getattr(owner, kind, None):
                raise CaptureError(
                    f"{name or type(owner).__name__} has a backward hook, which no peer runs: leave it out"
                )


def _restore(owner: Any, name: str, attribute: Any) -> None:
    if attribute is None:  # it was inherited
        delattr(owner, name)
    else:
        setattr(owner, name, attribute)


def _provable_choice(first: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """sym_min or sym_max of two sizes where their ranges prove which it is. torch takes the stride of a view as the least of several and
    records a minimum of sizes, even of 64 and 64 times the length; a later question about such a stride holds for every length, but torch
    cannot prove it and refuses the model."""

    def patch(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def choose(a: Any, b: Any) -> Any:
            if isinstance(a, (int, torch.SymInt)) and isinstance(b, (int, torch.SymInt)):
                known = batch_choice(first, a, b)
                if known is not None:
                    return known
                if statically_known_true(first(a, b)):
                    return a
                if statically_known_true(first(b, a)):
                    return b
            return original(a, b)

        return choose

    return patch


def _causal_only_if_given(_: Any) -> Callable[..., bool]:
    """nn.Transformer reads a mask's values to see whether it is the causal one, for speed; the mask itself gives the same result."""
    return lambda mask, is_causal=None, size=None: is_causal is True


def _contraction_order(original: Callable[[], Any]) -> Callable[[], Any]:
    """An einsum of three or more tensors chooses the order of contraction by their sizes: here by those of the example."""

    class Contraction:
        @staticmethod
        def contract_path(equation: str, *operands: torch.Tensor, **options: Any) -> Any:
            shapes = [tuple(_hint(size) for size in operand.shape) for operand in operands]
            return original().contract_path(equation, *shapes, shapes=True, **options)

    return lambda: Contraction


def _unconverted(original: Callable[..., Any]) -> Callable[..., Any]:
    """Module.to() leaves a module as it is that has the dtype and device already. torch would replace its parameters, which fails for fake
    tensors."""

    def to(module: nn.Module, *args: Any, **options: Any) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **options)
        tensors = [*module.parameters(), *module.buffers()]
        floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        moved = device is not None and any(t.device != device for t in tensors)
        converted = dtype is not None and any(t.dtype != dtype for t in floating)
        return original(module, *args, **options) if moved or converted or layout is not None else module

    return to


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _refusing(reason: str, remedy: str = "") -> Callable[[Any], Any]:
    def patch(_: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(reason + line_of_caller() + remedy)

        return staticmethod(refuse)

    return patch


def _masked_draw(name: str) -> Callable[[Any], Any]:
    def patch(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            # torch infers the shapes of its own operators by calling these.
            infers_shape = caller.startswith(("torch._decomp", "torch._refs", "torch._prims"))
            return (original if infers_shape else getattr(random_draws, name))(*args, **options)

        return draw

    return patch


def _without_checkpoint(_: Any) -> Any:
    """torch's checkpoint returns what its function returns, with the same gradients."""
    return staticmethod(lambda function, preserve_rng_state, *args: function(*args))


def _autograd_function_patches(
    base: type[torch.autograd.Function] = torch.autograd.Function,
) -> Iterator[_Patch]:
    """Patches that refuse, where they run, autograd functions outside torch: their backward is not the derivative of their forward."""
    for function in base.__subclasses__():
        yield from _autograd_function_patches(function)
        if not function.__module__.startswith("torch."):
            reason = f"{function.__name__} is a torch.autograd.Function with a backward of its own, which no peer runs"
            remedy = ": write it with operators of torch, and with detach() where the gradient is another one"
            yield function, "forward", _refusing(reason, remedy)


def _data_as_detached(original: Any) -> property:
    """`x.data` is read as `x.detach()`: fake tensors have no memory to share outside of autograd. Setting it is refused, as torch.export would
    leave that out."""

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise CaptureError(
                f"the model sets .data of a tensor{line_of_caller()}, which a graph has no place for: use another tensor, or copy_() into one without a gradient under torch.no_grad()"
            )
        original.__set__(tensor, value)

    return property(lambda tensor: tensor.detach(), set_data)


def _unseeded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Random numbers follow from the job's seed, the step and the microbatch, so a model that seeds torch is refused."""

    def seed(*args: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _within_torch(caller) and not caller.startswith("fusion."):
            raise CaptureError(
                f"the model seeds torch's random numbers while it runs{line_of_caller()}: leave it out, a job's seed decides what is drawn; "
                "numbers that are always the same are a buffer"
            )
        return original(*args, **named)

    return seed


def _inference_as_no_grad(_: Any) -> Callable[[Any], None]:
    """inference_mode does what no_grad does, but torch.export does not record it."""

    def enter(self: Any) -> None:
        self.region = torch.no_grad() if self.mode else torch.enable_grad()
        if self.mode:
            self.region.__enter__()

    return enter


def _leave_inference(_: Any) -> Callable[..., None]:
    def leave(self: Any, *error: Any) -> None:
        if self.mode:
            self.region.__exit__(*error)

    return leave


_SWITCHED = "the model switches requires_grad of a parameter on or off while it runs"
_SWITCH_REMEDY = (
    ": call it with weights that are detached (torch.func.functional_call), or detach what it gives"
)


def _fixed_requires_grad(original: Any) -> property:
    """Setting requires_grad of a parameter is refused: in a graph, a parameter is trained everywhere or nowhere."""

    def set_requires_grad(tensor: torch.Tensor, value: bool) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(tensor, nn.Parameter) and value != tensor.requires_grad and not _within_torch(caller):
            raise CaptureError(_SWITCHED + line_of_caller() + _SWITCH_REMEDY)
        original.__set__(tensor, value)

    return property(original.__get__, set_requires_grad)


def _fixed_requires_grad_method(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def set_requires_grad(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (
            isinstance(tensor, nn.Parameter)
            and requires_grad != tensor.requires_grad
            and not _within_torch(caller)
        ):
            raise CaptureError(_SWITCHED + line_of_caller() + _SWITCH_REMEDY)
        return original(tensor, requires_grad)

    return set_requires_grad


def _without_saved_hooks(original: Callable[[Any], None]) -> Callable[[Any], None]:
    """A backward pass reads the values of the forward pass. torch's own hooks on them, such as saving them on the CPU, change nothing; others
    are refused."""

    def enter(self: saved_tensors_hooks) -> None:
        if not type(self).__module__.startswith("torch.") or type(self) is saved_tensors_hooks:
            raise CaptureError(f"{_HOOK_OF_SAVED}{line_of_caller()}: leave it out")
        original(self)

    return enter


class _GradientNode:
    """The grad_fn of a tensor. Hooks on it are refused, as an export would leave them out."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register"):
            raise CaptureError(_HOOK + line_of_caller())
        return getattr(self._node, name)


def _grad_fn_without_hooks(original: Any) -> property:
    def get(tensor: torch.Tensor) -> Any:
        grad_fn = original.__get__(tensor)
        by_torch = _within_torch(sys._getframe(1).f_globals.get("__name__", ""))
        return grad_fn if grad_fn is None or by_torch else _GradientNode(grad_fn)

    return property(get)


def _within_torch(module: str) -> bool:
    """Whether the caller, by its module's name, is torch itself rather than a method of a torch layer that a model calls."""
    return module.startswith("torch.") and not module.startswith("torch.nn.modules")


def _no_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(tensor: torch.Tensor, **named: Any) -> Any:
        if not _within_torch(sys._getframe(1).f_globals.get("__name__", "")):
            raise CaptureError(
                f"the model takes a tensor out of torch, with numpy(){line_of_caller()}: no graph has what is computed there; "
                "write it with torch, or give what it makes as an array of the data"
            )
        return original(tensor, **named)

    return numpy


def _length_of_known_size(original: Callable[[Any], int]) -> Callable[[Any], int]:
    """len() has to return a number, which a free size is not."""

    def length(tensor: torch.Tensor) -> int:
        if tensor.dim() and not isinstance(tensor.shape[0], int):
            raise CaptureError(
                f"the model takes len() of a tensor whose first size is free{line_of_caller()}: write x.shape[0]"
            )
        return original(tensor)

    return length


def _run_wrapped_module(parallel: nn.DataParallel[Any], *args: Any, **kwargs: Any) -> Any:
    """DataParallel runs its module on several devices; here it is captured once."""
    return parallel.module(*args, **kwargs)


_PACKING_REMEDY = ": give the layer the padded ones, and look the last state of each up with gather, or mask what is behind it"
_PATCHES: tuple[_Patch, ...] = (
    (nn.Module, "to", _unconverted),
    (torch.Tensor, "data", _data_as_detached),
    *((where, n, _unseeded) for where in (torch, torch.random) for n in ("manual_seed", "seed", "set_rng_state")),
    (torch.Tensor, "__len__", _length_of_known_size),
    (torch.Tensor, "__getitem__", masked_rows.getitem),
    (torch.Tensor, "__setitem__", masked_rows.setitem),
    *((where, "masked_select", masked_rows.masked_select) for where in (torch, torch.Tensor)),
    (torch, "where", masked_rows.where),
    *((where, "nonzero", masked_rows.nonzero) for where in (torch, torch.Tensor)),
    *((where, "index_add", masked_rows.index_add) for where in (torch, torch.Tensor)),
    (torch.Tensor, "index_add_", masked_rows.index_add),
    (torch.Tensor, "__rfloordiv__", layers.number_and_tensor(torch.floor_divide)),
    (torch.Tensor, "__rmod__", layers.number_and_tensor(torch.remainder)),
    (torch.inference_mode, "__enter__", _inference_as_no_grad),
    (torch.inference_mode, "__exit__", _leave_inference),
    (torch, "sym_min", _provable_choice(lambda a, b: a <= b)),
    (torch, "sym_max", _provable_choice(lambda a, b: a >= b)),
    (transformer, "_detect_is_causal_mask", _causal_only_if_given),
    (Distribution, "_validate_args", lambda _: False),
    (opt_einsum, "get_opt_einsum", _contraction_order),
    *((functional, f"adaptive_max_pool{n}d", layers.adaptive_max_pool(n)) for n in (1, 2, 3)),
    (functional, "embedding_bag", layers.embedding_bag),
    (functional, "one_hot", layers.one_hot),
    (functional, "bilinear", layers.bilinear),
    (functional, "gaussian_nll_loss", layers.gaussian_nll_loss),
    *((where, "outer", layers.outer) for where in (torch, torch.Tensor)),
    *((where, "take_along_dim", layers.take_along_dim) for where in (torch, torch.Tensor)),
    *((where, name, change) for where in (torch, torch.Tensor) for name, change in (("chunk", layers.chunk), ("split", layers.split))),
    *((where, name, change) for where in (torch, torch.Tensor) for name, change in (("topk", topk_masks.topk), ("scatter", topk_masks.scatter))),
    *((where, name, layers.diagonal) for where in (torch, torch.Tensor) for name in ("diag", "diagonal")),
    (torch, "cdist", layers.cdist),
    *((where, "bincount", layers.bincount) for where in (torch, torch.Tensor)),
    *((where, "histc", layers.histc) for where in (torch, torch.Tensor)),
    (torch, "fake_quantize_per_tensor_affine", layers.fake_quantize(axis=False)),
    (torch, "fake_quantize_per_channel_affine", layers.fake_quantize(axis=True)),
    (torch, "searchsorted", layers.searchsorted),
    *((where, "ctc_loss", ctc.ctc_loss) for where in (torch, functional)),
    *((where, name, change) for where in (torch, torch.Tensor) for name, change in (("cov", layers.cov), ("corrcoef", layers.corrcoef))),
    (torch.Tensor, "fill_diagonal_", layers.fill_diagonal_),
    (torch.fft, "fft", fourier.fft()),
    (torch.fft, "ifft", fourier.fft(inverse=True)),
    (torch.fft, "rfft", fourier.rfft),
    (torch.fft, "irfft", fourier.irfft),
    *((torch.fft, f"{kind}{n}", fourier.fftn(kind, kind, dims)) for kind in ("fft", "ifft") for n, dims in (("2", (-2, -1)), ("n", None))),
    *((torch.fft, f"rfft{n}", fourier.fftn("rfft", "fft", dims)) for n, dims in (("2", (-2, -1)), ("n", None))),
    *((torch.fft, f"irfft{n}", fourier.fftn("irfft", "ifft", dims, last_first=False)) for n, dims in (("2", (-2, -1)), ("n", None))),
    (torch, "stft", fourier.stft),
    (torch, "istft", fourier.istft),
    (torch._VF, "_pack_padded_sequence", _refusing("the model packs sequences", _PACKING_REMEDY)),
    (torch.Tensor, "numpy", _no_numpy),
    (functional, "instance_norm", layers.instance_norm),
    (nn.DataParallel, "forward", lambda _: _run_wrapped_module),
    (torch.Tensor, "unfold", layers.unfold),
    *((where, f"conv{n}d", layers.convolution_in_groups(n)) for where in (torch, functional) for n in (1, 2)),
    *((where, name, layers.fixed_groups) for where in (torch, functional) for name in ("conv3d", *(f"conv_transpose{n}d" for n in (1, 2, 3)))),
    (nn.AdaptiveLogSoftmaxWithLoss, "forward", layers.adaptive_log_softmax),
    (batchnorm._BatchNorm, "forward", layers.batch_norm_forward),
)  # fmt: skip
_RANDOM_PATCHES: tuple[_Patch, ...] = (
    *((torch, n, _masked_draw(n)) for n in ("rand", "randn", "randperm", "rand_like", "randn_like", "randint", "randint_like", "bernoulli", "normal")),
    *((torch.Tensor, n, _masked_draw(n)) for n in ("bernoulli", "normal_", "uniform_", "bernoulli_", "exponential_")),
    (functional, "rrelu", lambda _: random_draws.rrelu),
    (functional, "dropout1d", lambda _: random_draws.dropout_of_channels(2)),
    (functional, "dropout2d", lambda _: random_draws.dropout_of_channels(None)),
    (functional, "dropout3d", lambda _: random_draws.dropout_of_channels(4)),
    *((torch, n, _refusing("the model draws from a gamma, beta or Dirichlet distribution", ": give what is drawn as an array of the data")) for n in ("_standard_gamma", "_sample_dirichlet")),
)  # fmt: skip
_INNER_GRADIENT = "the model takes a gradient while it runs, which a graph has no place for"
_HOOK = "the model changes a gradient with a hook, which no peer runs"
_HOOK_OF_SAVED = "the model changes what its backward pass reads with torch.autograd.graph.saved_tensors_hooks, which no peer runs"
_GRADIENT_PATCHES: tuple[_Patch, ...] = (
    (CheckpointFunction, "apply", _without_checkpoint),
    (torch.autograd, "grad", _refusing(_INNER_GRADIENT)),
    (torch.autograd, "backward", _refusing(_INNER_GRADIENT)),
    (torch.Tensor, "register_hook", _refusing(_HOOK)),
    (torch.Tensor, "grad_fn", _grad_fn_without_hooks),
    (saved_tensors_hooks, "__enter__", _without_saved_hooks),
    (torch.Tensor, "requires_grad", _fixed_requires_grad),
    (torch.Tensor, "requires_grad_", _fixed_requires_grad_method),
)
