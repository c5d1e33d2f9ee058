"""The state of a job at a step, as blobs: one safetensors shard per stage and an index that names them.

A shard holds `variable/<name>` and `optimizer/<name>/<slot>` (`TrainingStage.state`), with error feedback the codecs' residuals
`codec/<edge or variable>`, and in float16 the `loss_scale`. That is all state: random numbers are a function of (seed, step,
microbatch, node). The index is msgpack: the shards' digests and the ledger of the step. A snapshot is durable once every
shard is on two peers, where there are two: `Collector` tracks that for the lead, and `copies_away` chooses the second one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from safetensors import SafetensorError, safe_open

from fusion.compression.codec import DTYPES
from fusion.dag.cutting.positional import counted_batches
from fusion.dag.cutting.stage import Stage
from fusion.dag.ir.graph import TensorType
from fusion.runtime.job.errors import JobError
from fusion.runtime.job.fields import build, plain
from fusion.runtime.planes.stage_values import OPTIMIZER, VARIABLE, stage_state, state_parts
from fusion.runtime.planes.weights_file import STORED_DTYPES, check_header, tensors_bytes_of
from fusion.runtime.training.compute.loss_scale import LOSS_SCALE, scale_state
from fusion.runtime.training.data.ledger import Ledger
from fusion.runtime.training.step.checkpoint import Checkpoint
from fusion.runtime.training.step.history import UNKNOWN, Version
from fusion.runtime.training.step.messages import NEXT_STAGE
from fusion.swarm.directory.records import MAX_STEP, Digest, JobId, is_digest
from fusion.swarm.transport import PeerId

INDEX_VERSION = 2  # 1 had no ledger
MAX_INDEX_BYTES = 1 << 20
STATE_COPIES = 9  # of a variable in a shard: itself, and slots of up to float64 for float16 (4 times as wide)
CODEC = "codec/"
STATE = "state"  # in the metadata of a shard: the version of the state
assert set(STORED_DTYPES.values()) == set(DTYPES)  # a snapshot keeps whatever a graph can name
NO_RESIDUALS: Mapping[str, tuple[int, ...]] = {}


@dataclass(frozen=True, kw_only=True)
class Index:
    job: JobId
    step: int
    shards: tuple[Digest, ...]  # by stage
    ledger: Ledger  # of `step`
    history: str = UNKNOWN  # of the state of all shards
    version: int = INDEX_VERSION

    def checkpoint(self, digest: Digest) -> Checkpoint:
        """The checkpoint of this index, whose blob has the digest `digest`."""
        return Checkpoint(step=self.step, digest=digest, ledger=self.ledger, history=self.history)


def encode_index(index: Index) -> bytes:
    packed: bytes = msgpack.packb(plain(index))
    return packed


def decode_index(data: bytes, job: JobId, stages: int) -> Index:
    """The index of a snapshot of `job`, a job of `stages` stages. Raises JobError for anything else."""
    try:
        value: Any = msgpack.unpackb(
            data[: MAX_INDEX_BYTES + 1], strict_map_key=True, max_str_len=128, max_array_len=stages, max_map_len=8,
            max_bin_len=0, max_ext_len=0,
        )  # fmt: skip
        version = value.get("version") if isinstance(value, dict) else None
        if isinstance(version, int) and version != INDEX_VERSION:
            raise JobError(f"the index of a snapshot of version {version}: this peer knows {INDEX_VERSION}")
        index = build(Index, value, known_only=True)
        _check_ledger(index)
    except (ValueError, msgpack.UnpackException) as error:
        raise JobError(f"not the index of a snapshot: {error}") from None
    if (
        index.job != job
        or len(index.shards) != stages
        or not 0 <= index.step <= MAX_STEP
        or not all(map(is_digest, index.shards))
    ):
        raise JobError(
            f"the index of a snapshot of another job ({index.job[:12]}, {len(index.shards)} stages)"
        )
    return index


def _check_ledger(index: Index) -> None:
    if index.ledger.steps != index.step or index.ledger.samples < 0:
        raise ValueError(f"a ledger of {index.ledger.steps} steps with the state of step {index.step}")
    if not is_digest(Digest(index.ledger.head)):
        raise ValueError("the head of a ledger is a SHA-256 in hex")
    if index.history != UNKNOWN and not is_digest(Digest(index.history)):
        raise ValueError("a history is a SHA-256 in hex")


def save(tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors, one at a time: the library would hold a second copy of all of them. Raises OSError."""
    with path.open("wb") as file:
        for piece in tensors_bytes_of(tensors, metadata).pieces:
            file.write(piece)


