from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fusion.compression.codec import codec
from fusion.compression.spec import parse
from fusion.dag.cutting.stage import Edge, Stage
from fusion.dag.ir.dims import symbol
from fusion.dag.ir.graph import Graph, Input, Ref, TensorType, Variable
from fusion.runtime.job.manifest import CompressionConfig, DataConfig, OptimizerConfig, TrainConfig
from fusion.runtime.job.worker import Worker
from fusion.runtime.training.compute.inbox import Inbox, Key, StagePlan
from fusion.runtime.training.compute.stage_codecs import DENSE, EVALUATED, Sent, StageCodecs, residual_shapes
from fusion.swarm.directory.records import Digest
from fusion.swarm.errors import FrameError
from fusion.swarm.transport import Frame

CONFIG = TrainConfig(
    steps=3, microbatches=2, microbatch_size=4, sequence=8, seed=9, optimizer=OptimizerConfig(),
    data=DataConfig(kind="tokens", train=Digest("0" * 64)),
)  # fmt: skip
SHAPE = (4, 8, 16)
X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
G = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
FIRST = (1, 1)


def config(*wire: str, **compression: Any) -> TrainConfig:
    forward, backward = wire or (DENSE, DENSE)
    made = CompressionConfig(
        kind="adaptive", families=("bf16", "fp16", "int8", "int4", "topk"), **compression
    )
    return replace(CONFIG, compression=made, codecs=(("e/0", forward, backward),))


def payload(sent: Sent) -> Sent:
    """As it arrives."""
    return replace(sent, buffers=(memoryview(bytearray().join(sent.buffers)),))


async def there_and_back(one: StageCodecs, two: StageCodecs) -> tuple[torch.Tensor, torch.Tensor, Sent, Sent]:
    """X to the consumer, G back to the producer: what each reads, and what went over the wire."""
    place = (FIRST, 0, 0, "e/0")
    out = await one.activation(FIRST, 0, 0, "e/0", X, evaluate=False)
    seen = await two.decode(place, "activation", payload(out), SHAPE, "float32")
    back = await two.gradient(FIRST, 0, 0, "e/0", G)
    felt = await one.decode(place, "gradient", payload(back), SHAPE, "float32")
    return seen, felt, out, back


@pytest.mark.parametrize("spec", ["bf16", "fp16", "int8", "int4", "topk:0.1", "topk:0.1:int8"])
def test_both_ways_read_what_the_codec_says_and_weigh_what_it_costs(spec: str) -> None:
    async def main() -> None:
        async with Worker() as worker:
            job = config(spec, spec)
            seen, felt, out, back = await there_and_back(StageCodecs(job, worker), StageCodecs(job))
        assert torch.equal(seen, decoded(spec, X))
        assert out.spec == back.spec == spec and not out.masked
        elements, sparse = X.numel(), parse(spec).family == "topk"
        assert size(out) == codec(spec).cost(elements, "float32")
        assert back.masked is sparse
        assert size(back) == parse(spec).payload_bytes_at(elements, 4)
        if sparse:  # where the consumer saw nothing, nothing comes back
            assert torch.equal(felt != 0, seen != 0) and torch.equal(
                felt[felt != 0].sign(), G[seen != 0].sign()
            )
        else:
            assert torch.equal(felt, decoded(spec, G))

    asyncio.run(main())


def test_without_reuse_the_gradient_chooses_its_own_elements() -> None:
    async def main() -> None:
        job = config("topk:0.1", "topk:0.05", reuse_mask=False)
        _, felt, _, back = await there_and_back(StageCodecs(job), StageCodecs(job))
        assert (back.spec, back.masked) == ("topk:0.05", False)
        assert torch.equal(felt, decoded("topk:0.05", G))

    asyncio.run(main())


def test_a_discarded_step_leaves_the_elements_of_an_attempt_that_its_producer_began_before() -> None:
    """Else the gradient would go back otherwise than in a run in which nothing was discarded."""

    async def main() -> None:
        one, two = StageCodecs(config("topk:0.1", "int8")), StageCodecs(config("topk:0.1", "int8"))
        two.advance(FIRST, 0)
        for attempt in (FIRST, (1, 2)):
            out = await one.activation(attempt, 0, 0, "e/0", X, evaluate=False)
            await two.decode((attempt, 0, 0, "e/0"), "activation", payload(out), SHAPE, "float32")
        await two.discard()
        assert len(two._masks) == 1
        two.advance((1, 2), 0)
        back = await two.gradient((1, 2), 0, 0, "e/0", G)
        assert (back.spec, back.masked) == ("topk:0.1", True)

    asyncio.run(main())


