"""Which tokens end an answer, and from when on: the tokens of the whole model, with guesses and without, many answers at once,
and whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served import PROMPTS, VOCABULARY, Swarm, model, reference, swarm_of

from fusion.runtime.job.errors import JobError
from fusion.runtime.serving.answers.answer_text import AnswerText
from fusion.runtime.serving.answers.failover import FailoverConfig
from fusion.runtime.serving.requests.client import generate
from fusion.runtime.serving.requests.ends import Ends
from fusion.runtime.serving.requests.request import Answer, GenerateRequest
from fusion.runtime.serving.requests.sampling_params import Sampling
from fusion.runtime.serving.ring import drafting
from fusion.runtime.serving.ring.guesses import RepeatDrafter
from fusion.runtime.serving.ring.sampling import sample
from fusion.runtime.serving.ring.session import Opening
from fusion.runtime.serving.ring.stage_session import Outcome, StageRunner
from fusion.swarm.errors import RemoteError
from fusion.swarm.transport import PeerId

PROMPT = tuple(PROMPTS[1])
TOKENS = 60
PATIENT = FailoverConfig(recover_seconds=60)
FREE = tuple(reference("llama", PROMPT, TOKENS))
END, OTHER = FREE[3], FREE[20]  # the model's end token, and one that is said later
RULES = {
    "the models own": Ends(),
    "ignored": Ends(ignore_eos=True),
    "not before": Ends(min_tokens=30),
    "others too": Ends(stop_token_ids=(FREE[1],)),
    "others alone": Ends(ignore_eos=True, stop_token_ids=(OTHER,)),
    "all of it": Ends(ignore_eos=True, stop_token_ids=(OTHER, FREE[1]), min_tokens=12),
}
SAMPLINGS = {"greedy": Sampling(), "seeded": Sampling(temperature=0.7, seed=11)}


@functools.cache
def expected(ends: Ends, sampling: Sampling) -> tuple[int, ...]:
    """No cache, no swarm, no class of ours but what draws: what an answer is by the rule."""
    ending = {*ends.stop_token_ids, *(() if ends.ignore_eos else (END,))}
    tokens = list(PROMPT)
    for index in range(TOKENS):
        with torch.no_grad():
            logits = model("llama")(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        if index < ends.min_tokens:
            logits[list(ending)] = -torch.inf
        tokens.append(sample(logits, sampling, len(tokens)))
        if tokens[-1] in ending:
            break
    return tuple(tokens[len(PROMPT) :])


async def answers(swarm: Swarm, *, while_there: dict[int, Any] | None = None) -> None:
    """All of them at once; each is what it is to be. `while_there`: what to do when the longest has so many tokens."""
    things = dict(while_there or {})

    async def one(gateway: int, ends: Ends, sampling: Sampling, guesses: bool) -> None:
        request = GenerateRequest(
            prompt_ids=PROMPT, max_tokens=TOKENS, sampling=sampling, ends=ends, guesses=guesses
        )
        peer = swarm.peers[gateway].id

        async def another(gone: frozenset[PeerId]) -> PeerId | None:
            return swarm.peers[-1].id

        async with (
            swarm.client() as transport,
            aclosing(generate(transport, peer, request, another)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, Answer):
                    wanted = expected(ends, sampling)
                    assert piece.tokens == wanted, (ends, sampling, guesses)
                    assert piece.finish == ("length" if len(wanted) == TOKENS else "stop")
                    return
                for at in [at for at in things if piece.index >= at]:
                    things.pop(at)()
        raise AssertionError("no answer")

    asked = [(e, s, g) for e in RULES.values() for s in SAMPLINGS.values() for g in (False, True)]
    await asyncio.gather(*(one(-2, *each) for each in asked))
    assert not things


def test_the_rules_are_told_apart() -> None:
    for sampling in SAMPLINGS.values():
        lengths = {name: len(expected(ends, sampling)) for name, ends in RULES.items()}
        assert lengths["the models own"] < lengths["ignored"] and lengths["not before"] > 30
        assert lengths["the models own"] < TOKENS
    assert END in expected(RULES["ignored"], Sampling())[:-1]
    assert len({expected(ends, Sampling()) for ends in RULES.values()}) == len(RULES)


@pytest.mark.parametrize("stages", [1, 3])
def test_answers_end_by_their_rules_with_guesses_and_without(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, guessed = StageRunner.run, list[int]()
    # A guesser that has read the answers before, but for some mistakes: models with random weights repeat nothing.
    texts = [expected(Ends(ignore_eos=True), sampling) for sampling in SAMPLINGS.values()]
    read = [*PROMPT, *texts[0], *PROMPT, *texts[1]]
    read = [(token + (place % 6 == 0)) % VOCABULARY for place, token in enumerate(read)]
    monkeypatch.setattr(drafting, "RepeatDrafter", lambda tokens: RepeatDrafter([*read, *tokens]))

    def counted(self: StageRunner, turn: Sequence[Any]) -> list[Outcome | Exception]:
        found = run(self, turn)
        guessed.extend(t.id for each in found if isinstance(each, Outcome) for t in each.tokens if t.guessed)
        return found

    monkeypatch.setattr(StageRunner, "run", counted)

    async def main() -> None:
        async with swarm_of(stages + 2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", stages, byte_level=True, serve={"end_tokens": (END,)})
            await answers(swarm)
            await swarm.freed()
        assert guessed, "nothing was guessed"

    asyncio.run(main())


def test_answers_go_on_by_their_rules_whoever_dies(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(6, tmp_path, failover=PATIENT) as swarm:
            job = await swarm.serve("llama", 2, byte_level=True, serve={"end_tokens": (END,)})
            await swarm.stand_by(swarm.peers[2], job, 1)
            await swarm.stand_by(swarm.peers[3], job, 0)
            first, last, gateway = swarm.owners[0].id, swarm.owners[1].id, swarm.peers[-2].id
            deaths = {5: lambda: swarm.network.kill(last), 15: lambda: swarm.network.kill(first)}
            deaths[20] = lambda: swarm.network.kill(gateway)
            await answers(swarm, while_there=deaths)
            await swarm.freed()

    asyncio.run(main())


def test_a_token_that_ends_an_answer_is_no_text_and_one_that_does_not_is(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path, failover=PATIENT) as swarm:
            await swarm.serve("llama", 1, byte_level=True, serve={"end_tokens": (END,)})
            for ends in RULES.values():
                said = expected(ends, Sampling())
                answer = await swarm.ask(prompt_ids=PROMPT, max_tokens=TOKENS, ends=ends)
                assert answer.text == bytes(said if len(said) == TOKENS else said[:-1]).decode()
                again = await swarm.ask(prompt_ids=PROMPT, max_tokens=TOKENS, ends=ends, answered=said)
                assert (again.text, again.tokens, again.finish) == (answer.text, said, answer.finish)

    asyncio.run(main())


@pytest.mark.parametrize("least", [0, 3, 4, 5, 9])
def test_no_stop_text_ends_in_the_first_tokens(least: int, tmp_path: Path) -> None:
    class Letters:
        """A text whose tokens are its letters."""

        def stream(self, prompt: Sequence[int]) -> Any:
            return self

        def push(self, token: int) -> str:
            return chr(token)

        def finish(self) -> str:
            return ""

    text: Any = Letters()
    found = AnswerText(text, (), ("aba",), least)
    for letter in b"xabababx":
        if not found.stopped:
            found.push(letter)
    found.finish()
    ends = next((end for end in (4, 6) if end > least), None)
    assert found.whole == ("xabababx" if ends is None else "xabababx"[: ends - 3])
    assert found.stopped == (ends is not None)


def test_a_last_stage_that_knows_none_of_it_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Opening.from_header.__func__  # type: ignore[attr-defined]
    names = ("ignore_eos", "min_tokens", "stop_token_ids")

    def forgetful(cls: type[Opening], header: Any, **given: Any) -> Opening:
        return read(cls, {name: value for name, value in header.items() if name not in names}, **given)

    monkeypatch.setattr(Opening, "from_header", classmethod(forgetful))

    async def main() -> None:
        async with swarm_of(3, tmp_path) as swarm:
            await swarm.serve("llama", 2, byte_level=True, serve={"end_tokens": (END,)})
            line = "stage 1 of llama on .* is too old to know ignore_eos, min_tokens, stop_token_ids"
            ends = Ends(ignore_eos=True, min_tokens=1, stop_token_ids=(2,))
            with pytest.raises(RemoteError, match=line):
                await swarm.ask(prompt_ids=PROMPT, max_tokens=TOKENS, ends=ends)
            await swarm.freed()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ends": Ends(min_tokens=9), "max_tokens": 8}, "min_tokens: at most max_tokens, which is 8, not 9"),
        ({"ends": Ends(min_tokens=9), "schema": "{}"}, "min_tokens: .* follows a schema ends where"),
        ({"ends": Ends(ignore_eos=True), "schema": "{}"}, "ignore_eos: .* follows a schema ends"),
    ],
)
def test_what_cannot_be_is_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=f"^{message}"):
        GenerateRequest(prompt_ids=(1,), **fields)


def test_a_token_that_the_model_does_not_have_is_one_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with swarm_of(2, tmp_path) as swarm:
            await swarm.serve("llama", 1, byte_level=True)
            with pytest.raises(
                RemoteError, match="stop_token_ids: this model's tokens are 0 to 127, not 128"
            ):
                await swarm.ask(prompt_ids=PROMPT, ends=Ends(stop_token_ids=(1, VOCABULARY)))
            everything = Ends(stop_token_ids=tuple(range(64)), min_tokens=2)
            answer = await swarm.ask(prompt_ids=PROMPT, ends=everything)
            assert min(answer.tokens[:2]) >= 64

    asyncio.run(main())