def bytes_of(
    tensors: Mapping[str, torch.Tensor], version: Version
) -> tuple[int, Iterator[bytes | memoryview]]:
    """The shard of that state: its size, and its bytes, produced lazily, one tensor at a time."""
    shard = tensors_bytes_of(tensors, marked(version))
    return shard.size_bytes, shard.pieces


def marked(version: Version) -> dict[str, str]:
    """The metadata of a shard of that state. A single entry, since safetensors writes several in any order."""
    return {STATE: f"{version.step} {version.history}"}


def load_weights(path: Path, stage: Stage) -> dict[str, torch.Tensor]:
    """The initial weights of a stage. Raises JobError where a variable is missing, unknown, or of another shape or dtype; all
    from the header, before any data is read."""
    wanted = {variable.name: variable.type for variable in stage.graph.variables}
    with _checked(path, wanted, {}) as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def load_state(
    path: Path,
    stage: Stage,
    residuals: Mapping[str, tuple[int, ...]] = NO_RESIDUALS,
    version: Version | None = None,
) -> dict[str, torch.Tensor]:
    """The shard of a stage, checked as by `load_weights`; optimizer slots are scalars or as large as their variable.
    `residuals`: edge or variable -> shape of its codec's residual. Raises JobError, too, where the shard declares another
    state than `version`."""
    with _state_of(path, stage, residuals, version) as file:
        return {name: file.get_tensor(name) for name in sorted(file.keys())}


def check_state(path: Path, stage: Stage, residuals: Mapping[str, tuple[int, ...]], version: Version) -> None:
    """Raises JobError for a shard that `load_state` would refuse. Reads its header alone."""
    with _state_of(path, stage, residuals, version):
        pass