def test_edges_that_the_table_does_not_name_and_whole_numbers_go_as_they_are() -> None:
    async def main() -> None:
        codecs = StageCodecs(config("int8", "int8"))
        assert (await codecs.activation(FIRST, 0, 0, "f/0", X, evaluate=False)).spec == DENSE
        whole = torch.arange(9)
        assert (await codecs.activation(FIRST, 0, 0, "e/0", whole, evaluate=False)).spec == DENSE

    asyncio.run(main())


def test_evaluation_leaves_nothing_out() -> None:
    async def main() -> None:
        assert (
            await StageCodecs(config("topk:0.01", "none")).activation(FIRST, 0, 0, "e/0", X, evaluate=True)
        ).spec == EVALUATED
        assert (
            await StageCodecs(config("bf16", "none")).activation(FIRST, 0, 0, "e/0", X, evaluate=True)
        ).spec == "bf16"

    asyncio.run(main())


def test_every_member_of_a_tie_group_adds_up_the_same() -> None:
    async def main() -> None:
        one = StageCodecs(config("int8", "none"))
        sent, read = await one.tie("e/0", G)
        theirs = await StageCodecs(config()).decode(
            (FIRST, 0, 0, "e/0"), "tie", payload(sent), SHAPE, "float32"
        )
        assert sent.spec == "int8" and torch.equal(read, theirs)

    asyncio.run(main())


def test_what_is_left_out_is_state_once_it_is_committed() -> None:
    async def main() -> None:
        job = config("none", "topk:0.05", error_feedback=True)
        codecs = StageCodecs(job)
        first = await codecs.gradient(FIRST, 0, 0, "e/0", G)
        await codecs.discard()
        assert codecs.state() == {}
        again = await codecs.gradient((1, 2), 0, 0, "e/0", G)
        assert payload(again) == payload(first)
        codecs.commit()
        (left,) = codecs.state().values()
        assert torch.allclose(left + decoded("topk:0.05", G), G, atol=1e-6)
        other = StageCodecs(job)
        other.load(codecs.state())
        one, two = [await c.gradient((1, 3), 1, 0, "e/0", X) for c in (codecs, other)]
        assert (
            payload(one) == payload(two) != payload(await StageCodecs(job).gradient((1, 3), 1, 0, "e/0", X))
        )

    asyncio.run(main())


def test_what_is_left_out_goes_with_the_next_tensor_also_where_that_is_whole() -> None:
    """As a live table has it, which may send an edge as it is from one step to the next."""

    async def main() -> None:
        lossy, whole = (config(spec, spec, error_feedback=True).codecs for spec in ("int4", DENSE))
        async with Worker() as worker:
            codecs = StageCodecs(config("int4", "int4", error_feedback=True), worker)
            await codecs.gradient(FIRST, 0, 0, "e/0", G)
            codecs.commit()
            owed = codecs.state()["e/0"]
            codecs.use(whole)
            sent, read = await codecs.tie("e/0", X)  # under the same name: the one that holds a residual
            theirs = await StageCodecs(config()).decode(
                (FIRST, 1, 0, "e/0"), "tie", payload(sent), SHAPE, "float32"
            )
            assert torch.equal(theirs, X + owed) and torch.equal(read, theirs)
            await codecs.discard()
            again = [await codecs.gradient((1, 2), 1, m, "e/0", X) for m in (0, 1)]
            assert payload(again[0]) == payload(sent) and again[0].spec == DENSE
            assert size(again[1]) == size(sent) and again[1].buffers[0] == memoryview(X.numpy()).cast("B")
            codecs.commit()
            assert codecs.state() == {}
            codecs.use(lossy)
            fresh = StageCodecs(config("int4", "int4"))
            after = [await c.gradient((1, 2), 2, 0, "e/0", G) for c in (codecs, fresh)]
            assert payload(after[0]) == payload(after[1])

    asyncio.run(main())


