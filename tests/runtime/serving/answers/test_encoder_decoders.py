"""Encoder-decoders over three peers: the source goes around the ring once, answers are those of `generate()`, also where a peer dies."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.encoder_decoders import (
    CHANNELS,
    FRAMES,
    POSITIONS,
    START,
    VOCABULARY,
    generated,
    made,
    source,
)
from support.served import Swarm, swarm_of

from fusion.dag.cutting.cuts import legal_cuts
from fusion.runtime.job.manifest import SourceConfig
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.request import GenerateRequest, Piece
from fusion.swarm.directory.records import JobId
from fusion.swarm.errors import RemoteError

pytestmark = [pytest.mark.heavy]

NEW = 30
NEVER, NOT_FIRST = (10, 59), (114, 95)  # what the model would say, and does not


async def serve(swarm: Swarm, family: str, cuts: tuple[int, ...] | None = None) -> JobId:
    features = family == "whisper"
    read = SourceConfig(start=(START,), length=POSITIONS)
    if features:
        read = SourceConfig(
            start=(START,),
            length=FRAMES,
            channels=CHANNELS,
            suppress_tokens=NEVER,
            begin_suppress_tokens=NOT_FIRST,
        )
    config = {"max_sequence": POSITIONS, "vocabulary": VOCABULARY, "source": read}
    return await swarm.serve(family, 3, cuts=cuts, made=made(family), serve=config, opset=2)


def asked(given: torch.Tensor) -> dict[str, Any]:
    if given.is_floating_point():
        return {"features": given.numpy().tobytes()}
    return {"prompt_ids": tuple(given[0].tolist())}


def wanted(family: str, given: torch.Tensor) -> list[int]:
    if family == "whisper":
        withheld = {"suppress_tokens": list(NEVER), "begin_suppress_tokens": list(NOT_FIRST)}
        return generated(made(family)[1], given, NEW, **withheld)
    return generated(made(family)[1], given, NEW)


@pytest.mark.parametrize(
    "family", ["bart", *(pytest.param(each, marks=pytest.mark.slow) for each in ("whisper", "t5"))]
)
def test_answers_together_are_those_of_generate_alone(family: str, tmp_path: Path) -> None:
    lengths = (1, 9, 60)

    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await serve(swarm, family)
            sources = [source(family, n, seed) for seed, n in enumerate(lengths)]
            answers = await asyncio.gather(
                *(
                    swarm.ask(model=family, max_tokens=NEW, guesses=guesses, **asked(given))
                    for given in sources
                    for guesses in (True, False)
                )
            )
            found = [list(answer.tokens) for answer in answers]
            assert found == [wanted(family, given) for given in sources for _ in range(2)]
            assert len({tuple(tokens) for tokens in found}) == len(lengths)
            assert all(answer.cached_tokens == 0 for answer in answers)
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize("cut", ["encoder alone", "two encoders", "one decoder"])
def test_wherever_it_is_cut(cut: str, tmp_path: Path) -> None:
    """The encoder may be on one stage, or two, with the decoder behind; or both in one with nothing of the decoder missing."""
    graph, _ = made("bart")
    legal = legal_cuts(graph)
    first = next(i for i, node in enumerate(graph.nodes) if any(r.name == "input_ids" for r in node.refs()))
    early, late = [c for c in legal if c <= first], [c for c in legal if c > first]
    cuts = {
        "encoder alone": (early[-1], late[len(late) // 2]),
        "two encoders": (early[len(early) // 2], early[-1]),
        "one decoder": (late[1], late[-2]),
    }[cut]
    given = source("bart", 17, 5)

    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await serve(swarm, "bart", cuts)
            answer = await swarm.ask(model="bart", max_tokens=NEW, **asked(given))
            assert list(answer.tokens) == wanted("bart", given)
            assert answer.prompt_tokens == 17

    asyncio.run(main())


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_peer_that_dies_takes_no_token_with_it(victim: int, tmp_path: Path) -> None:
    given = source("bart", 12, 3)

    async def main() -> None:
        async with swarm_of(5, tmp_path) as swarm:
            job = await serve(swarm, "bart")
            await swarm.stand_by(swarm.peers[3], job, 0, 1, 2)
            request = GenerateRequest(model="bart", max_tokens=NEW, **asked(given))
            found: list[int] = []
            gateway = swarm.peers[-1].id
            async with swarm.client() as client, aclosing(generate(client, gateway, request)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Piece):
                        found.append(piece.id)
                        if len(found) == NEW // 2:
                            swarm.network.kill(swarm.owners[victim].id)
            assert found == wanted("bart", given)

    asyncio.run(main())


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await serve(swarm, "bart")

            async def refused(match: str, **fields: Any) -> None:
                with pytest.raises(RemoteError, match=match) as error:
                    await swarm.ask(model="bart", **{"max_tokens": 5, **fields})
                assert "\n" not in str(error.value)

            await refused("source: 1 to 128 tokens, not 129", prompt_ids=(5,) * 129)
            await refused("source: 1 to 128 tokens, not 0", prompt_ids=())
            await refused("tokens are 0 to 119", prompt_ids=(120,))
            await refused("reads text", features=bytes(4 * CHANNELS * FRAMES))
            await refused("at most 127 tokens can follow", prompt_ids=(5,), max_tokens=POSITIONS)

    asyncio.run(main())


@pytest.mark.slow  # Whisper is captured
def test_features_of_another_size_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(4, tmp_path) as swarm:
            await serve(swarm, "whisper")
            for features in (bytes(4 * CHANNELS * (FRAMES - 1)), b""):
                with pytest.raises(RemoteError, match="8 channels of 60 frames"):
                    ids = None if features else (5,)
                    await swarm.ask(model="whisper", max_tokens=5, features=features, prompt_ids=ids)

    asyncio.run(main())
