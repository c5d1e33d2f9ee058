"""What torch's functions do otherwise while a model is exported: where they would ask what no tensor tells that has only a shape,
where they draw random numbers or do what the op-set says otherwise, and where they would leave out, without a word, how the model changes a gradient.
"""

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
from torch.nn.modules import transformer
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
from fusion.runtime.capture.exporting.blocks import SourceLength
from fusion.runtime.capture.exporting.masked_rows import whole
from fusion.runtime.capture.exporting.model_code import line_of_caller
from fusion.runtime.capture.exporting.size_masks import begin_run, same_masks_again
from fusion.runtime.capture.exporting.size_texts import no_size_texts
from fusion.runtime.job.errors import CaptureError

__all__ = [
    "SourceLength",
    "as_exported",
    "begin_run",
    "no_size_texts",
    "require_plain_gradients",
    "same_masks_again",
    "whole",
]

_Change = tuple[Any, str, Callable[[Any], Any]]  # what has it, its name, what stands in its place


@contextmanager
def as_exported(module: nn.Module) -> Iterator[None]:
    """While open, torch's functions are those that the module can be exported with. In training mode, CaptureError where the
    model's code says itself what a gradient is."""
    with ExitStack() as changed:
        changed.enter_context(topk_masks.sizes_at_most(module))
        changed.enter_context(expert_loops.without_loops(module))
        changed.enter_context(dense_experts.with_chosen_alone(module))
        changed.enter_context(sorted_experts.without_sorting(module))
        for where, name, other in [
            *_ASKING,
            *_DRAWING,
            *((*_OF_GRADIENTS, *_functions()) if module.training else ()),
        ]:
            plain = getattr(where, name)
            changed.callback(_put_back, where, name, vars(where).get(name))
            setattr(where, name, other(plain))
        yield


def require_plain_gradients(module: nn.Module) -> None:
    """CaptureError where a hook of the module, a part or a parameter of it may change a gradient: no peer runs it."""
    held: list[tuple[str, Any]] = [*module.named_modules(), *module.named_parameters()]
    for name, part in held:
        for kind in ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks"):
            if getattr(part, kind, None):
                raise CaptureError(
                    f"{name or type(part).__name__} has a backward hook, which no peer runs: leave it out"
                )


def _put_back(where: Any, name: str, own: Any) -> None:
    if own is None:  # it was inherited
        delattr(where, name)
    else:
        setattr(where, name, own)


