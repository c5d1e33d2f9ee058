"""How one stage's tensors are encoded on the wire, with the masks and residuals that this needs.

    activation   the edge's forward codec; encoded once for all its consumers
    gradient     the edge's backward codec. Where the forward one was sparse, only the elements that the consumer received
                 have a gradient: their values go back in the same order, without their positions (`masked`)
    tie          the variable's forward codec; the sender adds up its own gradient as the others decode it, so that every
                 member of the tie-group ends with the same sum
    evaluation   never sparse: it measures the weights as they are served

The job's table (`TrainConfig.codecs`, `After.codecs`) chooses the codecs of sent tensors; a received tensor names its own,
which must be of a family that the job allows. Encoding and decoding run in a separate thread beside the arithmetic, in the
order in which they were requested, so that error feedback depends on the schedule alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from fusion.compression.codec import codec
from fusion.compression.encoding import LOSSY, Sparse
from fusion.compression.error_feedback import ErrorFeedback
from fusion.compression.spec import parse
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.dims import bind
from fusion.runtime.job.manifest import EdgeCodecs, TrainConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.planes.plane import TrainingStage
from fusion.runtime.training.compute.loss_scale import scale_of, skips
from fusion.runtime.training.step.run_statistics import NO_ATTEMPT, Attempt

P = ParamSpec("P")
T = TypeVar("T")

DENSE = "none"
EVALUATED = "int8"  # in place of a sparse codec

_TensorId = tuple[Attempt, int, int, str]  # attempt, step, microbatch, edge


@dataclass(frozen=True)
class Sent:
    """An encoded tensor."""

    spec: str
    masked: bool
    buffers: Sequence[memoryview]


class StageCodecs:
    """`worker`: the thread that encodes and decodes; None: in the calling thread."""

    def __init__(self, config: TrainConfig, worker: Worker | None = None) -> None:
        self._config = config
        self._worker = worker
        self._table: dict[str, tuple[str, str]] = {}
        self._feedback = ErrorFeedback()
        # Of each sparse activation of the running steps: its codec, and the indices of its elements.
        self._masks: dict[_TensorId, tuple[str, torch.Tensor]] = {}
        self._attempt: Attempt = NO_ATTEMPT
        self.use(config.codecs)

    def use(self, codecs: EdgeCodecs) -> None:
        """Send tensors with the codecs of this table from now on."""
        self._table = {edge: (forward, backward) for edge, forward, backward in codecs}

    def check(self, spec: str) -> None:
        """Raises ValueError for a codec that this job does not allow."""
        parsed = parse(spec)
        if str(parsed) != spec:
            raise ValueError(f"codec {spec[:40]!r} is spelt {str(parsed)!r}")
        if parsed.family not in allowed(self._config):
            raise ValueError(
                f"codec {spec[:40]!r}: this job sends {', '.join(sorted(allowed(self._config)))}"
            )

    # --- out

    async def activation(
        self, attempt: Attempt, step: int, microbatch: int, edge: str, tensor: torch.Tensor, *, evaluate: bool
    ) -> Sent:
        spec = self._spec(edge, 0, tensor)
        if evaluate and parse(spec).family == "topk":
            spec = EVALUATED
        if spec == DENSE:
            return _dense(tensor)
        encoded = await self._run(codec(spec).encode, tensor)
        if encoded.indices is not None and not evaluate:
            self._masks[attempt, step, microbatch, edge] = (spec, encoded.indices)
        return Sent(spec, False, encoded.buffers)

    async def gradient(
        self, attempt: Attempt, step: int, microbatch: int, edge: str, tensor: torch.Tensor
    ) -> Sent:
        mask = self._masks.pop((attempt, step, microbatch, edge), None)
        if mask is not None and self._config.compression.reuse_mask:
            spec, indices = mask
            sparse = codec(spec)
            assert isinstance(sparse, Sparse)  # nothing else has indices
            encoded = await self._run(sparse.encode_at, tensor, indices)
            return Sent(spec, True, encoded.buffers)
        return await self._encoded(edge, self._spec(edge, 1, tensor), tensor)

    async def tie(self, variable: str, tensor: torch.Tensor) -> tuple[Sent, torch.Tensor]:
        """The encoded gradient, and how the others will decode it."""
        corrected = self._feedback.has(variable)
        sent = await self._encoded(variable, self._spec(variable, 0, tensor), tensor)
        if sent.spec == DENSE and not corrected:
            return sent, tensor
        payload = memoryview(bytearray().join(sent.buffers))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return sent, await self._run(codec(sent.spec).decode, payload, tuple(tensor.shape), dtype)

    async def _encoded(self, name: str, spec: str, tensor: torch.Tensor) -> Sent:
        # A dense tensor, too, carries the residual that an earlier codec has left.
        if spec == DENSE and not self._feedback.has(name):
            return _dense(tensor)
        if self._config.compression.error_feedback:
            encoded = await self._run(self._feedback.encode, name, codec(spec), tensor)
        else:
            encoded = await self._run(codec(spec).encode, tensor)
        return Sent(spec, False, encoded.buffers)

    def _spec(self, name: str, direction: int, tensor: torch.Tensor) -> str:
        if str(tensor.dtype).removeprefix("torch.") not in LOSSY:
            return DENSE
        return self._table.get(name, (DENSE, DENSE))[direction]

    # --- in

    async def decode(
        self,
        tensor_id: _TensorId,
        kind: str,
        sent: Sent,
        shape: tuple[int, ...],
        dtype: str,
        *,
        evaluate: bool = False,
    ) -> torch.Tensor:
        """Raises ValueError for bytes that are not a tensor of that shape, and for values of elements that we did not send."""
        (payload,), used = sent.buffers, codec(sent.spec)
        if sent.masked:
            spec, indices = self._masks.get(tensor_id, (DENSE, None))
            if kind != "gradient" or spec != sent.spec or not isinstance(used, Sparse):
                raise ValueError("values for elements that were not sent")
            return await self._run(used.decode_at, payload, shape, dtype, indices)
        if kind == "activation" and isinstance(used, Sparse) and not evaluate:
            decoded = await self._run(used.decode_sparse, payload, shape, dtype)
            if decoded.indices is not None:
                self._masks[tensor_id] = (sent.spec, decoded.indices)
            return decoded.tensor
        return await self._run(used.decode, payload, shape, dtype)

    # --- steps, and the stage's state

    def advance(self, attempt: Attempt, step: int) -> None:
        """Drop the masks of earlier steps and attempts."""
        self._attempt = attempt
        self._masks = {of: mask for of, mask in self._masks.items() if of[:2] >= (attempt, step)}

    def forget(self, attempt: Attempt, edges: Collection[str]) -> None:
        """Drop the masks of these edges in an attempt that we have not begun."""
        self._masks = {of: mask for of, mask in self._masks.items() if of[0] != attempt or of[3] not in edges}

    def apply(self, stage: TrainingStage, learning_rate: float, clip_factor: float) -> Callable[[], None]:
        """The step of `stage` is committed, and with it the residuals. The result, called on the device's thread, updates the weights.
        In float16 a step whose gradients have overflowed changes neither, and residuals are rescaled with the loss scale, like
        the gradients that they will be added to."""
        if skips(stage, clip_factor):
            self._feedback.discard()
        else:
            self.commit()

        def update() -> None:
            before = scale_of(stage)
            stage.apply(learning_rate, clip_factor)
            after = scale_of(stage)
            if after != before:
                self._feedback.rescale(after / before)

        return update

    def commit(self) -> None:
        """The residuals of the step become state."""
        self._feedback.commit()

    async def discard(self) -> None:
        """Drop the running step. What a partner has sent of an attempt that it began before us is kept."""
        self._masks = {of: mask for of, mask in self._masks.items() if of[0] > self._attempt}
        await self._run(self._feedback.discard)  # behind whatever is being encoded

    def state(self) -> dict[str, torch.Tensor]:
        """The residuals, by edge or variable: part of the stage's state."""
        return self._feedback.state()

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._feedback.load(state)

    async def _run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._worker is None:
            return function(*args, **kwargs)
        return await self._worker.run(function, *args, **kwargs)


def allowed(config: TrainConfig) -> frozenset[str]:
    """The codec families that a stage of this job accepts."""
    compression = config.compression
    if compression.kind == "none":
        return frozenset({DENSE})
    families = (
        {parse(compression.codec).family} if compression.kind == "uniform" else set(compression.families)
    )
    return frozenset({DENSE, EVALUATED, *families})


def residual_shapes(stage: Stage, config: TrainConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a stage's residuals, float32 tensors, by edge or variable."""
    if not config.compression.error_feedback:
        return {}
    sizes = config.sizes
    kinds = {edge.name: edge.type for edge in stage.receives if edge.needs_gradient}
    kinds |= {variable.name: variable.type for variable in stage.graph.variables}
    return {
        name: tuple(bind(dim, sizes) for dim in kind.shape)
        for name, kind in kinds.items()
        if kind.dtype in LOSSY
    }


def _dense(tensor: torch.Tensor) -> Sent:
    return Sent(DENSE, False, codec(DENSE).encode(tensor).buffers)