def test_values_for_elements_that_were_never_sent_are_refused() -> None:
    async def main() -> None:
        job = config("topk:0.1", "topk:0.1")
        producer, consumer = StageCodecs(job), StageCodecs(job)
        _, _, out, back = await there_and_back(producer, consumer)
        forged = payload(back)
        for place, kind, sent in (
            ((FIRST, 1, 0, "e/0"), "gradient", forged),
            ((FIRST, 0, 0, "f/0"), "gradient", forged),
            ((FIRST, 0, 0, "e/0"), "activation", forged),
            ((FIRST, 0, 0, "e/0"), "gradient", replace(forged, spec="topk:0.2")),
            ((FIRST, 0, 0, "e/0"), "gradient", replace(payload(out), masked=True)),
        ):
            with pytest.raises(ValueError, match=r"were not sent|are right"):
                await producer.decode(place, kind, sent, SHAPE, "float32")
        producer.advance(FIRST, 1)
        with pytest.raises(ValueError, match="were not sent"):
            await producer.decode((FIRST, 0, 0, "e/0"), "gradient", forged, SHAPE, "float32")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("spec", "says"),
    [("topk:0.10", "is spelt"), ("zip", "not known"), ("int4", "this job sends bf16, int8, none")],
)
def test_a_job_takes_only_the_codecs_that_it_allows(spec: str, says: str) -> None:
    made = replace(CONFIG, compression=CompressionConfig(kind="adaptive", families=("bf16", "int8")))
    with pytest.raises(ValueError, match=says):
        StageCodecs(made).check(spec)
    with pytest.raises(ValueError, match="this job sends none"):
        StageCodecs(CONFIG).check("int8")


# --- through the inbox

VALUE = TensorType((symbol("batch"), symbol("sequence"), 16), "float32")
EDGE = Edge("e/0", Ref("e"), VALUE, producer=0, consumers=(1,), needs_gradient=True)
STAGE = Stage(
    1, Graph((Input("e/0", VALUE),), (Variable("w", TensorType((2, 3), "float32")),), (), ()), (EDGE,), (), ()
)
PLAN = StagePlan(stage=STAGE, stages=2, ties=(), sizes={"batch": 4, "sequence": 8})


def frame(sent: Sent, **changes: object) -> Frame:
    header: Mapping[str, object] = {
        "term": 1, "attempt": FIRST, "step": 0, "microbatch": 0, "edge": "e/0", "codec": sent.spec,
        "dtype": "float32", "shape": list(SHAPE), "masked": sent.masked, **changes,
    }  # fmt: skip
    return Frame("activation", dict(header), payload(sent).buffers[0])


def test_the_inbox_decodes_and_refuses() -> None:
    async def main() -> None:
        job = config("topk:0.1", "none")
        async with Worker() as worker:
            inbox = Inbox(PLAN, job, StageCodecs(job, worker))
            inbox.advance(FIRST, 0)
            sent = await StageCodecs(job).activation(FIRST, 0, 0, "e/0", X, evaluate=False)
            work = inbox.offer(0, frame(sent))
            assert work is not None
            await work
            assert torch.equal(await inbox.take(Key("activation", 0, 0, "e/0", 0)), decoded("topk:0.1", X))
            cut = replace(sent, buffers=[payload(sent).buffers[0][:-1]])
            work = inbox.offer(0, frame(cut, microbatch=1))
            assert work is not None
            with pytest.raises(FrameError, match="are right"):
                await work
            with pytest.raises(FrameError, match="not known"):
                inbox.offer(0, frame(replace(sent, spec="rot13")))
            late = inbox.offer(0, frame(sent, microbatch=1))
            inbox.advance((2, 1), 0)
            assert late is not None
            await late  # of an attempt that ended while it was decoded: nobody gets it

    asyncio.run(main())


def test_residuals_are_those_of_gradients_and_tied_variables() -> None:
    assert residual_shapes(STAGE, config()) == {}
    assert residual_shapes(STAGE, config(error_feedback=True)) == {"e/0": SHAPE, "w": (2, 3)}


def decoded(spec: str, tensor: torch.Tensor) -> torch.Tensor:
    encoded = codec(spec).encode(tensor)
    data = memoryview(bytearray().join(encoded.buffers))
    return codec(spec).decode(data, tuple(tensor.shape), "float32")


def size(sent: Sent) -> int:
    buffers: Sequence[memoryview] = sent.buffers
    return sum(buffer.nbytes for buffer in buffers)


def test_what_is_known_of_attempts_ahead_is_bounded_by_the_plan() -> None:
    async def main() -> None:
        job = config("topk:0.1", "none")
        inbox = Inbox(PLAN, job, StageCodecs(job))
        inbox.advance(FIRST, 0)
        sent = await StageCodecs(job).activation(FIRST, 0, 0, "e/0", X, evaluate=False)
        for count in range(2, 40):
            for microbatch in range(2):
                work = inbox.offer(0, frame(sent, attempt=(1, count), microbatch=microbatch))
                assert work is not None
                await work
        assert set(inbox.codecs._masks) == {((1, 39), 0, m, "e/0") for m in range(2)}
        assert set(inbox._held) == {FIRST, (1, 39)} and len(inbox._held[1, 39]) == 2

    asyncio.run(main())