def _known_order(first: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """The smaller or the larger of two sizes where the range of the sizes tells which it is. torch takes the stride of a view for
    the least of several, and writes that down as a minimum of sizes, be it one of 64 and 64 times the length; what it asks of such
    a stride later holds for every length, but it cannot prove that it does, and refuses the model."""

    def of(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def chosen(a: Any, b: Any) -> Any:
            if isinstance(a, (int, torch.SymInt)) and isinstance(b, (int, torch.SymInt)):
                if statically_known_true(first(a, b)):
                    return a
                if statically_known_true(first(b, a)):
                    return b
            return plain(a, b)

        return chosen

    return of


def _unasked(_: Any) -> Callable[..., bool]:
    """nn.Transformer looks into a mask for whether it is the causal one, which is quicker; the mask does what it says as well."""
    return lambda mask, is_causal=None, size=None: is_causal is True


def _of_example(plain: Callable[[], Any]) -> Callable[[], Any]:
    """In which order an einsum of three tensors or more is contracted goes by their sizes: by those of the example."""

    class Contraction:
        @staticmethod
        def contract_path(equation: str, *operands: torch.Tensor, **options: Any) -> Any:
            shapes = [tuple(_hint(size) for size in operand.shape) for operand in operands]
            return plain().contract_path(equation, *shapes, shapes=True, **options)

    return lambda: Contraction


def _as_it_is(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A module of the dtype and on the device that it is converted to stays as it is. torch would put other parameters in the place
    of its own, which cannot be done to those that have only a shape."""

    def to(module: nn.Module, *args: Any, **options: Any) -> Any:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **options)
        tensors = [*module.parameters(), *module.buffers()]
        numbers = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        moved = device is not None and any(t.device != device for t in tensors)
        converted = dtype is not None and any(t.dtype != dtype for t in numbers)
        return plain(module, *args, **options) if moved or converted or layout is not None else module

    return to


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _refused(what: str, instead: str = "") -> Callable[[Any], Any]:
    def of(_: Any) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise CaptureError(what + line_of_caller() + instead)

        return staticmethod(refuse)

    return of


def _of_ours(name: str) -> Callable[[Any], Any]:
    def of(plain: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **options: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            # How torch finds out what shape an operator of its own has.
            within = caller.startswith(("torch._decomp", "torch._refs", "torch._prims"))
            return (plain if within else getattr(random_draws, name))(*args, **options)

        return draw

    return of


def _recomputed(_: Any) -> Any:
    """torch's checkpoint gives what its function gives, gradients too."""
    return staticmethod(lambda function, preserve_rng_state, *given: function(*given))


def _functions(of: type[torch.autograd.Function] = torch.autograd.Function) -> Iterator[_Change]:
    """Those with a backward pass of their own, which is not what their forward says, are refused where they run."""
    for each in of.__subclasses__():
        yield from _functions(each)
        if not each.__module__.startswith("torch."):
            what = (
                f"{each.__name__} is a torch.autograd.Function with a backward of its own, which no peer runs"
            )
            instead = (
                ": write it with operators of torch, and with detach() where the gradient is another one"
            )
            yield each, "forward", _refused(what, instead)


def _as_detached(plain: Any) -> property:
    """`x.data` is read as `x.detach()`; fake tensors know no memory to share beside autograd. That a model sets it, torch.export
    would leave out."""

    def put(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):
            raise CaptureError(
                f"the model sets .data of a tensor{line_of_caller()}, which a graph has no place for: use another tensor, or copy_() into one without a gradient under torch.no_grad()"
            )
        plain.__set__(tensor, value)

    return property(lambda tensor: tensor.detach(), put)


def _not_seeded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What is drawn follows from the job's seed, the step and the microbatch."""

    def seed(*args: Any, **named: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if not _within_torch(caller) and not caller.startswith("fusion."):
            raise CaptureError(
                f"the model seeds torch's random numbers while it runs{line_of_caller()}: leave it out, a job's seed decides what is drawn; "
                "numbers that are always the same are a buffer"
            )
        return plain(*args, **named)

    return seed


def _as_no_grad(_: Any) -> Callable[[Any], None]:
    """inference_mode is another way to say no_grad, of which an export would see nothing."""

    def enter(self: Any) -> None:
        self.region = torch.no_grad() if self.mode else torch.enable_grad()
        if self.mode:
            self.region.__enter__()

    return enter


def _left(_: Any) -> Callable[..., None]:
    def leave(self: Any, *error: Any) -> None:
        if self.mode:
            self.region.__exit__(*error)

    return leave


_FROZEN = "the model switches requires_grad of a parameter on or off while it runs"
_DETACHED = ": call it with weights that are detached (torch.func.functional_call), or detach what it gives"


def _not_switched(plain: Any) -> property:
    """A parameter is trained or not in all that a graph computes."""

    def put(tensor: torch.Tensor, value: bool) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(tensor, nn.Parameter) and value != tensor.requires_grad and not _within_torch(caller):
            raise CaptureError(_FROZEN + line_of_caller() + _DETACHED)
        plain.__set__(tensor, value)

    return property(plain.__get__, put)


def _not_switched_by_method(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def put(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if (
            isinstance(tensor, nn.Parameter)
            and requires_grad != tensor.requires_grad
            and not _within_torch(caller)
        ):
            raise CaptureError(_FROZEN + line_of_caller() + _DETACHED)
        return plain(tensor, requires_grad)

    return put


def _packed(plain: Callable[[Any], None]) -> Callable[[Any], None]:
    """What a backward pass reads is what the forward pass had; hooks of torch's own, as for saving it on the CPU, change nothing."""

    def enter(self: saved_tensors_hooks) -> None:
        if not type(self).__module__.startswith("torch.") or type(self) is saved_tensors_hooks:
            raise CaptureError(f"{_HOOK_OF_SAVED}{line_of_caller()}: leave it out")
        plain(self)

    return enter


class _GradientNode:
    """What made a tensor, whose hooks an export would leave out."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register"):
            raise CaptureError(_HOOK + line_of_caller())
        return getattr(self._node, name)


def _without_hooks(plain: Any) -> property:
    def get(tensor: torch.Tensor) -> Any:
        made = plain.__get__(tensor)
        within = _within_torch(sys._getframe(1).f_globals.get("__name__", ""))
        return made if made is None or within else _GradientNode(made)

    return property(get)


def _within_torch(caller: str) -> bool:
    """Whether what calls is torch's own business, and not a method of a module that a model calls."""
    return caller.startswith("torch.") and not caller.startswith("torch.nn.modules")


def _within(plain: Callable[..., Any]) -> Callable[..., Any]:
    def array(tensor: torch.Tensor, **named: Any) -> Any:
        if not _within_torch(sys._getframe(1).f_globals.get("__name__", "")):
            raise CaptureError(
                f"the model takes a tensor out of torch, with numpy(){line_of_caller()}: no graph has what is computed there; "
                "write it with torch, or give what it makes as an array of the data"
            )
        return plain(tensor, **named)

    return array


def _counted(plain: Callable[[Any], int]) -> Callable[[Any], int]:
    """len() must be a number, which a size that is free is not."""

    def length(tensor: torch.Tensor) -> int:
        if tensor.dim() and not isinstance(tensor.shape[0], int):
            raise CaptureError(
                f"the model takes len() of a tensor whose first size is free{line_of_caller()}: write x.shape[0]"
            )
        return plain(tensor)

    return length


def _as_its_module(parallel: nn.DataParallel[Any], *given: Any, **named: Any) -> Any:
    """What runs on several devices there is captured once."""
    return parallel.module(*given, **named)


_UNPACKED = ": give the layer the padded ones, and look the last state of each up with gather, or mask what is behind it"
_ASKING: tuple[_Change, ...] = (
    (nn.Module, "to", _as_it_is),
    (torch.Tensor, "data", _as_detached),
    *((where, n, _not_seeded) for where in (torch, torch.random) for n in ("manual_seed", "seed", "set_rng_state")),
    (torch.Tensor, "__len__", _counted),
    (torch.Tensor, "__getitem__", masked_rows.getitem),
    (torch.Tensor, "__setitem__", masked_rows.setitem),
    *((where, "masked_select", masked_rows.masked_select) for where in (torch, torch.Tensor)),
    (torch.Tensor, "__rfloordiv__", layers.of_number(torch.floor_divide)),
    (torch.Tensor, "__rmod__", layers.of_number(torch.remainder)),
    (torch.inference_mode, "__enter__", _as_no_grad),
    (torch.inference_mode, "__exit__", _left),
    (torch, "sym_min", _known_order(lambda a, b: a <= b)),
    (torch, "sym_max", _known_order(lambda a, b: a >= b)),
    (transformer, "_detect_is_causal_mask", _unasked),
    (Distribution, "_validate_args", lambda _: False),
    (opt_einsum, "get_opt_einsum", _of_example),
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
    (torch._VF, "_pack_padded_sequence", _refused("the model packs sequences", _UNPACKED)),
    (torch.Tensor, "numpy", _within),
    (functional, "instance_norm", layers.instance_norm),
    (nn.DataParallel, "forward", lambda _: _as_its_module),
    (torch.Tensor, "unfold", layers.unfold),
)  # fmt: skip
_DRAWING: tuple[_Change, ...] = (
    *((torch, n, _of_ours(n)) for n in ("rand", "randn", "randperm", "rand_like", "randn_like", "randint", "randint_like", "bernoulli", "normal")),
    *((torch.Tensor, n, _of_ours(n)) for n in ("bernoulli", "normal_", "uniform_", "bernoulli_", "exponential_")),
    (functional, "rrelu", lambda _: random_draws.rrelu),
    (functional, "dropout1d", lambda _: random_draws.dropout_of_channels(2)),
    (functional, "dropout2d", lambda _: random_draws.dropout_of_channels(None)),
    (functional, "dropout3d", lambda _: random_draws.dropout_of_channels(4)),
    *((torch, n, _refused("the model draws from a gamma, beta or Dirichlet distribution", ": give what is drawn as an array of the data")) for n in ("_standard_gamma", "_sample_dirichlet")),
)  # fmt: skip
_INNER = "the model takes a gradient while it runs, which a graph has no place for"
_HOOK = "the model changes a gradient with a hook, which no peer runs"
_HOOK_OF_SAVED = "the model changes what its backward pass reads with torch.autograd.graph.saved_tensors_hooks, which no peer runs"
_OF_GRADIENTS: tuple[_Change, ...] = (
    (CheckpointFunction, "apply", _recomputed),
    (torch.autograd, "grad", _refused(_INNER)),
    (torch.autograd, "backward", _refused(_INNER)),
    (torch.Tensor, "register_hook", _refused(_HOOK)),
    (torch.Tensor, "grad_fn", _without_hooks),
    (saved_tensors_hooks, "__enter__", _packed),
    (torch.Tensor, "requires_grad", _not_switched),
    (torch.Tensor, "requires_grad_", _not_switched_by_method),
)