def variables(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The variables of a shard, by name."""
    return state_parts(state)[0]


def untrained(weights: Mapping[str, torch.Tensor], *, scaled: bool = False) -> dict[str, torch.Tensor]:
    """The initial state of a stage: its variables without optimizer slots; `scaled`: with the initial loss scale, for float16."""
    state = stage_state(weights, {})
    return {**state, LOSS_SCALE: scale_state()} if scaled else state


def count_batches(exported: dict[str, torch.Tensor], stages: Iterable[Stage], runs: int) -> None:
    """Add `runs` microbatches to the batch counters of batch normalisation, as training in one process would have."""
    for stage in stages:
        for name, count in counted_batches(stage.graph).items():
            if name in exported:
                exported[name] = exported[name] + runs * count


def residuals(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The codecs' residuals in a shard, by edge or variable."""
    return {key.removeprefix(CODEC): value for key, value in state.items() if key.startswith(CODEC)}


def _state_of(
    path: Path, stage: Stage, residuals: Mapping[str, tuple[int, ...]], version: Version | None
) -> AbstractContextManager[Any]:
    types = {variable.name: variable.type for variable in stage.graph.variables}
    wanted = {VARIABLE + name: kind for name, kind in types.items()}
    return _checked(path, wanted, types, residuals, version)


@contextmanager
def _checked(
    path: Path,
    wanted: Mapping[str, TensorType],
    slots: Mapping[str, TensorType],
    left_out: Mapping[str, tuple[int, ...]] = NO_RESIDUALS,
    version: Version | None = None,
) -> Iterator[Any]:
    """The file, once its header is found to be right."""
    check_header(path, (*wanted, *left_out), STATE_COPIES)
    try:
        with safe_open(path, framework="pt") as file:
            if version is not None:
                _check_version((file.metadata() or {}).get(STATE), version)
            names = set(file.keys())
            missing = sorted(set(wanted) - names)
            if missing:
                raise JobError(f"a weights blob lacks {missing[0]}" + _more(missing))
            for name in sorted(names):
                part = file.get_slice(name)
                _check(name, list(part.get_shape()), str(part.get_dtype()), wanted, slots, left_out)
            yield file
    except SafetensorError as error:
        raise JobError(f"a weights blob is not safetensors: {error}") from None


def _check_version(declared: str | None, version: Version) -> None:
    if declared is None:  # from an older peer
        return
    step, _, history = declared.partition(" ")
    if step != str(version.step) or not version.matches(replace(version, history=history)):
        raise JobError(
            f"a shard of state {declared[:24]} in a snapshot of state {marked(version)[STATE][:24]}"
        )


def _check(
    name: str,
    shape: list[int],
    dtype: str,
    wanted: Mapping[str, TensorType],
    slots: Mapping[str, TensorType],
    left_out: Mapping[str, tuple[int, ...]],
) -> None:
    kind = wanted.get(name)
    if kind is not None:
        if shape != list(kind.shape) or STORED_DTYPES.get(dtype) != kind.dtype:
            raise JobError(f"{name} is {dtype}{shape}: the graph says {kind}")
        return
    if name == LOSS_SCALE:
        if (shape, dtype) != ([2], "F64"):
            raise JobError(f"{name} is {dtype}{shape}: two numbers of float64 are what it has")
        return
    if name.startswith(CODEC):
        right = left_out.get(name.removeprefix(CODEC))
        if right is None or shape != list(right) or dtype != "F32":
            raise JobError(f"{name[:200]} is {dtype}{shape}: nothing that a codec of this stage leaves out")
        return
    owner, _, _ = name.removeprefix(OPTIMIZER).rpartition("/")
    if not name.startswith(OPTIMIZER) or owner not in slots:
        raise JobError(f"a weights blob has {name[:200]!r}, which the stage does not")
    if shape not in ([], list(slots[owner].shape)) or dtype not in STORED_DTYPES:
        raise JobError(f"{name} is {dtype}{shape}: not the state of an optimizer of {slots[owner]}")


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


UNASKED = Ledger(steps=-1)
SAVED_ANEW = 8  # times in one snapshot: the index is written, and asked of everybody, for each
FURTHEST = 2  # stages away, the owner that holds the second copy of a shard


def copies_away(last: int, able: int, owners: Mapping[int, PeerId], stages: int) -> int:
    """How far from its stage the second copy of each shard goes, after those of the snapshot before went `last` stages away: where
    two neighbours vanish at once, no copy of the one's shard is left that the other had, but those of every other snapshot are
    elsewhere. Where not all stages have owners of their own, or fewer than four, the next one holds it: then it lies on another
    peer in any case. `able`: what every stage can be asked for."""
    apart = stages >= 2 * FURTHEST and len(set(owners.values())) == len(owners) == stages
    return FURTHEST if apart and able >= FURTHEST and last < FURTHEST else NEXT_STAGE


@dataclass(frozen=True, kw_only=True)
class Collector:
    """The shards that the lead has of the snapshot in progress. A new snapshot replaces it. Pure."""

    stages: int
    ledger: Ledger = UNASKED  # of the requested step
    history: str = UNKNOWN  # of its state: shards of another history are ignored
    shards: Mapping[int, Digest] = field(default_factory=dict)
    holders: frozenset[int] = frozenset()
    saved_anew: int = 0  # times that a stage has replaced its shard by another
    seconds: float = 0.0  # the longest that saving held up a stage's device
    furthest: int = FURTHEST  # the largest `away` of `replicate` that every stage supports

    @property
    def step(self) -> int:
        return self.ledger.steps

    @property
    def version(self) -> Version:
        return Version(self.step, self.history)

    def shard(
        self, stage: int, saved: Version, digest: Digest, seconds: float = 0.0, furthest: int = FURTHEST
    ) -> Collector:
        """`stage` has saved its shard, of the state `saved`."""
        another = self.shards.get(stage, digest) != digest
        if not saved.matches(self.version) or (another and self.saved_anew >= SAVED_ANEW):
            return self
        return replace(
            self,
            shards={**self.shards, stage: digest},
            holders=frozenset() if another else self.holders,
            saved_anew=self.saved_anew + another,
            seconds=max(self.seconds, seconds),
            furthest=min(self.furthest, furthest),
        )

    @property
    def complete(self) -> bool:
        """Whether every stage has saved its shard."""
        return len(self.shards) == self.stages

    @property
    def pending(self) -> frozenset[int]:
        """The stages that have not saved their shard or, once all have, that do not hold their copies."""
        return frozenset(range(self.stages)).difference(self.holders if self.complete else self.shards)

    def index(self, job: JobId) -> Index:
        shards = tuple(self.shards[s] for s in range(self.stages))
        return Index(job=job, step=self.step, shards=shards, ledger=self.ledger, history=self.history)

    def held(self, stage: int, step: int) -> Collector:
        """`stage` holds the index, its own shard and the copies that `replicate` asked for."""
        if step != self.step or not self.complete:
            return self
        return replace(self, holders=self.holders | {stage})

    @property
    def durable(self) -> bool:
        return self.complete and len(self.holders) == self.stages
